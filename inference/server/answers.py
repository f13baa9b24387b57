"""Answers of the OpenAI API, built from what the scheduler tells."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from inference.scheduler import Progress
from inference.server.acceptance import acceptance_record
from inference.server.encoding import Encoding
from inference.server.errors import ApiError
from inference.server.logprobs import (
    TokenLogprob,
    chat_logprobs,
    completion_logprobs,
    token_logprobs,
)
from inference.server.protocol import ChatRequest, CompletionRequest
from inference.server.text_stream import TextStream, without_broken_end
from inference.worker import Completion
from schemas.events import FinishReason

DONE = b"data: [DONE]\n\n"

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What an answer needs to know of its request.

    Attributes:
        request: As the client sent it.
        request_id: Id of answer and events.
        model: As the client named it.
        num_prompt_tokens: Length of the prompt.
        num_spec_tokens: K as configured.
        fingerprint: Of the target.
    """

    request: CompletionRequest | ChatRequest
    request_id: str
    model: str
    num_prompt_tokens: int
    num_spec_tokens: int
    fingerprint: str

    @property
    def is_chat(self) -> bool:
        """Whether this is a conversation."""
        return isinstance(self.request, ChatRequest)


class Answer:
    """The answer to one request, whole or in chunks.

    Args:
        asked: The request.
        encoding: Turns tokens into text.
    """

    def __init__(self, asked: Asked, encoding: Encoding) -> None:
        self._asked = asked
        self._encoding = encoding
        self._created = int(time.time())
        self._num_logprob_characters = 0
        self._has_role = False

    def whole(self, progress: Sequence[Progress]) -> dict[str, Any]:
        """Return the answer of a request that has ended."""
        completion = progress[-1].completion
        assert completion is not None
        logprobs = [one for part in progress for one in self._token_logprobs(part)]
        text = without_broken_end(completion.text)
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": self._logprobs(logprobs),
            "finish_reason": _FINISH_REASONS[completion.finish_reason],
        }
        if self._asked.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        body = self._envelope([choice], is_chunk=False) | {"usage": self._usage(completion)}
        return body | self._metrics(completion)

    async def chunks(self, progress: AsyncIterator[Progress]) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events while the request is played."""
        try:
            async for chunk in self._chunks(progress):
                yield _event(chunk)
            yield DONE
        except ApiError as error:
            yield _event(error.body)

    async def _chunks(self, progress: AsyncIterator[Progress]) -> AsyncIterator[dict[str, Any]]:
        text = TextStream(self._encoding.text, self._asked.request.stop or ())
        waiting: list[TokenLogprob] = []
        async for one in progress:
            waiting += self._token_logprobs(one)
            if one.completion is None:
                delta = text.push(one.token_ids)
                if delta:
                    yield self._chunk(delta, waiting, None)
                    waiting = []
                continue
            yield self._last_chunk(text.finish(one.completion.text), waiting, one.completion)
            if self._asked.request.wants_usage:
                usage = {"usage": self._usage(one.completion)}
                yield self._envelope([], is_chunk=True) | usage | self._metrics(one.completion)

    def _last_chunk(
        self, delta: str, logprobs: list[TokenLogprob], completion: Completion
    ) -> dict[str, Any]:
        chunk = self._chunk(delta, logprobs, _FINISH_REASONS[completion.finish_reason])
        return chunk if self._asked.request.wants_usage else chunk | self._metrics(completion)

    def _chunk(
        self, delta: str, logprobs: list[TokenLogprob], finish_reason: str | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": self._logprobs(logprobs),
            "finish_reason": finish_reason,
        }
        if self._asked.is_chat:
            role = {} if self._has_role else {"role": "assistant"}
            self._has_role = True
            choice["delta"] = role | {"content": delta}
        else:
            choice["text"] = delta
        usage = {"usage": None} if self._asked.request.wants_usage else {}
        return self._envelope([choice], is_chunk=True) | usage

    def _envelope(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        kind = "text_completion"
        if self._asked.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": self._asked.request_id,
            "object": kind,
            "created": self._created,
            "model": self._asked.model,
            "system_fingerprint": self._asked.fingerprint,
            "choices": choices,
        }

    def _token_logprobs(self, progress: Progress) -> list[TokenLogprob]:
        count = self._asked.request.num_logprobs
        if count is None or progress.logits is None:
            return []
        return token_logprobs(progress.logits, progress.token_ids, count)

    def _logprobs(self, found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._asked.request.num_logprobs is None:
            return None
        if self._asked.is_chat:
            return chat_logprobs(found, self._encoding.token_text)
        block = completion_logprobs(
            found, self._encoding.token_text, offset=self._num_logprob_characters
        )
        self._num_logprob_characters += sum(len(token) for token in block["tokens"])
        return block

    def _usage(self, completion: Completion) -> dict[str, int]:
        """Count tokens that were emitted; drafts that were rejected cost a client nothing."""
        num_prompt, num_output = self._asked.num_prompt_tokens, len(completion.token_ids)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }

    def _metrics(self, completion: Completion) -> dict[str, Any]:
        wanted = self._asked.request.speculative_decoding_metrics
        if wanted == "none":
            return {}
        record = acceptance_record(
            completion.rounds,
            num_spec_tokens=self._asked.num_spec_tokens,
            completion_tokens=len(completion.token_ids),
            is_detailed=wanted == "detailed",
        )
        return {"metrics": {"speculative_decoding": record}}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
