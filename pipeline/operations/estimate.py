"""What a fleet would write: events, log, Parquet, features, before anybody turns capture on.

Events of the described shape are drawn (``estimate_sample``), encoded and written to Parquet files
in memory, and their bytes are counted. A file costs something however few events it holds, so files
of two lengths are written; how many there are follows from how short ones are merged.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.archive.log_compaction import LONG_BYTES
from pipeline.configuration.settings import Settings
from pipeline.operations.estimate_sample import Fleet, sample_events
from schemas.arrow import LoggedEvent, events_to_table, write_table
from schemas.codec import encode
from schemas.events import VerificationEvent
from schemas.topics import VERIFICATION_EVENTS

__all__ = ["Estimate", "Fleet", "estimate", "parquet_bytes"]

SECONDS_PER_HOUR, SECONDS_PER_DAY = 3_600, 86_400
EVENTS_PER_PARTITION = 100.0
"""Events per second that one learner is asked to follow, well below what it can."""

SAMPLE_REQUESTS = 40
SHORT_SAMPLE_REQUESTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What it takes; bytes are of one copy, uncompressed in the log.

    A Parquet file of n events has ``parquet_bytes_per_file`` + n ``parquet_bytes_per_event`` bytes.
    """

    events_per_second: float
    bytes_per_event: float
    log_bytes_per_day: float
    log_bytes_kept: float
    parquet_bytes_per_event: float
    parquet_bytes_per_file: float
    parquet_bytes_per_day: float
    feature_bytes_per_day: float
    num_partitions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """Bytes of the requests with content, or of those without."""

    events_per_request: float
    encoded_bytes_per_event: float
    parquet_bytes_per_event: float
    parquet_bytes_per_file: float


def estimate(settings: Settings, fleet: Fleet) -> Estimate:
    """Return what the fleet takes with these settings."""
    share = {True: fleet.content_share, False: 1.0 - fleet.content_share}
    kinds = {kind: _kind(settings, fleet, kind) for kind in share if share[kind]}

    def mean(value: Callable[[_Kind], float]) -> float:
        return sum(share[kind] * value(one) for kind, one in kinds.items())

    per_second = fleet.requests_per_second * mean(lambda one: one.events_per_request)
    per_day = per_second * SECONDS_PER_DAY
    encoded = mean(lambda one: one.encoded_bytes_per_event)
    num_partitions = max(math.ceil(per_second / EVENTS_PER_PARTITION), 1)
    stored = mean(lambda one: one.parquet_bytes_per_event)
    per_file = mean(lambda one: one.parquet_bytes_per_file)
    num_files = _files_per_day(per_second, stored, num_partitions)
    rows_per_day = fleet.requests_per_second * SECONDS_PER_DAY * fleet.output_tokens
    return Estimate(
        events_per_second=per_second,
        bytes_per_event=encoded,
        log_bytes_per_day=per_day * encoded,
        log_bytes_kept=per_day * encoded * settings.event_log.retention_days,
        parquet_bytes_per_event=stored,
        parquet_bytes_per_file=per_file,
        parquet_bytes_per_day=per_day * stored + num_files * per_file,
        feature_bytes_per_day=(
            rows_per_day * fleet.content_share * settings.features.share * fleet.hidden_size * 2
        ),
        num_partitions=num_partitions,
    )


def parquet_bytes(events: Sequence[VerificationEvent]) -> int:
    """Return the size of a Parquet file of these events."""
    rows = [
        LoggedEvent(
            topic=VERIFICATION_EVENTS,
            partition=0,
            offset=offset,
            appended_at=event.produced_at,
            event=event,
        )
        for offset, event in enumerate(events)
    ]
    file = io.BytesIO()
    write_table(events_to_table(rows), file)
    return len(file.getvalue())


def _kind(settings: Settings, fleet: Fleet, has_content: bool) -> _Kind:
    events = sample_events(settings, fleet, num_requests=SAMPLE_REQUESTS, has_content=has_content)
    count = round(len(events) * SHORT_SAMPLE_REQUESTS / SAMPLE_REQUESTS)
    whole, short = parquet_bytes(events), parquet_bytes(events[:count])
    per_event = (whole - short) / (len(events) - count)
    return _Kind(
        events_per_request=len(events) / SAMPLE_REQUESTS,
        encoded_bytes_per_event=sum(len(encode(one)) for one in events) / len(events),
        parquet_bytes_per_event=per_event,
        parquet_bytes_per_file=max(whole - per_event * len(events), 0.0),
    )


def _files_per_day(events_per_second: float, bytes_per_event: float, num_partitions: int) -> float:
    """Return how many Parquet files a day leaves, once its short ones are merged.

    They are merged within the folder of an hour, up to a length; no file is empty.
    """
    events_per_hour = events_per_second * SECONDS_PER_HOUR / num_partitions
    per_hour = max(math.ceil(events_per_hour * bytes_per_event / LONG_BYTES), 1)
    return 24 * num_partitions * min(float(per_hour), events_per_hour)
