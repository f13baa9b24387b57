"""The refresh job trains on what no learner has read, once, and leaves a running learner alone."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from inference.sampling import SamplingParams
from inference.worker import Request
from pipeline.boards import LogReleaseBoard
from pipeline.locks import only_one
from pipeline.schedule import refresh
from pipeline.wiring import open_log, open_target, start_worker
from tests.integration.tiny_run import TinyRun, save_tiny_model


def never() -> bool:
    """Do not ask the job to end."""
    return False


def versions(run: TinyRun) -> dict[str, int]:
    with closing(open_log(run.settings)) as log:
        releases = LogReleaseBoard(log, source="test").read_all()
    return {one.drafter_id: one.version for one in releases}


def test_a_refresh_trains_on_each_event_once(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    run = TinyRun.make(tmp_path, tmp_path / "model")
    target = open_target(run.settings)
    running = start_worker(run.settings, target)
    for number in range(4):
        request = Request(
            request_id=f"request-{number}",
            stream="code",
            prompt_token_ids=target.encode("abcdefgh"),
            params=SamplingParams(max_tokens=16),
            has_consent=True,
        )
        running.worker.serve(request)
    running.close()

    assert refresh(run.settings, never) >= 4
    first = versions(run)
    assert first.keys() == {"head-recent", "head-replay"}
    assert min(first.values()) >= 1
    refresh(run.settings, never)
    assert versions(run) == first, "the same data cut gives nothing new"

    with only_one(run.settings.data, "learner", cure=""):
        assert refresh(run.settings, never) == 0
    assert refresh(run.settings, lambda: True) == 0, "asked to end before it began"
