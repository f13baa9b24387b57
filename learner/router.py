"""A static router: which drafter a prompt asks for, before anything of the answer is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

ROUTER_VERSION = 1


class Router:
    """Multinomial naive Bayes over the tokens of a prompt (river's), as a prior over drafters.

    It is right where prompts look like those it learned, and sure of itself where they do not:
    so its word is floored, and ``prior_mixture`` weighs it against priors that ignore
    the prompt. Token ids share ``num_buckets`` buckets by remainder, so its state is
    bounded whatever the vocabulary.

    Args:
        num_drafters: Number of drafters N.
        num_buckets: Buckets that token ids fall into, at least 1.
        num_tokens: Tokens of a prompt that are read, its last ones, at least 1.
        floor: Mass shared equally, in (0, 1]: no drafter gets less than floor / N.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        num_drafters: int,
        *,
        num_buckets: int = 4096,
        num_tokens: int = 256,
        floor: float = 0.05,
    ) -> None:
        for name, value in (
            ("num_drafters", num_drafters),
            ("num_buckets", num_buckets),
            ("num_tokens", num_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}, expected at least 1")
        if not 0.0 < floor <= 1.0:
            raise ValueError(f"floor={floor} outside (0, 1]")
        self._num_drafters = num_drafters
        self._num_buckets = num_buckets
        self._num_tokens = num_tokens
        self._floor = floor
        # Imported here: who never routes does not load it.
        from river import naive_bayes

        make_model: Any = naive_bayes.MultinomialNB
        self._model = make_model()

    def learn(self, prompt_token_ids: Sequence[int], drafter_index: int) -> None:
        """Learn which drafter was the best of a finished request.

        Args:
            prompt_token_ids: Of the prompt; an empty one teaches how often the drafter is best.
            drafter_index: The best in hindsight, in 0..N-1.

        Raises:
            ValueError: If the drafter is not of the pool.
        """
        if not 0 <= drafter_index < self._num_drafters:
            raise ValueError(f"drafter_index={drafter_index} outside 0..{self._num_drafters - 1}")
        self._model.learn_one(self._counts(prompt_token_ids), drafter_index)

    def probabilities(self, prompt_token_ids: Sequence[int]) -> NDArray[np.float64]:
        """Return the chance of each drafter to be the best, shape (N,), each >= floor / N, sum 1.

        Uniform before anything was learned.
        """
        drafter_to_chance: Mapping[int, float] = self._model.predict_proba_one(
            self._counts(prompt_token_ids)
        )
        chances = np.zeros(self._num_drafters)
        for drafter_index, chance in drafter_to_chance.items():
            chances[drafter_index] = chance
        uniform = np.full(self._num_drafters, 1.0 / self._num_drafters)
        known = chances / chances.sum() if drafter_to_chance else uniform
        return np.asarray((1.0 - self._floor) * known + self._floor * uniform)

    def _counts(self, token_ids: Sequence[int]) -> dict[int, int]:
        read = token_ids[-self._num_tokens :]
        return dict(Counter(int(token_id) % self._num_buckets for token_id in read))

    def state(self) -> dict[str, NDArray[np.float64]]:
        """Return all it learned as plain numbers.

        ``settings`` is (version, buckets, tokens, floor), ``requests`` (N,) how often each drafter
        was best, ``tokens`` (N, buckets) the tokens of those prompts.
        """
        requests = np.zeros(self._num_drafters)
        for drafter_index, count in self._model.class_counts.items():
            requests[drafter_index] = count
        tokens = np.zeros((self._num_drafters, self._num_buckets))
        for bucket, drafter_to_count in self._model.feature_counts.items():
            for drafter_index, count in drafter_to_count.items():
                tokens[drafter_index, bucket] = count
        settings = [ROUTER_VERSION, self._num_buckets, self._num_tokens, self._floor]
        return {"settings": np.array(settings), "requests": requests, "tokens": tokens}

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[np.float64]]) -> Self:
        """Continue from ``state``.

        Raises:
            ValueError: If the version is another or the shapes do not fit.
        """
        version, num_buckets, num_tokens, floor = (float(value) for value in state["settings"])
        if version != ROUTER_VERSION:
            raise ValueError(f"state of router version {version:g}, expected {ROUTER_VERSION}")
        requests, tokens = state["requests"], state["tokens"]
        if tokens.shape != (len(requests), int(num_buckets)):
            raise ValueError(
                f"router's tokens have shape {tokens.shape}, "
                f"expected {(len(requests), int(num_buckets))}"
            )
        router = cls(
            len(requests), num_buckets=int(num_buckets), num_tokens=int(num_tokens), floor=floor
        )
        router._restore(requests, tokens)
        return router

    @property
    def num_drafters(self) -> int:
        """Number of drafters N."""
        return self._num_drafters

    def with_new(self, num_drafters: int) -> Router:
        """Return the router over more drafters, the new ones last; itself if there are none."""
        num_new = num_drafters - self._num_drafters
        if not num_new:
            return self
        state = self.state()
        grown = {
            name: np.pad(state[name], [(0, num_new)] + [(0, 0)] * (state[name].ndim - 1))
            for name in ("requests", "tokens")
        }
        return Router.from_state({**state, **grown})

    def _restore(self, requests: NDArray[np.float64], tokens: NDArray[np.float64]) -> None:
        model = self._model
        for drafter_index in np.flatnonzero(requests):
            model.class_counts[int(drafter_index)] = int(requests[drafter_index])
        for drafter_index, bucket in zip(*np.nonzero(tokens), strict=True):
            count = int(tokens[drafter_index, bucket])
            model.feature_counts[int(bucket)][int(drafter_index)] = count
            model.class_totals[int(drafter_index)] += count


def best_drafter(losses: NDArray[np.float64]) -> int | None:
    """Return the drafter of the smallest mean loss over windows (W, N); None if none was awake."""
    is_awake = ~np.isnan(losses)
    counts = is_awake.sum(axis=0)
    if not counts.any():
        return None
    totals = np.where(is_awake, losses, 0.0).sum(axis=0)
    means = np.divide(totals, counts, out=np.full(len(counts), np.inf), where=counts > 0)
    return int(np.argmin(means))
