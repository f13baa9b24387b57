"""What both adapters refuse, in the same words."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.eventlog.ports import EventLogError, Message, TopicMismatchError, TopicSpec


def refuse_mismatch(*, found: TopicSpec, declared: TopicSpec) -> None:
    """Raise ``TopicMismatchError`` unless the topic is what was declared."""
    if found != declared:
        raise TopicMismatchError(
            f"topic {declared.name}: exists as {found}, declared as {declared}; "
            "change the settings back or use a new topic"
        )


def refuse_messages(spec: TopicSpec, messages: Sequence[Message]) -> None:
    """Raise ``EventLogError`` at the first message that the topic cannot hold."""
    for index, message in enumerate(messages):
        if message.key is not None:
            continue
        if spec.is_compacted:
            raise EventLogError(
                f"topic {spec.name}: message {index} has key None; a compacted topic needs keys"
            )
        if message.value is None:
            raise EventLogError(
                f"topic {spec.name}: message {index} has neither key nor value; give it one"
            )


def refuse_partition(spec: TopicSpec, partition: int) -> None:
    """Raise ``EventLogError`` unless the topic has the partition."""
    if not 0 <= partition < spec.num_partitions:
        raise EventLogError(
            f"topic {spec.name}: partition {partition} does not exist; "
            f"use 0..{spec.num_partitions - 1}"
        )
