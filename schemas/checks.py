"""The rules of the contracts, each one refusal with a path and both values.

They are written against the shape of the dataclasses in ``events`` (which call them when built),
so they import only its types.
"""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ContractError

if TYPE_CHECKING:
    from schemas import events

IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+-]{0,199}")
"""Ids are data: they become folder names and labels, so no separators, no dots first."""


MAX_COUNT = 2**63 - 1
"""Counts travel as int64."""


def identifier(path: str, value: str) -> None:
    """Refuse an id that could not name a folder, a topic key or a label."""
    if not IDENTIFIER.fullmatch(value):
        raise ContractError(path, found=repr(value[:220]), expected=f"/{IDENTIFIER.pattern}/")


def at_least(path: str, value: float, lowest: float) -> None:
    """Refuse a number below ``lowest`` (and NaN)."""
    if not value >= lowest:
        raise ContractError(path, found=value, expected=f">= {lowest}")


def count(path: str, value: Any, lowest: int = 0) -> None:
    """Refuse what is not a whole number from ``lowest`` to the largest int64."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or not lowest <= value <= MAX_COUNT:
        raise ContractError(
            path, found=repr(value), expected=f"a whole number in {lowest}..{MAX_COUNT}"
        )


def utc(path: str, value: Any) -> None:
    """Refuse a time without zone or in another zone than UTC."""
    if value.utcoffset() != timedelta(0):
        raise ContractError(path, found=value.isoformat(), expected="a time in UTC")


def array(path: str, values: NDArray[Any], dtype: Any, shape: tuple[int, ...]) -> None:
    """Refuse an array of another type or shape."""
    if values.dtype != np.dtype(dtype):
        raise ContractError(path, found=values.dtype, expected=np.dtype(dtype))
    if values.shape != shape:
        raise ContractError(path, found=f"shape {values.shape}", expected=f"shape {shape}")


def within(
    path: str, values: NDArray[Any], lowest: Any, highest: Any, *, nan_allowed: bool = False
) -> None:
    """Refuse the first element outside [lowest, highest]; bounds broadcast."""
    good = (values >= lowest) & (values <= highest)
    if nan_allowed:
        good |= np.isnan(values)
    if good.all():
        return
    index = tuple(int(i) for i in np.argwhere(~good)[0])
    low = np.broadcast_to(lowest, values.shape)[index]
    high = np.broadcast_to(highest, values.shape)[index]
    where = "".join(f"[{i}]" for i in index)
    raise ContractError(f"{path}{where}", found=values[index], expected=f"{low}..{high}")


def sampling_rule(rule: events.SamplingRule) -> None:
    """Check one sampling rule."""
    at_least("sampling.temperature", rule.temperature, 0.0)
    if not math.isfinite(rule.temperature):
        raise ContractError("sampling.temperature", found=rule.temperature, expected="finite")
    if (rule.temperature == 0.0) != (rule.acceptance_rule == "greedy"):
        raise ContractError(
            "sampling.temperature",
            found=rule.temperature,
            expected=f"0 exactly when the rule is greedy (it is {rule.acceptance_rule})",
        )
    if not 0.0 < rule.top_p <= 1.0:
        raise ContractError("sampling.top_p", found=rule.top_p, expected="(0, 1]")
    at_least("sampling.top_k", rule.top_k, 0)


def watermark(mark: events.Watermark) -> None:
    """Check that offsets and sequences are counts."""
    for partition, offset in mark.partition_to_offset.items():
        at_least(f"watermark.partition_to_offset[{partition}]", offset, 0)
    for worker, sequence in mark.worker_to_sequence.items():
        at_least(f"watermark.worker_to_sequence[{worker}]", sequence, 0)


def verification_event(event: events.VerificationEvent) -> None:
    """Check one event, cheapest rules first."""
    for name in ("event_id", "worker_id", "stream", "request_id", "target_id", "policy_name"):
        identifier(name, getattr(event, name))
    for name in ("worker_epoch", "sequence", "segment_index", "policy_version"):
        at_least(name, getattr(event, name), 0)
    for name in ("num_prompt_tokens", "first_position", "num_positions"):
        at_least(name, getattr(event, name), 0)
    at_least("num_speculative_tokens", event.num_speculative_tokens, 0)
    utc("produced_at", event.produced_at)
    if event.is_final == (event.finish_reason == "unfinished"):
        raise ContractError(
            "finish_reason",
            found=event.finish_reason,
            expected="a reason exactly when is_final" + f" (it is {event.is_final})",
        )
    _distinct_drafters(event.drafters)
    _rounds(event)
    _windows(event)
    if event.content is not None:
        _content(event, event.content)


def _distinct_drafters(drafters: tuple[events.DrafterVersion, ...]) -> None:
    ids = [drafter.drafter_id for drafter in drafters]
    for index, drafter_id in enumerate(ids):
        if drafter_id in ids[:index]:
            raise ContractError(
                f"drafters[{index}].drafter_id", found=drafter_id, expected="an id not listed yet"
            )


def _rounds(event: events.VerificationEvent) -> None:
    rounds = event.rounds
    shape = (rounds.first_position.shape[0],)
    for name in ("drafter_index", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens"):
        array(f"rounds.{name}", getattr(rounds, name), np.int16, shape)
    array("rounds.first_position", rounds.first_position, np.int32, shape)
    for name in ("selection_probability", "draft_seconds", "verify_seconds", "score_seconds"):
        array(f"rounds.{name}", getattr(rounds, name), np.float32, shape)
    drafted, accepted = rounds.num_draft_tokens, rounds.num_accepted_tokens
    last = event.first_position + event.num_positions
    within("rounds.first_position", rounds.first_position, event.first_position, last)
    within("rounds.drafter_index", rounds.drafter_index, -1, len(event.drafters) - 1)
    within("rounds.num_draft_tokens", drafted, 0, event.num_speculative_tokens)
    within("rounds.num_accepted_tokens", accepted, 0, drafted)
    within("rounds.num_emitted_tokens", rounds.num_emitted_tokens, 0, accepted + 1)
    emitted = int(rounds.num_emitted_tokens.sum())
    if emitted != event.num_positions:
        raise ContractError(
            "num_positions", found=event.num_positions, expected=f"{emitted} emitted tokens"
        )
    tiny = np.nextafter(np.float32(0), np.float32(1))
    within("rounds.selection_probability", rounds.selection_probability, tiny, 1.0)
    for name in ("draft_seconds", "verify_seconds", "score_seconds"):
        within(f"rounds.{name}", getattr(rounds, name), 0.0, np.finfo(np.float32).max)


def _windows(event: events.VerificationEvent) -> None:
    windows, levels = event.windows, event.num_speculative_tokens
    count = windows.start.shape[0]
    array("windows.start", windows.start, np.int32, (count,))
    array("windows.num_levels", windows.num_levels, np.int16, (count,))
    within("windows.num_levels", windows.num_levels, min(1, levels), levels)
    within("windows.start", windows.start[1:], windows.start[:-1] + 1, np.iinfo(np.int32).max)
    last = event.first_position + event.num_positions - windows.num_levels
    within("windows.start", windows.start, event.num_prompt_tokens, last)
    shape = (count, levels, len(event.drafters))
    exists = np.arange(levels)[None, :, None] < windows.num_levels[:, None, None]
    for name in ("acceptance_probability", "realised_acceptance"):
        values = getattr(windows, name)
        array(f"windows.{name}", values, np.float16, shape)
        within(f"windows.{name}", values, 0.0, 1.0, nan_allowed=True)
        beyond = ~np.isnan(values) & ~exists
        if beyond.any():
            where = "".join(f"[{int(i)}]" for i in np.argwhere(beyond)[0])
            raise ContractError(
                f"windows.{name}{where}",
                found=values[beyond][0],
                expected="NaN beyond the window's num_levels",
            )


def _content(event: events.VerificationEvent, content: events.Content) -> None:
    positions = event.num_positions
    prompt = event.num_prompt_tokens if event.segment_index == 0 else 0
    array("content.prompt_token_ids", content.prompt_token_ids, np.int32, (prompt,))
    array("content.token_ids", content.token_ids, np.int32, (positions,))
    kept = content.target_top_token_ids.shape[-1]
    array("content.target_top_token_ids", content.target_top_token_ids, np.int32, (positions, kept))
    log_probabilities = content.target_top_log_probabilities
    array("content.target_top_log_probabilities", log_probabilities, np.float16, (positions, kept))
    within("content.target_top_log_probabilities", log_probabilities, -np.inf, 0.01)
    array("content.target_tail_mass", content.target_tail_mass, np.float16, (positions,))
    within("content.target_tail_mass", content.target_tail_mass, 0.0, 1.0)
    if content.features is not None and content.features.num_rows != positions:
        raise ContractError(
            "content.features.num_rows", found=content.features.num_rows, expected=positions
        )


def policy_published(policy: events.PolicyPublished) -> None:
    """Check one published policy."""
    for name in ("stream", "learner_id", "policy_name"):
        identifier(name, getattr(policy, name))
    at_least("version", policy.version, 0)
    if not -1 <= policy.parent_version < max(policy.version, 1):
        raise ContractError(
            "parent_version", found=policy.parent_version, expected=f"-1..{policy.version - 1}"
        )
    utc("produced_at", policy.produced_at)
    _distinct_drafters(policy.drafters)
    shape = (len(policy.drafters),)
    array("log_weights", policy.log_weights, np.float64, shape)
    array("selection_probabilities", policy.selection_probabilities, np.float64, shape)
    within("selection_probabilities", policy.selection_probabilities, 0.0, 1.0)
    total = float(policy.selection_probabilities.sum())
    if shape[0] and not abs(total - 1.0) <= 1e-6:
        raise ContractError("selection_probabilities", found=f"a sum of {total}", expected="1")
    within("log_weights", policy.log_weights, -np.finfo(np.float64).max, np.finfo(np.float64).max)
    array("num_speculative_tokens", policy.num_speculative_tokens, np.int16, shape)
    for name, values in policy.accumulators.items():
        if values.dtype != np.float64 or not np.isfinite(values).all():
            raise ContractError(f"accumulators.{name}", found=values, expected="finite float64")


def drafter_released(release: events.DrafterReleased) -> None:
    """Check one release."""
    identifier("drafter_id", release.drafter_id)
    at_least("version", release.version, 0)
    utc("produced_at", release.produced_at)
    if not -1 <= release.parent_version < max(release.version, 1):
        raise ContractError(
            "parent_version", found=release.parent_version, expected=f"-1..{release.version - 1}"
        )
    if not re.fullmatch(r"[0-9a-f]{64}", release.manifest_sha256):
        raise ContractError(
            "manifest_sha256", found=repr(release.manifest_sha256), expected="64 hex digits"
        )
