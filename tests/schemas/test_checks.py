"""Every rule of the contracts refuses what breaks it, with the path and both values."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from schemas import checks
from schemas.equality import same_message
from schemas.errors import ContractError
from schemas.events import (
    NO_DRAFTER,
    AcceptanceRule,
    DrafterVersion,
    FeatureReference,
    FinishReason,
    SamplingRule,
    VerificationEvent,
)
from tests.schemas.builders import make_drafters, make_event, make_policy

EVENT = make_event(num_windows=6, num_drafters=3, num_speculative_tokens=4, with_content=True)


NAN = float("nan")


def changed(values: NDArray[Any], changes: Mapping[Any, Any]) -> NDArray[Any]:
    """Copy an array with some elements replaced."""
    copy = values.copy()
    for index, value in changes.items():
        copy[index] = value
    return copy


def with_part(event: VerificationEvent, path: str, values: Any) -> VerificationEvent:
    """Build the event again with ``rounds.x``, ``windows.x`` or ``content.x`` replaced."""
    part, name = path.split(".")
    return replace(event, **{part: replace(getattr(event, part), **{name: values})})


def part_of(event: VerificationEvent, path: str) -> NDArray[Any]:
    """Return the array at ``rounds.x``, ``windows.x`` or ``content.x``."""
    part, name = path.split(".")
    values: NDArray[Any] = getattr(getattr(event, part), name)
    return values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("event_id", ""),
        ("worker_id", "../etc/passwd"),
        ("stream", "a/b"),
        ("stream", ".hidden"),
        ("stream", "a\x00"),
        ("stream", "%2e%2e%2f"),
        ("stream", "line\n"),
        ("request_id", "a" * 201),
        ("target_id", None),
        ("policy_name", 7),
        ("policy_name", "hedge:learning_rate=1 loss=first"),
        ("target_fingerprint", "\ud800"),
        ("tokenizer_hash", None),
        ("worker_epoch", -1),
        ("sequence", 1.5),
        ("sequence", True),
        ("sequence", 2**63),
        ("segment_index", NAN),
        ("policy_version", "1"),
        ("num_speculative_tokens", 2**15),
        ("first_position", 2**31),
        ("is_final", 1),
        ("finish_reason", "stop"),
        ("finish_reason", FinishReason.UNFINISHED),
        ("produced_at", datetime(2026, 1, 1)),
        ("produced_at", datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=-5)))),
        ("produced_at", "2026-01-01"),
        ("num_positions", EVENT.num_positions + 1),
        ("prior_probabilities", np.ones(3)),
        ("prior_probabilities", np.full(2, 0.5)),
        ("prior_probabilities", np.full(3, 1 / 3, np.float32)),
        ("prior_probabilities", [0.5, 0.25, 0.25]),
        ("policy_table", np.ones(4)),
        ("policy_table", np.ones(6, np.float32)),
        ("policy_table", np.ones((2, 3))),
        ("policy_numbers", np.ones(1)),
        ("num_awake_rounds", np.zeros(2, np.int32)),
        ("num_awake_rounds", np.zeros(3, np.int64)),
    ],
)
def test_invalid_fields_of_an_event_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ContractError) as refusal:
        replace(EVENT, **{name: value})
    assert refusal.value.path == name
    assert refusal.value.found
    assert refusal.value.expected


@pytest.mark.parametrize(
    ("path", "index", "value"),
    [
        ("rounds.drafter_index", 0, 3),
        ("rounds.drafter_index", 1, -2),
        ("rounds.num_draft_tokens", 0, 5),
        ("rounds.num_draft_tokens", 0, -1),
        ("rounds.num_accepted_tokens", 0, -1),
        ("rounds.num_emitted_tokens", 0, -1),
        ("rounds.first_position", 1, 0),
        ("rounds.num_scored_windows", 0, -1),
        ("rounds.selection_probability", 1, NAN),
        ("rounds.selection_probability", 0, 0.0),
        ("rounds.selection_probability", 0, 1.5),
        ("rounds.draft_seconds", 0, NAN),
        ("rounds.verify_seconds", 0, -0.1),
        ("rounds.score_seconds", 0, np.inf),
        ("rounds.batch_size", 0, 0),
        ("rounds.score_probability", 1, 0.0),
        ("rounds.score_probability", 1, 1.5),
        ("rounds.score_probability", 0, NAN),
        ("windows.num_levels", 2, 0),
        ("windows.num_levels", 2, 3),
        ("windows.start", 0, 4),
        ("windows.start", 3, 7),
        ("windows.start", 5, 10_000),
        ("windows.acceptance_probability", (1, 2, 0), 1.001),
        ("windows.acceptance_probability", (1, 2, 0), -0.001),
        ("windows.realised_acceptance", (0, 3, 2), np.inf),
        ("content.token_ids", 0, -1),
        ("content.prompt_token_ids", 0, -1),
        ("content.target_top_token_ids", (0, 1), -1),
        ("content.target_top_log_probabilities", (1, 1), NAN),
        ("content.target_top_log_probabilities", (1, 1), 0.5),
        ("content.target_tail_mass", 0, NAN),
        ("content.target_tail_mass", 0, 1.5),
    ],
)
def test_invalid_elements_are_refused_with_their_place_and_value(
    path: str, index: Any, value: Any
) -> None:
    values = changed(part_of(EVENT, path), {index: value})
    with pytest.raises(ContractError) as refusal:
        with_part(EVENT, path, values)
    indices = index if isinstance(index, tuple) else (index,)
    assert refusal.value.path == path + "".join(f"[{i}]" for i in indices)
    assert refusal.value.found == str(values[index])


@pytest.mark.parametrize(
    ("name", "value"),
    [("policy_table", NAN), ("policy_table", np.inf), ("policy_numbers", NAN)],
)
def test_invalid_numbers_of_a_carried_state_are_refused_with_their_place(
    name: str, value: float
) -> None:
    state: dict[str, Any] = {"policy_table": np.ones(6), "policy_numbers": np.ones(2)}
    state[name][1] = value
    with pytest.raises(ContractError) as refusal:
        replace(EVENT, **state)
    assert (refusal.value.path, refusal.value.found) == (f"{name}[1]", str(value))


def test_invalid_a_carried_state_after_the_first_segment_is_refused() -> None:
    with pytest.raises(ContractError, match=r"policy_table: found 6 values, expected none in segm"):
        replace(make_event(segment_index=1), policy_table=np.ones(6))


def test_invalid_a_drafter_that_was_awake_in_more_rounds_than_there_were_is_refused() -> None:
    num_rounds = EVENT.rounds.first_position.size
    awake = np.array([0, num_rounds, num_rounds + 1], np.int32)
    with pytest.raises(ContractError) as refusal:
        replace(EVENT, num_awake_rounds=awake)
    assert refusal.value.path == "num_awake_rounds[2]"
    assert refusal.value.expected == f"0..{num_rounds}"


def test_what_is_not_said_of_a_round_is_that_it_was_alone_and_is_scored() -> None:
    rounds = EVENT.rounds
    assert rounds.batch_size.tolist() == [1] * rounds.first_position.size
    assert rounds.score_probability.tolist() == [1.0] * rounds.first_position.size


ARRAYS = [
    f"{part}.{name}"
    for part in ("rounds", "windows", "content")
    for name in getattr(EVENT, part).__dataclass_fields__
    if name != "features"
]


@pytest.mark.parametrize("path", ARRAYS)
def test_invalid_arrays_of_another_type_are_refused(path: str) -> None:
    with pytest.raises(ContractError) as refusal:
        with_part(EVENT, path, part_of(EVENT, path).astype(np.float64))
    assert refusal.value.path == path
    assert refusal.value.found == "float64"


@pytest.mark.parametrize("path", ARRAYS)
def test_invalid_arrays_of_another_shape_are_refused(path: str) -> None:
    values = part_of(EVENT, path)
    for wrong in (values[:-1], values[None], np.asarray(values.flat[0])):
        with pytest.raises(ContractError):
            with_part(EVENT, path, wrong)


@pytest.mark.parametrize("path", ARRAYS)
def test_invalid_lists_in_place_of_arrays_are_refused(path: str) -> None:
    with pytest.raises(ContractError) as refusal:
        with_part(EVENT, path, part_of(EVENT, path).tolist())
    assert refusal.value.path == path
    assert refusal.value.expected == "a ndarray"


def test_invalid_more_accepted_than_drafted_is_refused_with_both_numbers() -> None:
    rounds = EVENT.rounds
    drafted = int(rounds.num_draft_tokens[1])
    accepted = changed(rounds.num_accepted_tokens, {1: drafted + 1})
    with pytest.raises(ContractError) as refusal:
        with_part(EVENT, "rounds.num_accepted_tokens", accepted)
    assert refusal.value.path == "rounds.num_accepted_tokens[1]"
    assert (refusal.value.found, refusal.value.expected) == (str(drafted + 1), f"0..{drafted}")


def test_invalid_a_draft_of_no_drafter_is_refused() -> None:
    rounds = EVENT.rounds
    drafting = int(np.flatnonzero(rounds.num_draft_tokens)[0])
    index = changed(rounds.drafter_index, {drafting: NO_DRAFTER})
    with pytest.raises(ContractError, match=r"rounds\.num_draft_tokens.*expected 0\.\.0"):
        with_part(EVENT, "rounds.drafter_index", index)


def test_only_the_end_of_a_request_may_cut_the_last_rounds() -> None:
    event = make_event(num_windows=0, seed=3)
    rounds = event.rounds
    emitted = changed(rounds.num_emitted_tokens, {-1: 0})
    shorter: dict[str, Any] = {
        "rounds": replace(rounds, num_emitted_tokens=emitted),
        "num_positions": int(emitted.sum()),
    }
    assert replace(event, **shorter).num_positions < event.num_positions
    with pytest.raises(ContractError, match="num_emitted_tokens"):
        replace(event, **shorter, is_final=False, finish_reason=FinishReason.UNFINISHED)


def test_invalid_a_round_that_emits_after_a_cut_is_refused() -> None:
    rounds = EVENT.rounds
    emitted = changed(rounds.num_emitted_tokens, {0: 0})
    first = EVENT.first_position + np.cumsum(emitted) - emitted
    cut = replace(rounds, num_emitted_tokens=emitted, first_position=first.astype(np.int32))
    with pytest.raises(ContractError) as refusal:
        replace(EVENT, rounds=cut, num_positions=int(emitted.sum()), content=None)
    assert refusal.value.path == "rounds.num_emitted_tokens[0]"


def test_only_the_end_of_a_request_may_cut_a_window() -> None:
    event = make_event(num_windows=1, num_speculative_tokens=3, num_drafters=1)
    windows = event.windows
    last = event.first_position + event.num_positions - 1
    cut = replace(
        windows,
        start=np.array([last], np.int32),
        num_levels=np.array([1], np.int16),
        acceptance_probability=np.array([[[0.5], [NAN], [NAN]]], np.float16),
        realised_acceptance=np.array([[[1.0], [NAN], [NAN]]], np.float16),
    )
    assert replace(event, windows=cut).windows.num_levels.tolist() == [1]
    with pytest.raises(ContractError, match=r"windows\.num_levels\[0\]: found 1"):
        replace(event, windows=cut, is_final=False, finish_reason=FinishReason.UNFINISHED)


@pytest.mark.parametrize(
    ("num_levels", "is_allowed"), [(1, False), (2, True), (3, True), (4, False)]
)
def test_a_window_cut_by_the_end_of_the_request_leaves_out_at_most_the_last_position(
    num_levels: int, is_allowed: bool
) -> None:
    event = make_event(num_windows=1, num_speculative_tokens=4, num_drafters=1)
    scores = np.full((1, 4, 1), NAN, np.float16)
    windows = replace(
        event.windows,
        start=np.array([event.first_position + event.num_positions - 3], np.int32),
        num_levels=np.array([num_levels], np.int16),
        acceptance_probability=scores,
        realised_acceptance=scores,
    )
    if is_allowed:
        assert replace(event, windows=windows).windows.num_levels.tolist() == [num_levels]
    else:
        with pytest.raises(ContractError, match=rf"found {num_levels}, expected 2\.\.3"):
            replace(event, windows=windows)


def test_invalid_a_score_beyond_the_levels_of_its_window_is_refused() -> None:
    event = make_event(num_windows=1, num_speculative_tokens=3, num_drafters=2)
    last = event.first_position + event.num_positions - 1
    scores = np.full((1, 3, 2), NAN, np.float16)
    scores[0, 2, 1] = 0.25
    windows = replace(
        event.windows,
        start=np.array([last], np.int32),
        num_levels=np.array([1], np.int16),
        acceptance_probability=scores,
        realised_acceptance=scores,
    )
    with pytest.raises(ContractError) as refusal:
        replace(event, windows=windows)
    assert refusal.value.path == "windows.acceptance_probability[0][2][1]"
    assert refusal.value.found == "0.25"


def test_invalid_a_drafter_listed_twice_is_refused() -> None:
    with pytest.raises(ContractError) as refusal:
        make_event(drafters=make_drafters(2) + make_drafters(1))
    assert refusal.value.path == "drafters[2].drafter_id"


def test_invalid_a_prompt_after_the_first_segment_is_refused() -> None:
    with pytest.raises(ContractError) as refusal:
        replace(EVENT, segment_index=1)
    assert refusal.value.path == "content.prompt_token_ids"


def test_invalid_features_of_another_number_of_rows_are_refused() -> None:
    reference = FeatureReference(uri="memory://f", first_row=0, num_rows=3, sha256="0" * 64)
    with pytest.raises(ContractError) as refusal:
        make_event(with_content=True, features=reference)
    assert refusal.value.path == "content.features.num_rows"


@pytest.mark.parametrize("rule", AcceptanceRule)
def test_temperature_is_zero_exactly_when_the_rule_is_greedy(rule: AcceptanceRule) -> None:
    right, wrong = (0.0, 0.7) if rule is AcceptanceRule.GREEDY else (0.7, 0.0)
    assert SamplingRule(acceptance_rule=rule, temperature=right).temperature == right
    with pytest.raises(ContractError, match=r"sampling\.temperature"):
        SamplingRule(acceptance_rule=rule, temperature=wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", NAN), ("temperature", np.inf), ("top_p", 0.0), ("top_p", NAN), ("top_k", -1)],
)
def test_invalid_sampling_numbers_are_refused(name: str, value: Any) -> None:
    rule = SamplingRule(acceptance_rule=AcceptanceRule.ONE_HOT, temperature=0.7)
    with pytest.raises(ContractError) as refusal:
        replace(rule, **{name: value})
    assert refusal.value.path == f"sampling.{name}"


@given(npst.arrays(np.uint16, st.integers(0, 9)))
def test_the_fast_check_of_fractions_agrees_with_comparing_floats(bits: NDArray[Any]) -> None:
    values = bits.view(np.float16)
    good = np.isnan(values) | ((values >= 0) & (values <= 1))
    try:
        checks.fractions("scores", values)
    except ContractError as refusal:
        assert refusal.path == f"scores[{np.flatnonzero(~good)[0]}]"
    else:
        assert good.all()


def test_arrays_of_a_message_cannot_be_written_and_the_caller_keeps_his_own() -> None:
    start = np.array(EVENT.windows.start)
    windows = replace(EVENT.windows, start=start)
    with pytest.raises(ValueError, match="read-only"):
        windows.start[0] = 1
    start[0] = 1
    policy = make_policy()
    for values in (policy.log_weights, policy.cost.verify_seconds, policy.accumulators["regret"]):
        assert not values.flags.writeable


def test_an_id_of_a_drafter_may_look_like_a_number() -> None:
    assert DrafterVersion(drafter_id="007", weights_version=0).drafter_id == "007"


def test_messages_and_refusals_cross_processes() -> None:
    assert same_message(EVENT, pickle.loads(pickle.dumps(EVENT)))
    refusal = pickle.loads(pickle.dumps(ContractError("a.b", found=1, expected=2)))
    assert (refusal.path, refusal.found, refusal.expected) == ("a.b", "1", "2")
    assert str(refusal) == "a.b: found 1, expected 2"


def test_a_refusal_seen_from_its_parent_has_the_longer_path() -> None:
    assert str(ContractError("b", found=1, expected=2).under("a")) == "a.b: found 1, expected 2"


def test_another_name_of_offset_zero_is_utc() -> None:
    moment = datetime(2026, 1, 1, tzinfo=timezone(timedelta(0), "Z"))
    assert replace(EVENT, produced_at=moment).produced_at == datetime(2026, 1, 1, tzinfo=UTC)
