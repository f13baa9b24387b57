"""Prompts to tokens and tokens to text, on tokenizers of the server's own.

A fast tokenizer may not be used from two threads; the target's belongs to the target's thread.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from jinja2.exceptions import TemplateError

from inference.server.errors import ApiError, invalid
from inference.server.protocol import ChatRequest, CompletionRequest
from inference.target import Target


class Encoding:
    """Encodes in a thread of its own, decodes where it is called.

    Args:
        target: Whose tokenizer is copied, twice.
    """

    def __init__(self, target: Target) -> None:
        self._encoder = copy.deepcopy(target.tokenizer)
        self._decoder = copy.deepcopy(target.tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._vocab_size = target.vocab_size
        self._context_length = target.context_length

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    async def prompt(self, asked: CompletionRequest | ChatRequest) -> list[int]:
        """Return the prompt's tokens.

        Raises:
            ApiError: If there is no single prompt, or it leaves no room in the context.
        """
        loop = asyncio.get_running_loop()
        if isinstance(asked, ChatRequest):
            field = "messages"
            token_ids = await loop.run_in_executor(self._thread, self._chat, asked)
        else:
            field = "prompt"
            token_ids = await self._prompt(asked)
        if not token_ids:
            raise invalid(field, "it has no tokens: send some text")
        if len(token_ids) >= self._context_length:
            raise ApiError(
                400,
                f"{field}: {len(token_ids)} tokens, and the model's context is "
                f"{self._context_length}: shorten it so that one more fits",
                param=field,
                code="context_length_exceeded",
            )
        return token_ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens left out."""
        return str(self._decoder.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Return one token as text, special tokens too."""
        return str(self._decoder.decode([token_id]))

    async def _prompt(self, asked: CompletionRequest) -> list[int]:
        prompt = asked.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise invalid("prompt", f"{len(prompt)} prompts: send one per request")
            prompt = prompt[0]
        if isinstance(prompt, str):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._encode, prompt)
        token_ids = [token for token in prompt if isinstance(token, int)]
        if not all(0 <= token < self._vocab_size for token in token_ids):
            raise invalid("prompt", f"a token is outside 0..{self._vocab_size - 1}")
        return token_ids

    def _encode(self, text: str) -> list[int]:
        return list(self._encoder(text)["input_ids"])

    def _chat(self, asked: ChatRequest) -> list[int]:
        roles = {"developer": "system"}
        messages = [
            {"role": roles.get(one.role, one.role), "content": one.text} for one in asked.messages
        ]
        if not self._encoder.chat_template:
            return self._encode("\n".join(one["content"] for one in messages))
        try:
            encoded = self._encoder.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )
        except TemplateError as error:
            raise invalid("messages", f"the model's template refuses them: {error}") from error
        return list(encoded["input_ids"])
