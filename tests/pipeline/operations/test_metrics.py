"""Metrics are sums of what the events say, so that those of several workers merge by addition."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inference.sampling import SamplingParams
from pipeline.operations.metrics import OTHER, Reading, WorkerMetrics
from schemas.events import NO_DRAFTER, FinishReason, VerificationEvent
from tests.inference.segments import drafters_of
from tests.inference.serving import Outbox, new_worker, request_of
from tests.inference.tiny import random_prompts, tiny_llama


@pytest.fixture(scope="module")
def events() -> list[VerificationEvent]:
    target, outbox = tiny_llama(1), Outbox()
    worker = new_worker(target, drafters_of(target), outbox)
    for prompt in random_prompts(1, count=4, length=12):
        worker.serve(request_of(prompt, SamplingParams(max_tokens=40)))
    return outbox.events


def samples(*observed: VerificationEvent, ids: list[str] | None = None) -> dict[str, float]:
    """Return name{labels} to value, as Prometheus reads the page."""
    known = [one.drafter_id for one in observed[0].drafters] if observed else ["a"]
    metrics = WorkerMetrics(ids or known, 4, Reading())
    for event in observed:
        metrics.observe(event)
    page, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return {
        sample.name
        + "".join(f"{{{k}={v}}}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def total(found: dict[str, float], name: str) -> float:
    return sum(value for key, value in found.items() if key.split("{")[0] == name)


def test_counters_are_what_the_events_say(events: list[VerificationEvent]) -> None:
    """A20: drafted tokens are those that were drafted, not K per round."""
    found = samples(*events)
    rounds = [event.rounds for event in events]
    played = [one.drafter_index != NO_DRAFTER for one in rounds]
    drafted = sum(int(one.num_draft_tokens[p].sum()) for one, p in zip(rounds, played, strict=True))
    accepted = sum(int(one.num_accepted_tokens.sum()) for one in rounds)
    assert total(found, "draftloop_spec_decode_num_draft_tokens_total") == drafted
    assert total(found, "draftloop_spec_decode_num_accepted_tokens_total") == accepted
    per_position = "draftloop_spec_decode_num_accepted_tokens_per_pos_total"
    assert total(found, per_position) == accepted
    drafts = sum(int((one.num_draft_tokens > 0).sum()) for one in rounds)
    assert total(found, "draftloop_spec_decode_num_drafts_total") == drafts
    assert drafted < 4 * drafts
    tokens = sum(int(one.num_emitted_tokens.sum()) for one in rounds)
    assert found["draftloop_generation_tokens_total"] == tokens


def test_regret_is_the_best_fixed_drafters_lead(events: list[VerificationEvent]) -> None:
    found = samples(*events)
    name = "draftloop_counterfactual_acceptance_length_sum_total"
    best = max(value for key, value in found.items() if key.startswith(name))
    played = found["draftloop_played_acceptance_length_sum_total"]
    assert found["draftloop_regret_to_best_fixed_tokens"] == pytest.approx(best - played)
    assert found["draftloop_compared_rounds_total"] <= played
    assert math.isfinite(best)


def test_two_workers_add_up_to_one(events: list[VerificationEvent]) -> None:
    one, other, both = samples(*events[:5]), samples(*events[5:]), samples(*events)
    for key, value in both.items():
        if "_total" in key and "_per_pos" not in key:
            assert one[key] + other[key] == pytest.approx(value), key


def test_labels_stay_bounded_whatever_the_events_name(events: list[VerificationEvent]) -> None:
    """I3: neither ids of requests nor drafters that the settings do not name."""
    many = [
        replace(
            event,
            request_id=f"request-{number}-{index}",
            stream=f"stream-{number}-{index}",
            drafters=tuple(
                replace(one, drafter_id=f"d{number}-{index}-{place}", weights_version=number)
                for place, one in enumerate(event.drafters)
            ),
        )
        for number, event in enumerate(events)
        for index in range(20)
    ]
    found = samples(*many, ids=["a", "b"])
    assert len(found) < 120
    assert not any("request-" in key or "stream-" in key or "d1" in key for key in found)
    assert found[f"draftloop_drafter_version{{drafter={OTHER}}}"] == len(events) - 1


def test_without_a_sample_nothing_is_nan_and_no_rate_is_claimed() -> None:
    """A19."""
    found = samples()
    assert all(math.isfinite(value) for value in found.values())
    assert not any("rate" in key.split("{")[0] or "mean" in key for key in found)


def test_durations_cannot_spoil_the_histogram() -> None:
    """I4: a clock that steps back lands in the first bucket and takes nothing from the sum.

    So does what is no number, which a sum would keep for ever.
    """
    metrics = WorkerMetrics(["a"], 2, Reading())
    metrics.finished(FinishReason.STOP, -5.0)
    for seconds in (math.nan, math.inf):
        metrics.finished(FinishReason.ERROR, seconds)
    metrics.finished(FinishReason.LENGTH, 3.0)
    page = metrics.render()[0].decode()
    assert "draftloop_request_duration_seconds_sum 3.0" in page
    assert 'draftloop_request_duration_seconds_bucket{le="0.1"} 3.0' in page
    assert 'draftloop_requests_finished_total{finish_reason="stop"} 1.0' in page
    assert np.isfinite(metrics.phase_seconds)
