"""The router: it learns prompts, forgets nothing on its way, and never rules a drafter out."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.random import Generator

from learner.router import Router, best_drafter

CODE, MATHS = np.arange(100, 200), np.arange(150, 250)


def prompt(generator: Generator, words: np.ndarray) -> list[int]:
    return [int(word) for word in generator.choice(words, size=30)]


@pytest.fixture
def router() -> Router:
    """Drafter 0 is best on code, drafter 2 on maths; drafter 1 never was."""
    generator, router = np.random.default_rng(0), Router(3)
    for _ in range(60):
        router.learn(prompt(generator, CODE), 0)
        router.learn(prompt(generator, MATHS), 2)
    return router


def test_new_prompts_go_to_the_drafter_of_their_kind(router: Router) -> None:
    generator = np.random.default_rng(1)
    for _ in range(50):
        assert router.probabilities(prompt(generator, CODE))[0] > 0.9
        assert router.probabilities(prompt(generator, MATHS))[2] > 0.9


def test_no_drafter_is_ruled_out(router: Router) -> None:
    probabilities = router.probabilities(prompt(np.random.default_rng(2), CODE))
    assert probabilities.min() >= 0.05 / 3 - 1e-12
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-12)


def test_without_knowledge_all_are_alike_and_without_a_prompt_the_frequent_leads() -> None:
    router = Router(3)
    np.testing.assert_allclose(router.probabilities([1, 2, 3]), 1 / 3)
    for drafter_index in (1, 1, 1, 0):
        router.learn([], drafter_index)
    np.testing.assert_allclose(
        router.probabilities([]), 0.95 * np.array([0.25, 0.75, 0.0]) + 0.05 / 3
    )


def test_only_the_last_tokens_count_and_the_vocabulary_is_bounded() -> None:
    router = Router(2, num_buckets=16, num_tokens=4)
    router.learn([99_999_999] * 1000 + [1, 2, 3, 4], 0)
    router.learn([5, 6, 7, 8], 1)
    assert router.state()["tokens"].shape == (2, 16)
    assert router.state()["tokens"].sum() == 8
    np.testing.assert_array_equal(
        router.probabilities([9, 9, 1, 2, 3, 4]), router.probabilities([17, 18, 19, 20])
    )


def test_a_restored_router_goes_on_exactly(router: Router) -> None:
    restored = Router.from_state(router.state())
    generator = np.random.default_rng(3)
    for turn in range(20):
        words = prompt(generator, (CODE, MATHS)[turn % 2])
        np.testing.assert_allclose(
            restored.probabilities(words), router.probabilities(words), rtol=1e-12
        )
        router.learn(words, turn % 3)
        restored.learn(words, turn % 3)
    for key, values in router.state().items():
        np.testing.assert_array_equal(values, restored.state()[key])


def test_the_best_drafter_is_that_of_the_smallest_mean_loss_while_awake() -> None:
    losses = np.array([[0.5, 0.4, np.nan], [0.5, np.nan, np.nan], [0.5, 0.5, np.nan]])
    assert best_drafter(losses) == 1
    assert best_drafter(losses[1:2]) == 0
    assert best_drafter(losses[:0]) is None
    assert best_drafter(np.full((2, 3), np.nan)) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_drafters": 0}, "num_drafters=0"),
        ({"num_buckets": 0}, "num_buckets=0"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"floor": 0.0}, r"floor=0\.0 outside"),
    ],
)
def test_invalid_settings_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Router(**{"num_drafters": 2, **arguments})  # type: ignore[arg-type]


def test_invalid_drafter_is_refused_and_not_learned() -> None:
    router = Router(2)
    with pytest.raises(ValueError, match=r"drafter_index=2 outside 0\.\.1"):
        router.learn([1], 2)
    assert router.state()["requests"].sum() == 0.0


def test_invalid_states_are_refused(router: Router) -> None:
    state = router.state()
    with pytest.raises(ValueError, match="router version 7, expected 1"):
        Router.from_state({**state, "settings": np.array([7.0, 4096.0, 256.0, 0.05])})
    with pytest.raises(ValueError, match=r"shape \(3, 9\), expected \(3, 4096\)"):
        Router.from_state({**state, "tokens": state["tokens"][:, :9]})


def test_a_router_grows_and_forgets_nothing(router: Router) -> None:
    grown = router.with_new(4)
    assert grown.num_drafters == 4
    assert router.with_new(3) is router
    code = prompt(np.random.default_rng(3), CODE)
    found, before = grown.probabilities(code), router.probabilities(code)
    np.testing.assert_allclose(found[:3] - 0.05 / 4, before - 0.05 / 3, atol=1e-12)
    grown.learn(code, 3)
    assert grown.probabilities(code)[3] > found[3]
