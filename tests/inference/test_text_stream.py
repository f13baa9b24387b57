"""Deltas add up to the final text, show no half of a character and no start of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.server.text_stream import TextStream, without_broken_end


def decode(token_ids: Sequence[int]) -> str:
    """Tokens are bytes."""
    return bytes(token_ids).decode(errors="replace")


def deltas(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> list[str]:
    stream = TextStream(decode, stop)
    found = [stream.push(piece) for piece in pieces]
    return [*found, stream.finish(decode(b"".join(pieces)))]


@given(
    st.text(max_size=120).map(str.encode),
    st.lists(st.integers(0, 400), max_size=80).map(sorted),
)
def test_deltas_of_any_text_in_any_pieces_add_up_without_replacement(
    text: bytes, cuts: list[int]
) -> None:
    edges = [0, *(cut for cut in cuts if cut < len(text)), len(text)]
    found = deltas([text[a:b] for a, b in pairwise(edges)])
    assert "".join(found) == without_broken_end(text.decode())
    assert text.decode().count("\ufffd") >= sum(delta.count("\ufffd") for delta in found)


@given(st.lists(st.binary(min_size=1, max_size=5), max_size=60))
def test_deltas_of_any_bytes_add_up(pieces: list[bytes]) -> None:
    expected = without_broken_end(decode(b"".join(pieces)))
    found = deltas(pieces)
    assert "".join(found) == expected
    assert not any(delta.endswith("\ufffd") for delta in found)


@pytest.mark.parametrize(
    "text", ["a🦊b", "שלום עולם", "漢字 かな", "é" * 200, "👩\u200d👩\u200d👧" * 40]
)
def test_characters_of_several_bytes_come_whole(text: str) -> None:
    """H3: one byte per token, over the edge of the decoded window too."""
    found = deltas([bytes([byte]) for byte in text.encode()])
    assert "".join(found) == text
    assert all("\ufffd" not in delta for delta in found)


def test_a_stop_string_leaks_no_start_of_itself() -> None:
    """H4: DEF|G|HI|J is held back token by token, and what came to nothing is let go."""
    stream = TextStream(decode, ["DEFGHIJ"])
    assert [stream.push(piece) for piece in (b"abc", b"DEF", b"G", b"HI")] == ["abc", "", "", ""]
    assert stream.finish("abc") == ""
    other = TextStream(decode, ["DEFGHIJ", "IX"])
    pieces = (b"abc", b"DEF", b"G", b"HI", b"K")
    assert [other.push(piece) for piece in pieces] == ["abc", "", "", "", "DEFGHIK"]


@given(st.lists(st.sampled_from([b"a", b"ab", b"b", b"ba", b"c"]), max_size=30))
def test_nothing_is_sent_that_a_stop_may_still_cut(pieces: list[bytes]) -> None:
    stop = ["abab", "bc"]
    stream, text, sent = TextStream(decode, stop), "", ""
    for piece in pieces:
        text += piece.decode()
        ends = [at for one in stop if (at := text.find(one)) >= 0]
        if ends:
            assert text[: min(ends)].startswith(sent)
            sent += stream.finish(text[: min(ends)])
            assert sent == text[: min(ends)]
            return
        sent += stream.push(piece)
    assert sent + stream.finish(text) == text
