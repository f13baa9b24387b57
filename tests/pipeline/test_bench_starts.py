"""Where requests start from: the domain helps new tenants, prompts help, and neither hurts much."""

from __future__ import annotations

from rich.console import Console

from learner.selection import DEFAULT_POLICY
from pipeline.bench_starts import (
    BOTH,
    MISLEADING,
    NEW_DOMAINS,
    NEW_TENANTS,
    PROMPTS,
    ROUTER,
    merged,
    run_starts,
)


def test_starts_pay_where_something_is_known_and_cost_little_elsewhere() -> None:
    starts = run_starts([11, 12], Console(quiet=True))
    result = merged({"a": 1.0, "table": [{"stream": "steady"}]}, starts)
    assert result["a"] == 1.0
    assert result["table"][0] == {"stream": "steady"}
    length = {
        (row["stream"], row["policy"]): row["mean_acceptance_length"] for row in starts["table"]
    }
    assert length[NEW_TENANTS, BOTH] > 1.1 * length[NEW_TENANTS, DEFAULT_POLICY]
    assert length[NEW_DOMAINS, BOTH] > 0.9 * length[NEW_DOMAINS, DEFAULT_POLICY]
    assert length[PROMPTS, BOTH] > 1.05 * length[PROMPTS, DEFAULT_POLICY]
    assert length[MISLEADING, BOTH] > 0.98 * length[MISLEADING, DEFAULT_POLICY]
    assert length[PROMPTS, BOTH] > length[PROMPTS, ROUTER]
    assert length[MISLEADING, BOTH] > 1.5 * length[MISLEADING, ROUTER]
    assert result["both_vs_default_new_tenants"] > 1.1
