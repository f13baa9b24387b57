"""The real worker on a tiny model, re-run from its events: nothing differs, in any round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from inference.drafters.causal_lm import CausalLmDrafter
from inference.drafters.nothing import NothingDrafter
from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.engine import EngineOptions
from inference.pool import DrafterPool
from inference.ports import Drafter
from inference.sampling import SamplingParams
from inference.worker import Request, Worker, WorkerOptions
from replay.requests import RequestTrace, join_requests
from replay.rerun import verify_logged_rounds, verify_logged_selection, walk
from replay.selectors import logged_selector, selector_from_name
from schemas.events import NO_DRAFTER, PolicyPublished, VerificationEvent
from tests.inference.tiny import EOS, random_prompts, tiny_llama
from tests.replay.synthetic import log


class Collected:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[VerificationEvent] = []

    def emit(self, event: VerificationEvent) -> None:
        self.events.append(event)


class NothingNew:
    """Never brings a policy or a drafter."""

    def take_policies(self) -> Sequence[PolicyPublished]:
        return []

    def take_drafters(self) -> Sequence[Drafter]:
        return []


def served(
    *, policy: str, temperature: float = 0.0, draws_drafts: bool = False, num_requests: int = 3
) -> list[RequestTrace]:
    """Serve requests with a drafter as good as the target, a poor one, lookup, and none."""
    target = tiny_llama(1, eos_token_id=EOS)
    pool = DrafterPool(
        [
            NothingDrafter(),
            PromptLookupDrafter(),
            CausalLmDrafter(tiny_llama(1), target, drafter_id="twin"),
            CausalLmDrafter(tiny_llama(2), target, drafter_id="stranger"),
        ]
    )
    sink = Collected()
    engine = EngineOptions(num_speculative_tokens=4, score_block=3, draws_drafts=draws_drafts)
    options = WorkerOptions(
        worker_id="worker-0", worker_epoch=0, policy=policy, segment_tokens=20, engine=engine
    )
    worker = Worker(target, pool, options, sink=sink, inbox=NothingNew())
    for index, prompt in enumerate(random_prompts(0, count=num_requests, length=10)):
        worker.serve(
            Request(
                request_id=f"request-{index}",
                stream="stream-a",
                prompt_token_ids=prompt,
                params=SamplingParams(temperature=temperature, max_tokens=50, seed=index),
            )
        )
    return list(join_requests(log(sink.events)))


@pytest.mark.parametrize(
    ("policy", "temperature", "draws_drafts"),
    [
        ("normal_hedge", 0.0, False),
        ("hedge", 0.8, False),
        ("normal_hedge", 0.8, True),
        ("fixed:stranger", 0.0, False),
    ],
)
def test_every_round_and_every_selection_is_rebuilt(
    policy: str, temperature: float, draws_drafts: bool
) -> None:
    requests = served(policy=policy, temperature=temperature, draws_drafts=draws_drafts)
    assert all(request.is_complete for request in requests)
    for request in requests:
        check = verify_logged_rounds(request)
        assert [str(found) for found in check.disagreements] == []
        # Only a draft that begins at the last token could lack its window.
        assert check.num_checked >= check.num_rounds - 1
        selection = verify_logged_selection(request, logged_selector(request))
        assert [str(found) for found in selection] == []


@pytest.mark.parametrize("drafter", ["twin", "prompt-lookup", "stranger"])
def test_a_walk_with_the_drafter_that_served_takes_as_many_rounds(drafter: str) -> None:
    name = f"fixed:{drafter}"
    for request in served(policy=name):
        selector = selector_from_name(name)(request)
        found = walk(request, selector, np.random.default_rng(0))
        assert found.num_rounds == request.rounds.first_position.size
        assert (found.num_tokens, found.num_skipped_tokens) == (request.num_tokens, 0)


def test_a_walk_tells_what_serving_with_another_drafter_takes() -> None:
    """The text is the target's own, so a log made with one drafter foretells the rounds of all."""
    logged = served(policy="fixed:stranger")
    for name in ("fixed:twin", "fixed:prompt-lookup"):
        for foretold, real in zip(logged, served(policy=name), strict=True):
            selector = selector_from_name(name)(foretold)
            found = walk(foretold, selector, np.random.default_rng(0))
            assert found.num_rounds == real.rounds.first_position.size
            assert found.num_tokens == real.num_tokens


def test_the_twin_is_accepted_and_the_prompts_own_pass_has_no_drafter() -> None:
    (request,) = served(policy="fixed:twin", num_requests=1)
    assert request.rounds.drafter_index[0] == NO_DRAFTER
    assert request.rounds.num_accepted_tokens[1:-2].min() == 4
