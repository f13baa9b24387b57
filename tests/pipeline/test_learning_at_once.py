"""Decoded and learned at once or one by one and step by step, a log leaves the same behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from learner import stream_state
from learner.service import LearnerSettings, PolicyLearner
from pipeline.eventlog.ports import EventLog, Message
from pipeline.messaging import event_decoding
from pipeline.messaging.boards import LogEventSource, LogPolicyBoard, LogRefusedEvents
from schemas.avro import SchemaTable, wire_schema
from schemas.codec import encode
from schemas.equality import first_difference
from schemas.events import AcceptanceRule, PolicyPublished, VerificationEvent
from schemas.topics import DEAD_LETTERS, VERIFICATION_EVENTS
from tests.learner.step_by_step import learn_step_by_step
from tests.pipeline.messages import open_log, read_everything
from tests.pipeline.messaging.test_quick_events import (
    carrying_event,
    ending_event,
    spoiled_bytes,
    spoiled_record,
    whole_event,
)
from tests.schemas.builders import make_drafters, make_event

NOW = datetime(2026, 11, 30, tzinfo=UTC)
POOL = make_drafters(6)
OLDER = SchemaTable.of(
    [
        wire_schema(
            "verification_event",
            (resources.files("schemas") / "verification_event.v1.avsc").read_text("utf-8"),
        )
    ]
)


def one_event(number: int, rng: np.random.Generator) -> VerificationEvent:
    """Return an event of some kind, stream, worker and pool."""
    kind = number % 5
    if kind == 3:
        event = make_event(seed=number, num_windows=4, with_content=True)
    elif kind == 4:
        event = make_event(
            seed=number,
            num_windows=9,
            drafters=POOL[number % 3 : number % 3 + 3],
            acceptance_rule=AcceptanceRule.SPECULATIVE_SAMPLING,
        )
    else:
        event = (whole_event, ending_event, carrying_event)[kind](number)
    return replace(
        event,
        stream=f"stream-{rng.integers(4)}",
        worker_id=f"worker-{rng.integers(2)}",
        # Some come late: another of their worker was there before.
        sequence=max(number - int(rng.integers(8)) // 7 * 3, 0),
        event_id=f"event-{number}",
    )


def traffic(num_events: int) -> list[Message]:
    """Return good events, copies, events of an older schema, and bad ones amid them."""
    rng = np.random.default_rng(5)
    messages: list[Message] = []
    for number in range(num_events):
        event = one_event(number, rng)
        key = event.stream.encode()
        value = encode(event)
        messages.append(Message(key=key, value=value))
        chance = rng.random()
        if chance < 0.1:
            messages.append(messages[int(rng.integers(len(messages)))])
        elif chance < 0.2:
            messages.append(Message(key=key, value=spoiled_bytes(value, rng)))
        elif chance < 0.3:
            messages.append(Message(key=key, value=spoiled_record(event, rng)))
        elif chance < 0.35:
            messages.append(Message(key=key, value=None))
        elif chance < 0.4:
            messages.append(Message(key=b"another", value=value))
        elif chance < 0.5 and event.content is None and not event.policy_table.size:
            older = replace(event, sequence=event.sequence + 1)
            messages.append(Message(key=key, value=encode(older, table=OLDER)))
    return messages


def learned(folder: Path, messages: Sequence[Message]) -> tuple[EventLog, PolicyLearner]:
    """Learn them from a log of two partitions until it is read."""
    folder.mkdir()
    log = open_log(folder, num_partitions=2)
    log.append(VERIFICATION_EVENTS, messages)
    source = LogEventSource(log, (0, 1), max_messages=150)
    board = LogPolicyBoard(log, source="test")
    settings = LearnerSettings(publish_every_events=40, publish_seconds=1e9)
    learner = PolicyLearner(source, board, settings, now=lambda: NOW, refused=LogRefusedEvents(log))
    learner.resume()
    while events := source.poll(0.0):
        for received in events:
            learner.learn_one(received)
    learner.publish()
    return log, learner


def policies_of(log: EventLog) -> dict[str, PolicyPublished]:
    found = LogPolicyBoard(log, source="test").read_all()
    return {policy.stream: policy for policy in found}


def letters_of(log: EventLog) -> list[tuple[bytes | None, bytes | None, dict[str, bytes]]]:
    letters = [stored.message for stored in read_everything(log, DEAD_LETTERS)]
    # The parser names the stream that ended too early, a new one each time.
    return [(one.key, one.value, {**one.headers, "reason": b""}) for one in letters]


def test_states_and_dead_letters_are_those_of_the_way_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = traffic(400)
    log, learner = learned(tmp_path / "at-once", messages)
    quick, quick_letters, quick_counts = policies_of(log), letters_of(log), learner.counts
    monkeypatch.setattr(event_decoding, "read_ordinary_events", lambda v, _: [None] * len(v))
    monkeypatch.setattr(stream_state, "learn_from", learn_step_by_step)
    log, learner = learned(tmp_path / "one-by-one", messages)
    assert quick_counts == learner.counts
    assert quick_counts.num_learned > 200
    assert quick_counts.num_late > 10
    assert len(quick_letters) > 40
    assert quick_letters == letters_of(log)
    assert len(quick) >= 4
    assert first_difference(quick, policies_of(log)) is None
