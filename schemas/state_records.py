"""Policies and releases to plain Avro records and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ContractError
from schemas.events import (
    CostModel,
    DrafterReleased,
    GateEvidence,
    PolicyPublished,
    ReleaseState,
    StreamComparison,
    Watermark,
)
from schemas.packing import (
    FLOAT64,
    INT16,
    Record,
    array_from_bytes,
    array_to_bytes,
    choice,
    drafters_from_records,
    drafters_to_records,
    microseconds,
    num_elements,
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
        "drafters": drafters_to_records(policy.drafters),
        "log_weights": array_to_bytes(policy.log_weights, FLOAT64),
        "accumulators": {
            name: {"shape": list(values.shape), "values": array_to_bytes(values, FLOAT64)}
            for name, values in policy.accumulators.items()
        },
        "selection_probabilities": array_to_bytes(policy.selection_probabilities, FLOAT64),
        "num_speculative_tokens": array_to_bytes(policy.num_speculative_tokens, INT16),
        "cost": {
            "draft_seconds": array_to_bytes(cost.draft_seconds, FLOAT64),
            "score_seconds": array_to_bytes(cost.score_seconds, FLOAT64),
            "verify_seconds": array_to_bytes(cost.verify_seconds, FLOAT64),
        },
        "watermark": _from_watermark(policy.watermark),
    }


def to_policy_published(record: Record) -> PolicyPublished:
    """Build the policy that an Avro record describes.

    Raises:
        ContractError: If the record breaks the contract.
    """
    drafters = drafters_from_records(record["drafters"])
    shape = (len(drafters),)
    return PolicyPublished(
        stream=record["stream"],
        version=record["version"],
        parent_version=record["parent_version"],
        produced_at=record["produced_at"],
        learner_id=record["learner_id"],
        policy_name=record["policy_name"],
        drafters=drafters,
        log_weights=array_from_bytes("log_weights", record["log_weights"], FLOAT64, shape),
        accumulators=_to_accumulators(record["accumulators"]),
        selection_probabilities=array_from_bytes(
            "selection_probabilities", record["selection_probabilities"], FLOAT64, shape
        ),
        num_speculative_tokens=array_from_bytes(
            "num_speculative_tokens", record["num_speculative_tokens"], INT16, shape
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
        accumulators[name] = array_from_bytes(path, record["values"], FLOAT64, shape)
    return accumulators


def _to_cost(record: Record, shape: tuple[int, ...]) -> CostModel:
    rows = num_elements("cost.verify_seconds", record["verify_seconds"], FLOAT64)
    name_to_shape = {"draft_seconds": shape, "score_seconds": shape, "verify_seconds": (rows,)}
    return CostModel(
        **{
            name: array_from_bytes(f"cost.{name}", record[name], FLOAT64, shape)
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
        "evidence": None if evidence is None else asdict(evidence),
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
        evidence=None if evidence is None else _to_evidence(evidence),
    )


def _to_evidence(record: Record) -> GateEvidence:
    streams = tuple(StreamComparison(**one) for one in record["streams"])
    return GateEvidence(**{**record, "streams": streams})


_PLAIN_RELEASE_FIELDS = (
    *("drafter_id", "version", "parent_version", "artifact_uri", "manifest_sha256"),
    *("architecture", "target_fingerprint", "tokenizer_hash", "draft_vocabulary_hash", "reason"),
)
