"""The command line, many times: ``python -P -m tests.integration.commands``.

Every command runs in a process of its own, forked from one that has imported everything, because
the imports take several seconds. Requests and answers are lines on the standard input and output:
``{"start": [argument, ...], "folder": ..., "output": ...}`` is answered by the process's id,
``{"wait": id}`` by its exit status.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.models.llama import modeling_llama

from pipeline import cli
from pipeline.batch import serve_prompts
from pipeline.learning import build_learner

IMPORTED = (modeling_llama, serve_prompts, build_learner)
"""What the commands import only when they need it."""


class ForkedCommand:
    """One command that runs or ran; used like ``subprocess.Popen``."""

    def __init__(self, commands: Commands, process_id: int) -> None:
        self._commands = commands
        self.process_id = process_id

    def send_signal(self, number: int) -> None:
        """Send a signal to a command that has not been waited for."""
        os.kill(self.process_id, number)

    def wait(self) -> int:
        """Return the exit status, once it has ended; -9 if it was killed."""
        return self._commands.wait(self.process_id)


class Commands:
    """The client's side: starts commands and waits for them."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def start(
        self, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> ForkedCommand:
        """Start a command in ``folder``.

        What it writes goes to ``<command>.out`` and ``<command>.err`` there.
        """
        request = {
            "start": arguments,
            "folder": str(folder),
            "environment": dict(environment or {}),
        }
        return ForkedCommand(self, self._ask(request))

    def wait(self, process_id: int) -> int:
        """Return the exit status of a process, once it has ended."""
        return self._ask({"wait": process_id})

    def run(
        self, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> tuple[int, str, str]:
        """Run a command and return exit status, standard output and standard error."""
        status = self.start(folder, *arguments, environment=environment).wait()
        out, err = (folder / f"{arguments[0]}{kind}" for kind in (".out", ".err"))
        return status, out.read_text(), err.read_text()

    def _ask(self, request: Mapping[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return int(self._process.stdout.readline())


@contextmanager
def open_commands() -> Iterator[Commands]:
    """Yield the client; the server ends with the block, its commands are for the caller to end."""
    pipe = subprocess.PIPE
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTLOOP_")}
    # The command line sets it, but the imports that read it come first here.
    environment["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.integration.commands"],
        stdin=pipe,
        stdout=pipe,
        bufsize=0,
        env=environment,
    ) as process:
        yield Commands(process)
        assert process.stdin is not None
        process.stdin.close()


def main() -> None:
    """Serve until the standard input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                _run_command(request)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _run_command(request: Mapping[str, Any]) -> None:
    """Be the command line, and end."""
    status: int | str | None = 1
    try:
        os.chdir(request["folder"])
        os.environ |= request["environment"]
        for number, kind in ((0, None), (1, "out"), (2, "err")):
            path = os.devnull if kind is None else f"{request['start'][0]}.{kind}"
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), number)
        sys.argv = ["draftloop", *request["start"]]
        cli.main()
        status = 0
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    main()
