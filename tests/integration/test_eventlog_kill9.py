"""What the embedded log has called durable is there after its writer was killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import StoredMessage
from tests.integration.append import KEYS, NUM_PARTITIONS, TOPIC

NUM_KILLS = 12
MOST_SECONDS_ALIVE = 0.2

Places = dict[tuple[int, int], str]
"""Value by partition and offset."""


def test_everything_reported_durable_survives_twelve_kills_in_order(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    generator = np.random.default_rng(11)
    reported: Places = {}
    for kill in range(NUM_KILLS):
        reported |= _append_and_kill(path, f"w{kill}", generator)
        stored = _stored(path)
        assert reported.items() <= stored.items()
        _assert_offsets_have_no_gap(stored)
        _assert_batches_are_whole(stored)
    assert len(reported) > 10 * NUM_KILLS, "the writers did too little to prove anything"
    assert len(_stored(path)) - len(reported) <= NUM_KILLS * len(KEYS)


def test_processes_that_open_and_append_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    writers = [_writer(path, f"w{n}", num_batches=40) for n in range(3)]
    reported: Places = {}
    for writer in writers:
        output, _ = writer.communicate(timeout=60)
        assert writer.returncode == 0
        reported |= _parse(output)
    stored = _stored(path)
    assert stored == reported
    assert len(stored) == 3 * 120
    _assert_offsets_have_no_gap(stored)


def _append_and_kill(path: Path, writer: str, generator: np.random.Generator) -> Places:
    with _writer(path, writer, num_batches=0) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(generator.uniform(0.0, MOST_SECONDS_ALIVE))
        assert process.poll() is None
        process.kill()
        # A line that the kill has cut short was not reported.
        rest = process.stdout.read().rpartition(b"\n")[0]
    return _parse(first + rest)


def _writer(path: Path, writer: str, *, num_batches: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.integration.append", str(path), writer]
    return subprocess.Popen([*command, str(num_batches)], stdout=subprocess.PIPE)


def _parse(output: bytes) -> Places:
    fields = [line.split() for line in output.decode().splitlines()]
    return {(int(partition), int(offset)): value for partition, offset, value in fields}


def _stored(path: Path) -> Places:
    log = EmbeddedEventLog(path)
    try:
        found: list[StoredMessage] = []
        for partition in range(NUM_PARTITIONS):
            end = log.end_offset(TOPIC, partition)
            found += log.read(TOPIC, partition, 0, max_messages=end + 1)
            assert [m.offset for m in found if m.partition == partition] == list(range(end))
    finally:
        log.close()
    return {(m.partition, m.offset): (m.message.value or b"").decode() for m in found}


def _assert_offsets_have_no_gap(stored: Places) -> None:
    for partition in range(NUM_PARTITIONS):
        offsets = sorted(offset for p, offset in stored if p == partition)
        assert offsets == list(range(len(offsets)))


def _assert_batches_are_whole(stored: Places) -> None:
    """An append is one transaction: batch ``b`` has all its ``1 + b % 5`` messages, or none."""
    batch_to_size = Counter(value.rpartition("/")[0] for value in stored.values())
    for batch, size in batch_to_size.items():
        assert size == 1 + int(batch.partition("/")[2]) % len(KEYS)
