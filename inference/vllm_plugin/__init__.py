"""Draftloop inside an unmodified vLLM; nothing here imports vLLM.

``DraftloopProposer`` is what vLLM's configuration names. docs/vllm.md tells how.
"""

from inference.vllm_plugin.proposer import DraftloopProposer

__all__ = ["DraftloopProposer"]
