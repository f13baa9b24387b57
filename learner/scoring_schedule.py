"""When scoring is worth its price: all drafters are scored on a run of positions, or none.

Whether a run is scored is drawn before its first round, with a probability that depends on the
past alone, so what is scored is a fair sample. The probability is

- 1 while learning: at the stream's start and after an alarm, for ``learning_windows`` windows;
- then it falls with the square of the windows learned since, for what was not settled by then;
- down to the routine: the ``floor``, or as much as takes ``routine_share`` of the decoding time.
  Scoring every position costs θ x (seconds per position) seconds per second of decoding, so a pool
  that never helps costs little more than ``routine_share``.

The alarm hears the rounds that are played, which cost nothing: the lengths of the played arm
against what the scored windows say of it, in standard deviations, summed up on both sides as in
Page's CUSUM ("Continuous inspection schemes", 1954). An alarm after which the leading drafter is
still the same was false: it takes more to raise the next one; one that was true takes that back.
"No speculation" has nothing to hear; routine scoring finds when drafting pays again.

Two arms that are equally good need not be told apart, so a small margin is no reason to score.

State is two arrays: ``schedule`` (settings, then counters) and ``tallies`` (3, A): decayed weight,
sum and sum of squares of every arm's lengths, by which the alarm knows what to expect.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from learner.selection.compiled import compiled

(ROUTINE_SHARE, FLOOR, RUN, LEARNING, MEMORY, SLACK, ALARM, GROWTH, LARGEST_FACTOR) = range(9)
LEFT, IS_SCORED, PROBABILITY, AGE, BELOW, ABOVE, FACTOR, SUSPECT, NUM_ALARMS = range(9, 18)

NOBODY = -1.0
"""``SUSPECT`` when no alarm is to be judged."""

ENOUGH_ROUNDS = 5.0
"""Weight of tallies from which on lengths can be surprising."""

SMALLEST_VARIANCE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSettings:
    """How sparingly to score.

    Attributes:
        routine_share: Share of the decoding time that routine scoring may take, >= 0.
        floor: Smallest probability of a run to be scored, in (0, 1]; 1 = score everything.
        run_windows: Positions that are decided together, >= 1; the last round may exceed them.
        learning_windows: Windows scored for sure after a start or an alarm, >= 1.
        memory: Decay of the tallies per window, in (0, 1).
        slack: Standard deviations that a round may be off without counting, >= 0.
        alarm: Summed deviations that raise an alarm, > 0.
        growth: Factor on ``alarm`` after a false one, >= 1.
        largest_factor: Most that the growth may come to, >= 1.
    """

    routine_share: float = 0.005
    floor: float = 0.01
    run_windows: int = 16
    learning_windows: int = 24
    memory: float = 0.98
    slack: float = 0.25
    alarm: float = 8.0
    growth: float = 1.3
    largest_factor: float = 8.0

    def __post_init__(self) -> None:
        checks = {
            "routine_share": 0.0 <= self.routine_share < math.inf,
            "floor": 0.0 < self.floor <= 1.0,
            "run_windows": self.run_windows >= 1,
            "learning_windows": self.learning_windows >= 1,
            "memory": 0.0 < self.memory < 1.0,
            "slack": 0.0 <= self.slack < math.inf,
            "alarm": self.alarm > 0.0,
            "growth": 1.0 <= self.growth < math.inf,
            "largest_factor": 1.0 <= self.largest_factor < math.inf,
        }
        for name, is_good in checks.items():
            if not is_good:
                raise ValueError(f"scoring schedule: {name}={getattr(self, name)} is out of range")


def fresh_schedule(settings: ScheduleSettings) -> NDArray[np.float64]:
    """Return the schedule of a stream that has seen nothing, (18,)."""
    counters = np.zeros(NUM_ALARMS - LEFT + 1)
    schedule = np.concatenate([np.array(astuple(settings), dtype=np.float64), counters])
    schedule[[IS_SCORED, PROBABILITY, FACTOR]] = 1.0
    schedule[SUSPECT] = NOBODY
    return schedule


def fresh_tallies(num_arms: int) -> NDArray[np.float64]:
    """Return tallies of nothing, (3, A)."""
    return np.zeros((3, num_arms))


@compiled
def score_probability(schedule: NDArray[np.float64], share: float) -> float:
    """Return the probability that the next run is scored.

    Args:
        schedule: The state.
        share: Seconds of scoring every position per second of decoding, >= 0.
    """
    age = schedule[AGE]
    if age < schedule[LEARNING]:
        return 1.0
    routine = 1.0 if share <= schedule[ROUTINE_SHARE] else schedule[ROUTINE_SHARE] / share
    unsettled = (schedule[LEARNING] / age) ** 2
    return float(min(1.0, max(schedule[FLOOR], routine, unsettled)))


@compiled
def begin_round(schedule: NDArray[np.float64], share: float, coin: float) -> bool:
    """Say whether the positions of the round that begins are scored, drawing where a run begins.

    ``schedule[PROBABILITY]`` is then the probability in force.
    """
    if schedule[LEFT] <= 0.0:
        schedule[PROBABILITY] = score_probability(schedule, share)
        schedule[IS_SCORED] = 1.0 if coin < schedule[PROBABILITY] else 0.0
        schedule[LEFT] = schedule[RUN]
    return bool(schedule[IS_SCORED] > 0.0)


@compiled
def end_round(
    schedule: NDArray[np.float64],
    tallies: NDArray[np.float64],
    arm: int,
    length: float,
    leader: int,
) -> None:
    """Hear how long the played arm's round was.

    Args:
        schedule: The state; changed.
        tallies: What to expect.
        arm: The arm that was played.
        length: Tokens emitted.
        leader: The drafter that leads at present, counted from 1; 0 = no speculation.
    """
    schedule[LEFT] -= length
    if arm == 0 or tallies[0, arm] < ENOUGH_ROUNDS:
        return
    expected = tallies[1, arm] / tallies[0, arm]
    variance = tallies[2, arm] / tallies[0, arm] - expected * expected
    surprise = (length - expected) / np.sqrt(max(variance, SMALLEST_VARIANCE))
    schedule[BELOW] = max(0.0, schedule[BELOW] - surprise - schedule[SLACK])
    schedule[ABOVE] = max(0.0, schedule[ABOVE] + surprise - schedule[SLACK])
    if max(schedule[BELOW], schedule[ABOVE]) <= schedule[ALARM] * schedule[FACTOR]:
        return
    schedule[BELOW] = 0.0
    schedule[ABOVE] = 0.0
    if schedule[AGE] >= schedule[LEARNING]:
        schedule[NUM_ALARMS] += 1.0
        schedule[AGE] = 0.0
        schedule[LEFT] = 0.0
        schedule[SUSPECT] = leader


@compiled
def judge_alarm(schedule: NDArray[np.float64], leader: int) -> None:
    """Raise the bar if the drafter that led at the alarm still leads, else take it back."""
    if leader == schedule[SUSPECT]:
        raised = schedule[FACTOR] * schedule[GROWTH]
        schedule[FACTOR] = min(raised, schedule[LARGEST_FACTOR])
    else:
        schedule[FACTOR] = 1.0
    schedule[SUSPECT] = NOBODY


@compiled
def note_window(
    schedule: NDArray[np.float64],
    tallies: NDArray[np.float64],
    shares: NDArray[np.float64],
    lengths: NDArray[np.float64],
    leader: int,
) -> None:
    """Note a scored window before it is learned; arguments as ``end_round`` and ``arm_losses``."""
    schedule[AGE] += 1.0
    if schedule[AGE] == schedule[LEARNING] and schedule[SUSPECT] != NOBODY:
        judge_alarm(schedule, leader)
    for arm in range(tallies.shape[1]):
        if not np.isnan(lengths[arm]):
            weighted = shares[arm] * lengths[arm]
            tallies[0, arm] = schedule[MEMORY] * tallies[0, arm] + shares[arm]
            tallies[1, arm] = schedule[MEMORY] * tallies[1, arm] + weighted
            tallies[2, arm] = schedule[MEMORY] * tallies[2, arm] + weighted * lengths[arm]
