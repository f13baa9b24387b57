"""A lock keeps others out while it is held, and no longer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from pipeline.locks import LockError, only_one


def test_a_second_holder_is_refused_with_the_cure_until_the_first_is_done(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with only_one(folder, "learner", cure="end it"):
        with (
            pytest.raises(LockError, match=r"data: another learner is at work here; end it"),
            only_one(folder, "learner", cure="end it"),
        ):
            raise AssertionError
        with only_one(folder, "worker-0", cure="rename it"):
            pass
    with only_one(folder, "learner", cure="end it"):
        pass


def test_a_lock_dies_with_its_holder(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        with only_one(tmp_path, "learner", cure="end it"):
            os.write(writer, b"held")
            signal.pause()
    assert os.read(reader, 4) == b"held"
    with pytest.raises(LockError), only_one(tmp_path, "learner", cure="end it"):
        raise AssertionError
    os.kill(process_id, signal.SIGKILL)
    os.waitpid(process_id, 0)
    with only_one(tmp_path, "learner", cure="end it"):
        pass
    os.close(reader)
    os.close(writer)


def test_invalid_folder_is_named() -> None:
    with (
        pytest.raises(LockError, match=r"/dev/null/x: .*can be written"),
        only_one(Path("/dev/null/x"), "learner", cure="end it"),
    ):
        raise AssertionError
