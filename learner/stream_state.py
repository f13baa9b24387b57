"""The learner's state of one stream: a pure function of the stream's events in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from learner.carried import copied, over_pool, packed, unpacked
from learner.cost import CostSums
from learner.event_learning import learn_from
from learner.feedback import Contained, drafter_positions
from learner.measures import Estimator
from learner.ports import ReceivedEvent
from learner.prior import PriorSettings, StreamPrior
from learner.request_selector import round_feedback
from learner.selection import DEFAULT_POLICY, CompiledPolicy, PolicySpec, parse_policy
from learner.trial import is_shadow
from schemas.errors import ContractError
from schemas.events import NO_DRAFTER, DrafterVersion, PolicyPublished, VerificationEvent

LAYOUT = 2.0
"""Version of the accumulators' meaning; a state of another one is refused."""

FORGOTTEN_WINDOWS = 1e-3
"""A drafter that an event no longer lists leaves once its evidence has decayed below this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSettings:
    """What turns events into a state; two learners with equal settings reach equal states.

    Attributes:
        policy: The policy that workers run. If it is carried, the learner runs it too, over the
            windows of all workers, and publishes its state.
        admitted_drafter_ids: Drafters to learn about; None = all that events name.
        estimator, length_weight: As ``learner.feedback.event_losses``.
        prior: How evidence becomes a prior.
    """

    policy: PolicySpec = field(default_factory=lambda: parse_policy(DEFAULT_POLICY))
    admitted_drafter_ids: Set[str] | None = None
    estimator: Estimator = "exact"
    length_weight: float = 1.0
    prior: PriorSettings = field(default_factory=PriorSettings)

    def admits(self, drafter_id: str) -> bool:
        """Tell whether the learner keeps this drafter; what stands beside one is never selected."""
        if is_shadow(drafter_id):
            return False
        return self.admitted_drafter_ids is None or drafter_id in self.admitted_drafter_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamState:
    """All that is known of one stream.

    ``version`` counts the events learned. ``drafters`` carry the newest weights version seen;
    new weights keep the drafter's history, which decays anyway. ``policy`` is the stream's carried
    policy over ``drafters``, never changed in place; None while there is none to carry.
    """

    stream: str
    version: int = 0
    drafters: tuple[DrafterVersion, ...] = ()
    prior: StreamPrior = field(default_factory=lambda: StreamPrior.empty(0))
    cost: CostSums = field(default_factory=CostSums.empty)
    policy: CompiledPolicy | None = None
    contained: Contained = field(default_factory=Contained)

    def learned(self, received: ReceivedEvent, settings: StreamSettings) -> tuple[StreamState, int]:
        """Return the state after one new event, and how many of its drafters are orphans.

        Raises:
            ValueError: If the event cannot be learned.
        """
        event, carries = received.event, _is_carried(settings.policy)
        pool = self if event.drafters == self.drafters else self._with_drafters_of(event, settings)
        places = drafter_positions(event.drafters, pool.drafters)
        taken = learn_from(
            event,
            places,
            (pool.prior, pool.cost),
            settings.prior,
            estimator=settings.estimator,
            length_weight=settings.length_weight,
            policy_loss=settings.policy.loss if carries else None,
        )
        state = StreamState(
            stream=self.stream,
            version=self.version + 1,
            drafters=pool.drafters,
            prior=taken.prior,
            cost=taken.cost,
            policy=pool._learned_policy(event, places, taken.losses, settings.policy),
            contained=self.contained.with_event(received),
        )
        if event.drafters == state.drafters:
            return state, 0
        num_shadows = sum(map(is_shadow, event.drafter_ids))
        num_orphans = int(np.count_nonzero(places < 0)) - num_shadows
        return state._without_forgotten(event), num_orphans

    def _with_drafters_of(self, event: VerificationEvent, settings: StreamSettings) -> StreamState:
        """Admit drafters seen for the first time and note new weights versions."""
        id_to_drafter = {drafter.drafter_id: drafter for drafter in self.drafters}
        for drafter in event.drafters:
            known = id_to_drafter.get(drafter.drafter_id, drafter)
            if settings.admits(drafter.drafter_id):
                newer = drafter if drafter.weights_version > known.weights_version else known
                id_to_drafter[drafter.drafter_id] = newer
        num_new = len(id_to_drafter) - len(self.drafters)
        drafters = tuple(id_to_drafter.values())
        return replace(
            self,
            drafters=drafters,
            prior=self.prior.with_new(num_new),
            cost=self.cost.with_new(num_new),
            policy=self._policy_over(drafters),
        )

    def _policy_over(self, drafters: Sequence[DrafterVersion]) -> CompiledPolicy | None:
        """Return the policy over another pool; unchanged if the ids are."""
        known, ids = ([one.drafter_id for one in pool] for pool in (self.drafters, drafters))
        if self.policy is None or not ids:
            return None
        return self.policy if ids == known else over_pool(self.policy, known, ids)

    def _learned_policy(
        self,
        event: VerificationEvent,
        places: NDArray[np.int64],
        losses: NDArray[np.float64],
        spec: PolicySpec,
    ) -> CompiledPolicy | None:
        """Return the carried policy after one event; it starts with the first that has drafters."""
        if not _is_carried(spec) or not self.drafters:
            return None
        policy = copied(self.policy) if self.policy else spec.build(len(self.drafters))
        policy.follow(losses)
        if policy.learns_rounds:
            _learn_rounds(policy, event, places)
        return policy

    def _without_forgotten(self, event: VerificationEvent) -> StreamState:
        """Drop drafters that are neither in use nor remembered."""
        listed = set(event.drafter_ids)
        return self._only(
            [
                index
                for index, drafter in enumerate(self.drafters)
                if drafter.drafter_id in listed
                or self.prior.num_windows[index] >= FORGOTTEN_WINDOWS
            ]
        )

    def _only(self, positions: list[int]) -> StreamState:
        if len(positions) == len(self.drafters):
            return self
        drafters = tuple(self.drafters[index] for index in positions)
        return replace(
            self,
            drafters=drafters,
            prior=self.prior.only(positions),
            cost=self.cost.only(positions),
            policy=self._policy_over(drafters),
        )

    def to_policy(
        self, settings: StreamSettings, *, learner_id: str, produced_at: datetime
    ) -> PolicyPublished:
        """Return the state as it is published.

        ``parent_version`` is the state one event earlier, published or not, so that how often
        a learner publishes leaves no trace.
        """
        size = len(self.drafters)
        return PolicyPublished(
            stream=self.stream,
            version=self.version,
            parent_version=self.version - 1,
            produced_at=produced_at,
            learner_id=learner_id,
            policy_name=str(settings.policy),
            drafters=self.drafters,
            log_weights=self.prior.log_weights(settings.prior),
            accumulators=self._accumulators(),
            selection_probabilities=self.prior.probabilities(settings.prior),
            num_speculative_tokens=np.full(size, self.cost.num_speculative_tokens, np.int16),
            cost=self.cost.model(),
            watermark=self.contained.watermark(),
        )

    def _accumulators(self) -> dict[str, NDArray[np.float64]]:
        table, numbers = packed(self.policy)
        return {
            "layout": np.array([LAYOUT]),
            "policy_layout": np.array([0.0 if self.policy is None else float(self.policy.version)]),
            "policy_table": table.reshape(-1, max(len(self.drafters), 1)),
            "policy_numbers": numbers,
            "excess_loss": self.prior.excess_loss,
            "num_windows": self.prior.num_windows,
            **self.cost.arrays(),
        }

    @classmethod
    def from_policy(cls, policy: PolicyPublished, settings: StreamSettings) -> StreamState:
        """Continue from a published policy, without the drafters that are no longer admitted.

        Raises:
            ContractError: If an accumulator is missing or of another layout.
        """
        arrays = policy.accumulators
        path = f"policy of {policy.stream!r}: accumulators"
        layout = _accumulator(arrays, "layout", path)
        if not np.array_equal(layout, [LAYOUT]):
            raise ContractError(f"{path}.layout", found=layout, expected=[LAYOUT])
        state = cls(
            stream=policy.stream,
            version=policy.version,
            drafters=policy.drafters,
            prior=StreamPrior(
                _accumulator(arrays, "excess_loss", path), _accumulator(arrays, "num_windows", path)
            ),
            cost=CostSums(
                **{name: _accumulator(arrays, name, path) for name in CostSums.empty().arrays()}
            ),
            policy=carried_policy(policy, settings.policy),
            contained=Contained.from_watermark(policy.watermark),
        )
        admitted = [i for i, d in enumerate(policy.drafters) if settings.admits(d.drafter_id)]
        return state._only(admitted)


def carried_policy(published: PolicyPublished, spec: PolicySpec) -> CompiledPolicy | None:
    """Return the policy that a learner has carried over ``published.drafters``.

    Returns:
        None if it carried none, or one of another specification.

    Raises:
        ValueError: If it is a state of another build.
    """
    arrays = published.accumulators
    table = arrays.get("policy_table", np.empty(0))
    if not _is_carried(spec) or published.policy_name != str(spec) or not table.size:
        return None
    policy = unpacked(spec, table.ravel(), arrays["policy_numbers"], len(published.drafters))
    if not np.array_equal(arrays["policy_layout"], [policy.version]):
        raise ValueError(
            f"state of {spec.name!r} has layout {arrays['policy_layout']}, expected "
            f"{policy.version}"
        )
    return policy


def published_prior(published: PolicyPublished) -> StreamPrior | None:
    """Return the evidence in a published policy, over ``published.drafters``; None without."""
    shape = (len(published.drafters),)
    found = [published.accumulators.get(name) for name in ("excess_loss", "num_windows")]
    known = [values for values in found if values is not None and values.shape == shape]
    return StreamPrior(*known) if len(known) == len(found) else None


def _is_carried(spec: PolicySpec) -> bool:
    """Tell whether learners run the policy too; arms cost what they cost at one worker."""
    return spec.scope != "request" and spec.objective == "tokens"


def _learn_rounds(
    policy: CompiledPolicy, event: VerificationEvent, positions: NDArray[np.int64]
) -> None:
    """Teach a bandit the rounds of an event; those of orphans are left out."""
    rounds = event.rounds
    place = np.append(positions, NO_DRAFTER)[rounds.drafter_index]
    for index in np.flatnonzero(place >= 0):
        policy.learn_round(
            round_feedback(
                int(place[index]),
                float(rounds.selection_probability[index]),
                int(rounds.num_draft_tokens[index]),
                int(rounds.num_accepted_tokens[index]),
                num_speculative_tokens=event.num_speculative_tokens,
            )
        )


def _accumulator(
    arrays: Mapping[str, NDArray[np.float64]], name: str, path: str
) -> NDArray[np.float64]:
    if name not in arrays:
        raise ContractError(f"{path}.{name}", found="nothing", expected="an array")
    return arrays[name]
