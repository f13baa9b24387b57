"""What the proposer needs from outside, and what it is told of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from schemas.events import DrafterVersion, SamplingRule

if TYPE_CHECKING:
    # For its types alone: the worker itself would bring a second model library into vLLM.
    from inference.worker import EventSink, HiddenStateRecorder, Inbox

HEAD_KINDS = ("hydra", "token_lm")
"""Kinds of heads that draft inside vLLM."""

ENTRY_POINTS = "draftloop.vllm"
"""Entry-point group under which the connection to the event log is found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolMember:
    """One drafter of the pool.

    Attributes:
        version: As events name it.
        kind: ``none``, ``prompt_lookup``, ``suffix``, or a kind of head.
    """

    version: DrafterVersion
    kind: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginOptions:
    """How the proposer drafts and what it reports.

    Attributes:
        worker_id, worker_epoch: Who it is; no two processes share both.
        pool: The drafters, in the order of every array.
        segment_tokens: Verified tokens after which a segment is reported.
        default_stream: Stream of requests that name none.
        consenting_streams: Streams whose token ids, and states if recorded, are reported.
        history_bytes: Bound of the shared histories; 0 shares nothing.
        shares_streams: Whether streams see each other's text in the history.
        scoring_share: Share of a step that scoring heads may take on average.
    """

    worker_id: str
    worker_epoch: int
    pool: tuple[PoolMember, ...]
    segment_tokens: int = 64
    default_stream: str = "vllm"
    consenting_streams: frozenset[str] = frozenset()
    history_bytes: int = 64 * 2**20
    shares_streams: bool = False
    scoring_share: float = 0.015


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetFacts:
    """What is known of the model that verifies.

    Attributes:
        target_id, fingerprint, tokenizer_hash: As events name them.
        vocab_size: V.
        eos_token_ids: Tokens that end a request, unless it ignores them.
        embedding_rows, head_rows: (V, H), lent to heads; None where they cannot be read.
    """

    target_id: str
    fingerprint: str
    tokenizer_hash: str
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    embedding_rows: torch.Tensor | None = None
    head_rows: torch.Tensor | None = None


class Counters(Protocol):
    """Counts for whoever scrapes; every call returns at once."""

    def count(self, name: str, value: float = 1.0, *, drafter: str = "") -> None:
        """Add to a counter."""


@dataclass(frozen=True, kw_only=True)
class Connection:
    """The proposer's links to the event log, all of which return at once.

    Attributes:
        options: How to draft.
        target: What verifies.
        sink: Takes events.
        inbox: Brings released heads.
        recorder: Takes hidden states of consenting streams; None records none.
        counters: For metrics.
        close: Sends what is left and ends the threads.
    """

    options: PluginOptions
    target: TargetFacts
    sink: EventSink
    inbox: Inbox
    recorder: HiddenStateRecorder | None
    counters: Counters
    close: Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlace:
    """Where vLLM's model and tokenizer come from, and which engine process this is.

    Attributes:
        model, tokenizer: Folders.
        rank: Data-parallel rank; ``num_ranks`` of them.
        num_speculative_tokens: K.
    """

    model: str
    tokenizer: str
    rank: int = 0
    num_ranks: int = 1
    num_speculative_tokens: int = 4
    lent_rows: tuple[torch.Tensor, torch.Tensor] | None = None


Connect = Callable[[ModelPlace], Connection]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFacts:
    """What vLLM knows of a request.

    Attributes:
        stream: From its ``draftloop_stream`` argument or its LoRA adapter; empty = not named.
        sampling: How its tokens are drawn.
        max_tokens: Most output tokens; None = not told.
        ignores_end: Whether it writes on behind end tokens.
        stop_token_ids: Further tokens that end it.
        is_constrained: Whether a grammar decides beside the target.
        num_prompt_tokens: None = not told.
        written: Its output as the runner keeps it, which grows; empty = not handed over.
    """

    stream: str = ""
    sampling: SamplingRule
    max_tokens: int | None = None
    ignores_end: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    is_constrained: bool = False
    num_prompt_tokens: int | None = None
    written: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """What the runner hands over beside tokens; row by row as the batch stands.

    Attributes:
        request_ids: Of the rows.
        num_draft_tokens: Drafted tokens that were verified, per row; None = none in any row.
        states: (S, H), the states that were sampled from: one per row, or with drafts
            ``num_draft_tokens + 1`` per row; None = not handed over.
        is_running: Tells whether a request is still known to the runner.
        request: Returns what is known of a request.
        num_scheduled_tokens: Tokens of the step, prompts included.
        draft_token_ids: What was verified, by request id; None = not handed over.
    """

    request_ids: Sequence[str]
    num_draft_tokens: Sequence[int] | None
    states: torch.Tensor | None
    is_running: Callable[[str], bool]
    request: Callable[[str], RequestFacts]
    num_scheduled_tokens: int = 0
    draft_token_ids: Mapping[str, Sequence[int]] | None = None
