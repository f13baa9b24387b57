from __future__ import annotations

import pytest

from pipeline.messaging.traces import TraceContexts

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


def test_a_context_comes_back_as_a_header() -> None:
    traces = TraceContexts()
    traces.note("one", TRACE)
    assert traces.headers("one") == {"traceparent": TRACE.encode()}
    assert traces.headers("two") == {}


@pytest.mark.parametrize("text", ["", "x", TRACE.upper(), TRACE + "-x", TRACE[:-1], TRACE + "\n"])
def test_invalid_contexts_are_passed_over(text: str) -> None:
    traces = TraceContexts()
    traces.note("one", text)
    assert traces.headers("one") == {}


def test_the_oldest_are_forgotten() -> None:
    traces = TraceContexts(capacity=2)
    for name in ("one", "two", "three"):
        traces.note(name, TRACE)
    assert [bool(traces.headers(name)) for name in ("one", "two", "three")] == [False, True, True]
