"""Regret is what its definition says, and its intervals cover what they should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from replay.comparators import best_fixed, clairvoyant
from replay.cost import MeasuredCost
from replay.regret import (
    ComparableRounds,
    block_bootstrap_interval,
    comparable_rounds,
    regret,
)
from replay.requests import join_requests
from replay.trace import build_trace
from schemas.events import NO_DRAFTER, AcceptanceRule, ScoredWindows, VerificationEvent
from tests.replay.synthetic import log, make_request


def rounds_of(*events: VerificationEvent) -> ComparableRounds:
    return comparable_rounds(build_trace(join_requests(log(events))))


def keep_windows(event: VerificationEvent, keep: np.ndarray) -> VerificationEvent:
    windows = event.windows
    return replace(
        event,
        windows=ScoredWindows(
            start=windows.start[keep],
            num_levels=windows.num_levels[keep],
            acceptance_probability=windows.acceptance_probability[keep],
            realised_acceptance=windows.realised_acceptance[keep],
        ),
    )


def test_a_greedy_round_was_played_at_the_length_it_had() -> None:
    event = make_request(num_tokens=200)
    rounds = rounds_of(event)
    # The first round comes from the prompt and is not compared, nor is one of the last token;
    # near the end a draft is cut to the room left.
    logged = event.rounds.num_accepted_tokens[1:-4] + 1
    assert np.array_equal(rounds.played_lengths[: logged.size], logged)
    assert np.allclose(rounds.played_losses[: logged.size], 1 - logged / 5)
    assert rounds.num_left_out == 0
    assert rounds.num_rounds >= event.rounds.first_position.size - 2


def test_a_round_without_drafter_counts_one_token() -> None:
    event = make_request(no_drafter_share=0.5)
    rounds = rounds_of(event)
    is_idle = event.rounds.drafter_index[1 : 1 + rounds.num_rounds] == NO_DRAFTER
    assert is_idle.any()
    assert np.array_equal(rounds.played_lengths[is_idle], np.ones(is_idle.sum()))
    assert np.allclose(rounds.played_losses[is_idle], 1 - 1 / 5)


def test_rounds_without_window_are_left_out_for_all_and_counted() -> None:
    event = make_request(num_tokens=80)
    # Some windows that rounds start at, and some others.
    keep = np.ones(event.windows.start.size, dtype=bool)
    gone = event.rounds.first_position[3:6]
    keep[np.isin(event.windows.start, gone)] = False
    rounds = rounds_of(keep_windows(event, keep))
    assert rounds.num_left_out == 3
    assert rounds.num_rounds == rounds_of(event).num_rounds - 3
    assert np.isfinite(rounds.losses).all()


def test_a_round_whose_played_drafter_was_not_scored_is_left_out() -> None:
    event = make_request(num_tokens=80)
    values = event.windows.acceptance_probability.copy(), event.windows.realised_acceptance.copy()
    for one in values:
        one[:, :, 0] = np.nan
    windows = replace(
        event.windows, acceptance_probability=values[0], realised_acceptance=values[1]
    )
    rounds = rounds_of(replace(event, windows=windows))
    is_first = event.rounds.drafter_index == 0
    assert rounds.num_left_out == int((event.rounds.num_draft_tokens[is_first] > 0).sum())
    assert rounds.num_unscored.tolist() == [rounds.num_rounds, 0, 0]
    assert (rounds.lengths[:, 0] == 1.0).all()


def test_regret_against_the_clairvoyant_is_never_negative_and_its_parts_agree() -> None:
    rounds = rounds_of(make_request(num_tokens=300))
    found = regret(rounds, clairvoyant(rounds.losses))
    assert (found.loss >= -1e-12).all()
    assert np.allclose(found.tokens, 5 * found.loss)


def test_playing_the_best_drafter_throughout_has_no_static_regret() -> None:
    rounds = rounds_of(make_request(hit_rates=[0.8], num_tokens=100))
    found = regret(rounds, best_fixed(rounds.losses))
    assert np.array_equal(found.loss, np.zeros(rounds.num_rounds))


def cost(draft: float, verify: float, *, num_drafters: int = 3) -> MeasuredCost:
    """Return what drafting a token and verifying costs, the same for all drafters."""
    return MeasuredCost(
        draft_seconds=np.full(num_drafters, draft),
        verify_seconds=np.full(5, verify),
        score_seconds=0.0,
    )


def test_seconds_are_tokens_at_their_price_where_all_rounds_cost_the_same() -> None:
    rounds = rounds_of(make_request(num_tokens=300))
    found = regret(rounds, best_fixed(rounds.losses), cost(0.0, 2.0))
    assert found.seconds is not None
    price = 2.0 * rounds.num_rounds / rounds.played_lengths.sum()
    assert np.allclose(found.seconds, price * found.tokens)
    assert found.seconds.sum() == pytest.approx(price * found.tokens.sum())


def test_a_cheaper_drafter_of_equal_length_saves_its_drafting() -> None:
    event = make_request(hit_rates=[1.0, 1.0], num_tokens=100)
    rounds = rounds_of(event)
    measured = MeasuredCost(
        draft_seconds=np.array([0.0, 3.0]), verify_seconds=np.ones(5), score_seconds=0.0
    )
    found = regret(rounds, np.zeros(rounds.num_rounds, dtype=np.int16), measured)
    assert found.seconds is not None
    assert np.allclose(found.seconds, np.where(rounds.drafter == 1, 3.0 * rounds.num_levels, 0.0))


def test_a_cost_that_was_never_measured_leaves_seconds_out() -> None:
    rounds = rounds_of(make_request(num_tokens=100))
    unknown = cost(0.0, 1.0)
    unknown.draft_seconds[int(best_fixed(rounds.losses)[0])] = np.nan
    assert regret(rounds, best_fixed(rounds.losses), unknown).seconds is None
    assert regret(rounds, best_fixed(rounds.losses)).seconds is None


def test_losses_are_relative_to_the_depth_of_their_own_request() -> None:
    shallow = make_request(num_speculative_tokens=2, hit_rates=[1.0], num_tokens=60)
    deep = make_request(
        num_speculative_tokens=5, hit_rates=[1.0], num_tokens=60, sequence=1, request_id="b"
    )
    rounds = rounds_of(shallow, deep)
    assert np.allclose(rounds.played_losses[:5], 0.0)
    assert np.allclose(rounds.played_losses[rounds.request == 1][:5], 0.0)
    assert set(np.round(rounds.played_lengths[:5])) == {3.0}


def test_the_rounds_of_a_stream_are_its_own() -> None:
    first = make_request(stream="a")
    second = make_request(stream="b", sequence=1, seed=2)
    rounds = rounds_of(first, second)
    alone = rounds_of(second)
    part = rounds.of_stream(1)
    assert np.array_equal(part.losses, alone.losses)
    assert np.array_equal(part.played_lengths, alone.played_lengths)


def test_expectations_stand_in_for_luck_when_sampling() -> None:
    event = make_request(rule=AcceptanceRule.SPECULATIVE_SAMPLING, num_tokens=2000)
    rounds = rounds_of(event)
    logged = event.rounds.num_accepted_tokens[1:] + 1
    assert not np.allclose(rounds.played_lengths, logged)
    assert rounds.played_lengths.mean() == pytest.approx(logged.mean(), abs=0.15)


def test_intervals_cover_the_mean_of_independent_and_dependent_series() -> None:
    generator = np.random.default_rng(0)
    for dependence, block_length in ((0.0, None), (0.8, 20)):
        covered = 0
        for _ in range(200):
            noise = generator.normal(size=600)
            series = np.empty(600)
            series[0] = noise[0] / np.sqrt(1 - dependence**2)
            for index in range(1, 600):
                series[index] = dependence * series[index - 1] + noise[index]
            interval = block_bootstrap_interval(
                series, generator, block_length=block_length, num_resamples=200
            )
            assert interval is not None
            assert interval.low <= interval.high
            covered += interval.low <= 0.0 <= interval.high
        assert 170 <= covered <= 200


def test_equal_seeds_give_equal_intervals_around_the_sum() -> None:
    series = np.random.default_rng(1).random(500)
    one = block_bootstrap_interval(series, np.random.default_rng(2))
    other = block_bootstrap_interval(series, np.random.default_rng(2))
    assert one == other
    assert one is not None
    assert one.value == pytest.approx(series.sum())
    assert one.low < one.value < one.high


@pytest.mark.parametrize("length", [0, 1, 3])
def test_too_few_rounds_give_no_interval(length: int) -> None:
    assert block_bootstrap_interval(np.ones(length), np.random.default_rng(0)) is None


def test_invalid_comparator_length_is_refused() -> None:
    rounds = rounds_of(make_request())
    with pytest.raises(ValueError, match=f"comparators for {rounds.num_rounds} rounds"):
        regret(rounds, np.zeros(3, dtype=np.int64))
