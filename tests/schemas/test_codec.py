"""The wire: exact round trips, headers, and one error for everything that is no message."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.avro import PACKAGED
from schemas.codec import (
    Message,
    cloud_event_headers,
    decode_drafter_released,
    decode_policy_published,
    decode_verification_event,
    encode,
)
from schemas.equality import first_difference, same_message
from schemas.errors import ContractError
from schemas.events import FinishReason, VerificationEvent
from schemas.records import from_verification_event
from schemas.state_records import from_policy_published
from tests.schemas.builders import make_drafters, make_event, make_policy, make_release
from tests.schemas.strategies import policies, releases, verification_events

DATA = Path(__file__).parent / "data"
DECODERS: dict[str, Callable[[bytes | None], Message]] = {
    "verification_event": decode_verification_event,
    "policy_published": decode_policy_published,
    "drafter_released": decode_drafter_released,
}
MESSAGES: dict[str, Message] = {
    "verification_event": make_event(with_content=True),
    "policy_published": make_policy(),
    "drafter_released": make_release(),
}
NAMES = sorted(MESSAGES)
LATER_FIELDS = ("policy_table", "policy_numbers", "num_awake_rounds")
EMPTY = np.empty(0, np.int16)


@pytest.fixture
def new_york_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a time zone that is not UTC and has daylight saving."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def framed(name: str, record: dict[str, Any]) -> bytes:
    """Frame a record that no dataclass would have let through."""
    schema = PACKAGED.newest[name]
    body = io.BytesIO()
    fastavro.schemaless_writer(body, schema.parsed, record | {"schema_version": schema.version})
    return b"\x00" + schema.schema_id.to_bytes(4, "big") + body.getvalue()


@given(verification_events())
def test_a_verification_event_survives_the_wire_bit_for_bit(event: VerificationEvent) -> None:
    data = encode(event)
    decoded = decode_verification_event(data)
    assert first_difference(event, decoded) is None
    assert encode(decoded) == data


@given(policies())
def test_a_policy_survives_the_wire_bit_for_bit(policy: Message) -> None:
    data = encode(policy)
    decoded = decode_policy_published(data)
    assert first_difference(policy, decoded) is None
    assert encode(decoded) == data


@given(releases())
def test_a_release_survives_the_wire_bit_for_bit(release: Message) -> None:
    data = encode(release)
    decoded = decode_drafter_released(data)
    assert first_difference(release, decoded) is None
    assert encode(decoded) == data


def test_every_nan_bit_pattern_of_float16_survives() -> None:
    bits = np.array([0x7C01, 0x7E00, 0x7FFF, 0xFC01, 0xFE00, 0xFFFF], np.uint16)
    event = make_event(
        num_windows=6, num_speculative_tokens=1, num_drafters=1, acceptance_probability=np.nan
    )
    scores = bits.view(np.float16).reshape(6, 1, 1)
    event = replace(event, windows=replace(event.windows, acceptance_probability=scores))
    decoded = decode_verification_event(encode(event))
    assert decoded.windows.acceptance_probability.tobytes() == bits.tobytes()


def test_arrays_of_another_memory_layout_are_written_row_major() -> None:
    event = make_event(num_windows=5, num_drafters=3)
    windows = event.windows
    strided = replace(
        windows,
        acceptance_probability=np.asfortranarray(windows.acceptance_probability),
        realised_acceptance=np.repeat(windows.realised_acceptance, 2, axis=2)[..., ::2],
    )
    assert encode(replace(event, windows=strided)) == encode(event)


@pytest.mark.parametrize("name", ["007", "3000000000", "7753285016841556620", "2024-01"])
def test_ids_that_look_like_numbers_stay_strings_to_the_last_digit(name: str) -> None:
    event = make_event(stream=name, worker_id=name, request_id=name)
    decoded = decode_verification_event(encode(event))
    assert (decoded.stream, decoded.worker_id, decoded.request_id) == (name, name, name)


def test_the_largest_counts_survive() -> None:
    event = make_event(sequence=2**63 - 1, worker_epoch=2**63 - 1, policy_version=2**63 - 1)
    assert same_message(event, decode_verification_event(encode(event)))


@pytest.mark.parametrize(
    "moment",
    [
        datetime(2026, 11, 1, 5, 30, 0, 1, tzinfo=UTC),
        datetime(2026, 11, 1, 6, 30, 0, 999_999, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime.max.replace(tzinfo=UTC),
    ],
)
@pytest.mark.usefixtures("new_york_time")
def test_times_keep_their_microseconds_and_zone_on_a_machine_in_new_york(
    moment: datetime,
) -> None:
    decoded = decode_verification_event(encode(make_event(produced_at=moment)))
    assert decoded.produced_at == moment
    assert decoded.produced_at.utcoffset() == timedelta(0)


@pytest.mark.parametrize("name", NAMES)
def test_a_frame_starts_with_zero_and_the_schema_id_of_the_file(name: str) -> None:
    data = encode(MESSAGES[name])
    assert data[0] == 0
    assert int.from_bytes(data[1:5], "big") == PACKAGED.newest[name].schema_id


@pytest.mark.parametrize(
    "file", ["verification_event.v2", "policy_published.v1", "drafter_released.v2"]
)
def test_frames_stored_by_the_newest_version_are_still_read_and_written_alike(file: str) -> None:
    data = (DATA / f"{file}.bin").read_bytes()
    assert encode(DECODERS[file.split(".")[0]](data)) == data


def test_an_event_stored_by_version_1_is_read_with_the_defaults_of_what_came_later() -> None:
    first, second = (
        decode_verification_event((DATA / f"verification_event.v{version}.bin").read_bytes())
        for version in (1, 2)
    )
    assert first.policy_table.size == first.policy_numbers.size == first.num_awake_rounds.size == 0
    assert set(first.rounds.batch_size) == set(first.rounds.score_probability) == {1}
    later = {name: getattr(second, name) for name in LATER_FIELDS}
    assert all(len(values) for values in later.values())
    assert first_difference(replace(first, rounds=second.rounds, **later), second) is None
    rounds = replace(second.rounds, batch_size=EMPTY, score_probability=EMPTY.astype(np.float32))
    assert first_difference(first.rounds, rounds) is None


def test_a_release_stored_by_version_1_is_read_beside_one_with_evidence_of_streams() -> None:
    first, second = (
        decode_drafter_released((DATA / f"drafter_released.v{version}.bin").read_bytes())
        for version in (1, 2)
    )
    assert second.evidence is not None
    assert [one.stream for one in second.evidence.streams] == ["code", ""]
    assert first == replace(second, evidence=None)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_kind_of_bytes_is_read(kind: Callable[[bytes], bytes]) -> None:
    event = make_event()
    assert same_message(event, decode_verification_event(kind(encode(event))))


def test_cloud_event_headers_name_the_message_its_source_and_its_time() -> None:
    event = make_event(worker_id="w", worker_epoch=2, sequence=3)
    assert cloud_event_headers(event, source="worker/w") == {
        "ce_specversion": b"1.0",
        "ce_id": b"w.2.3",
        "ce_source": b"worker/w",
        "ce_type": b"draftloop.verification_event",
        "ce_time": b"2026-03-29T01:30:00.123457Z",
    }


def test_cloud_event_ids_differ_between_versions_and_states() -> None:
    messages = [make_policy(version=1), make_policy(version=2)]
    ids = {cloud_event_headers(one, source="learner")["ce_id"] for one in messages}
    assert ids == {b"stream-a/1", b"stream-a/2"}
    release = cloud_event_headers(make_release(version=4), source="learner")
    assert release["ce_id"] == b"drafter-0/4/candidate"


@pytest.mark.parametrize("name", NAMES)
def test_invalid_a_tombstone_is_refused(name: str) -> None:
    with pytest.raises(ContractError, match="value: found NoneType, expected bytes"):
        DECODERS[name](None)


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x00\x00\x00\x27"])
def test_invalid_a_frame_without_room_for_its_head_is_refused(data: bytes) -> None:
    with pytest.raises(ContractError, match=f"found {len(data)} bytes, expected at least 5"):
        decode_verification_event(data)


@pytest.mark.parametrize("data", [b"\xff", b"\xff" * 40, b'{"loss": NaN}'])
def test_invalid_bytes_of_something_else_are_refused(data: bytes) -> None:
    with pytest.raises(ContractError):
        decode_verification_event(data)


def test_invalid_a_wrong_magic_byte_is_refused() -> None:
    data = b"\x01" + encode(make_event())[1:]
    with pytest.raises(ContractError, match="magic_byte: found 1, expected 0"):
        decode_verification_event(data)


def test_invalid_an_unknown_schema_id_is_refused_with_the_known_ones() -> None:
    data = b"\x00" + (10_999).to_bytes(4, "big") + encode(make_event())[5:]
    with pytest.raises(ContractError, match="schema_id: found 10999, expected one of 10001, 10002"):
        decode_verification_event(data)


def test_invalid_a_message_of_another_type_is_refused_by_name() -> None:
    with pytest.raises(ContractError, match="policy_published") as refusal:
        decode_verification_event(encode(make_policy()))
    assert refusal.value.path == "schema_id"
    assert refusal.value.expected == "10002 (verification_event)"


@pytest.mark.parametrize("name", NAMES)
def test_invalid_every_truncation_is_refused(name: str) -> None:
    data = encode(MESSAGES[name])
    for length in range(len(data)):
        with pytest.raises(ContractError):
            DECODERS[name](data[:length])


@pytest.mark.parametrize("name", NAMES)
def test_invalid_trailing_bytes_are_refused(name: str) -> None:
    with pytest.raises(ContractError, match="body: found 2 bytes too many"):
        DECODERS[name](encode(MESSAGES[name]) + b"\x00\x00")


@given(name=st.sampled_from(NAMES), data=st.data())
def test_invalid_damaged_bytes_are_refused_or_still_a_valid_message(
    name: str, data: st.DataObject
) -> None:
    frame = bytearray(encode(MESSAGES[name]))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] = data.draw(st.integers(0, 255))
    try:
        decoded = DECODERS[name](bytes(frame))
    except ContractError as refusal:
        assert refusal.path
    else:
        assert same_message(decoded, DECODERS[name](encode(decoded)))


@given(name=st.sampled_from(NAMES), body=st.binary(max_size=60))
def test_invalid_noise_after_a_good_head_is_refused(name: str, body: bytes) -> None:
    head = encode(MESSAGES[name])[:5]
    with pytest.raises(ContractError):
        DECODERS[name](head + body)


def test_invalid_a_body_that_claims_another_version_is_refused() -> None:
    frame = bytearray(encode(make_event()))
    frame[5] = 14  # the zigzag varint of 7, in place of schema_version 2
    with pytest.raises(ContractError, match="schema_version: found 7, expected 2"):
        decode_verification_event(bytes(frame))


@pytest.mark.parametrize("shape", [[0, 2**62, 8], [0] * 70, [-1, 1], [2**62, 2**62]])
def test_invalid_shapes_that_no_array_can_have_are_refused(shape: list[int]) -> None:
    record = from_policy_published(make_policy())
    record["accumulators"] = {"regret": {"shape": shape, "values": b""}}
    with pytest.raises(ContractError, match=r"accumulators\.regret"):
        decode_policy_published(framed("policy_published", record))


@pytest.mark.parametrize(
    "path",
    [
        "rounds.drafter_index",
        "rounds.first_position",
        "windows.start",
        "windows.acceptance_probability",
        "content.token_ids",
        "content.prompt_token_ids",
    ],
)
def test_invalid_arrays_whose_bytes_do_not_fit_their_shape_are_refused(path: str) -> None:
    record = from_verification_event(make_event(with_content=True))
    part, name = path.split(".")
    record[part][name] = b"\x00"
    with pytest.raises(ContractError) as refusal:
        decode_verification_event(framed("verification_event", record))
    assert (refusal.value.path, refusal.value.found) == (path, "1 bytes")
    assert "bytes" in refusal.value.expected


def test_invalid_a_partition_listed_twice_is_refused() -> None:
    record = from_policy_published(make_policy())
    record["watermark"]["partition_to_offset"] = [{"partition": 1, "offset": 2}] * 2
    with pytest.raises(ContractError, match=r"watermark\.partition_to_offset"):
        decode_policy_published(framed("policy_published", record))


def test_invalid_a_refusal_of_a_drafter_names_its_place() -> None:
    event = make_event(drafters=make_drafters(2))
    data = encode(event).replace(b"drafter-1", b"../fter-1")
    with pytest.raises(ContractError) as refusal:
        decode_verification_event(data)
    assert refusal.value.path == "drafters[1].drafter_id"
    assert "../fter-1" in refusal.value.found


def test_invalid_an_unknown_finish_reason_is_refused_with_the_known_ones() -> None:
    data = encode(make_event(finish_reason=FinishReason.LENGTH)).replace(b"length", b"bored!")
    with pytest.raises(ContractError, match="finish_reason: found 'bored!', expected one of"):
        decode_verification_event(data)
