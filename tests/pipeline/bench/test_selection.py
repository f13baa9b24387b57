"""The selection benchmark: arithmetic by hand, and its claims in small."""

from __future__ import annotations

from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from learner.selection import parse_policy
from pipeline.bench.selection import (
    Interval,
    hindsight_lengths,
    ratio,
    run_synthetic,
    show,
)
from pipeline.bench.streams import (
    SelectionStream,
    play,
    play_choices,
    play_each,
    play_parts,
    selection_stream,
)
from pipeline.bench.synthetic import trace_of_hits

HITS = np.array([[1, 0], [1, 0], [0, 1], [0, 1], [1, 1], [1, 0]], dtype=np.bool_)


def small_stream() -> SelectionStream:
    rng = np.random.default_rng(0)
    traces = [trace_of_hits(HITS, 2), trace_of_hits(HITS[::-1], 2)]
    parts = [np.zeros(6, dtype=np.int64), np.ones(6, dtype=np.int64)]
    return selection_stream(["a", "b"], traces, parts, rng)


def test_rounds_of_each_drafter_are_those_of_decoding_by_hand() -> None:
    stream = small_stream()
    # a: 0-2 (two accepted and the bonus), 3, 4-5; b: 0, 1, 2-4, 5.
    np.testing.assert_array_equal(play_each(stream)[0], [3, 4])


def test_fixed_policies_and_given_choices_play_the_same_rounds() -> None:
    stream = small_stream()
    each = play_each(stream)
    for drafter, name in enumerate(("a", "b")):
        played = play(stream, parse_policy(f"fixed:{name}"))
        chosen = play_choices(stream, [np.full(6, drafter)] * 2)
        np.testing.assert_array_equal(played.num_rounds, each[:, drafter])
        np.testing.assert_array_equal(chosen.num_rounds, each[:, drafter])
        assert played.num_tokens.sum() == 12


def test_hindsight_takes_the_best_of_each_group() -> None:
    stream = small_stream()
    each = play_each(stream)
    found = hindsight_lengths(stream)
    assert found["best single"] == 12 / each.sum(axis=0).min()
    assert found["best per request"] == 12 / each.min(axis=1).sum()
    assert found["best per domain"] == found["best per request"]
    parts = play_parts(stream, each.argmin(axis=1))
    assert parts.mean_acceptance_length == pytest.approx(found["best per domain"])


def test_an_interval_is_that_of_student() -> None:
    interval = Interval.of([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.high - 2.0 == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    assert interval.keys("x") == {"x": 2.0, "x_low": interval.low, "x_high": interval.high}


def test_ratios_are_paired_by_seed() -> None:
    runs = [{"a": 2.0, "b": 1.0}, {"a": 8.0, "b": 4.0}]
    assert ratio(runs, "a", "b") == Interval(2.0, 2.0, 2.0)


def test_the_benchmark_gives_every_key_and_its_claims_hold_in_small() -> None:
    written = StringIO()
    console = Console(file=written, width=200)
    result = run_synthetic(
        seeds=(0, 1), pool_sizes=(8, 32), num_requests=12, num_tokens=400, console=console
    )
    for key in (
        "normal_hedge_vs_ucbspec_n8",
        "normal_hedge_vs_exp3spec_n8",
        "normal_hedge_vs_ucbspec_n32",
        "normal_hedge_vs_exp3spec_n32",
        "normal_hedge_drop_n8_to_n32",
        "default_vs_normal_hedge_stationary",
        "default_vs_normal_hedge_shifting",
        "default_vs_segment_best_shifting",
        "default_vs_bayes_filter_shifting",
    ):
        assert result[f"{key}_low"] <= result[key] <= result[f"{key}_high"]
    assert result["normal_hedge_vs_ucbspec_n8"] > 1.3
    assert result["normal_hedge_vs_exp3spec_n32"] > 1.4
    assert result["default_vs_normal_hedge_shifting"] > 1.15
    assert 0.85 < result["default_vs_bayes_filter_shifting"] < 1.0
    rows = [(row["stream"], row["num_drafters"], row["policy"]) for row in result["table"]]
    assert len(rows) == len(set(rows))
    show(result, console)
    assert "default_vs_bayes_filter_shifting: 0.9" in written.getvalue()
