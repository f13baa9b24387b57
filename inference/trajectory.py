"""One request as it unfolds: the verified tokens and what the target knew when it wrote them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inference.sampling import SamplingParams


class Trajectory:
    """Verified tokens of one request, prompt included; drafters read it, the engine extends it.

    Args:
        prompt_token_ids: At least one token.
        params: What the request asks for.
        max_output_tokens: Most tokens it can be extended by.
        hidden_size: H of the target.
        dtype: Type of the target's hidden states.
        device: Where they lie.

    Attributes:
        token_ids: Prompt and verified tokens, in order.
        num_prompt_tokens: Length of the prompt.
        params: What the request asks for.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_output_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if not prompt_token_ids:
            raise ValueError("the prompt has no tokens")
        self.token_ids: list[int] = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self._hidden = torch.empty((max_output_tokens, hidden_size), dtype=dtype, device=device)
        self._probs: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens emitted so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    def extend(
        self, token_ids: Sequence[int], hidden: torch.Tensor, probs: torch.Tensor | None
    ) -> None:
        """Append verified tokens.

        Args:
            token_ids: The tokens, (T,).
            hidden: The state behind each token's prediction, (T, H).
            probs: The processed distribution that each token obeys, (T, V); None when greedy or
                not scored.
        """
        first = self.num_output_tokens
        self._hidden[first : first + len(token_ids)] = hidden
        if probs is not None:
            for index, row in enumerate(probs, start=len(self.token_ids)):
                self._probs[index] = row
        self.token_ids.extend(token_ids)

    def hidden(self, first: int, last: int) -> torch.Tensor:
        """Return the states that predicted the tokens at positions first..last - 1, (T, H).

        Only output positions have one: ``num_prompt_tokens`` <= first <= last.
        """
        offset = self.num_prompt_tokens
        return self._hidden[first - offset : last - offset]

    def probs(self, position: int) -> torch.Tensor:
        """Return the distribution that the token at ``position`` obeys, (V,); sampling only."""
        return self._probs[position]

    def forget_probs(self, before: int) -> None:
        """Free the distributions of positions before ``before``; they are large."""
        for position in [p for p in self._probs if p < before]:
            del self._probs[position]
