"""The retention job: what is old goes by its age, what is to be forgotten wherever it is seen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from pathlib import Path

from pipeline.archive.log_rewriting import StreamDeletion, delete_old_events, delete_streams
from pipeline.configuration.settings import Settings
from pipeline.storage import FEATURES_FOLDER, Storage
from schemas.topics import VERIFICATION_EVENTS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What a run has deleted: Parquet files, days of features, and what was of deleted streams."""

    num_event_files: int
    num_feature_days: int
    streams: StreamDeletion | None


def retain(settings: Settings, now: datetime, must_end: Callable[[], bool]) -> Retention:
    """Delete what the settings do not keep; done twice, the second run finds nothing.

    Args:
        settings: Its ``schedule`` says what is kept.
        now: UTC.
        must_end: Asked before every file; what is not done is left to the next run.

    Raises:
        LockError: If files of the log are being merged or rewritten.
        OSError: If a file could not be removed or written.
        ArtifactError: If features could not be deleted.
    """

    def through(paths: Sequence[Path]) -> Iterable[Path]:
        return takewhile(lambda _: not must_end(), paths)

    kept, data = settings.schedule, settings.data
    num_files = num_days = 0
    streams = None
    if kept.deleted_streams:
        # First, while the rows still say which features are theirs.
        streams = delete_streams(data, VERIFICATION_EVENTS, kept.deleted_streams, through=through)
        if streams.unreadable:
            logger.error(
                "rows of deleted streams may be left in files that cannot be read, remove them: %s",
                ", ".join(streams.unreadable),
            )
    if kept.event_days:
        before = now - timedelta(days=kept.event_days)
        num_files = delete_old_events(data, VERIFICATION_EVENTS, before, through=through)
    if kept.feature_days:
        before = now - timedelta(days=kept.feature_days)
        num_days = delete_old_features(Storage(str(data)), before, must_end)
    logger.info("deleted by age: %d files of events, %d days of features", num_files, num_days)
    return Retention(num_event_files=num_files, num_feature_days=num_days, streams=streams)


def delete_old_features(storage: Storage, before: datetime, must_end: Callable[[], bool]) -> int:
    """Delete the features of days that ended before a time (UTC); return how many days.

    Raises:
        ArtifactError: If the store refuses.
    """
    storage.delete_leftovers(FEATURES_FOLDER)
    num_days = 0
    for name in storage.children(FEATURES_FOLDER):
        if must_end():
            break
        with suppress(ValueError):  # Somebody else's folder.
            day = datetime.strptime(name, "%Y-%m-%d").replace(tzinfo=UTC)
            if day + timedelta(days=1) <= before:
                storage.delete_folder(f"{FEATURES_FOLDER}/{name}", visible_by=None)
                num_days += 1
    return num_days
