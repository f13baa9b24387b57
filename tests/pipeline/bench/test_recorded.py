"""The selection benchmark on a recording: its streams, its keys, and what it refuses."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pipeline.bench.recorded import (
    CONVERSATION,
    DOMAIN_STREAMS,
    MIXED_STREAM,
    SETS,
    SPLICED_STREAM,
    joined,
    read_recording,
    run_recorded,
)
from pipeline.bench.selection_report import run_selection_bench
from replay.errors import ReplayError
from schemas.events import DrafterVersion, VerificationEvent
from tests.replay.synthetic import log, make_request, write_log

POOL = tuple(
    DrafterVersion(drafter_id=name, weights_version=0)
    for name in ("code-220", "maths-220", "mixed-220", "none")
)
RATES = {"code": (0.9, 0.2, 0.7, 0.0), "maths": (0.2, 0.9, 0.7, 0.0)}
POLICIES = (
    "ada_normal_hedge_grid",
    "normal_hedge",
    "ucbspec",
    "exp3spec",
    "ucb:width=0.1,scope=stream",
)


def events() -> list[VerificationEvent]:
    """Ten requests of two domains, and two conversations of three turns."""
    names = [f"{domain}-{index:03}" for domain in RATES for index in range(5)]
    names += [f"shift-{index:02}:{turn}" for index in range(2) for turn in (1, 2, 3)]
    found = []
    for sequence, name in enumerate(names):
        domain = name.partition("-")[0]
        if domain == CONVERSATION:
            domain = "maths" if name.endswith(":2") else "code"
        found.append(
            make_request(
                hit_rates=RATES[domain],
                num_tokens=70,
                drafters=POOL,
                request_id=name,
                sequence=sequence,
                seed=sequence,
            )
        )
    return found


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("recording")
    write_log(data, log(events()))
    return data


def test_requests_are_found_by_domain_and_set(recording: Path) -> None:
    found = read_recording(recording)
    assert found.domains == ["code", "maths"]
    assert len(found.of_kind("code")) == 5
    conversations = [request.conversation_id for request in found.of_kind(CONVERSATION)]
    assert conversations == ["shift-00"] * 3 + ["shift-01"] * 3
    assert found.drafter_ids == tuple(version.drafter_id for version in POOL)


def test_joined_requests_keep_their_windows_in_their_places(recording: Path) -> None:
    first, second = (one.trace for one in read_recording(recording).of_kind("code")[:2])
    both = joined([first, second])
    assert both.num_positions == first.num_positions + second.num_positions
    np.testing.assert_array_equal(
        both.starts, [*first.starts, *(second.starts + first.num_positions)]
    )
    np.testing.assert_array_equal(
        both.realised_acceptance[len(first.starts) :], second.realised_acceptance
    )


def test_every_stream_and_key_is_there_and_the_experts_are_found(recording: Path) -> None:
    result = run_recorded(
        recording, seeds=(0, 1), policies=POLICIES, console=Console(file=StringIO())
    )
    streams = {row["stream"] for row in result["table"]}
    assert streams == {MIXED_STREAM, SPLICED_STREAM, SETS[CONVERSATION], DOMAIN_STREAMS}
    for key in (
        "default_vs_best_single",
        "default_vs_mixed_head",
        "default_vs_best_published_bandit",
        "default_vs_best_tuned_bandit",
        "default_vs_domain_best",
        "default_vs_request_best",
        "default_vs_normal_hedge_shifting",
        "default_vs_normal_hedge_conversations",
    ):
        assert result[f"{key}_low"] <= result[key] <= result[f"{key}_high"]
    assert result["default_vs_best_single"] > 1.1
    assert result["default_vs_mixed_head"] > 1.0
    assert result["default_vs_best_published_bandit"] > 1.0
    length = {
        (row["stream"], row["policy"]): row["mean_acceptance_length"] for row in result["table"]
    }
    assert length[MIXED_STREAM, "best per request"] >= length[MIXED_STREAM, "best per domain"]
    assert length[MIXED_STREAM, "best per domain"] > length[MIXED_STREAM, "best single"]


def test_invalid_a_recording_of_two_pools_is_refused(tmp_path: Path) -> None:
    other = make_request(
        drafters=POOL[:2], hit_rates=(0.5, 0.5), request_id="code-099", sequence=99
    )
    write_log(tmp_path, log([*events(), other]))
    with pytest.raises(ReplayError, match="code-099 lists 2 drafters, others 4"):
        read_recording(tmp_path)


def test_invalid_sources_are_refused() -> None:
    console = Console(file=StringIO())
    with pytest.raises(ReplayError, match="source 'real', expected one of: synthetic, recorded"):
        run_selection_bench("real", recording=None, num_seeds=2, console=console)
    with pytest.raises(ReplayError, match="bench pool"):
        run_selection_bench("recorded", recording=None, num_seeds=2, console=console)
