"""An estimate is close to what real events take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inference.sampling import SamplingParams
from pipeline.archive.archiver import Archiver
from pipeline.configuration.pool_settings import DrafterSettings
from pipeline.configuration.settings import (
    EventLogSettings,
    FeatureSettings,
    Settings,
    WorkerSettings,
)
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import Message
from pipeline.operations.estimate import Fleet, estimate
from schemas.codec import encode
from schemas.events import VerificationEvent
from tests.inference.segments import drafters_of
from tests.inference.serving import Outbox, new_worker, request_of
from tests.inference.tiny import VOCAB_SIZE, random_prompts, tiny_llama
from tests.pipeline.archiving import TOPIC, parquet_paths

NUM_REQUESTS = 8
OUTPUT_TOKENS = 150
PROMPT_TOKENS = 40
DRAFTER_TO_KIND: dict[str, Any] = {
    "none": "none",
    "prompt-lookup": "prompt_lookup",
    "other": "causal_lm",
    "head-1": "hydra",
}


def real_events(*, has_content: bool, is_sampled: bool) -> list[VerificationEvent]:
    """Return what a real worker reports, with a pool of every sort of drafter."""
    target, outbox = tiny_llama(1, context_length=512), Outbox()
    worker = new_worker(
        target, drafters_of(target), outbox, policy="ada_normal_hedge_grid", segment_tokens=64
    )
    for number, prompt in enumerate(random_prompts(1, count=NUM_REQUESTS, length=PROMPT_TOKENS)):
        params = SamplingParams(
            max_tokens=OUTPUT_TOKENS, temperature=float(is_sampled), seed=number
        )
        worker.serve(
            request_of(prompt, params, request_id=f"cmpl-{number}", has_consent=has_content)
        )
    return outbox.events


def described(
    events: list[VerificationEvent], *, has_content: bool, is_sampled: bool
) -> tuple[Settings, Fleet]:
    """Return the settings and the traffic that the events come from."""
    num_rounds = sum(len(event.rounds.first_position) for event in events)
    settings = Settings(
        drafters=tuple(
            DrafterSettings(
                drafter_id=one.drafter_id, kind=DRAFTER_TO_KIND[one.drafter_id], path="a-model"
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
        is_sampled=is_sampled,
        vocabulary_size=VOCAB_SIZE,
    )
    return settings, fleet


SHAPES = pytest.mark.parametrize(
    ("has_content", "is_sampled"),
    [(True, False), (False, True)],
    ids=["greedy with content", "sampled without"],
)


@SHAPES
def test_events_and_bytes_of_the_log_are_within_fifteen_percent_of_real_ones(
    has_content: bool, is_sampled: bool
) -> None:
    events = real_events(has_content=has_content, is_sampled=is_sampled)
    settings, fleet = described(events, has_content=has_content, is_sampled=is_sampled)
    found = estimate(settings, fleet)
    encoded = sum(len(encode(event)) for event in events)
    assert found.events_per_second == pytest.approx(10 * len(events) / NUM_REQUESTS, rel=0.15)
    assert found.bytes_per_event == pytest.approx(encoded / len(events), rel=0.15)
    per_day = 10 * encoded / NUM_REQUESTS * 86_400
    assert found.log_bytes_per_day == pytest.approx(per_day, rel=0.15)
    assert found.log_bytes_kept == pytest.approx(2 * found.log_bytes_per_day)


@SHAPES
def test_a_parquet_log_is_within_fifteen_percent_of_what_an_archiver_wrote(
    has_content: bool,
    is_sampled: bool,
    log: EmbeddedEventLog,
    folder: Path,
    open_archiver: Callable[..., Archiver],
) -> None:
    events = real_events(has_content=has_content, is_sampled=is_sampled)
    log.append(TOPIC, [Message(key=event.stream.encode(), value=encode(event)) for event in events])
    open_archiver(max_events_per_file=10).drain()
    written = [path.stat().st_size for path in parquet_paths(folder)]
    assert len(written) == 3
    found = estimate(*described(events, has_content=has_content, is_sampled=is_sampled))
    expected = 3 * found.parquet_bytes_per_file + len(events) * found.parquet_bytes_per_event
    assert expected == pytest.approx(sum(written), rel=0.15)


def test_more_traffic_fills_files_and_little_traffic_pays_for_empty_ones() -> None:
    little = estimate(Settings(), Fleet(requests_per_second=0.001))
    much = estimate(Settings(), Fleet(requests_per_second=100.0))
    assert little.parquet_bytes_per_day > 2 * 86_400 * 0.001 * 5 * little.parquet_bytes_per_event
    per_event = much.parquet_bytes_per_day / (86_400 * much.events_per_second)
    assert per_event == pytest.approx(much.parquet_bytes_per_event, rel=0.02)


@pytest.mark.parametrize("change", [{"num_speculative_tokens": 0}, {"policy": "hedge"}])
def test_any_settings_can_be_estimated(change: dict[str, Any]) -> None:
    found = estimate(Settings(worker=WorkerSettings(**change)), Fleet(requests_per_second=1.0))
    assert 0 < found.parquet_bytes_per_event < found.bytes_per_event


def test_features_and_partitions_follow_the_traffic() -> None:
    fleet = Fleet(requests_per_second=50.0, output_tokens=300, content_share=0.5, hidden_size=576)
    found = estimate(Settings(), fleet)
    assert found.feature_bytes_per_day == 50 * 86_400 * 300 * 0.5 * 576 * 2
    assert found.num_partitions == 3
    a_tenth = estimate(Settings(features=FeatureSettings(share=0.1)), fleet)
    assert a_tenth.feature_bytes_per_day == pytest.approx(0.1 * found.feature_bytes_per_day)
    assert estimate(Settings(), Fleet(requests_per_second=0.1)).num_partitions == 1
