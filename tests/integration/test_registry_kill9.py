"""A publisher killed with SIGKILL, everywhere: at each file operation, and at random moments."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from pipeline.releases.registry import DrafterRegistry

torch.set_num_threads(1)

# The child writes files and dies; it takes no lock that a thread of the parent could hold.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

FILE_OPERATIONS = ("open", "os.mkdir", "os.rename", "os.chmod", "os.remove", "os.rmdir")
FORMER = 4
NEXT = 5


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"up": torch.full((64, 64), float(version)), "down": torch.ones(8, dtype=torch.float16)}


def publish(root: Path, version: int) -> None:
    state = {"step": torch.tensor(float(version))}
    DrafterRegistry(str(root)).write(
        "head-a", version, weights(version), {"version": version}, training_state=state
    )


def start(work: Callable[[], None]) -> int:
    """Run ``work`` in a child that never returns into the test, and return its process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def publish_until(root: Path, number: int) -> None:
    """Publish, and die just before the ``number``-th file operation."""
    countdown = itertools.count(number - 1, -1)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event in FILE_OPERATIONS and next(countdown) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    publish(root, NEXT)


def publish_for_ever(root: Path, first: int) -> None:
    for version in itertools.count(first):
        publish(root, version)


def was_killed(child: int) -> bool:
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"the publisher ended with {code}"
    return code == -signal.SIGKILL


def check_only_whole_versions(root: Path) -> list[int]:
    """Load every visible version by the hash of its manifest and compare all of it."""
    registry = DrafterRegistry(str(root))
    versions = registry.versions("head-a")
    folder = root / "drafters" / "head-a"
    visible = sorted(int(path.name) for path in folder.iterdir() if path.name[0] != "_")
    assert visible == versions
    for version in versions:
        digest = sha256((folder / str(version) / "manifest.json").read_bytes()).hexdigest()
        uri = f"drafters/head-a/{version}"
        loaded = registry.read(uri, manifest_sha256=digest)
        assert loaded.config == {"version": version}
        assert torch.equal(loaded.tensors["up"], weights(version)["up"])
        state = registry.read_training_state(uri, manifest_sha256=digest)
        assert state["step"].item() == version
    return versions


def test_a_publisher_killed_before_any_file_operation_leaves_whole_versions_only(
    tmp_path: Path,
) -> None:
    outcomes = []
    for number in range(1, 100):
        root = tmp_path / str(number)
        publish(root, FORMER)
        killed = was_killed(start(partial(publish_until, root, number)))
        outcomes.append(check_only_whole_versions(root))
        if not killed:
            break
    assert not killed
    # One rename: the new version is absent before one operation and whole after it, for good.
    appeared = outcomes.index([FORMER, NEXT])
    assert outcomes[:appeared] == [[FORMER]] * appeared
    assert outcomes[appeared:] == [[FORMER, NEXT]] * (len(outcomes) - appeared)
    assert appeared >= 10


def test_publishers_killed_at_random_moments_leave_whole_versions_and_the_next_one_goes_on(
    tmp_path: Path,
) -> None:
    dice = random.Random(7)
    publish(tmp_path, 0)
    for _ in range(20):
        first = DrafterRegistry(str(tmp_path)).versions("head-a")[-1] + 1
        child = start(partial(publish_for_ever, tmp_path, first))
        while not (tmp_path / "drafters" / "head-a" / str(first)).exists():
            time.sleep(0.001)
        time.sleep(dice.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        assert was_killed(child)
        versions = check_only_whole_versions(tmp_path)
        assert versions == list(range(len(versions)))
    assert len(versions) > 20
