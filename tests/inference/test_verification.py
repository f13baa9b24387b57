"""Verification leaves the target's law as it is: by enumeration, not by faith."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inference.sampling import SamplingParams, draw, processed_probs
from inference.verification import (
    Verification,
    acceptance,
    residual,
    verify_sampling,
    verify_tokens,
)

VOCAB, LENGTH = 3, 2
"""Tokens of the enumerated language, and drafted tokens; one more is verified."""

Table = Callable[[tuple[int, ...]], torch.Tensor]
"""The next-token distribution behind a prefix, float64 (V,)."""


def random_table(seed: int, params: SamplingParams | None = None) -> Table:
    """Return distributions that depend on the whole prefix, processed as ``params`` say."""

    def table(prefix: tuple[int, ...]) -> torch.Tensor:
        logits = 1.5 * np.random.default_rng([seed, *prefix]).standard_normal(VOCAB)
        if params is not None:
            probs = processed_probs(torch.from_numpy(logits)[None], params)[0].double()
        else:
            probs = torch.from_numpy(logits).softmax(-1)
        return probs / probs.sum()

    return table


def law(table: Table) -> NDArray[np.float64]:
    """Return the law of sequences of ``LENGTH + 1`` tokens, shape (V, V, V)."""
    probs = np.zeros((VOCAB,) * (LENGTH + 1))
    for sequence in product(range(VOCAB), repeat=LENGTH + 1):
        probs[sequence] = np.prod(
            [float(table(sequence[:i])[token]) for i, token in enumerate(sequence)]
        )
    return probs


def cells(*breakpoints: torch.Tensor) -> list[tuple[float, float]]:
    """Return (a point inside, width) of every cell that the breakpoints cut [0, 1) into."""
    edges = np.unique(np.concatenate([[0.0, 1.0], *(b.numpy() for b in breakpoints)]))
    edges = edges[(edges >= 0.0) & (edges <= 1.0)]
    return [((a + b) / 2, b - a) for a, b in pairwise(edges)]


def ladder(probs: torch.Tensor) -> torch.Tensor:
    """Return where the draw from ``probs`` changes its token."""
    return probs.cumsum(-1) / probs.sum()


def completed(outcomes: Iterator[tuple[float, Verification]], table: Table) -> NDArray[np.float64]:
    """Return the law of sequences that begin with verified tokens and go on as the target does."""
    probs = np.zeros((VOCAB,) * (LENGTH + 1))
    for weight, verification in outcomes:
        known = verification.token_ids
        for rest in product(range(VOCAB), repeat=LENGTH + 1 - len(known)):
            sequence = (*known, *rest)
            after = [float(table(sequence[:i])[sequence[i]]) for i in range(len(known), LENGTH + 1)]
            probs[sequence] += weight * np.prod(after)
    return probs


def outcomes_of_drawn_drafts(
    target: Table, drafter: Table, length: int
) -> Iterator[tuple[float, Verification]]:
    """Enumerate drafts, coins and draws of speculative sampling with their exact chances."""
    for draft in product(range(VOCAB), repeat=length):
        q = [drafter(draft[:i]) for i in range(length)]
        p = [target(draft[:i]) for i in range(length + 1)]
        drafted = np.prod([float(q[i][token]) for i, token in enumerate(draft)])
        for number, (coins, weight) in enumerate(grids(p, q, draft)):
            assert number < 100_000
            verification = verify_sampling(
                torch.stack(p), torch.stack(q) if q else torch.empty(0, VOCAB), draft, coins
            )
            yield float(drafted * weight), verification


def grids(
    p: list[torch.Tensor], q: list[torch.Tensor], draft: tuple[int, ...]
) -> Iterator[tuple[NDArray[np.float64], float]]:
    """Yield uniforms (m + 1, 2) that stand for every cell of coins and draws, and its chance."""
    sides: list[list[tuple[float, float]]] = []
    for index in range(len(p)):
        if index < len(q):
            ratio = (p[index] / q[index])[draft[index]].clamp(max=1.0)
            rest = (p[index] - q[index]).clamp_min(0.0)
            sides += [cells(ratio[None]), cells(ladder(rest))]
        else:
            sides += [[(0.5, 1.0)], cells(ladder(p[index]))]
    for chosen in product(*sides):
        points, widths = zip(*chosen, strict=True)
        yield np.array(points).reshape(-1, 2), float(np.prod(widths))


def total_variation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return half the sum of absolute differences."""
    return float(np.abs(a - b).sum() / 2)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, 2])
def test_drawn_drafts_leave_the_law_of_the_target(seed: int, length: int) -> None:
    target, drafter = random_table(seed), random_table(seed + 100)
    found = completed(outcomes_of_drawn_drafts(target, drafter, length), target)
    assert total_variation(found, law(target)) < 1e-12


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.3, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.7),
    ],
)
def test_the_law_is_the_processed_one(params: SamplingParams) -> None:
    target, drafter = random_table(7, params), random_table(107, params)
    found = completed(outcomes_of_drawn_drafts(target, drafter, LENGTH), target)
    assert total_variation(found, law(target)) < 1e-12
    assert total_variation(found, law(random_table(7))) > 0.02


def test_another_draft_distribution_than_the_one_drawn_from_breaks_the_law() -> None:
    """A10: the test itself must be able to fail."""
    target, drafter, claimed = random_table(1), random_table(101), random_table(5)
    outcomes = [
        (
            weight,
            verify_sampling(
                torch.stack([target(draft[:i]) for i in range(2)]), claimed(())[None], draft, coins
            ),
        )
        for draft in product(range(VOCAB), repeat=1)
        for coins, width in grids([target(()), target(draft)], [claimed(())], draft)
        if (weight := width * float(drafter(())[draft[0]])) > 0.0
    ]
    found = completed(iter(outcomes), target)
    assert total_variation(found, law(target)) > 0.02


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("draft", [(), (0,), (2, 1), (1, 1)])
@pytest.mark.parametrize(
    "params", [None, SamplingParams(temperature=0.5, top_k=2), SamplingParams(temperature=2.0)]
)
def test_one_hot_drafts_leave_the_law_of_the_target(
    seed: int, draft: tuple[int, ...], params: SamplingParams | None
) -> None:
    target = random_table(seed, params)
    p = [target(draft[:i]) for i in range(len(draft) + 1)]

    def outcomes() -> Iterator[tuple[float, Verification]]:
        for chosen in product(*(cells(ladder(row)) for row in p)):
            points, widths = zip(*chosen, strict=True)
            yield (
                float(np.prod(widths)),
                verify_tokens(draw(torch.stack(p), np.array(points)), draft),
            )

    assert total_variation(completed(outcomes(), target), law(target)) < 1e-12


def test_a_one_hot_draft_stands_as_often_as_the_target_says() -> None:
    probs = random_table(4)(())
    stands = sum(
        width
        for point, width in cells(ladder(probs))
        if verify_tokens(
            draw(torch.stack([probs, probs]), np.array([point, 0.5])), (1,)
        ).num_accepted_tokens
    )
    assert stands == pytest.approx(float(probs[1]), abs=1e-12)


def test_equal_distributions_never_reject() -> None:
    probs = torch.stack([random_table(seed)(()) for seed in range(4)])
    rng = np.random.default_rng(1)
    for _ in range(300):
        drafts = draw(probs[:3], rng.random(3))
        found = verify_sampling(probs, probs[:3], drafts, rng.random((4, 2)))
        assert found.num_accepted_tokens == 3
        assert list(found.token_ids[:3]) == drafts


def test_a_draft_that_the_target_cannot_emit_is_always_rejected() -> None:
    target = torch.tensor([[0.0, 0.4, 0.6], [1.0, 0.0, 0.0]])
    drafter = torch.tensor([[1.0, 0.0, 0.0]])
    found = verify_sampling(target, drafter, [0], np.array([[0.0, 0.5], [0.0, 0.0]]))
    assert found == Verification(num_accepted_tokens=0, token_ids=(2,))


def test_a_draft_of_probability_zero_is_rejected_not_divided_by() -> None:
    target, drafter = torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0])
    assert acceptance(target, drafter, 0) == 0.0
    assert acceptance(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]), 0) == 0.0


def test_the_residual_of_equal_distributions_is_the_target() -> None:
    probs = torch.tensor([0.25, 0.75])
    assert residual(probs, probs).tolist() == [0.25, 0.75]
    assert residual(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("chosen", "draft", "num_accepted"),
    [
        ([5, 6, 7, 8], [5, 9, 7], 1),
        ([5, 6, 7, 8], [5, 6, 7], 3),
        ([5, 6, 7, 8], [4, 6, 7], 0),
        ([5], [], 0),
    ],
)
def test_acceptance_counts_the_prefix_before_the_first_rejection(
    chosen: list[int], draft: list[int], num_accepted: int
) -> None:
    """A18: a match behind a rejection is worth nothing, and the bonus token is not counted."""
    found = verify_tokens(chosen, draft)
    assert found.num_accepted_tokens == num_accepted
    assert found.token_ids == tuple(chosen[: num_accepted + 1])


def test_an_empty_draft_draws_the_bonus_from_the_target() -> None:
    probs = torch.tensor([[0.2, 0.3, 0.5]])
    for uniform, token in ((0.1, 0), (0.4, 1), (0.9, 2)):
        found = verify_sampling(probs, torch.empty((0, 3)), [], np.array([[0.0, uniform]]))
        assert found == Verification(num_accepted_tokens=0, token_ids=(token,))
