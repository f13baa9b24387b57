"""A second version beside a drafter: scored, never awake; a canary drafts in its place."""

from __future__ import annotations

import numpy as np
import pytest

from inference.drafters.nothing import NothingDrafter
from inference.pool import DrafterPool, PoolSession
from inference.ports import Draft
from inference.shadows import beside, nothing_beside
from tests.inference.fakes import FakeDrafter, proposing
from tests.inference.tiny import VOCAB_SIZE, start_trajectory, tiny_llama

RNG = np.random.default_rng(0)


def head(version: int) -> FakeDrafter:
    """Return a version of a drafter that proposes its number."""
    drafter = proposing(Draft(token_ids=(version,)), drafter_id="head")
    drafter.weights_version = version
    return drafter


def start(pool: DrafterPool, request_id: str = "request-0") -> PoolSession:
    """Begin a request."""
    trajectory = start_trajectory(tiny_llama(), [1, 2, 3])
    return pool.of_request(request_id).start(
        trajectory, stream="s", vocab_size=VOCAB_SIZE, draws_drafts=False
    )


def versions(session: PoolSession) -> list[tuple[str, int]]:
    return [(one.drafter_id, one.weights_version) for one in session.versions]


@pytest.fixture
def pool() -> DrafterPool:
    """Return a pool with version 1 of a head."""
    return DrafterPool([NothingDrafter(), head(1)])


def test_a_version_beside_a_drafter_is_listed_last_and_never_awake(pool: DrafterPool) -> None:
    pool.replace(beside(head(2)))
    session = start(pool)
    assert versions(session) == [("none", 0), ("head", 1), ("head@shadow", 2)]
    assert session.is_awake.tolist() == [True, True, False]
    assert session.draft(1, 1, RNG).token_ids == (1,)


def test_a_canary_serves_its_share_of_the_requests_each_always_alike(pool: DrafterPool) -> None:
    pool.replace(beside(head(2), canary_share=0.25))
    is_dealt = []
    for number in range(400):
        session = start(pool, f"request-{number}")
        assert [name for name, _ in versions(session)] == ["none", "head", "head@shadow"]
        assert session.is_awake.tolist() == [True, True, False]
        own, other = versions(session)[1][1], versions(session)[2][1]
        assert {own, other} == {1, 2}
        assert session.draft(1, 1, RNG).token_ids == (own,)
        assert versions(start(pool, f"request-{number}")) == versions(session)
        is_dealt.append(own == 2)
    assert 0.18 <= np.mean(is_dealt) <= 0.32


def test_a_request_under_way_is_not_disturbed_by_what_comes_and_goes_beside(
    pool: DrafterPool,
) -> None:
    pool.replace(beside(head(2), canary_share=0.5))
    session = start(pool)
    before = versions(session)
    assert not session.renew()
    pool.replace(nothing_beside("head"))
    assert not session.renew() or versions(session)[1] == ("head", 1)
    assert len(versions(session)) == len(before)
    assert versions(start(pool)) == [("none", 0), ("head", 1)]


def test_a_version_beside_itself_is_left_out(pool: DrafterPool) -> None:
    pool.replace(beside(head(2)))
    pool.replace(head(2))
    assert versions(start(pool)) == [("none", 0), ("head", 2)]


def test_a_request_takes_up_a_promoted_version_between_two_segments(pool: DrafterPool) -> None:
    pool.replace(beside(head(2)))
    session = start(pool)
    pool.replace(head(2))
    pool.replace(beside(head(1)))
    assert session.renew()
    assert versions(session) == [("none", 0), ("head", 2), ("head@shadow", 1)]
    assert session.is_awake.tolist() == [True, True, False]
    assert not session.renew()


def test_invalid_place_beside_an_unknown_drafter_is_refused(pool: DrafterPool) -> None:
    with pytest.raises(KeyError, match="'stranger@shadow' is not in the pool"):
        pool.replace(nothing_beside("stranger"))
