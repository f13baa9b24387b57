"""The trainer of the heads from settings."""

from __future__ import annotations

import logging
from pathlib import Path

from learner.online_trainer import OnlineTrainer
from learner.ports import ReleaseBoard
from learner.training import DrafterTrainer, TrainingSettings
from learner.updates.online_gradient import OnlineGradientSettings
from pipeline.clock import utc_now
from pipeline.configuration.pool_settings import DrafterSettings
from pipeline.configuration.settings import Settings, SettingsError
from pipeline.features import RecordedFeatures
from pipeline.recomputed_features import RecomputedFeatures
from pipeline.releases.drafters import draft_vocabulary, trainable
from pipeline.releases.heads import HeadLoader
from pipeline.releases.registry import DrafterRegistry
from pipeline.wiring import Progress, open_target
from schemas.events import ReleaseState

KEEP_VERSION_SECONDS = 60.0
"""No version is deleted before its successor is so old: whoever still loads it has that long."""

logger = logging.getLogger(__name__)


def build_trainer(
    settings: Settings, board: ReleaseBoard, *, progress: Progress | None = None
) -> OnlineTrainer:
    """Build the trainer of every head, each going on from its latest release."""
    target = open_target(settings, progress=progress)
    registry = DrafterRegistry(str(settings.data), keep_seconds=KEEP_VERSION_SECONDS)
    loader = HeadLoader(target, registry)
    texts = _draft_vocabulary_texts(settings.learner.draft_vocabulary_text)
    released = {release.drafter_id: release for release in board.read_all()}
    fresh = loader.rows_of(
        draft_vocabulary(target, texts, size=settings.learner.draft_vocabulary_size)
    )
    trainers = []
    for one in settings.drafters:
        known = released.get(one.drafter_id)
        if known is not None and known.state is ReleaseState.RETIRED:
            logger.warning("drafter %s is retired and learns nothing", one.drafter_id)
        elif one.is_trained:
            # A released head keeps the draft vocabulary that it was born with.
            rows = loader(known).rows if known else fresh
            trainers.append(
                DrafterTrainer(
                    trainable(one, rows, num_levels=settings.worker.num_speculative_tokens),
                    training_settings(settings, one),
                    target_fingerprint=target.fingerprint,
                    tokenizer_hash=target.tokenizer_hash,
                    store=registry,
                    board=board,
                    now=utc_now,
                )
            )
    source, positions = settings.features.source, settings.features.recompute_positions
    return OnlineTrainer(
        trainers,
        None if source == "recomputed" else RecordedFeatures(str(settings.data)),
        target_fingerprint=target.fingerprint,
        computer=None
        if source == "recorded"
        else RecomputedFeatures(target, max_cached_positions=positions),
    )


def _draft_vocabulary_texts(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"learner.draft_vocabulary_text = {str(path)!r}: cannot be read ({error}): "
            "name a text file in UTF-8, or unset it"
        ) from error


def training_settings(settings: Settings, head: DrafterSettings) -> TrainingSettings:
    """Return how one head is trained."""
    one = settings.learner
    return TrainingSettings(
        num_levels=one.training_levels or settings.worker.num_speculative_tokens,
        batch_size=one.batch_size,
        steps_per_event=one.steps_per_event,
        memory_positions=head.memory_positions,
        replay_bytes=head.replay_bytes,
        release_every_events=one.publish_weights_every_events,
        keep_versions=one.keep_versions,
        seed=one.seed,
        rule=one.update_rule,
        gradient=OnlineGradientSettings(learning_rate=one.learning_rate),
        gate=settings.gate.settings(),
        experts=settings.experts.settings(),
    )
