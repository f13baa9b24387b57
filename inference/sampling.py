"""How logits become the distribution that verification and drafters use, and how it is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from schemas.events import AcceptanceRule, SamplingRule

_LOWEST_TEMPERATURE = 1e-30
"""Below, float32 logits overflow; what is left of the distribution has long been its maximum."""

_TOP_BLOCK = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """What a request asks for.

    Attributes:
        temperature: 0 for greedy, else > 0.
        top_p: Smallest set of tokens with at least this mass is kept, (0, 1].
        top_k: Tokens kept, 0 for all.
        max_tokens: Most tokens to emit, >= 1.
        min_tokens: No end-of-sequence token before this many, 0..max_tokens.
        stop: Strings that end the request; none is empty.
        seed: Repeats the request's draws; None draws a fresh one.
        ignore_eos: Go on past end-of-sequence tokens (benchmarks only).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} outside [0, inf)")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} outside (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} is negative; 0 keeps all tokens")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} is less than 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} outside 0..{self.max_tokens}")
        if "" in self.stop:
            raise ValueError("stop holds an empty string, which would end every request at once")

    @property
    def is_greedy(self) -> bool:
        """Whether the target takes its most probable token."""
        return self.temperature == 0.0

    def rule(self, *, draws_drafts: bool) -> SamplingRule:
        """Return the acceptance rule; ``draws_drafts`` if drafters sample instead of arg-max."""
        if self.is_greedy:
            rule = AcceptanceRule.GREEDY
        elif draws_drafts:
            rule = AcceptanceRule.SPECULATIVE_SAMPLING
        else:
            rule = AcceptanceRule.ONE_HOT
        return SamplingRule(
            acceptance_rule=rule,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )


def processed_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the distributions in force, float32 (T, V), from logits (T, V).

    Temperature, then top-k, then top-p, as in transformers. At temperature 0 each row is one-hot
    at its first maximum.
    """
    logits = logits.float()
    if params.is_greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / max(params.temperature, _LOWEST_TEMPERATURE)
    if 0 < params.top_k < logits.shape[-1]:
        lowest = logits.topk(params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    probs = logits.softmax(-1)
    if params.top_p < 1.0:
        probs = _nucleus(probs, params.top_p)
    return probs


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    kept = ordered.masked_fill(before >= top_p, 0.0)
    probs = torch.zeros_like(probs).scatter_(-1, index, kept)
    return probs / probs.sum(-1, keepdim=True)


def top_tokens(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` largest of (T, V) logits and their token ids, each (T, count).

    The largest tokens lie in the blocks with the largest maxima; searching those alone is several
    times faster than searching a whole vocabulary.
    """
    rows, vocab_size = logits.shape
    padding = -vocab_size % _TOP_BLOCK
    blocks = F.pad(logits, (0, padding), value=-torch.inf).view(rows, -1, _TOP_BLOCK)
    num_blocks = min(count, blocks.shape[1])
    chosen = blocks.amax(-1).topk(num_blocks, dim=-1).indices
    candidates = blocks.gather(1, chosen[..., None].expand(-1, -1, _TOP_BLOCK)).flatten(1)
    values, places = candidates.topk(count, dim=-1)
    block = chosen.gather(1, places // _TOP_BLOCK)
    return values, block * _TOP_BLOCK + places % _TOP_BLOCK


def draw(probs: torch.Tensor, uniforms: np.ndarray) -> list[int]:
    """Draw one token per row of (T, V) by inversion of ``uniforms`` (T,) in [0, 1).

    The same uniform and the same distribution always give the same token, which is what makes
    seeded requests repeat.
    """
    cumulative = probs.double().cumsum(-1)
    wanted = torch.as_tensor(uniforms, dtype=torch.float64, device=probs.device)[:, None]
    tokens = torch.searchsorted(cumulative, wanted * cumulative[:, -1:], right=True).squeeze(-1)
    # Rounding may leave the last step of the ladder out of reach of a uniform near 1.
    last = (probs > 0).long().cumsum(-1).argmax(-1)
    return torch.minimum(tokens, last).tolist()


class PositionDice:
    """Uniform numbers that belong to positions, however the positions are cut into rounds.

    Args:
        rng: Source of the numbers, owned by this request.
        width: Numbers per position.
    """

    def __init__(self, rng: np.random.Generator, *, width: int = 2) -> None:
        self._rng = rng
        self._numbers = np.empty((0, width))

    def at(self, first: int, count: int) -> np.ndarray:
        """Return the numbers of ``count`` positions from ``first`` on, (count, width) in [0, 1)."""
        missing = first + count - len(self._numbers)
        if missing > 0:
            fresh = self._rng.random((missing, self._numbers.shape[1]))
            self._numbers = np.concatenate([self._numbers, fresh])
        return self._numbers[first : first + count]
