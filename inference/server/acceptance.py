"""The acceptance record of one request, under the names that vLLM and AIPerf use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from inference.recording import Round


def acceptance_record(
    rounds: Sequence[Round], *, num_spec_tokens: int, completion_tokens: int, is_detailed: bool
) -> dict[str, Any]:
    """Return what verification accepted of a request.

    A step is a verification of at least one drafted token; rounds without a draft are none. The
    histogram sums to the steps and, weighted by its keys, to the accepted tokens. Without a step
    there is no sample: the rates are None.

    Args:
        rounds: Of the request.
        num_spec_tokens: K as configured.
        completion_tokens: Tokens emitted.
        is_detailed: Add every step.
    """
    steps = [(one.num_draft_tokens, one.num_accepted_tokens) for one in rounds]
    steps = [(drafted, accepted) for drafted, accepted in steps if drafted]
    num_drafted = sum(drafted for drafted, _ in steps)
    num_accepted = sum(accepted for _, accepted in steps)
    by_length: dict[int, Counter[int]] = {}
    for drafted, accepted in steps:
        by_length.setdefault(drafted, Counter())[accepted] += 1
    record: dict[str, Any] = {
        "engine": "draftloop",
        "mean_acceptance_length": 1 + num_accepted / len(steps) if steps else None,
        "draft_acceptance_rate": num_accepted / num_drafted if steps else None,
        "acceptance_histogram": _histogram(Counter(accepted for _, accepted in steps)),
        "acceptance_histogram_by_draft_length": {
            str(length): _histogram(counts) for length, counts in sorted(by_length.items())
        },
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": num_spec_tokens,
        "completion_tokens": completion_tokens,
    }
    if is_detailed:
        record["per_step_accepted"] = [accepted for _, accepted in steps]
        record["per_step_drafted"] = [drafted for drafted, _ in steps]
    return record


def _histogram(counts: Counter[int]) -> dict[str, int]:
    return {str(accepted): count for accepted, count in sorted(counts.items())}
