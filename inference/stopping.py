"""Where a request ends: end-of-sequence tokens, stop strings, token budget, context."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from inference.sampling import SamplingParams
from schemas.events import FinishReason


class Stopping:
    """Decides, token by token, whether a request has ended.

    Args:
        params: Of the request.
        eos_token_ids: Tokens that end a text.
        room: Tokens that fit behind the prompt in the target's context.
        decode: Text of output tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Collection[int],
        *,
        room: int,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._params = params
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._masked = sorted(eos_token_ids)
        self._budget = min(params.max_tokens, room)
        self._decode = decode
        self._text_end: int | None = None

    def num_speculative_tokens(self, num_output_tokens: int, wanted: int) -> int:
        """Return how many tokens may be drafted now, so that the bonus token still fits."""
        return max(min(wanted, self._budget - num_output_tokens - 1), 0)

    def mask_early_end(self, logits: torch.Tensor, num_output_tokens: int) -> torch.Tensor:
        """Forbid ending in the rows of (T, V) that come before ``min_tokens``."""
        early = self._params.min_tokens - num_output_tokens
        if early <= 0 or not self._masked:
            return logits
        masked = logits.clone()
        rows = torch.arange(min(early, len(logits)), device=logits.device)
        masked[rows[:, None], torch.tensor(self._masked, device=logits.device)] = -torch.inf
        return masked

    def cut(
        self, output_token_ids: Sequence[int], new_token_ids: Sequence[int]
    ) -> tuple[int, FinishReason]:
        """Return how many of the new tokens are emitted, and why the request ends after them."""
        output = list(output_token_ids)
        for count, token in enumerate(new_token_ids, start=1):
            output.append(token)
            if token in self._eos_token_ids:
                return count, FinishReason.STOP
            if self._ends_in_stop_string(output):
                return count, FinishReason.STOP
            if len(output) >= self._budget:
                return count, FinishReason.LENGTH
        return len(new_token_ids), FinishReason.UNFINISHED

    def text(self, output_token_ids: Sequence[int]) -> str:
        """Return the text of a finished output, cut before the stop string that ended it."""
        return self._decode(output_token_ids)[: self._text_end]

    def _ends_in_stop_string(self, output: Sequence[int]) -> bool:
        if not self._params.stop or len(output) < self._params.min_tokens:
            return False
        # Only what the newest token completes counts: an earlier match was let pass on purpose.
        # A character of several tokens may change the end of the text that was known before.
        text = self._decode(output)
        known = _num_shared(self._decode(output[:-1]), text)
        found = [
            at
            for stop in self._params.stop
            if (at := text.find(stop, max(known - len(stop) + 1, 0))) >= 0
        ]
        self._text_end = min(found, default=None)
        return bool(found)


def _num_shared(before: str, after: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(before, after, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))
