"""The selection benchmark as a command: its sources, its table on the console, its JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.bench import cost, recorded, selection, starts
from pipeline.json_files import write_json
from replay.errors import ReplayError

SOURCES = ("synthetic", "recorded")


def run_selection_bench(
    source: str,
    *,
    recording: Path | None,
    prompts: Path | None = None,
    num_seeds: int,
    console: Console,
    json_file: Path | None = None,
) -> dict[str, Any]:
    """Run the benchmark on one source, show it, and write its JSON.

    Args:
        source: ``synthetic`` or ``recorded``.
        recording: Folder of the recording; for ``recorded``.
        prompts: Folder of the prompt sets, for starts from real prompts; for ``synthetic``.
        num_seeds: Seeds 0, 1, ...; intervals are over them.
        console: Where progress and results go.
        json_file: Where to write the result.

    Raises:
        ReplayError: If the source is unknown or the recording cannot be read.
    """
    if source not in SOURCES:
        raise ReplayError(f"source {source!r}, expected one of: {', '.join(SOURCES)}")
    seeds = tuple(range(num_seeds))
    if source == "synthetic":
        result = starts.merged(
            selection.run_synthetic(seeds=seeds, console=console),
            starts.run_starts(seeds, console, prompts=prompts),
        )
    elif recording is None:
        raise ReplayError(
            "no recording is named: make one with 'draftloop bench pool', then --recording"
        )
    else:
        result = recorded.run_recorded(recording, seeds=seeds, console=console)
    costs = cost.cost_rows(seeds)
    result = {"source": source, **result, **costs, "table": result["table"]}
    selection.show(result, console)
    if json_file is not None:
        write_json(json_file, result)
        console.print(f"written to {json_file}")
    return result
