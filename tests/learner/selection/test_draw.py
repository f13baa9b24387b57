"""Drawing from probabilities that have travelled."""

from __future__ import annotations

import json

import numpy as np
import pytest

from learner.selection import select


def test_draws_follow_the_probabilities() -> None:
    generator = np.random.default_rng(0)
    probabilities = np.array([0.5, 0.0, 0.3, 0.2])
    drawn = [select(probabilities, generator) for _ in range(20_000)]
    counts = np.bincount([index for index, _ in drawn], minlength=4)
    np.testing.assert_allclose(counts / 20_000, probabilities, atol=0.015)
    assert counts[1] == 0
    assert {index: probability for index, probability in drawn} == {0: 0.5, 2: 0.3, 3: 0.2}


def test_the_same_dice_draw_the_same() -> None:
    draws = [select([0.2, 0.8], np.random.default_rng(7)) for _ in range(2)]
    assert draws[0] == draws[1]


def test_rounding_by_float32_and_text_is_repaired() -> None:
    exact = np.random.default_rng(0).dirichlet(np.ones(200))
    text = json.dumps([round(float(p), 6) for p in exact.astype(np.float32)])
    index, probability = select(json.loads(text), np.random.default_rng(0))
    assert probability == pytest.approx(exact[index], abs=1e-5)


def test_a_draw_at_the_very_end_stays_inside() -> None:
    class LargestDraw(np.random.Generator):
        def random(self, *_: object) -> float:  # type: ignore[override]
            return float(np.nextafter(1.0, 0.0))

    thirds = np.array([1 / 3, 1 / 3, 1 / 3, 0.0])
    assert select(thirds, LargestDraw(np.random.PCG64(0)))[0] == 2


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        ([0.5, 0.498], r"sums to 0\.998"),
        ([0.5, np.nan], r"\[1\]=nan"),
        ([1.5, -0.5], r"\[0\]=1\.5"),
        ([], r"sums to 0\.0"),
    ],
)
def test_invalid_probabilities_are_refused(probabilities: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(probabilities, np.random.default_rng(0))
