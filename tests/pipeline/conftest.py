"""One broker for all tests of a session that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.broker import broker


@pytest.fixture(scope="session")
def bootstrap_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Kafka-protocol broker."""
    with broker(tmp_path_factory.mktemp("broker")) as servers:
        yield servers
