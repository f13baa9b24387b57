"""What the learner publishes of a stream, as the start of its requests inside vLLM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pytest

from inference.vllm_plugin.head_batch import RowHeads
from inference.vllm_plugin.published import MOST_OBSERVATIONS, level_chance, published_chances
from learner.stream_state import StreamSettings, StreamState
from schemas.events import PolicyPublished, VerificationEvent
from tests.inference.test_vllm_heads import RIGHT, WRONG, fresh_engine, head
from tests.inference.vllm_fakes import Kept

STREAM = "support"


@dataclass(frozen=True)
class Received:
    event: VerificationEvent
    offset: int
    partition: int = 0


def learned_from(next_of: list[int]) -> PolicyPublished:
    """Return what the learner publishes of a stream that another engine served with a head."""
    kept = Kept(waiting=[head(next_of)])
    batch, engine = fresh_engine(kept, scoring_share=1.0)
    for number in range(12):
        engine.add(f"r-{number}", [number], 24, stream=STREAM)
    engine.run()
    batch.close()
    settings, state = StreamSettings(), StreamState(stream=STREAM)
    for offset, event in enumerate(kept.events):
        state, _ = state.learned(Received(event, offset), settings)
    return state.to_policy(settings, learner_id="learner", produced_at=datetime.now(UTC))


@pytest.mark.parametrize(("chance", "num_levels"), [(0.0, 4), (0.3, 4), (0.8, 1), (1.0, 6)])
def test_the_chance_of_a_level_gives_the_accepted_tokens_it_was_made_from(
    chance: float, num_levels: int
) -> None:
    num_accepted = sum(chance**k for k in range(1, num_levels + 1))
    assert level_chance(num_accepted, num_levels) == pytest.approx(chance, abs=1e-6)


def test_a_policy_says_how_often_a_head_came_true() -> None:
    chance, observations = published_chances(learned_from(RIGHT), "none")["head"]
    assert chance > 0.95
    assert observations == MOST_OBSERVATIONS
    assert published_chances(learned_from(WRONG), "none")["head"][0] < 0.05
    assert published_chances(learned_from(RIGHT), "another") == {}


@pytest.mark.parametrize("next_of", [RIGHT, WRONG])
def test_an_engine_that_begins_expects_of_a_head_what_was_learned_elsewhere(
    next_of: list[int],
) -> None:
    kept = Kept(policies=[learned_from(next_of)])
    batch, engine = fresh_engine(kept)
    engine.add("a", [1], 1, stream="other")
    engine.run()
    record, nothing = batch.heads.records[0], RowHeads.fresh(2).counts[0]
    known, unknown = (record.expected(nothing, stream)[0] for stream in (STREAM, "other"))
    assert (known > 0.85) if next_of is RIGHT else (known < 0.15)
    assert unknown == 0.5


def test_a_policy_that_tells_nothing_of_use_changes_nothing() -> None:
    kept = Kept(policies=[replace(learned_from(WRONG), accumulators={})])
    batch, engine = fresh_engine(kept)
    engine.add("a", [1], 1, stream=STREAM)
    engine.run()
    nothing = RowHeads.fresh(2).counts[0]
    assert batch.heads.records[0].expected(nothing, STREAM) == (0.5, 0.5)
    assert ("failures", "policy") not in kept.counts
