"""Settings of the jobs that run by the clock."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from pipeline.pool_settings import Section


def _cron_text(value: str) -> str:
    # Imported where a schedule is named: nothing else needs it.
    if value:
        from pipeline.schedule import cron_trigger

        cron_trigger(value)
    return value


CronText = Annotated[str, AfterValidator(_cron_text)]


class ScheduleSettings(Section):
    """When `draftloop scheduler` does what, in UTC: minute, hour, day, month, day of the week."""

    refresh: CronText = ""
    """Train the heads on all events they have not seen, through the gate; empty = never."""
    compact: CronText = ""
    """Merge short files of the Parquet log; empty = never."""
    report: CronText = ""
    """Replay the Parquet log and write `report.html` and `report.json`; empty = never."""
    misfire_seconds: float = Field(default=3600.0, gt=0, le=604_800)
    """A job that could not start for longer is missed; several missed ones run once."""
    max_job_seconds: float = Field(default=3600.0, gt=0, le=604_800)
    """A job that takes longer is asked to end; what it has done is kept."""
