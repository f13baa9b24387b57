"""The event log that settings name, opened with the topics that the services share."""

from __future__ import annotations

from contextlib import closing

from pipeline.configuration.settings import Settings
from pipeline.eventlog.opening import open_event_log
from pipeline.eventlog.ports import EventLog
from pipeline.messaging.topics import TopicPlan, create_topics


def topic_plan(settings: Settings) -> TopicPlan:
    """Return the declaration of the topics."""
    return TopicPlan(
        num_partitions=settings.event_log.num_partitions,
        retention_days=settings.event_log.retention_days,
    )


def bare_log(settings: Settings) -> closing[EventLog]:
    """Open the event log as it is, for the length of a ``with`` block."""
    return closing(_event_log(settings))


def open_log(settings: Settings) -> EventLog:
    """Open the event log and make sure that the declared topics are there."""
    log = _event_log(settings)
    try:
        create_topics(log, topic_plan(settings))
        # Here a registry that refuses our schemas is met before anything is read or written.
        _ = log.schemas
    except BaseException:
        log.close()
        raise
    return log


def check_schemas(settings: Settings) -> list[str]:
    """Return one line per subject of the schema registry that would refuse this build's schema."""
    if not settings.schema_registry.url or not settings.event_log.url.startswith("kafka://"):
        return []
    from pipeline.messaging.kafka_options import registry_client
    from pipeline.messaging.schema_registry import incompatible_schemas

    return incompatible_schemas(registry_client(settings))


def _event_log(settings: Settings) -> EventLog:
    url = settings.event_log.url
    if not url.startswith("kafka://"):
        return open_event_log(url or str(settings.data))
    # Imported here: without Kafka nothing of it is loaded.
    from pipeline.messaging.kafka_options import kafka_options, registered_schemas

    return open_event_log(url, kafka_options(settings.kafka), schemas=registered_schemas(settings))
