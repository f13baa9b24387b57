"""Services from settings: every setting reaches the part that it is meant for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from inference.drafters.hydra import HydraDrafter
from inference.sampling import SamplingParams
from inference.target import Target
from inference.worker import Request
from pipeline.archiving import build_archiver
from pipeline.configuration.pool_settings import DrafterSettings
from pipeline.configuration.settings import Settings, SettingsError
from pipeline.eventlog.ports import EventLog
from pipeline.learning import build_learner
from pipeline.messaging.boards import LogReleaseBoard
from pipeline.messaging.event_logs import open_log
from pipeline.releases.registry import DrafterRegistry
from pipeline.training import build_trainer, training_settings
from pipeline.wiring import open_target, start_worker
from schemas.codec import decode_verification_event
from schemas.events import VerificationEvent
from schemas.topics import VERIFICATION_EVENTS
from tests.integration.tiny_run import TinyRun, save_tiny_model
from tests.learner.trainers import placed, train

HEADS = ["head-recent", "head-replay"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, model: Path) -> TinyRun:
    return TinyRun.make(tmp_path, model)


@pytest.fixture
def log(run: TinyRun) -> Iterator[EventLog]:
    with closing(open_log(run.settings)) as opened:
        yield opened


@pytest.fixture
def target(run: TinyRun) -> Target:
    return open_target(run.settings)


def serve(settings: Settings, target: Target, *, stream: str) -> list[VerificationEvent]:
    """Serve one request and return the events as a tap sees them."""
    seen: list[VerificationEvent] = []
    running = start_worker(settings, target, tap=seen.append)
    running.worker.serve(
        Request(
            request_id="request-0",
            stream=stream,
            prompt_token_ids=[1, 2, 3, 1, 2, 3],
            params=SamplingParams(max_tokens=40),
            has_consent=True,
        )
    )
    assert running.close() == 0
    return seen


def test_the_tap_sees_what_reaches_the_log(run: TinyRun, log: EventLog, target: Target) -> None:
    seen = serve(run.settings, target, stream="code")
    stored = [
        decode_verification_event(one.message.value) for one in log.read(VERIFICATION_EVENTS, 0, 0)
    ]
    assert [event.event_id for event in stored] == [event.event_id for event in seen]
    assert len(seen) == 3  # 40 tokens in segments of 16


def test_settings_of_the_worker_reach_its_events(run: TinyRun, target: Target) -> None:
    run.edit_settings("segment_tokens = 16", "segment_tokens = 100\nnum_speculative_tokens = 2")
    run.edit_settings("poll_seconds", 'policy = "fixed:lookup"\nworker_id = "w-7"\npoll_seconds')
    (event,) = serve(run.settings, target, stream="code")
    assert event.worker_id == "w-7"
    assert event.policy_name == "fixed:lookup"
    assert event.windows.acceptance_probability.shape[1] == 2
    assert {event.drafter_ids[i] for i in event.rounds.drafter_index if i >= 0} == {"lookup"}
    assert event.drafter_ids == tuple(one.drafter_id for one in run.settings.drafters)


@pytest.mark.parametrize("source", ["recomputed", "recorded_or_recomputed", "recorded"])
def test_heads_learn_from_tokens_alone_only_where_states_are_recomputed(
    run: TinyRun, log: EventLog, target: Target, source: str
) -> None:
    run.edit_settings("enabled = true", f'enabled = false\nsource = "{source}"')
    seen = serve(run.settings, target, stream="code")
    assert seen[0].content is not None
    assert seen[0].content.features is None
    trainer = build_trainer(run.settings, LogReleaseBoard(log, source="test"))
    train(trainer, placed(seen))
    versions = {one.version for one in LogReleaseBoard(log, source="test").read_all()}
    assert versions == {0 if source == "recorded" else 1}
    assert trainer.num_without_features == (len(seen) if source == "recorded" else 0)


def test_no_two_starts_of_a_worker_have_one_epoch(run: TinyRun, target: Target) -> None:
    events = [serve(run.settings, target, stream="code")[0] for _ in range(2)]
    assert events[0].worker_epoch < events[1].worker_epoch


def test_features_are_recorded_only_where_they_are_switched_on(
    run: TinyRun, target: Target
) -> None:
    assert serve(run.settings, target, stream="code")[0].content is not None
    assert list((run.settings.data / "features").rglob("*.safetensors"))
    run.edit_settings("enabled = true", "enabled = false")
    run.edit_settings('/data"', '/other"')
    (event, *_) = serve(run.settings, target, stream="code")
    assert event.content is not None
    assert event.content.features is None
    assert not (run.settings.data / "features").exists()


def test_a_new_learner_releases_untrained_heads_that_the_worker_takes_up(
    run: TinyRun, log: EventLog, target: Target
) -> None:
    build_learner(run.settings, log)
    releases = {one.drafter_id: one for one in LogReleaseBoard(log, source="test").read_all()}
    assert sorted(releases) == HEADS
    assert {one.version for one in releases.values()} == {0}
    running = start_worker(run.settings, target)
    taken = running.worker._inbox.take_drafters()
    running.close()
    assert sorted(one.version.drafter_id for one in taken) == HEADS
    assert all(isinstance(one, HydraDrafter) for one in taken)


def test_a_learner_that_comes_back_releases_nothing_and_keeps_the_draft_vocabulary(
    run: TinyRun, log: EventLog
) -> None:
    build_learner(run.settings, log)
    before = LogReleaseBoard(log, source="test").read_all()
    run.edit_settings("draft_vocabulary_size = 30", "draft_vocabulary_size = 20")
    build_learner(run.settings, log)
    assert LogReleaseBoard(log, source="test").read_all() == before
    assert DrafterRegistry(str(run.settings.data)).versions(HEADS[0]) == [0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("batch_size = 32", "steps_per_event = 0"),
        ("segment_tokens = 16", "num_speculative_tokens = 0"),
    ],
)
def test_a_learner_that_has_nothing_to_train_needs_no_target(
    run: TinyRun, log: EventLog, old: str, new: str
) -> None:
    run.edit_settings(old, new)
    run.edit_settings('[model]\npath = "', '[model]\npath = "/no')
    build_learner(run.settings, log)
    assert LogReleaseBoard(log, source="test").read_all() == []


def test_settings_of_the_learner_reach_the_training() -> None:
    settings = Settings.model_validate(
        {
            "worker": {"num_speculative_tokens": 3},
            "learner": {
                "learning_rate": 0.5,
                "steps_per_event": 7,
                "batch_size": 11,
                "publish_weights_every_events": 13,
                "keep_versions": 17,
                "seed": 19,
                "update_rule": "ensemble:num_experts=2",
            },
            "experts": {"max_experts": 2, "delta": 0.1, "hold_off_events": 5, "min_fall": 0.4},
        }
    )
    head = DrafterSettings(drafter_id="a", kind="hydra", memory_positions=23, replay_bytes=29)
    found = training_settings(settings, head)
    assert found.rule == "ensemble:num_experts=2"
    assert (found.num_levels, found.steps_per_event, found.batch_size) == (3, 7, 11)
    assert (found.release_every_events, found.keep_versions, found.seed) == (13, 17, 19)
    assert (found.memory_positions, found.gradient.learning_rate) == (23, 0.5)
    assert (found.replay_bytes, training_settings(Settings(), head).experts) == (29, None)
    fewer = settings.learner.model_copy(update={"training_levels": 2})
    assert training_settings(settings.model_copy(update={"learner": fewer}), head).num_levels == 2
    assert found.experts is not None
    assert found.experts.max_experts == 2
    drift = found.experts.drift
    assert (drift.delta, drift.hold_off, drift.min_fall) == (0.1, 5, 0.4)


def test_the_archiver_writes_what_a_worker_sent(
    run: TinyRun, log: EventLog, target: Target
) -> None:
    seen = serve(run.settings, target, stream="code")
    with build_archiver(run.settings, log) as archiver:
        archiver.drain()
    assert archiver.num_events == len(seen)


@pytest.mark.parametrize("name", ["absent", "no-utf8"])
def test_invalid_draft_vocabulary_texts_are_named(run: TinyRun, log: EventLog, name: str) -> None:
    path = run.folder / name
    (run.folder / "no-utf8").write_bytes(b"\xff\xfe")
    run.edit_settings("[learner]\n", f'[learner]\ndraft_vocabulary_text = "{path}"\n')
    with pytest.raises(SettingsError, match=f"draft_vocabulary_text = '{path}'"):
        build_learner(run.settings, log)
    assert LogReleaseBoard(log, source="test").read_all() == []
