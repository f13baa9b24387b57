"""The target: the model whose law every output must have."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from inference.cache import RollbackCache, RollbackUnsupportedError, layer_windows
from inference.model_files import fingerprint, tokenizer_hash
from inference.packing import pack_linear_layers


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """One forward over T tokens; row i belongs to the i-th of the last rows asked for.

    Attributes:
        logits: (T, V), what the target predicts after each token.
        hidden: (T, H), the last hidden state (after the final norm) behind each row of logits.
    """

    logits: torch.Tensor
    hidden: torch.Tensor


class Target:
    """A causal language model of transformers with what speculation needs to know of it.

    Args:
        model: In evaluation mode; its attention must be full or sliding-window.
        tokenizer: The tokenizer of the model.
        target_id: Name in events.
        target_fingerprint: Hash of the weights; drafters are bound to it.

    Raises:
        RollbackUnsupportedError: If the model keeps a state that cannot be rolled back.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, target_id: str, target_fingerprint: str
    ) -> None:
        if getattr(model, "_is_stateful", False):
            raise RollbackUnsupportedError(
                f"{type(model).__name__} keeps a running state that speculation cannot roll back: "
                "choose a target with attention in every layer"
            )
        layer_windows(model.config)
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.target_id = target_id
        self.fingerprint = target_fingerprint
        self.tokenizer_hash = tokenizer_hash(tokenizer)
        text = model.config.get_text_config(decoder=True)
        self.vocab_size: int = text.vocab_size
        self.hidden_size: int = text.hidden_size
        self.context_length: int = getattr(text, "max_position_embeddings", None) or 1 << 20
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def embedding_rows(self) -> torch.Tensor:
        """Input embeddings, (V, H); frozen."""
        return self.model.get_input_embeddings().weight.detach()  # type: ignore[no-any-return]

    @property
    def head_rows(self) -> torch.Tensor:
        """Output head, (V, H); frozen."""
        return self.model.get_output_embeddings().weight.detach()  # type: ignore[no-any-return]

    def start(self) -> TargetSession:
        """Return an empty session."""
        return TargetSession(self, RollbackCache(self.model.config))

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a user's prompt, in the chat template if there is one."""
        return self.encode_conversation([prompt])

    def encode_conversation(self, texts: Sequence[str]) -> list[int]:
        """Return the token ids of what user and target said in turn, the user first and last."""
        if self.tokenizer.chat_template:
            messages = [
                {"role": "assistant" if index % 2 else "user", "content": text}
                for index, text in enumerate(texts)
            ]
            encoded = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )
            return list(encoded["input_ids"])
        return list(self.tokenizer("\n".join(texts))["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of output tokens, special tokens left out."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


class TargetSession:
    """The target's key-value cache of one request."""

    def __init__(self, target: Target, cache: RollbackCache) -> None:
        self._target = target
        self._cache = cache

    @property
    def length(self) -> int:
        """Positions in the cache."""
        return int(self._cache.get_seq_length())

    @torch.inference_mode()
    def states(self, token_ids: Sequence[int], *, num_rows: int) -> torch.Tensor:
        """Feed T tokens and return the last ``num_rows`` states, (num_rows, H), without logits."""
        hidden, _ = self._fed(token_ids, num_logits=0)
        return hidden[len(token_ids) - num_rows :]

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], *, num_rows: int | None = None) -> TargetOutput:
        """Feed T tokens and return the last ``num_rows`` rows (all by default)."""
        kept = (num_rows or None) if self._target._keeps_rows else None
        hidden, logits = self._fed(token_ids, num_logits=kept)
        last = slice(-num_rows if num_rows else None, None)
        return TargetOutput(logits=logits[last], hidden=hidden[last])

    def _fed(
        self, token_ids: Sequence[int], *, num_logits: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed T tokens; return what the output head reads, (rows, H), and the logits.

        ``num_logits`` = 0 spares the head; more are asked of a model that can keep to the last
        so many; None asks for all.
        """
        target = self._target
        rows = {"logits_to_keep": num_logits} if num_logits else {}
        captured: list[torch.Tensor] = []

        def capture(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
            captured.append(inputs[0])
            return (inputs[0][:, :0],) if num_logits == 0 else None

        hook = target.model.get_output_embeddings().register_forward_pre_hook(capture)
        try:
            ids = torch.tensor([list(token_ids)], device=target.device)
            output = target.model(input_ids=ids, cache=self._cache, use_cache=True, **rows)
        finally:
            hook.remove()
        return captured[0][0], output.logits[0]

    def keep(self, length: int) -> None:
        """Forget every position from ``length`` on."""
        self._cache.keep(length)


def load_target(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    cache: Path | None = None,
) -> Target:
    """Load a target from a folder with config, weights and tokenizer (see ``model_files``).

    ``cache`` is where the fingerprints of large weights are noted; None for the user's own.
    """
    # Bars of transformers would tear the live view, and are noise in the log of a service.
    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    pack_linear_layers(model)
    return Target(
        model, tokenizer, target_id=folder.name, target_fingerprint=fingerprint(folder, cache)
    )


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = tokenizer.eos_token_id
    if configured is None:
        return frozenset()
    return frozenset(configured if isinstance(configured, list) else [configured])
