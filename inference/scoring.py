"""Scoring: what every drafter would have had accepted on the verified windows of one request.

Verification reveals it for free: the verified tokens have the target's law whoever drafted them,
so a forward of each drafter over them scores it (HedgeSpec, section 3; the estimators are in
``learner.measures``). Only verified positions are scored, and a window only once it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference.pool import PoolSession
from inference.ports import Predictions, WindowBatch
from inference.trajectory import Trajectory
from learner import measures


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredBatch:
    """Windows scored at once, in the types of the event.

    Attributes:
        starts: int32 (W,).
        num_levels: int16 (W,), 1..K.
        acceptance_probability: float16 (W, K, N); NaN = not scored.
        realised_acceptance: float16 (W, K, N); NaN = not scored.
    """

    starts: NDArray[np.int32]
    num_levels: NDArray[np.int16]
    acceptance_probability: NDArray[np.float16]
    realised_acceptance: NDArray[np.float16]


class WindowScorer:
    """Scores the windows of one request in order of their start, several at a time.

    A window that starts at t has K levels. It is complete when position t + K is verified too:
    only then is it known that the request does not end inside it. At the end of the request a
    window is shortened to the levels that a round could still have used (the last token of a
    request is never followed by a bonus), the same number for all drafters.

    Level 1 of a window is known as soon as position t is verified, whatever follows, and may be
    scored ahead of the rest. The window then carries just those numbers, also where a drafter
    was replaced or failed before the window was complete: what was learned is what is logged.

    Args:
        trajectory: The request.
        num_speculative_tokens: K.
        block: Score when this many windows are complete; one pass over a drafter's weights then
            serves them all.
        first_level_block: Score level 1 when it can be of this many windows; 0 = with the window.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        num_speculative_tokens: int,
        *,
        block: int,
        first_level_block: int = 0,
    ) -> None:
        self._trajectory = trajectory
        self._num_speculative_tokens = num_speculative_tokens
        self._block = block
        self._first_level_block = first_level_block if num_speculative_tokens else 0
        # The first output token comes from the prompt's own forward: no drafter can propose it.
        self._next_start = self._next_first_level = trajectory.num_prompt_tokens + 1
        # Windows that began earlier did so under versions that are no longer in force.
        self._first_in_force = self._next_start
        self._left_out: set[int] = set()
        self._start_to_first_level: dict[int, tuple[NDArray[np.float16], NDArray[np.float16]]] = {}

    @property
    def scores_first_levels(self) -> bool:
        """Whether level 1 is scored ahead of the windows."""
        return self._first_level_block > 0

    def leave_out(self, starts: Iterable[int]) -> None:
        """Score no windows from these positions."""
        self._left_out.update(starts)

    def skip_incomplete(self) -> None:
        """Leave out windows that began under versions that are no longer in force.

        Of those whose level 1 was scored, and thus learned, that much will still be told.
        """
        self._first_in_force = self._next_first_level = max(self._next_start, len(self._trajectory))

    def score_first_levels(self, session: PoolSession, *, is_final: bool) -> ScoredBatch | None:
        """Score level 1 alone of windows that have begun; None if there is less than a block.

        Returns:
            Windows of one level, (W, 1, N); they come again, complete, from ``score``.
        """
        last = len(self._trajectory) - is_final
        starts = self._wanted(self._next_first_level, last)
        if len(starts) < (1 if is_final else self._first_level_block):
            return None
        self._next_first_level = last
        windows = WindowBatch(
            starts=starts, num_levels=np.ones_like(starts), num_speculative_tokens=1
        )
        scored = scored_batch(self._trajectory, windows, session.predict(windows))
        for row, start in enumerate(starts.tolist()):
            self._start_to_first_level[start] = (
                scored.acceptance_probability[row, 0],
                scored.realised_acceptance[row, 0],
            )
        return scored

    def score(self, session: PoolSession, *, is_final: bool) -> ScoredBatch | None:
        """Score what is complete; None if there is less than a block of it (none, if final)."""
        levels = self._num_speculative_tokens
        last = len(self._trajectory) - 1 if is_final else len(self._trajectory) - levels
        if self.scores_first_levels:
            last = min(last, self._next_first_level)
        # Those left out count: what is scored of a run must not wait for the next one.
        if levels == 0 or last - self._next_start < (1 if is_final else self._block):
            return None
        starts = self._wanted(self._next_start, last)
        self._left_out.difference_update(range(self._next_start, last))
        self._next_start = last
        if not starts.size:
            self._trajectory.forget_probs(last)
            return None
        windows = WindowBatch(
            starts=starts,
            num_levels=np.minimum(len(self._trajectory) - 1 - starts, levels),
            num_speculative_tokens=levels,
        )
        scored = self._scored(session, windows)
        self._trajectory.forget_probs(self._next_start)
        return scored

    def _wanted(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the starts in ``first`` .. ``last`` - 1 of which anything is to be told."""
        return np.array(
            [
                start
                for start in range(first, last)
                if start not in self._left_out
                and (start >= self._first_in_force or start in self._start_to_first_level)
            ],
            dtype=np.int64,
        )

    def _scored(self, session: PoolSession, windows: WindowBatch) -> ScoredBatch:
        """Score windows, but tell of level 1 what was told before."""
        is_whole = windows.starts >= self._first_in_force
        num_known = int(self.scores_first_levels)
        predictions: list[Predictions | None] = [None] * session.num_drafters
        batch = scored_batch(self._trajectory, windows, predictions)
        if is_whole.any() and num_known < windows.num_speculative_tokens:
            whole = WindowBatch(
                starts=windows.starts[is_whole],
                num_levels=windows.num_levels[is_whole],
                num_speculative_tokens=windows.num_speculative_tokens,
                num_known_levels=num_known,
            )
            scored = scored_batch(self._trajectory, whole, session.predict(whole))
            batch.acceptance_probability[is_whole] = scored.acceptance_probability
            batch.realised_acceptance[is_whole] = scored.realised_acceptance
        for row, start in enumerate(windows.starts.tolist()):
            if start in self._start_to_first_level:
                probability, realised = self._start_to_first_level.pop(start)
                batch.acceptance_probability[row, 0] = probability
                batch.realised_acceptance[row, 0] = realised
        return batch


def scored_batch(
    trajectory: Trajectory, windows: WindowBatch, predictions: list[Predictions | None]
) -> ScoredBatch:
    """Turn predictions into acceptance, NaN where a drafter failed or a level does not exist."""
    shape = (len(windows.starts), windows.num_speculative_tokens, len(predictions))
    probability, realised = np.full(shape, np.nan), np.full(shape, np.nan)
    levels = np.arange(windows.num_speculative_tokens)
    positions = np.minimum(windows.starts[:, None] + levels, len(trajectory) - 1)
    emitted = np.asarray(trajectory.token_ids, dtype=np.int64)[positions]
    target = None if trajectory.params.is_greedy else _target_probs(trajectory, positions)
    for index, found in enumerate(predictions):
        if found is not None:
            pair = _acceptance(target, found, emitted)
            probability[..., index], realised[..., index] = pair
    missing = levels >= windows.num_levels[:, None]
    probability[missing] = realised[missing] = np.nan
    return ScoredBatch(
        starts=windows.starts.astype(np.int32),
        num_levels=windows.num_levels.astype(np.int16),
        acceptance_probability=probability.astype(np.float16),
        realised_acceptance=realised.astype(np.float16),
    )


def _target_probs(trajectory: Trajectory, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the distributions that the tokens at ``positions`` (W, K) obey, (W, K, V)."""
    unique, inverse = np.unique(positions, return_inverse=True)
    target = np.stack([trajectory.probs(int(p)).double().cpu().numpy() for p in unique])
    return np.asarray(target[inverse.reshape(positions.shape)])


def _acceptance(
    target: NDArray[np.float64] | None, predictions: Predictions, emitted: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (acceptance_probability, realised_acceptance), each (W, K); no target when greedy."""
    proposals = predictions.proposals
    if target is None:
        assert proposals is not None  # a greedy request draws nothing
        accepted = measures.greedy_acceptance(proposals, emitted)
        return accepted, accepted
    if proposals is not None:
        return (
            measures.one_hot_acceptance(target, proposals),
            measures.realised_one_hot_acceptance(proposals, emitted),
        )
    assert predictions.probs is not None  # exactly one of the two is set
    drafted = predictions.probs.cpu().numpy()
    return (
        measures.sampling_acceptance(target, drafted),
        measures.realised_sampling_acceptance(target, drafted, emitted),
    )
