"""The live statistics say what the events say."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from learner.trial import shadow_id
from pipeline.demo.traffic import RECENT_REQUESTS, TrafficStatistics
from schemas.events import FinishReason, VerificationEvent
from tests.schemas.builders import make_event

DRAFTERS = ("drafter-0", "drafter-1", "drafter-2")


def request(acceptance: float, *, sequence: int = 0) -> VerificationEvent:
    """Return a request of one segment whose drafters are accepted with one probability."""
    return make_event(
        num_windows=13,
        sequence=sequence,
        acceptance_probability=acceptance,
        realised_acceptance=acceptance,
    )


def test_a_drafter_that_is_always_accepted_walks_in_steps_of_k_plus_one() -> None:
    statistics = TrafficStatistics()
    statistics.begin_phase("code")
    statistics.add(request(1.0))
    (phase,) = statistics.phases
    for name in DRAFTERS:
        assert phase.recent(name) == 5.0  # K = 4 and the bonus token


def test_a_drafter_that_is_never_accepted_takes_a_round_per_token() -> None:
    statistics = TrafficStatistics()
    statistics.begin_phase("code")
    statistics.add(request(0.0))
    assert statistics.phases[0].recent("drafter-0") == 1.0


def test_only_the_last_requests_of_the_phase_count_as_recent() -> None:
    statistics = TrafficStatistics()
    statistics.begin_phase("code")
    assert statistics.phases[0].recent("drafter-0") is None
    statistics.add(request(1.0))
    for sequence in range(1, RECENT_REQUESTS + 1):
        statistics.add(request(0.0, sequence=sequence))
    assert statistics.phases[0].recent("drafter-0") == 1.0
    statistics.begin_phase("maths")
    assert statistics.phases[1].recent("drafter-0") is None
    assert len(statistics.phases[0].drafter_to_lengths["drafter-0"]) == RECENT_REQUESTS + 1


def test_segments_of_a_request_count_as_one_request() -> None:
    statistics = TrafficStatistics()
    statistics.begin_phase("code")
    statistics.add(make_event(is_final=False))
    assert statistics.phases[0].recent("drafter-0") is None
    statistics.add(make_event(sequence=1, segment_index=1))
    assert len(statistics.phases[0].drafter_to_lengths["drafter-0"]) == 1


def test_tokens_rounds_and_seconds_are_the_sums_of_the_events() -> None:
    events = [make_event(sequence=index, request_id=f"r{index}") for index in range(3)]
    statistics = TrafficStatistics()
    statistics.begin_phase("code")
    for event in events:
        statistics.add(event)
    (result,) = statistics.results()
    rounds = sum(len(event.rounds.first_position) for event in events)
    seconds = sum(
        float((e.rounds.draft_seconds + e.rounds.verify_seconds + e.rounds.score_seconds).sum())
        for e in events
    )
    tokens = sum(event.num_positions for event in events)
    assert (result["num_tokens"], result["num_rounds"]) == (tokens, rounds)
    assert result["mean_acceptance_length"] == pytest.approx(tokens / rounds)
    assert result["tokens_per_second"] == pytest.approx(tokens / seconds, rel=1e-4)
    assert sum(result["drafter_to_rounds"].values()) == sum(
        int((event.rounds.drafter_index >= 0).sum()) for event in events
    )


def test_shares_of_recent_rounds_add_up_and_versions_are_the_newest() -> None:
    statistics = TrafficStatistics()
    assert statistics.selection_share("drafter-0") == 0.0
    statistics.begin_phase("code")
    statistics.add(make_event(weights_version=1))
    statistics.add(make_event(sequence=1, weights_version=2))
    assert sum(statistics.selection_share(name) for name in DRAFTERS) == pytest.approx(1.0)
    assert set(statistics.versions.values()) == {2}


def test_a_drafter_that_was_not_scored_has_no_length() -> None:
    event = request(1.0)
    unscored = np.array(event.windows.acceptance_probability)
    unscored[:, :, 2] = np.nan
    realised = np.array(event.windows.realised_acceptance)
    realised[:, :, 2] = np.nan
    windows = replace(event.windows, acceptance_probability=unscored, realised_acceptance=realised)
    statistics = TrafficStatistics()
    statistics.begin_phase("code")
    statistics.add(replace(event, windows=windows))
    assert statistics.phases[0].recent("drafter-2") is None
    output = io.StringIO()
    statistics.show(Console(file=output, width=100))
    rows = [line for line in output.getvalue().splitlines() if "drafter-" in line]
    assert "5.00 → 5.00" in rows[0]
    assert "–" in rows[2]


def test_a_version_on_trial_beside_its_drafter_comes_and_goes_within_a_request() -> None:
    statistics = TrafficStatistics()
    statistics.begin_phase("code")
    alone = make_event(
        num_drafters=2, num_windows=13, acceptance_probability=1.0, realised_acceptance=1.0
    )
    first = replace(alone, is_final=False, finish_reason=FinishReason.UNFINISHED)
    whole = request(1.0)
    *own, last = whole.drafters
    beside = replace(last, drafter_id=shadow_id(own[1].drafter_id), weights_version=7)
    statistics.add(first)
    statistics.add(replace(whole, sequence=1, drafters=(*own, beside)))
    assert statistics.drafter_ids == DRAFTERS[:2]
    assert statistics.phases[0].recent(DRAFTERS[1]) is not None
    assert shadow_id(DRAFTERS[1]) not in statistics.phases[0].drafter_to_lengths
