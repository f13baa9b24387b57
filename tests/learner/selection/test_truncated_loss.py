"""Why a window counts only when it is complete: learning cut ones is shown to be worse.

A round verifies only as far as the played drafter reached. Whoever scores the windows at once, cut
where the text ended, never sees that another drafter would have gone on: with a poor drafter
all look alike. (A guard: the cut loss costs 6 to 17 % in the notes, section 7.2.)
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from learner.measures import acceptance_length_loss, expected_acceptance_length
from learner.selection import policy_from_name

NUM_DRAFTERS, NUM_LEVELS, NUM_POSITIONS, NUM_REQUESTS = 8, 10, 200, 20
BEST = 5


def hits(generator: Generator) -> NDArray[np.float64]:
    """One request's acceptances (P, K, N): equal at level 1; deeper, one drafter is better."""
    rates = np.full((NUM_LEVELS, NUM_DRAFTERS), 0.4)
    rates[0] = 0.5
    rates[1:, BEST] = 0.95
    shape = (NUM_POSITIONS, NUM_LEVELS, NUM_DRAFTERS)
    return np.asarray(generator.random(shape) < rates, dtype=np.float64)


def rounds_of_request(accepted: NDArray[np.float64], is_truncated: bool, dice: Generator) -> int:
    """Decode with NormalHedge, learning all complete windows or at once the cut ones."""
    policy = policy_from_name("normal_hedge", NUM_DRAFTERS)
    position = learned = num_rounds = 0
    while position < NUM_POSITIONS:
        index = int(dice.choice(NUM_DRAFTERS, p=policy.probabilities()))
        position += 1 + int(np.cumprod(accepted[position, :, index]).sum())
        num_rounds += 1
        verified = min(position, NUM_POSITIONS)
        ready = verified if is_truncated else max(verified - NUM_LEVELS + 1, learned)
        starts = np.arange(learned, ready)
        windows = accepted[starts]
        lengths = expected_acceptance_length(
            windows, windows, num_levels=np.minimum(verified - starts, NUM_LEVELS)
        )
        policy.learn_windows(acceptance_length_loss(lengths, NUM_LEVELS))
        learned = ready
    return num_rounds


def test_learning_truncated_windows_is_worse_than_waiting_for_complete_ones() -> None:
    rounds = {True: 0, False: 0}
    for request in range(NUM_REQUESTS):
        accepted = hits(np.random.default_rng(request))
        for is_truncated in rounds:
            dice = np.random.default_rng(1000 + request)
            rounds[is_truncated] += rounds_of_request(accepted, is_truncated, dice)
    num_tokens = NUM_REQUESTS * NUM_POSITIONS
    complete, truncated = num_tokens / rounds[False], num_tokens / rounds[True]
    assert complete > 1.06 * truncated
