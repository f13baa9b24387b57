"""Hypothesis strategies for valid messages: every shape and value that the contracts admit."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from schemas.arrow import LoggedEvent
from schemas.events import (
    NO_DRAFTER,
    AcceptanceRule,
    Content,
    CostModel,
    DrafterReleased,
    DrafterVersion,
    FeatureReference,
    FinishReason,
    GateEvidence,
    PolicyPublished,
    ReleaseState,
    Rounds,
    SamplingRule,
    ScoredWindows,
    StreamComparison,
    VerificationEvent,
    Watermark,
)
from schemas.topics import VERIFICATION_EVENTS

COUNTS = st.integers(0, 2**63 - 1)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
TIMES = st.datetimes(min_value=datetime(1900, 1, 1), timezones=st.just(UTC))
_ID_CHARACTERS = "abcXYZ0189._@:+-"
IDENTIFIERS = st.one_of(
    st.sampled_from(["007", "0", "3000000000", "2024-01", "7753285016841556620", "a" * 200]),
    st.text(_ID_CHARACTERS, max_size=12).map(lambda tail: "d" + tail),
)
POLICY_NAMES = st.one_of(
    IDENTIFIERS, st.sampled_from(["fixed:007", "fixed_share:share=1e-05,choice=sticky"])
)
SHA256S = st.text("0123456789abcdef", min_size=64, max_size=64)


def _array(
    dtype: type[np.generic], shape: int | tuple[int, ...], elements: st.SearchStrategy[float]
) -> st.SearchStrategy[NDArray[np.generic]]:
    return npst.arrays(dtype, shape, elements=elements, fill=st.nothing())


def _seconds(count: int) -> st.SearchStrategy[NDArray[np.generic]]:
    return _array(np.float32, count, st.floats(0, 2.0**20, width=32))


def _distributions(count: int) -> st.SearchStrategy[NDArray[np.float64]]:
    masses = _array(np.float64, count, st.floats(1e-3, 1.0))
    return masses.map(lambda drawn: drawn.astype(np.float64) / max(drawn.astype(float).sum(), 1e-3))


@st.composite
def pools(draw: st.DrawFn) -> tuple[DrafterVersion, ...]:
    """Draw 0 to 4 drafters with distinct ids."""
    ids = draw(st.lists(IDENTIFIERS, max_size=4, unique=True))
    return tuple(
        DrafterVersion(
            drafter_id=drafter_id,
            weights_version=draw(COUNTS),
            draft_vocabulary_hash=draw(TEXTS),
        )
        for drafter_id in ids
    )


@st.composite
def watermarks(draw: st.DrawFn) -> Watermark:
    """Draw a watermark over a few partitions and workers."""
    return Watermark(
        partition_to_offset=draw(st.dictionaries(st.integers(0, 2**31 - 1), COUNTS, max_size=3)),
        worker_to_sequence=draw(st.dictionaries(TEXTS, COUNTS, max_size=3)),
    )


@st.composite
def sampling_rules(draw: st.DrawFn) -> SamplingRule:
    """Draw a greedy or a sampling rule."""
    rule = draw(st.sampled_from(AcceptanceRule))
    positive = st.floats(0, exclude_min=True, allow_infinity=False)
    return SamplingRule(
        acceptance_rule=rule,
        temperature=0.0 if rule is AcceptanceRule.GREEDY else draw(positive),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        top_k=draw(COUNTS),
    )


@st.composite
def rounds_of(
    draw: st.DrawFn, *, num_drafters: int, levels: int, first_position: int, is_final: bool
) -> Rounds:
    """Draw 0 to 5 rounds; the end of a final segment may be cut."""
    count = draw(st.integers(0, 5))
    index = draw(_array(np.int16, count, st.integers(NO_DRAFTER, num_drafters - 1)))
    drafted = draw(_array(np.int64, count, st.integers(0, levels)))
    drafted = np.where(index == NO_DRAFTER, 0, drafted)
    accepted = drafted - np.minimum(drafted, draw(_array(np.int64, count, st.integers(0, levels))))
    ends = np.cumsum(accepted + 1)
    kept = int(ends[-1]) if count else 0
    if is_final:
        kept = draw(st.integers(0, kept))
    emitted = np.clip(kept - (ends - accepted - 1), 0, accepted + 1)
    scored = draw(_array(np.int16, count, st.integers(0, 2**15 - 1)))
    probability = st.floats(0, 1, width=32, exclude_min=True)
    return Rounds(
        first_position=(first_position + np.cumsum(emitted) - emitted).astype(np.int32),
        drafter_index=index.astype(np.int16),
        num_draft_tokens=drafted.astype(np.int16),
        num_accepted_tokens=accepted.astype(np.int16),
        num_emitted_tokens=emitted.astype(np.int16),
        num_scored_windows=scored.astype(np.int16),
        selection_probability=draw(_array(np.float32, count, probability)).astype(np.float32),
        draft_seconds=draw(_seconds(count)).astype(np.float32),
        verify_seconds=draw(_seconds(count)).astype(np.float32),
        score_seconds=draw(_seconds(count)).astype(np.float32),
        batch_size=draw(_array(np.int16, count, st.integers(1, 2**15 - 1))).astype(np.int16),
        score_probability=draw(_array(np.float32, count, probability)).astype(np.float32),
    )


@st.composite
def policy_states(
    draw: st.DrawFn, *, num_drafters: int, segment_index: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw a carried state (table, numbers); none but in the first segment of a request."""
    num_rows = draw(st.integers(0, 3)) if num_drafters and segment_index == 0 else 0
    size = num_rows * num_drafters
    finite = st.floats(allow_nan=False, allow_infinity=False)
    numbers = draw(st.integers(0, 3)) if size else 0
    table = draw(_array(np.float64, size, finite)).astype(np.float64)
    return table, draw(_array(np.float64, numbers, finite)).astype(np.float64)


@st.composite
def windows_of(
    draw: st.DrawFn, *, num_drafters: int, levels: int, start: int, end: int, is_final: bool
) -> ScoredWindows:
    """Draw windows that start in ``start``..; short ones only where the request ends."""
    needed = min(1, levels) if is_final else levels
    possible = range(start, end - needed + 1)
    chosen = draw(st.sets(st.sampled_from(possible), max_size=4)) if possible else set()
    starts = np.array(sorted(chosen), np.int32)
    num_levels = np.minimum(levels, end - starts)
    shape = (len(starts), levels, num_drafters)
    exists = np.arange(levels)[None, :, None] < num_levels[:, None, None]
    score = st.one_of(st.floats(0, 1, width=16), st.just(math.nan), st.just(-0.0))

    def scores() -> NDArray[np.float16]:
        drawn = draw(_array(np.float16, shape, score))
        return np.where(exists, drawn, np.nan).astype(np.float16)

    return ScoredWindows(
        start=starts,
        num_levels=num_levels.astype(np.int16),
        acceptance_probability=scores(),
        realised_acceptance=scores(),
    )


@st.composite
def contents_of(draw: st.DrawFn, *, num_prompt_tokens: int, num_positions: int) -> Content:
    """Draw content with 0 to 3 kept target tokens per position, with and without features."""
    shape = (num_positions, draw(st.integers(0, 3)))
    token = st.integers(0, 2**31 - 1)
    log_probability = st.one_of(st.floats(-60_000, 0, width=16), st.just(-math.inf))
    features = FeatureReference(
        uri=draw(TEXTS),
        first_row=draw(COUNTS),
        num_rows=num_positions,
        sha256=draw(SHA256S),
    )
    top_log_probabilities = draw(_array(np.float16, shape, log_probability))
    tail_mass = draw(_array(np.float16, num_positions, st.floats(0, 1, width=16)))
    return Content(
        prompt_token_ids=draw(_array(np.int32, num_prompt_tokens, token)).astype(np.int32),
        token_ids=draw(_array(np.int32, num_positions, token)).astype(np.int32),
        target_top_token_ids=draw(_array(np.int32, shape, token)).astype(np.int32),
        target_top_log_probabilities=top_log_probabilities.astype(np.float16),
        target_tail_mass=tail_mass.astype(np.float16),
        features=draw(st.sampled_from([None, features])),
    )


@st.composite
def verification_events(draw: st.DrawFn, *, with_content: bool | None = None) -> VerificationEvent:
    """Draw a valid event; ``with_content`` None means sometimes."""
    drafters, levels = draw(pools()), draw(st.integers(0, 4))
    is_final, prompt = draw(st.booleans()), draw(st.integers(0, 6))
    segment, first = draw(st.integers(0, 2)), prompt + draw(st.integers(0, 4))
    rounds = draw(
        rounds_of(
            num_drafters=len(drafters), levels=levels, first_position=first, is_final=is_final
        )
    )
    positions = int(rounds.num_emitted_tokens.sum())
    windows = windows_of(
        num_drafters=len(drafters),
        levels=levels,
        start=prompt,
        end=first + positions,
        is_final=is_final,
    )
    table, numbers = draw(policy_states(num_drafters=len(drafters), segment_index=segment))
    awake = _array(np.int32, len(drafters), st.integers(0, rounds.first_position.size))
    contents = contents_of(num_prompt_tokens=prompt if segment == 0 else 0, num_positions=positions)
    has_content = draw(st.booleans()) if with_content is None else with_content
    endings = st.sampled_from([reason for reason in FinishReason if reason != "unfinished"])
    return VerificationEvent(
        event_id=draw(IDENTIFIERS),
        worker_id=draw(IDENTIFIERS),
        worker_epoch=draw(COUNTS),
        sequence=draw(COUNTS),
        produced_at=draw(TIMES),
        stream=draw(IDENTIFIERS),
        request_id=draw(IDENTIFIERS),
        segment_index=segment,
        is_final=is_final,
        finish_reason=draw(endings) if is_final else FinishReason.UNFINISHED,
        target_id=draw(IDENTIFIERS),
        target_fingerprint=draw(TEXTS),
        tokenizer_hash=draw(TEXTS),
        policy_name=draw(POLICY_NAMES),
        policy_version=draw(COUNTS),
        prior_probabilities=draw(_distributions(len(drafters))),
        policy_table=table,
        policy_numbers=numbers,
        num_awake_rounds=draw(st.one_of(awake, st.just(np.empty(0)))).astype(np.int32),
        drafters=drafters,
        sampling=draw(sampling_rules()),
        num_speculative_tokens=levels,
        num_prompt_tokens=prompt,
        first_position=first,
        num_positions=positions,
        rounds=rounds,
        windows=draw(windows),
        content=draw(contents) if has_content else None,
    )


@st.composite
def logged_events(draw: st.DrawFn) -> LoggedEvent:
    """Draw an event at some place of the log."""
    return LoggedEvent(
        topic=VERIFICATION_EVENTS,
        partition=draw(st.integers(0, 2**31 - 1)),
        offset=draw(COUNTS),
        appended_at=draw(TIMES),
        event=draw(verification_events()),
    )


@st.composite
def policies(draw: st.DrawFn) -> PolicyPublished:
    """Draw a valid policy with accumulators of 0 to 2 dimensions."""
    drafters, version = draw(pools()), draw(COUNTS)
    count = len(drafters)
    finite = st.floats(allow_nan=False, allow_infinity=False)
    shapes = npst.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3)
    accumulators = st.dictionaries(
        TEXTS, npst.arrays(np.float64, shapes, elements=finite), max_size=3
    )
    cost = st.one_of(st.floats(0, 1e9), st.just(math.nan))
    rows = draw(st.integers(0, 5))
    limits = draw(_array(np.int16, count, st.integers(0, 32_766)))
    return PolicyPublished(
        stream=draw(IDENTIFIERS),
        version=version,
        parent_version=draw(st.integers(-1, max(version - 1, 0))),
        produced_at=draw(TIMES),
        learner_id=draw(IDENTIFIERS),
        policy_name=draw(POLICY_NAMES),
        drafters=drafters,
        log_weights=draw(_array(np.float64, count, finite)).astype(np.float64),
        accumulators=draw(accumulators),
        selection_probabilities=draw(_distributions(count)),
        num_speculative_tokens=limits.astype(np.int16),
        cost=CostModel(
            draft_seconds=draw(_array(np.float64, count, cost)).astype(np.float64),
            score_seconds=draw(_array(np.float64, count, cost)).astype(np.float64),
            verify_seconds=draw(_array(np.float64, rows, cost)).astype(np.float64),
        ),
        watermark=draw(watermarks()),
    )


@st.composite
def evidences(draw: st.DrawFn) -> GateEvidence:
    """Draw evidence, NaN where nothing was compared."""
    length = st.one_of(st.floats(1, 9), st.just(math.nan))
    low = draw(st.one_of(st.floats(-8, 8), st.just(math.nan)))
    return GateEvidence(
        num_windows=draw(COUNTS),
        new_acceptance_length=draw(length),
        old_acceptance_length=draw(length),
        difference_low=low,
        difference_high=low + draw(st.floats(0, 4)),
        streams=tuple(
            StreamComparison(
                stream=stream,
                num_streams=1 if stream else draw(st.integers(1, 99)),
                num_requests=draw(st.integers(1, 9)),
                num_windows=draw(COUNTS),
                new_acceptance_length=draw(length),
                old_acceptance_length=draw(length),
                difference_low=low,
                difference_high=low + draw(st.floats(0, 4)),
            )
            for stream in draw(st.lists(st.one_of(IDENTIFIERS, st.just("")), unique=True))
        ),
    )


@st.composite
def releases(draw: st.DrawFn) -> DrafterReleased:
    """Draw a valid release."""
    version = draw(COUNTS)
    return DrafterReleased(
        drafter_id=draw(IDENTIFIERS),
        version=version,
        parent_version=draw(st.integers(-1, max(version - 1, 0))),
        state=draw(st.sampled_from(ReleaseState)),
        produced_at=draw(TIMES),
        artifact_uri=draw(TEXTS),
        manifest_sha256=draw(SHA256S),
        architecture=draw(TEXTS),
        target_fingerprint=draw(TEXTS),
        tokenizer_hash=draw(TEXTS),
        draft_vocabulary_hash=draw(TEXTS),
        training_window=draw(watermarks()),
        evidence=draw(st.one_of(st.none(), evidences())),
        reason=draw(TEXTS),
    )
