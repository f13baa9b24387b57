"""Every stream keeps a fair, bounded, repeatable sample of its past."""

from __future__ import annotations

import json

import numpy as np
import pytest

from learner.examples import ExampleMemory, Segment
from learner.reservoir import MAX_STREAMS, StreamReservoirs, num_bytes


def segment(offset: int, stream: str = "code", *, size: int = 4) -> Segment:
    return Segment(
        partition=0,
        offset=offset,
        stream=stream,
        hidden=np.full((size, 3), offset, np.float32),
        token_ids=np.full(size, offset % 7, np.int64),
        top_token_ids=np.zeros((size, 2), np.int64),
        top_probabilities=np.zeros((size, 2), np.float32),
    )


SIZE = num_bytes(segment(0))


def offsets(reservoirs: StreamReservoirs) -> list[int]:
    return [one.offset for one in reservoirs.segments]


def test_all_that_came_has_the_same_chance_to_be_kept() -> None:
    counts = np.zeros(40)
    for seed in range(400):
        reservoirs = StreamReservoirs(10 * SIZE, seed=seed)
        for offset in range(40):
            reservoirs.add(segment(offset))
        counts[offsets(reservoirs)] += 1
    assert counts.sum() == 400 * 10
    halves = counts.reshape(4, 10).sum(axis=1) / counts.sum()
    assert np.abs(halves - 0.25).max() < 0.03


def test_a_loud_stream_does_not_drive_out_a_quiet_one() -> None:
    reservoirs = StreamReservoirs(10 * SIZE, seed=0)
    for offset in range(5):
        reservoirs.add(segment(offset, "quiet"))
    for offset in range(5, 500):
        reservoirs.add(segment(offset, "loud"))
    kept = [one.stream for one in reservoirs.segments]
    assert kept.count("quiet") == kept.count("loud") == 5


def test_the_bytes_never_exceed_the_bound_and_are_counted_right() -> None:
    rng = np.random.default_rng(0)
    reservoirs = StreamReservoirs(20 * SIZE, seed=0)
    for offset in range(300):
        stream = f"stream-{rng.integers(3)}"
        reservoirs.add(segment(offset, stream, size=int(rng.integers(1, 30))))
        assert reservoirs.num_bytes == sum(map(num_bytes, reservoirs.segments))
        assert reservoirs.num_bytes <= 20 * SIZE


def test_the_same_segments_leave_the_same_sample() -> None:
    def sample(seed: int) -> list[int]:
        reservoirs = StreamReservoirs(10 * SIZE, seed=seed)
        for offset in range(100):
            reservoirs.add(segment(offset))
        return offsets(reservoirs)

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_what_led_astray_is_forgotten() -> None:
    reservoirs = StreamReservoirs(10 * SIZE, seed=0)
    for offset in range(8):
        reservoirs.add(segment(offset))
    reservoirs.forget_from({0: 3})
    assert offsets(reservoirs) == [0, 1, 2]
    assert reservoirs.num_bytes == 3 * SIZE


def test_half_of_a_batch_comes_from_the_past() -> None:
    memory = ExampleMemory(8, past=StreamReservoirs(50 * SIZE, seed=0))
    for offset in range(40):
        memory.add(segment(offset))
    batch = memory.draw(6, 2, np.random.default_rng(0))
    assert batch is not None
    drawn = batch.hidden[:, 0].numpy()
    assert len(drawn) == 6
    assert (drawn[:3] >= 38).all()
    assert (drawn[3:] < 38).any()


def test_invalid_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="max_bytes=0, expected >= 1"):
        StreamReservoirs(0, seed=0)


def test_a_restart_keeps_the_sample_and_fills_it_from_what_is_read_again() -> None:
    rng = np.random.default_rng(3)
    names = [f"stream-{rng.integers(3)}" for _ in range(300)]
    whole, parted = (StreamReservoirs(20 * SIZE, seed=0) for _ in range(2))
    for offset, name in enumerate(names):
        whole.add(segment(offset, name))
        parted.add(segment(offset, name))
        if offset % 60 == 30:
            state = json.loads(json.dumps(parted.state()))
            parted = StreamReservoirs(20 * SIZE, seed=0)
            parted.resume(state)
            assert parted.segments == []
            for known in range(parted.first_offsets()[0], offset + 1):
                parted.restore(segment(known, names[known]))
    assert offsets(parted) == offsets(whole)
    assert parted.state() == whole.state()


def test_streams_beyond_the_bound_are_forgotten_the_least_recently_heard_first() -> None:
    reservoirs = StreamReservoirs(10_000 * SIZE, seed=0)
    for offset in range(MAX_STREAMS + 3):
        reservoirs.add(segment(offset, f"stream-{offset}"))
    assert len(reservoirs.segments) == MAX_STREAMS
    assert min(offsets(reservoirs)) == 3
