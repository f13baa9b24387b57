"""Recordings by the real worker on a tiny model: what replay rebuilds, what survives a stop."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from inference.drafters.suffix import SuffixDrafter
from inference.engine import EngineOptions
from inference.ports import Drafter
from inference.sampling import SamplingParams
from inference.target import Target
from inference.worker import Completion, Request, Worker
from pipeline.archive.recording_log import RecordingExistsError
from pipeline.bench.conversations import Conversation
from pipeline.locks import LockError, only_one
from pipeline.recording import Recorded, RecordingOptions, record
from replay.analysis import analyse
from replay.reader import LogReader
from replay.requests import RequestTrace, join_requests
from replay.rerun import verify_logged_rounds, verify_logged_selection
from replay.selectors import logged_selector
from schemas.arrow import events_from_table, read_table
from schemas.events import AcceptanceRule, FinishReason, VerificationEvent
from tests.inference.runs import all_drafters
from tests.inference.tiny import EOS, tiny_llama

MAX_TOKENS = 20


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_llama(1, eos_token_id=EOS)


@pytest.fixture(scope="module")
def drafters(target: Target) -> list[Drafter]:
    # The fake one cannot be scored when drawn, and shared history would tie recordings together.
    several = [one for one in all_drafters(target, tiny_llama(2))[:-1] if not _shares(one)]
    return [*several, SuffixDrafter(share_history=False)]


def _shares(drafter: Drafter) -> bool:
    return isinstance(drafter, SuffixDrafter)


def conversations(count: int = 5) -> list[Conversation]:
    """Return prompts of two streams, and as the last a conversation of three turns."""
    single = [
        Conversation(
            conversation_id=f"{stream}-{index:02}",
            stream=stream,
            turns=("abcdabcdab"[index:] + "e",),
        )
        for index in range(count - 1)
        for stream in ("code" if index % 2 else "maths",)
    ]
    turns = ("abc", "defg", "abca")
    return [
        *single,
        Conversation(conversation_id="shift-00", stream="shift", turns=turns, max_tokens=7),
    ]


def options(out: Path, **changes: object) -> RecordingOptions:
    values: dict[str, object] = {
        "out": out,
        "sampling": SamplingParams(max_tokens=MAX_TOKENS),
        "policy": "normal_hedge",
        "engine": EngineOptions(num_speculative_tokens=3, score_block=2),
    }
    return RecordingOptions(**(values | changes))  # type: ignore[arg-type]


def run(
    target: Target,
    drafters: Sequence[Drafter],
    chosen: RecordingOptions,
    *,
    what: Sequence[Conversation] | None = None,
    stop: threading.Event | None = None,
    out: io.StringIO | None = None,
) -> Recorded:
    return record(
        target,
        drafters,
        conversations() if what is None else what,
        chosen,
        stop=stop or threading.Event(),
        console=Console(file=out or io.StringIO(), width=200),
    )


def traces(folder: Path) -> dict[str, RequestTrace]:
    return {one.request_id: one for one in join_requests(LogReader(folder))}


def events(folder: Path) -> list[VerificationEvent]:
    return [logged.event for logged in LogReader(folder)]


@pytest.mark.parametrize(
    ("temperature", "draws_drafts", "rule"),
    [
        (0.0, False, AcceptanceRule.GREEDY),
        (0.8, False, AcceptanceRule.ONE_HOT),
        (0.8, True, AcceptanceRule.SPECULATIVE_SAMPLING),
    ],
)
def test_every_round_and_window_of_every_drafter_is_rebuilt_from_the_log(
    target: Target,
    drafters: list[Drafter],
    tmp_path: Path,
    temperature: float,
    draws_drafts: bool,
    rule: AcceptanceRule,
) -> None:
    engine = EngineOptions(num_speculative_tokens=3, score_block=2, draws_drafts=draws_drafts)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature)
    result = run(target, drafters, options(tmp_path, sampling=sampling, engine=engine))
    found = traces(tmp_path)
    assert {event.sampling.acceptance_rule for event in events(tmp_path)} == {rule}
    assert result.num_requests == len(found) == 7
    assert result.num_tokens == sum(one.num_tokens for one in found.values())
    assert result.num_windows == sum(one.windows.start.size for one in found.values()) > 0
    for trace in found.values():
        assert trace.is_complete
        check = verify_logged_rounds(trace)
        assert not check.disagreements
        assert check.num_checked >= check.num_rounds - 1  # the last may have no window
        assert not verify_logged_selection(trace, logged_selector(trace))
        # Full information: a level is scored for all drafters or, beyond the end, for none.
        is_scored = ~np.isnan(trace.windows.acceptance_probability)
        levels = np.arange(3) < trace.windows.num_levels[:, None]
        assert (is_scored == levels[:, :, None]).all()
        starts = trace.windows.start
        assert (starts == np.arange(starts.size) + trace.first_position + 1).all()
        # The count per round is what was learned then, whatever the block.
        assert trace.rounds.num_scored_windows.sum() == starts.size


def test_the_block_of_scoring_changes_no_window(
    target: Target, drafters: list[Drafter], tmp_path: Path
) -> None:
    for name, block in (("few", 2), ("all", 32_000)):
        engine = EngineOptions(num_speculative_tokens=3, score_block=block)
        run(target, drafters, options(tmp_path / name, engine=engine, policy="fixed:copy"))
    few, all_at_once = traces(tmp_path / "few"), traces(tmp_path / "all")
    assert few.keys() == all_at_once.keys()
    for name, one in few.items():
        other = all_at_once[name]
        assert (one.windows.start == other.windows.start).all()
        for quantity in ("acceptance_probability", "realised_acceptance"):
            np.testing.assert_array_equal(
                getattr(one.windows, quantity), getattr(other.windows, quantity)
            )
        assert (one.rounds.first_position == other.rounds.first_position).all()
    # What a re-run learns at a time, as far as the rounds show; at the end does not count.
    assert few["code-01"].score_block > 1
    assert all_at_once["code-01"].score_block == 1


def test_replay_reads_a_recording_as_it_reads_the_archive(
    target: Target, drafters: list[Drafter], tmp_path: Path
) -> None:
    run(target, drafters, options(tmp_path))
    summary = analyse(tmp_path, np.random.default_rng(0), policies=["normal_hedge"]).summary
    assert summary.check.num_disagreements == 0
    assert summary.log.problems == ()
    assert set(summary.log.streams) == {"code", "maths", "shift"}
    assert summary.log.num_duplicates == 0
    path = next(tmp_path.glob("events/date=*/hour=*/*.parquet"))
    assert path.name.startswith("draftloop.verification-events-00000-00000000")


def test_each_turn_of_a_conversation_is_a_request_with_the_history_in_its_prompt(
    target: Target, drafters: list[Drafter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[Request, Completion]] = []
    original = Worker.serve

    def serve(worker: Worker, request: Request, **keywords: object) -> Completion:
        completion = original(worker, request, **keywords)  # type: ignore[arg-type]
        served.append((request, completion))
        return completion

    monkeypatch.setattr(Worker, "serve", serve)
    run(target, drafters, options(tmp_path), what=conversations()[-1:])
    assert [request.request_id for request, _ in served] == [f"shift-00:{n}" for n in (1, 2, 3)]
    assert {request.params.max_tokens for request, _ in served} == {7}
    texts: list[str] = []
    for (request, completion), turn in zip(served, ("abc", "defg", "abca"), strict=True):
        texts.append(turn)
        assert list(request.prompt_token_ids) == target.encode_conversation(texts)
        texts.append(completion.text)
    found = traces(tmp_path)
    assert list(found) == [request.request_id for request, _ in served]
    assert found["shift-00:3"].first_position == len(served[2][0].prompt_token_ids)


def test_content_is_recorded_for_consenting_streams_alone(
    target: Target, drafters: list[Drafter], tmp_path: Path
) -> None:
    run(target, drafters, options(tmp_path, consenting_streams=frozenset({"code"})))
    paths = sorted(tmp_path.glob("events/date=*/hour=*/*.parquet"))
    found = [row.event for path in paths for row in events_from_table(read_table(path))]
    assert {event.stream for event in found if event.content is not None} == {"code"}


class StopAfter(threading.Event):
    """Is set once it has been asked so many times."""

    def __init__(self, num_asked: int) -> None:
        super().__init__()
        self._left = num_asked

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


@pytest.mark.parametrize(("num_asked", "temperature"), [(0, 0.0), (8, 0.8), (25, 0.8), (33, 0.0)])
def test_an_interrupted_recording_keeps_what_was_complete_and_resumes_to_what_one_run_gives(
    target: Target, drafters: list[Drafter], tmp_path: Path, num_asked: int, temperature: float
) -> None:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature)
    whole = options(tmp_path / "whole", sampling=sampling, policy="fixed:suffix")
    run(target, drafters, whole)
    expected = traces(tmp_path / "whole")
    part = options(tmp_path / "part", sampling=sampling, policy="fixed:suffix")
    result = run(target, drafters, part, stop=StopAfter(num_asked))
    assert result.is_interrupted
    assert not list((tmp_path / "part").rglob("_*.parquet"))
    if result.num_requests:
        found = traces(tmp_path / "part")
        assert len(found) == result.num_requests < len(expected)
        assert all(one.is_complete for one in found.values())
        assert not any(name.startswith("shift") for name in found)  # a part of one is none
    resumed = options(tmp_path / "part", sampling=sampling, policy="fixed:suffix", resume=True)
    rest = run(target, drafters, resumed)
    assert rest.num_already_there == result.num_conversations
    found = traces(tmp_path / "part")
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        np.testing.assert_array_equal(
            one.windows.realised_acceptance, found[name].windows.realised_acceptance
        )
        assert one.num_tokens == found[name].num_tokens
    assert LogReader(tmp_path / "part").summary().num_duplicates == 0
    assert run(target, drafters, resumed).num_conversations == 0


def test_a_failure_in_the_middle_leaves_the_complete_conversations_readable(
    target: Target, drafters: list[Drafter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Worker.serve

    def serve(worker: Worker, request: Request, **keywords: object) -> Completion:
        if request.request_id == "shift-00:2":
            raise FloatingPointError("broken")
        return original(worker, request, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "serve", serve)
    with pytest.raises(FloatingPointError):
        run(target, drafters, options(tmp_path))
    assert len(traces(tmp_path)) == 4


def test_invalid_folder_with_a_log_is_refused_and_stays_as_it_is(
    target: Target, drafters: list[Drafter], tmp_path: Path
) -> None:
    run(target, drafters, options(tmp_path), what=conversations()[:1])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.parquet")}
    with pytest.raises(RecordingExistsError, match=r"holds a log already.*--resume"):
        run(target, drafters, options(tmp_path))
    with pytest.raises(RecordingExistsError, match="recorded with 7 drafters, greedy"):
        run(target, drafters[:3], options(tmp_path, resume=True))
    warm = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.5)
    with pytest.raises(RecordingExistsError, match=r"at temperature 0\.0, now .*one_hot at 0\.5"):
        run(target, drafters, options(tmp_path, resume=True, sampling=warm))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.parquet")} == before


def test_invalid_second_recording_to_one_folder_is_refused(
    target: Target, drafters: list[Drafter], tmp_path: Path
) -> None:
    with (
        only_one(tmp_path, "recording", cure="wait"),
        pytest.raises(LockError, match="another recording is at work here"),
    ):
        run(target, drafters, options(tmp_path))


def test_what_does_not_fit_the_context_is_named_and_left_out(
    target: Target, drafters: list[Drafter], tmp_path: Path
) -> None:
    long = Conversation(conversation_id="long", stream="code", turns=("ab", "a" * 300))
    shown = io.StringIO()
    what = [*conversations()[:2], long, *conversations()[2:3]]
    result = run(target, drafters, options(tmp_path), what=what, out=shown)
    assert result.left_out == ["long"]
    assert "long left out: " in shown.getvalue()
    assert len(traces(tmp_path)) == 3
    assert "recorded 3 requests (3 conversations)" in shown.getvalue()


def test_the_result_is_written_as_json(
    target: Target, drafters: list[Drafter], tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    result = record(
        target,
        drafters,
        conversations(),
        options(tmp_path / "out"),
        stop=threading.Event(),
        console=Console(file=io.StringIO()),
        json_file=file,
    )
    written = json.loads(file.read_text())
    assert written["num_tokens"] == result.num_tokens > 0
    assert written["left_out"] == []


def test_an_aborted_request_never_reaches_the_log(
    target: Target, drafters: list[Drafter], tmp_path: Path
) -> None:
    run(target, drafters, options(tmp_path), stop=StopAfter(40))
    assert FinishReason.ABORTED not in {event.finish_reason for event in events(tmp_path)}
