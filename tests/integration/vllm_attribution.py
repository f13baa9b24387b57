"""Whether events hold the tokens of the requests that they name: every token, once, in place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from schemas.events import FinishReason, VerificationEvent
from tests.integration.vllm_requests import StressRequest

VLLM_ID = re.compile(r"(?:(?P<index>\d+)_)?(?P<id>\d+)-[0-9a-f]{8}")
"""The client's id with vLLM's own random tail, and the number of the answer if it asked for n."""

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


def check_attribution(
    requests: Sequence[StressRequest],
    outputs: Mapping[str, Any],
    events: Sequence[VerificationEvent],
) -> int:
    """Check all events against what the client saw; return the number of tokens in them.

    Raises:
        AssertionError: If a token is missing, twice, or in the events of another request.
    """
    key_to_events: dict[tuple[str, int], list[VerificationEvent]] = {}
    for event in events:
        named = VLLM_ID.fullmatch(event.request_id)
        assert named is not None, event.request_id
        key = named["id"], int(named["index"] or 0)
        key_to_events.setdefault(key, []).append(event)
    num_tokens = 0
    for request in requests:
        seen = outputs[request.id]
        for index in range(request.n):
            tokens = seen["tokens"].get(str(index), [])
            found = key_to_events.pop((request.id, index), [])
            reason = seen["finish"].get(str(index), seen["finish"].get("all"))
            if tokens:
                _check_answer(request, tokens, reason, found)
            else:
                assert not found, f"{request.id}: events without a token"
            num_tokens += len(tokens)
    assert not key_to_events, f"events of nobody: {list(key_to_events)[:3]}"
    return num_tokens


def _check_answer(
    request: StressRequest, tokens: list[int], reason: str, found: list[VerificationEvent]
) -> None:
    assert found, f"{request.id}: {len(tokens)} tokens without an event"
    assert len({event.request_id for event in found}) == 1, request.id
    told: list[int] = []
    for index, event in enumerate(found):
        assert event.content is not None, request.id
        assert event.segment_index == index, request.id
        assert event.stream == request.event_stream, request.id
        assert event.num_prompt_tokens == len(request.prompt), request.id
        assert event.first_position == len(request.prompt) + len(told), request.id
        told += event.content.token_ids.tolist()
        _check_rounds(request, event)
    assert found[0].content is not None
    assert tuple(found[0].content.prompt_token_ids.tolist()) == request.prompt, request.id
    assert told == tokens, f"{request.id} ({reason}): told {told}, seen {tokens}"
    assert [event.is_final for event in found] == [False] * (len(found) - 1) + [True], request.id
    assert found[-1].finish_reason is REASONS[reason], f"{request.id}: {found[-1].finish_reason}"


def _check_rounds(request: StressRequest, event: VerificationEvent) -> None:
    """Check that rounds join up, and that what they call accepted stands in the text."""
    rounds = event.rounds
    assert rounds.num_emitted_tokens.sum() == event.num_positions, request.id
    places = rounds.first_position.astype(int)
    ends = places + rounds.num_emitted_tokens
    assert (ends[:-1] == places[1:]).all(), request.id
    assert (rounds.num_accepted_tokens <= rounds.num_draft_tokens).all(), request.id
    assert (rounds.drafter_index[rounds.num_draft_tokens > 0] >= 0).all(), request.id
    if request.grammar:
        assert not event.windows.start.size, request.id


def num_counted(events: Sequence[VerificationEvent], name: str) -> int:
    """Return the sum of a count of rounds over all events."""
    return int(sum(np.sum(getattr(event.rounds, name), dtype=np.int64) for event in events))
