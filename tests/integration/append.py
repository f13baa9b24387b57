"""Append batches and report what is durable: ``python -m tests.integration.append LOG WRITER N``.

After each append one line per message goes to the standard output: partition, offset, value. With
N = 0 it goes on until it is killed.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import Message, TopicSpec

TOPIC = "appended"
NUM_PARTITIONS = 3
KEYS = [b"a", b"b", b"c", b"d", b"e"]


def main(log_path: Path, writer: str, num_batches: int) -> None:
    """Append batches of 1 to 5 messages with the values ``<writer>/<batch>/<index>``."""
    log = EmbeddedEventLog(log_path)
    log.create_topic(TopicSpec(name=TOPIC, num_partitions=NUM_PARTITIONS))
    for batch in itertools.count() if num_batches == 0 else range(num_batches):
        size = 1 + batch % len(KEYS)
        messages = [
            Message(key=KEYS[(batch + n) % len(KEYS)], value=f"{writer}/{batch}/{n}".encode())
            for n in range(size)
        ]
        places = log.append(TOPIC, messages)
        values = [f"{writer}/{batch}/{n}" for n in range(size)]
        lines = [f"{p} {o} {v}\n" for (p, o), v in zip(places, values, strict=True)]
        sys.stdout.write("".join(lines))
        sys.stdout.flush()
    log.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
