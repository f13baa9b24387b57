"""What a request starts from: its stream's prior and policy, over the drafters there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inference.priors import NEWCOMER_SHARE, StreamPolicies, StreamPriors
from learner.carried import packed
from learner.selection import CompiledPolicy, parse_policy, policy_from_name
from learner.stream_state import StreamSettings, StreamState
from schemas.events import AcceptanceRule, PolicyPublished, Watermark
from tests.learner.fakes import PlacedEvent
from tests.schemas.builders import PRODUCED_AT, make_event, make_policy

GRID = "ada_normal_hedge_grid"
IDS = ["drafter-0", "drafter-1", "drafter-2"]


def policy(probabilities: list[float], *, version: int = 1, stream: str = "s") -> PolicyPublished:
    """Return a policy over ``drafter-0``, ``drafter-1``, ..."""
    made = make_policy(stream=stream, version=version, num_drafters=len(probabilities))
    return replace(made, selection_probabilities=np.array(probabilities))


def priors_of(*policies: PolicyPublished) -> StreamPriors:
    """Return priors that know these policies."""
    priors = StreamPriors()
    for one in policies:
        priors.update(one)
    return priors


def test_a_new_stream_starts_uniform_at_version_0() -> None:
    prior, version = priors_of().of("s", IDS)
    assert prior.tolist() == [1 / 3] * 3
    assert version == 0


def test_the_policy_of_the_stream_is_the_prior_in_the_order_of_the_pool() -> None:
    priors = priors_of(policy([0.7, 0.2, 0.1]), policy([0.1, 0.1, 0.8], stream="other"))
    prior, version = priors.of("s", ["drafter-2", "drafter-0", "drafter-1"])
    np.testing.assert_allclose(prior, [0.1, 0.7, 0.2])
    assert version == 1


def test_an_older_policy_does_not_replace_a_newer_one() -> None:
    priors = priors_of(policy([0.7, 0.2, 0.1], version=9), policy([0.1, 0.2, 0.7], version=8))
    prior, version = priors.of("s", IDS)
    assert version == 9
    assert prior[0] == pytest.approx(0.7)


def test_newcomers_share_what_is_set_aside_for_them() -> None:
    priors = priors_of(policy([0.75, 0.25]))
    prior, _ = priors.of("s", ["drafter-0", "new-a", "drafter-1", "new-b"])
    half = NEWCOMER_SHARE / 2
    kept = 1.0 - NEWCOMER_SHARE
    np.testing.assert_allclose(prior, [0.75 * kept, half, 0.25 * kept, half])


def test_drafters_that_have_left_take_nothing_with_them() -> None:
    prior, _ = priors_of(policy([0.5, 0.3, 0.2])).of("s", ["drafter-1", "drafter-2"])
    np.testing.assert_allclose(prior, [0.6, 0.4])


def test_a_policy_that_knows_nobody_of_the_pool_gives_a_uniform_prior() -> None:
    prior, version = priors_of(policy([0.5, 0.5], version=4)).of("s", ["x", "y"])
    assert prior.tolist() == [0.5, 0.5]
    assert version == 4


@pytest.mark.parametrize("probabilities", [[1.0, 0.0, 0.0], [1.0 - 1e-300, 1e-300, 5e-324]])
def test_every_prior_can_start_a_policy(probabilities: list[float]) -> None:
    prior, _ = priors_of(policy(probabilities)).of("s", IDS)
    assert (prior > 0.0).all()
    assert prior.sum() == pytest.approx(1.0)
    for name in ("hedge", "normal_hedge"):
        found = policy_from_name(name, 3, prior=prior).probabilities()
        np.testing.assert_allclose(found, prior, atol=1e-9)


def published(
    chances: list[float], *, sequence: int, version: int = 1, name: str = GRID
) -> PolicyPublished:
    """Return a policy whose learner has seen up to one sequence of this worker, and its state."""
    spec = parse_policy(name)
    state = spec.build(len(chances), prior=chances)
    table, numbers = packed(state)
    return make_policy(
        stream="s",
        version=version,
        num_drafters=len(chances),
        policy_name=name,
        watermark=Watermark(worker_to_sequence={"worker-0/7": sequence, "other/1": 99}),
        accumulators={
            "policy_layout": np.array([float(state.version)]),
            "policy_table": table.reshape(-1, len(chances)),
            "policy_numbers": numbers,
        },
    )


def streams_of(name: str = GRID) -> StreamPolicies:
    """Return the streams of worker-0 in epoch 7."""
    return StreamPolicies(parse_policy(name), "worker-0/7")


def finish_request(streams: StreamPolicies, *, better: int, sequence: int) -> CompiledPolicy:
    """Serve a request in which one drafter is better than the others."""
    start = streams.start("s", IDS)
    losses = np.full((40, 3), 0.9)
    losses[:, better] = 0.1
    start.policy.learn_windows(losses)
    streams.emitted("s", sequence)
    streams.finished("s", start, losses, IDS)
    return start.policy


def test_a_request_goes_on_where_the_one_before_it_ended() -> None:
    streams = streams_of()
    first = streams.start("s", IDS)
    assert first.carried is None
    done = finish_request(streams, better=2, sequence=0)
    start = streams.start("s", IDS)
    assert start.carried is not None
    assert start.carried.table.tolist() == start.policy.table.tolist() == done.table.tolist()
    start.policy.learn_windows(np.ones((3, 3)))
    assert streams.start("s", IDS).policy.table.tolist() == done.table.tolist(), "a copy learns"
    assert streams.start("elsewhere", IDS).carried is None


def test_of_requests_at_the_same_time_the_last_to_end_wins() -> None:
    streams = streams_of()
    one, other = streams.start("s", IDS), streams.start("s", IDS)
    for start, best in ((other, 0), (one, 1)):
        losses = np.array([np.arange(3) != best], dtype=np.float64)
        start.policy.learn_windows(losses)
        streams.finished("s", start, losses, IDS)
    assert streams.start("s", IDS).policy.table.tolist() == one.policy.table.tolist()


def test_policies_of_scope_request_always_start_from_the_prior() -> None:
    streams = streams_of("normal_hedge")
    finish_request(streams, better=1, sequence=0)
    streams.update(published([0.2, 0.3, 0.5], sequence=0, name="normal_hedge"))
    start = streams.start("s", IDS)
    assert start.carried is None
    np.testing.assert_allclose(start.policy.probabilities(), start.prior)


def test_a_worker_that_knows_nothing_takes_over_what_is_published() -> None:
    streams = streams_of()
    streams.update(published([0.2, 0.3, 0.5], sequence=0, version=4))
    start = streams.start("s", IDS)
    np.testing.assert_allclose(start.policy.probabilities(), [0.2, 0.3, 0.5])
    assert start.policy_version == 4


@pytest.mark.parametrize(("contained", "is_adopted"), [(2, False), (3, True), (4, True)])
def test_what_is_published_is_taken_over_once_it_contains_all_that_was_emitted(
    contained: int, is_adopted: bool
) -> None:
    streams = streams_of()
    own = finish_request(streams, better=1, sequence=3)
    streams.update(published([0.2, 0.3, 0.5], sequence=contained))
    expected = [0.2, 0.3, 0.5] if is_adopted else own.probabilities()
    np.testing.assert_allclose(streams.start("s", IDS).policy.probabilities(), expected)


def test_a_request_that_ends_later_goes_on_from_its_own_again() -> None:
    streams = streams_of()
    streams.update(published([0.2, 0.3, 0.5], sequence=0))
    own = finish_request(streams, better=0, sequence=1)
    assert streams.start("s", IDS).policy.table.tolist() == own.table.tolist()


@pytest.mark.parametrize("name", ["fixed_share", f"{GRID}:memory=0.9", f"{GRID}:loss=length"])
def test_the_state_of_another_policy_is_not_taken_over(name: str) -> None:
    streams = streams_of(name)
    streams.update(published([0.2, 0.3, 0.5], sequence=0))
    assert streams.start("s", IDS).carried is None


def test_a_state_of_another_build_is_not_taken_over_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    streams = streams_of()
    broken = published([0.2, 0.3, 0.5], sequence=0)
    arrays = {**broken.accumulators, "policy_layout": np.array([9.0])}
    streams.update(replace(broken, accumulators=arrays))
    assert streams.start("s", IDS).carried is None
    assert "policy of stream s not taken over" in caplog.text


def test_a_newcomer_in_the_pool_enters_with_its_share() -> None:
    streams = streams_of()
    streams.update(published([0.4, 0.6], sequence=0))
    found = streams.start("s", ["drafter-1", "new", "drafter-0"]).policy.probabilities()
    kept = 1.0 - NEWCOMER_SHARE
    np.testing.assert_allclose(found, [0.6 * kept, NEWCOMER_SHARE, 0.4 * kept])


def known(stream: str, mean_losses: list[float]) -> PolicyPublished:
    """Return what a learner publishes of a stream with 500 windows of such losses."""
    evidence = 500.0 * (np.array(mean_losses) - np.mean(mean_losses))
    made = published([1 / 3] * 3, sequence=0, name="normal_hedge")
    arrays = {"excess_loss": evidence, "num_windows": np.full(3, 500.0)}
    return replace(made, stream=stream, accumulators=arrays)


def test_a_new_tenant_starts_from_its_domain_with_scope_both_alone() -> None:
    both, alone = streams_of(f"{GRID}:scope=both"), streams_of()
    for streams in (both, alone):
        streams.update(known("acme.code", [0.9, 0.1, 0.9]))
        streams.update(known("acme.maths", [0.1, 0.9, 0.9]))
    start = both.start("globex.code", IDS)
    assert start.prior.argmax() == 1
    assert start.carried is None
    np.testing.assert_allclose(start.policy.probabilities(), start.prior)
    assert alone.start("globex.code", IDS).prior.tolist() == [1 / 3] * 3


def test_with_scope_both_a_request_moves_to_where_its_prompt_points() -> None:
    streams = streams_of(f"{GRID}:scope=both")
    for turn in range(40):
        best = turn % 2
        start = streams.start("s", IDS, [best] * 20)
        losses = np.tile(np.where(np.arange(3) == best, 0.1, 0.9), (30, 1))
        start.policy.learn_windows(losses)
        streams.finished("s", start, losses, IDS)
    start = streams.start("s", IDS, [0] * 20)
    assert start.carried is not None
    assert start.carried.table.tolist() == start.policy.table.tolist(), "what is logged is played"
    np.testing.assert_allclose(start.policy.probabilities(), start.prior)
    assert start.prior[0] > 0.9, "the state alone would still go for the drafter of the last text"


def test_with_scope_both_a_worker_takes_over_what_is_published() -> None:
    streams = streams_of(f"{GRID}:scope=both")
    streams.update(published([0.2, 0.3, 0.5], sequence=0, name=f"{GRID}:scope=both"))
    start = streams.start("s", IDS)
    assert start.carried is not None
    assert np.argsort(start.prior).tolist() == [0, 1, 2]


def test_what_a_learner_publishes_of_one_tenant_starts_another_and_carries_its_own() -> None:
    spec = parse_policy(f"{GRID}:scope=both")
    settings = StreamSettings(policy=spec)
    state = StreamState(stream="acme.code")
    acceptance = np.broadcast_to([0.1, 0.9, 0.1], (6, 4, 3))
    for sequence in range(8):
        event = make_event(
            stream="acme.code",
            sequence=sequence,
            acceptance_rule=AcceptanceRule.SPECULATIVE_SAMPLING,
            acceptance_probability=acceptance,
            realised_acceptance=acceptance,
        )
        placed = PlacedEvent(partition=0, offset=sequence, event=event)
        state, _ = state.learned(placed, settings)
    streams = streams_of(str(spec))
    streams.update(state.to_policy(settings, learner_id="learner-0", produced_at=PRODUCED_AT))
    assert state.policy is not None
    new, own = streams.start("globex.code", IDS), streams.start("acme.code", IDS)
    assert new.carried is None
    assert new.prior[1] > 0.5
    assert own.carried is not None
    assert own.prior[1] > new.prior[1]
