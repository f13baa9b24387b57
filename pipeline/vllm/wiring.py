"""The connection of the proposer inside vLLM: its settings, and the event log.

vLLM's environment finds ``connect`` by the entry point ``draftloop.vllm``, so that ``inference``
need not know of it. What a broker or a disk lacks costs events or releases, never serving.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from inference.drafters import hydra, token_lm
from inference.emission import Emitter
from inference.model_files import ModelFilesError, fingerprint, tokenizer_hash
from inference.ports import Drafter
from inference.vllm_plugin.head_batch import ServedHead
from inference.vllm_plugin.ports import (
    HEAD_KINDS,
    Connection,
    ModelPlace,
    PluginOptions,
    PoolMember,
    TargetFacts,
)
from pipeline.configuration.settings import Settings, load_settings
from pipeline.features import FeatureRecorder
from pipeline.messaging.event_logs import open_log
from pipeline.messaging.event_sender import LogEventSender
from pipeline.messaging.inbox import LogInbox
from pipeline.releases.heads import HeadLoader
from pipeline.releases.registry import ArtifactError, DrafterRegistry
from pipeline.vllm.metrics import VllmCounters, process_counters, serve_metrics
from schemas.checks import IDENTIFIER
from schemas.events import DrafterReleased, DrafterVersion, PolicyPublished

SERVED_KINDS = ("none", "prompt_lookup", "suffix", *HEAD_KINDS)
"""Kinds that draft inside vLLM; others keep their place and propose nothing."""

CLOSE_SECONDS = 10.0
"""Longest wait for unsent events when the engine ends."""

FIRST_LOOK_SECONDS = 5.0
"""Longest that the start of the engine waits for releases that are there already."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LentRows:
    """A target as ``pipeline.releases.drafters.HeadLoader`` sees it."""

    fingerprint: str
    tokenizer_hash: str
    vocab_size: int
    embedding_rows: torch.Tensor
    head_rows: torch.Tensor


class NoInbox:
    """Brings nothing: heads cannot be served here, so no release is waited for."""

    def take_policies(self) -> Sequence[PolicyPublished]:
        """Return no policies."""
        return ()

    def take_drafters(self) -> Sequence[Drafter]:
        """Return no drafters."""
        return ()

    def close(self) -> None:
        """Nothing runs."""


def connect(place: ModelPlace) -> Connection:
    """Read the settings and connect a proposer.

    Raises:
        SettingsError: If the settings cannot be used, in one line.
    """
    return connect_with(load_settings(), place)


def connect_with(
    settings: Settings, place: ModelPlace, counters: VllmCounters | None = None
) -> Connection:
    """Connect a proposer by these settings."""
    epoch = time.time_ns() // 1000
    target = target_facts(settings, place)
    options = plugin_options(settings, place, epoch)
    features = _features(settings, options)
    sender = LogEventSender(lambda: open_log(settings), source=options.worker_id)
    emitter = Emitter(
        sender,
        capacity=settings.worker.emit_capacity,
        prepare=features.prepare if features else None,
    )
    inbox = _inbox(settings, target, options)
    port = settings.vllm.metrics_port
    close_page = serve_metrics(port + place.rank if port else 0)

    def close() -> None:
        inbox.close()
        emitter.close(CLOSE_SECONDS)
        close_page()

    return Connection(
        options=options,
        target=target,
        sink=emitter,
        inbox=inbox,
        recorder=features,
        counters=counters or process_counters(),
        close=close,
    )


def plugin_options(settings: Settings, place: ModelPlace, epoch: int) -> PluginOptions:
    """Return how to draft; several data-parallel ranks have one worker id each."""
    worker_id = settings.worker.worker_id
    unserved = [one for one in settings.drafters if one.kind not in SERVED_KINDS]
    for one in unserved:
        logger.warning(
            "drafter %s: kind %s does not draft inside vLLM yet and proposes nothing",
            one.drafter_id,
            one.kind,
        )
    return PluginOptions(
        worker_id=f"{worker_id}-dp{place.rank}" if place.num_ranks > 1 else worker_id,
        worker_epoch=epoch,
        pool=tuple(
            PoolMember(
                version=DrafterVersion(drafter_id=one.drafter_id, weights_version=0), kind=one.kind
            )
            for one in settings.drafters
        ),
        segment_tokens=settings.worker.segment_tokens,
        default_stream=settings.vllm.default_stream,
        consenting_streams=frozenset(settings.content.consenting_streams),
        history_bytes=settings.vllm.history_bytes,
        shares_streams=settings.vllm.shares_streams,
        scoring_share=settings.vllm.scoring_share,
    )


def target_facts(settings: Settings, place: ModelPlace) -> TargetFacts:
    """Return what is known of vLLM's model; one that is no local folder lends nothing to heads."""
    name = Path(place.model).name
    target_id = name if IDENTIFIER.fullmatch(name) else "target"
    embedding, head = place.lent_rows or (None, None)
    try:
        digest = fingerprint(Path(place.model), settings.cache)
        tokens = tokenizer_hash(AutoTokenizer.from_pretrained(place.tokenizer))
    except (ModelFilesError, OSError, ValueError) as error:
        logger.warning("%s: not fingerprinted, heads are off: %s", place.model, error)
        digest, tokens, embedding, head = "unknown", "unknown", None, None
    return TargetFacts(
        target_id=target_id,
        fingerprint=digest,
        tokenizer_hash=tokens,
        vocab_size=0 if head is None else len(head),
        eos_token_ids=_end_tokens(Path(place.model)),
        embedding_rows=embedding,
        head_rows=head,
    )


def _end_tokens(folder: Path) -> frozenset[int]:
    """Return the ids that end a request, from the files that vLLM reads them from."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((folder / name).read_bytes()).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    return frozenset(found)


def _features(settings: Settings, options: PluginOptions) -> FeatureRecorder | None:
    if not settings.features.enabled:
        return None
    return FeatureRecorder(
        str(settings.data),
        worker_id=options.worker_id,
        worker_epoch=options.worker_epoch,
        max_bytes=settings.features.max_bytes,
    )


def _inbox(settings: Settings, target: TargetFacts, options: PluginOptions) -> LogInbox | NoInbox:
    heads = [one.version.drafter_id for one in options.pool if one.kind in HEAD_KINDS]
    if not heads:
        return NoInbox()
    if target.embedding_rows is None or target.head_rows is None:
        logger.warning("heads %s are off: vLLM's model lends no rows here", ", ".join(heads))
        return NoInbox()
    load = HeadLoader(
        LentRows(
            fingerprint=target.fingerprint,
            tokenizer_hash=target.tokenizer_hash,
            vocab_size=target.vocab_size,
            embedding_rows=target.embedding_rows,
            head_rows=target.head_rows,
        ),
        DrafterRegistry(str(settings.data)),
    )
    inbox = LogInbox(
        lambda: open_log(settings),
        _refusing_others(load),
        heads,
        poll_seconds=settings.worker.poll_seconds,
        canary_share=settings.gate.canary_share if settings.gate.enabled else 0.0,
    )
    inbox.start(wait_seconds=FIRST_LOOK_SECONDS)
    return inbox


def _refusing_others(load: HeadLoader) -> Callable[[DrafterReleased], Drafter]:
    """Load heads of the kinds that draft here; others are refused in one line."""

    def loaded(release: DrafterReleased) -> Drafter:
        head = load(release)
        if not isinstance(head, ServedHead):
            raise ArtifactError(
                f"drafter {release.drafter_id}: architecture",
                found=release.architecture,
                expected=f"{hydra.ARCHITECTURE} or {token_lm.ARCHITECTURE}",
            )
        return head

    return loaded
