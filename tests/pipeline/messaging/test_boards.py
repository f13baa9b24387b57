"""Policies and releases reach everyone; a worker sends its events to the same log."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from inference.emission import Emitter
from learner.ports import PolicyBoard, ReleaseBoard
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.opening import declared_topics
from pipeline.eventlog.ports import EventLog, EventLogError, Message, StoredMessage, TopicSpec
from pipeline.messaging.boards import (
    LogEventSender,
    LogEventSource,
    LogPolicyBoard,
    LogReleaseBoard,
    PolicyFollower,
    ReleaseFollower,
)
from schemas.arrow import LoggedEvent
from schemas.avro import SchemaTable
from schemas.codec import decode_verification_event, encode
from schemas.events import FeatureReference, ReleaseState, VerificationEvent
from schemas.topics import DRAFTER_RELEASES, POLICIES, VERIFICATION_EVENTS
from tests.integration.broker import blank_broker, kafka_log
from tests.pipeline.messages import broken, encoded, event, message, open_log, read_everything
from tests.schemas.builders import make_event, make_policy, make_release


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    opened = open_log(tmp_path, num_partitions=1)
    yield opened
    opened.close()


def test_the_newest_policy_of_every_stream_is_read(log: EventLog) -> None:
    board: PolicyBoard = LogPolicyBoard(log, source="learner-0")
    assert board.read_all() == []
    board.publish([make_policy(version=1), make_policy(stream="stream-b", version=1)])
    board.publish([make_policy(version=2)])
    newest = sorted(board.read_all(), key=lambda policy: policy.stream)
    assert encoded(newest) == encoded(
        [make_policy(version=2), make_policy(stream="stream-b", version=1)]
    )


def test_the_newest_release_of_every_drafter_is_read(log: EventLog) -> None:
    board: ReleaseBoard = LogReleaseBoard(log, source="learner-0")
    board.publish(make_release(version=1))
    board.publish(make_release(version=1, state=ReleaseState.LIVE))
    board.publish(make_release(drafter_id="drafter-1"))
    assert {r.drafter_id: r.state for r in board.read_all()} == {
        "drafter-0": ReleaseState.LIVE,
        "drafter-1": ReleaseState.CANDIDATE,
    }


def test_messages_carry_key_and_cloud_event_headers(log: EventLog) -> None:
    LogPolicyBoard(log, source="learner-0").publish([make_policy()])
    LogReleaseBoard(log, source="learner-0").publish(make_release())
    LogEventSender(lambda: log, source="worker-0")([event(0)])
    for topic, key in (
        (POLICIES, b"stream-a"),
        (DRAFTER_RELEASES, b"drafter-0"),
        (VERIFICATION_EVENTS, b"stream-a"),
    ):
        (stored,) = read_everything(log, topic)
        assert stored.message.key == key
        assert stored.message.headers["ce_source"] in (b"learner-0", b"worker-0")
        assert stored.message.headers["ce_specversion"] == b"1.0"


def test_followers_return_only_what_is_new(log: EventLog) -> None:
    policies, releases = PolicyFollower(log), ReleaseFollower(log)
    board, release_board = LogPolicyBoard(log, source="l"), LogReleaseBoard(log, source="l")
    assert (policies.poll(), releases.poll()) == ([], [])
    board.publish([make_policy(version=1), make_policy(version=2)])
    release_board.publish(make_release(version=3))
    assert encoded(policies.poll()) == encoded([make_policy(version=2)])
    assert encoded(releases.poll()) == encoded([make_release(version=3)])
    assert (policies.poll(), releases.poll()) == ([], [])
    board.publish([make_policy(stream="stream-b", version=1)])
    assert encoded(policies.poll()) == encoded([make_policy(stream="stream-b", version=1)])


def test_more_policies_than_one_read_returns_are_all_read(log: EventLog) -> None:
    policies = [make_policy(stream=f"stream-{i}") for i in range(1203)]
    LogPolicyBoard(log, source="learner-0").publish(policies)
    assert len(LogPolicyBoard(log, source="learner-0").read_all()) == 1203


def test_broken_policies_and_releases_are_counted_and_the_last_good_one_stays(
    log: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    LogPolicyBoard(log, source="l").publish([make_policy(version=1)])
    LogReleaseBoard(log, source="l").publish(make_release(version=1))
    policies, releases = PolicyFollower(log), ReleaseFollower(log)
    assert encoded(policies.poll()) == encoded([make_policy(version=1)])
    releases.poll()
    log.append(POLICIES, [Message(key=b"stream-a", value=b"\xff")])
    log.append(DRAFTER_RELEASES, [Message(key=b"drafter-0", value=encode(make_policy()))])
    assert (policies.poll(), releases.poll()) == ([], [])
    assert (policies.num_undecodable, releases.num_undecodable) == (1, 1)
    assert f"{POLICIES}/0 offset 1, passed over: " in caplog.text
    LogPolicyBoard(log, source="l").publish([make_policy(version=2)])
    assert encoded(policies.poll()) == encoded([make_policy(version=2)])


def test_a_broken_policy_between_good_ones_does_not_hide_them(log: EventLog) -> None:
    LogPolicyBoard(log, source="l").publish([make_policy(version=1)])
    follower = PolicyFollower(log)
    log.append(POLICIES, [Message(key=b"stream-b", value=b"")])
    LogPolicyBoard(log, source="l").publish([make_policy(stream="stream-c")])
    assert [policy.stream for policy in follower.poll()] == ["stream-a", "stream-c"]
    assert follower.num_undecodable == 1


def test_a_deleted_stream_is_not_returned_even_where_nothing_is_compacted_yet(
    tmp_path: Path,
) -> None:
    log = EmbeddedEventLog(tmp_path / "log.sqlite")
    log.create_topic(TopicSpec(name=POLICIES, num_partitions=1))
    board = LogPolicyBoard(log, source="l")
    board.publish([make_policy(version=1), make_policy(stream="stream-b")])
    log.append(POLICIES, [Message(key=b"stream-a", value=None)])
    assert [policy.stream for policy in board.read_all()] == ["stream-b"]
    log.close()


def test_the_sender_appends_in_order_keyed_by_stream(tmp_path: Path) -> None:
    log = open_log(tmp_path, num_partitions=4)
    send = LogEventSender(lambda: log, source="worker-0")
    events = [event(i, stream=f"stream-{i % 3}") for i in range(30)]
    send(events)
    found = [decode_verification_event(s.message.value) for s in _events(log)]
    for stream in ("stream-0", "stream-1", "stream-2"):
        own = [e.sequence for e in found if e.stream == stream]
        assert own == [e.sequence for e in events if e.stream == stream]
    log.close()


def _events(log: EventLog) -> list[StoredMessage]:
    return read_everything(log, VERIFICATION_EVENTS)


def test_the_log_is_opened_by_the_thread_that_sends(log: EventLog) -> None:
    openers: list[str] = []

    def open_it() -> EventLog:
        openers.append(threading.current_thread().name)
        return log

    emitter = Emitter(LogEventSender(open_it, source="worker-0"), capacity=10)
    assert openers == []
    emitter.emit(event(0))
    emitter.emit(event(1))
    assert emitter.close(10.0) == 0
    assert openers == ["emitter"]
    assert len(_events(log)) == 2


def test_a_log_that_is_down_when_first_needed_is_tried_again(log: EventLog) -> None:
    attempts: list[int] = []

    def open_it() -> EventLog:
        attempts.append(1)
        if len(attempts) < 3:
            raise EventLogError("down")
        return log

    emitter = Emitter(LogEventSender(open_it, source="worker-0"), capacity=10)
    emitter.emit(event(0))
    deadline = time.monotonic() + 60
    while emitter.num_sent == 0 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert (emitter.num_sent, emitter.num_send_errors) == (1, 2)
    assert emitter.close(1.0) == 0


def test_an_event_too_large_loses_its_content_and_then_itself_but_never_the_others(
    log: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_event(num_windows=2, sequence=0)
    with_content = make_event(
        num_windows=2, sequence=1, with_content=True, num_top_tokens=64, num_prompt_tokens=500
    )
    huge = make_event(num_windows=200, sequence=2)
    limit = max(len(encode(e)) for e in (plain, replace(with_content, content=None)))
    assert len(encode(with_content)) > limit
    send = LogEventSender(lambda: log, source="worker-0", max_value_bytes=limit)
    send([with_content, huge, plain])
    found = [decode_verification_event(s.message.value) for s in _events(log)]
    assert encoded(found) == encoded([replace(with_content, content=None), plain])
    assert (send.num_without_content, send.num_unsendable) == (1, 1)
    assert f"event {huge.event_id} left out" in caplog.text


def test_an_event_too_large_loses_no_more_than_it_must(log: EventLog) -> None:
    rows = make_event(num_windows=2).num_positions
    features = FeatureReference(uri="memory://f", first_row=0, num_rows=rows, sha256="0" * 64)
    whole = make_event(num_windows=2, with_content=True, num_top_tokens=64, features=features)
    assert whole.content is not None
    cut = replace(whole.content, features=None)
    sizes = []
    for limit in (len(encode(whole)), len(encode(whole)) - 1, 2_000, len(encode(whole)) // 3):
        send = LogEventSender(lambda: log, source="worker-0", max_value_bytes=limit)
        send([whole])
        value = _events(log)[-1].message.value
        assert value is not None
        assert len(value) <= limit
        sizes.append(len(value))
        content = decode_verification_event(value).content
        lost_tokens = content is not None and content.target_top_token_ids.shape[1] < 64
        assert send.num_with_fewer_top_tokens == lost_tokens
        if content is not None:
            mass = np.exp(content.target_top_log_probabilities.astype(np.float64)).sum(axis=1)
            assert np.allclose(mass + content.target_tail_mass, 1.0, atol=0.02)
            assert np.array_equal(content.token_ids, cut.token_ids)
    assert sizes[0] == len(encode(whole))


def test_an_event_that_cannot_be_encoded_is_left_out_and_counted(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pipeline.messaging.event_sender

    def refuse(message: VerificationEvent, *, table: SchemaTable) -> bytes:
        if message.sequence == 1:
            raise OverflowError("int too large")
        return encode(message, table=table)

    monkeypatch.setattr(pipeline.messaging.event_sender, "encode", refuse)
    send = LogEventSender(lambda: log, source="worker-0")
    send([event(0), event(1), event(2)])
    assert [decode_verification_event(s.message.value).sequence for s in _events(log)] == [0, 2]
    assert send.num_unsendable == 1


def test_what_a_worker_sends_the_learner_receives(log: EventLog) -> None:
    emitter = Emitter(LogEventSender(lambda: log, source="worker-0"), capacity=100)
    events = [make_event(sequence=i, with_content=True) for i in range(20)]
    for each in events:
        emitter.emit(each)
    assert emitter.close(10.0) == 0
    received = LogEventSource(log, [0]).poll(0.0)
    assert encoded(r.event for r in received) == encoded(events)


@pytest.mark.external_service
def test_the_boards_work_over_a_broker_as_over_the_embedded_log(tmp_path: Path) -> None:
    with blank_broker(tmp_path) as servers, closing(kafka_log(servers)) as log:
        _use_the_boards(log)


def _use_the_boards(log: EventLog) -> None:
    for spec in declared_topics(1):
        log.create_topic(spec)
    source = LogEventSource(log, [0])
    source.seek(0, log.end_offset(VERIFICATION_EVENTS, 0))
    policies, releases = PolicyFollower(log), ReleaseFollower(log)
    policies.poll()
    releases.poll()
    emitter = Emitter(LogEventSender(lambda: log, source="worker-0"), capacity=100)
    for sequence in range(20):
        emitter.emit(event(sequence))
    assert emitter.close(30.0) == 0
    log.append(VERIFICATION_EVENTS, [broken(b"\xff"), message(20)])
    received: list[LoggedEvent] = []
    while len(received) < 21:
        batch = source.poll(10.0)
        assert batch
        received += batch
    assert [r.event.sequence for r in received] == list(range(21))
    assert source.num_dead_letters == 1
    policy = make_policy(stream="stream-of-the-broker-test", version=7)
    release = make_release(drafter_id="drafter-of-the-broker-test")
    LogPolicyBoard(log, source="learner-0").publish([policy])
    LogReleaseBoard(log, source="learner-0").publish(release)
    assert encoded(policies.poll()) == encoded([policy])
    assert encoded(releases.poll()) == encoded([release])
    assert encode(policy) in encoded(LogPolicyBoard(log, source="learner-0").read_all())
    assert encode(release) in encoded(LogReleaseBoard(log, source="learner-0").read_all())
