"""What a request starts from under scope ``both``: experts over drafters, weighed by their past.

The state that its stream carries, a router that reads the prompt, what the domain and other
streams know, and nothing at all (uniform) are experts; ``PriorMixture`` weighs them by what each
would have lost at the beginning of the requests before. A request's start is where text is most
likely to change, so the state it starts from is a mixture of theirs: a fixed-share step
towards a prior that knows the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.carried import copied
from learner.prior_mixture import PriorMixture
from learner.request_selector import FIRST_WINDOWS
from learner.router import Router, best_drafter
from learner.selection.base import PROBABILITIES, CompiledPolicy
from learner.selection.registry import PolicySpec

SOURCES = ("stream", "router", "shared", "uniform")
STREAM, ROUTER, SHARED, UNIFORM = range(len(SOURCES))


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedStart:
    """What one request starts from.

    Attributes:
        policy: The request's own, to learn in place.
        prior: Chance of each drafter to be the first, (N,), sum 1.
        priors: What each expert says, (E, N).
        drafter_ids: The pool, (N,).
        prompt_token_ids: The prompt that the router read.
    """

    policy: CompiledPolicy
    prior: NDArray[np.float64]
    priors: NDArray[np.float64]
    drafter_ids: tuple[str, ...]
    prompt_token_ids: Sequence[int]


class StartExperts:
    """The experts of one worker, or of one policy in a re-run.

    Args:
        spec: The policy; one whose state is beliefs (``CompiledPolicy.posteriors``).

    Attributes:
        mixture: How much each expert is trusted.
    """

    def __init__(self, spec: PolicySpec) -> None:
        self._spec = spec
        self._id_to_place: dict[str, int] = {}
        self._router: Router | None = None
        self.mixture = PriorMixture.start(SOURCES)

    def start(
        self,
        drafter_ids: Sequence[str],
        carried: CompiledPolicy | None,
        shared: NDArray[np.float64],
        prompt_token_ids: Sequence[int],
    ) -> MixedStart:
        """Return what a request starts from.

        Args:
            drafter_ids: The pool, (N,).
            carried: Its stream's state over the pool, unchanged by this; None = it has none.
            shared: Prior of the stream from what others know, (N,), sum 1.
            prompt_token_ids: Of its prompt; may be empty.
        """
        priors = np.empty((len(SOURCES), len(drafter_ids)))
        priors[STREAM] = shared if carried is None else carried.table[PROBABILITIES]
        priors[ROUTER] = self._routed(drafter_ids, prompt_token_ids)
        priors[SHARED] = shared
        priors[UNIFORM] = 1.0 / len(drafter_ids)
        prior = self.mixture.probabilities(priors)
        if carried is None:
            policy = self._spec.build(len(drafter_ids), prior=prior)
        else:
            policy = copied(carried)
            trust = float(self.mixture.weights[STREAM])
            policy.move_towards((prior - trust * priors[STREAM]) / (1.0 - trust), 1.0 - trust)
        return MixedStart(
            policy=policy,
            prior=prior,
            priors=priors,
            drafter_ids=tuple(drafter_ids),
            prompt_token_ids=prompt_token_ids,
        )

    def learned(self, start: MixedStart, losses: NDArray[np.float64]) -> None:
        """Learn how a request began: its windows in order, (W, N), in [0, 1]; NaN = asleep."""
        first = losses[:FIRST_WINDOWS]
        self.mixture = self.mixture.learned(start.priors, first)
        best = best_drafter(first)
        if best is not None:
            place = self._id_to_place[start.drafter_ids[best]]
            self._router_of_all().learn(start.prompt_token_ids, place)

    def _routed(
        self, drafter_ids: Sequence[str], prompt_token_ids: Sequence[int]
    ) -> NDArray[np.float64]:
        """Return what the router says of a pool, (N,), sum 1."""
        for drafter_id in drafter_ids:
            self._id_to_place.setdefault(drafter_id, len(self._id_to_place))
        chances = self._router_of_all().probabilities(prompt_token_ids)
        known = chances[[self._id_to_place[drafter_id] for drafter_id in drafter_ids]]
        return np.asarray(known / known.sum())

    def _router_of_all(self) -> Router:
        """Return the router over every drafter ever met; it grows with them."""
        size = len(self._id_to_place)
        router = Router(size) if self._router is None else self._router.with_new(size)
        self._router = router
        return router
