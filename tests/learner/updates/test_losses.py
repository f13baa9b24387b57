"""Losses have the values and gradients of their definitions, and stay finite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from learner.updates import losses
from learner.updates.losses import OUTSIDE, LossSettings

NUM_DRAFT, NUM_TOP, BATCH = 7, 3, 5
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def rows(seed: int = 0) -> Rows:
    """Return logits (B, D), recorded indices (B, C) and their probabilities, in float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((BATCH, NUM_DRAFT), generator=generator, dtype=torch.float64)
    order = torch.rand((BATCH, NUM_DRAFT), generator=generator).argsort(-1)
    mass = torch.rand((BATCH, NUM_TOP + 1), generator=generator, dtype=torch.float64)
    top = order[:, :NUM_TOP].clone()
    top[0, 0] = OUTSIDE
    probs = (mass / mass.sum(-1, keepdim=True))[:, :NUM_TOP].clone()
    probs[1] = 0.0
    return logits, top, probs


def named() -> list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]]:
    """Return every loss as a function of the logits."""
    _, top, probs = rows()
    labels = torch.tensor([2, OUTSIDE, 0, 6, 4])
    every = LossSettings(
        counts_tail=True, acceptance_weight=0.3, negative_weight=0.2, soft_weight=0.7
    )

    def of_logits(
        function: Callable[..., torch.Tensor], *arguments: torch.Tensor, **options: bool
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda logits: function(logits.log_softmax(-1), *arguments, **options).sum()

    return [
        ("emitted", of_logits(losses.emitted_cross_entropy, labels)),
        ("soft", of_logits(losses.soft_cross_entropy, top, probs)),
        ("soft with tail", of_logits(losses.soft_cross_entropy, top, probs, counts_tail=True)),
        ("total variation", of_logits(losses.total_variation, top, probs)),
        ("log acceptance", of_logits(losses.negative_log_acceptance, top, probs)),
        ("rejected", of_logits(losses.rejected_penalty, labels, probs[:, 0])),
        (
            "all together",
            lambda logits: losses.level_loss(logits, labels, top, probs, every).sum(),
        ),
    ]


@pytest.mark.parametrize(("name", "loss"), named(), ids=lambda x: x if isinstance(x, str) else "")
def test_gradients_are_those_of_finite_differences(
    name: str, loss: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    logits = rows()[0].requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logits), logits)
    assert gradient.abs().max() > 1e-3, name
    for index in range(logits.numel()):
        shift = torch.zeros(logits.numel(), dtype=torch.float64)
        shift[index] = 1e-6
        up, down = (loss(logits.detach() + sign * shift.view_as(logits)) for sign in (1, -1))
        slope = float(up - down) / 2e-6
        assert float(gradient.flatten()[index]) == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize(("name", "loss"), named(), ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("scale", [0.0, 1e2, 1e4, 1e30])
def test_values_and_gradients_are_finite_however_sure_the_head_is(
    name: str, loss: Callable[[torch.Tensor], torch.Tensor], scale: float
) -> None:
    """B4."""
    for seed in range(5):
        logits = (rows(seed)[0].float() * scale).requires_grad_()
        value = loss(logits)
        (gradient,) = torch.autograd.grad(value, logits)
        assert torch.isfinite(value), name
        assert torch.isfinite(gradient).all(), name


def test_the_soft_cross_entropy_with_tail_is_smallest_at_the_target() -> None:
    """At q = p on the record it is the entropy of the lumped target, and grows from there."""
    probs = torch.tensor([[0.5, 0.2]], dtype=torch.float64)
    top = torch.tensor([[3, 1]])
    rest = 0.3 / (NUM_DRAFT - 2)
    q = torch.full((1, NUM_DRAFT), rest, dtype=torch.float64)
    q[0, 3], q[0, 1] = 0.5, 0.2
    outcomes = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    entropy = -(outcomes * outcomes.log()).sum()
    loss = partial(losses.soft_cross_entropy, top_indices=top, top_probs=probs, counts_tail=True)
    assert float(loss(q.log())) == pytest.approx(float(entropy))
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        other = torch.randn((1, NUM_DRAFT), generator=generator, dtype=torch.float64)
        assert float(loss(other.log_softmax(-1))) > float(entropy)


def test_the_recorded_cross_entropy_with_tail_is_at_most_the_whole_one() -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(20):
        p = torch.randn((1, NUM_DRAFT), generator=generator, dtype=torch.float64).softmax(-1)
        log_q = torch.randn((1, NUM_DRAFT), generator=generator, dtype=torch.float64).log_softmax(
            -1
        )
        top = p.topk(NUM_TOP)
        # Divergences, so that the entropies of lumped and whole target do not enter.
        lumped = torch.cat([top.values, 1.0 - top.values.sum(-1, keepdim=True)], -1)
        recorded = losses.soft_cross_entropy(log_q, top.indices, top.values, counts_tail=True)
        divergence = float(recorded + (lumped * lumped.log()).sum())
        whole = float((p * (p.log() - log_q)).sum())
        assert -1e-12 <= divergence <= whole + 1e-12


def test_the_tail_is_what_breaks_convexity() -> None:
    """Raising either token of the tail helps, raising both alike does not."""
    top, probs = torch.tensor([[0]]), torch.tensor([[0.01]], dtype=torch.float64)

    def loss(tail: float, *, counts_tail: bool) -> float:
        logits = torch.tensor([[0.0, tail, -tail]], dtype=torch.float64)
        return float(
            losses.soft_cross_entropy(logits.log_softmax(-1), top, probs, counts_tail=counts_tail)
        )

    assert loss(0.0, counts_tail=True) > loss(2.0, counts_tail=True)
    assert loss(0.0, counts_tail=False) < loss(2.0, counts_tail=False)


def test_the_recorded_acceptance_misses_at_most_the_tail() -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        p = torch.randn((1, NUM_DRAFT), generator=generator, dtype=torch.float64).softmax(-1)
        log_q = torch.randn((1, NUM_DRAFT), generator=generator, dtype=torch.float64).log_softmax(
            -1
        )
        truth = float(torch.minimum(p, log_q.exp()).sum())
        top = p.topk(NUM_TOP)
        found = float(losses.recorded_acceptance(log_q, top.indices, top.values))
        tail = float(1.0 - top.values.sum())
        assert found - 1e-12 <= truth <= found + tail + 1e-12
        rejection = losses.total_variation(log_q, top.indices, top.values)
        assert float(rejection) == pytest.approx(1.0 - found)


def test_a_penalty_falls_only_on_proposals_that_are_wrong() -> None:
    logits = torch.tensor([[5.0, 0.0, 0.0], [5.0, 0.0, 0.0], [5.0, 0.0, 0.0]])
    labels = torch.tensor([0, 1, OUTSIDE])
    top = torch.tensor([[0, 1], [1, 0], [0, 1]])
    probs = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.9, 0.1]])
    rejected, known = losses.own_rejected(logits, labels, top, probs)
    assert rejected.tolist() == [OUTSIDE, 0, OUTSIDE]
    assert float(known[1]) == pytest.approx(0.3)
    log_probs = logits.log_softmax(-1)
    q = float(log_probs[1, 0].exp())
    penalty = losses.rejected_penalty(log_probs, rejected, known)
    assert penalty.tolist() == pytest.approx([0.0, -0.7 * torch.tensor(1 - q).log().item(), 0.0])


def test_what_was_not_recorded_teaches_nothing() -> None:
    """B2: nor does what the draft vocabulary lacks."""
    logits = rows()[0].requires_grad_()
    nothing = torch.full((BATCH,), OUTSIDE)
    top, probs = torch.full((BATCH, 2), OUTSIDE), torch.full((BATCH, 2), 0.4).double()
    probs[0] = 0.0
    settings = LossSettings(soft_weight=1.0, negative_weight=1.0)
    value = losses.level_loss(logits, nothing, top, probs, settings)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert not value.detach().any()
    assert not gradient.any()


def test_levels_weigh_less_the_deeper_they_are() -> None:
    assert losses.level_weights(3, 0.5) == (1.0, 0.5, 0.25)


@pytest.mark.parametrize(
    ("name", "value"),
    [("level_decay", 0.0), ("soft_weight", -1.0), ("negative_weight", float("nan"))],
)
def test_invalid_settings_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        LossSettings(**{name: value})  # type: ignore[arg-type]
