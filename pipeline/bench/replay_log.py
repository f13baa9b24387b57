"""A synthetic log for the replay benchmark: requests as a worker logs them, written fast.

Drafters hit the target's next token at rates that depend on the stream's regime, which lasts a few
hundred tokens and may change inside a request. NormalHedge selects, restarted per request. The
target is greedy, so that acceptance is a hit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from learner.selection import parse_policy
from learner.walk import Coins, WalkedRounds, Walker, WindowTrace, prepare
from schemas.arrow import write_table
from schemas.columns import SCHEMA_VERSION, VERIFICATION_EVENT_SCHEMA
from schemas.events import NO_DRAFTER, Rounds
from schemas.topics import VERIFICATION_EVENTS

LOGGED_POLICY = "normal_hedge"
MICROSECONDS_PER_TOKEN = 20_000
"""For the times of the log: streams run side by side, requests of a stream one after the other."""

START = 1_774_746_000_000_000
"""2026-03-29 01:00 UTC in microseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogShape:
    """What the log looks like.

    Attributes:
        num_windows: Windows in all, about.
        num_drafters: N.
        num_speculative_tokens: K.
        mean_request_tokens: Tokens per request; they vary by half of it.
        segment_tokens: Tokens per event.
        regime_tokens: Mean tokens until a stream's regime changes.
        streams: Their ids.
        requests_per_file: Requests in one file of one stream.
    """

    num_windows: int
    num_drafters: int = 8
    num_speculative_tokens: int = 8
    mean_request_tokens: int = 600
    segment_tokens: int = 64
    regime_tokens: int = 900
    streams: tuple[str, ...] = ("acme.code", "acme.chat", "globex.sql", "globex.chat")
    requests_per_file: int = 100


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the next request of a stream goes."""

    stream: str
    partition: int
    number: int = 0
    offset: int = 0
    num_tokens_before: int = 0

    def after(self, request: _Request) -> _Place:
        """Return the place behind a request."""
        return replace(
            self,
            number=self.number + 1,
            offset=self.offset + len(request.events),
            num_tokens_before=self.num_tokens_before
            + sum(event["num_positions"] for event in request.events),
        )


@dataclass(slots=True, eq=False)
class _Request:
    """One request, cut into segments: per-event values, and per-round and per-window arrays."""

    events: list[dict[str, Any]]
    rounds: dict[str, NDArray[Any]]
    windows: dict[str, NDArray[Any]]
    round_sizes: NDArray[np.int64]
    window_sizes: NDArray[np.int64]


def write_synthetic_log(folder: Path, shape: LogShape, generator: np.random.Generator) -> int:
    """Write a log of ``shape`` under ``folder`` and return how many windows it holds."""
    rates = _rates(shape, generator)
    num_windows = 0
    for partition, stream in enumerate(shape.streams):
        place = _Place(stream, partition)
        made = 0
        while made < shape.num_windows / len(shape.streams):
            requests: list[_Request] = []
            while len(requests) < shape.requests_per_file and made < shape.num_windows / len(
                shape.streams
            ):
                request = _request(shape, rates, place, generator)
                requests.append(request)
                made += int(request.window_sizes.sum())
                place = place.after(request)
            _write(folder, partition, requests)
        num_windows += made
    return num_windows


def _rates(shape: LogShape, generator: np.random.Generator) -> NDArray[np.float64]:
    """Return hit rates per regime and drafter: a generalist, lookup, and a specialist for each."""
    num_regimes = max(2, shape.num_drafters - 2)
    rates = generator.uniform(0.3, 0.5, (num_regimes, shape.num_drafters))
    rates[:, 0] = 0.65
    for regime in range(num_regimes):
        rates[regime, -1 - regime % (shape.num_drafters - 1)] = generator.uniform(0.75, 0.88)
    return rates


def _request(
    shape: LogShape,
    rates: NDArray[np.float64],
    place: _Place,
    generator: np.random.Generator,
) -> _Request:
    """Make one request: draw its text's hits, decode it with the logged policy, cut it."""
    hits = _hits(shape, rates, generator)
    num_tokens = len(hits)
    starts, num_levels, scores = _windows(hits, shape.num_speculative_tokens)
    trace = WindowTrace(
        num_positions=num_tokens,
        starts=starts,
        num_levels=num_levels,
        is_whole=num_levels == shape.num_speculative_tokens,
        acceptance_probability=scores,
        realised_acceptance=scores,
        is_idle=np.isin(np.arange(num_tokens), (0, num_tokens - 1)),
    )
    coins = Coins.toss(generator, num_tokens, shape.num_speculative_tokens)
    prepared = prepare(trace, coins)
    walked = Walker(parse_policy(LOGGED_POLICY), shape.num_drafters).walk(prepared)
    # Windows are learned before the first round that starts after they are complete.
    ready = np.searchsorted(prepared.loss_to_ready_at["length"], walked.position, side="right")
    learned = np.diff(np.append(ready, starts.size))
    segment = walked.position // shape.segment_tokens
    segment -= np.cumsum(np.diff(segment, prepend=0) > 1)
    num_prompt_tokens = int(generator.integers(20, 200))
    return _Request(
        events=list(_events(shape, place, walked, segment, num_prompt_tokens)),
        rounds=_rounds(shape, walked, num_tokens, num_prompt_tokens, learned, generator),
        windows={
            "start": (starts + num_prompt_tokens).astype(np.int32),
            "num_levels": num_levels,
            "acceptance_probability": scores.ravel(),
            "realised_acceptance": scores.ravel(),
        },
        round_sizes=np.bincount(segment),
        window_sizes=np.bincount(segment, learned).astype(np.int64),
    )


def _hits(
    shape: LogShape, rates: NDArray[np.float64], generator: np.random.Generator
) -> NDArray[np.bool_]:
    """Draw which drafter hits which token of a request, (P, N); the regime changes on the way."""
    mean = shape.mean_request_tokens
    num_tokens = int(generator.integers(mean // 2, mean + mean // 2 + 1))
    changes = generator.random(num_tokens) < 1.0 / shape.regime_tokens
    since = np.maximum.accumulate(np.where(changes, np.arange(num_tokens), 0))
    regime = generator.integers(0, len(rates), num_tokens)[since]
    return generator.random((num_tokens, shape.num_drafters)) < rates[regime]


def _windows(
    hits: NDArray[np.bool_], depth: int
) -> tuple[NDArray[np.int64], NDArray[np.int16], NDArray[np.float16]]:
    """Lay hits (P, N) out as windows: starts, levels, and scores (W, K, N)."""
    num_tokens = len(hits)
    starts = np.arange(1, num_tokens - 1)
    values = np.full((num_tokens + depth, hits.shape[1]), np.nan, dtype=np.float16)
    values[: num_tokens - 1] = hits[:-1]
    scores = sliding_window_view(values, depth, axis=0)[starts].transpose(0, 2, 1)
    num_levels = np.minimum(depth, num_tokens - 1 - starts).astype(np.int16)
    return starts, num_levels, np.ascontiguousarray(scores)


def _rounds(
    shape: LogShape,
    walked: WalkedRounds,
    num_tokens: int,
    num_prompt_tokens: int,
    learned: NDArray[np.int64],
    generator: np.random.Generator,
) -> dict[str, NDArray[Any]]:
    noise = generator.uniform(0.9, 1.1, (3, len(walked.position))).astype(np.float32)
    budget = np.minimum(shape.num_speculative_tokens, num_tokens - walked.position - 1)
    drafted = np.where(walked.drafter == NO_DRAFTER, 0, budget)
    columns: dict[str, NDArray[Any]] = {
        "first_position": walked.position + num_prompt_tokens,
        "drafter_index": walked.drafter,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": np.minimum(walked.length - 1, drafted),
        "num_emitted_tokens": walked.length,
        "num_scored_windows": learned,
        "selection_probability": walked.probability,
        "draft_seconds": noise[0] * 5e-4 * drafted * (1 + walked.drafter % 3),
        "verify_seconds": noise[1] * (0.02 + 2e-4 * drafted),
        "score_seconds": noise[2] * 1e-4 * learned,
        "batch_size": np.ones(len(walked.position)),
        "score_probability": np.ones(len(walked.position)),
    }
    return {
        name: columns[name].astype(_element_type(f"rounds_{name}"))
        for name in Rounds.__dataclass_fields__
    }


def _element_type(column: str) -> Any:
    return VERIFICATION_EVENT_SCHEMA.field(column).type.value_type.to_pandas_dtype()


def _events(
    shape: LogShape,
    place: _Place,
    walked: WalkedRounds,
    segment: NDArray[np.int64],
    num_prompt_tokens: int,
) -> Iterator[dict[str, Any]]:
    """Yield what is not a list per round or window, for every segment of a request."""
    num_positions = np.bincount(segment, walked.length).astype(np.int64)
    first_position = num_prompt_tokens + np.cumsum(num_positions) - num_positions
    is_final = np.arange(len(num_positions)) == len(num_positions) - 1
    for index, (first, count, ends) in enumerate(
        zip(first_position.tolist(), num_positions.tolist(), is_final.tolist(), strict=True)
    ):
        offset = place.offset + index
        moment = START + (place.num_tokens_before + first + count) * MICROSECONDS_PER_TOKEN
        yield {
            **_same_for_all(shape),
            "partition": place.partition,
            "offset": offset,
            "appended_at": moment,
            "event_id": f"worker-{place.partition}.1.{offset}",
            "worker_id": f"worker-{place.partition}",
            "sequence": offset,
            "produced_at": moment,
            "stream": place.stream,
            "request_id": f"request-{place.partition}-{place.number}",
            "segment_index": index,
            "is_final": ends,
            "finish_reason": "length" if ends else "unfinished",
            "num_prompt_tokens": num_prompt_tokens,
            "first_position": first,
            "num_positions": count,
        }


def _same_for_all(shape: LogShape) -> dict[str, Any]:
    num_drafters = shape.num_drafters
    return {
        "schema_version": SCHEMA_VERSION,
        "topic": VERIFICATION_EVENTS,
        "worker_epoch": 1,
        "target_id": "target",
        "target_fingerprint": "target-1",
        "tokenizer_hash": "tokenizer-1",
        "policy_name": LOGGED_POLICY,
        "policy_version": 0,
        "prior_probabilities": [1.0 / num_drafters] * num_drafters,
        "policy_table": [],
        "policy_numbers": [],
        "num_awake_rounds": [],
        "drafter_ids": [f"drafter-{one}" for one in range(num_drafters)],
        "drafter_weights_versions": [0] * num_drafters,
        "drafter_vocabulary_hashes": [""] * num_drafters,
        "sampling_acceptance_rule": "greedy",
        "sampling_temperature": 0.0,
        "sampling_top_p": 1.0,
        "sampling_top_k": 0,
        "num_speculative_tokens": shape.num_speculative_tokens,
    }


def _write(folder: Path, partition: int, requests: Sequence[_Request]) -> None:
    events = [event for request in requests for event in request.events]
    scores = requests[0].windows["acceptance_probability"].size // requests[0].window_sizes.sum()
    arrays = dict(_list_columns(requests, int(scores)))
    columns = [
        arrays[field.name]
        if field.name in arrays
        else pa.nulls(len(events), field.type)
        if field.nullable
        else pa.array([event[field.name] for event in events], field.type)
        for field in VERIFICATION_EVENT_SCHEMA
    ]
    folder = folder / "events" / "date=2026-03-29" / "hour=01"
    folder.mkdir(parents=True, exist_ok=True)
    first, last = events[0]["offset"], events[-1]["offset"]
    table = pa.Table.from_arrays(columns, schema=VERIFICATION_EVENT_SCHEMA)
    write_table(table, folder / f"{VERIFICATION_EVENTS}-{partition}-{first}-{last}.parquet")


def _list_columns(
    requests: Sequence[_Request], num_scores: int
) -> Iterator[tuple[str, pa.LargeListArray]]:
    """Yield the list columns of rounds and windows; ``num_scores`` is K N."""
    round_sizes = np.concatenate([request.round_sizes for request in requests])
    window_sizes = np.concatenate([request.window_sizes for request in requests])
    for name in requests[0].rounds:
        values = np.concatenate([request.rounds[name] for request in requests])
        yield f"rounds_{name}", _lists(f"rounds_{name}", values, round_sizes)
    for name in requests[0].windows:
        values = np.concatenate([request.windows[name] for request in requests])
        is_score = name.endswith(("probability", "acceptance"))
        sizes = window_sizes * num_scores if is_score else window_sizes
        yield f"windows_{name}", _lists(f"windows_{name}", values, sizes)


def _lists(column: str, values: NDArray[Any], sizes: NDArray[np.int64]) -> pa.LargeListArray:
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    kind = VERIFICATION_EVENT_SCHEMA.field(column).type
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values), type=kind)
