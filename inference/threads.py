"""Threads beside the one that serves: what they compute, they compute alone.

OpenMP keeps a team of threads for every thread that ever ran something in parallel. GNU's runtime,
which PyTorch brings, lets idle members spin for the next piece of work only while all teams
together have no more threads than there are cores. A second team, of a thread that loaded weights
once, ends that for the whole process: every operation of the serving thread then has to wake its
members. Measured on two cores, 60 small products took 13.4 instead of 10.1 ms.
"""

from __future__ import annotations

import ctypes
import sys

import torch


def compute_alone() -> None:
    """Let PyTorch use one thread in the calling thread from now on; others keep theirs.

    ``torch.set_num_threads`` would also decide for threads that begin later. Where OpenMP is not
    within reach, nothing changes.
    """
    torch.get_num_threads()  # the first call in a thread takes over the process's number
    set_num_threads = getattr(_openmp(), "omp_set_num_threads", None)
    if set_num_threads is not None:
        set_num_threads(ctypes.c_int(1))


def _openmp() -> ctypes.CDLL | None:
    """Return what is loaded in this process, PyTorch's OpenMP among it."""
    return None if sys.platform == "win32" else ctypes.CDLL(None)
