"""Two messages are the same only if every field is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from schemas.equality import first_difference, same_message
from tests.schemas.builders import make_event, make_policy, make_release


def test_nan_equals_nan() -> None:
    nan = float("nan")
    left = make_event(acceptance_probability=nan, realised_acceptance=nan)
    right = make_event(acceptance_probability=nan, realised_acceptance=nan)
    assert same_message(left, right)
    assert same_message(nan, nan)


def test_a_single_element_makes_the_difference_and_is_named() -> None:
    left = make_event(num_windows=2, num_speculative_tokens=1, num_drafters=1)
    scores = np.array([[[0.25]], [[0.5]]], np.float16)
    windows = replace(left.windows, acceptance_probability=scores)
    other = replace(windows, acceptance_probability=scores[::-1])
    difference = first_difference(replace(left, windows=windows), replace(left, windows=other))
    assert difference == "message.windows.acceptance_probability[0][0][0]: 0.25 is not 0.5"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (make_event(), make_policy()),
        (make_event(), make_event(sequence=1)),
        (make_event(), make_event(with_content=True)),
        (make_policy(), make_policy(accumulators={})),
        (make_policy(), make_policy(num_drafters=2)),
        (make_release(), make_release(reason="other")),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), np.zeros(3)),
        ({1: 2}, {1: 3}),
        ((1,), (1, 2)),
    ],
)
def test_what_differs_is_not_the_same(left: object, right: object) -> None:
    assert not same_message(left, right)
    assert same_message(left, left)
