"""Is every output what the target alone would have written?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from inference.plain import plain_greedy
from inference.sampling import SamplingParams
from inference.target import Target
from schemas.errors import KnownError


class OutputsDifferError(KnownError):
    """Outputs differ where they must not: the promise of losslessness is broken."""


class OutputCheck:
    """Compares served outputs with plain greedy decoding.

    In float32 all must be equal. In bfloat16 a pass over one row and a pass over several round
    differently, so a near-tie of the target's best two tokens may fall the other way; the gap
    between their logits at the first difference is kept as the evidence.

    Args:
        target: Decodes plainly.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.num_checked = 0
        self.num_equal = 0
        self.gaps: list[float] = []

    def compare(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, served: Sequence[int]
    ) -> None:
        """Compare one served output."""
        plain = plain_greedy(self._target, prompt_token_ids, params)
        self.num_checked += 1
        if tuple(served) == plain.token_ids:
            self.num_equal += 1
            return
        pairs = zip(served, plain.token_ids, strict=False)
        shorter = min(len(served), len(plain.token_ids)) - 1
        first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
        self.gaps.append(plain.logit_gaps[first])

    def results(self) -> dict[str, Any]:
        """Return the counts and the gaps as JSON types."""
        return {
            "num_checked": self.num_checked,
            "num_equal": self.num_equal,
            "logit_gaps_at_first_difference": self.gaps,
        }

    def show(self, console: Console) -> None:
        """Print the verdict."""
        line = f"outputs equal to plain decoding: {self.num_equal} of {self.num_checked} compared"
        if self.gaps:
            line += f"; top-2 logit gap at the first difference: largest {max(self.gaps):.3f}"
        console.print(line, highlight=False)

    def refuse_differences_in_float32(self, dtype: str) -> None:
        """End in an error if exact arithmetic was asked for and something differs.

        Raises:
            OutputsDifferError: With both counts.
        """
        if dtype == "float32" and self.num_equal != self.num_checked:
            raise OutputsDifferError(
                f"{self.num_checked - self.num_equal} of {self.num_checked} float32 outputs differ "
                "from plain decoding: please report this with the run's data folder"
            )
