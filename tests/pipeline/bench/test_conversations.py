"""Files of prompts and conversations for a recording."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.bench.conversations import Conversation, read_conversations
from pipeline.prompts import PromptsError


def written(folder: Path, text: str, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_lines_are_prompts_or_conversations_with_ids_and_streams(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '{"domain": "code", "prompt": " one "}\n\n'
        '{"stream": "shift", "domain": "maths", "id": "s-1", "turns": ["a", "b"], '
        '"max_tokens": 8}\n',
    )
    first, second = read_conversations(path)
    assert first == Conversation(conversation_id="code-0001", stream="code", turns=("one",))
    assert second == Conversation(
        conversation_id="s-1", stream="shift", turns=("a", "b"), max_tokens=8
    )
    assert first.request_id(0) == "code-0001"
    assert [second.request_id(turn) for turn in (0, 1)] == ["s-1:1", "s-1:2"]


def test_plain_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    found = read_conversations(written(tmp_path, "a b\n\nc\n", "prompts.txt"))
    assert [(one.conversation_id, one.turns) for one in found] == [
        ("default-0001", ("a b",)),
        ("default-0003", ("c",)),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 1: no JSON"),
        ("[]", "line 1: found list, expected an object"),
        ("{}", "line 1: expected either prompt or turns"),
        ('{"prompt": "a", "turns": ["a"]}', "line 1: expected either prompt or turns"),
        ('{"prompt": "a", "extra": 1}', "line 1: unknown key 'extra', expected prompt"),
        ('{"prompt": 3}', "line 1: a turn is 3, expected text"),
        ('{"turns": "a"}', "line 1: turns is no list"),
        ('{"turns": []}', "line 1: turns is no list"),
        ('{"turns": ["a", " "]}', "line 1: a turn is ' ', expected text"),
        ('{"prompt": "a", "stream": "a/b"}', "line 1: stream 'a/b', expected /"),
        ('{"prompt": "a", "id": ""}', "line 1: id '', expected /"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens 0, expected a whole number"),
        ('{"prompt": "a", "max_tokens": true}', "line 1: max_tokens True"),
        ('{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}', "id 'x' stands 2 times"),
        ("", "no prompts: write one a line"),
    ],
)
def test_invalid_lines_are_named_with_number_and_reason(
    tmp_path: Path, line: str, reason: str
) -> None:
    with pytest.raises(PromptsError) as caught:
        read_conversations(written(tmp_path, line))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
