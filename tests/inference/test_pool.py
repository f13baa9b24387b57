"""A pool keeps its order; a request sees one version of each drafter at a time."""

from __future__ import annotations

import numpy as np
import pytest

from inference.drafters.nothing import NothingDrafter
from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.pool import DrafterPool, PoolSession
from inference.ports import Draft, Drafter
from inference.shadows import beside
from tests.inference import fakes
from tests.inference.tiny import VOCAB_SIZE, start_trajectory, tiny_llama

RNG = np.random.default_rng(0)


def proposing(token_id: int, version: int = 0) -> fakes.FakeDrafter:
    """Return a drafter that proposes one token."""
    drafter = fakes.proposing(Draft(token_ids=(token_id,)), drafter_id="one")
    drafter.weights_version = version
    return drafter


def start(pool: DrafterPool) -> PoolSession:
    """Begin a request."""
    return pool.start(
        start_trajectory(tiny_llama(), [1, 2, 3]),
        stream="s",
        vocab_size=VOCAB_SIZE,
        draws_drafts=False,
    )


@pytest.mark.parametrize(
    "drafters", [[], [NothingDrafter(), NothingDrafter()], [NothingDrafter("a")] * 2]
)
def test_invalid_pool_is_refused(drafters: list[Drafter]) -> None:
    with pytest.raises(ValueError, match="not distinct, or there are none"):
        DrafterPool(drafters)


def test_the_order_of_the_pool_is_the_order_of_versions_and_arrays() -> None:
    pool = DrafterPool([NothingDrafter("z"), proposing(5), PromptLookupDrafter("a")])
    assert [version.drafter_id for version in pool.versions] == ["z", "one", "a"]
    assert len(pool) == 3
    assert start(pool).draft(1, 1, RNG).token_ids == (5,)


def test_invalid_replacement_of_an_unknown_drafter_is_refused() -> None:
    pool = DrafterPool([NothingDrafter()])
    with pytest.raises(KeyError, match="'one' is not in the pool"):
        pool.replace(proposing(5))


def test_a_running_request_keeps_its_version_until_it_renews() -> None:
    """B6."""
    pool = DrafterPool([NothingDrafter(), proposing(5)])
    session = start(pool)
    pool.replace(proposing(6, version=1))
    assert session.versions[1].weights_version == 0
    assert session.draft(1, 1, RNG).token_ids == (5,)
    assert start(pool).draft(1, 1, RNG).token_ids == (6,)
    assert session.renew()
    assert session.versions[1].weights_version == 1
    assert session.draft(1, 1, RNG).token_ids == (6,)
    assert not session.renew()


def test_a_new_version_wakes_a_drafter_that_had_failed() -> None:
    pool = DrafterPool([NothingDrafter(), fakes.raising(RuntimeError("x"), drafter_id="one")])
    session = start(pool)
    assert session.draft(1, 2, RNG) == Draft()
    assert session.is_awake.tolist() == [True, False]
    pool.replace(proposing(6, version=1))
    session.renew()
    assert session.is_awake.tolist() == [True, True]
    assert session.draft(1, 1, RNG).token_ids == (6,)
    assert pool.failures == {"one": 1}


def test_a_sleeping_drafter_is_not_asked_again() -> None:
    broken = fakes.raising(RuntimeError("x"))
    session = start(DrafterPool([broken]))
    for _ in range(3):
        assert session.draft(0, 2, RNG) == Draft()
    assert broken.num_drafts == 1


def test_no_room_means_no_question() -> None:
    drafter = proposing(5)
    assert start(DrafterPool([drafter])).draft(0, 0, RNG) == Draft()
    assert drafter.num_drafts == 0


def test_what_is_not_a_drafters_fault_is_not_swallowed() -> None:
    session = start(DrafterPool([fakes.raising(KeyboardInterrupt())]))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        session.draft(0, 2, RNG)


def expert(number: int) -> fakes.FakeDrafter:
    return fakes.proposing(Draft(token_ids=(7,)), drafter_id=f"one.expert-{number}")


def ids(pool: DrafterPool) -> list[str]:
    return [version.drafter_id for version in pool.versions]


def test_an_expert_joins_the_pool_of_its_head_at_the_end_and_leaves_when_it_retires() -> None:
    pool = DrafterPool([NothingDrafter(), proposing(5)])
    before = start(pool)
    pool.replace(expert(1))
    pool.replace(expert(2))
    pool.replace(expert(2))
    assert ids(pool) == ["none", "one", "one.expert-1", "one.expert-2"]
    assert start(pool).draft(2, 1, RNG).token_ids == (7,)
    during = start(pool)
    pool.replace(NothingDrafter("one.expert-1"))
    assert ids(pool) == ["none", "one", "one.expert-2"]
    assert not before.renew(), "requests at work keep the pool that they have"
    assert (before.num_drafters, during.num_drafters) == (2, 4)
    assert during.draft(2, 1, RNG).token_ids == (7,)
    pool.replace(NothingDrafter("one.expert-9"))
    assert ids(pool) == ["none", "one", "one.expert-2"]


def test_invalid_experts_of_an_unknown_head_are_refused() -> None:
    pool = DrafterPool([NothingDrafter()])
    with pytest.raises(KeyError, match=r"'one\.expert-1' is not in the pool"):
        pool.replace(expert(1))
    with pytest.raises(KeyError, match="is not in the pool"):
        pool.replace(beside(expert(1)))
