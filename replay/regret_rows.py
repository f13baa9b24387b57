"""The table of regret: per comparator, over all streams and in each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from replay import comparators
from replay.cost import MeasuredCost
from replay.hindsight import Hindsight, switching_name
from replay.regret import ComparableRounds, Interval, block_bootstrap_interval, regret
from replay.summary import ALL_STREAMS, RegretRow
from replay.trace import Trace


def regret_rows(
    trace: Trace,
    rounds: ComparableRounds,
    cost: MeasuredCost,
    generator: np.random.Generator,
    *,
    best: Hindsight | None,
    stream_to_best: Mapping[int, Hindsight],
) -> Iterator[RegretRow]:
    """Yield the rows over all streams, then those of each where there are several.

    ``stream_to_best`` holds the comparators of the streams that are looked at closely; the others
    are compared with their best fixed drafter alone.
    """
    if best is None:
        return
    for name, sequence in best.name_to_sequence.items():
        yield _regret_row(rounds, cost, name, sequence, ALL_STREAMS, generator)
    if len(trace.streams) < 2:
        return
    for index, part in rounds.by_stream():
        names = {switching_name(0): comparators.best_fixed(part.losses)}
        if index in stream_to_best:
            names = stream_to_best[index].name_to_sequence
        for name, sequence in names.items():
            yield _regret_row(part, cost, name, sequence, trace.streams[index], generator)


def _regret_row(
    rounds: ComparableRounds,
    cost: MeasuredCost,
    name: str,
    sequence: NDArray[np.int16],
    stream: str | None,
    generator: np.random.Generator,
) -> RegretRow:
    found = regret(rounds, sequence, cost)
    block_length = request_block_length(rounds)

    def interval(differences: NDArray[np.float64] | None) -> Interval | None:
        if differences is None:
            return None
        return block_bootstrap_interval(differences, generator, block_length=block_length)

    tokens, loss, seconds = map(interval, (found.tokens, found.loss, found.seconds))
    return RegretRow(
        stream=stream,
        comparator=name,
        path_length=comparators.path_length(sequence),
        num_rounds=rounds.num_rounds,
        tokens=float(found.tokens.sum()),
        tokens_low=tokens.low if tokens else None,
        tokens_high=tokens.high if tokens else None,
        loss=float(found.loss.sum()),
        loss_low=loss.low if loss else None,
        loss_high=loss.high if loss else None,
        seconds=None if found.seconds is None else float(found.seconds.sum()),
        seconds_low=seconds.low if seconds else None,
        seconds_high=seconds.high if seconds else None,
    )


def request_block_length(rounds: ComparableRounds) -> int:
    """Return rounds per bootstrap block: a request's, and no less than T^(1/3)."""
    total = rounds.num_rounds
    num_requests = max(1, int(np.unique(rounds.request).size))
    return max(1, math.ceil(total / num_requests), math.ceil(math.cbrt(total)))
