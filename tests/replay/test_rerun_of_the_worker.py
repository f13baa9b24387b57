"""The real worker on a tiny model, re-run from its events: nothing differs, in any round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from inference.drafters.causal_lm import CausalLmDrafter
from inference.drafters.nothing import NothingDrafter
from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.engine import EngineOptions
from inference.pool import DrafterPool
from inference.ports import Draft, Drafter, DraftSession, Predictions, WindowBatch
from inference.sampling import SamplingParams
from inference.target import Target
from inference.trajectory import Trajectory
from inference.worker import Request, Worker, WorkerOptions
from learner.carried import packed
from learner.selection import DEFAULT_POLICY
from learner.stream_state import StreamSettings, StreamState
from replay.requests import RequestTrace, join_requests
from replay.rerun import verify_logged_rounds, verify_logged_selection
from replay.selectors import logged_selector
from replay.walks import ROUNDS, SKIPPED, TOKENS, PolicyWalks, WalkOptions
from schemas.events import NO_DRAFTER, VerificationEvent
from tests.inference.serving import Outbox
from tests.inference.tiny import EOS, random_prompts, tiny_llama
from tests.learner.fakes import PlacedEvent
from tests.replay.synthetic import START, log

FLOAT32 = 6e-8
"""Rounding of the probabilities in events."""

AHEAD = pytest.mark.parametrize("ahead", [0, 1])
"""Whether level 1 is learned ahead of its window."""

POLICIES = [
    DEFAULT_POLICY,
    f"{DEFAULT_POLICY}:scope=both",
    "normal_hedge",
    "hedge",
    "fixed_share:choice=sticky",
    "fixed_share:choice=sample,loss=hybrid",
    "discounted_follow_the_leader",
    "exp3spec",
    "ucb:scope=stream",
    "fixed:stranger",
]


class FailingDrafter:
    """Behaves as another drafter, and fails for good at its n-th draft or n-th scoring.

    A new version of it starts over.
    """

    def __init__(
        self, inner: Drafter, *, drafts: int = 10**9, scorings: int = 10**9, version: int = 0
    ) -> None:
        self._inner = inner
        self._drafts, self._scorings = drafts, scorings
        self.version = replace(inner.version, weights_version=version)

    def start(self, trajectory: Trajectory, *, stream: str, draws_drafts: bool) -> DraftSession:
        inner = self._inner.start(trajectory, stream=stream, draws_drafts=draws_drafts)
        return FailingSession(inner, self._drafts, self._scorings)


@dataclass
class FailingSession:
    """One request of a failing drafter."""

    inner: DraftSession
    drafts: int
    scorings: int

    def draft(self, num_tokens: int, rng: np.random.Generator) -> Draft:
        self.drafts -= 1
        if self.drafts < 0:
            raise RuntimeError("no more drafts")
        return self.inner.draft(num_tokens, rng)

    def predict(self, windows: WindowBatch) -> Predictions:
        self.scorings -= 1
        if self.scorings < 0:
            raise RuntimeError("no more scoring")
        return self.inner.predict(windows)

    def finish(self) -> None:
        self.inner.finish()


def drafters_of(target: Target) -> list[Drafter]:
    """Return none, lookup, a drafter as good as the target, and a poor one."""
    return [
        NothingDrafter(),
        PromptLookupDrafter(),
        CausalLmDrafter(tiny_llama(1), target, drafter_id="twin"),
        CausalLmDrafter(tiny_llama(2), target, drafter_id="stranger"),
    ]


def served(
    *,
    policy: str,
    temperature: float = 0.0,
    draws_drafts: bool = False,
    num_requests: int = 3,
    first_level_block: int = 0,
    drafters: Callable[[Target], list[Drafter]] = drafters_of,
    on_round: Callable[[Outbox], None] = lambda _: None,
) -> list[VerificationEvent]:
    """Serve requests of one stream one after the other and return what was reported."""
    target, outbox = tiny_llama(1, eos_token_id=EOS), Outbox()
    engine = EngineOptions(
        num_speculative_tokens=4,
        score_block=3,
        first_level_block=first_level_block,
        draws_drafts=draws_drafts,
    )
    options = WorkerOptions(
        worker_id="worker-0", worker_epoch=0, policy=policy, segment_tokens=20, engine=engine
    )
    pool = DrafterPool(drafters(target))
    worker = Worker(target, pool, options, sink=outbox, inbox=outbox)
    for index, prompt in enumerate(random_prompts(0, count=num_requests, length=10)):
        worker.serve(
            Request(
                request_id=f"request-{index}",
                stream="stream-a",
                prompt_token_ids=prompt,
                params=SamplingParams(temperature=temperature, max_tokens=50, seed=index),
            ),
            on_round=lambda _: on_round(outbox),
        )
    return outbox.events


def joined(events: Sequence[VerificationEvent]) -> list[RequestTrace]:
    return list(join_requests(log(events)))


def check_re_run(events: Sequence[VerificationEvent]) -> int:
    """Check that nothing differs in any round, and return how many rounds were selected."""
    num_selected = 0
    for request in joined(events):
        assert request.is_complete
        check = verify_logged_rounds(request)
        assert [str(found) for found in check.disagreements] == []
        selection = verify_logged_selection(request, logged_selector(request), tolerance=FLOAT32)
        assert [str(found) for found in selection] == []
        num_selected += int((request.rounds.drafter_index != NO_DRAFTER).sum())
    return num_selected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("temperature", "draws_drafts", "ahead"),
    [(0.0, False, 0), (0.0, False, 1), (0.8, False, 2), (0.8, True, 0), (0.8, True, 1)],
)
def test_every_round_and_every_selection_is_rebuilt(
    policy: str, temperature: float, draws_drafts: bool, ahead: int
) -> None:
    events = served(
        policy=policy,
        temperature=temperature,
        draws_drafts=draws_drafts,
        first_level_block=ahead,
    )
    assert check_re_run(events) > 20
    for request in joined(events):
        # Only a draft that begins at the last token could lack its window.
        check = verify_logged_rounds(request)
        assert check.num_checked >= check.num_rounds - 1


@pytest.mark.parametrize("policy", [DEFAULT_POLICY, "fixed_share", "ucb:scope=stream"])
def test_a_carried_state_is_logged_and_is_needed(policy: str) -> None:
    requests = joined(served(policy=policy))
    assert requests[0].policy_table.size == 0
    assert all(request.policy_table.size > 0 for request in requests[1:])
    afresh = replace(requests[2], policy_table=np.empty(0), policy_numbers=np.empty(0))
    assert verify_logged_selection(afresh, logged_selector(afresh))


@pytest.mark.parametrize("policy", [DEFAULT_POLICY, "normal_hedge", "fixed_share"])
@pytest.mark.parametrize("fails", [{"drafts": 2}, {"scorings": 2}, {"scorings": 0}])
@AHEAD
def test_rounds_before_and_after_a_drafter_fell_asleep_are_rebuilt(
    policy: str, fails: dict[str, int], ahead: int
) -> None:
    """It fails in the middle of a segment: scored windows tell that only later."""

    def drafters(target: Target) -> list[Drafter]:
        return [FailingDrafter(one, **fails) for one in drafters_of(target)[1:3]] + [
            *drafters_of(target)[3:]
        ]

    events = served(policy=policy, drafters=drafters, first_level_block=ahead)
    assert any(np.isnan(event.windows.acceptance_probability).any() for event in events)
    assert any(
        0 < count < event.rounds.first_position.size
        for event in events
        for count in event.num_awake_rounds
    )
    assert check_re_run(events) > 20


@pytest.mark.parametrize("policy", [DEFAULT_POLICY, "fixed_share", "normal_hedge"])
@AHEAD
def test_drafters_that_sleep_and_wake_with_new_weights_are_rebuilt(policy: str, ahead: int) -> None:
    target = tiny_llama(1, eos_token_id=EOS)
    versions = iter(range(1, 1000))

    def drafters(target: Target) -> list[Drafter]:
        nothing, lookup, twin, stranger = drafters_of(target)
        return [nothing, lookup, FailingDrafter(twin, scorings=1), stranger]

    def arrive(outbox: Outbox) -> None:
        twin = CausalLmDrafter(tiny_llama(1), target, drafter_id="twin")
        outbox.drafters = [FailingDrafter(twin, scorings=1, version=next(versions))]

    events = served(policy=policy, drafters=drafters, on_round=arrive, first_level_block=ahead)
    assert len({event.drafters[2].weights_version for event in events}) > 4
    assert check_re_run(events) > 20


def test_a_published_state_that_is_taken_over_in_between_is_rebuilt() -> None:
    """The learner's own events come back as a policy: the next request starts from it."""
    learned = StreamState(stream="stream-a")
    settings = StreamSettings()
    offsets = iter(range(10_000))
    num_seen = 0

    def publish(outbox: Outbox) -> None:
        nonlocal learned, num_seen
        for event in outbox.events[num_seen:]:
            placed = PlacedEvent(partition=0, offset=next(offsets), event=event)
            learned, _ = learned.learned(placed, settings)
            outbox.policies = [learned.to_policy(settings, learner_id="l", produced_at=START)]
        num_seen = len(outbox.events)

    events = served(policy=DEFAULT_POLICY, on_round=publish, num_requests=4)
    assert {event.policy_version for event in events if event.segment_index == 0} != {0}
    assert check_re_run(events) > 20


@AHEAD
def test_the_learner_of_one_worker_reaches_the_workers_own_state_bit_for_bit(ahead: int) -> None:
    events = served(policy=DEFAULT_POLICY, first_level_block=ahead)
    state = StreamState(stream="stream-a")
    starts = []
    for offset, event in enumerate(events):
        if event.segment_index == 0 and offset:
            starts.append((event, state.policy))
        placed = PlacedEvent(partition=0, offset=offset, event=event)
        state, _ = state.learned(placed, StreamSettings())
    assert len(starts) == 2
    for event, policy in starts:
        assert policy is not None
        table, numbers = packed(policy)
        assert event.policy_table.tobytes() == table.tobytes()
        assert event.policy_numbers.tobytes() == numbers.tobytes()


def walked(requests: Sequence[RequestTrace], policy: str) -> NDArray[np.float64]:
    """Return rounds, tokens, and tokens passed over of each request."""
    walks = PolicyWalks(WalkOptions(policies=(policy,)), np.random.default_rng(0))
    for request in requests:
        walks.add(request)
    return walks.sums[0].counts.rows[:, [ROUNDS, TOKENS, SKIPPED]]


def logged_counts(requests: Sequence[RequestTrace]) -> list[list[int]]:
    return [[one.rounds.first_position.size, one.num_tokens, 0] for one in requests]


@pytest.mark.parametrize("drafter", ["twin", "prompt-lookup", "stranger"])
def test_a_walk_with_the_drafter_that_served_takes_as_many_rounds(drafter: str) -> None:
    requests = joined(served(policy=f"fixed:{drafter}"))
    assert walked(requests, f"fixed:{drafter}").tolist() == logged_counts(requests)


def test_a_walk_tells_what_serving_with_another_drafter_takes() -> None:
    """The text is the target's own, so a log made with one drafter foretells the rounds of all."""
    logged = joined(served(policy="fixed:stranger"))
    for name in ("fixed:twin", "fixed:prompt-lookup"):
        assert walked(logged, name).tolist() == logged_counts(joined(served(policy=name)))


def test_the_twin_is_accepted_and_the_prompts_own_pass_has_no_drafter() -> None:
    (request,) = joined(served(policy="fixed:twin", num_requests=1))
    assert request.rounds.drafter_index[0] == NO_DRAFTER
    assert request.rounds.num_accepted_tokens[1:-2].min() == 4
