"""The prompts: the project's own file, other files, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pipeline.prompts import Prompt, PromptsError, read_prompts


def test_own_prompts_cover_four_domains_without_repeats() -> None:
    prompts = read_prompts()
    domain_to_count = Counter(prompt.domain for prompt in prompts)
    least = {"code": 52, "maths": 44, "sql": 20, "medicine": 20}
    assert domain_to_count.keys() == least.keys()
    assert all(domain_to_count[domain] >= count for domain, count in least.items())
    assert len({prompt.text for prompt in prompts}) == len(prompts)


def test_own_prompts_are_short_plain_sentences() -> None:
    for prompt in read_prompts():
        assert prompt.text.isascii()
        assert 20 <= len(prompt.text) <= 260, prompt.text
        assert prompt.text[0].isupper() and prompt.text[-1] in ".?", prompt.text


def test_json_lines_keep_their_order_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"domain": "b", "prompt": " two \\n lines "}\r\n\r\n'
        b'{"prompt": "gr\xc3\xbc\xc3\x9fe", "domain": "a"}'
    )
    assert read_prompts(path) == [
        Prompt(domain="b", text="two \n lines"),
        Prompt(domain="a", text="grüße"),
    ]


def test_any_other_file_is_plain_text_of_the_default_domain(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text('Say hello.\n\n{"domain": 3}\n')
    assert read_prompts(path) == [
        Prompt(domain="default", text="Say hello."),
        Prompt(domain="default", text='{"domain": 3}'),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "no JSON"),
        (b"[]", "found list, expected an object"),
        (b'{"prompt": "x"}', "missing key 'domain'"),
        (b'{"domain": "x"}', "missing key 'prompt'"),
        (b'{"domain": "x", "prompt": "y", "id": 1}', "unknown key 'id'"),
        (b'{"domain": 1, "prompt": "y"}', "domain is int, expected text"),
        (b'{"domain": "x", "prompt": null}', "prompt is NoneType, expected text"),
        (b'{"domain": "x", "prompt": " "}', "the prompt is empty"),
        (b'{"domain": "../x", "prompt": "y"}', "domain '../x', expected /"),
        (b'{"domain": "x", "prompt": "\xe9"}', "byte 0xe9 is not UTF-8"),
    ],
)
def test_invalid_line_is_named_with_file_and_number(
    tmp_path: Path, line: bytes, message: str
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'{"domain": "x", "prompt": "good"}\n\n' + line + b"\n")
    with pytest.raises(PromptsError) as refusal:
        read_prompts(path)
    assert str(refusal.value).startswith(f"{path}, line 3: ")
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.txt"])
def test_invalid_empty_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("\n \n")
    with pytest.raises(PromptsError, match=f"{name}: no prompts"):
        read_prompts(tmp_path / name)


def test_invalid_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match=r"gone\.jsonl: unreadable: No such file"):
        read_prompts(tmp_path / "gone.jsonl")
    with pytest.raises(PromptsError, match="unreadable: Is a directory"):
        read_prompts(tmp_path)
