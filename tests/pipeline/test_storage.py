from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from pipeline.storage import ArtifactError, Storage


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return Storage(str(tmp_path / "store"))
    return Storage(f"memory://store-{uuid.uuid4().hex}")


def test_a_published_file_is_read_back(storage: Storage) -> None:
    storage.publish_file("a/b/c.bin", b"content")
    assert storage.read("a/b/c.bin") == b"content"
    assert storage.size_bytes("a/b/c.bin") == 7
    assert storage.exists("a/b/c.bin")
    assert not storage.exists("a/b/d.bin")


def test_a_published_name_is_never_written_again(storage: Storage) -> None:
    storage.publish_file("a/b", b"first")
    with pytest.raises(ArtifactError, match="a published file"):
        storage.publish_file("a/b", b"second")
    assert storage.read("a/b") == b"first"


def test_files_of_a_folder_are_published_together_and_only_once(storage: Storage) -> None:
    storage.publish_folder("a/b", {"x": b"1", "y": b"2"}, visible_by="y")
    assert storage.children("a/b") == ["x", "y"]
    with pytest.raises(ArtifactError, match="a published folder"):
        storage.publish_folder("a/b", {"x": b"3", "y": b"4"}, visible_by="y")
    assert (storage.read("a/b/x"), storage.read("a/b/y")) == (b"1", b"2")


def test_children_of_nothing_are_none(storage: Storage) -> None:
    assert storage.children("a") == []


def test_children_leave_out_temporary_names(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    storage.publish_file("a/b", b"")
    (tmp_path / "a" / "_half").write_bytes(b"")
    assert storage.children("a") == ["b"]


def test_a_deleted_file_or_folder_is_gone_and_deleting_a_file_twice_is_no_error(
    storage: Storage,
) -> None:
    storage.publish_file("a/b", b"x")
    storage.publish_folder("a/c", {"x": b"1"}, visible_by="x")
    storage.delete_file("a/b")
    storage.delete_file("a/b")
    storage.delete_folder("a/c", visible_by="x")
    assert storage.children("a") == []


def test_published_files_of_a_local_store_are_read_only(tmp_path: Path) -> None:
    Storage(str(tmp_path)).publish_file("a", b"x")
    assert (tmp_path / "a").stat().st_mode & 0o222 == 0


def test_references_resolve_below_the_root_however_they_are_written(tmp_path: Path) -> None:
    storage = Storage(f"file://{tmp_path}/")
    for reference in ("a/b", "a/b/", f"{tmp_path}/a/b", f"file://{tmp_path}/a/b"):
        assert storage.resolve(reference) == f"{tmp_path}/a/b"


def test_a_link_inside_the_root_is_followed(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    storage.publish_file("a/b", b"x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert storage.read("link/b") == b"x"


@pytest.mark.parametrize(
    "reference",
    [
        *("", "/", "..", "../x", "a/../b", "a//b", "a/./b", "_x", ".x", "a/_x", "x" * 300),
        *("/etc/passwd", "file:///etc/passwd", "s3://bucket/a", "~/a", "%2e%2e/a"),
        *("a\0b", "a\nb", "a b", "a\\b"),
    ],
)
def test_invalid_references_are_refused_before_anything_is_touched(
    storage: Storage, reference: str
) -> None:
    for attempt in (storage.resolve, storage.read, storage.delete_file, storage.children):
        with pytest.raises(ArtifactError, match="expected"):
            attempt(reference)
    with pytest.raises(ArtifactError):
        storage.publish_file(reference, b"x")


def test_invalid_links_out_of_the_root_are_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "secret").write_text("s")
    os.symlink(tmp_path / "secret", tmp_path / "root" / "innocent")
    with pytest.raises(ArtifactError, match="expected a path under"):
        Storage(str(tmp_path / "root")).read("innocent")


def test_invalid_roots_below_a_sibling_with_the_same_beginning_are_refused(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "store"))
    with pytest.raises(ArtifactError, match="expected one under"):
        storage.resolve(f"{tmp_path}/store-2/a")
