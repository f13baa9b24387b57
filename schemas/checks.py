"""The rules of the contracts, each one refusal with a path and both values.

They are written against the shape of the dataclasses in ``events`` (which call them when built),
so they import only its types. The first half are rules for one value, the second half the
rules of each message.
"""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ContractError
from schemas.quick_checks import (
    are_good_rounds,
    are_good_windows,
    has_no_policy_state,
)

if TYPE_CHECKING:
    from schemas import events

IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,199}")
"""Ids are data: they become folder names and labels, so no separators, no dots first."""

POLICY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+=,-]{0,399}")
"""A policy is named with its parameters, ``name:key=value,...``."""

SHA256 = re.compile(r"[0-9a-f]{64}")

MAX_COUNT = 2**63 - 1
"""Counts travel as int64."""

MAX_LEVELS = 2**15 - 2
"""Token counts of a round travel as int16, bonus token included."""

_NO_TIME = timedelta(0)
_WHOLE = (int, np.integer)
_ROUND_COUNTS = (
    *("drafter_index", "num_draft_tokens", "num_accepted_tokens"),
    *("num_emitted_tokens", "num_scored_windows"),
)
_ROUND_PROBABILITIES = ("selection_probability", "score_probability")
ROUND_SECONDS = ("draft_seconds", "verify_seconds", "score_seconds")
_SMALLEST_FLOAT32 = np.nextafter(np.float32(0), np.float32(1))
LARGEST_FLOAT32 = np.finfo(np.float32).max
LARGEST_FLOAT64 = np.finfo(np.float64).max
_FLOAT16_ONE = np.uint16(0x3C00)
_FLOAT16_INFINITY = np.uint16(0x7C00)
_FLOAT16_MAGNITUDE = np.uint16(0x7FFF)


def identifier(path: str, value: Any, pattern: re.Pattern[str] = IDENTIFIER) -> None:
    """Refuse an id that could not name a folder, a topic key or a label."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ContractError(path, found=repr(value)[:220], expected=f"/{pattern.pattern}/")


def text(path: str, value: Any) -> None:
    """Refuse what is not a string that UTF-8 can carry (a lone surrogate is not)."""
    member(path, value, str)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ContractError(path, found=repr(value)[:220], expected="a Unicode string") from error


def member(path: str, value: Any, kind: type) -> None:
    """Refuse what is not of ``kind`` (a plain string is not a member of an enumeration)."""
    if not isinstance(value, kind):
        raise ContractError(path, found=repr(value)[:220], expected=f"a {kind.__name__}")


def count(path: str, value: Any, lowest: int = 0, highest: int = MAX_COUNT) -> None:
    """Refuse what is not a whole number in ``lowest``..``highest``."""
    is_whole = isinstance(value, _WHOLE) and not isinstance(value, bool)
    if not is_whole or not lowest <= value <= highest:
        raise ContractError(
            path, found=repr(value), expected=f"a whole number in {lowest}..{highest}"
        )


def at_least(path: str, value: float, lowest: float) -> None:
    """Refuse a number below ``lowest`` (and NaN)."""
    if not value >= lowest:
        raise ContractError(path, found=value, expected=f">= {lowest}")


def finite(
    path: str, value: float, lowest: float = -math.inf, *, nan_allowed: bool = False
) -> None:
    """Refuse a number that is infinite, below ``lowest`` or (unless allowed) NaN."""
    if nan_allowed and value != value:
        return
    if not (math.isfinite(value) and value >= lowest):
        raise ContractError(path, found=value, expected=f"a finite number >= {lowest}")


def utc(path: str, value: Any) -> None:
    """Refuse a time without zone or in another zone than UTC."""
    member(path, value, datetime)
    if value.utcoffset() != _NO_TIME:
        raise ContractError(path, found=value.isoformat(), expected="a time in UTC")


def array(path: str, values: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    """Refuse what is not an array of this type and shape."""
    member(path, values, np.ndarray)
    if values.dtype != np.dtype(dtype):
        raise ContractError(path, found=values.dtype, expected=np.dtype(dtype))
    if values.shape != shape:
        raise ContractError(path, found=f"shape {values.shape}", expected=f"shape {shape}")


def vector(path: str, values: Any, dtype: Any) -> int:
    """Refuse what is not a one-dimensional array of this type; return its length."""
    member(path, values, np.ndarray)
    array(path, values, dtype, (values.size,))
    return int(values.size)


def within(
    path: str, values: NDArray[Any], lowest: Any, highest: Any, *, nan_allowed: bool = False
) -> None:
    """Refuse the first element outside [lowest, highest]; bounds broadcast."""
    if not values.size:
        return
    good = (values >= lowest) & (values <= highest)
    if good.all():
        return
    if nan_allowed:
        good |= np.isnan(values)
        if good.all():
            return
    index = _first_index(~good)
    low = np.broadcast_to(lowest, values.shape)[index]
    high = np.broadcast_to(highest, values.shape)[index]
    raise ContractError(path + _subscript(index), found=values[index], expected=f"{low}..{high}")


def fractions(path: str, values: NDArray[np.float16]) -> None:
    """Refuse the first float16 outside [0, 1] that is not NaN.

    Bit patterns of floats >= 0 are ordered as the floats are, and comparing integers is about
    ten times faster than comparing float16; nearly no event gets as far as ``within``.
    """
    bits = values.view(np.uint16)
    good = bits <= _FLOAT16_ONE
    if good.all():
        return
    good |= (bits & _FLOAT16_MAGNITUDE) > _FLOAT16_INFINITY
    if good.all():
        return
    within(path, values, np.float16(0.0), np.float16(1.0), nan_allowed=True)


def distinct_drafters(drafters: tuple[events.DrafterVersion, ...]) -> None:
    """Refuse a pool that lists an id twice, since the order indexes every array."""
    ids = [drafter.drafter_id for drafter in drafters]
    if len(set(ids)) == len(ids):
        return
    index = next(index for index, drafter_id in enumerate(ids) if drafter_id in ids[:index])
    raise ContractError(
        f"drafters[{index}].drafter_id", found=ids[index], expected="an id not listed yet"
    )


def _first_index(wrong: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def _subscript(index: tuple[int, ...]) -> str:
    return "".join(f"[{i}]" for i in index)


def drafter_version(drafter: events.DrafterVersion) -> None:
    """Check one drafter of a pool."""
    identifier("drafter_id", drafter.drafter_id)
    count("weights_version", drafter.weights_version)
    text("draft_vocabulary_hash", drafter.draft_vocabulary_hash)


def sampling_rule(rule: events.SamplingRule) -> None:
    """Check one sampling rule."""
    finite("sampling.temperature", rule.temperature, 0.0)
    if (rule.temperature == 0.0) != (rule.acceptance_rule == "greedy"):
        raise ContractError(
            "sampling.temperature",
            found=rule.temperature,
            expected=f"0 exactly when the rule is greedy (it is {rule.acceptance_rule})",
        )
    if not 0.0 < rule.top_p <= 1.0:
        raise ContractError("sampling.top_p", found=rule.top_p, expected="(0, 1]")
    count("sampling.top_k", rule.top_k)


def verification_event(event: events.VerificationEvent) -> None:
    """Check one event, cheapest rules first."""
    for name in ("event_id", "worker_id", "stream", "request_id", "target_id"):
        identifier(name, getattr(event, name))
    identifier("policy_name", event.policy_name, POLICY)
    for name in ("target_fingerprint", "tokenizer_hash"):
        text(name, getattr(event, name))
    for name in ("worker_epoch", "sequence", "segment_index", "policy_version"):
        count(name, getattr(event, name))
    for name in ("num_prompt_tokens", "first_position", "num_positions"):
        count(name, getattr(event, name), highest=2**31 - 1)
    count("num_speculative_tokens", event.num_speculative_tokens, highest=MAX_LEVELS)
    utc("produced_at", event.produced_at)
    member("is_final", event.is_final, bool)
    if event.is_final == (event.finish_reason == "unfinished"):
        raise ContractError(
            "finish_reason",
            found=event.finish_reason,
            expected=f"a reason exactly when is_final (it is {event.is_final})",
        )
    distinct_drafters(event.drafters)
    _prior(event)
    _policy_state(event)
    _rounds(event)
    _windows(event)
    if event.content is not None:
        _content(event, event.content)


def _prior(event: events.VerificationEvent) -> None:
    prior = event.prior_probabilities
    array("prior_probabilities", prior, np.float64, (len(event.drafters),))
    within("prior_probabilities", prior, 0.0, 1.0)
    total = float(prior.sum())
    if len(prior) and not abs(total - 1.0) <= 1e-6:
        raise ContractError("prior_probabilities", found=f"a sum of {total}", expected="1")


def _policy_state(event: events.VerificationEvent) -> None:
    """Check that a state is there in segment 0 alone, and has a column per drafter."""
    if has_no_policy_state(event):
        return
    size = vector("policy_table", event.policy_table, np.float64)
    num_numbers = vector("policy_numbers", event.policy_numbers, np.float64)
    for name in ("policy_table", "policy_numbers"):
        within(name, getattr(event, name), -LARGEST_FLOAT64, LARGEST_FLOAT64)
    num_drafters = len(event.drafters)
    if size % max(num_drafters, 1) or (size and not num_drafters):
        expected = f"rows of {num_drafters} drafters"
        raise ContractError("policy_table", found=f"{size} values", expected=expected)
    if event.segment_index and size:
        expected = f"none in segment {event.segment_index}"
        raise ContractError("policy_table", found=f"{size} values", expected=expected)
    if num_numbers and not size:
        expected = "none without a policy_table"
        raise ContractError("policy_numbers", found=f"{num_numbers} values", expected=expected)


def _awake(event: events.VerificationEvent, num_rounds: int) -> None:
    """Check how long each drafter was awake, if that was recorded."""
    size = vector("num_awake_rounds", event.num_awake_rounds, np.int32)
    if size:
        array("num_awake_rounds", event.num_awake_rounds, np.int32, (len(event.drafters),))
    within("num_awake_rounds", event.num_awake_rounds, 0, num_rounds)


def _rounds(event: events.VerificationEvent) -> None:
    rounds = event.rounds
    if are_good_rounds(event):
        _awake(event, len(rounds.first_position))
        return
    shape = (vector("rounds.first_position", rounds.first_position, np.int32),)
    for name in (*_ROUND_COUNTS, "batch_size"):
        array(f"rounds.{name}", getattr(rounds, name), np.int16, shape)
    for name in (*_ROUND_PROBABILITIES, *ROUND_SECONDS):
        array(f"rounds.{name}", getattr(rounds, name), np.float32, shape)
    drafted, accepted = rounds.num_draft_tokens, rounds.num_accepted_tokens
    within("rounds.drafter_index", rounds.drafter_index, -1, len(event.drafters) - 1)
    limit = np.where(rounds.drafter_index < 0, 0, event.num_speculative_tokens)
    within("rounds.num_draft_tokens", drafted, 0, limit)
    within("rounds.num_accepted_tokens", accepted, 0, drafted)
    _emitted(event)
    within("rounds.num_scored_windows", rounds.num_scored_windows, 0, 2**15 - 1)
    within("rounds.batch_size", rounds.batch_size, 1, 2**15 - 1)
    for name in _ROUND_PROBABILITIES:
        within(f"rounds.{name}", getattr(rounds, name), _SMALLEST_FLOAT32, 1.0)
    _awake(event, shape[0])
    for name in ROUND_SECONDS:
        within(f"rounds.{name}", getattr(rounds, name), 0.0, LARGEST_FLOAT32)


def _emitted(event: events.VerificationEvent) -> None:
    """Check that the rounds emit the segment's positions one after the other.

    Only the end of the request may cut: from the cut on, nothing more is emitted.
    """
    emitted = event.rounds.num_emitted_tokens.astype(np.int64)
    ends = np.cumsum(emitted)
    whole = event.rounds.num_accepted_tokens.astype(np.int64) + 1
    total = int(ends[-1]) if ends.size else 0
    lowest = np.where(ends == total, 0, whole) if event.is_final else whole
    within("rounds.num_emitted_tokens", emitted, lowest, whole)
    if total != event.num_positions:
        raise ContractError(
            "num_positions", found=event.num_positions, expected=f"{total} emitted tokens"
        )
    first = event.first_position + ends - emitted
    within("rounds.first_position", event.rounds.first_position, first, first)


def _windows(event: events.VerificationEvent) -> None:
    windows, levels = event.windows, event.num_speculative_tokens
    if are_good_windows(event):
        return
    num_windows = vector("windows.start", windows.start, np.int32)
    array("windows.num_levels", windows.num_levels, np.int16, (num_windows,))
    start = windows.start.astype(np.int64)
    lowest = np.concatenate(([event.num_prompt_tokens], start + 1))[:num_windows]
    end = event.first_position + event.num_positions
    within("windows.start", start, lowest, end - min(1, levels))
    most = np.minimum(levels, end - start) if event.is_final else levels
    least = np.minimum(levels, np.maximum(end - start - 1, 1)) if event.is_final else levels
    within("windows.num_levels", windows.num_levels, least, most)
    within("windows.start", start, event.num_prompt_tokens, end - windows.num_levels)
    shape = (num_windows, levels, len(event.drafters))
    for name in ("acceptance_probability", "realised_acceptance"):
        values = getattr(windows, name)
        array(f"windows.{name}", values, np.float16, shape)
        fractions(f"windows.{name}", values)
        _not_scored_beyond(f"windows.{name}", values, windows.num_levels)


def _not_scored_beyond(
    path: str, values: NDArray[np.float16], num_levels: NDArray[np.int16]
) -> None:
    """Refuse a score at a level that the window does not have."""
    short = np.flatnonzero(num_levels < values.shape[1])
    exists = np.arange(values.shape[1]) < num_levels[short, None]
    wrong = ~(np.isnan(values[short]) | exists[:, :, None])
    if wrong.any():
        row, level, drafter = _first_index(wrong)
        window = int(short[row])
        raise ContractError(
            path + _subscript((window, level, drafter)),
            found=values[window, level, drafter],
            expected=f"NaN beyond the window's {num_levels[window]} levels",
        )


def feature_reference(reference: events.FeatureReference) -> None:
    """Check one reference to recorded features."""
    text("content.features.uri", reference.uri)
    count("content.features.first_row", reference.first_row)
    count("content.features.num_rows", reference.num_rows)
    sha256("content.features.sha256", reference.sha256)


def sha256(path: str, value: Any) -> None:
    """Refuse what is not a SHA-256 in hexadecimal."""
    if not isinstance(value, str) or not SHA256.fullmatch(value):
        raise ContractError(path, found=repr(value)[:220], expected="64 lower-case hex digits")


def _content(event: events.VerificationEvent, content: events.Content) -> None:
    positions = event.num_positions
    prompt = event.num_prompt_tokens if event.segment_index == 0 else 0
    array("content.prompt_token_ids", content.prompt_token_ids, np.int32, (prompt,))
    array("content.token_ids", content.token_ids, np.int32, (positions,))
    top_ids = content.target_top_token_ids
    member("content.target_top_token_ids", top_ids, np.ndarray)
    kept = top_ids.shape[-1] if top_ids.ndim else 0
    array("content.target_top_token_ids", top_ids, np.int32, (positions, kept))
    for name in ("prompt_token_ids", "token_ids", "target_top_token_ids"):
        within(f"content.{name}", getattr(content, name), 0, np.iinfo(np.int32).max)
    log_probabilities = content.target_top_log_probabilities
    array("content.target_top_log_probabilities", log_probabilities, np.float16, (positions, kept))
    within("content.target_top_log_probabilities", log_probabilities, -np.inf, 0.01)
    array("content.target_tail_mass", content.target_tail_mass, np.float16, (positions,))
    within("content.target_tail_mass", content.target_tail_mass, 0.0, 1.0)
    if content.features is not None and content.features.num_rows != positions:
        raise ContractError(
            "content.features.num_rows", found=content.features.num_rows, expected=positions
        )
