"""The gate stream by stream: what is better on average must not be worse for anybody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from learner.gate import (
    MAX_TOLD_STREAMS,
    Decision,
    GateSettings,
    PairedSums,
    compared_streams,
    judged,
    num_looks,
)
from learner.lifecycle import Lifecycle, Step
from schemas.codec import decode_drafter_released, encode
from schemas.events import ReleaseState, StreamComparison
from tests.learner.trials import HEAD, paired_event
from tests.schemas.builders import make_release

SETTINGS = GateSettings(min_requests=8, max_requests=128)
DIRECT = GateSettings(min_requests=4, max_requests=32, canary_share=0.0)
NUM_SEEDS = 200
MOST = 0.09
"""A rate of 0.05 shows more than this in 200 seeds once in a hundred times."""


def simulated(stream_to_difference: Mapping[str, float], *, size: int, seed: int) -> PairedSums:
    """Draw requests, the streams in turn, better by their stream's difference per window."""
    rng = np.random.default_rng(seed)
    names = list(stream_to_difference)
    streams = [names[row % len(names)] for row in range(size)]
    counts = rng.integers(10, 60, size)
    old = counts * rng.normal(4.0, 0.3, size)
    gain = np.array([stream_to_difference[stream] for stream in streams])
    new = old + counts * (gain + rng.normal(0.0, 0.25, size))
    return PairedSums(num_windows=counts, new_lengths=new, old_lengths=old, streams=streams)


def first(sums: PairedSums, size: int) -> PairedSums:
    """Return the first requests."""
    part = sums.of(range(size))
    return PairedSums(
        num_windows=part.num_windows,
        new_lengths=part.new_lengths,
        old_lengths=part.old_lengths,
        streams=sums.streams[:size],
    )


def test_one_stream_that_is_surely_worse_refuses_what_is_better_on_average() -> None:
    differences = {"code": 1.0, "maths": 1.0, "law": -0.6}
    verdict = judged(simulated(differences, size=96, seed=1), SETTINGS, look=4)
    assert verdict.evidence.difference_low > 0.0
    assert verdict.decision is Decision.REFUSE
    assert verdict.reason.startswith("worse in stream law: ")
    assert verdict.evidence.streams[0].stream == "law"
    without = judged(
        first(simulated(differences, size=96, seed=1), 96).of(range(96)), SETTINGS, look=4
    )
    assert without.decision is Decision.PROMOTE
    assert without.evidence.streams == ()


def test_a_loss_that_is_allowed_refuses_nothing() -> None:
    allowed = GateSettings(min_requests=8, max_requests=128, max_stream_loss=2.0)
    differences = {"code": 1.0, "maths": 1.0, "law": -0.6}
    verdict = judged(simulated(differences, size=96, seed=1), allowed, look=4)
    assert verdict.decision is Decision.PROMOTE


def test_a_stream_with_too_few_requests_is_told_and_not_judged() -> None:
    sums = simulated({"code": 0.8}, size=32, seed=2)
    rows = [*range(32), 0, 1, 2]
    worse = PairedSums(
        num_windows=sums.num_windows[rows],
        new_lengths=np.append(sums.new_lengths, sums.num_windows[:3] * 1.0),
        old_lengths=np.append(sums.old_lengths, sums.num_windows[:3] * 3.0),
        streams=[*sums.streams, *["law"] * 3],
    )
    verdict = judged(worse, SETTINGS, look=3)
    assert verdict.decision is Decision.PROMOTE
    assert [(one.stream, one.num_requests) for one in verdict.evidence.streams] == [
        ("code", 32),
        ("law", 3),
    ]


@pytest.mark.parametrize("num_streams", [1, 4, 12])
def test_an_equal_version_is_refused_for_a_stream_no_more_often_than_stated(
    num_streams: int,
) -> None:
    """The error is shared among the streams, however many there are."""
    equal = {f"stream-{number}": 0.0 for number in range(num_streams)}
    num_refused = 0
    for seed in range(NUM_SEEDS):
        sums = simulated(equal, size=SETTINGS.max_requests, seed=seed)
        for look in range(1, num_looks(SETTINGS.max_requests, SETTINGS.min_requests) + 1):
            size = SETTINGS.min_requests * 2 ** (look - 1)
            found = compared_streams(
                first(sums, size),
                error=SETTINGS.error / (look * (look + 1)),
                min_requests=SETTINGS.min_requests,
            )
            if found.worst is not None:
                num_refused += 1
                break
    assert num_refused / NUM_SEEDS <= MOST


def test_the_evidence_names_a_bounded_number_of_streams_and_the_rest_together() -> None:
    sizes = {f"stream-{number:02d}": number + 2 for number in range(20)}
    streams = [stream for stream, size in sizes.items() for _ in range(size)]
    ones = np.ones(len(streams))
    windows = np.full(len(streams), 10)
    sums = PairedSums(
        num_windows=windows,
        new_lengths=25.0 * ones,
        # In one of the smallest streams the newer version is worse.
        old_lengths=np.where(np.array(streams) == "stream-03", 30.0, 20.0),
        streams=streams,
    )
    found = compared_streams(sums, error=0.05, min_requests=4)
    assert found.worst is not None
    assert found.worst.stream == "stream-03"
    assert len(found.told) == MAX_TOLD_STREAMS + 1
    assert [one.stream for one in found.told[:3]] == ["stream-03", "stream-19", "stream-18"]
    rest = found.told[-1]
    assert (rest.stream, rest.num_streams) == ("", 20 - MAX_TOLD_STREAMS)
    assert sum(one.num_requests for one in found.told) == len(streams)
    assert sum(one.num_windows for one in found.told) == windows.sum()


def lived(
    stream_to_acceptance: Mapping[str, Mapping[int, float]],
    *,
    settings: GateSettings = DIRECT,
    num_requests: int = 32,
    life: Lifecycle | None = None,
) -> tuple[Lifecycle, list[Step]]:
    """Put version 2 on trial and serve requests, the streams in turn; return what followed."""
    rng = np.random.default_rng(5)
    if life is None:
        life = Lifecycle(HEAD, settings, live=1)
        life.offer(2, "trained")
    streams = list(stream_to_acceptance)
    steps: list[Step] = []
    for request in range(num_requests):
        stream = streams[request % len(streams)]
        event = paired_event(
            request,
            own=life.live,
            beside=3 - life.live,
            acceptance=dict(stream_to_acceptance[stream]),
            rng=rng,
            stream=stream,
        )
        steps += life.observe(event)
        if any(step.state in (ReleaseState.RETIRED, ReleaseState.ROLLED_BACK) for step in steps):
            break
    return life, steps


def told(steps: Sequence[Step]) -> tuple[StreamComparison, ...]:
    evidence = steps[-1].evidence
    assert evidence is not None
    return evidence.streams


def test_a_version_that_gains_in_two_streams_and_loses_in_a_third_is_refused_by_its_events() -> (
    None
):
    better, worse = {1: 0.3, 2: 0.8}, {1: 0.7, 2: 0.4}
    life, steps = lived({"code": better, "maths": better, "law": worse}, num_requests=96)
    live = [step for step in steps if step.state is ReleaseState.LIVE]
    # It may be promoted before anything is known of the third; then it comes back.
    assert life.live == 1
    assert "worse in stream law" in steps[-1].reason
    assert told(steps)[0].stream == "law"
    assert told(steps)[0].difference_high < 0.0
    assert len(live) in (0, 2)
    decoded = decode_drafter_released(encode(make_release(evidence=steps[-1].evidence)))
    assert decoded.evidence == steps[-1].evidence


def test_a_version_that_gains_in_every_stream_goes_live_with_the_evidence_of_each() -> None:
    better = {1: 0.3, 2: 0.8}
    life, steps = lived({"code": better, "maths": better}, num_requests=16)
    assert life.live == 2
    released = next(step for step in steps if step.state is ReleaseState.LIVE)
    assert {one.stream for one in told([released])} == {"code", "maths"}
    assert all(one.new_acceptance_length > one.old_acceptance_length for one in told([released]))


def test_a_live_version_that_becomes_worse_in_one_stream_is_rolled_back() -> None:
    better, worse = {1: 0.3, 2: 0.8}, {1: 0.8, 2: 0.3}
    watched = GateSettings(min_requests=4, max_requests=128, canary_share=0.0)
    life, _ = lived({"code": better}, settings=watched, num_requests=8)
    assert life.live == 2
    life, steps = lived({"code": better, "law": worse}, num_requests=96, life=life)
    assert life.live == 1
    assert steps[-1].state is ReleaseState.ROLLED_BACK
    assert "worse in stream law" in steps[-1].reason
