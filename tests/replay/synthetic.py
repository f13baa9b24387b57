"""Requests whose rounds follow from their windows, as an exact worker would log them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from learner.selection import select
from replay.ports import FollowedSelector
from schemas.arrow import LoggedEvent, events_to_table, write_table
from schemas.events import (
    NO_DRAFTER,
    AcceptanceRule,
    DrafterVersion,
    FinishReason,
    Rounds,
    SamplingRule,
    ScoredWindows,
    VerificationEvent,
)
from schemas.topics import VERIFICATION_EVENTS
from tests.schemas.builders import make_drafters

START = datetime(2026, 3, 29, 1, 30, tzinfo=UTC)


def scored_windows(
    probability: NDArray[np.float64], realised: NDArray[np.float64], *, first: int, depth: int
) -> ScoredWindows:
    """Lay per-position values (P, N) out as the windows of a finished request.

    The first position comes from the prompt's own pass and the last is never followed by a bonus,
    so neither starts a window, and windows near the end are shortened.
    """
    num_positions, num_drafters = probability.shape
    starts = np.arange(1, num_positions - 1)
    values = np.full((2, starts.size, depth, num_drafters), np.nan, dtype=np.float16)
    for level in range(depth):
        exists = starts + level < num_positions - 1
        values[0, exists, level] = probability[starts[exists] + level]
        values[1, exists, level] = realised[starts[exists] + level]
    return ScoredWindows(
        start=(first + starts).astype(np.int32),
        num_levels=np.minimum(depth, num_positions - 1 - starts).astype(np.int16),
        acceptance_probability=values[0],
        realised_acceptance=values[1],
    )


def make_request(
    *,
    hit_rates: Sequence[float] | NDArray[np.float64] = (0.9, 0.5, 0.2),
    num_tokens: int = 60,
    num_speculative_tokens: int = 4,
    rule: AcceptanceRule = AcceptanceRule.GREEDY,
    selector: FollowedSelector | None = None,
    drafters: tuple[DrafterVersion, ...] | None = None,
    num_prompt_tokens: int = 7,
    stream: str = "stream-a",
    request_id: str = "request-0",
    policy_name: str = "hedge",
    worker_id: str = "worker-0",
    sequence: int = 0,
    produced_at: datetime = START,
    no_drafter_share: float = 0.0,
    score_block: int = 1,
    prior: NDArray[np.float64] | None = None,
    seed: int = 0,
) -> VerificationEvent:
    """Decode one synthetic request and return it as a single final segment.

    ``hit_rates`` is the chance of a hit per drafter (N,), or per position and drafter (P, N).
    Without ``selector`` drafters are drawn uniformly. Under speculative sampling the realised
    acceptance is random in [0, 1] around the rate, and coins decide.
    """
    generator = np.random.default_rng([seed, sequence])
    rates = np.broadcast_to(np.asarray(hit_rates, float), (num_tokens, np.shape(hit_rates)[-1]))
    probability, realised = _acceptance(rule, rates, generator)
    windows = scored_windows(
        probability, realised, first=num_prompt_tokens, depth=num_speculative_tokens
    )
    rounds = _decode(
        windows,
        realised,
        selector,
        generator,
        depth=num_speculative_tokens,
        no_drafter_share=no_drafter_share,
        score_block=score_block,
    )
    rounds = replace(rounds, first_position=rounds.first_position + np.int32(num_prompt_tokens))
    is_greedy = rule is AcceptanceRule.GREEDY
    num_drafters = rates.shape[1]
    return VerificationEvent(
        event_id=f"{worker_id}.1.{sequence}",
        worker_id=worker_id,
        worker_epoch=1,
        sequence=sequence,
        produced_at=produced_at,
        stream=stream,
        request_id=request_id,
        segment_index=0,
        is_final=True,
        finish_reason=FinishReason.LENGTH,
        target_id="target-0",
        target_fingerprint="fingerprint-0",
        tokenizer_hash="tokenizer-0",
        policy_name=policy_name,
        policy_version=0,
        prior_probabilities=np.full(num_drafters, 1 / num_drafters) if prior is None else prior,
        drafters=drafters or make_drafters(num_drafters, weights_version=0),
        sampling=SamplingRule(acceptance_rule=rule, temperature=0.0 if is_greedy else 0.7),
        num_speculative_tokens=num_speculative_tokens,
        num_prompt_tokens=num_prompt_tokens,
        first_position=num_prompt_tokens,
        num_positions=num_tokens,
        rounds=rounds,
        windows=windows,
    )


def _acceptance(
    rule: AcceptanceRule, rates: NDArray[np.float64], generator: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw acceptance probability and realised acceptance of every position, each (P, N)."""
    if rule is AcceptanceRule.SPECULATIVE_SAMPLING:
        return rates, np.clip(rates + generator.uniform(-0.1, 0.1, rates.shape), 0.0, 1.0)
    realised = (generator.random(rates.shape) < rates).astype(float)
    return (realised if rule is AcceptanceRule.GREEDY else rates), realised


def _decode(
    windows: ScoredWindows,
    realised: NDArray[np.float64],
    selector: FollowedSelector | None,
    generator: np.random.Generator,
    *,
    depth: int,
    no_drafter_share: float,
    score_block: int,
) -> Rounds:
    """Play a request whose positions have these realised acceptances, (P, N)."""
    num_tokens, num_drafters = realised.shape
    position, learned = 0, 0
    rows: list[tuple[float, ...]] = []
    num_scored: list[int] = []
    while position < num_tokens:
        # Windows start at 1, and one of K levels is complete when the position after it is known.
        ready = max(0, position - depth - 1)
        if ready - learned >= score_block:
            if selector is not None:
                selector.learn(
                    windows.acceptance_probability[learned:ready],
                    windows.realised_acceptance[learned:ready],
                    windows.num_levels[learned:ready],
                )
            num_scored[-1] = ready - learned
            learned = ready
        is_awake = np.ones(num_drafters, dtype=np.bool_)
        drafter, chance, budget = NO_DRAFTER, 1.0, 0
        if position > 0 and generator.random() >= no_drafter_share:
            uniform = np.full(num_drafters, 1 / num_drafters)
            chances = uniform if selector is None else selector.probabilities(is_awake)
            drafter, chance = select(chances, generator)
            budget = min(depth, num_tokens - position - 1)
        hits = generator.random(budget) < realised[position : position + budget, drafter]
        accepted = int(np.cumprod(hits).sum())
        rows.append((position, drafter, budget, accepted, accepted + 1, chance))
        num_scored.append(0)
        position += accepted + 1
    num_scored[-1] = windows.start.size - learned
    columns = np.array(rows, dtype=float).reshape(-1, 6).T
    seconds = np.full(len(rows), 0.01, dtype=np.float32)
    return Rounds(
        first_position=columns[0].astype(np.int32),
        drafter_index=columns[1].astype(np.int16),
        num_draft_tokens=columns[2].astype(np.int16),
        num_accepted_tokens=columns[3].astype(np.int16),
        num_emitted_tokens=columns[4].astype(np.int16),
        num_scored_windows=np.array(num_scored, dtype=np.int16),
        selection_probability=columns[5].astype(np.float32),
        draft_seconds=seconds,
        verify_seconds=seconds * 4,
        score_seconds=seconds,
    )


def window_rows(windows: ScoredWindows, first: int, last: int) -> ScoredWindows:
    """Return windows ``first`` to ``last`` (exclusive)."""
    return ScoredWindows(
        start=windows.start[first:last],
        num_levels=windows.num_levels[first:last],
        acceptance_probability=windows.acceptance_probability[first:last],
        realised_acceptance=windows.realised_acceptance[first:last],
    )


def split(
    event: VerificationEvent, num_rounds: int, *, sequence: int | None = None
) -> tuple[VerificationEvent, VerificationEvent]:
    """Cut a request after ``num_rounds`` rounds; windows go where they were scored."""
    rounds, windows = event.rounds, event.windows
    border = int(rounds.first_position[num_rounds])
    ready = int(rounds.num_scored_windows[:num_rounds].sum())
    next_sequence = event.sequence + 1 if sequence is None else sequence
    head = replace(
        event,
        is_final=False,
        finish_reason=FinishReason.UNFINISHED,
        num_positions=border - event.first_position,
        rounds=_round_rows(rounds, slice(None, num_rounds)),
        windows=window_rows(windows, 0, ready),
    )
    tail = replace(
        event,
        event_id=f"{event.worker_id}.{event.worker_epoch}.{next_sequence}",
        sequence=next_sequence,
        segment_index=event.segment_index + 1,
        first_position=border,
        num_positions=event.first_position + event.num_positions - border,
        rounds=_round_rows(rounds, slice(num_rounds, None)),
        windows=window_rows(windows, ready, windows.start.size),
    )
    return head, tail


def _round_rows(rounds: Rounds, rows: slice) -> Rounds:
    return Rounds(**{name: getattr(rounds, name)[rows] for name in Rounds.__dataclass_fields__})


def log(
    events: Sequence[VerificationEvent], *, partition: int = 0, first_offset: int = 0
) -> list[LoggedEvent]:
    """Place events at consecutive offsets, one second apart."""
    return [
        LoggedEvent(
            topic=VERIFICATION_EVENTS,
            partition=partition,
            offset=first_offset + index,
            appended_at=START + timedelta(seconds=first_offset + index),
            event=event,
        )
        for index, event in enumerate(events)
    ]


def write_log(
    data: Path, rows: Sequence[LoggedEvent], *, rows_per_file: int = 1000, hour: str = "01"
) -> list[Path]:
    """Write rows of one partition as an archiver would and return the files."""
    folder = data / "events" / "date=2026-03-29" / f"hour={hour}"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for first in range(0, len(rows), rows_per_file):
        part = rows[first : first + rows_per_file]
        name = f"{part[0].topic}-{part[0].partition}-{part[0].offset}-{part[-1].offset}.parquet"
        write_table(events_to_table(part), folder / name)
        paths.append(folder / name)
    return paths
