"""The class that vLLM builds: ``DraftloopProposer``, in every engine process."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from inference.threads import compute_alone
from inference.vllm_plugin.batch import BatchDrafter
from inference.vllm_plugin.guard import Guard
from inference.vllm_plugin.lookup import compile_kernels
from inference.vllm_plugin.ports import ENTRY_POINTS, Connect, Connection, ModelPlace, StepFacts
from inference.vllm_plugin.runner_hook import listen, loaded_runner_class
from inference.vllm_plugin.sampling_repair import repair_sampling

TESTED_VLLM = ("0.32",)
"""Versions that the tests run on; others are tried, and told."""

IDLE_SECONDS = 0.5
"""Without a step for so long, ended requests are reported by themselves."""

STEP = "step"
CLOSE_PRIORITY = 10
"""Of the exit hook: above 0, so that it runs before daemon threads are gone."""

logger = logging.getLogger(__name__)


class DraftloopProposer:
    """Drafts for vLLM, selects per row and per step, and reports what verification revealed.

    Named in vLLM's configuration: ``speculative_config={"method": "custom_class", "model":
    "inference.vllm_plugin.DraftloopProposer", "num_speculative_tokens": K}``. Its settings are
    Draftloop's own: one file (``DRAFTLOOP_CONFIG``) and the environment; see docs/vllm.md.

    Nothing that fails here reaches the engine: it gets no drafts for that step.

    Args:
        vllm_config: vLLM's.
        connect: Makes the connection to the event log; None = the installed one.
        runner_class: Whose steps to listen to; None = the running vLLM's.
    """

    def __init__(
        self,
        vllm_config: Any,
        *,
        connect: Connect | None = None,
        runner_class: Any | None = None,
    ) -> None:
        self._place = model_place(vllm_config)
        self._max_positions = int(vllm_config.model_config.max_model_len)
        self._is_first_rank = is_first_tensor_rank()
        self._connect = connect
        self._guard = Guard(self._count_failure)
        self._lock = threading.Lock()
        self._batch: BatchDrafter | None = None
        self._connection: Connection | None = None
        self._shown: Callable[[], StepFacts] | None = None
        self._last_step = time.monotonic()
        tell_version()
        self._lacking = listen_to(runner_class or loaded_runner_class())

    def load_model(self, target_model: Any = None) -> None:
        """Connect to the event log; vLLM calls this with the model that verifies.

        Raises:
            Exception: What is wrong with the settings, in one line: told before serving begins.
        """
        if not self._is_first_rank:
            return
        self._guard.run("compilation", compile_kernels, None)
        if runs_on_cpu(target_model):
            self._guard.run("sampling check", repair_sampling, False)
        place = with_lent_rows(self._place, target_model)
        self._connection = (self._connect or installed_connection())(place)
        self._batch = BatchDrafter(
            self._connection,
            num_levels=place.num_speculative_tokens,
            max_positions=self._max_positions,
        )
        threading.Thread(target=self._watch_idle, name="draftloop-idle", daemon=True).start()
        # Runs in vLLM's engine processes too, which end without the interpreter's own exit hooks.
        Finalize(None, self.close, exitpriority=CLOSE_PRIORITY)

    def show_call(self, read: Callable[[], StepFacts]) -> None:
        """Note how the facts of the coming step are read; the wrapped runner calls this."""
        self._shown = read

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[np.integer],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return drafts for every row; empty where nothing is drafted.

        Args:
            sampled_token_ids: Tokens that each row emitted in this step.
            num_tokens_no_spec: Verified tokens of each row.
            token_ids_cpu: (rows, positions).
            slot_mappings: Not read.
        """
        nothing: list[list[int]] = [[] for _ in sampled_token_ids]
        batch = self._batch
        if batch is None:
            return nothing
        with self._lock:
            self._last_step = time.monotonic()
            shown, self._shown = self._shown, None
            drafts = self._guard.run(
                STEP,
                lambda: batch.step(
                    sampled_token_ids, num_tokens_no_spec, token_ids_cpu, shown() if shown else None
                ),
                None,
            )
            if drafts is None:
                self._guard.run("forget", batch.forget, None)
        return nothing if drafts is None else drafts

    def close(self) -> None:
        """Report what is at work, send it, and end the threads."""
        with self._lock:
            batch, self._batch = self._batch, None
            if batch is not None:
                self._guard.run("close", batch.close, None)
        connection, self._connection = self._connection, None
        if connection is not None:
            self._guard.run("close", connection.close, None)

    def _count_failure(self, kind: str) -> None:
        if self._connection is not None:
            self._connection.counters.count("failures", drafter=kind)

    def _watch_idle(self) -> None:
        compute_alone()
        while True:
            time.sleep(IDLE_SECONDS / 2)
            with self._lock:
                if self._batch is None:
                    return
                if time.monotonic() - self._last_step > IDLE_SECONDS:
                    self._guard.run("idle", self._batch.close_idle, None)


def model_place(vllm_config: Any) -> ModelPlace:
    """Read off vLLM's configuration what the connection needs."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return ModelPlace(
        model=str(model.model),
        tokenizer=str(getattr(model, "tokenizer", None) or model.model),
        rank=int(getattr(parallel, "data_parallel_rank", 0) or 0),
        num_ranks=int(getattr(parallel, "data_parallel_size", 1) or 1),
        num_speculative_tokens=int(vllm_config.speculative_config.num_speculative_tokens or 0),
    )


def runs_on_cpu(model: Any) -> bool:
    """Tell whether a model is computed on a CPU."""
    first = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
    return first is not None and first.device.type == "cpu"


def with_lent_rows(place: ModelPlace, model: Any) -> ModelPlace:
    """Return the place with the model's embedding and head rows, if heads can borrow them.

    They cannot where the model is split over several processes, or has no such rows.
    """
    inner = getattr(model, "model", None)
    embedding = getattr(getattr(inner, "embed_tokens", None), "weight", None)
    head = getattr(getattr(model, "lm_head", None), "weight", None)
    if head is None or (torch.is_tensor(head) and head.dim() != 2):
        head = embedding
    if not (torch.is_tensor(embedding) and torch.is_tensor(head)):
        return place
    if embedding.shape != head.shape:
        return place
    return replace(place, lent_rows=(embedding.detach(), head.detach()))


def installed_connection() -> Connect:
    """Return what connects proposers to the event log, as the installed package declares it.

    Raises:
        RuntimeError: If there is none.
    """
    for found in entry_points(group=ENTRY_POINTS):
        connect: Connect = found.load()
        return connect
    raise RuntimeError(
        f"no {ENTRY_POINTS!r} entry point is installed: install draftloop in vLLM's environment "
        "(pip install --no-deps draftloop; see docs/vllm.md)"
    )


def listen_to(runner_class: Any | None) -> str:
    """Listen to a runner's steps, and say in one line what is missing if that cannot be."""
    reason = "no vLLM runner is loaded" if runner_class is None else listen(runner_class)
    if reason:
        logger.warning(
            "draftloop works from tokens alone: %s; heads, streams and request ids are off", reason
        )
    return reason


def tell_version() -> None:
    """Warn of a vLLM that was never tested with this."""
    version = str(getattr(sys.modules.get("vllm"), "__version__", ""))
    if version and not version.startswith(tuple(f"{one}." for one in TESTED_VLLM)):
        logger.warning(
            "vLLM %s was not tested with this draftloop, which knows %s: what it lacks is switched "
            "off",
            version,
            ", ".join(TESTED_VLLM),
        )


def is_first_tensor_rank() -> bool:
    """Tell whether this process answers for its tensor-parallel group; others draft nothing."""
    state = sys.modules.get("vllm.distributed.parallel_state")
    try:
        return state is None or state.get_tensor_model_parallel_rank() == 0
    except (AssertionError, AttributeError):
        return True
