"""Verification events to plain Avro records and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ContractError
from schemas.events import (
    AcceptanceRule,
    Content,
    FeatureReference,
    FinishReason,
    Rounds,
    SamplingRule,
    ScoredWindows,
    VerificationEvent,
)
from schemas.packing import (
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT16,
    INT32,
    Record,
    array_from_bytes,
    array_to_bytes,
    choice,
    drafters_from_records,
    drafters_to_records,
    microseconds,
    num_elements,
)

_ROUND_DTYPES: dict[str, np.dtype[Any]] = {
    "first_position": INT32,
    "drafter_index": INT16,
    "num_draft_tokens": INT16,
    "num_accepted_tokens": INT16,
    "num_emitted_tokens": INT16,
    "num_scored_windows": INT16,
    "selection_probability": FLOAT32,
    "draft_seconds": FLOAT32,
    "verify_seconds": FLOAT32,
    "score_seconds": FLOAT32,
    "batch_size": INT16,
    "score_probability": FLOAT32,
}
_ROUND_ARRAYS = [(name, f"rounds.{name}", dtype) for name, dtype in _ROUND_DTYPES.items()]
_LATER_ROUND_ARRAYS = ("batch_size", "score_probability")
"""Came with version 2: older messages have empty bytes in their place."""


def from_verification_event(event: VerificationEvent) -> Record:
    """Return the Avro record of an event."""
    rounds, windows, sampling = event.rounds, event.windows, event.sampling
    return {
        "event_id": event.event_id,
        "worker_id": event.worker_id,
        "worker_epoch": event.worker_epoch,
        "sequence": event.sequence,
        "produced_at": microseconds(event.produced_at),
        "stream": event.stream,
        "request_id": event.request_id,
        "segment_index": event.segment_index,
        "is_final": event.is_final,
        "finish_reason": event.finish_reason.value,
        "target_id": event.target_id,
        "target_fingerprint": event.target_fingerprint,
        "tokenizer_hash": event.tokenizer_hash,
        "policy_name": event.policy_name,
        "policy_version": event.policy_version,
        "prior_probabilities": array_to_bytes(event.prior_probabilities, FLOAT64),
        "policy_table": array_to_bytes(event.policy_table, FLOAT64),
        "policy_numbers": array_to_bytes(event.policy_numbers, FLOAT64),
        "drafters": drafters_to_records(event.drafters),
        "sampling": {
            "acceptance_rule": sampling.acceptance_rule.value,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        },
        "num_speculative_tokens": event.num_speculative_tokens,
        "num_prompt_tokens": event.num_prompt_tokens,
        "first_position": event.first_position,
        "num_positions": event.num_positions,
        "num_awake_rounds": array_to_bytes(event.num_awake_rounds, INT32),
        "rounds": {
            name: array_to_bytes(getattr(rounds, name), dtype)
            for name, dtype in _ROUND_DTYPES.items()
        },
        "windows": {
            "start": array_to_bytes(windows.start, INT32),
            "num_levels": array_to_bytes(windows.num_levels, INT16),
            "acceptance_probability": array_to_bytes(windows.acceptance_probability, FLOAT16),
            "realised_acceptance": array_to_bytes(windows.realised_acceptance, FLOAT16),
        },
        "content": None if event.content is None else _from_content(event.content),
    }


def to_verification_event(record: Record) -> VerificationEvent:
    """Build the event that an Avro record describes.

    Raises:
        ContractError: If the record breaks the contract.
    """
    content = record["content"]
    rest = {name: record[name] for name in _PLAIN_EVENT_FIELDS}
    return VerificationEvent(
        **rest,
        prior_probabilities=array_from_bytes(
            "prior_probabilities",
            record["prior_probabilities"],
            FLOAT64,
            (len(record["drafters"]),),
        ),
        policy_table=_vector("policy_table", record["policy_table"], FLOAT64),
        policy_numbers=_vector("policy_numbers", record["policy_numbers"], FLOAT64),
        num_awake_rounds=_vector("num_awake_rounds", record["num_awake_rounds"], INT32),
        finish_reason=choice("finish_reason", FinishReason, record["finish_reason"]),
        drafters=drafters_from_records(record["drafters"]),
        sampling=_to_sampling(record["sampling"]),
        rounds=_to_rounds(record["rounds"]),
        windows=_to_windows(record),
        content=None if content is None else _to_content(content, record["num_positions"]),
    )


_PLAIN_EVENT_FIELDS = (
    *("event_id", "worker_id", "worker_epoch", "sequence", "produced_at", "stream"),
    *("request_id", "segment_index", "is_final", "target_id", "target_fingerprint"),
    *("tokenizer_hash", "policy_name", "policy_version", "num_speculative_tokens"),
    *("num_prompt_tokens", "first_position", "num_positions"),
)


def _to_sampling(record: Record) -> SamplingRule:
    rule = choice("sampling.acceptance_rule", AcceptanceRule, record["acceptance_rule"])
    return SamplingRule(
        acceptance_rule=rule,
        temperature=record["temperature"],
        top_p=record["top_p"],
        top_k=record["top_k"],
    )


def _to_rounds(record: Record) -> Rounds:
    count = num_elements("rounds.first_position", record["first_position"], INT32)
    shape = (count,)
    return Rounds(
        **{
            name: array_from_bytes(path, record[name], dtype, shape)
            for name, path, dtype in _ROUND_ARRAYS
            if record[name] or name not in _LATER_ROUND_ARRAYS
        }
    )


def _vector(path: str, data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    return array_from_bytes(path, data or b"", dtype, (num_elements(path, data, dtype),))


def _to_windows(record: Record) -> ScoredWindows:
    windows = record["windows"]
    count = num_elements("windows.start", windows["start"], INT32)
    shape = (count, record["num_speculative_tokens"], len(record["drafters"]))
    if shape[1] < 0:
        raise ContractError("num_speculative_tokens", found=shape[1], expected=">= 0")

    def scores(name: str) -> NDArray[np.float16]:
        return array_from_bytes(f"windows.{name}", windows[name], FLOAT16, shape)

    return ScoredWindows(
        start=array_from_bytes("windows.start", windows["start"], INT32, (count,)),
        num_levels=array_from_bytes("windows.num_levels", windows["num_levels"], INT16, (count,)),
        acceptance_probability=scores("acceptance_probability"),
        realised_acceptance=scores("realised_acceptance"),
    )


def _from_content(content: Content) -> Record:
    features = content.features
    return {
        "num_top_tokens": content.target_top_token_ids.shape[-1],
        "prompt_token_ids": array_to_bytes(content.prompt_token_ids, INT32),
        "token_ids": array_to_bytes(content.token_ids, INT32),
        "target_top_token_ids": array_to_bytes(content.target_top_token_ids, INT32),
        "target_top_log_probabilities": array_to_bytes(
            content.target_top_log_probabilities, FLOAT16
        ),
        "target_tail_mass": array_to_bytes(content.target_tail_mass, FLOAT16),
        "features": None
        if features is None
        else {
            "uri": features.uri,
            "first_row": features.first_row,
            "num_rows": features.num_rows,
            "sha256": features.sha256,
        },
    }


def _to_content(record: Record, num_positions: int) -> Content:
    prompt = num_elements("content.prompt_token_ids", record["prompt_token_ids"], INT32)
    shape = (num_positions, record["num_top_tokens"])
    if min(shape) < 0:
        raise ContractError("content.target_top_token_ids", found=f"shape {shape}", expected=">= 0")
    features = record["features"]

    def values(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        return array_from_bytes(f"content.{name}", record[name], dtype, shape)

    return Content(
        prompt_token_ids=values("prompt_token_ids", INT32, (prompt,)),
        token_ids=values("token_ids", INT32, (num_positions,)),
        target_top_token_ids=values("target_top_token_ids", INT32, shape),
        target_top_log_probabilities=values("target_top_log_probabilities", FLOAT16, shape),
        target_tail_mass=values("target_tail_mass", FLOAT16, (num_positions,)),
        features=None if features is None else FeatureReference(**features),
    )
