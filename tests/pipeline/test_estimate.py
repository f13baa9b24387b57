"""An estimate is close to what real events take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference.sampling import SamplingParams
from pipeline.estimate import Fleet, estimate, parquet_bytes
from pipeline.pool_settings import DrafterSettings
from pipeline.settings import EventLogSettings, Settings, WorkerSettings
from schemas.codec import encode
from schemas.events import VerificationEvent
from tests.inference.segments import drafters_of
from tests.inference.serving import Outbox, new_worker, request_of
from tests.inference.tiny import random_prompts, tiny_llama

NUM_REQUESTS = 6
OUTPUT_TOKENS = 150
PROMPT_TOKENS = 40


def real_events(*, has_content: bool) -> list[VerificationEvent]:
    target, outbox = tiny_llama(1, context_length=512), Outbox()
    worker = new_worker(
        target, drafters_of(target), outbox, policy="ada_normal_hedge_grid", segment_tokens=64
    )
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=1.0, seed=1)
    for prompt in random_prompts(1, count=NUM_REQUESTS, length=PROMPT_TOKENS):
        worker.serve(request_of(prompt, params, has_consent=has_content))
    return outbox.events


def described(events: list[VerificationEvent], *, has_content: bool) -> tuple[Settings, Fleet]:
    """Return the settings and the traffic that the events come from."""
    num_rounds = sum(len(event.rounds.first_position) for event in events)
    settings = Settings(
        drafters=tuple(
            DrafterSettings(
                drafter_id=one.drafter_id,
                kind="none" if one.drafter_id == "none" else "prompt_lookup",
            )
            for one in events[0].drafters
        ),
        worker=WorkerSettings(num_speculative_tokens=4, segment_tokens=64),
        event_log=EventLogSettings(retention_days=2.0),
    )
    fleet = Fleet(
        requests_per_second=10.0,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        acceptance_length=NUM_REQUESTS * OUTPUT_TOKENS / num_rounds,
        content_share=float(has_content),
    )
    return settings, fleet


@pytest.mark.parametrize("has_content", [False, True])
def test_events_and_bytes_are_within_fifteen_percent_of_real_ones(has_content: bool) -> None:
    events = real_events(has_content=has_content)
    settings, fleet = described(events, has_content=has_content)
    found = estimate(settings, fleet)
    encoded = sum(len(encode(event)) for event in events)
    assert found.events_per_second == pytest.approx(10 * len(events) / NUM_REQUESTS, rel=0.15)
    assert found.bytes_per_event == pytest.approx(encoded / len(events), rel=0.15)
    per_day = 10 * encoded / NUM_REQUESTS * 86_400
    assert found.log_bytes_per_day == pytest.approx(per_day, rel=0.15)
    assert found.log_bytes_kept == pytest.approx(2 * found.log_bytes_per_day)


def test_parquet_of_the_estimate_is_on_the_safe_side_of_real_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drawn acceptances compress less than real ones."""
    events = real_events(has_content=False)
    settings, fleet = described(events, has_content=False)
    # As many requests as are real: the columns of a file cost the same whatever its rows.
    monkeypatch.setattr("pipeline.estimate.SAMPLE_REQUESTS", NUM_REQUESTS)
    found = estimate(settings, replace(fleet, is_sampled=True))
    per_event = found.parquet_bytes_per_day / (found.events_per_second * 86_400)
    assert 0.9 < per_event / (parquet_bytes(events) / len(events)) < 1.4


def test_features_and_partitions_follow_the_traffic() -> None:
    fleet = Fleet(requests_per_second=50.0, output_tokens=300, content_share=0.5, hidden_size=576)
    found = estimate(Settings(), fleet)
    assert found.feature_bytes_per_day == 50 * 86_400 * 300 * 0.5 * 576 * 2
    assert found.num_partitions == 3
    assert estimate(Settings(), Fleet(requests_per_second=0.1)).num_partitions == 1
