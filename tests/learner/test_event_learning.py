"""One call learns of an event what the single steps learn, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learner.cost import CostSums
from learner.event_kernels import total_of_many
from learner.event_learning import learn_from
from learner.feedback import drafter_positions
from learner.measures import Estimator
from learner.prior import PriorSettings, StreamPrior
from learner.selection.base import Loss
from schemas.equality import same_message
from schemas.events import VerificationEvent
from tests.learner.step_by_step import learn_step_by_step
from tests.learner.test_event_kernels import some_event
from tests.schemas.builders import make_drafters, make_event

SETTINGS = PriorSettings()
LEARNERS_POOL = make_drafters(5)[1:]


def events() -> list[VerificationEvent]:
    """Return ends of requests, cut ones, pools of other sizes, no windows, and no drafts."""
    return [
        *(some_event(seed) for seed in range(6)),
        some_event(6, num_drafters=1, num_speculative_tokens=9, num_windows=40),
        some_event(7, num_speculative_tokens=1),
        make_event(seed=8, num_windows=0),
        make_event(seed=9, num_speculative_tokens=0),
        make_event(seed=10, num_windows=200),
    ]


@pytest.mark.parametrize("estimator", ["exact", "published"])
@pytest.mark.parametrize("loss", [None, "first", "length", "hybrid"])
def test_one_call_learns_what_the_steps_learn_bit_for_bit(
    estimator: Estimator, loss: Loss | None
) -> None:
    size = len(LEARNERS_POOL)
    before = StreamPrior.empty(size), CostSums.empty().with_new(size)
    for event in events():
        places = drafter_positions(event.drafters, LEARNERS_POOL)
        found, expected = (
            learn(
                event,
                places,
                before,
                SETTINGS,
                estimator=estimator,
                length_weight=0.7,
                policy_loss=loss,
            )
            for learn in (learn_from, learn_step_by_step)
        )
        np.testing.assert_array_equal(found.losses, expected.losses)
        assert same_message(found.prior, expected.prior)
        assert same_message(found.cost, expected.cost)
        before = found.prior, found.cost


def test_invalid_losses_are_refused_with_the_words_of_the_steps() -> None:
    event = some_event(1)
    scores = np.array(event.windows.acceptance_probability)
    scores[3, 0, 1] = 1.0
    windows = replace(event.windows, acceptance_probability=scores)
    object.__setattr__(windows, "acceptance_probability", scores + np.float16(2.0))
    object.__setattr__(event, "windows", windows)
    places = drafter_positions(event.drafters, event.drafters)
    before = StreamPrior.empty(3), CostSums.empty().with_new(3)
    messages = []
    for learn in (learn_from, learn_step_by_step):
        with pytest.raises(ValueError, match=r"expected \[0, 1\]") as refused:
            learn(
                event,
                places,
                before,
                SETTINGS,
                estimator="exact",
                length_weight=1.0,
                policy_loss="first",
            )
        messages.append(str(refused.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 127, 128, 129, 300, 1025, 4099, 8192])
def test_long_rows_are_added_up_in_the_order_of_numpy(size: int) -> None:
    values = np.random.default_rng(size).lognormal(0.0, 4.0, size).astype(np.float32)
    assert total_of_many(values.astype(np.float64)) == values.sum(dtype=np.float64)
