"""Messages to plain Avro records and back: arrays become little-endian bytes, nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ContractError
from schemas.events import (
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
    VerificationEvent,
    Watermark,
)

Record = dict[str, Any]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

ROUND_DTYPES: dict[str, np.dtype[Any]] = {
    "first_position": np.dtype("<i4"),
    "drafter_index": np.dtype("<i2"),
    "num_draft_tokens": np.dtype("<i2"),
    "num_accepted_tokens": np.dtype("<i2"),
    "num_emitted_tokens": np.dtype("<i2"),
    "selection_probability": np.dtype("<f4"),
    "draft_seconds": np.dtype("<f4"),
    "verify_seconds": np.dtype("<f4"),
    "score_seconds": np.dtype("<f4"),
}
_INT16, _INT32 = np.dtype("<i2"), np.dtype("<i4")
_FLOAT16, _FLOAT64 = np.dtype("<f2"), np.dtype("<f8")

_Choice = TypeVar("_Choice", bound=StrEnum)


def microseconds(moment: datetime) -> int:
    """Return microseconds since 1970 (UTC), exactly."""
    return (moment - EPOCH) // _MICROSECOND


def choice(path: str, kind: type[_Choice], value: str) -> _Choice:
    """Return the member of an enumeration, refusing a name it does not have."""
    try:
        return kind(value)
    except ValueError:
        expected = f"one of {[member.value for member in kind]}"
        raise ContractError(path, found=repr(value), expected=expected) from None


def array_from_bytes(
    path: str, data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> NDArray[Any]:
    """View little-endian bytes as a read-only array of native order.

    Raises:
        ContractError: If the number of bytes is not what ``shape`` needs.
    """
    needed = dtype.itemsize * math.prod(shape)
    if len(data) != needed:
        raise ContractError(
            path, found=f"{len(data)} bytes", expected=f"{needed} bytes for {dtype.name}{shape}"
        )
    values: NDArray[Any] = np.frombuffer(data, dtype).reshape(shape)
    return values if dtype.isnative else values.astype(dtype.newbyteorder("="))


def _bytes(values: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return values.astype(dtype, copy=False).tobytes()


def _length(path: str, data: bytes, dtype: np.dtype[Any]) -> int:
    """Return the number of elements, refusing bytes that end within one."""
    count, rest = divmod(len(data), dtype.itemsize)
    if rest:
        raise ContractError(
            path, found=f"{len(data)} bytes", expected=f"a multiple of {dtype.itemsize} bytes"
        )
    return count


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
        "drafters": _from_drafters(event.drafters),
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
        "rounds": {
            name: _bytes(getattr(rounds, name), dtype) for name, dtype in ROUND_DTYPES.items()
        },
        "windows": {
            "start": _bytes(windows.start, _INT32),
            "num_levels": _bytes(windows.num_levels, _INT16),
            "acceptance_probability": _bytes(windows.acceptance_probability, _FLOAT16),
            "realised_acceptance": _bytes(windows.realised_acceptance, _FLOAT16),
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
        finish_reason=choice("finish_reason", FinishReason, record["finish_reason"]),
        drafters=_to_drafters(record["drafters"]),
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


def _from_drafters(drafters: Sequence[DrafterVersion]) -> list[Record]:
    return [
        {
            "drafter_id": drafter.drafter_id,
            "weights_version": drafter.weights_version,
            "draft_vocabulary_hash": drafter.draft_vocabulary_hash,
        }
        for drafter in drafters
    ]


def _to_drafters(records: Sequence[Record]) -> tuple[DrafterVersion, ...]:
    drafters = []
    for index, record in enumerate(records):
        try:
            drafters.append(DrafterVersion(**record))
        except ContractError as error:
            raise error.under(f"drafters[{index}]") from error
    return tuple(drafters)


def _to_sampling(record: Record) -> SamplingRule:
    rule = choice("sampling.acceptance_rule", AcceptanceRule, record["acceptance_rule"])
    return SamplingRule(
        acceptance_rule=rule,
        temperature=record["temperature"],
        top_p=record["top_p"],
        top_k=record["top_k"],
    )


def _to_rounds(record: Record) -> Rounds:
    count = _length("rounds.first_position", record["first_position"], _INT32)
    return Rounds(
        **{
            name: array_from_bytes(f"rounds.{name}", record[name], dtype, (count,))
            for name, dtype in ROUND_DTYPES.items()
        }
    )


def _to_windows(record: Record) -> ScoredWindows:
    windows = record["windows"]
    count = _length("windows.start", windows["start"], _INT32)
    shape = (count, record["num_speculative_tokens"], len(record["drafters"]))
    if shape[1] < 0:
        raise ContractError("num_speculative_tokens", found=shape[1], expected=">= 0")

    def scores(name: str) -> NDArray[np.float16]:
        return array_from_bytes(f"windows.{name}", windows[name], _FLOAT16, shape)

    return ScoredWindows(
        start=array_from_bytes("windows.start", windows["start"], _INT32, (count,)),
        num_levels=array_from_bytes("windows.num_levels", windows["num_levels"], _INT16, (count,)),
        acceptance_probability=scores("acceptance_probability"),
        realised_acceptance=scores("realised_acceptance"),
    )


def _from_content(content: Content) -> Record:
    features = content.features
    return {
        "num_top_tokens": content.target_top_token_ids.shape[-1],
        "prompt_token_ids": _bytes(content.prompt_token_ids, _INT32),
        "token_ids": _bytes(content.token_ids, _INT32),
        "target_top_token_ids": _bytes(content.target_top_token_ids, _INT32),
        "target_top_log_probabilities": _bytes(content.target_top_log_probabilities, _FLOAT16),
        "target_tail_mass": _bytes(content.target_tail_mass, _FLOAT16),
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
    prompt = _length("content.prompt_token_ids", record["prompt_token_ids"], _INT32)
    shape = (num_positions, record["num_top_tokens"])
    if min(shape) < 0:
        raise ContractError("content.target_top_token_ids", found=f"shape {shape}", expected=">= 0")
    features = record["features"]

    def values(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        return array_from_bytes(f"content.{name}", record[name], dtype, shape)

    return Content(
        prompt_token_ids=values("prompt_token_ids", _INT32, (prompt,)),
        token_ids=values("token_ids", _INT32, (num_positions,)),
        target_top_token_ids=values("target_top_token_ids", _INT32, shape),
        target_top_log_probabilities=values("target_top_log_probabilities", _FLOAT16, shape),
        target_tail_mass=values("target_tail_mass", _FLOAT16, (num_positions,)),
        features=None if features is None else FeatureReference(**features),
    )


def from_policy_published(policy: PolicyPublished) -> Record:
    """Return the Avro record of a policy."""
    cost = policy.cost
    return {
        "stream": policy.stream,
        "version": policy.version,
        "parent_version": policy.parent_version,
        "produced_at": microseconds(policy.produced_at),
        "learner_id": policy.learner_id,
        "policy_name": policy.policy_name,
        "drafters": _from_drafters(policy.drafters),
        "log_weights": _bytes(policy.log_weights, _FLOAT64),
        "accumulators": {
            name: {"shape": list(values.shape), "values": _bytes(values, _FLOAT64)}
            for name, values in policy.accumulators.items()
        },
        "selection_probabilities": _bytes(policy.selection_probabilities, _FLOAT64),
        "num_speculative_tokens": _bytes(policy.num_speculative_tokens, _INT16),
        "cost": {
            "draft_seconds": _bytes(cost.draft_seconds, _FLOAT64),
            "score_seconds": _bytes(cost.score_seconds, _FLOAT64),
            "verify_seconds": _bytes(cost.verify_seconds, _FLOAT64),
        },
        "watermark": _from_watermark(policy.watermark),
    }


def to_policy_published(record: Record) -> PolicyPublished:
    """Build the policy that an Avro record describes.

    Raises:
        ContractError: If the record breaks the contract.
    """
    drafters = _to_drafters(record["drafters"])
    shape = (len(drafters),)
    return PolicyPublished(
        stream=record["stream"],
        version=record["version"],
        parent_version=record["parent_version"],
        produced_at=record["produced_at"],
        learner_id=record["learner_id"],
        policy_name=record["policy_name"],
        drafters=drafters,
        log_weights=array_from_bytes("log_weights", record["log_weights"], _FLOAT64, shape),
        accumulators=_to_accumulators(record["accumulators"]),
        selection_probabilities=array_from_bytes(
            "selection_probabilities", record["selection_probabilities"], _FLOAT64, shape
        ),
        num_speculative_tokens=array_from_bytes(
            "num_speculative_tokens", record["num_speculative_tokens"], _INT16, shape
        ),
        cost=_to_cost(record["cost"], shape),
        watermark=_to_watermark("watermark", record["watermark"]),
    )


def _to_accumulators(records: Mapping[str, Record]) -> dict[str, NDArray[np.float64]]:
    accumulators = {}
    for name, record in records.items():
        path, shape = f"accumulators.{name}", tuple(record["shape"])
        if any(length < 0 for length in shape):
            raise ContractError(path, found=f"shape {shape}", expected="lengths >= 0")
        accumulators[name] = array_from_bytes(path, record["values"], _FLOAT64, shape)
    return accumulators


def _to_cost(record: Record, shape: tuple[int, ...]) -> CostModel:
    rows = _length("cost.verify_seconds", record["verify_seconds"], _FLOAT64)
    name_to_shape = {"draft_seconds": shape, "score_seconds": shape, "verify_seconds": (rows,)}
    return CostModel(
        **{
            name: array_from_bytes(f"cost.{name}", record[name], _FLOAT64, shape)
            for name, shape in name_to_shape.items()
        }
    )


def _from_watermark(watermark: Watermark) -> Record:
    return {
        "partition_to_offset": [
            {"partition": partition, "offset": offset}
            for partition, offset in watermark.partition_to_offset.items()
        ],
        "worker_to_sequence": dict(watermark.worker_to_sequence),
    }


def _to_watermark(path: str, record: Record) -> Watermark:
    entries = record["partition_to_offset"]
    partition_to_offset = {entry["partition"]: entry["offset"] for entry in entries}
    if len(partition_to_offset) != len(entries):
        raise ContractError(
            f"{path}.partition_to_offset",
            found=f"{len(entries)} entries for {len(partition_to_offset)} partitions",
            expected="one entry per partition",
        )
    return Watermark(
        partition_to_offset=partition_to_offset, worker_to_sequence=record["worker_to_sequence"]
    )


def from_drafter_released(release: DrafterReleased) -> Record:
    """Return the Avro record of a release."""
    evidence = release.evidence
    plain = {name: getattr(release, name) for name in _PLAIN_RELEASE_FIELDS}
    return plain | {
        "produced_at": microseconds(release.produced_at),
        "state": release.state.value,
        "training_window": _from_watermark(release.training_window),
        "evidence": None
        if evidence is None
        else {name: getattr(evidence, name) for name in GateEvidence.__dataclass_fields__},
    }


def to_drafter_released(record: Record) -> DrafterReleased:
    """Build the release that an Avro record describes.

    Raises:
        ContractError: If the record breaks the contract.
    """
    evidence = record["evidence"]
    rest = {name: record[name] for name in _PLAIN_RELEASE_FIELDS}
    return DrafterReleased(
        **rest,
        produced_at=record["produced_at"],
        state=choice("state", ReleaseState, record["state"]),
        training_window=_to_watermark("training_window", record["training_window"]),
        evidence=None if evidence is None else GateEvidence(**evidence),
    )


_PLAIN_RELEASE_FIELDS = (
    *("drafter_id", "version", "parent_version", "artifact_uri", "manifest_sha256"),
    *("architecture", "target_fingerprint", "tokenizer_hash", "draft_vocabulary_hash", "reason"),
)
