"""The topics of the loop: one declaration, from which they are made, checked and described."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.eventlog.ports import (
    EventLog,
    EventLogError,
    TopicMismatchError,
    TopicSpec,
    UnknownTopicError,
)
from schemas import topics

MAX_MESSAGE_BYTES = 8 * 2**20
"""Largest message that the topics and the producer accept."""

_HOUR_MILLISECONDS = 3_600_000
_DAY_MILLISECONDS = 24 * _HOUR_MILLISECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicPlan:
    """How many partitions the topics have and how long they keep what they hold.

    Attributes:
        num_partitions: Of the verification events and of the policies, >= 1.
        retention_days: Verification events and dead letters are deleted after so many days.
    """

    num_partitions: int = 1
    retention_days: float = 7.0

    def declared(self) -> list[TopicSpec]:
        """Return every topic of the loop.

        Policies have the partitions of the events, so that whoever owns a partition of the one
        finds its state in the same partition of the other. Releases have a single one, which one
        trainer at a time owns.
        """
        retention = {"retention.ms": str(round(self.retention_days * _DAY_MILLISECONDS))}
        return [
            _spec(topics.VERIFICATION_EVENTS, self.num_partitions, retention),
            _spec(topics.POLICIES, self.num_partitions, _COMPACTED, is_compacted=True),
            _spec(topics.DRAFTER_RELEASES, 1, _COMPACTED, is_compacted=True),
            _spec(topics.DEAD_LETTERS, 1, retention),
        ]


_COMPACTED = {
    # A superseded state stays readable for a while: a member that was cut off may write an older
    # state behind a newer one, and readers take the newer of the two as long as both are there.
    "min.compaction.lag.ms": str(_HOUR_MILLISECONDS),
    "delete.retention.ms": str(_DAY_MILLISECONDS),
}


def _spec(
    name: str, num_partitions: int, configs: Mapping[str, str], *, is_compacted: bool = False
) -> TopicSpec:
    return TopicSpec(
        name=name,
        num_partitions=num_partitions,
        is_compacted=is_compacted,
        configs={"max.message.bytes": str(MAX_MESSAGE_BYTES), **configs},
    )


def declared_topics(num_partitions: int) -> list[TopicSpec]:
    """Return every topic of the loop, kept for as long as the defaults say."""
    return TopicPlan(num_partitions=num_partitions).declared()


def create_topics(log: EventLog, plan: TopicPlan) -> None:
    """Create every topic; those that are there as declared stay as they are.

    Raises:
        TopicMismatchError: If one exists with other partitions or another cleanup policy.
    """
    for spec in plan.declared():
        log.create_topic(spec)
    refuse_apart(log)


def refuse_apart(log: EventLog) -> None:
    """Raise ``TopicMismatchError`` unless events and policies have equally many partitions."""
    events, policies = (
        log.num_partitions(t) for t in (topics.VERIFICATION_EVENTS, topics.POLICIES)
    )
    if events != policies:
        raise TopicMismatchError(
            f"topics {topics.VERIFICATION_EVENTS} and {topics.POLICIES} have {events} and "
            f"{policies} partitions; a learner needs equally many: use the number of the first "
            "for a new second one"
        )


def check_topics(log: EventLog, plan: TopicPlan) -> list[str]:
    """Compare what is there with what is declared and change nothing.

    Returns:
        One line per difference, with the topic and both values; empty if there is none.
    """
    differences = []
    for spec in plan.declared():
        try:
            found = log.describe_topic(spec.name)
        except UnknownTopicError as error:
            differences.append(str(error))
            continue
        differences += _differences(found, spec)
    try:
        refuse_apart(log)
    except UnknownTopicError:
        pass  # already said
    except EventLogError as error:
        differences.append(str(error))
    return differences


def _differences(found: TopicSpec, declared: TopicSpec) -> list[str]:
    pairs: dict[str, tuple[object, object]] = {
        "partitions": (found.num_partitions, declared.num_partitions),
        "cleanup policy": (_cleanup(found), _cleanup(declared)),
        **{
            name: (found.configs[name], value)
            for name, value in declared.configs.items()
            if name in found.configs
        },
    }
    return [
        f"topic {declared.name}: {name} is {is_value}, declared {wanted}"
        for name, (is_value, wanted) in pairs.items()
        if str(is_value) != str(wanted)
    ]


def _cleanup(spec: TopicSpec) -> str:
    return "compact" if spec.is_compacted else "delete"


def description(log: EventLog, plan: TopicPlan) -> Sequence[Mapping[str, str]]:
    """Return one row per topic: its shape, its settings, and how many offsets it spans."""
    rows = []
    for spec in plan.declared():
        found = log.describe_topic(spec.name)
        spans = [
            log.end_offset(spec.name, p) - log.begin_offset(spec.name, p)
            for p in range(found.num_partitions)
        ]
        configs = [
            f"{name}={found.configs[name]}" for name in spec.configs if name in found.configs
        ]
        rows.append(
            {
                "topic": spec.name,
                "partitions": str(found.num_partitions),
                "cleanup": _cleanup(found),
                "offsets": str(sum(spans)),
                "settings": " ".join(configs),
            }
        )
    return rows
