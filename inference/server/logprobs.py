"""Log-probabilities of emitted tokens, as the two routes of the OpenAI API write them.

They are the target's own, before temperature, top-k and top-p: the same with and without
speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inference.sampling import top_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """One emitted token: its log-probability and the most probable (token id, it) there."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprob]:
    """Return one record per emitted token from the target's logits at it, (emitted, V)."""
    log_probs = logits.float().log_softmax(-1)
    chosen = log_probs.gather(1, torch.tensor(token_ids, device=log_probs.device)[:, None])
    count = min(num_top, logits.shape[-1])
    values, ids = top_tokens(log_probs, count) if count else (log_probs[:, :0], log_probs[:, :0])
    return [
        TokenLogprob(
            token_id=token_id,
            logprob=finite(value),
            top=tuple((int(i), finite(v)) for i, v in zip(top_ids, top_values, strict=True)),
        )
        for token_id, value, top_ids, top_values in zip(
            token_ids, chosen[:, 0].tolist(), ids.tolist(), values.tolist(), strict=True
        )
    ]


def finite(value: float) -> float:
    """Return a number that JSON can hold: a token that may not be chosen has none."""
    return max(value, -9999.0)


def completion_logprobs(
    found: Sequence[TokenLogprob], text_of: Callable[[int], str], *, offset: int
) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of ``/v1/completions``; offsets count decoded tokens."""
    tokens = [text_of(one.token_id) for one in found]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [one.logprob for one in found],
        "top_logprobs": [{text_of(i): value for i, value in one.top} for one in found],
        "text_offset": offsets,
    }


def chat_logprobs(found: Sequence[TokenLogprob], text_of: Callable[[int], str]) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of ``/v1/chat/completions``."""

    def entry(token_id: int, value: float) -> dict[str, Any]:
        text = text_of(token_id)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    return {
        "content": [
            {
                **entry(one.token_id, one.logprob),
                "top_logprobs": [entry(i, value) for i, value in one.top],
            }
            for one in found
        ],
        "refusal": None,
    }
