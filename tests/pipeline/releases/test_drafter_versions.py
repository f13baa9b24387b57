"""What an operator may do with versions, and what is refused with names and values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from pipeline.eventlog.ports import EventLog
from pipeline.messaging.boards import LogReleaseBoard
from pipeline.releases.drafter_versions import DrafterVersionError, DrafterVersions
from pipeline.releases.registry import ArtifactError, DrafterRegistry
from schemas.events import DrafterReleased, ReleaseState
from tests.pipeline.artifacts import rewrite
from tests.pipeline.messages import open_log
from tests.schemas.builders import make_release

HEAD = "drafter-0"
CONFIG = {
    "architecture": "hydra",
    "target_fingerprint": "fingerprint-0",
    "tokenizer_hash": "tokenizer-0",
    "draft_vocabulary_hash": "vocabulary-0",
    "contained": {"0": {"offset": 12, "workers": {}}},
}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    opened = open_log(tmp_path, num_partitions=1)
    yield opened
    opened.close()


class Shelf:
    """A registry with versions 0..3 of a drafter, of which 2 is live and 3 on trial."""

    def __init__(self, folder: Path, log: EventLog) -> None:
        self.registry = DrafterRegistry(str(folder / "store"))
        self.board = LogReleaseBoard(log, source="test")
        self.versions = DrafterVersions(
            self.registry, self.board, now=lambda: datetime(2026, 11, 29, tzinfo=UTC)
        )
        for version in range(4):
            self.write(HEAD, version)
        self.board.publish(self.release(2, "live"))
        self.board.publish_beside(self.release(3, "shadow"))

    def write(self, drafter_id: str, version: int) -> None:
        weights, state = ({"w": torch.full((2,), float(version))} for _ in range(2))
        self.registry.write(drafter_id, version, weights, CONFIG, training_state=state)

    def release(self, version: int, state: str) -> DrafterReleased:
        stored = self.registry.find(HEAD, version)
        return make_release(
            drafter_id=HEAD,
            version=version,
            parent_version=version - 1,
            state=ReleaseState(state),
            artifact_uri=stored.uri,
            manifest_sha256=stored.manifest_sha256,
        )

    def states(self) -> tuple[tuple[int, str], tuple[int, str]]:
        (own,), (beside,) = self.board.read_all(), self.board.read_beside()
        return (own.version, own.state.value), (beside.version, beside.state.value)


@pytest.fixture
def shelf(tmp_path: Path, log: EventLog) -> Shelf:
    return Shelf(tmp_path, log)


def test_all_versions_are_listed_with_what_the_board_says(shelf: Shelf) -> None:
    shelf.write("other", 0)
    rows = [(one.drafter_id, one.version, one.state) for one in shelf.versions.rows()]
    assert rows == [
        (HEAD, 0, "-"),
        (HEAD, 1, "-"),
        (HEAD, 2, "live"),
        (HEAD, 3, "shadow"),
        ("other", 0, "-"),
    ]
    assert [one.version for one in shelf.versions.rows("other")] == [0]


def test_a_promoted_version_is_live_and_nothing_is_on_trial_any_more(shelf: Shelf) -> None:
    shelf.versions.promote(HEAD, 1, "it was fine")
    assert shelf.states() == ((1, "live"), (3, "retired"))
    (live,) = shelf.board.read_all()
    assert live.reason == "by hand: it was fine"
    assert live.artifact_uri == shelf.registry.find(HEAD, 1).uri
    assert live.training_window.partition_to_offset == {0: 12}


def test_a_version_on_trial_can_be_promoted(shelf: Shelf) -> None:
    shelf.versions.promote(HEAD, 3, "")
    assert shelf.states() == ((3, "live"), (3, "retired"))


@pytest.mark.parametrize(("to", "restored"), [(None, 1), (0, 0)])
def test_a_rollback_restores_an_older_version(shelf: Shelf, to: int | None, restored: int) -> None:
    assert shelf.versions.rollback(HEAD, to, "slow") == (2, restored)
    assert shelf.states() == ((restored, "live"), (2, "rolled_back"))


def test_a_retired_drafter_can_be_brought_back(shelf: Shelf) -> None:
    assert shelf.versions.retire(HEAD, "no longer wanted") == 2
    assert shelf.states() == ((2, "retired"), (3, "retired"))
    shelf.versions.promote(HEAD, 2, "")
    assert shelf.states()[0] == (2, "live")


def test_an_export_comes_back_as_the_next_version_bit_for_bit(shelf: Shelf, tmp_path: Path) -> None:
    names = {path.name for path in shelf.versions.export(HEAD, 1, tmp_path / "out")}
    assert {"weights.safetensors", "config.json", "manifest.json"} <= names
    assert shelf.versions.bring(tmp_path / "out", None) == (HEAD, 4)
    stored = shelf.registry.find(HEAD, 4)
    loaded = shelf.registry.read(stored.uri, manifest_sha256=stored.manifest_sha256)
    assert torch.equal(loaded.tensors["w"], torch.full((2,), 1.0))
    state = shelf.registry.read_training_state(stored.uri, manifest_sha256=stored.manifest_sha256)
    assert torch.equal(state["w"], torch.full((2,), 1.0))
    assert shelf.states()[0] == (2, "live"), "an import changes nothing that serves"


def test_invalid_acts_are_refused_with_names_and_values(shelf: Shelf, tmp_path: Path) -> None:
    versions = shelf.versions
    with pytest.raises(DrafterVersionError, match="drafter-0 version 2 is live already"):
        versions.promote(HEAD, 2, "")
    with pytest.raises(ArtifactError, match=r"drafter-0 version 9.*one of \[0, 1, 2, 3\]"):
        versions.promote(HEAD, 9, "")
    with pytest.raises(DrafterVersionError, match=r"from version 2 to 7, stored below it are"):
        versions.rollback(HEAD, 7, "")
    with pytest.raises(DrafterVersionError, match="stranger: no version is live"):
        versions.retire("stranger", "")
    with pytest.raises(DrafterVersionError, match="stranger: nothing of it is stored, known are"):
        versions.rows("stranger")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(DrafterVersionError, match="full: not empty"):
        versions.export(HEAD, 1, tmp_path / "full")
    assert shelf.states() == ((2, "live"), (3, "shadow"))


def test_an_import_of_another_target_is_refused_with_both_fingerprints(
    shelf: Shelf, tmp_path: Path
) -> None:
    other = CONFIG | {"target_fingerprint": "fingerprint-9"}
    shelf.registry.write("other", 0, {"w": torch.zeros(2)}, other)
    shelf.versions.export("other", 0, tmp_path / "out")
    with pytest.raises(DrafterVersionError, match="is fingerprint-9, of the released drafter fing"):
        shelf.versions.bring(tmp_path / "out", HEAD)
    assert shelf.versions.bring(tmp_path / "out", "third") == ("third", 0)


@pytest.mark.parametrize("name", ["weights.safetensors", "manifest.json"])
def test_invalid_imports_are_refused(shelf: Shelf, tmp_path: Path, name: str) -> None:
    """B9: a flipped bit."""
    shelf.versions.export(HEAD, 1, tmp_path / "out")
    data = bytearray((tmp_path / "out" / name).read_bytes())
    data[len(data) // 2] ^= 0x80
    rewrite(tmp_path / "out" / name, bytes(data))
    with pytest.raises(ArtifactError, match="expected"):
        shelf.versions.bring(tmp_path / "out", None)
    with pytest.raises(ArtifactError, match="expected a folder that export has written"):
        shelf.versions.bring(tmp_path / "nowhere", None)
    assert shelf.registry.versions(HEAD) == [0, 1, 2, 3]


def test_an_import_with_numbers_that_are_not_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    shelf.versions.export(HEAD, 1, tmp_path / "out")
    data = save({"w": torch.tensor([1.0, float("nan")])})
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    manifest["files"]["weights"]["sha256"] = sha256(data).hexdigest()
    (tmp_path / "out" / "weights.safetensors").write_bytes(data)
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="1 values NaN or infinite"):
        shelf.versions.bring(tmp_path / "out", None)


def test_a_version_that_was_rolled_back_can_be_promoted_by_hand(shelf: Shelf) -> None:
    shelf.board.publish_beside(shelf.release(3, "rolled_back"))
    shelf.versions.promote(HEAD, 3, "again")
    assert shelf.states()[0] == (3, "live")
