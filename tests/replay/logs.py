"""A log with everything in it that a report has to show."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from learner.request_selector import RequestSelector
from schemas.events import AcceptanceRule, DrafterVersion, VerificationEvent
from tests.replay.synthetic import log, make_request, split, write_log

NAMES = ("prompt-lookup", "suffix", "hydra-code", "hydra-maths")


def rich_events(num_requests: int = 36, *, seed: int = 0) -> list[VerificationEvent]:
    """Three streams, one of them sampled, a late drafter, new weights, and a cut request."""
    generator = np.random.default_rng(seed)
    events = []
    for index in range(num_requests):
        progress = index / num_requests
        stream = ("tenant-a.code", "tenant-b.maths", "tenant-c.chat")[index % 3]
        rates = {
            "tenant-a.code": [0.45, 0.5, 0.1 + 0.8 * progress, 0.2],
            "tenant-b.maths": [0.3, 0.35, 0.15, 0.1 + 0.8 * progress],
            "tenant-c.chat": [0.7, 0.72, 0.3, 0.3],
        }[stream]
        num_drafters = 4 if 3 * index >= num_requests else 3
        versions = (0, 0, 6 * index // num_requests, 4 * index // num_requests)
        pool = tuple(
            DrafterVersion(drafter_id=name, weights_version=version)
            for name, version in zip(NAMES, versions, strict=True)
        )
        is_sampled = stream == "tenant-c.chat"
        events.append(
            make_request(
                hit_rates=rates[:num_drafters],
                num_tokens=int(generator.integers(40, 90)),
                selector=RequestSelector.fresh("normal_hedge", num_drafters, 4),
                drafters=pool[:num_drafters],
                rule=AcceptanceRule.SPECULATIVE_SAMPLING if is_sampled else AcceptanceRule.GREEDY,
                stream=stream,
                policy_name="normal_hedge",
                request_id=f"request-{index}",
                sequence=index,
                seed=seed,
            )
        )
    events[-1], _ = split(events[-1], 4)
    return events


def write_rich_log(data: Path, num_requests: int = 36) -> None:
    """Write the log, with one unreadable file and one row twice."""
    rows = log(rich_events(num_requests))
    paths = write_log(data, rows, rows_per_file=max(3, num_requests // 6))
    paths[1].write_bytes(paths[1].read_bytes()[:500])
    write_log(data, rows[:1], hour="02")
