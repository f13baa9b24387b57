"""The arithmetic of the engine benchmark: ratios of sums, intervals over prompts."""

from __future__ import annotations

import pytest

from inference.sampling import SamplingParams
from pipeline.bench.engine import PassCounter, Shares, Way, _hf_prompt_lookup, _plain, _result
from tests.inference.tiny import tiny_llama


def way(name: str, num_tokens: list[int], seconds: list[float], *, num_passes: int) -> Way:
    return Way(
        name=name,
        num_tokens=num_tokens,
        wall_seconds=seconds,
        cpu_seconds=[2 * value for value in seconds],
        outputs=[(index,) * count for index, count in enumerate(num_tokens)],
        num_passes=num_passes,
    )


def test_a_speedup_is_the_ratio_of_summed_speeds_inside_its_interval() -> None:
    ways = {
        "plain": way("plain", [10, 30], [1.0, 3.0], num_passes=40),
        "hf_prompt_lookup": way("hf", [10, 30], [1.0, 1.0], num_passes=30),
        "head": way("head", [10, 30], [0.5, 1.5], num_passes=21),
        "worker": way("worker", [10, 30], [0.8, 2.4], num_passes=21),
    }
    shares = Shares(round_seconds=4.0, score_seconds=0.5, emit_seconds=0.02)
    result = _result(ways, shares)
    assert result["speedup_vs_plain"] == pytest.approx(2.0)
    assert result["speedup_vs_hf_prompt_lookup"] == pytest.approx(1.0)
    assert result["worker_speedup_vs_plain"] == pytest.approx(1.25)
    assert result["speedup_vs_plain_cpu"] == pytest.approx(2.0)
    for key in ("speedup_vs_plain", "speedup_vs_hf_prompt_lookup"):
        assert result[f"{key}_low"] <= result[key] <= result[f"{key}_high"]
    assert result["speedup_vs_plain_low"] == pytest.approx(2.0)  # every prompt gained as much
    assert result["speedup_vs_hf_prompt_lookup_low"] < result["speedup_vs_hf_prompt_lookup_high"]
    assert (result["scoring_share"], result["emission_share"]) == (0.125, 0.005)
    assert result["ways"]["head"]["num_outputs_equal_to_plain"] == 2


def test_the_prompts_own_pass_is_no_round() -> None:
    # Two prompts: 2 passes read them and give a token each, 19 rounds give the other 38.
    assert way("head", [10, 30], [1.0, 1.0], num_passes=21).mean_acceptance_length == 2.0
    plain = way("plain", [10, 30], [1.0, 1.0], num_passes=40)
    assert plain.mean_acceptance_length == 1.0


def test_passes_are_counted_and_both_ways_of_decoding_write_the_same() -> None:
    target, params = tiny_llama(1), SamplingParams(max_tokens=20)
    passes, plain, lookup = PassCounter(target), Way("plain"), Way("lookup")
    prompt = [1, 2, 3, 1, 2, 3]
    plain.measure(passes, lambda: _plain(target, prompt, params))
    lookup.measure(passes, lambda: _hf_prompt_lookup(target, prompt, params))
    assert (plain.num_tokens, plain.num_passes) == ([20], 20)
    assert plain.outputs == lookup.outputs
    assert lookup.num_passes <= 20
    assert plain.wall_seconds[0] > 0.0
