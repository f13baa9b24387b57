"""Lookups against what they stand for, written plainly; and how their certainty is learned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.vllm_plugin.lookup import Certainty, Histories, RequestLookup, SharedHistory
from inference.vllm_plugin.lookup_kernels import LOOKUP, MAX_MATCH, NUM_CELLS, SUFFIX, cell_of

K = 4


def lookup(prompt: list[int], history: SharedHistory | None = None) -> RequestLookup:
    return RequestLookup(
        np.array(prompt, np.int32), K, 64, history or SharedHistory(0), Certainty()
    )


def plain_lookup(tokens: list[int]) -> list[int]:
    """Return what follows the newest of the longest earlier matches of the newest tokens."""
    best, place = 1, -1
    for end in range(len(tokens) - 2, 0, -1):
        length = 0
        while length <= end and tokens[end - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        length = min(length, MAX_MATCH)
        if length > best:
            best, place = length, end + 1
    found: list[int] = []
    while place >= 0 and len(found) < K:
        at = place + len(found)
        found.append(tokens[at] if at < len(tokens) else found[at - len(tokens)])
    return found


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 20))
@settings(max_examples=60)
def test_a_lookup_follows_the_newest_of_the_longest_matches(tokens: list[int], cut: int) -> None:
    first = min(cut, len(tokens) - 1)
    one = lookup(tokens[:first])
    one.advance(np.array(tokens[first:], np.int32))
    assert one.draft(LOOKUP, K) == plain_lookup(tokens)


def test_the_longer_match_wins_the_vote_and_the_majority_among_equals() -> None:
    longer = lookup([8, 7, 1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 7, 1])
    longer.advance(np.array([2], np.int32))
    assert longer.draft(SUFFIX, 1) == [3]
    equal = lookup([5, 1, 2, 3, 6, 1, 2, 4, 8, 1, 2, 4, 9, 1])
    equal.advance(np.array([2], np.int32))
    assert equal.draft(SUFFIX, 1) == [4]


def test_where_no_pair_matches_a_single_token_does_and_the_lookup_keeps_silent() -> None:
    one = lookup([5, 1, 2, 3])
    one.advance(np.array([9, 1], np.int32))
    assert one.draft(SUFFIX, 2) == [2, 3]
    assert one.draft(LOOKUP, 2) == []


def test_what_others_wrote_is_found_and_stays_within_its_bytes() -> None:
    history = SharedHistory(20_000)
    rng = np.random.default_rng(0)
    for _ in range(30):
        history.add(rng.integers(10, 10_000, 200).astype(np.int32))
    assert history.num_bytes <= 20_000
    answer = np.arange(500, 540, dtype=np.int32)
    history.add(answer)
    one = lookup([1, 2], history)
    one.advance(answer[3:6])
    assert one.draft(SUFFIX, K) == answer[6:10].tolist()
    assert one.draft(LOOKUP, K) == []


def test_the_end_of_an_answer_is_not_followed_by_the_next_one() -> None:
    history = SharedHistory(20_000)
    history.add(np.array([4, 5, 6, 7], np.int32))
    history.add(np.array([8, 9, 10, 11], np.int32))
    one = lookup([1, 5], history)
    one.advance(np.array([6], np.int32))
    assert one.draft(SUFFIX, K) == [7]


def test_streams_keep_their_histories_apart_unless_they_are_shared() -> None:
    apart = Histories(1 << 20, is_shared=False)
    assert apart.of("left") is not apart.of("right")
    assert Histories(1 << 20, is_shared=True).of("left") is not None
    shared = Histories(1 << 20, is_shared=True)
    assert shared.of("left") is shared.of("right")


def test_many_streams_stay_within_the_bytes_of_all() -> None:
    histories = Histories(1 << 20, is_shared=False)
    for number in range(200):
        histories.of(f"stream-{number}").add(np.arange(3000, dtype=np.int32))
    assert histories.num_bytes <= 1 << 20


def test_a_proposal_that_keeps_coming_true_becomes_surer_and_one_that_does_not_less_sure() -> None:
    period = list(range(10, 17))
    good = lookup(period * 2)
    before = float(lookup(period * 2).chances[SUFFIX, 0])
    good.advance(np.array(period * 6, np.int32))
    assert good.chances[SUFFIX, 0] > max(before, 0.9)
    rng = np.random.default_rng(0)
    bad = lookup([1, 2])
    bad.advance(rng.integers(0, 12, 600).astype(np.int32))
    assert bad.chances[SUFFIX, 0] < 0.5


@given(st.integers(1, 60), st.floats(0.01, 1.0), st.integers(0, 8), st.integers(1, 32))
def test_every_proposal_has_a_cell(length: int, share: float, level: int, support: int) -> None:
    assert 0 <= cell_of(length, share, level, support) < NUM_CELLS


def test_windows_are_those_of_the_tokens_before_them() -> None:
    tokens = np.random.default_rng(3).integers(0, 4, 50).tolist()
    one = lookup(tokens[:10])
    for token in tokens[10:]:
        one.advance(np.array([token], np.int32))
    for start in range(11, 50):
        again = lookup(tokens[:10])
        again.advance(np.array(tokens[10:start], np.int32))
        found = one.proposals(np.array([start]))[0, LOOKUP].tolist()
        assert [t for t in found if t >= 0] == again.draft(LOOKUP, K)


@pytest.mark.parametrize("size", [1, 2, 300])
def test_prompts_of_every_length_are_read(size: int) -> None:
    one = lookup(list(range(size)))
    one.advance(np.array([size, size + 1], np.int32))
    assert one.num_tokens == size + 2
    assert one.draft(LOOKUP, K) == []
