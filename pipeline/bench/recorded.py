"""The selection benchmark on recorded traffic: real heads, real text, every drafter scored.

The recording (``draftloop bench pool``) holds single requests of several domains, conversations
that go A, B, A, prompts of two tasks, and documents of several subjects. A seed orders them and
tosses the coins; what is learned and walked is only the windows of the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from learner.selection import DEFAULT_POLICY
from learner.walk import WindowTrace
from pipeline.bench.selection import (
    HEDGESPEC,
    NUM_SEEDS,
    POLICIES,
    PUBLISHED_BANDITS,
    TUNED_BANDITS,
    Interval,
    Lengths,
    hindsight_lengths,
    played_lengths,
    ratio,
)
from pipeline.bench.streams import SelectionStream, play_each, selection_stream
from replay.errors import ReplayError
from replay.reader import LogReader
from replay.requests import join_requests
from replay.walks import window_trace

MIXED_DRAFTER = re.compile(r"mixed(-\d+)?")
"""The head that was trained on all domains."""

CONVERSATION, TWO_TASKS, DOCUMENT = "shift", "two", "document"
SETS = {
    CONVERSATION: "conversations",
    TWO_TASKS: "two tasks",
    DOCUMENT: "documents",
}
MIXED_STREAM = "mixed"
SPLICED_STREAM = "spliced"
"""Requests of two domains put together as A, B, A."""

DOMAIN_STREAMS = "per domain"
"""Every domain a stream of its own; tokens and rounds added up."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request of a recording.

    Attributes:
        request_id: ``<set>-<number>`` or, for a turn, ``<set>-<number>:<turn>``.
        trace: Its windows, over the drafters of the recording.
    """

    request_id: str
    trace: WindowTrace

    @property
    def kind(self) -> str:
        """The domain, or the set, that it belongs to."""
        return self.request_id.rpartition("-")[0]

    @property
    def conversation_id(self) -> str:
        """What its turns share."""
        return self.request_id.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Recording:
    """All complete requests of a recording, in order of their ids."""

    drafter_ids: tuple[str, ...]
    requests: tuple[RecordedRequest, ...]

    def of_kind(self, kind: str) -> list[RecordedRequest]:
        """Return the requests of one domain or set."""
        return [request for request in self.requests if request.kind == kind]

    @property
    def domains(self) -> list[str]:
        """The kinds that are domains."""
        return sorted({request.kind for request in self.requests} - set(SETS))


def read_recording(folder: Path) -> Recording:
    """Read a recording whose requests all list the same drafters.

    Raises:
        ReplayError: If there is no log, no scored request, or requests differ in their drafters.
    """
    found, drafter_ids = [], None
    for request in join_requests(LogReader(folder)):
        if not request.is_complete or not request.windows.start.size:
            continue
        if drafter_ids not in (None, request.drafter_ids):
            raise ReplayError(
                f"{folder}: request {request.request_id} lists {len(request.drafter_ids)} "
                f"drafters, others {len(drafter_ids or ())}: record with one pool"
            )
        drafter_ids = request.drafter_ids
        found.append(RecordedRequest(request.request_id, window_trace(request)))
    if drafter_ids is None:
        raise ReplayError(f"{folder} holds no complete request with scored windows")
    return Recording(drafter_ids, tuple(sorted(found, key=lambda one: one.request_id)))


def joined(traces: Sequence[WindowTrace]) -> WindowTrace:
    """Return several requests as one: for selection, its subject changes inside."""
    offsets = np.cumsum([0, *(trace.num_positions for trace in traces)])
    starts = [trace.starts + offset for trace, offset in zip(traces, offsets, strict=False)]

    def all_of(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(trace, name) for trace in traces])

    return WindowTrace(
        num_positions=int(offsets[-1]),
        starts=np.concatenate(starts),
        num_levels=all_of("num_levels"),
        is_whole=all_of("is_whole"),
        acceptance_probability=all_of("acceptance_probability"),
        realised_acceptance=all_of("realised_acceptance"),
        is_idle=all_of("is_idle"),
    )


@dataclass(frozen=True, slots=True)
class _Unit:
    """What a policy of scope ``request`` takes for one request; ``part`` is each turn's kind."""

    traces: tuple[WindowTrace, ...]
    parts: tuple[int, ...]


def run_recorded(
    folder: Path,
    *,
    seeds: Sequence[int] = tuple(range(NUM_SEEDS)),
    policies: Sequence[str] = POLICIES,
    console: Console,
) -> dict[str, Any]:
    """Run all policies on the streams of a recording.

    Returns:
        The flat keys of the benchmark and the whole table under ``table``.

    Raises:
        ReplayError: As ``read_recording``.
    """
    recording = read_recording(folder)
    runs: dict[str, list[Lengths]] = {}
    for seed in track(seeds, "recorded streams", console=console):
        for name, found in _lengths_by_stream(recording, policies, seed).items():
            runs.setdefault(name, []).append(found)
    return {**_keys(runs), **_checks(runs, policies), "table": _table(runs, recording)}


def _lengths_by_stream(
    recording: Recording, policies: Sequence[str], seed: int
) -> dict[str, Lengths]:
    rng = np.random.default_rng(seed)
    units = _units(recording, rng)
    streams = {name: _stream(recording, some, rng) for name, some in units.items() if some}
    found = {name: _lengths(stream, policies) for name, stream in streams.items()}
    by_domain = [
        _stream(recording, [u for u in units[MIXED_STREAM] if u.parts == (index,)], rng)
        for index in range(len(recording.domains))
    ]
    found[DOMAIN_STREAMS] = _pooled(by_domain, policies)
    return found


def _units(recording: Recording, rng: np.random.Generator) -> dict[str, list[_Unit]]:
    """Return the requests of every stream in this seed's order."""
    domains = recording.domains
    steady = [
        _Unit((request.trace,), (domains.index(request.kind),))
        for request in recording.requests
        if request.kind in domains
    ]
    found = {MIXED_STREAM: _shuffled(steady, rng), SPLICED_STREAM: _spliced(steady, rng)}
    for kind, name in SETS.items():
        turns: dict[str, list[WindowTrace]] = {}
        for request in recording.of_kind(kind):
            turns.setdefault(request.conversation_id, []).append(request.trace)
        units = [_Unit(tuple(traces), (0,) * len(traces)) for traces in turns.values()]
        found[name] = _shuffled(units, rng)
    return found


def _shuffled(units: Sequence[_Unit], rng: np.random.Generator) -> list[_Unit]:
    return [units[int(index)] for index in rng.permutation(len(units))]


def _spliced(steady: Sequence[_Unit], rng: np.random.Generator) -> list[_Unit]:
    """Put requests of two domains together as A, B, A until too few are left."""
    waiting: dict[int, list[_Unit]] = {}
    for unit in _shuffled(steady, rng):
        waiting.setdefault(unit.parts[0], []).append(unit)
    found: list[_Unit] = []
    while True:
        firsts = [part for part, units in waiting.items() if len(units) >= 2]
        if not firsts:
            return found
        first = int(rng.choice(firsts))
        others = [part for part, units in waiting.items() if part != first and units]
        if not others:
            return found
        second = int(rng.choice(others))
        parts = (first, second, first)
        found.append(_Unit(tuple(waiting[part].pop().traces[0] for part in parts), parts))


def _stream(
    recording: Recording, units: Sequence[_Unit], rng: np.random.Generator
) -> SelectionStream:
    parts = [
        np.repeat(unit.parts, [trace.num_positions for trace in unit.traces]) for unit in units
    ]
    return selection_stream(
        recording.drafter_ids, [joined(unit.traces) for unit in units], parts, rng
    )


def _lengths(stream: SelectionStream, policies: Sequence[str]) -> Lengths:
    found = played_lengths(stream, policies) | hindsight_lengths(stream)
    rounds = play_each(stream).sum(axis=0)
    is_mixed = np.array([bool(MIXED_DRAFTER.fullmatch(i)) for i in stream.drafter_ids])
    found["best single but the mixed head"] = stream.num_tokens / float(rounds[~is_mixed].min())
    if is_mixed.any():
        found["mixed head"] = stream.num_tokens / float(rounds[is_mixed].min())
    return found


def _pooled(streams: Sequence[SelectionStream], policies: Sequence[str]) -> Lengths:
    """Return the lengths over several streams, each learned on its own: tokens over rounds."""
    tokens = np.array([stream.num_tokens for stream in streams], dtype=np.float64)
    each = [_lengths(stream, policies) for stream in streams]
    return {
        name: float(tokens.sum() / sum(t / one[name] for t, one in zip(tokens, each, strict=True)))
        for name in each[0]
    }


def _keys(runs: Mapping[str, Sequence[Lengths]]) -> dict[str, float]:
    mixed = runs[MIXED_STREAM]
    published = _better(mixed, PUBLISHED_BANDITS)
    carried = [name for name in TUNED_BANDITS if "scope=stream" in name]
    theirs = {
        "default_vs_best_single": "best single but the mixed head",
        "default_vs_mixed_head": "mixed head",
        "default_vs_best_published_bandit": published,
        "default_vs_best_tuned_bandit": _better(mixed, carried),
        "default_vs_domain_best": "best per domain",
        "default_vs_request_best": "best per request",
    }
    keys: dict[str, float] = {}
    for key, name in theirs.items():
        if name in mixed[0]:
            keys |= ratio(mixed, DEFAULT_POLICY, name).keys(key)
    for key, stream in (
        ("default_vs_normal_hedge_shifting", SPLICED_STREAM),
        ("default_vs_normal_hedge_conversations", SETS[CONVERSATION]),
    ):
        if stream in runs:
            keys |= ratio(runs[stream], DEFAULT_POLICY, HEDGESPEC).keys(key)
    return keys


def _better(runs: Sequence[Lengths], names: Sequence[str]) -> str:
    """Return the name with the largest mean over the seeds, of those that were run."""
    known = [name for name in names if name in runs[0]]
    return max(known, key=lambda name: float(np.mean([run[name] for run in runs])), default="")


def _checks(runs: Mapping[str, Sequence[Lengths]], policies: Sequence[str]) -> dict[str, Any]:
    """Name every baseline that is better than the default by more than the interval."""
    better = [
        {"stream": stream, "policy": name, **found.keys("default_vs_policy")}
        for stream, lengths in runs.items()
        for name in policies
        if not name.startswith(DEFAULT_POLICY)
        for found in [ratio(lengths, DEFAULT_POLICY, name)]
        if found.high < 1.0
    ]
    return {"num_baselines_better_than_default": len(better), "baselines_better": better}


def _table(runs: Mapping[str, Sequence[Lengths]], recording: Recording) -> list[dict[str, Any]]:
    return [
        {
            "stream": stream,
            "num_drafters": len(recording.drafter_ids),
            "policy": name,
            **Interval.of([run[name] for run in found]).keys("mean_acceptance_length"),
        }
        for stream, found in runs.items()
        for name in found[0]
    ]
