"""Re-running selection of (drafter, K): the worker's own arms, from the state in the log."""

from __future__ import annotations

import numpy as np

from learner.arm_selector import ArmSelector, unpacked_arms
from learner.selection import parse_policy
from replay.requests import RequestTrace
from replay.rerun import PROBABILITY_TOLERANCE, Disagreement


def chooses_arms(request: RequestTrace) -> bool:
    """Tell whether the request's policy chose among arms.

    Raises:
        ValueError: If its policy is unknown.
    """
    return parse_policy(request.policy_name).objective == "seconds"


def logged_arms(request: RequestTrace) -> ArmSelector:
    """Remake the worker's own selector from the logged state, costs included.

    Raises:
        ValueError: If the state is not there or not of this policy, or drafters joined later.
    """
    if request.num_started_drafters != len(request.drafter_ids):
        raise ValueError(
            f"{len(request.drafter_ids)} drafters in a request that started with "
            f"{request.num_started_drafters}: arms that join a request are not re-run"
        )
    learner = unpacked_arms(
        parse_policy(request.policy_name),
        request.policy_table,
        request.policy_numbers,
        len(request.drafter_ids),
        request.num_speculative_tokens,
    )
    return ArmSelector(learner)


def verify_logged_arms(
    request: RequestTrace, selector: ArmSelector, *, tolerance: float = PROBABILITY_TOLERANCE
) -> tuple[Disagreement, ...]:
    """Report the rounds whose logged choice or schedule is not the selector's.

    Checked are the probability of the choice, no speculation included, the probability that its
    windows are scored, and that no more was drafted than the arm's K. The prompt's own pass and
    rounds in which nobody was awake were not chosen.

    Raises:
        ValueError: If the log does not say who was awake.
    """
    if request.awake is None:
        raise ValueError("the log does not say which drafters were awake")
    rounds = request.rounds
    found: list[Disagreement] = []
    num_learned = 0

    def compare(index: int, quantity: str, logged: float, rebuilt: float) -> None:
        if not abs(logged - rebuilt) <= tolerance:
            found.append(
                Disagreement(
                    stream=request.stream,
                    request_id=request.request_id,
                    round_index=index,
                    quantity=quantity,
                    logged=logged,
                    rebuilt=rebuilt,
                )
            )

    for index, is_awake in enumerate(request.awake):
        is_prompt = int(rounds.first_position[index]) == request.first_position
        if is_awake.any() and not is_prompt:
            decision, _ = selector.follow(is_awake, int(rounds.drafter_index[index]))
            chance, score_chance = (
                float(rounds.selection_probability[index]),
                float(rounds.score_probability[index]),
            )
            compare(index, "selection_probability", chance, decision.probability)
            compare(index, "score_probability", score_chance, decision.score_probability)
            drafted = int(rounds.num_draft_tokens[index])
            most = min(drafted, decision.num_speculative_tokens)
            compare(index, "num_draft_tokens", drafted, most)
            selector.end_round(
                decision,
                drafted,
                int(rounds.num_accepted_tokens[index]),
                int(rounds.num_emitted_tokens[index]),
            )
        rows = slice(num_learned, num_learned + int(rounds.num_scored_windows[index]))
        windows = request.windows
        if windows.start[rows].size:
            selector.learn(
                windows.acceptance_probability[rows],
                windows.realised_acceptance[rows],
                windows.num_levels[rows],
                windows.start[rows].astype(np.int64),
            )
        num_learned = rows.stop
    return tuple(found)
