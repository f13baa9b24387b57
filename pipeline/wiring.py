"""The target and the worker from settings: here their ports meet their adapters."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from inference.emission import Emitter
from inference.engine import EngineOptions
from inference.model_files import resolve_target
from inference.pool import DrafterPool
from inference.ports import Drafter
from inference.target import Target, load_target
from inference.worker import Worker, WorkerOptions
from pipeline.configuration.settings import Settings, SettingsError
from pipeline.features import FeatureRecorder
from pipeline.messaging.boards import LogEventSender
from pipeline.messaging.event_logs import open_log
from pipeline.messaging.inbox import LogInbox
from pipeline.messaging.traces import TraceContexts
from pipeline.releases.drafters import pool_drafters
from pipeline.releases.heads import HeadLoader
from pipeline.releases.registry import DrafterRegistry
from schemas.events import VerificationEvent

CLOSE_SECONDS = 10.0
"""Longest wait for unsent events when a worker ends."""

Progress = Callable[[str], None]


def open_target(settings: Settings, *, progress: Progress | None = None) -> Target:
    """Load the target, converting it first if it has never been used here."""
    torch.set_num_threads(settings.worker.num_threads)
    device = compute_device(settings.model.device)
    folder = resolve_target(settings.model.path, settings.cache, progress=progress)
    dtype = getattr(torch, settings.model.dtype)
    return load_target(folder, dtype=dtype, device=device, cache=settings.cache)


def compute_device(setting: str) -> str:
    """Return the device that ``model.device`` stands for: ``cpu`` or ``cuda``.

    Raises:
        SettingsError: If it is ``cuda`` and there is none.
    """
    if setting != "cpu" and torch.cuda.is_available():
        return "cuda"
    if setting == "cuda":
        raise SettingsError(
            f"model.device = 'cuda': torch {torch.__version__} finds no CUDA device: install its "
            "CUDA build and the driver, or set model.device to cpu"
        )
    return "cpu"


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker with the threads that connect it; ``close`` ends them."""

    worker: Worker
    emitter: Emitter
    sender: LogEventSender
    inbox: LogInbox
    loader: HeadLoader
    features: FeatureRecorder | None

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> int:
        """Stop following, send what is queued, and return how many events stayed unsent."""
        self.inbox.close()
        return self.emitter.close(timeout_seconds)


class _TappedEmitter:
    """Shows every event to a listener on its way to the emitter."""

    def __init__(self, emitter: Emitter, tap: Callable[[VerificationEvent], None]) -> None:
        self._emitter = emitter
        self._tap = tap

    def emit(self, event: VerificationEvent) -> None:
        """Show and queue the event."""
        self._tap(event)
        self._emitter.emit(event)


def start_worker(
    settings: Settings,
    target: Target,
    *,
    tap: Callable[[VerificationEvent], None] | None = None,
    traces: TraceContexts | None = None,
) -> RunningWorker:
    """Build a worker on a loaded target and start its inbox.

    Args:
        settings: Of the worker.
        target: The verifying model.
        tap: Shown every event as it is emitted, on the serving thread.
        traces: Trace contexts of the requests, for the headers of their events.
    """
    epoch = time.time_ns() // 1000
    features = _feature_recorder(settings, epoch)
    loader = HeadLoader(target, DrafterRegistry(str(settings.data)))
    sender = LogEventSender(
        lambda: open_log(settings),
        source=settings.worker.worker_id,
        trace_headers=(traces or TraceContexts()).headers,
    )
    emitter = Emitter(
        sender,
        capacity=settings.worker.emit_capacity,
        prepare=features.prepare if features else None,
    )
    inbox = LogInbox(
        lambda: open_log(settings),
        loader,
        [one.drafter_id for one in settings.drafters],
        poll_seconds=settings.worker.poll_seconds,
        canary_share=settings.gate.canary_share if settings.gate.enabled else 0.0,
    )
    worker = Worker(
        target,
        DrafterPool(_drafters(settings, target)),
        _worker_options(settings, epoch),
        sink=_TappedEmitter(emitter, tap) if tap else emitter,
        inbox=inbox,
        recorder=features,
    )
    inbox.start()
    return RunningWorker(worker, emitter, sender, inbox, loader, features)


def _drafters(settings: Settings, target: Target) -> list[Drafter]:
    return pool_drafters(
        settings.drafters,
        target,
        resolve=lambda path: resolve_target(path, settings.cache),
        dtype=target.dtype,
    )


def _feature_recorder(settings: Settings, epoch: int) -> FeatureRecorder | None:
    if not settings.features.enabled:
        return None
    return FeatureRecorder(
        str(settings.data),
        worker_id=settings.worker.worker_id,
        worker_epoch=epoch,
        max_bytes=settings.features.max_bytes,
        share=settings.features.share,
    )


def _worker_options(settings: Settings, epoch: int) -> WorkerOptions:
    return WorkerOptions(
        worker_id=settings.worker.worker_id,
        worker_epoch=epoch,
        policy=settings.worker.policy,
        segment_tokens=settings.worker.segment_tokens,
        engine=EngineOptions(
            num_speculative_tokens=settings.worker.num_speculative_tokens,
            score_block=settings.worker.score_block,
            first_level_block=settings.worker.first_level_block,
        ),
    )
