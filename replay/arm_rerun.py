"""Re-running selection of (drafter, K): the worker's own arms, from the state in the log."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
    check = _ArmCheck(request, selector, tolerance)
    num_learned = 0
    for index, is_awake in enumerate(request.awake):
        is_prompt = int(request.rounds.first_position[index]) == request.first_position
        if is_awake.any() and not is_prompt:
            check.follow(index, is_awake)
        rows = slice(num_learned, num_learned + int(request.rounds.num_scored_windows[index]))
        check.learn(rows)
        num_learned = rows.stop
    return tuple(check.found)


class _ArmCheck:
    """Follows the logged rounds with a selector and keeps what differs."""

    def __init__(self, request: RequestTrace, selector: ArmSelector, tolerance: float) -> None:
        self._request = request
        self._selector = selector
        self._tolerance = tolerance
        self.found: list[Disagreement] = []

    def follow(self, index: int, is_awake: NDArray[np.bool_]) -> None:
        """Compare one round's choice and let the selector note its outcome."""
        rounds = self._request.rounds
        drafted = int(rounds.num_draft_tokens[index])
        decision, _ = self._selector.follow(is_awake, int(rounds.drafter_index[index]))
        most = min(drafted, decision.num_speculative_tokens)
        for quantity, rebuilt in (
            ("selection_probability", decision.probability),
            ("score_probability", decision.score_probability),
            ("num_draft_tokens", float(most)),
        ):
            self._compare(index, quantity, rebuilt)
        self._selector.end_round(
            decision,
            drafted,
            int(rounds.num_accepted_tokens[index]),
            int(rounds.num_emitted_tokens[index]),
        )

    def _compare(self, index: int, quantity: str, rebuilt: float) -> None:
        logged = float(getattr(self._request.rounds, quantity)[index])
        if not abs(logged - rebuilt) <= self._tolerance:
            self.found.append(
                Disagreement(
                    stream=self._request.stream,
                    request_id=self._request.request_id,
                    round_index=index,
                    quantity=quantity,
                    logged=logged,
                    rebuilt=rebuilt,
                )
            )

    def learn(self, rows: slice) -> None:
        """Teach the selector these windows, if there are any."""
        windows = self._request.windows
        if windows.start[rows].size:
            self._selector.learn(
                windows.acceptance_probability[rows],
                windows.realised_acceptance[rows],
                windows.num_levels[rows],
                windows.start[rows].astype(np.int64),
            )
