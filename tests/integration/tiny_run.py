"""A folder to run the real command line in: a tiny model on disk, settings, prompts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from pipeline.configuration.settings import Settings, load_settings
from tests.inference.tiny import tiny_llama, tiny_tokenizer
from tests.integration.broker import settings_text

CONTEXT_LENGTH = 256
MOST_SECONDS = 150.0
DOMAINS = ("code", "maths", "private")
"""The last has not consented to anything."""

_SETTINGS = """
data = "{folder}/data"
cache = "{folder}/cache"
[event_log]
url = "{url}"
[model]
path = "{model}"
dtype = "float32"
[worker]
poll_seconds = 0.05
segment_tokens = 16
[learner]
batch_size = 32
draft_vocabulary_size = 30
keep_versions = 3
[gate]
enabled = false
[content]
consenting_streams = ["code", "maths"]
[features]
enabled = true
[[drafters]]
drafter_id = "none"
kind = "none"
[[drafters]]
drafter_id = "lookup"
kind = "prompt_lookup"
[[drafters]]
drafter_id = "suffix"
kind = "suffix"
[[drafters]]
drafter_id = "head-recent"
kind = "hydra"
inner_size = 8
memory_positions = 150
seed = 1
[[drafters]]
drafter_id = "head-replay"
kind = "hydra"
inner_size = 8
seed = 2
"""


def save_tiny_model(folder: Path, *, vocab_size: int = 40, seed: int = 1) -> None:
    """Save a random Llama and its tokenizer of single characters."""
    target = tiny_llama(seed, vocab_size=vocab_size, context_length=CONTEXT_LENGTH)
    target.model.save_pretrained(folder)
    tiny_tokenizer(vocab_size).save_pretrained(folder)


class RunningCommand(Protocol):
    """A command in a process of its own."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal."""

    def wait(self) -> int:
        """Return the exit status, once it has ended."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until something has happened in another process."""
    deadline = time.monotonic() + MOST_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {MOST_SECONDS} s in vain"
        time.sleep(0.02)


@dataclass(frozen=True, slots=True)
class TinyRun:
    """A folder with ``draftloop.toml`` and ``prompts.jsonl``."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, model: Path, *, url: str = "", num_prompts: int = 6) -> TinyRun:
        """Write settings and prompts, the domains in turn.

        Args:
            folder: Of the run.
            model: Folder of a saved tiny model.
            url: Of the event log; empty = embedded, in the data folder.
            num_prompts: To write.
        """
        text = _SETTINGS.format(folder=folder, model=model, url=url)
        if url.startswith("kafka://"):
            text += settings_text(url.removeprefix("kafka://"))
        (folder / "draftloop.toml").write_text(text)
        rng = np.random.default_rng(0)
        lines = [
            f'{{"domain": "{DOMAINS[index % len(DOMAINS)]}", '
            f'"prompt": "{"".join(rng.choice(list("abcdefgh"), 12))}"}}\n'
            for index in range(num_prompts)
        ]
        (folder / "prompts.jsonl").write_text("".join(lines))
        return cls(folder)

    @property
    def settings(self) -> Settings:
        """The settings as the commands read them."""
        return load_settings(self.folder / "draftloop.toml")

    def edit_settings(self, old: str, new: str) -> None:
        """Replace what stands once in the settings file."""
        path = self.folder / "draftloop.toml"
        text = path.read_text()
        assert text.count(old) == 1, old
        path.write_text(text.replace(old, new))

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command in this folder; its output goes to ``<command>.out`` and ``.err``."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTLOOP_")}
        with (
            (self.folder / f"{arguments[0]}.out").open("wb") as out,
            (self.folder / f"{arguments[0]}.err").open("wb") as err,
        ):
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "pipeline.cli", *arguments],
                cwd=self.folder,
                env=environment,
                stdout=out,
                stderr=err,
            )

    @property
    def events(self) -> Path:
        """Folder of the Parquet log."""
        return self.folder / "data" / "events"

    def output(self, command: str) -> tuple[str, str]:
        """Return what a command wrote to the standard output and to the standard error."""
        out, err = (self.folder / f"{command}.{kind}" for kind in ("out", "err"))
        return out.read_text(), err.read_text()
