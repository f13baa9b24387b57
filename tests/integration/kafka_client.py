"""A habit of the client that tests must bear: it leaves sockets of refused connections open."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

forgets_sockets = pytest.mark.filterwarnings("ignore:unclosed <s:ResourceWarning")
"""Marks tests in which connections are refused or lost."""


@contextmanager
def sockets_freed_here() -> Iterator[None]:
    """Free what the client has forgotten; its log records would keep it alive beyond the block."""
    client_logger = logging.getLogger("kafka")
    before = client_logger.level
    client_logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        client_logger.setLevel(before)
        gc.collect()
