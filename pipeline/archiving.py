"""The archiver from settings."""

from __future__ import annotations

from pathlib import Path

from pipeline.archive.archiver import Archiver
from pipeline.configuration.settings import Settings
from pipeline.eventlog.ports import EventLog
from pipeline.messaging.dead_letters import DeadLetterTopic
from schemas.topics import VERIFICATION_EVENTS


def build_archiver(settings: Settings, log: EventLog) -> Archiver:
    """Build the archiver of the verification events."""
    return Archiver(
        log,
        VERIFICATION_EVENTS,
        Path(settings.data),
        dead_letters=DeadLetterTopic(log),
        max_events_per_file=settings.archiver.max_events_per_file,
        max_seconds_per_file=settings.archiver.max_seconds_per_file,
    )
