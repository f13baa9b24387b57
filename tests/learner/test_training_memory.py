"""A trainer that runs for long does not grow: 5,000 updates of a tiny head."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path

import torch

from learner.gate import GateSettings
from learner.spawning import SpawnSettings
from tests.learner.fakes import PlacedEvent
from tests.learner.trainers import SETTINGS, Place, event_of

NUM_UPDATES, STEPS_PER_EVENT = 5000, 5
NUM_WARM = 1000
MOST_GROWTH = 1.05

LONG_RUN = replace(
    SETTINGS,
    steps_per_event=STEPS_PER_EVENT,
    memory_positions=100,
    replay_bytes=20_000,
    release_every_events=100,
    rule="ensemble",
    gate=GateSettings(),
    experts=SpawnSettings(),
)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_five_thousand_updates_leave_memory_flat_within_five_percent(tmp_path: Path) -> None:
    place = Place(tmp_path)
    trainer = place.trainer(LONG_RUN)
    online = place.online(trainer)
    events = [event_of(sequence) for sequence in range(50)]
    found: dict[int, tuple[int, int]] = {}
    torch.set_num_threads(1)
    for sequence in range(NUM_UPDATES // STEPS_PER_EVENT):
        event = replace(events[sequence % len(events)], sequence=sequence)
        online.train(PlacedEvent(partition=0, offset=sequence, event=event))
        if trainer.num_updates in (NUM_WARM, NUM_UPDATES):
            gc.collect()
            found[trainer.num_updates] = (resident_bytes(), len(gc.get_objects()))
    assert trainer.num_updates == NUM_UPDATES
    for early, late in zip(found[NUM_WARM], found[NUM_UPDATES], strict=True):
        assert late <= MOST_GROWTH * early, found
