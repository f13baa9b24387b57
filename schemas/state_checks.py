"""The rules of policies and releases, each one refusal with a path and both values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from schemas.checks import (
    LARGEST_FLOAT64,
    MAX_LEVELS,
    POLICY,
    ROUND_SECONDS,
    array,
    count,
    distinct_drafters,
    finite,
    identifier,
    member,
    sha256,
    text,
    utc,
    vector,
    within,
)
from schemas.errors import ContractError

if TYPE_CHECKING:
    from schemas import events


def watermark(mark: events.Watermark) -> None:
    """Check that offsets and sequences are counts."""
    for partition, offset in mark.partition_to_offset.items():
        count("watermark.partition_to_offset", partition, highest=2**31 - 1)
        count(f"watermark.partition_to_offset[{partition}]", offset)
    for worker, sequence in mark.worker_to_sequence.items():
        text("watermark.worker_to_sequence", worker)
        count(f"watermark.worker_to_sequence[{worker}]", sequence)


def policy_published(policy: events.PolicyPublished) -> None:
    """Check one published policy."""
    for name in ("stream", "learner_id"):
        identifier(name, getattr(policy, name))
    identifier("policy_name", policy.policy_name, POLICY)
    count("version", policy.version)
    count("parent_version", policy.parent_version, -1, max(policy.version - 1, 0))
    utc("produced_at", policy.produced_at)
    distinct_drafters(policy.drafters)
    shape = (len(policy.drafters),)
    array("log_weights", policy.log_weights, np.float64, shape)
    _finite("log_weights", policy.log_weights)
    array("selection_probabilities", policy.selection_probabilities, np.float64, shape)
    within("selection_probabilities", policy.selection_probabilities, 0.0, 1.0)
    total = float(policy.selection_probabilities.sum())
    if shape[0] and not abs(total - 1.0) <= 1e-6:
        raise ContractError("selection_probabilities", found=f"a sum of {total}", expected="1")
    array("num_speculative_tokens", policy.num_speculative_tokens, np.int16, shape)
    within("num_speculative_tokens", policy.num_speculative_tokens, 0, MAX_LEVELS)
    for name, values in policy.accumulators.items():
        text("accumulators", name)
        member(f"accumulators.{name}", values, np.ndarray)
        array(f"accumulators.{name}", values, np.float64, values.shape)
        _finite(f"accumulators.{name}", values)
    _cost(policy.cost, shape)


def _finite(path: str, values: NDArray[np.float64]) -> None:
    """Refuse the first element that is infinite or NaN."""
    # Of many numbers that are finite and not huge, one product tells it.
    if not math.isfinite(np.vdot(values, values)):
        within(path, values, -LARGEST_FLOAT64, LARGEST_FLOAT64)


def _cost(cost: events.CostModel, shape: tuple[int, ...]) -> None:
    vector("cost.verify_seconds", cost.verify_seconds, np.float64)
    array("cost.draft_seconds", cost.draft_seconds, np.float64, shape)
    array("cost.score_seconds", cost.score_seconds, np.float64, shape)
    for name in ROUND_SECONDS:
        within(f"cost.{name}", getattr(cost, name), 0.0, LARGEST_FLOAT64, nan_allowed=True)


def gate_evidence(evidence: events.GateEvidence) -> None:
    """Check one comparison of two versions."""
    _comparison("evidence", evidence)
    names = [one.stream for one in evidence.streams]
    if len(set(names)) != len(names):
        raise ContractError("evidence.streams", found=names, expected="every stream once")


def stream_comparison(one: events.StreamComparison) -> None:
    """Check the comparison of two versions in one stream, or in those that are not named."""
    path = "evidence.streams"
    if one.stream:
        identifier(f"{path}.stream", one.stream)
        count(f"{path}.num_streams", one.num_streams, 1, 1)
    count(f"{path}.num_streams", one.num_streams, 1)
    count(f"{path}.num_requests", one.num_requests, 1)
    _comparison(path, one)


def _comparison(path: str, one: events.GateEvidence | events.StreamComparison) -> None:
    count(f"{path}.num_windows", one.num_windows)
    for name in ("new_acceptance_length", "old_acceptance_length"):
        finite(f"{path}.{name}", getattr(one, name), 1.0, nan_allowed=True)
    finite(f"{path}.difference_low", one.difference_low, nan_allowed=True)
    finite(f"{path}.difference_high", one.difference_high, nan_allowed=True)
    if one.difference_low > one.difference_high:
        raise ContractError(
            f"{path}.difference_low",
            found=one.difference_low,
            expected=f"<= difference_high ({one.difference_high})",
        )


def drafter_released(release: events.DrafterReleased) -> None:
    """Check one release."""
    identifier("drafter_id", release.drafter_id)
    count("version", release.version)
    count("parent_version", release.parent_version, -1, max(release.version - 1, 0))
    utc("produced_at", release.produced_at)
    for name in ("artifact_uri", "architecture", "target_fingerprint", "tokenizer_hash"):
        text(name, getattr(release, name))
    for name in ("draft_vocabulary_hash", "reason"):
        text(name, getattr(release, name))
    sha256("manifest_sha256", release.manifest_sha256)
