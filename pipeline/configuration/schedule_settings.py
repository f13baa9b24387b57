"""Settings of the jobs that run by the clock."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from pipeline.configuration.pool_settings import Section


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
    retention: CronText = ""
    """Delete old events and features, and the streams that are to be forgotten; empty = never."""
    event_days: float = Field(default=0.0, ge=0, le=36_500)
    """Days that a Parquet file is kept, from the hour of its first event on; 0 = for ever."""
    feature_days: float = Field(default=0.0, ge=0, le=36_500)
    """Days that recorded hidden states are kept, from the end of their day on; 0 = for ever."""
    deleted_streams: tuple[str, ...] = ()
    """Streams whose rows and features every run of the retention deletes."""
    misfire_seconds: float = Field(default=3600.0, gt=0, le=604_800)
    """A job that could not start for longer is missed; several missed ones run once."""
    max_job_seconds: float = Field(default=3600.0, gt=0, le=604_800)
    """A job that takes longer is asked to end; what it has done is kept."""

    @model_validator(mode="after")
    def _retention_has_something_to_do(self) -> Self:
        if self.retention and not (self.event_days or self.feature_days or self.deleted_streams):
            raise ValueError(
                f"retention = {self.retention!r} would delete nothing; set event_days, "
                "feature_days or deleted_streams"
            )
        return self
