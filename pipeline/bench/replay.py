"""How fast replay is: every policy from Parquet, and the whole report of a large log.

One core. Rates are windows per second of processor time, so that others on the machine do not
count; wall times stand beside them. The log is made first and its making is not measured.
"""

from __future__ import annotations

import io
import math
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from learner.selection import DEFAULT_POLICY, policy_names
from pipeline.bench.replay_log import LogShape, write_synthetic_log
from pipeline.json_files import write_json
from pipeline.replaying import ReplayRequest, replay_log
from replay.reader import LogReader
from replay.requests import join_requests
from replay.walks import ROUNDS, TOKENS, PolicyWalks, WalkOptions

SEED = 0
SIMPLE = ("fixed", "follow_the_leader", "discounted_follow_the_leader", "hedge", "fixed_share")
STUDENT_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""95 % quantiles of Student's distribution by degrees of freedom."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayBench:
    """What is measured.

    Attributes:
        num_windows: Windows of the log that is reported on.
        num_policy_windows: Windows of the log that every policy re-runs.
        num_repeats: Runs of each policy, and of the scan.
    """

    num_windows: int = 10_000_000
    num_policy_windows: int = 500_000
    num_repeats: int = 3


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one run."""

    wall: float
    cpu: float


def run_replay_bench(
    options: ReplayBench, *, json_file: Path | None, console: Console
) -> dict[str, Any]:
    """Make the logs, measure, show, and return the numbers that ``--json`` writes.

    Raises:
        OutputError: If the JSON file cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="draftloop-replay-") as name:
        folder = Path(name)
        console.print("making the logs (not measured)")
        generator = np.random.default_rng(SEED)
        small, large = folder / "small", folder / "large"
        num_small = write_synthetic_log(
            small, LogShape(num_windows=options.num_policy_windows), generator
        )
        num_large = write_synthetic_log(large, LogShape(num_windows=options.num_windows), generator)
        policies = ("fixed:drafter-0", *policy_names())
        rows = [
            _policy_row(small, policy, num_small, options.num_repeats, console)
            for policy in policies
        ]
        scans = [scan(large) for _ in range(options.num_repeats)]
        console.print(f"reporting on {num_large:,} windows")
        _report(small, folder / "small.html")  # compiles what the policies did not need
        report = _report(large, folder / "report.html")
    result = _result(rows, scans, report, num_large)
    _show(result, console)
    if json_file is not None:
        write_json(json_file, result)
        console.print(f"numbers: {json_file}", soft_wrap=True)
    return result


def _timed(run: Callable[[], object]) -> Spent:
    wall, cpu = time.perf_counter(), time.thread_time()
    run()
    return Spent(time.perf_counter() - wall, time.thread_time() - cpu)


def _policy_row(
    log: Path, policy: str, num_windows: int, num_repeats: int, console: Console
) -> dict[str, Any]:
    """Re-run one policy from the files, all else left out."""
    length = 0.0

    def run() -> None:
        nonlocal length
        walks = PolicyWalks(WalkOptions(policies=(policy,)), np.random.default_rng(SEED))
        for request in join_requests(LogReader(log).segments()):
            walks.add(request)
        counts = walks.sums[0].counts.total
        length = float(counts[TOKENS] / counts[ROUNDS])

    run()  # compiles, and warms the files
    spent = [_timed(run) for _ in range(num_repeats)]
    cpu = [num_windows / one.cpu for one in spent]
    console.print(f"{policy}: {statistics.fmean(cpu):,.0f} windows/s")
    return {
        "policy": policy,
        "mean_acceptance_length": length,
        **with_interval("windows_per_second", cpu),
        **with_interval("windows_per_second_wall", [num_windows / one.wall for one in spent]),
    }


def scan(log: Path) -> Spent:
    """Read the columns that replay reads, and do nothing with them."""

    return _timed(lambda: sum(batch.num_rows for batch in LogReader(log).batches()))


def _report(log: Path, page: Path) -> dict[str, float]:
    """Report on a log in a fresh process, so that its memory is its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(report_once, (log, page))


def report_once(log: Path, page: Path) -> dict[str, float]:
    """Do what ``draftloop replay LOG --report PAGE --json FILE`` does, and measure it."""
    wall, cpu = time.perf_counter(), time.process_time()
    asked = ReplayRequest(report=page, json_file=page.with_suffix(".json"))
    replay_log(log, asked, console=Console(file=io.StringIO()))
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "peak_bytes": peak_bytes(),
        "page_bytes": page.stat().st_size,
    }


def peak_bytes() -> int:
    """Return the most resident memory this process has had.

    ``ru_maxrss`` survives an exec, so in a spawned process it may be the parent's.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        # Where there is no such file, the parent's is the best there is; Linux counts kilobytes.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def _result(
    rows: Sequence[dict[str, Any]],
    scans: Sequence[Spent],
    report: dict[str, float],
    num_windows: int,
) -> dict[str, Any]:
    name_to_row = {row["policy"].partition(":")[0]: row for row in rows}
    slowest = min(rows, key=lambda row: row["windows_per_second"])
    simple = min((name_to_row[name] for name in SIMPLE), key=lambda row: row["windows_per_second"])
    scan_cpu = statistics.fmean(one.cpu for one in scans)
    return {
        **_renamed("slowest_policy_windows_per_second", slowest),
        "slowest_policy": slowest["policy"],
        **_renamed("slowest_simple_policy_windows_per_second", simple),
        **_renamed("default_windows_per_second", name_to_row[DEFAULT_POLICY]),
        **_renamed("normal_hedge_windows_per_second", name_to_row["normal_hedge"]),
        "num_windows": num_windows,
        "report_seconds_10m": report["wall"],
        "report_cpu_seconds_10m": report["cpu"],
        "report_peak_bytes_10m": int(report["peak_bytes"]),
        "report_page_bytes_10m": int(report["page_bytes"]),
        **with_interval("scan_seconds_10m", [one.wall for one in scans]),
        **with_interval("scan_cpu_seconds_10m", [one.cpu for one in scans]),
        "report_vs_scan": report["cpu"] / scan_cpu,
        "table": list(rows),
    }


def _renamed(key: str, row: dict[str, Any]) -> dict[str, Any]:
    ends = ("", "_low", "_high")
    return {f"{key}{end}": row[f"windows_per_second{end}"] for end in ends}


def with_interval(key: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return mean and 95 % interval of repeats under ``key``; None where there is but one."""
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return {key: mean, f"{key}_low": None, f"{key}_high": None}
    half = STUDENT_95.get(count - 1, 1.96) * statistics.stdev(values) / math.sqrt(count)
    return {key: mean, f"{key}_low": mean - half, f"{key}_high": mean + half}


def _show(result: dict[str, Any], console: Console) -> None:
    table = Table(title="Replay from Parquet, one core", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("policy", "windows/s", "wall", "MAT"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in result["table"]:
        table.add_row(
            row["policy"],
            f"{row['windows_per_second']:,.0f}",
            f"{row['windows_per_second_wall']:,.0f}",
            f"{row['mean_acceptance_length']:.2f}",
        )
    console.print(table)
    console.print(
        f"report of {result['num_windows']:,} windows: {result['report_seconds_10m']:.1f} s "
        f"({result['report_cpu_seconds_10m']:.1f} s of processor), "
        f"{result['report_peak_bytes_10m'] / 1e9:.2f} GB, "
        f"{result['report_vs_scan']:.1f} times a bare scan of the same columns "
        f"({result['scan_cpu_seconds_10m']:.1f} s)"
    )
