"""A fault of vLLM's CPU build that changes what sampled requests write, found and mended at start.

To verify drafts, vLLM repeats each row's temperature, top-k and top-p once per drafted token. On a
CPU the kernel writes them into a copy that is thrown away, and what the sampler reads is memory
that nobody wrote (vllm-project/vllm#55005; 0.32 has it). A step that verifies drafts, of any
method, then draws by arbitrary temperatures as soon as one of its rows samples.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

MODULE, FUNCTION = "vllm.v1.sample.rejection_sampler", "expand_batch_to_tokens"
PROBES = ((0.8, 0.0, 1.3), (0.3, 2.0, 0.0))
"""Two, as memory that nobody wrote may hold the right answer of the one before."""

COUNTS = (2, 1, 3)

logger = logging.getLogger(__name__)


def expanded(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each row's value as often as it has tokens, (num_tokens,), in its own dtype.

    Args:
        x: (B,), a value per row.
        cu_num_tokens: (B,), tokens of all rows up to and including each.
        num_tokens: Of all rows.
        replace_from: A value that stands for another,
        replace_to: which is this.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)


def is_right(function: Any) -> bool:
    """Tell whether a function does what ``expanded`` does."""
    ends = torch.tensor(COUNTS, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    for values in PROBES:
        x, size = torch.tensor(values), sum(COUNTS)
        found = function(x, ends, size, replace_from=0, replace_to=1)
        if not torch.equal(found, expanded(x, ends, size, 0, 1)):
            return False
    return True


def repair_sampling(module: Any | None = None) -> bool:
    """Mend the loaded vLLM's function if it is wrong, in memory; return whether it was.

    Args:
        module: Whose function; None = the running vLLM's.
    """
    module = sys.modules.get(MODULE) if module is None else module
    function = getattr(module, FUNCTION, None)
    if function is None or is_right(function):
        return False
    setattr(module, FUNCTION, expanded)
    logger.warning(
        "this vLLM loses temperature, top-k and top-p of the tokens it verifies "
        "(vllm-project/vllm#55005): mended in this process, so that sampled answers keep their law"
    )
    return True
