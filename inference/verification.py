"""Verification: which drafted tokens stand, and what follows them.

Every rule leaves the target's law unchanged (Leviathan et al. 2023, appendix A.1; Chen et al.
2023, theorem 1). Pure functions: distributions and uniform numbers in, tokens out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from inference.sampling import draw


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """Outcome of one target pass over one draft.

    ``token_ids`` holds the accepted tokens and the bonus token: ``num_accepted_tokens + 1``.
    """

    num_accepted_tokens: int
    token_ids: tuple[int, ...]


def verify_tokens(target_token_ids: Sequence[int], draft_token_ids: Sequence[int]) -> Verification:
    """Accept drafts while they are the tokens that the target chose itself.

    For greedy requests ``target_token_ids`` (m + 1,) are arg-maxima. For one-hot drafts they are
    drawn from the target's distributions: a draft then stands with probability p(draft) and is
    otherwise replaced by a draw from the rest, which is rejection sampling with a one-hot draft
    distribution; and since the draws belong to positions, the output does not depend on the draft.
    """
    accepted = 0
    for drafted, chosen in zip(draft_token_ids, target_token_ids, strict=False):
        if drafted != chosen:
            break
        accepted += 1
    return Verification(
        num_accepted_tokens=accepted, token_ids=tuple(target_token_ids[: accepted + 1])
    )


def verify_sampling(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    draft_token_ids: Sequence[int],
    uniforms: np.ndarray,
) -> Verification:
    """Accept drafts that were drawn from ``draft_probs`` by rejection sampling.

    Args:
        target_probs: Processed target distributions, (m + 1, V).
        draft_probs: The distributions that the drafts were really drawn from, (m, V).
        draft_token_ids: The drafts, (m,).
        uniforms: (m + 1, 2) in [0, 1): a coin and a draw per position.
    """
    for index, token in enumerate(draft_token_ids):
        target, drafter = target_probs[index], draft_probs[index]
        if uniforms[index, 0] >= acceptance(target, drafter, token):
            bonus = draw(residual(target, drafter)[None], uniforms[index : index + 1, 1])
            return Verification(
                num_accepted_tokens=index, token_ids=(*draft_token_ids[:index], bonus[0])
            )
    count = len(draft_token_ids)
    bonus = draw(target_probs[count : count + 1], uniforms[count : count + 1, 1])
    return Verification(num_accepted_tokens=count, token_ids=(*draft_token_ids, bonus[0]))


def acceptance(target_probs: torch.Tensor, draft_probs: torch.Tensor, token_id: int) -> float:
    """Return min(1, p / q) of a drafted token, from two distributions (V,)."""
    q = float(draft_probs[token_id])
    return min(1.0, float(target_probs[token_id]) / q) if q > 0.0 else 0.0


def residual(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Return norm(max(0, p - q)), what is drawn from after a rejection, (V,)."""
    rest = (target_probs.double() - draft_probs.double()).clamp_min(0.0)
    total = rest.sum()
    # Equal distributions never reject; only rounding can bring us here with nothing left.
    return rest / total if total > 0.0 else target_probs.double()
