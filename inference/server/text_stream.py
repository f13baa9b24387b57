"""The text of a stream: what may be sent already, and what must wait for the tokens to come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 64


def without_broken_end(text: str) -> str:
    """Return a text without the half of a character that it may end in."""
    return text.rstrip(REPLACEMENT)


class TextStream:
    """Turns emitted tokens into deltas whose sum is the final text.

    Two things are held back: the bytes of a character that is not complete, and the beginning of
    what may become a stop string. Only the newest tokens are decoded, so that a long answer costs
    what a short one does per token.

    Args:
        decode: Text of tokens.
        stop: Stop strings of the request.

    Attributes:
        num_sent: Characters handed out so far.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = stop
        self._token_ids: list[int] = []
        self._first = 0
        self._complete = 0
        self._num_known = 0
        self._held = ""
        self.num_sent = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Return what may be sent now that these tokens are known."""
        self._token_ids.extend(token_ids)
        text = self._decode(self._token_ids[self._first :])
        whole = without_broken_end(text)
        ready = self._held + whole[self._num_known :]
        self._num_known = max(self._num_known, len(whole))
        if len(whole) == len(text):
            self._move_on()
        self._held = _beginning_of_stop(ready, self._stop)
        return self._sent(ready[: len(ready) - len(self._held)])

    def finish(self, text: str) -> str:
        """Return the rest of the final text."""
        return self._sent(without_broken_end(text)[self.num_sent :])

    def _move_on(self) -> None:
        """Let the window begin where the text was last complete before it."""
        if len(self._token_ids) - self._first > _WINDOW and self._complete > self._first:
            self._first = self._complete
            self._num_known = len(self._decode(self._token_ids[self._first :]))
        self._complete = len(self._token_ids)

    def _sent(self, delta: str) -> str:
        self.num_sent += len(delta)
        return delta


def _beginning_of_stop(text: str, stop: Sequence[str]) -> str:
    """Return the longest end of ``text`` that a stop string begins with, short of all of it."""
    longest = 0
    for one in stop:
        for size in range(min(len(one) - 1, len(text)), longest, -1):
            if one.startswith(text[-size:]):
                longest = size
                break
    return text[len(text) - longest :]
