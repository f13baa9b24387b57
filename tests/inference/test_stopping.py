"""Where a request ends, token by token."""

from __future__ import annotations

import pytest
import torch

from inference.sampling import SamplingParams
from inference.stopping import Stopping
from schemas.events import FinishReason
from tests.inference.tiny import FIRST_BYTE, SECOND_BYTE, tiny_tokenizer

A, B, C, D = 1, 2, 3, 4


def decode(token_ids: object) -> str:
    """Return the text of tokens."""
    return str(tiny_tokenizer().decode(list(token_ids), skip_special_tokens=True))  # type: ignore[call-overload]


def stopping(params: SamplingParams, *, eos: tuple[int, ...] = (), room: int = 100) -> Stopping:
    """Return the rules of a request over the tiny tokenizer."""
    return Stopping(params, eos, room=room, decode=decode)


def test_tokens_behind_the_first_end_are_cut() -> None:
    rules = stopping(SamplingParams(), eos=(D,))
    assert rules.cut([A], [B, D, D, C]) == (2, FinishReason.STOP)
    assert rules.cut([A], [B, C]) == (2, FinishReason.UNFINISHED)


@pytest.mark.parametrize(
    ("stop", "output", "new", "count", "text"),
    [
        ("bc", [A], [B, C, D], 2, "a"),
        ("bcd", [A, B, C], [D, A], 1, "a"),
        ("abcd", [A, B], [C, D], 2, ""),
        ("c", [A, B], [C], 1, "ab"),
        ("é", [A], [FIRST_BYTE, SECOND_BYTE, B], 2, "a"),
        ("é", [A, FIRST_BYTE], [SECOND_BYTE, B], 1, "a"),
        ("aéb", [A, FIRST_BYTE], [SECOND_BYTE, B], 2, ""),
        ("bé", [A, B], [FIRST_BYTE, SECOND_BYTE], 2, "a"),
    ],
)
def test_a_stop_string_ends_the_request_with_the_token_that_completes_it(
    stop: str, output: list[int], new: list[int], count: int, text: str
) -> None:
    """A7, H4: also where the character before it was only half known."""
    rules = stopping(SamplingParams(stop=(stop,)))
    assert rules.cut(output, new) == (count, FinishReason.STOP)
    assert rules.text([*output, *new[:count]]) == text


def test_the_first_of_several_stop_strings_cuts_the_text() -> None:
    rules = stopping(SamplingParams(stop=("cd", "bcd", "zz")))
    assert rules.cut([A, B, C], [D]) == (1, FinishReason.STOP)
    assert rules.text([A, B, C, D]) == "a"


def test_text_that_matches_no_stop_string_is_whole() -> None:
    rules = stopping(SamplingParams(stop=("bd",)))
    assert rules.cut([A], [B, C, D]) == (3, FinishReason.UNFINISHED)
    assert rules.text([A, B, C, D]) == "abcd"


def test_a_stop_string_before_min_tokens_is_let_pass_for_good() -> None:
    rules = stopping(SamplingParams(stop=("b",), min_tokens=3, max_tokens=9))
    assert rules.cut([], [A, B, C, D]) == (4, FinishReason.UNFINISHED)
    assert rules.cut([A, B, C, D], [A, B]) == (2, FinishReason.STOP)
    assert rules.text([A, B, C, D, A, B]) == "abcda"


def test_a_stop_string_may_begin_before_min_tokens() -> None:
    rules = stopping(SamplingParams(stop=("bc",), min_tokens=3, max_tokens=9))
    assert rules.cut([A], [B, C]) == (2, FinishReason.STOP)


@pytest.mark.parametrize(("max_tokens", "room", "budget"), [(5, 100, 5), (50, 3, 3), (4, 4, 4)])
def test_the_budget_is_the_smaller_of_max_tokens_and_room(
    max_tokens: int, room: int, budget: int
) -> None:
    rules = stopping(SamplingParams(max_tokens=max_tokens), room=room)
    assert rules.cut([], [A] * 9) == (budget, FinishReason.LENGTH)
    for emitted in range(budget):
        assert rules.num_speculative_tokens(emitted, 8) == min(8, budget - emitted - 1)
    assert rules.num_speculative_tokens(budget, 8) == 0


def test_an_end_at_the_last_token_of_the_budget_is_a_stop() -> None:
    rules = stopping(SamplingParams(max_tokens=2), eos=(D,))
    assert rules.cut([A], [D]) == (1, FinishReason.STOP)


@pytest.mark.parametrize("num_output_tokens", [0, 1, 2, 3, 4, 9])
def test_ends_are_masked_exactly_in_the_rows_before_min_tokens(num_output_tokens: int) -> None:
    """A6: row i predicts output token ``num_output_tokens + i``."""
    rules = stopping(SamplingParams(min_tokens=4), eos=(0, D))
    logits = torch.zeros((3, 6))
    masked = rules.mask_early_end(logits, num_output_tokens).isinf()
    for row in range(3):
        assert masked[row].tolist() == [
            token in (0, D) and num_output_tokens + row < 4 for token in range(6)
        ]
    assert not logits.isinf().any()


def test_nothing_is_masked_without_an_end_token() -> None:
    logits = torch.zeros((2, 6))
    assert stopping(SamplingParams(min_tokens=4)).mask_early_end(logits, 0) is logits


def test_ignored_ends_do_not_end() -> None:
    rules = stopping(SamplingParams(ignore_eos=True), eos=(D,))
    assert rules.cut([], [D, A]) == (2, FinishReason.UNFINISHED)
