"""Versions on trial inside vLLM: scored beside their head, serving the requests of a canary."""

from __future__ import annotations

import numpy as np
import pytest

from inference.shadows import beside, nothing_beside
from learner.trial import Trial, shadow_id
from schemas.codec import decode_verification_event, encode
from tests.inference.test_vllm_heads import RIGHT, VOCAB, WRONG, fresh_engine, head
from tests.inference.vllm_fakes import FakeEngine, Kept

NUM_REQUESTS = 24
LATER = [f"later-{number}" for number in range(NUM_REQUESTS)]


@pytest.fixture
def kept() -> Kept:
    return Kept(waiting=[head(WRONG, version=1)])


def serve(engine: FakeEngine, names: list[str]) -> None:
    for number, name in enumerate(names):
        engine.add(name, [number % VOCAB], 12, stream=f"s-{name}")
    engine.run()


def on_trial(kept: Kept, canary_share: float) -> Trial:
    """Put the right version on trial beside the wrong one, serve, and return the comparison."""
    batch, engine = fresh_engine(kept, scoring_share=1e4)
    serve(engine, ["before"])
    kept.waiting = [beside(head(RIGHT, version=2), canary_share=canary_share)]
    serve(engine, LATER)
    batch.close()
    trial = Trial(drafter_id="head", new=2, old=1)
    for event in kept.events:
        trial.add(decode_verification_event(encode(event)))
    return trial


def drafted_by_head(kept: Kept) -> bool:
    return any(
        bool((event.rounds.drafter_index == 3).any())
        for name in LATER
        for event in kept.of_request(name)
    )


def test_a_version_on_trial_is_compared_with_the_live_one_and_drafts_nothing(kept: Kept) -> None:
    trial = on_trial(kept, 0.0)
    assert trial.num_requests > NUM_REQUESTS // 2
    assert not trial.failed_requests
    assert not trial.canary_requests
    _, new, old = np.array(list(trial.request_to_sums.values())).sum(axis=0)
    assert new > 2.0 * old
    last = kept.of_request(LATER[-1])[-1]
    assert [one.weights_version for one in last.drafters[3:]] == [1, 2]
    assert last.drafters[4].drafter_id == shadow_id("head")
    accepted = kept.counts.get(("accepted_tokens", "head"), 0.0)
    assert accepted <= 0.2 * kept.counts["draft_tokens", "head"]


def test_a_canary_drafts_in_its_requests_and_the_live_version_is_scored_beside_it(
    kept: Kept,
) -> None:
    trial = on_trial(kept, 0.5)
    assert not trial.failed_requests
    assert 0 < len(trial.canary_requests) < trial.num_requests
    for name in LATER:
        event = kept.of_request(name)[-1]
        own, other = (one.weights_version for one in event.drafters[3:])
        assert {own, other} == {1, 2}
        drafted = event.rounds.drafter_index == 3
        if own == 2 and drafted.any():
            assert event.rounds.num_accepted_tokens[drafted].sum() > 0
    assert drafted_by_head(kept)


def test_a_trial_that_ends_leaves_the_pool_as_it_was(kept: Kept) -> None:
    batch, engine = fresh_engine(kept, scoring_share=1e4)
    serve(engine, ["before"])
    kept.waiting = [beside(head(RIGHT, version=2), canary_share=0.9)]
    serve(engine, ["during"])
    kept.waiting = [nothing_beside("head")]
    serve(engine, ["after"])
    batch.close()
    assert len(kept.of_request("during")[0].drafters) == 5
    assert [one.weights_version for one in kept.of_request("after")[-1].drafters] == [0, 0, 0, 1]


def test_a_version_that_went_live_is_no_longer_beside_itself(kept: Kept) -> None:
    batch, engine = fresh_engine(kept, scoring_share=1e4)
    serve(engine, ["before"])
    kept.waiting = [beside(head(RIGHT, version=2))]
    serve(engine, ["during"])
    kept.waiting = [head(RIGHT, version=2)]
    serve(engine, ["after"])
    batch.close()
    assert [one.weights_version for one in kept.of_request("after")[-1].drafters] == [0, 0, 0, 2]
