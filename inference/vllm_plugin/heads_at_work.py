"""Which rows ask which head: by what a head is expected to earn there, and by a coin for scoring.

A head is asked for a row only if its tokens are expected to be worth more than what the lookups
offer there, and if all rows together are expected to earn what drafting at all costs. Now and
then, with a probability that keeps scoring within its share of the time, all heads are asked at all
rows to the full length: only these windows are reported, so that what is scored does not depend on
who looked promising.

A version on trial stands beside its head: it is scored with it and drafts nothing, but in the
requests that are dealt to a canary the two change places (``inference.shadows``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from inference.ports import Drafter
from inference.shadows import Placed, is_dealt
from inference.vllm_plugin.choosing import pays_to_begin, worthwhile
from inference.vllm_plugin.guard import Guard
from inference.vllm_plugin.head_batch import HeadDrafts, HeadRecord, RowHeads, ServedHead
from inference.vllm_plugin.lookup_kernels import NO_TOKEN
from inference.vllm_plugin.ports import PoolMember
from inference.vllm_plugin.published import published_chances
from inference.vllm_plugin.rows import RequestRow
from inference.vllm_plugin.step_costs import StepCost
from learner.trial import shadow_id
from schemas.events import NO_DRAFTER, DrafterVersion, PolicyPublished

RAREST_SCORING = 0.01
FIRST_SCORED_STEPS = 8
"""Steps that are scored for sure after a release, to learn what the heads are worth."""


@dataclass(slots=True)
class HeadChoice:
    """The best that heads offer a row.

    Attributes:
        place: Whose.
        token_ids: What it proposes, (L,).
        reach: (L,), chance that its first k tokens are all accepted.
        value: What the best length of it is worth, in tokens.
    """

    place: int = NO_DRAFTER
    token_ids: list[int] = field(default_factory=list)
    reach: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    value: float = 0.0


class HeadsAtWork:
    """The heads of the pool.

    Args:
        places: Where they stand in the pool.
        num_levels: K.
        scoring_share: Share of a step that scoring may take on average.
        guard: Keeps a head's failures from the step.
        rng: Tosses the coins.

    Attributes:
        records: What is known of each of M heads, then of the version beside each.
        places: Where they stand in the pool.
    """

    def __init__(
        self,
        places: tuple[int, ...],
        num_levels: int,
        scoring_share: float,
        guard: Guard,
        rng: np.random.Generator,
    ) -> None:
        self.places = places
        self.records = [HeadRecord() for _ in range(2 * len(places))]
        self._ids: list[str] = [""] * len(self.records)
        self._placed: list[Placed | None] = [None] * len(places)
        self._num_levels = num_levels
        self._scoring_share = scoring_share
        self._guard = guard
        self._rng = rng
        self._num_surely_scored = 0
        self._score_seconds = 0.0

    @property
    def num_heads(self) -> int:
        """M, released or not."""
        return len(self.places)

    @property
    def has_any(self) -> bool:
        """Whether a head is in force."""
        return any(one.drafter is not None for one in self.records)

    def knows(self, drafter_id: str, pool: Sequence[PoolMember]) -> bool:
        """Tell whether a drafter is one of the heads, or beside one."""
        heads = [pool[place].version.drafter_id for place in self.places]
        self._ids = [*heads, *map(shadow_id, heads)]
        return drafter_id in self._ids

    def renew(self, drafter: Drafter) -> None:
        """Take up another version of a head or beside one; what is no head retires it."""
        drafter_id = drafter.version.drafter_id
        index = self._ids.index(drafter_id)
        head: object = drafter
        if isinstance(drafter, Placed):
            self._placed[index - self.num_heads] = drafter
            head = drafter.drafter
        self.records[index].renew(head if isinstance(head, ServedHead) else None)
        self._guard.switch_on(f"head {drafter_id}")
        self._num_surely_scored = FIRST_SCORED_STEPS

    def start_from(self, policy: PolicyPublished, pool: Sequence[PoolMember]) -> None:
        """Let the requests of a stream expect of the heads what the learner publishes of them."""
        none_id = next((one.version.drafter_id for one in pool if one.kind == "none"), "")
        told = published_chances(policy, none_id)
        for record, place in zip(self.records, self.places, strict=False):
            found = told.get(pool[place].version.drafter_id)
            if found is not None:
                record.start_from(policy.stream, *found)

    def arrange(self, heads: RowHeads, request_id: str) -> None:
        """Say which versions a request has in the heads' places, and which beside them."""
        own, others = list(range(self.num_heads)), []
        heads.place_to_version = {}
        for index, placed in enumerate(self._placed):
            live = self.records[index].drafter
            newer = self.records[index + self.num_heads].drafter
            if placed is None or live is None or newer is None or _are_same(live, newer):
                continue
            other = index + self.num_heads
            if is_dealt(placed, request_id):
                own[index], other = other, index
                heads.place_to_version[self.places[index]] = newer.version
            others.append(other)
        heads.order = (*own, *others)
        heads.beside = tuple(self._version_beside(index) for index in others)

    def _version_beside(self, index: int) -> DrafterVersion:
        drafter = self.records[index].drafter
        assert drafter is not None  # it is in an order
        beside = self._ids[index % self.num_heads + self.num_heads]
        return replace(drafter.version, drafter_id=beside)

    def take_score_seconds(self) -> float:
        """Return the seconds spent on scoring since the last call."""
        taken, self._score_seconds = self._score_seconds, 0.0
        return taken

    def draft(
        self,
        requests: Sequence[RequestRow],
        room: NDArray[np.int64],
        lookup_values: NDArray[np.float64],
        price: float,
        cost: StepCost | None,
        rate: float,
    ) -> list[HeadChoice]:
        """Ask heads where they may earn more than the lookups, and return their best offers.

        Args:
            requests: The B rows at work.
            room: (B,), most tokens to draft.
            lookup_values: (B,), what the lookups offer, in tokens.
            price: Tokens that a drafted token costs.
            cost: Of a step; None before it was measured.
            rate: Tokens per second.
        """
        choices = [HeadChoice() for _ in requests]
        ready = [i for i, one in enumerate(requests) if one.state is not None and room[i] > 0]
        live = [
            r
            for r in sorted({r for i in ready for r in requests[i].heads.order})
            if self.records[r].drafter is not None
            and not self._guard.is_off(f"head {self._ids[r]}")
        ]
        if not live or not ready:
            return choices
        chance = self._scoring_chance(live, cost)
        for i in ready:
            requests[i].draft.score_probability = chance
        if self._rng.random() < chance:
            self._num_surely_scored = max(self._num_surely_scored - 1, 0)
            self._score(live, ready, requests, room, price, choices)
            return choices
        asked, worth = self._asked(frozenset(live), ready, requests, lookup_values, price, rate)
        if not pays_to_begin(worth, cost, rate):
            return choices
        for r, rows in asked.items():
            level_price = self._level_tokens(r, rate, price) / len(rows)
            self._ask(r, rows, requests, room, price, price + level_price, choices)
        return choices

    def _scoring_chance(self, live: Sequence[int], cost: StepCost | None) -> float:
        """Return the chance that this step asks all heads at all rows."""
        seconds = [self.records[r].level_seconds for r in live]
        if self._num_surely_scored or cost is None or np.isnan(seconds).any():
            return 1.0
        budget = self._scoring_share * cost.base
        return float(np.clip(budget / (self._num_levels * sum(seconds)), RAREST_SCORING, 1.0))

    def _level_tokens(self, r: int, rate: float, price: float) -> float:
        seconds = self.records[r].level_seconds
        return price if np.isnan(seconds) else seconds * rate

    def _asked(
        self,
        live: frozenset[int],
        ready: Sequence[int],
        requests: Sequence[RequestRow],
        lookup_values: NDArray[np.float64],
        price: float,
        rate: float,
    ) -> tuple[dict[int, list[int]], NDArray[np.float64]]:
        """Return the rows that each head is asked for, and what all rows then expect to earn, (B,).

        A row asks the head that is expected to earn the most there, if that is more than what
        the lookups offer.
        """
        levels = np.arange(self._num_levels)
        expected = np.zeros((len(ready), self.num_heads, self._num_levels))
        level_tokens = np.zeros((len(ready), self.num_heads, 1))
        for at, i in enumerate(ready):
            heads = requests[i].heads
            for m, r in enumerate(heads.order[: self.num_heads]):
                if r in live:
                    first, later = self.records[r].expected(heads.counts[r], requests[i].stream)
                    expected[at, m] = first * later**levels
                    level_tokens[at, m] = self._level_tokens(r, rate, price)
        found: dict[int, list[int]] = {}
        worth = lookup_values.copy()
        num_rows = len(ready)
        for _ in range(2):
            paid = expected - price - level_tokens / max(num_rows, 1)
            values = np.maximum(paid, 0.0).sum(axis=2)
            best = values.argmax(axis=1)
            found = {}
            for at, i in enumerate(ready):
                worth[i] = max(values[at, best[at]], lookup_values[i])
                if values[at, best[at]] > lookup_values[i]:
                    found.setdefault(requests[i].heads.order[best[at]], []).append(i)
            num_rows = sum(map(len, found.values()))
        return found, worth

    def _ask(
        self,
        r: int,
        rows: Sequence[int],
        requests: Sequence[RequestRow],
        room: NDArray[np.int64],
        price: float,
        stop_price: float,
        choices: list[HeadChoice],
    ) -> HeadDrafts | None:
        """Let one head draft for some rows; levels end where no row's next one pays."""
        reach = np.ones(len(rows))

        def stop(chances: NDArray[np.float64], level: int) -> bool:
            nonlocal reach
            reach = reach * chances
            return not bool((reach > stop_price).any())

        drafts = self._unroll(r, rows, requests, int(room[list(rows)].max()), stop)
        if drafts is not None:
            self._offer(r, drafts, rows, requests, room, price, choices)
        return drafts

    def _unroll(
        self, r: int, rows: Sequence[int], requests: Sequence[RequestRow], levels: int, stop: object
    ) -> HeadDrafts | None:
        states = torch.stack([state for i in rows if (state := requests[i].state) is not None])
        newest = np.stack([requests[i].lookup.newest(self.records[r].num_read) for i in rows])
        return self._guard.run(
            f"head {self._ids[r]}",
            lambda: self.records[r].unroll(states, newest, levels, stop),  # type: ignore[arg-type]
            None,
        )

    def _offer(
        self,
        r: int,
        drafts: HeadDrafts,
        rows: Sequence[int],
        requests: Sequence[RequestRow],
        room: NDArray[np.int64],
        price: float,
        choices: list[HeadChoice],
    ) -> None:
        """Note what a head was asked, and its draft where it is a row's best so far.

        Beside another it is judged alike, and drafts nothing.
        """
        _, values = worthwhile(drafts.chances[:, None, :], room[list(rows)], price)
        reach = np.cumprod(drafts.chances, axis=1)
        for at, i in enumerate(rows):
            tokens = drafts.token_ids[at].tolist()
            requests[i].heads.asked[r] = (tokens, drafts.cells[at].tolist())
            m = r % self.num_heads
            if values[at, 0] > choices[i].value and requests[i].heads.order[m] == r:
                value = float(values[at, 0])
                choices[i] = HeadChoice(self.places[m], tokens, reach[at], value)

    def _score(
        self,
        live: Sequence[int],
        ready: Sequence[int],
        requests: Sequence[RequestRow],
        room: NDArray[np.int64],
        price: float,
        choices: list[HeadChoice],
    ) -> None:
        """Ask all heads at all rows, to the full length, and note the windows."""
        shape = (len(ready), len(self.records), self._num_levels)
        found = np.full(shape, NO_TOKEN, dtype=np.int32)
        for r in live:
            drafts = self._unroll(r, ready, requests, self._num_levels, lambda *_: False)
            if drafts is not None:
                found[:, r, : drafts.token_ids.shape[1]] = drafts.token_ids
                self._score_seconds += drafts.seconds
                self._offer(r, drafts, ready, requests, room, price, choices)
        for at, i in enumerate(ready):
            order = list(requests[i].heads.order)
            requests[i].recorder.score_at(requests[i].lookup.num_tokens, found[at, order])


def _are_same(left: ServedHead, right: ServedHead) -> bool:
    return left.version.weights_version == right.version.weights_version
