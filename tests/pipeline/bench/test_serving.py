"""The serving benchmark says how sure it is, and its clients measure what they see."""

from __future__ import annotations

import json
import math

import pytest

from inference.drafters.nothing import NothingDrafter
from pipeline.bench.client import play
from pipeline.bench.serving import Block, summary
from tests.inference.http import MODEL, serving
from tests.inference.tiny import tiny_llama


def block(value: float) -> Block:
    return Block(
        overhead_share=value,
        overhead_cpu_share=2 * value,
        tokens_per_second_ratio=1.0,
        last_first_token_over_fair_share=1.5,
    )


def test_every_number_has_its_mean_and_interval() -> None:
    result = summary([block(0.01), block(0.02), block(0.03)])
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert result["overhead_share"] == pytest.approx(0.02)
    assert result["overhead_share_low"] == pytest.approx(0.02 - half)
    assert result["overhead_share_high"] == pytest.approx(0.02 + half)
    assert result["overhead_cpu_share"] == pytest.approx(0.04)
    assert result["tokens_per_second_ratio_low"] == result["tokens_per_second_ratio_high"] == 1.0
    assert result["num_blocks"] == 3
    json.dumps(result, allow_nan=False)


def test_clients_see_tokens_and_times_of_each_request() -> None:
    with serving(tiny_llama(1), drafters=[NothingDrafter()]) as run:
        bodies = [{"model": MODEL, "prompt": "abc", "max_tokens": n} for n in (3, 5, 7)]
        found = play(run.port, bodies, 2)
        assert [one.num_tokens for one in found.answers] == [3, 5, 7]
        for one in found.answers:
            assert 0.0 < one.first_token_seconds <= one.seconds <= found.seconds
        assert found.tokens_per_second == pytest.approx(15 / found.seconds)
        with pytest.raises(RuntimeError, match="answers 404"):
            play(run.port, [{"model": "other", "prompt": "a"}], 1)
