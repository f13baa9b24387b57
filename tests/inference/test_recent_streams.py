"""A worker remembers the streams used last, however many there are."""

from __future__ import annotations

import pytest

from inference import recent_streams
from inference.priors import StreamPolicies
from inference.recent_streams import RecentStreams
from learner.selection import parse_policy
from tests.schemas.builders import make_policy


def test_the_least_recently_used_is_forgotten() -> None:
    streams: RecentStreams[int] = RecentStreams(2)
    streams.put("a", 1)
    streams.put("b", 2)
    assert streams.get("a") == 1
    streams.put("c", 3)
    assert (streams.get("a"), streams.get("b"), streams.get("c")) == (1, None, 3)
    streams.put("a", 4)
    assert (len(streams), streams.get("a")) == (2, 4)


def test_a_worker_forgets_policies_of_streams_beyond_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RecentStreams.__init__, "__defaults__", (3,))
    policies = StreamPolicies(parse_policy("normal_hedge"), "worker-0/1")
    for number in range(10):
        policies.update(make_policy(stream=f"stream-{number}", version=5))
        policies.emitted(f"stream-{number}", number)
    known = [policies._priors.newest(f"stream-{number}") for number in range(10)]
    assert [one is not None for one in known] == [False] * 7 + [True] * 3
    assert len(policies._stream_to_sequence) == 3
    assert recent_streams.MAX_STREAMS >= 1000
