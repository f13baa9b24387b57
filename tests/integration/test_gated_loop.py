"""The loop with the gate: shadows in the events, versions on trial, live only with evidence."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest
from rich.console import Console

from inference.sampling import SamplingParams
from inference.worker import Completion, Request
from learner.trial import is_shadow
from pipeline.archiving import build_archiver
from pipeline.eventlog.ports import EventLog
from pipeline.learning import run_learner
from pipeline.messaging.boards import LogPolicyBoard, LogReleaseBoard
from pipeline.messaging.event_logs import open_log
from pipeline.replaying import ReplayRequest, replay_log
from pipeline.wiring import open_target, start_worker
from schemas.codec import decode_drafter_released, decode_verification_event
from schemas.events import DrafterReleased, PolicyPublished, ReleaseState, VerificationEvent
from schemas.topics import DRAFTER_RELEASES, VERIFICATION_EVENTS
from tests.integration.tiny_run import TinyRun, save_tiny_model, wait_until

NUM_REQUESTS = 24
MOST_REQUESTS = 200
"""On a busy machine a worker hears late of versions on trial, and a trial lasts longer."""
GATE = """[gate]
error = 0.5
min_requests = 3
max_requests = 4
canary_share = 0.5
min_canary_requests = 1
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedTurn:
    """What is left: everything that travelled, in order."""

    events: Sequence[VerificationEvent]
    releases: Sequence[tuple[str, DrafterReleased]]
    policies: Sequence[PolicyPublished]
    completions: Sequence[Completion]
    num_disagreements: int


@pytest.fixture(scope="module")
def turn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatedTurn]:
    """Serve requests while a learner works beside, then archive and replay."""
    folder = tmp_path_factory.mktemp("gated")
    save_tiny_model(folder / "model")
    run = TinyRun.make(folder, folder / "model")
    run.edit_settings("[gate]\nenabled = false\n", GATE)
    run.edit_settings("batch_size = 32", "batch_size = 32\nsteps_per_event = 20")
    run.edit_settings("poll_seconds = 0.05", "poll_seconds = 0.01")
    settings, stop = run.settings, threading.Event()
    with closing(open_log(settings)) as own, closing(open_log(settings)) as log:
        learner = threading.Thread(target=run_learner, args=(settings, own, stop))
        learner.start()
        board = LogReleaseBoard(log, source="test")
        wait_until(lambda: len(board.read_all()) == 2)
        target = open_target(settings)
        running = start_worker(settings, target)
        completions = []
        rng = np.random.default_rng(0)
        for number in range(MOST_REQUESTS):
            if number >= NUM_REQUESTS and _is_promoted(log):
                break
            prompt = "".join(rng.choice(list("abcdefgh"), 12))
            request = Request(
                request_id=f"request-{number}",
                stream="code",
                prompt_token_ids=target.encode(prompt),
                params=SamplingParams(max_tokens=40),
                has_consent=True,
            )
            completions.append(running.worker.serve(request))
            wait_until(lambda: _is_learned(log))
        running.close()
        stop.set()
        learner.join()
        with build_archiver(settings, log) as archiver:
            archiver.drain()
        stored = log.read(VERIFICATION_EVENTS, 0, 0, max_messages=10_000)
        released = log.read(DRAFTER_RELEASES, 0, 0, max_messages=10_000)
        policies = LogPolicyBoard(log, source="test").read_all()
    analysis = replay_log(settings.data, ReplayRequest(), console=Console(quiet=True))
    yield GatedTurn(
        events=[decode_verification_event(one.message.value or b"") for one in stored],
        releases=[
            ((one.message.key or b"").decode(), decode_drafter_released(one.message.value or b""))
            for one in released
        ],
        policies=policies,
        completions=completions,
        num_disagreements=analysis.summary.check.num_disagreements,
    )


def _is_promoted(log: EventLog) -> bool:
    stored = log.read(DRAFTER_RELEASES, 0, 0, max_messages=10_000)
    releases = [decode_drafter_released(one.message.value or b"") for one in stored]
    return any(one.state is ReleaseState.LIVE and one.version > 0 for one in releases)


def _is_learned(log: EventLog) -> bool:
    policies = LogPolicyBoard(log, source="test").read_all()
    learned = max((p.watermark.partition_to_offset.get(0, 0) for p in policies), default=0)
    return learned == log.end_offset(VERIFICATION_EVENTS, 0) > 0


def test_versions_on_trial_are_scored_in_the_events_and_never_played(turn: GatedTurn) -> None:
    seen = [event for event in turn.events if any(map(is_shadow, event.drafter_ids))]
    assert seen
    for event in seen:
        for place, drafter_id in enumerate(event.drafter_ids):
            if is_shadow(drafter_id):
                assert event.num_awake_rounds[place] == 0
                assert not (event.rounds.drafter_index == place).any()
                scored = ~np.isnan(event.windows.acceptance_probability[:, 0, :])
                assert (scored[:, place] == scored.any(axis=1)).all()


def test_every_version_that_went_live_after_the_first_was_shown_to_be_better(
    turn: GatedTurn,
) -> None:
    live = [one for key, one in turn.releases if one.state is ReleaseState.LIVE]
    promoted = [one for one in live if one.reason.startswith(("better", "held"))]
    assert promoted, [(one.version, one.state, one.reason) for _, one in turn.releases]
    assert {one.version for one in live if one not in promoted} <= {0}
    for one in promoted:
        assert one.evidence is not None
        assert one.evidence.new_acceptance_length > one.evidence.old_acceptance_length


def test_a_canary_serves_requests_in_its_drafters_place_before_it_is_live(
    turn: GatedTurn,
) -> None:
    promoted = {
        (one.drafter_id, one.version)
        for _, one in turn.releases
        if one.state is ReleaseState.LIVE and one.version > 0
    }
    served = {
        (one.drafter_id, one.weights_version) for event in turn.events for one in event.drafters
    }
    assert promoted
    assert promoted <= served


def test_selection_learns_nothing_of_what_stands_beside(turn: GatedTurn) -> None:
    for policy in turn.policies:
        assert not any(is_shadow(one.drafter_id) for one in policy.drafters)


def test_replay_rebuilds_every_decision_though_versions_came_and_went(turn: GatedTurn) -> None:
    assert turn.num_disagreements == 0
