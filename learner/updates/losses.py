"""Losses of a drafter's distribution against the target's, guarded, with weights per level.

A record of the target's distribution p at a position holds its C most probable tokens; the rest is
one tail of mass r = 1 - sum p. The drafter's q is over its draft vocabulary: target tokens come as
indices into it, negative where the vocabulary lacks them, and those never count (B2).

Everything is per example, shape (B,), finite for finite logits, and 0 where nothing was recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from learner.examples import TrainingBatch

OUTSIDE = -1
"""Index of a token that the draft vocabulary lacks, or that was not verified."""

_LEAST_REST = 1e-5
"""Probability below which 1 - q is not resolved by float32; its logarithm is flat from there."""
_LEAST_ACCEPTANCE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """What a head is trained on; the terms of one level add up.

    Attributes:
        level_decay: Weight of a level relative to the one before, (0, 1].
        emitted_weight: Of the cross-entropy to the emitted token, >= 0.
        soft_weight: Of the soft cross-entropy to the recorded distribution, >= 0.
        counts_tail: Whether the tail enters the soft cross-entropy as one more outcome.
        acceptance_weight: Of the total variation distance, >= 0: the rejections themselves.
        negative_weight: Of the penalty on the head's own proposal where it is not what the target
            wrote, >= 0.
    """

    level_decay: float = 0.8
    emitted_weight: float = 0.5
    soft_weight: float = 0.5
    counts_tail: bool = False
    acceptance_weight: float = 0.0
    negative_weight: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.level_decay <= 1.0:
            raise ValueError(f"level_decay={self.level_decay} outside (0, 1]")
        for name in ("emitted_weight", "soft_weight", "acceptance_weight", "negative_weight"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}, expected >= 0 and finite")


DEFAULT_LOSS = LossSettings()
"""Half of the emitted token, which verification compares with, half of the target's law."""


def emitted_cross_entropy(log_probs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return -log q of the emitted token, (B,).

    Args:
        log_probs: (B, D), of the drafter.
        indices: int64 (B,), the emitted tokens in the draft vocabulary.
    """
    found = log_probs.gather(1, indices.clamp_min(0)[:, None])[:, 0]
    return -torch.where(indices < 0, 0.0, found)


def soft_cross_entropy(
    log_probs: torch.Tensor,
    top_indices: torch.Tensor,
    top_probs: torch.Tensor,
    *,
    counts_tail: bool = False,
) -> torch.Tensor:
    """Return the cross-entropy of the recorded target to the drafter, (B,).

    Without the tail it is -sum p log q over the recorded tokens. With it, what was not recorded
    is one outcome, which adds -r log(1 - sum q): then it is smallest at q = p on the record, and
    never above the cross-entropy of the whole distributions (lumping outcomes loses divergence).
    Without the tail it is convex in the logits, with it it is not: nothing says which of the
    outcomes in the tail to raise.

    Args:
        log_probs: (B, D), of the drafter.
        top_indices: int64 (B, C), recorded tokens in the draft vocabulary.
        top_probs: (B, C), their target probabilities; 0 where less was recorded.
        counts_tail: Whether the tail counts.
    """
    probs = _reachable(top_indices, top_probs)
    found = _gathered(log_probs, top_indices, probs)
    loss = -(probs * found).sum(-1)
    if not counts_tail:
        return loss
    tail = (1.0 - top_probs.sum(-1)).clamp(0.0, 1.0) * _is_recorded(top_probs)
    covered = torch.where(probs > 0.0, found.exp(), 0.0).sum(-1)
    return loss - tail * torch.log1p(-covered.clamp_max(1.0 - _LEAST_REST))


def recorded_acceptance(
    log_probs: torch.Tensor, top_indices: torch.Tensor, top_probs: torch.Tensor
) -> torch.Tensor:
    """Return sum min(p, q) over the recorded tokens, (B,).

    This is the acceptance of speculative sampling, 1 - TV(p, q), less what the tail adds, at
    most r. Arguments as in ``soft_cross_entropy``.
    """
    probs = _reachable(top_indices, top_probs)
    found = _gathered(log_probs, top_indices, probs)
    return torch.minimum(probs, torch.where(probs > 0.0, found.exp(), 0.0)).sum(-1)


def total_variation(
    log_probs: torch.Tensor, top_indices: torch.Tensor, top_probs: torch.Tensor
) -> torch.Tensor:
    """Return the recorded rejection 1 - sum min(p, q), (B,), in [0, 1].

    Its gradient pushes only tokens that the drafter holds too low, each as hard as any: it is
    blind where q is all but 0, so it goes beside a cross-entropy and not in its place.
    """
    acceptance = recorded_acceptance(log_probs, top_indices, top_probs)
    return (1.0 - acceptance) * _is_recorded(top_probs)


def negative_log_acceptance(
    log_probs: torch.Tensor, top_indices: torch.Tensor, top_probs: torch.Tensor
) -> torch.Tensor:
    """Return -log of the recorded acceptance, (B,): steep where little is accepted."""
    acceptance = recorded_acceptance(log_probs, top_indices, top_probs)
    return -torch.log(acceptance.clamp_min(_LEAST_ACCEPTANCE)) * _is_recorded(top_probs)


def rejected_penalty(
    log_probs: torch.Tensor, rejected_indices: torch.Tensor, target_probs: torch.Tensor
) -> torch.Tensor:
    """Return -(1 - p) log(1 - q) of rejected tokens, (B,): unlikelihood, as far as they are wrong.

    Welleck et al. (2020), equation 2, with the target's own probability spared.

    Args:
        log_probs: (B, D), of the drafter.
        rejected_indices: int64 (B,), rejected tokens in the draft vocabulary.
        target_probs: (B,), their target probabilities, in [0, 1].
    """
    found = log_probs.gather(1, rejected_indices.clamp_min(0)[:, None])[:, 0].exp()
    penalty = -(1.0 - target_probs) * torch.log1p(-found.clamp_max(1.0 - _LEAST_REST))
    return torch.where(rejected_indices < 0, 0.0, penalty)


def own_rejected(
    log_probs: torch.Tensor,
    labels: torch.Tensor,
    top_indices: torch.Tensor,
    top_probs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the drafter would propose now and not get, and its target probability, (B,) each.

    Events do not carry the tokens that were rejected; the drafter's best token where it is not
    the emitted one is what it would have rejected today, which is also what is left to unlearn.
    ``OUTSIDE`` where the proposal is right or nothing was verified.
    """
    proposed = log_probs.argmax(-1)
    is_rejected = (labels >= 0) & (proposed != labels)
    known = torch.where(top_indices == proposed[:, None], top_probs, 0.0).sum(-1)
    return torch.where(is_rejected, proposed, OUTSIDE), known.clamp(0.0, 1.0)


def level_weights(num_levels: int, decay: float) -> tuple[float, ...]:
    """Return geometric weights: a round reaches a level less often the deeper it is."""
    return tuple(decay**level for level in range(num_levels))


def level_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    top_indices: torch.Tensor,
    top_probs: torch.Tensor,
    settings: LossSettings,
) -> torch.Tensor:
    """Return the weighted sum of the terms of one level, (B,).

    Args:
        logits: (B, D), of the drafter.
        labels: int64 (B,), emitted tokens in the draft vocabulary.
        top_indices: int64 (B, C), recorded tokens in the draft vocabulary.
        top_probs: (B, C), their target probabilities.
        settings: Weights of the terms.
    """
    log_probs = logits.log_softmax(-1)
    loss = settings.emitted_weight * emitted_cross_entropy(log_probs, labels)
    if settings.soft_weight:
        loss = loss + settings.soft_weight * soft_cross_entropy(
            log_probs, top_indices, top_probs, counts_tail=settings.counts_tail
        )
    if settings.acceptance_weight:
        loss = loss + settings.acceptance_weight * total_variation(
            log_probs, top_indices, top_probs
        )
    if settings.negative_weight:
        rejected, known = own_rejected(log_probs.detach(), labels, top_indices, top_probs)
        loss = loss + settings.negative_weight * rejected_penalty(log_probs, rejected, known)
    return loss


def unrolled_loss(
    logits_of_levels: Iterable[torch.Tensor],
    batch: TrainingBatch,
    token_to_draft: torch.Tensor,
    settings: LossSettings,
) -> torch.Tensor:
    """Return the mean over examples of the weighted sum over levels.

    Args:
        logits_of_levels: (B, D) per level, in order.
        batch: The examples.
        token_to_draft: int64 (V,), index of every target token in the draft vocabulary,
            ``OUTSIDE`` where it has none.
        settings: Weights of levels and terms.
    """
    weights = level_weights(batch.label_token_ids.shape[1], settings.level_decay)
    total = torch.zeros(())
    for level, (logits, weight) in enumerate(zip(logits_of_levels, weights, strict=True)):
        labels = draft_indices(batch.label_token_ids[:, level], token_to_draft)
        top = draft_indices(batch.top_token_ids[:, level], token_to_draft)
        loss = level_loss(logits, labels, top, batch.top_probabilities[:, level], settings)
        total = total + weight * loss.mean()
    return total


def draft_indices(token_ids: torch.Tensor, token_to_draft: torch.Tensor) -> torch.Tensor:
    """Return the tokens' indices in the draft vocabulary; negative tokens have none."""
    found = token_to_draft[token_ids.clamp_min(0)]
    return torch.where(token_ids < 0, OUTSIDE, found)


def _reachable(top_indices: torch.Tensor, top_probs: torch.Tensor) -> torch.Tensor:
    return torch.where(top_indices < 0, 0.0, top_probs)


def _gathered(
    log_probs: torch.Tensor, top_indices: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    """Return log q of the recorded tokens, 0 where they do not count: 0 times -inf is no number."""
    return torch.where(probs > 0.0, log_probs.gather(1, top_indices.clamp_min(0)), 0.0)


def _is_recorded(top_probs: torch.Tensor) -> torch.Tensor:
    return (top_probs.sum(-1) > 0.0).to(top_probs.dtype)
