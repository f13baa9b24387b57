"""Acceptance of one drafter, the length of the draft it would have had accepted, and losses.

Pure numpy. In the formulas γ is ``acceptance_probability`` and a is ``realised_acceptance``.
Axes: ``K`` levels of a window, ``N`` drafters, ``V`` tokens of the target's vocabulary; ``...``
is any number of leading axes, usually windows. Probabilities are those that verification used,
after temperature, top-p, top-k and penalties, for target and drafter alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from learner.selection.base import Loss

Estimator = Literal["exact", "published"]

NO_PROPOSAL = -1
"""Token id of a drafter that proposed nothing at a position."""


def greedy_acceptance(
    proposed_token_ids: NDArray[np.integer[Any]], target_token_ids: NDArray[np.integer[Any]]
) -> NDArray[np.float64]:
    """Return 1 where the proposal is the target's most probable token, else 0, shape (...).

    Under a greedy target the emitted token is the most probable one, so this is the acceptance
    probability and the realised acceptance at once.
    """
    proposed = np.asarray(proposed_token_ids)
    matches = (proposed == np.asarray(target_token_ids)) & (proposed != NO_PROPOSAL)
    return np.asarray(matches, dtype=np.float64)


def sampling_acceptance(
    target_probs: NDArray[np.floating[Any]], draft_probs: NDArray[np.floating[Any]]
) -> NDArray[np.float64]:
    """Return Σ_x min(p(x), q(x)): the chance that a token drawn from the drafter is accepted.

    Args:
        target_probs: Next-token distributions, shape (..., V).
        draft_probs: The drafter's, shape (..., V), over the target's vocabulary: zero for tokens
            that it cannot propose.

    Returns:
        Shape (...), in [0, 1] (rounding that would exceed 1 is cut off).
    """
    overlap = np.minimum(np.asarray(target_probs, np.float64), np.asarray(draft_probs, np.float64))
    return np.asarray(np.minimum(overlap.sum(axis=-1), 1.0))


def realised_sampling_acceptance(
    target_probs: NDArray[np.floating[Any]],
    draft_probs: NDArray[np.floating[Any]],
    emitted_token_ids: NDArray[np.integer[Any]],
) -> NDArray[np.float64]:
    """Return min(1, q(x) / p(x)) for the emitted token x, shape (...), in [0, 1].

    Raises:
        ValueError: If an emitted token has target probability 0: the distribution is not the one
            that verification used.
    """
    index = np.asarray(emitted_token_ids)[..., None]
    target = np.take_along_axis(np.asarray(target_probs, np.float64), index, axis=-1)[..., 0]
    draft = np.take_along_axis(np.asarray(draft_probs, np.float64), index, axis=-1)[..., 0]
    if not np.all(target > 0.0):
        where = tuple(int(i) for i in np.argwhere(~(target > 0.0))[0])
        raise ValueError(
            f"emitted token {int(index[..., 0][where])} at {where} has target probability "
            f"{target[where]}, expected > 0"
        )
    return np.asarray(np.minimum(draft / target, 1.0))


def one_hot_acceptance(
    target_probs: NDArray[np.floating[Any]], proposed_token_ids: NDArray[np.integer[Any]]
) -> NDArray[np.float64]:
    """Return p(proposal): the acceptance of a drafter that is sure of one token (q is one-hot).

    Args:
        target_probs: Next-token distributions, shape (..., V).
        proposed_token_ids: Shape (...); ``NO_PROPOSAL`` is never accepted.
    """
    proposed = np.asarray(proposed_token_ids)
    index = np.maximum(proposed, 0)[..., None]
    target = np.take_along_axis(np.asarray(target_probs, np.float64), index, axis=-1)[..., 0]
    return np.where(proposed == NO_PROPOSAL, 0.0, target)


def realised_one_hot_acceptance(
    proposed_token_ids: NDArray[np.integer[Any]], emitted_token_ids: NDArray[np.integer[Any]]
) -> NDArray[np.float64]:
    """Return 1 where the emitted token is the proposed one, else 0, shape (...)."""
    return greedy_acceptance(proposed_token_ids, emitted_token_ids)


def expected_acceptance_length(
    acceptance_probability: NDArray[np.floating[Any]],
    realised_acceptance: NDArray[np.floating[Any]],
    *,
    num_levels: NDArray[np.integer[Any]] | None = None,
    estimator: Estimator = "exact",
) -> NDArray[np.float64]:
    """Estimate the acceptance length each drafter would have had on verified windows.

    ``exact`` is 1 + Σ_k (Π_{j<k} a_j) γ_k. It is unbiased, because Σ_x min(p, q)(x) f(x) is the
    mean of min(1, q/p)(x) f(x) over the target's own tokens. ``published`` (HedgeSpec, theorem 3)
    is 1 + Σ_k Π_{j<=k} γ_j; it is biased when sampling (2.0 against 1.75 on the two-token
    example of the tests). Under a greedy target the two coincide.

    Args:
        acceptance_probability: Shape (..., K, N), in [0, 1]; NaN = not scored.
        realised_acceptance: Shape (..., K, N), in [0, 1]; NaN = not scored.
        num_levels: Shape (...), levels that exist before the request ends, 0..K, the same for all
            drafters; levels beyond are not read and add nothing. None = all K.
        estimator: Which of the two formulas.

    Returns:
        Shape (..., N), bonus token included, in [1, K + 1]; NaN for a drafter that was not scored
        at some existing level.

    Raises:
        ValueError: If the shapes differ or ``num_levels`` is outside 0..K.
    """
    probability = np.asarray(acceptance_probability, np.float64)
    realised = np.asarray(realised_acceptance, np.float64)
    if probability.shape != realised.shape or probability.ndim < 2:
        raise ValueError(
            f"acceptance_probability has shape {probability.shape} and realised_acceptance "
            f"{realised.shape}, expected the same (..., K, N)"
        )
    exists = _existing_levels(num_levels, probability.shape)
    probability = np.where(exists, probability, 0.0)
    reached = probability if estimator == "published" else np.where(exists, realised, 0.0)
    reach = np.ones_like(probability)
    np.cumprod(reached[..., :-1, :], axis=-2, out=reach[..., 1:, :])
    return np.asarray(1.0 + (reach * probability).sum(axis=-2))


def _existing_levels(
    num_levels: NDArray[np.integer[Any]] | None, shape: tuple[int, ...]
) -> NDArray[np.bool_]:
    """Return which levels exist, broadcastable to (..., K, N)."""
    if num_levels is None:
        return np.ones((1, 1), dtype=np.bool_)
    levels, lead = shape[-2], shape[:-2]
    counts = np.asarray(num_levels)
    if counts.shape != lead or np.any((counts < 0) | (counts > levels)):
        raise ValueError(
            f"num_levels has shape {counts.shape} and range {counts.min(initial=levels)}.."
            f"{counts.max(initial=0)}, expected shape {lead} and range 0..{levels}"
        )
    return np.asarray(np.arange(levels)[:, None] < counts[..., None, None])


def acceptance_length_loss(
    length: NDArray[np.floating[Any]], num_speculative_tokens: int
) -> NDArray[np.float64]:
    """Return 1 - length / (K + 1), in [0, K / (K + 1)]; NaN stays NaN.

    A shortened window keeps the divisor K + 1: tokens past the end of a request are worth
    nothing to any drafter.
    """
    return np.asarray(1.0 - np.asarray(length, np.float64) / (num_speculative_tokens + 1))


def acceptance_loss(acceptance_probability: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return 1 - γ at level 1 of windows shaped (..., K, N) with K >= 1: shape (..., N)."""
    return np.asarray(1.0 - np.asarray(acceptance_probability, np.float64)[..., 0, :])


def hybrid_loss(
    length_loss: NDArray[np.float64], first_level_loss: NDArray[np.float64], *, weight: float
) -> NDArray[np.float64]:
    """Mix ``weight`` of the length loss with the rest of the loss at level 1.

    Raises:
        ValueError: If ``weight`` is outside [0, 1].
    """
    if not 0.0 <= weight <= 1.0:
        raise ValueError(f"weight={weight} outside [0, 1]")
    return np.asarray(weight * length_loss + (1.0 - weight) * first_level_loss)


def policy_losses(
    acceptance_probability: NDArray[np.float16],
    realised_acceptance: NDArray[np.float16],
    num_levels: NDArray[np.int16],
    *,
    loss: Loss,
    num_speculative_tokens: int,
) -> NDArray[np.float64]:
    """Return the losses of windows as a policy learns them.

    Args:
        acceptance_probability: (W, K, N); NaN = not scored or no such level.
        realised_acceptance: (W, K, N); NaN likewise.
        num_levels: Levels that exist, (W,).
        loss: ``length`` is 1 - exact acceptance length / (K + 1), ``first`` 1 - the acceptance
            probability at level 1, ``hybrid`` half of each.
        num_speculative_tokens: K of the scale.

    Returns:
        (W, N), in [0, 1]; NaN = asleep. Empty, (0, N), if there are no levels.
    """
    if num_speculative_tokens == 0:
        return np.empty((0, acceptance_probability.shape[-1]))
    first = acceptance_loss(acceptance_probability)
    if loss == "first":
        return first
    lengths = expected_acceptance_length(
        acceptance_probability, realised_acceptance, num_levels=num_levels
    )
    length = acceptance_length_loss(lengths, num_speculative_tokens)
    return length if loss == "length" else 0.5 * (length + first)


def mean_acceptance_length(num_accepted_tokens: int, num_verifications: int) -> float | None:
    """Return 1 + accepted / verifications, bonus included; None before the first verification.

    None, not 0 or NaN, so that "no sample" can reach neither a learner nor a gauge.
    """
    return 1.0 + num_accepted_tokens / num_verifications if num_verifications else None


def acceptance_rate(num_accepted_tokens: int, num_draft_tokens: int) -> float | None:
    """Return accepted / drafted, in [0, 1]; None before the first drafted token.

    The divisor is what was really drafted, summed from the events, never the configured K.
    """
    return num_accepted_tokens / num_draft_tokens if num_draft_tokens else None


def walked_acceptance_length(
    starts: NDArray[np.integer[Any]], lengths: NDArray[np.floating[Any]]
) -> float | None:
    """Return the tokens per round of a drafter that drafts every round of one request.

    Averaging over all windows counts positions at which no round would have begun. Here a round
    begins where the one before ended, as when decoding. Exact where lengths follow from the text
    (greedy target, one-hot drafts); expected lengths are rounded to whole tokens.

    Args:
        starts: Window starts of the request, ascending, shape (W,).
        lengths: The drafter's acceptance length of each window, shape (W,); NaN = not scored.

    Returns:
        Mean acceptance length, or None if no window was scored.
    """
    start_to_length = {
        int(start): int(np.rint(length))
        for start, length in zip(starts, lengths, strict=True)
        if not np.isnan(length)
    }
    if not start_to_length:
        return None
    position, last = min(start_to_length), max(start_to_length)
    num_rounds, first = 0, position
    while position <= last:
        position += start_to_length.get(position, 1)
        num_rounds += 1
    return (position - first) / num_rounds
