"""Bad input through the command line: one clear line, exit status 2, nothing half-written."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.eventlog.ports import Message
from pipeline.locks import only_one
from pipeline.messaging.boards import LogReleaseBoard
from pipeline.messaging.event_logs import open_log
from pipeline.releases.registry import DrafterRegistry
from schemas.codec import decode_verification_event, encode
from schemas.events import DrafterReleased, FinishReason
from schemas.topics import DEAD_LETTERS, POLICIES, VERIFICATION_EVENTS
from tests.integration.commands import Commands, open_commands
from tests.integration.tiny_run import TinyRun, save_tiny_model, wait_until
from tests.schemas.builders import make_event, make_policy

SERVE = ("worker", "--prompts", "prompts.jsonl", "--max-tokens", "8")
COMMANDS = (
    *("demo", "learner", "archiver", "worker", "record", "replay"),
    *("bench", "bench engine", "bench pipeline", "bench pool", "bench replay", "bench selection"),
)


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs commands in the folder of a run."""

    commands: Commands
    run: TinyRun

    def __call__(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Return exit status, standard output and standard error."""
        return self.commands.run(self.run.folder, *arguments, environment=environment)

    def refusal(self, *arguments: str, **environment: str) -> str:
        """Run a command that must refuse, and return the line that says why."""
        status, output, complaint = self(*arguments, **environment)
        lines = [line for line in complaint.splitlines() if line.strip()]
        assert status == 2, complaint
        assert len(lines) == 1, complaint
        assert lines[0].startswith("draftloop: ")
        assert output.strip() == ""
        return lines[0]


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with open_commands() as opened:
        yield opened


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder)
    return folder


@pytest.fixture
def shell(commands: Commands, model: Path, tmp_path: Path) -> Shell:
    return Shell(commands, TinyRun.make(tmp_path, model, num_prompts=3))


def _written(folder: Path) -> list[str]:
    """Return what a refused command has left in the data folder, but the empty log and locks."""
    names = (path.name for path in (folder / "data").rglob("*"))
    return [name for name in names if not re.match(r"eventlog\.sqlite|_.*\.lock$", name)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(shell: Shell, command: str) -> None:
    status, output, complaint = shell(*command.split(), "--help")
    assert (status, complaint) == (0, "")
    assert f"Usage: draftloop {command}" in output
    # A group has no example of its own; its commands have.
    assert command == "bench" or "Example: draftloop " in output


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["lerner"], ["No such command 'lerner'"]),
        (["worker", "--prompt", "x"], ["No such option: --prompt", "--prompts"]),
        (["worker"], ["Missing option '--prompts'"]),
        ([*SERVE, "--temperature", "-1"], ["'--temperature'", "greater than or"]),
    ],
)
def test_invalid_usage_is_told_with_the_way_to_help(
    shell: Shell, arguments: list[str], parts: list[str]
) -> None:
    status, output, complaint = shell(*arguments)
    assert (status, output) == (2, "")
    assert "Traceback" not in complaint
    for part in [*parts, "--help"]:
        assert part in complaint


@pytest.mark.parametrize("command", [["learner"], list(SERVE)])
def test_invalid_model_paths_are_named(shell: Shell, command: list[str]) -> None:
    line = shell.refusal(*command, DRAFTLOOP_MODEL__PATH="/no/model")
    assert "'/no/model'" in line
    assert "save_pretrained" in line
    assert _written(shell.run.folder) == []


def test_invalid_target_without_tokenizer_is_named(
    shell: Shell, model: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((model / name).read_bytes())
    line = shell.refusal(*SERVE, DRAFTLOOP_MODEL__PATH=str(bare))
    assert f"{bare}: no tokenizer" in line
    assert "save_pretrained" in line


def test_invalid_drafter_of_another_vocabulary_is_named(shell: Shell, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["b"], vocabulary["c"] = vocabulary["c"], vocabulary["b"]
    path.write_text(json.dumps(tokenizer))
    shell.run.edit_settings('kind = "suffix"', f'kind = "causal_lm"\npath = "{tmp_path}/other"')
    line = shell.refusal(*SERVE)
    assert "drafter suffix: token 2 is 'c', in the target 'b'" in line
    assert "the target's own tokenizer" in line
    assert _written(shell.run.folder) == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"domain": "code"}\n', ["line 1", "missing key 'prompt'"]),
        ('{"domain": "code", "prompt": "abc"}\n\nabc\n', ["line 3", "no JSON"]),
        ('{"domain": "a/b", "prompt": "abc"}\n', ["line 1", "a/b"]),
        ("\n\n", ["no prompts"]),
    ],
)
def test_invalid_prompts_are_named_by_their_line_and_nothing_is_served(
    shell: Shell, text: str, parts: list[str]
) -> None:
    (shell.run.folder / "prompts.jsonl").write_text(text)
    line = shell.refusal(*SERVE)
    for part in ["prompts.jsonl", *parts]:
        assert part in line
    assert not (shell.run.folder / "data").exists()


@pytest.mark.parametrize("command", [["learner"], ["archiver"], list(SERVE)])
def test_invalid_data_folders_are_named_before_anything_is_done(
    shell: Shell, command: list[str]
) -> None:
    line = shell.refusal(*command, DRAFTLOOP_DATA="/dev/null/x")
    assert "/dev/null/x" in line
    assert "use a folder that can be written" in line


def test_invalid_places_for_results_are_named(shell: Shell) -> None:
    _serve_and_archive(shell)
    line = shell.refusal("replay", "data", "--report", "/dev/null/x/report.html")
    assert "/dev/null/x/report.html" in line
    status, _, complaint = shell("replay", "data", "--json", "no/folder/numbers.json")
    assert status == 2
    assert "no/folder/numbers.json: cannot be written" in complaint
    assert "Traceback" not in complaint


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("DRAFTLOOP_WORKER__POLICY", "fixed:nobody", ["fixed:nobody", "none, lookup, suffix"]),
        ("DRAFTLOOP_DRAFTERS", "[]", ["at least one drafter"]),
        ("DRAFTLOOP_LEARNER__DRAFT_VOCABULARY_TEXT", "/no/text", ["/no/text", "text file"]),
        ("DRAFTLOOP_EVENT_LOG__URL", "http://[/x]", ["'http://[/x]'", "kafka://host:port"]),
        ("DRAFTLOOP_LEARNER__SEEED", "1", ["DRAFTLOOP_LEARNER__SEED?"]),
    ],
)
def test_invalid_settings_are_named(shell: Shell, key: str, value: str, parts: list[str]) -> None:
    line = shell.refusal("learner", **{key: value})
    for part in parts:
        assert part in line


def test_invalid_log_of_a_newer_schema_is_set_aside_and_named(shell: Shell) -> None:
    """A message of a newer schema is kept byte for byte; what is known goes on."""
    with closing(open_log(shell.run.settings)) as log:
        newer = bytes([0]) + (9_999).to_bytes(4, "big") + encode(make_event(sequence=1))[5:]
        messages = [encode(make_event(sequence=0)), newer, encode(make_event(sequence=2))]
        key = make_event().stream.encode()
        log.append(VERIFICATION_EVENTS, [Message(key=key, value=value) for value in messages])
        status, _, complaint = _stopped_when(shell, "archiver", shell.run.events.exists)
        assert status == 0
        assert "9999" in complaint
        (letter,) = log.read(DEAD_LETTERS, 0, 0)
        assert letter.message.value == newer
    rows = pq.read_table(shell.run.events)
    assert rows["offset"].to_pylist() == [0, 2]


def test_invalid_policy_of_a_newer_schema_is_told_and_serving_goes_on(shell: Shell) -> None:
    with closing(open_log(shell.run.settings)) as log:
        newer = bytes([0]) + (9_999).to_bytes(4, "big") + encode(make_policy(version=1))[5:]
        log.append(POLICIES, [Message(key=b"code", value=newer)])
    status, output, complaint = shell(*SERVE)
    assert (status, len(output.splitlines())) == (0, 3)
    assert POLICIES in complaint
    assert "9999" in complaint


def test_invalid_artifact_is_told_and_the_drafter_in_force_goes_on(shell: Shell) -> None:
    _stopped_when(shell, "learner", lambda: len(_releases(shell.run)) == 2)
    (release, other) = _releases(shell.run)
    weights = shell.run.settings.data / release.artifact_uri / "weights.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-3] ^= 0x10
    weights.chmod(0o644)
    weights.write_bytes(damaged)

    status, output, complaint = shell(*SERVE)
    assert (status, len(output.splitlines())) == (0, 3)
    (line,) = [line for line in complaint.splitlines() if "ERROR" in line]
    assert f"drafter {release.drafter_id} version 0 is not used" in line
    assert "sha256" in line
    assert str(weights) in line

    line = shell.refusal("learner")  # it cannot go on from weights that it cannot read
    assert str(weights) in line
    registry = DrafterRegistry(str(shell.run.settings.data))
    assert registry.versions(release.drafter_id) == registry.versions(other.drafter_id) == [0]


def test_invalid_release_of_another_target_is_refused_by_the_learner(
    shell: Shell, tmp_path: Path
) -> None:
    _stopped_when(shell, "learner", lambda: len(_releases(shell.run)) == 2)
    save_tiny_model(tmp_path / "other", seed=9)
    line = shell.refusal("learner", DRAFTLOOP_MODEL__PATH=str(tmp_path / "other"))
    assert "target_fingerprint" in line
    assert len(_releases(shell.run)) == 2


def test_a_prompt_beyond_the_context_is_named_and_the_others_are_answered(shell: Shell) -> None:
    path = shell.run.folder / "prompts.jsonl"
    first, second, third = path.read_text().splitlines()
    long = re.sub(r"[a-h]{12}", "abcd" * 100, second)
    path.write_text("\n".join([first, long, third]))
    status, output, complaint = shell(*SERVE)
    assert (status, len(output.splitlines())) == (0, 2)
    assert "prompt 2 of 3 left out: 400 prompt tokens, context 256" in complaint


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_that_is_stopped_reports_what_it_has_served(shell: Shell, number: int) -> None:
    run = TinyRun.make(shell.run.folder, Path(shell.run.settings.model.path), num_prompts=60)
    worker = shell.commands.start(run.folder, *SERVE[:3], "--max-tokens", "200")
    with closing(open_log(run.settings)) as log:
        wait_until(lambda: log.end_offset(VERIFICATION_EVENTS, 0) > 0)
        worker.send_signal(number)
        assert worker.wait() == 0
        answers, complaint = run.output("worker")
        assert len(answers.splitlines()) < 60
        assert "Traceback" not in complaint
        stored = log.read(VERIFICATION_EVENTS, 0, 0)
        last = decode_verification_event(stored[-1].message.value)
        assert last.is_final
        assert last.finish_reason in (FinishReason.ABORTED, FinishReason.LENGTH)


def _serve_and_archive(shell: Shell) -> None:
    assert shell(*SERVE)[0] == 0
    status, _, complaint = _stopped_when(shell, "archiver", shell.run.events.exists)
    assert (status, complaint) == (0, "")


def _stopped_when(
    shell: Shell, command: str, condition: Callable[[], bool]
) -> tuple[int, str, str]:
    """Run a service until something has happened; return status, output and complaint."""
    service = shell.commands.start(shell.run.folder, command)
    try:
        wait_until(condition)
    finally:
        service.send_signal(signal.SIGTERM)
        status = service.wait()
    return status, *shell.run.output(command)


def _releases(run: TinyRun) -> list[DrafterReleased]:
    with closing(open_log(run.settings)) as log:
        return list(LogReleaseBoard(log, source="test").read_all())


def test_invalid_second_learner_of_a_data_folder_is_refused(shell: Shell) -> None:
    learner = shell.commands.start(shell.run.folder, "learner")
    try:
        wait_until(lambda: len(_releases(shell.run)) == 2)
        line = shell.refusal("learner")
        assert "another learner is at work here; end it" in line
    finally:
        learner.send_signal(signal.SIGTERM)
        assert learner.wait() == 0


def test_invalid_second_worker_of_a_name_is_refused(shell: Shell) -> None:
    with only_one(shell.run.settings.data, "worker worker-0", cure=""):
        line = shell.refusal(*SERVE)
        assert "another worker worker-0 is at work here; set another worker.worker_id" in line
        assert shell(*SERVE, DRAFTLOOP_WORKER__WORKER_ID="worker-1")[0] == 0


def test_without_speculation_the_learner_learns_and_trains_nothing(shell: Shell) -> None:
    plain = {"DRAFTLOOP_WORKER__NUM_SPECULATIVE_TOKENS": "0"}
    assert shell(*SERVE, **plain)[0] == 0
    learner = shell.commands.start(shell.run.folder, "learner", environment=plain)
    try:
        with closing(open_log(shell.run.settings)) as log:
            wait_until(lambda: log.end_offset(POLICIES, 0) >= 3)
    finally:
        learner.send_signal(signal.SIGTERM)
        assert learner.wait() == 0
    assert _releases(shell.run) == []
