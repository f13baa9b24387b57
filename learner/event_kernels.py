"""What a stream's state adds up over one event, compiled: losses, evidence and costs.

Sums are taken in the order in which numpy takes them, so that states written before these loops
were compiled go on bit for bit. W windows, K levels, N drafters of the event, M of the learner;
``places`` (N,) tells where the event's drafters stand among the learner's, -1 for an orphan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from learner.selection.compiled import compiled
from learner.window_kernels import decode_halves, scale_halves

NO_LOSS, FIRST_LOSS, LENGTH_LOSS, HYBRID_LOSS = 0, 1, 2, 3
"""What a policy learns; nothing if there is none to teach."""

FLOAT16_INFINITY = 0x7C00
PAIRWISE = 8
"""Rows shorter than this numpy adds one by one, longer ones as eight sums."""
LONGEST_ROW = 128
"""Longer ones than this it halves."""


@compiled
def measure_event(
    probability: NDArray[np.float64],
    realised: NDArray[np.float64],
    num_levels: NDArray[np.int16],
    places: NDArray[np.int64],
    is_cut: bool,
    is_published: bool,
    length_weight: float,
    policy_loss: int,
    losses: NDArray[np.float64],
    policy_losses: NDArray[np.float64],
) -> tuple[int, int, int, float]:
    """Write the losses of an event's windows, in the learner's order; both outputs hold NaN.

    Args:
        probability: Acceptance probabilities, (W, K, N), K >= 1; NaN = not scored.
        realised: Realised acceptances, likewise.
        num_levels: Levels that exist, (W,).
        places: See the module.
        is_cut: Leave out windows of fewer than K levels: the request was cut off.
        is_published: Estimate lengths by the product of probabilities, else exactly.
        length_weight: Share of the length in ``losses``; the rest is the loss at level 1.
        policy_loss: ``FIRST_LOSS``, ``LENGTH_LOSS`` (exact), ``HYBRID_LOSS`` or ``NO_LOSS``.
        losses: Evidence for the prior, (W, M), written.
        policy_losses: What the policy learns, (W, M), written unless ``NO_LOSS``.

    Returns:
        Windows written; then, if a loss is outside [0, 1], its window and drafter and the loss,
        else -1, -1 and 0.
    """
    num_windows, depth, num_drafters = probability.shape
    row = 0
    for window in range(num_windows):
        exists = min(int(num_levels[window]), depth)
        if is_cut and exists < depth:
            continue
        for drafter in range(num_drafters):
            gain, reach, product, product_gain = 0.0, 1.0, 1.0, 0.0
            for level in range(exists):
                chance = probability[window, level, drafter]
                gain += reach * chance
                reach *= realised[window, level, drafter]
                product *= chance
                product_gain += product
            if exists < depth:
                # A missing realised acceptance counts where a window goes on behind it.
                gain += reach * 0.0
            first = 1.0 - probability[window, 0, drafter]
            length = 1.0 - (1.0 + gain) / (depth + 1)
            estimated = 1.0 - (1.0 + product_gain) / (depth + 1) if is_published else length
            loss = length_weight * estimated + (1.0 - length_weight) * first
            if loss < 0.0 or loss > 1.0:
                return row, row, drafter, loss
            learned = length if policy_loss == LENGTH_LOSS else first
            if policy_loss == HYBRID_LOSS:
                learned = 0.5 * (length + first)
            if policy_loss != NO_LOSS and (learned < 0.0 or learned > 1.0):
                return row, row, drafter, learned
            place = places[drafter]
            if place >= 0:
                losses[row, place] = loss
                if policy_loss != NO_LOSS:
                    policy_losses[row, place] = learned
        row += 1
    return row, -1, -1, 0.0


@compiled
def total(values: NDArray[np.float64]) -> float:
    """Return the sum in numpy's order."""
    result = 0.0
    if values.size < PAIRWISE:
        for index in range(values.size):
            result += values[index]
        return result
    sums = np.zeros(PAIRWISE)
    whole = values.size - values.size % PAIRWISE
    for index in range(whole):
        sums[index % PAIRWISE] += values[index]
    result += ((sums[0] + sums[1]) + (sums[2] + sums[3])) + (
        (sums[4] + sums[5]) + (sums[6] + sums[7])
    )
    for index in range(whole, values.size):
        result += values[index]
    return float(result)


@compiled
def total_of_many(values: NDArray[np.float64]) -> float:
    """Return the sum in numpy's order, of up to 8,192 values: long rows it halves."""
    if values.size <= LONGEST_ROW:
        return total(values)
    middle = values.size // 2
    middle -= middle % PAIRWISE
    return total_of_many(values[:middle]) + total_of_many(values[middle:])


@compiled
def add_evidence(
    losses: NDArray[np.float64],
    decay: float,
    excess_loss: NDArray[np.float64],
    num_windows: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return decayed excess losses and windows awake, (M,) each, after losses (W, M)."""
    count, num_drafters = losses.shape
    excess, awake = np.zeros(num_drafters), np.zeros(num_drafters)
    known = np.empty(num_drafters)
    for window in range(count):
        num_awake = 0
        for drafter in range(num_drafters):
            is_awake = not np.isnan(losses[window, drafter])
            known[drafter] = losses[window, drafter] if is_awake else 0.0
            num_awake += is_awake
        mean = total(known) / max(num_awake, 1)
        for drafter in range(num_drafters):
            if not np.isnan(losses[window, drafter]):
                excess[drafter] += known[drafter] - mean
                awake[drafter] += 1.0
    return decay * excess_loss + excess, decay * num_windows + awake


@compiled
def add_costs(
    scores: NDArray[np.uint16],
    places: NDArray[np.int64],
    drafter_index: NDArray[np.int16],
    num_draft_tokens: NDArray[np.int16],
    draft_seconds: NDArray[np.float32],
    verify_seconds: NDArray[np.float32],
    is_decoding: NDArray[np.bool_],
    score_seconds: float,
    per_drafter: NDArray[np.float64],
    per_length: NDArray[np.float64],
) -> None:
    """Add what an event's R rounds cost to ``per_drafter`` and ``per_length``.

    Args:
        scores: Acceptance probabilities as bits of float16, (W, K, N).
        places: See the module.
        drafter_index: Of the rounds, (R,); -1 = none.
        num_draft_tokens: Of the rounds, (R,).
        draft_seconds: Of the rounds, (R,).
        verify_seconds: Of the rounds, (R,).
        is_decoding: Rounds whose verification did not read the prompt as well, (R,).
        score_seconds: Of all rounds together, shared by all windows that were scored.
        per_drafter: (4, M), written: seconds and tokens drafted, seconds and windows scored.
        per_length: (2, >= K + 1), written: seconds and number of verifications by drafted tokens.
    """
    count, num_levels, num_drafters = scores.shape
    num_scored = np.zeros(num_drafters)
    for window in range(count):
        for drafter in range(num_drafters):
            for level in range(num_levels):
                if scores[window, level, drafter] & 0x7FFF <= FLOAT16_INFINITY:
                    num_scored[drafter] += 1.0
                    break
    share_seconds = score_seconds / max(num_scored.sum(), 1.0)
    drafted = np.zeros((2, num_drafters))
    verified = np.zeros(per_length.shape)
    for index in range(drafter_index.size):
        length = num_draft_tokens[index]
        if drafter_index[index] >= 0:
            drafted[0, drafter_index[index]] += draft_seconds[index]
            drafted[1, drafter_index[index]] += length
        if is_decoding[index]:
            verified[0, length] += verify_seconds[index]
            verified[1, length] += 1.0
    for drafter in range(num_drafters):
        place = places[drafter]
        if place >= 0:
            per_drafter[0, place] += drafted[0, drafter]
            per_drafter[1, place] += drafted[1, drafter]
            per_drafter[2, place] += num_scored[drafter] * share_seconds
            per_drafter[3, place] += num_scored[drafter]
    per_length += verified


@compiled
def decoded(scores: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Return scores as ``window_kernels.halves`` does."""
    words, values = np.empty(scores.size, np.uint32), np.empty(scores.size)
    decode_halves(scores.reshape(scores.size), words)
    scale_halves(words.view(np.float32), values)
    return values.reshape(scores.shape)


@compiled
def decayed(decay: float, old: tuple[NDArray[np.float64], ...], size: int) -> NDArray[np.float64]:
    """Return the rows ``old``, of one length <= ``size``, decayed; 0 behind their end."""
    rows = np.zeros((len(old), size))
    for row in range(len(old)):
        for index in range(old[row].size):
            rows[row, index] = decay * old[row][index]
    return rows


@compiled
def take_event(
    acceptance: NDArray[np.uint16],
    realised: NDArray[np.uint16],
    num_levels: NDArray[np.int16],
    places: NDArray[np.int64],
    how: tuple[bool, bool, float, int, float],
    prior: tuple[NDArray[np.float64], NDArray[np.float64]],
    rounds: tuple[NDArray[np.int16], NDArray[np.int16]],
    seconds: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]],
    first_position: NDArray[np.int32],
    num_prompt_tokens: int,
    costs: tuple[NDArray[np.float64], ...],
    verifications: tuple[NDArray[np.float64], ...],
) -> tuple[
    tuple[int, int, int, float],
    NDArray[np.float64],
    tuple[NDArray[np.float64], NDArray[np.float64]],
    NDArray[np.float64],
    NDArray[np.float64],
]:
    """Do all of an event that is not its policy's, at once: losses, evidence and costs.

    Args:
        acceptance: Acceptance probabilities as bits of float16, (W, K, N), K >= 1.
        realised: Realised acceptances, likewise.
        num_levels: Levels that exist, (W,).
        places: See the module.
        how: ``is_cut``, ``is_published``, ``length_weight`` and ``policy_loss`` of
            ``measure_event``, and the decay.
        prior: Excess losses and windows awake before the event, (M,) each.
        rounds: Drafters and tokens drafted, (R,) each.
        seconds: To draft, to verify and to score, (R,) each.
        first_position: Of the rounds, (R,).
        num_prompt_tokens: A round that begins there has read the prompt as well.
        costs: The four sums per drafter before the event, (M,) each.
        verifications: The two sums per length, of one length each.

    Returns:
        What ``measure_event`` returns; what the policy learns, (W', M); the prior; and the sums
        that ``add_costs`` writes.
    """
    is_cut, is_published, length_weight, policy_loss, decay = how
    depth = acceptance.shape[1]
    losses = np.full((acceptance.shape[0], prior[0].size), np.nan)
    of_policy = losses if policy_loss == NO_LOSS else losses.copy()
    found = measure_event(
        decoded(acceptance),
        decoded(realised),
        num_levels,
        places,
        is_cut,
        is_published,
        length_weight,
        policy_loss,
        losses,
        of_policy,
    )
    count = found[0]
    new_prior = prior
    if count > 0:
        new_prior = add_evidence(losses[:count], decay, prior[0], prior[1])
    per_drafter = decayed(decay, costs, prior[0].size)
    per_length = decayed(decay, verifications, max(verifications[0].size, depth + 1))
    add_costs(
        acceptance,
        places,
        rounds[0],
        rounds[1],
        seconds[0],
        seconds[1],
        first_position > num_prompt_tokens,
        total_of_many(seconds[2].astype(np.float64)),
        per_drafter,
        per_length,
    )
    return found, of_policy[:count], new_prior, per_drafter, per_length
