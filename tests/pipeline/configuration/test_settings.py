from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.configuration.settings import Settings, SettingsError, load_settings, setting_keys

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "settings.md"


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.upper().startswith("DRAFTLOOP_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refusal(config: Path | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_without_file_and_environment_the_defaults_hold() -> None:
    assert load_settings() == Settings()


def test_content_and_features_are_off_by_default() -> None:
    settings = load_settings()
    assert settings.content.consenting_streams == ()
    assert not settings.features.enabled


def test_the_file_in_the_working_folder_is_found_and_read(tmp_path: Path) -> None:
    write(tmp_path / "draftloop.toml", 'data = "x"\n[worker]\nsegment_tokens = 7\n')
    settings = load_settings()
    assert (settings.data, settings.worker.segment_tokens) == (Path("x"), 7)


def test_the_named_variable_goes_before_the_working_folder_and_the_argument_before_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "draftloop.toml", "[learner]\nseed = 1\n")
    monkeypatch.setenv("DRAFTLOOP_CONFIG", str(write(tmp_path / "b.toml", "[learner]\nseed = 2\n")))
    assert load_settings().learner.seed == 2
    assert load_settings(write(tmp_path / "c.toml", "[learner]\nseed = 3\n")).learner.seed == 3


def test_the_environment_wins_key_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "draftloop.toml", '[worker]\nworker_id = "w7"\nsegment_tokens = 7\n')
    monkeypatch.setenv("DRAFTLOOP_WORKER__SEGMENT_TOKENS", "9")
    monkeypatch.setenv("DRAFTLOOP_CONTENT__CONSENTING_STREAMS", '["a", "b"]')
    settings = load_settings()
    assert settings.worker.worker_id == "w7"
    assert settings.worker.segment_tokens == 9
    assert settings.content.consenting_streams == ("a", "b")


def test_home_is_expanded_in_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DRAFTLOOP_DATA", "~/loop")
    assert load_settings().data == tmp_path / "loop"


def test_settings_are_frozen_at_every_level() -> None:
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.data = Path("y")
    with pytest.raises(ValidationError):
        settings.worker.segment_tokens = 3


def test_building_settings_directly_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTLOOP_LEARNER__SEED", "5")
    assert Settings().learner.seed == 0


def test_the_documentation_lists_exactly_the_keys_with_their_defaults_and_meaning() -> None:
    rows = re.findall(r"^\| `.*", DOCUMENTATION.read_text(encoding="utf-8"), re.MULTILINE)
    expected = [
        f"| `{key.name}` | {f'`{key.default}`' if key.default else ''} | {key.meaning} |"
        for key in setting_keys()
    ]
    assert rows == expected
    assert all(key.meaning for key in setting_keys())


def test_the_example_of_the_documentation_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", DOCUMENTATION.read_text("utf-8"), re.DOTALL)
    assert load_settings(write(tmp_path / "e.toml", example)).worker.worker_id == "gpu-7"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("wroker = 1", ["wroker is no setting", "did you mean"]),
        ("[worker]\nsegment_token = 1", ["worker.segment_token ", "worker.segment_tokens?"]),
        ("[worker]\nsegment_tokens = 0", ["worker.segment_tokens = 0", "equal to 1"]),
        ("[learner]\nlearning_rate = nan", ["learner.learning_rate = nan"]),
        ('[model]\ndtype = "fp8"', ["model.dtype = 'fp8'", "'bfloat16' or 'float32'"]),
        ('[worker]\npolicy = "x"', ["worker.policy = 'x'", "normal_hedge", "fixed:<drafter>"]),
        ('[worker]\npolicy = "hedge:eta=1"', ["'hedge:eta=1': unknown key 'eta'", "scope"]),
        ('[worker]\npolicy = "hedge:loss=all"', ["loss='all'", "length or first or hybrid"]),
        ('[learner]\nupdate_rule = "adam"', ["learner.update_rule = 'adam'", "ensemble, momentum"]),
        ('[learner]\nupdate_rule = "ensemble:n=2"', ["unknown key 'n'", "num_experts"]),
        ('[worker]\nworker_id = "../x"', ["worker.worker_id = '../x'"]),
        ("worker = 3", ["worker = 3"]),
        ("drafters = []", ["at least one drafter"]),
        (2 * '[[drafters]]\ndrafter_id = "a"\nkind = "none"\n', ["'a' stands twice"]),
        ('[[drafters]]\ndrafter_id = "a"\nkind = "causal_lm"', ["drafter 'a': expected path"]),
        ('[worker]\npolicy = "fixed:b"', ["'fixed:b'", "expected one of the drafters none, "]),
        ("[worker", ["not TOML", "Expected ']'"]),
    ],
)
def test_invalid_files_are_refused_in_one_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = write(tmp_path / "bad.toml", text)
    message = refusal(file)
    assert str(file) in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("variable", "value", "part"),
    [
        ("DRAFTLOOP_WORKER__SEGMENT_TOKENS", "many", "worker.segment_tokens = 'many'"),
        ("DRAFTLOOP_WORKER__SEGMENT_TOKEN", "3", "DRAFTLOOP_WORKER__SEGMENT_TOKENS?"),
        ("DRAFTLOOP_CONTENT__CONSENTING_STREAMS", "a,b", "written as JSON"),
        ("DRAFTLOOP_CONTENT__CONSENTING_STREAMS", '["a/b"]', "consenting_streams.0 = 'a/b'"),
    ],
)
def test_invalid_variables_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, part: str
) -> None:
    monkeypatch.setenv(variable, value)
    message = refusal()
    assert variable in message
    assert part in message


def test_invalid_config_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "absent.toml: cannot be read" in refusal(tmp_path / "absent.toml")
    monkeypatch.setenv("DRAFTLOOP_CONFIG", str(tmp_path))
    assert "cannot be read" in refusal()
    (tmp_path / "draftloop.toml").write_bytes(b"\xff\xfe")
    monkeypatch.delenv("DRAFTLOOP_CONFIG")
    assert "not TOML" in refusal()


def test_invalid_values_are_shown_without_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTLOOP_EVENT_LOG__NUM_PARTITIONS", "kafka://u:canary@host:1")
    assert "canary" not in refusal()
