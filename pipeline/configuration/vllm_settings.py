"""Settings of the drafter inside vLLM."""

from __future__ import annotations

from pydantic import Field

from pipeline.configuration.pool_settings import Identifier, Section


class VllmSettings(Section):
    """`inference.vllm_plugin.DraftloopProposer`; K is vLLM's own `num_speculative_tokens`."""

    default_stream: Identifier = "vllm"
    """Stream of requests that name none and use no LoRA adapter."""
    history_bytes: int = Field(default=64 * 2**20, ge=0)
    """Bytes of past answers that suffix drafting remembers, over all streams; 0 = none."""
    shares_streams: bool = False
    """Let suffix drafting use the answers of one stream in another."""
    scoring_share: float = Field(default=0.015, ge=0, le=1)
    """Share of the time that scoring heads that do not draft may take."""
    metrics_port: int = Field(default=0, ge=0, le=65_535)
    """Port of the proposer's own metrics, plus its data-parallel rank; 0 = vLLM's page alone."""
