"""The clients of the serving benchmark: a process of their own, as real ones are.

In the server's process they would take its interpreter from it while they read, and what they cost
would be taken for the server's overhead.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

MOST_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One answered request, as its client saw it.

    Attributes:
        seconds: From the request to the last byte.
        first_token_seconds: From the request to the first text.
        num_tokens: Of the answer, by its usage.
    """

    seconds: float
    first_token_seconds: float
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Play:
    """What the clients saw together, in the order of the requests."""

    answers: tuple[Answered, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all clients together."""
        return sum(one.num_tokens for one in self.answers) / self.seconds


def play(port: int, bodies: Sequence[Mapping[str, Any]], num_clients: int) -> Play:
    """Have completions streamed by so many clients, each with one request at a time."""
    began = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as clients:
        answers = tuple(clients.map(lambda body: _ask(port, body), bodies))
    return Play(answers=answers, seconds=time.perf_counter() - began)


def _ask(port: int, body: Mapping[str, Any]) -> Answered:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=MOST_SECONDS)
    began = time.perf_counter()
    connection.request(
        "POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    first, last = 0.0, b""
    for line in answer:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - began
            last = line
    seconds = time.perf_counter() - began
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"the server answers {answer.status}")
    num_tokens = json.loads(last[6:])["usage"]["completion_tokens"]
    return Answered(seconds=seconds, first_token_seconds=first, num_tokens=num_tokens)
