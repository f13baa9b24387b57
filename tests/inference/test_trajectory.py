"""One request as it unfolds."""

from __future__ import annotations

import pytest
import torch

from inference.sampling import SamplingParams
from inference.trajectory import Trajectory

HIDDEN, VOCAB = 2, 5


def trajectory(max_output_tokens: int = 8) -> Trajectory:
    """Return a request with a prompt of three tokens."""
    return Trajectory(
        [7, 8, 9],
        SamplingParams(temperature=1.0),
        max_output_tokens=max_output_tokens,
        hidden_size=HIDDEN,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def rows(first: float, count: int, width: int) -> torch.Tensor:
    """Return rows that tell their number."""
    return torch.arange(first, first + count)[:, None].expand(count, width)


def test_tokens_states_and_distributions_stay_together() -> None:
    one = trajectory()
    one.extend([1, 2], rows(1, 2, HIDDEN), rows(10, 2, VOCAB))
    one.extend([3], rows(3, 1, HIDDEN), rows(12, 1, VOCAB))
    assert one.token_ids == [7, 8, 9, 1, 2, 3]
    assert (len(one), one.num_prompt_tokens, one.num_output_tokens) == (6, 3, 3)
    assert one.hidden(3, 6)[:, 0].tolist() == [1.0, 2.0, 3.0]
    assert one.hidden(4, 4).shape == (0, HIDDEN)
    assert [float(one.probs(position)[0]) for position in (3, 4, 5)] == [10.0, 11.0, 12.0]


def test_forgotten_distributions_are_gone_and_the_others_are_not() -> None:
    one = trajectory()
    one.extend([1, 2, 3], rows(1, 3, HIDDEN), rows(10, 3, VOCAB))
    one.forget_probs(5)
    assert float(one.probs(5)[0]) == 12.0
    with pytest.raises(KeyError):
        one.probs(4)


def test_states_are_copied_from_the_targets_buffers() -> None:
    one = trajectory()
    states = rows(1, 2, HIDDEN).clone().float()
    one.extend([1, 2], states, None)
    states.zero_()
    assert one.hidden(3, 5)[:, 0].tolist() == [1.0, 2.0]


def test_invalid_extension_beyond_what_was_announced_is_refused() -> None:
    one = trajectory(max_output_tokens=2)
    with pytest.raises(RuntimeError):
        one.extend([1, 2, 3], rows(1, 3, HIDDEN), None)
    assert one.num_output_tokens == 0
