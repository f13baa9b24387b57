"""Read what a recording serves: prompts, and conversations whose turns follow each other.

A ``.jsonl`` file holds one object a line: ``prompt`` (text) or ``turns`` (a list of texts), and
perhaps ``stream`` (or ``domain``), ``id`` and ``max_tokens``. Any other file is plain text, one
prompt a line. Blank lines are skipped.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.prompts import DEFAULT_DOMAIN, PromptsError, prompt_lines
from schemas.checks import IDENTIFIER

_KEYS = ("prompt", "turns", "stream", "domain", "id", "max_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What one user asks, turn by turn; every turn is a request that has the ones before in it.

    Attributes:
        conversation_id: Names it; with several turns, requests are ``<id>:<turn>`` from 1.
        stream: Of all its requests.
        turns: The user's texts, at least one.
        max_tokens: Tokens per answer; None = as the recording says.
    """

    conversation_id: str
    stream: str
    turns: tuple[str, ...]
    max_tokens: int | None = None

    def request_id(self, turn: int) -> str:
        """Return the id of the request of turn 0, 1, ..."""
        several = len(self.turns) > 1
        return f"{self.conversation_id}:{turn + 1}" if several else self.conversation_id


def read_conversations(path: Path) -> list[Conversation]:
    """Return the conversations of a file in its order.

    One without id is called by its stream and the number of its line.

    Raises:
        PromptsError: If the file cannot be read, a line breaks the format, an id stands twice, or
            nothing is left; nothing of a bad file is used.
    """
    conversations = []
    for number, line in prompt_lines(path):
        try:
            values = json.loads(line) if path.suffix == ".jsonl" else {"prompt": line}
            conversations.append(_conversation(values, number))
        except json.JSONDecodeError as error:
            reason = f"no JSON ({error.msg} at column {error.colno})"
            raise PromptsError(f"{path}, line {number}: {reason}") from error
        except ValueError as error:
            raise PromptsError(f"{path}, line {number}: {error}") from error
    if not conversations:
        raise PromptsError(f"{path}: no prompts: write one a line")
    for conversation_id, count in Counter(one.conversation_id for one in conversations).items():
        if count > 1:
            raise PromptsError(f"{path}: id {conversation_id!r} stands {count} times: make it one")
    return conversations


def _conversation(values: Any, number: int) -> Conversation:
    if not isinstance(values, dict):
        raise ValueError(f"found {type(values).__name__}, expected an object with prompt or turns")
    unknown = sorted(values.keys() - set(_KEYS))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}, expected {', '.join(_KEYS)}")
    if ("prompt" in values) == ("turns" in values):
        raise ValueError("expected either prompt or turns")
    stream = _identifier(values, "stream" if "stream" in values else "domain", DEFAULT_DOMAIN)
    return Conversation(
        conversation_id=_identifier(values, "id", f"{stream}-{number:04}"),
        stream=stream,
        turns=_turns(values),
        max_tokens=_max_tokens(values),
    )


def _identifier(values: dict[str, Any], key: str, default: str) -> str:
    value = values.get(key, default)
    if not isinstance(value, str) or not IDENTIFIER.fullmatch(value):
        raise ValueError(f"{key} {str(value)[:60]!r}, expected /{IDENTIFIER.pattern}/")
    return value


def _turns(values: dict[str, Any]) -> tuple[str, ...]:
    turns = values.get("turns", [values.get("prompt")])
    if not isinstance(turns, list) or not turns:
        raise ValueError("turns is no list of texts, expected at least one")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(f"a turn is {turn!r:.60}, expected text")
    return tuple(turn.strip() for turn in turns)


def _max_tokens(values: dict[str, Any]) -> int | None:
    value = values.get("max_tokens")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"max_tokens {value!r:.60}, expected a whole number >= 1")
    return value
