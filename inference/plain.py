"""Plain greedy decoding: the target alone, one token per pass. What all else is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference.sampling import SamplingParams
from inference.stopping import Stopping
from inference.target import Target
from schemas.events import FinishReason


@dataclass(frozen=True, slots=True)
class PlainOutput:
    """Tokens, and per token how far the target's best logit was above its second."""

    token_ids: tuple[int, ...]
    logit_gaps: tuple[float, ...]


def plain_greedy(
    target: Target, prompt_token_ids: Sequence[int], params: SamplingParams
) -> PlainOutput:
    """Decode a greedy request without drafts, scoring or events."""
    room = target.context_length - len(prompt_token_ids)
    stopping = Stopping(params, target.eos_token_ids, room=room, decode=target.decode)
    session = target.start()
    unseen, token_ids, gaps = list(prompt_token_ids), list[int](), list[float]()
    finish_reason = FinishReason.UNFINISHED
    while finish_reason is FinishReason.UNFINISHED:
        logits = session.forward(unseen, num_rows=1).logits
        logits = stopping.mask_early_end(logits, len(token_ids))
        wide = logits[0].float()
        best = wide.topk(2).values
        # Arg-max and not the first of the two: it is what breaks ties in verification.
        unseen = [int(wide.argmax())]
        _, finish_reason = stopping.cut(token_ids, unseen)
        token_ids += unseen
        gaps.append(float(best[0] - best[1]))
    return PlainOutput(tuple(token_ids), tuple(gaps))
