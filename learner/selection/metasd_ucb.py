"""MetaSD-UCB: a bandit that learns from the agreement of whole blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from learner.selection.bandit import IndexBandit, observe
from learner.selection.ucb import weigh


def learn_round(
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    index: int,
    probability: float,
    length_loss: float,
    agreement_loss: float,
) -> None:
    """Learn how well the played drafter's distributions agreed with the target's."""
    observe(table, numbers, index, agreement_loss)
    weigh(table, numbers)


class MetaSdUcb(IndexBandit):
    """Play the smallest mean block divergence - width x sqrt(2 ln t / n).

    The divergence of a block is the mean of 1 - acceptance probability over its levels: it varies
    less from round to round than the length does. MetaSD (notes/selection.md, section 5.3), whose
    β is our ``width``, 0.25 as they have it. For the law of the divergences the bound of
    ``ucb`` holds, at width 1; at theirs nothing is proved, and the regret can grow linearly.
    """

    name = "metasd_ucb"
    round_kernel = staticmethod(learn_round)
    weigh = staticmethod(weigh)
    parameters: ClassVar[Mapping[str, float]] = {"width": 0.25}
