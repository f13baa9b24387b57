"""The record command over settings: the pool that is released, and early refusals."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.archive.recording_log import RecordingExistsError
from pipeline.learning import build_learner
from pipeline.messaging.event_logs import open_log
from pipeline.prompts import PromptsError
from pipeline.record_prompts import record_prompts
from replay.reader import LogReader
from tests.integration.tiny_run import DOMAINS, TinyRun, save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, model: Path) -> TinyRun:
    return TinyRun.make(tmp_path, model, num_prompts=3)


def recorded(run: TinyRun, *, resume: bool = False) -> str:
    """Record the run's prompts and return what the console showed."""
    shown = io.StringIO()
    record_prompts(
        run.settings,
        run.folder / "prompts.jsonl",
        run.folder / "recorded",
        max_tokens=12,
        temperature=0.0,
        resume=resume,
        stop=threading.Event(),
        console=Console(file=shown, width=200),
    )
    return shown.getvalue()


def test_a_head_without_release_is_named_and_no_data_folder_appears(run: TinyRun) -> None:
    shown = recorded(run)
    assert "head-recent was never released: it is recorded as proposing nothing" in shown
    assert "recorded 3 requests (3 conversations): 36 tokens" in shown
    assert not (run.folder / "data").exists()
    reader = LogReader(run.folder / "recorded")
    found = [logged.event for logged in reader]
    assert sorted(event.stream for event in found if event.is_final) == sorted(DOMAINS)
    assert {event.drafter_ids for event in found} == {
        tuple(one.drafter_id for one in run.settings.drafters)
    }
    assert "3 conversations were there already" in recorded(run, resume=True)


def test_released_weights_are_what_is_recorded(run: TinyRun) -> None:
    log = open_log(run.settings)
    build_learner(run.settings, log)  # releases heads that have none, untrained
    log.close()
    shown = recorded(run)
    assert "never released" not in shown
    event = next(iter(LogReader(run.folder / "recorded"))).event
    heads = [one for one in event.drafters if one.drafter_id.startswith("head")]
    assert len(heads) == 2
    assert all(one.draft_vocabulary_hash for one in heads)


def test_invalid_input_is_refused_before_the_model_is_loaded(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(run)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("pipeline.record_prompts.open_target", refuse)
    with pytest.raises(RecordingExistsError, match="holds a log already"):
        recorded(run)
    (run.folder / "prompts.jsonl").write_text("{}\n")
    with pytest.raises(PromptsError, match="line 1"):
        recorded(run)
