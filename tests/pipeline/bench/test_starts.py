"""Where requests start from: the domain helps new tenants, prompts help, and neither hurts much."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console

from learner.selection import DEFAULT_POLICY
from pipeline.bench.starts import (
    BOTH,
    MISLEADING,
    NEW_DOMAINS,
    NEW_TENANTS,
    PROMPTS,
    ROUTER,
    merged,
    real_prompts,
    run_starts,
)
from tests.pipeline.domain_files import write_domain_files


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


def test_real_prompts_are_of_their_domain_and_come_again_only_after_all_others(
    tmp_path: Path,
) -> None:
    prompt_of = real_prompts(write_domain_files(tmp_path), np.random.default_rng(0))
    maths = [tuple(prompt_of(1)) for _ in range(22)]
    assert len(set(maths)) == 11
    assert maths[:11] == maths[11:]
    assert not {word for prompt in maths for word in prompt} & set(prompt_of(4)[:1])
