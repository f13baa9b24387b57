"""The table of policies for logs without scoring, estimated from what was played."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from learner.selection import PolicySpec, RoundFeedback
from learner.selection.fixed import Fixed
from learner.selection.kernels import sharpen_to_best
from replay.off_policy import off_policy_estimate, robust_losses, running_means
from replay.summary import OffPolicyRow
from replay.trace import Trace
from schemas.events import NO_DRAFTER

PREDICTION_WEIGHT = 10.0


def knows_only_what_was_played(trace: Trace) -> bool:
    """Tell whether no window of the log says anything of a drafter that was not played there."""
    rounds = trace.rounds
    is_scored = ~np.isnan(rounds.lengths)
    played = rounds.drafter != NO_DRAFTER
    is_scored[np.flatnonzero(played), rounds.drafter[played]] = False
    return not is_scored.any()


def off_policy_rows(
    trace: Trace,
    specs: Sequence[PolicySpec],
    num_speculative_tokens: int,
    generator: np.random.Generator,
) -> Iterator[OffPolicyRow]:
    """Yield a row per policy over the rounds in which a drafter was played."""
    rounds = trace.rounds
    played = np.flatnonzero(rounds.drafter != NO_DRAFTER)
    drafter = rounds.drafter[played].astype(np.int64)
    lengths = rounds.num_emitted_tokens[played].astype(np.float64)
    probability = rounds.selection_probability[played].astype(np.float64)
    request = rounds.request[played]
    predictions = np.empty((played.size, len(trace.drafter_ids)))
    running_means(lengths, drafter, PREDICTION_WEIGHT, predictions)
    scale = num_speculative_tokens + 1.0
    losses = robust_losses(
        1.0 - lengths / scale, drafter, probability, 1.0 - np.minimum(predictions, scale) / scale
    )
    block_length = -(-played.size // max(1, np.unique(request).size))
    for spec in specs:
        policy = _probabilities(
            spec, trace, losses, drafter, probability, 1.0 - lengths / scale, request
        )
        found = off_policy_estimate(
            lengths, drafter, probability, policy, predictions, generator, block_length=block_length
        )
        weighted, robust = found.importance_weighted, found.doubly_robust
        yield OffPolicyRow(
            policy=str(spec),
            num_rounds=found.num_rounds,
            effective_sample_size=found.effective_sample_size,
            importance_weighted=weighted.value if weighted else None,
            importance_weighted_low=weighted.low if weighted else None,
            importance_weighted_high=weighted.high if weighted else None,
            doubly_robust=robust.value if robust else None,
            doubly_robust_low=robust.low if robust else None,
            doubly_robust_high=robust.high if robust else None,
            refusal=found.refusal,
        )


def _probabilities(
    spec: PolicySpec,
    trace: Trace,
    losses: NDArray[np.float64],
    drafter: NDArray[np.int64],
    logged_probability: NDArray[np.float64],
    played_losses: NDArray[np.float64],
    request: NDArray[np.int32],
) -> NDArray[np.float64]:
    """Return what the policy would choose with before each round, (T, N), learning on the way.

    One policy runs through the log of its stream, or afresh through each request.
    """
    found = np.empty(losses.shape)
    stream = trace.request_stream[request]
    groups = request if spec.scope == "request" and spec.name != Fixed.name else stream
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    for rows in np.split(order, starts[1:]):
        policy = spec.build(len(trace.drafter_ids), drafter_ids=trace.drafter_ids)
        found[rows[:1]] = policy.probabilities()
        if policy.learns_rounds:
            for at, index in enumerate(rows):
                found[index] = policy.probabilities()
                if at + 1 < rows.size:
                    policy.learn_round(
                        RoundFeedback(
                            drafter_index=int(drafter[index]),
                            selection_probability=float(logged_probability[index]),
                            length_loss=float(np.clip(played_losses[index], 0.0, 1.0)),
                            agreement_loss=float(np.clip(played_losses[index], 0.0, 1.0)),
                        )
                    )
        else:
            found[rows[1:]] = policy.learn_windows(losses[rows])[:-1]
    if spec.choice == "argmax":
        for row in found:
            sharpen_to_best(row)
    return found
