"""Policies and releases refuse what breaks the contract, with the field and both values."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np
import pytest

from schemas.errors import ContractError
from schemas.events import GateEvidence, StreamComparison, Watermark
from tests.schemas.builders import make_policy, make_release

NAN = float("nan")


@pytest.mark.parametrize(
    ("partitions", "workers"),
    [({0: -1}, {}), ({-1: 0}, {}), ({0: NAN}, {}), ({}, {"w/0": -1}), ({}, {"\ud800": 1})],
)
def test_invalid_watermarks_are_refused(partitions: Any, workers: Any) -> None:
    with pytest.raises(ContractError, match="watermark"):
        Watermark(partition_to_offset=partitions, worker_to_sequence=workers)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", "a/b"),
        ("version", -1),
        ("parent_version", 1),
        ("parent_version", -2),
        ("log_weights", np.array([0.0, NAN, 0.0])),
        ("log_weights", np.array([0.0, -np.inf, 0.0])),
        ("log_weights", np.zeros(2)),
        ("selection_probabilities", np.array([0.5, NAN, 0.5])),
        ("selection_probabilities", np.array([0.5, -0.5, 1.0])),
        ("selection_probabilities", np.array([0.5, 0.5, 0.5])),
        ("selection_probabilities", np.array([0.5, 0.5, 0.0], np.float32)),
        ("num_speculative_tokens", np.array([1, -1, 1], np.int16)),
        ("accumulators", {"regret": np.array([NAN])}),
        ("accumulators", {"regret": np.zeros(1, np.float32)}),
        ("accumulators", {"regret": [0.0]}),
        ("produced_at", datetime(2026, 1, 1)),
    ],
)
def test_invalid_policies_are_refused_by_field(name: str, value: Any) -> None:
    with pytest.raises(ContractError) as refusal:
        replace(make_policy(num_drafters=3), **{name: value})
    assert refusal.value.path.startswith(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("draft_seconds", np.zeros(2)),
        ("score_seconds", np.array([0.0, -1.0, 0.0])),
        ("verify_seconds", np.array([np.inf])),
        ("verify_seconds", np.zeros((1, 1))),
    ],
)
def test_invalid_costs_are_refused_by_field(name: str, value: Any) -> None:
    policy = make_policy(num_drafters=3)
    with pytest.raises(ContractError) as refusal:
        replace(policy, cost=replace(policy.cost, **{name: value}))
    assert refusal.value.path.startswith(f"cost.{name}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("drafter_id", "a/b"),
        ("version", -1),
        ("parent_version", 1),
        ("manifest_sha256", "F" * 64),
        ("manifest_sha256", None),
        ("state", "live"),
        ("reason", "\ud800"),
        ("artifact_uri", None),
        ("produced_at", datetime(2026, 1, 1)),
    ],
)
def test_invalid_releases_are_refused_by_field(name: str, value: Any) -> None:
    with pytest.raises(ContractError) as refusal:
        replace(make_release(), **{name: value})
    assert refusal.value.path == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_windows", -1),
        ("new_acceptance_length", 0.5),
        ("old_acceptance_length", np.inf),
        ("difference_low", 3.0),
        ("difference_high", np.inf),
    ],
)
def test_invalid_evidence_is_refused_by_field(name: str, value: Any) -> None:
    evidence = GateEvidence(
        num_windows=9,
        new_acceptance_length=2.0,
        old_acceptance_length=NAN,
        difference_low=-1.0,
        difference_high=1.0,
    )
    with pytest.raises(ContractError) as refusal:
        replace(evidence, **{name: value})
    assert refusal.value.path == f"evidence.{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", "a stream"),
        ("num_streams", 2),
        ("num_requests", 0),
        ("num_windows", -1),
        ("new_acceptance_length", 0.5),
        ("difference_low", 3.0),
    ],
)
def test_invalid_evidence_of_a_stream_is_refused_by_field(name: str, value: Any) -> None:
    one = StreamComparison(
        stream="a",
        num_streams=1,
        num_requests=3,
        num_windows=9,
        new_acceptance_length=2.0,
        old_acceptance_length=NAN,
        difference_low=-1.0,
        difference_high=1.0,
    )
    with pytest.raises(ContractError) as refusal:
        replace(one, **{name: value})
    assert refusal.value.path == f"evidence.streams.{name}"
    twice = GateEvidence(
        num_windows=9,
        new_acceptance_length=2.0,
        old_acceptance_length=2.0,
        difference_low=NAN,
        difference_high=NAN,
        streams=(one,),
    )
    with pytest.raises(ContractError, match=r"evidence\.streams: found \['a', 'a'\]"):
        replace(twice, streams=(one, one))
