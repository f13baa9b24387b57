"""Counters of the proposer inside vLLM, in the registry that vLLM's own page is made from.

vLLM's page shows them where engine and API share a process, and with several API servers, whose
engines write to files that the page adds up (``PROMETHEUS_MULTIPROC_DIR``). Otherwise the engine
is a process of its own: ``vllm.metrics_port`` opens a page there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache

from prometheus_client import REGISTRY, CollectorRegistry, Counter, start_http_server

PREFIX = "draftloop_vllm_"

NAME_TO_HELP: Mapping[str, str] = {
    "verifications": "Target passes per row, by who drafted for it.",
    "draft_tokens": "Tokens proposed and verified.",
    "accepted_tokens": "Proposed tokens that were accepted, without bonus.",
    "emitted_tokens": "Tokens that rows emitted, by who drafted.",
    "requests": "Requests that ended.",
    "failures": "Steps that went on without a part that failed, by part.",
    "own_seconds": "Seconds of drafting, selection, scoring and reporting, by part.",
    "step_seconds": "Seconds of all steps, ours included.",
}

logger = logging.getLogger(__name__)


class VllmCounters:
    """Implements ``inference.vllm_plugin.ports.Counters``.

    Args:
        registry: Where the counters are registered, once per process.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._name_to_counter = {
            name: Counter(PREFIX + name, text, ["drafter"], registry=registry)
            for name, text in NAME_TO_HELP.items()
        }
        self._children: dict[tuple[str, str], Counter] = {}

    def count(self, name: str, value: float = 1.0, *, drafter: str = "") -> None:
        """Add to a counter."""
        key = (name, drafter)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._name_to_counter[name].labels(drafter)
        child.inc(value)


@cache
def process_counters() -> VllmCounters:
    """Return the counters of this process, which may hold several engines, one after the other."""
    return VllmCounters()


def serve_metrics(port: int, registry: CollectorRegistry = REGISTRY) -> Callable[[], None]:
    """Open a page of metrics, and return what closes it; a port in use costs the page alone."""
    if not port:
        return lambda: None
    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        logger.warning("vllm.metrics_port = %d: no page of metrics: %s", port, error)
        return lambda: None

    def close() -> None:
        server.shutdown()
        thread.join(timeout=5.0)

    return close
