"""Read the prompts that a demo or a benchmark sends: the project's own file, or another one.

A ``.jsonl`` file holds one object a line, ``{"domain": "code", "prompt": "Write ..."}``; any other
file is plain text, one prompt a line, all of the domain ``default``. Blank lines are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from schemas.checks import IDENTIFIER
from schemas.errors import KnownError

OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")
DEFAULT_DOMAIN = "default"
KEYS = {"domain", "prompt"}


class PromptsError(KnownError):
    """A prompts file cannot be used; the message is one line: file, line number, what is wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What a user asks. ``domain`` names the stream it is sent to, so it is a plain identifier."""

    domain: str
    text: str


def read_prompts(path: Path | None = None) -> list[Prompt]:
    """Return the prompts of ``path`` (the project's own file if None) in the order of the file.

    Raises:
        PromptsError: If the file cannot be read as UTF-8, a line breaks the format, or nothing is
            left; nothing of a bad file is used.
    """
    path = OWN_PROMPTS if path is None else path
    parse = _from_json if path.suffix == ".jsonl" else _from_text
    prompts = []
    for number, line in prompt_lines(path):
        try:
            prompts.append(parse(line))
        except ValueError as error:
            raise PromptsError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise PromptsError(f"{path}: no prompts: write one a line")
    return prompts


def prompt_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers from 1.

    Raises:
        PromptsError: If the file cannot be read, or a line is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PromptsError(f"{path}: unreadable: {error.strerror}") from error
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            byte = line[error.start]
            raise PromptsError(
                f"{path}, line {number}: byte 0x{byte:02x} is not UTF-8: save the file as UTF-8"
            ) from error
        if text:
            yield number, text


def _from_text(line: str) -> Prompt:
    return Prompt(domain=DEFAULT_DOMAIN, text=line)


def _from_json(line: str) -> Prompt:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(found, dict):
        raise ValueError(f"found {type(found).__name__}, expected an object with domain and prompt")
    for problem, keys in (("missing", KEYS - found.keys()), ("unknown", found.keys() - KEYS)):
        if keys:
            raise ValueError(f"{problem} key {min(keys)!r}, expected exactly domain and prompt")
    for key in sorted(KEYS):
        if not isinstance(found[key], str):
            raise ValueError(f"{key} is {type(found[key]).__name__}, expected text")
    if not IDENTIFIER.fullmatch(found["domain"]):
        raise ValueError(f"domain {found['domain'][:60]!r}, expected /{IDENTIFIER.pattern}/")
    if not found["prompt"].strip():
        raise ValueError("the prompt is empty")
    return Prompt(domain=found["domain"], text=found["prompt"].strip())
