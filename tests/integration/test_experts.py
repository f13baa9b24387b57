"""The loop with experts: traffic A-B-A on a real (tiny) target, everything over the event log."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
from rich.console import Console

from inference.sampling import SamplingParams
from inference.worker import Request
from pipeline.archiving import build_archiver
from pipeline.configuration.expert_settings import ExpertSection
from pipeline.configuration.pool_settings import DrafterSettings
from pipeline.configuration.settings import LearnerSettings, Settings
from pipeline.eventlog.ports import EventLog
from pipeline.learning import run_learner
from pipeline.messaging.boards import LogPolicyBoard, LogReleaseBoard, PolicyFollower
from pipeline.messaging.event_logs import open_log
from pipeline.releases.registry import DrafterRegistry
from pipeline.replaying import ReplayRequest, replay_log
from pipeline.wiring import open_target, start_worker
from schemas.codec import decode_drafter_released, decode_verification_event
from schemas.events import DrafterReleased, PolicyPublished, ReleaseState, VerificationEvent
from schemas.topics import DRAFTER_RELEASES, VERIFICATION_EVENTS
from tests.inference.tiny import plain_greedy
from tests.integration.tiny_run import TinyRun, save_tiny_model, wait_until

MAX_EXPERTS = 2
HEAD, EXPERT = "head", "head.expert-1"
PHASES = (("A", 30), ("B", 24), ("A", 10))
PROMPTS = {"A": ("abcabcabd", "bbcdaabca"), "B": ("zyxwvzyxu", "wwvuzzyxw")}
NUM_TOKENS = 32


def settings_of(run: TinyRun) -> Settings:
    """One head that follows what is newest and forgets the rest, and room for two experts."""
    learner = LearnerSettings(
        learning_rate=1e-2,
        batch_size=32,
        steps_per_event=4,
        draft_vocabulary_size=40,
        keep_versions=2,
    )
    head = DrafterSettings(drafter_id=HEAD, kind="hydra", inner_size=32, memory_positions=100)
    return run.settings.model_copy(
        update={
            "drafters": (DrafterSettings(drafter_id="none", kind="none"), head),
            "learner": learner,
            "experts": ExpertSection(max_experts=MAX_EXPERTS, hold_off_events=10),
        }
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What is left of the run."""

    lengths: Sequence[Sequence[float]]
    events: Sequence[VerificationEvent]
    releases: Sequence[DrafterReleased]
    policies: Sequence[PolicyPublished]
    outputs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]
    expert_versions: Sequence[int]
    num_disagreements: int


@pytest.fixture(scope="module")
def turn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Turn]:
    """Serve the phases, a request at a time, each learned before the next."""
    folder = tmp_path_factory.mktemp("experts")
    save_tiny_model(folder / "model")
    settings, stop = settings_of(TinyRun.make(folder, folder / "model")), threading.Event()
    lengths: list[list[float]] = []
    outputs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    with closing(open_log(settings)) as own, closing(open_log(settings)) as log:
        follower = PolicyFollower(log)
        learner = threading.Thread(target=run_learner, args=(settings, own, stop))
        learner.start()
        wait_until(lambda: len(LogReleaseBoard(log, source="test").read_all()) == 1)
        target = open_target(settings)
        running = start_worker(settings, target)
        for phase, (regime, num_requests) in enumerate(PHASES):
            lengths.append([])
            for number in range(num_requests):
                prompt = target.encode(PROMPTS[regime][number % 2])
                request = Request(
                    request_id=f"request-{phase}-{number}",
                    stream="code",
                    prompt_token_ids=prompt,
                    params=SamplingParams(max_tokens=NUM_TOKENS),
                    has_consent=True,
                )
                done = running.worker.serve(request)
                lengths[-1].append(len(done.token_ids) / len(done.rounds))
                outputs.append((tuple(prompt), done.token_ids))
                wait_until(lambda: _is_learned(follower, log))
        running.close()
        stop.set()
        learner.join()
        with build_archiver(settings, log) as archiver:
            archiver.drain()
        stored = log.read(VERIFICATION_EVENTS, 0, 0, max_messages=10_000)
        released = log.read(DRAFTER_RELEASES, 0, 0, max_messages=10_000)
        policies = LogPolicyBoard(log, source="test").read_all()
    distinct = sorted(set(outputs))
    plain = {prompt: tuple(plain_greedy(target, [prompt], NUM_TOKENS)[0]) for prompt, _ in distinct}
    analysis = replay_log(settings.data, ReplayRequest(), console=Console(quiet=True))
    yield Turn(
        lengths=lengths,
        events=[decode_verification_event(one.message.value or b"") for one in stored],
        releases=[decode_drafter_released(one.message.value or b"") for one in released],
        policies=policies,
        outputs=[(plain[prompt], found) for prompt, found in distinct],
        expert_versions=DrafterRegistry(str(settings.data)).versions(EXPERT),
        num_disagreements=analysis.summary.check.num_disagreements,
    )


def _is_learned(follower: PolicyFollower, log: EventLog) -> bool:
    learned = [one.watermark.partition_to_offset.get(0, 0) for one in follower.poll()]
    return max(learned, default=0) == log.end_offset(VERIFICATION_EVENTS, 0) > 0


def test_the_head_is_kept_as_an_expert_when_its_traffic_changes(turn: Turn) -> None:
    kept = [one for one in turn.releases if one.drafter_id == EXPERT]
    assert kept, [len(one) for one in turn.lengths]
    assert kept[0].state is ReleaseState.LIVE
    assert kept[0].architecture == turn.releases[0].architecture
    assert turn.expert_versions == [0]


def test_the_second_visit_to_a_starts_at_what_was_reached_in_the_first(turn: Turn) -> None:
    first, other, second = (np.array(one) for one in turn.lengths)
    assert first[-8:].mean() > 1.5 * first[:2].mean(), "A was learned"
    assert other[:4].mean() < 0.8 * first[-8:].mean(), "B is another regime"
    assert second[:8].mean() >= 0.97 * first[-8:].mean()


def test_the_live_pool_takes_the_expert_in_and_selection_plays_it(turn: Turn) -> None:
    pools = [event.drafter_ids for event in turn.events]
    assert pools[0] == ("none", HEAD)
    assert pools[-1][:3] == ("none", HEAD, EXPERT)
    played = [
        event.drafter_ids[index]
        for event in turn.events[-10:]
        for index in event.rounds.drafter_index
        if index >= 0
    ]
    assert EXPERT in played
    (policy,) = turn.policies
    assert EXPERT in [one.drafter_id for one in policy.drafters]


def test_the_pool_keeps_its_bound(turn: Turn) -> None:
    assert max(len(event.drafter_ids) for event in turn.events) <= 2 + MAX_EXPERTS


def test_outputs_are_the_targets_own_whoever_drafts(turn: Turn) -> None:
    for plain, found in turn.outputs:
        assert found == plain


def test_replay_rebuilds_every_decision_though_the_pool_grew(turn: Turn) -> None:
    assert turn.num_disagreements == 0
