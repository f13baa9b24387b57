"""Threads beside the serving one leave it its cores."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import torch

from inference.threads import compute_alone

PROGRAM = """
import os, threading, torch
from inference.threads import compute_alone

def compute():
    {first}
    rows = torch.ones(4000, 576)
    rows[torch.arange(3000)].contiguous().float().sum()
    print(len(os.listdir("/proc/self/task")) - before)

before = len(os.listdir("/proc/self/task")) + 1
thread = threading.Thread(target=compute)
thread.start()
thread.join()
"""


def in_a_thread(work: Callable[[], None]) -> int:
    """Run ``work`` in a thread of its own, and return how many threads PyTorch then uses there."""
    found: list[int] = []

    def run() -> None:
        work()
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_that_computes_alone_changes_nothing_for_the_others() -> None:
    before, elsewhere = torch.get_num_threads(), in_a_thread(lambda: None)
    assert in_a_thread(compute_alone) == 1
    assert torch.get_num_threads() == before
    assert in_a_thread(lambda: None) == elsewhere


def test_a_thread_that_computes_alone_starts_no_team() -> None:
    def extra_threads(first: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(first=first)],
            env=os.environ | {"OMP_NUM_THREADS": "3"},
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout)

    assert extra_threads("pass") > 0
    assert extra_threads("compute_alone()") == 0
