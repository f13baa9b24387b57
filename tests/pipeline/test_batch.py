"""The batch client: answers in order, prompts that do not fit left out, nothing lost in silence."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from pipeline import wiring
from pipeline.batch import UnsentEventsError, serve_prompts
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import EventLogError, Message
from pipeline.locks import LockError, only_one
from pipeline.messaging.event_logs import open_log
from schemas.codec import decode_verification_event
from schemas.errors import ContractError
from schemas.events import VerificationEvent
from schemas.topics import VERIFICATION_EVENTS
from tests.integration.tiny_run import TinyRun, save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, model: Path) -> TinyRun:
    return TinyRun.make(tmp_path, model, num_prompts=3)


def serve(
    run: TinyRun,
    *,
    stream: str = "",
    stop: threading.Event | None = None,
    max_tokens: int = 100,
    answers: io.StringIO | None = None,
) -> list[str]:
    """Serve the run's prompts and return the answers, which are also written to ``answers``."""
    answers = answers or io.StringIO()
    serve_prompts(
        run.settings,
        run.folder / "prompts.jsonl",
        stream=stream,
        max_tokens=max_tokens,
        temperature=0.0,
        stop=stop or threading.Event(),
        console=Console(file=io.StringIO()),
        out=Console(file=answers, width=60),
    )
    return answers.getvalue().splitlines()


def events(run: TinyRun) -> list[VerificationEvent]:
    log = open_log(run.settings)
    stored = log.read(VERIFICATION_EVENTS, 0, 0)
    log.close()
    return [decode_verification_event(one.message.value) for one in stored]


def test_an_answer_is_one_line_however_long(run: TinyRun) -> None:
    answers = serve(run)
    assert len(answers) == 3
    assert min(map(len, answers)) > 60  # the width of the console


def test_a_stream_of_ones_own_takes_the_place_of_the_domains(run: TinyRun) -> None:
    serve(run, stream="support", max_tokens=4)
    found = events(run)
    assert {event.stream for event in found} == {"support"}
    assert {event.content for event in found} == {None}  # it has not consented


def test_nothing_is_served_once_it_is_told_to_stop(run: TinyRun) -> None:
    stop = threading.Event()
    stop.set()
    answers = serve(run, stop=stop)
    assert answers == []
    assert events(run) == []


def test_events_that_cannot_be_sent_end_in_an_error_after_the_last_answer(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(
        log: EmbeddedEventLog, topic: str, messages: Sequence[Message]
    ) -> Sequence[tuple[int, int]]:
        raise EventLogError("disk full")

    monkeypatch.setattr(EmbeddedEventLog, "append", refuse)
    monkeypatch.setattr(wiring, "CLOSE_SECONDS", 0.2)
    answers = io.StringIO()
    with pytest.raises(UnsentEventsError, match="3 events could not be sent"):
        serve(run, max_tokens=4, answers=answers)
    assert len(answers.getvalue().splitlines()) == 3


def test_invalid_streams_and_second_workers_are_refused_before_the_model_is_loaded(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("pipeline.batch.open_target", refuse)
    with pytest.raises(ContractError, match="--stream: found 'a b'"):
        serve(run, stream="a b")
    with (
        only_one(run.settings.data, "worker worker-0", cure=""),
        pytest.raises(LockError, match="another worker worker-0"),
    ):
        serve(run)
