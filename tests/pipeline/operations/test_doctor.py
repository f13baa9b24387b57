"""The doctor names what is wrong and how it is cured, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.configuration.server_settings import ServerSettings
from pipeline.configuration.settings import EventLogSettings, ModelSettings, Settings, SettingsError
from pipeline.messaging.event_logs import open_log
from pipeline.operations.doctor import examine
from pipeline.serving import read_keys
from tests.integration.tiny_run import save_tiny_model


def findings(settings: Settings) -> dict[str, tuple[bool, str]]:
    return {one.what: (one.is_good, one.text) for one in examine(settings)}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    save_tiny_model(tmp_path / "model")
    return Settings(
        data=tmp_path / "data",
        cache=tmp_path / "cache",
        model=ModelSettings(path=str(tmp_path / "model"), dtype="float32"),
    )


def test_a_sound_set_up_is_well(settings: Settings) -> None:
    open_log(settings).close()
    found = findings(settings)
    assert [what for what, (is_good, _) in found.items() if not is_good] == []
    assert found.keys() == {
        "versions", "keys", "disk", "event log", "topics", "registry", "clock", "model",
    }  # fmt: skip


def test_what_is_wrong_is_named_with_its_cure(settings: Settings, tmp_path: Path) -> None:
    broken = settings.model_copy(
        update={
            "model": ModelSettings(path=str(tmp_path / "nothing")),
            "server": ServerSettings(host="0.0.0.0"),
            "event_log": EventLogSettings(url=f"sqlite:///{tmp_path}/no/such/folder/x.sqlite"),
        }
    )
    found = findings(broken)
    assert not found["model"][0]
    assert "nothing" in found["model"][1]
    assert not found["keys"][0]
    assert "server.api_keys_file" in found["keys"][1]
    assert all("\n" not in text for _, text in found.values())


def test_invalid_files_of_keys_are_refused_without_showing_them(tmp_path: Path) -> None:
    for text, reason in (("", "no key"), ("xyz\n", "shorter than 16"), ("ä" * 20, "ASCII")):
        (tmp_path / "keys").write_text(text, encoding="utf-8")
        with pytest.raises(SettingsError, match=reason) as caught:
            read_keys(tmp_path / "keys", "server.api_keys_file")
        assert not text or text.strip() not in str(caught.value)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_keys(tmp_path / "none", "server.api_keys_file")
    (tmp_path / "keys").write_text(f"# comment\n\n{'k' * 20}\n{'l' * 20}\n")
    assert len(read_keys(tmp_path / "keys", "x")) == 2
