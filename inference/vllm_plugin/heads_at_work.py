"""Which rows ask which head: by what a head is expected to earn there, and by a coin for scoring.

A head is asked for a row only if its tokens are expected to be worth more than what the lookups
offer there. Now and then, with a probability that keeps scoring within its share of the time, all
heads are asked at all rows to the full length: only these windows are reported, so that what is
scored does not depend on who looked promising.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from inference.drafters.hydra import HydraDrafter
from inference.vllm_plugin.choosing import worthwhile
from inference.vllm_plugin.guard import Guard
from inference.vllm_plugin.head_batch import HeadDrafts, HeadRecord
from inference.vllm_plugin.lookup_kernels import NO_TOKEN
from inference.vllm_plugin.ports import PoolMember
from inference.vllm_plugin.rows import RequestRow
from inference.vllm_plugin.step_costs import StepCost
from schemas.events import NO_DRAFTER

RAREST_SCORING = 0.01
FIRST_SCORED_STEPS = 8
"""Steps that are scored for sure after a release, to learn what the heads are worth."""


@dataclass(slots=True)
class HeadChoice:
    """The best that heads offer a row: who, what, and its worth in tokens."""

    place: int = NO_DRAFTER
    token_ids: list[int] = field(default_factory=list)
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
        records: What is known of each.
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
        self.records = [HeadRecord() for _ in places]
        self._ids: list[str] = [""] * len(places)
        self._num_levels = num_levels
        self._scoring_share = scoring_share
        self._guard = guard
        self._rng = rng
        self._num_surely_scored = 0
        self._score_seconds = 0.0

    @property
    def num_heads(self) -> int:
        """M, released or not."""
        return len(self.records)

    @property
    def has_any(self) -> bool:
        """Whether a head is in force."""
        return any(one.drafter is not None for one in self.records)

    def knows(self, drafter_id: str, pool: Sequence[PoolMember]) -> bool:
        """Tell whether a drafter is one of the heads."""
        for index, place in enumerate(self.places):
            self._ids[index] = pool[place].version.drafter_id
        return drafter_id in self._ids

    def renew(self, drafter_id: str, drafter: HydraDrafter | None) -> None:
        """Take up another version of a head; None retires it."""
        index = self._ids.index(drafter_id)
        self.records[index].renew(drafter)
        self._guard.switch_on(f"head {drafter_id}")
        self._num_surely_scored = FIRST_SCORED_STEPS

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
        live = [
            m
            for m, one in enumerate(self.records)
            if one.drafter is not None and not self._guard.is_off(f"head {self._ids[m]}")
        ]
        ready = [i for i, one in enumerate(requests) if one.state is not None and room[i] > 0]
        if not live or not ready:
            return choices
        chance = self._scoring_chance(live, cost)
        for i in ready:
            requests[i].draft.score_probability = chance
        if self._rng.random() < chance:
            self._num_surely_scored = max(self._num_surely_scored - 1, 0)
            self._score(live, ready, requests, room, price, choices)
            return choices
        for m, rows in self._asked(live, ready, requests, lookup_values, price, rate).items():
            level_price = self._level_tokens(m, rate, price) / len(rows)
            self._ask(m, rows, requests, room, price, price + level_price, choices)
        return choices

    def _scoring_chance(self, live: Sequence[int], cost: StepCost | None) -> float:
        """Return the chance that this step asks all heads at all rows."""
        seconds = [self.records[m].level_seconds for m in live]
        if self._num_surely_scored or cost is None or np.isnan(seconds).any():
            return 1.0
        budget = self._scoring_share * cost.base
        return float(np.clip(budget / (self._num_levels * sum(seconds)), RAREST_SCORING, 1.0))

    def _level_tokens(self, m: int, rate: float, price: float) -> float:
        seconds = self.records[m].level_seconds
        return price if np.isnan(seconds) else seconds * rate

    def _asked(
        self,
        live: Sequence[int],
        ready: Sequence[int],
        requests: Sequence[RequestRow],
        lookup_values: NDArray[np.float64],
        price: float,
        rate: float,
    ) -> dict[int, list[int]]:
        """Return the rows that each head is asked for: where it is expected to earn the most."""
        levels = np.arange(self._num_levels)
        expected = np.empty((len(ready), len(live), self._num_levels))
        for at, i in enumerate(ready):
            for column, m in enumerate(live):
                first, later = self.records[m].expected(
                    requests[i].heads.counts[m], requests[i].stream
                )
                expected[at, column] = first * later**levels
        level_tokens = np.array([self._level_tokens(m, rate, price) for m in live])
        found: dict[int, list[int]] = {}
        num_rows = len(ready)
        for _ in range(2):
            paid = expected - price - level_tokens[:, None] / max(num_rows, 1)
            values = np.maximum(paid, 0.0).sum(axis=2)
            best = values.argmax(axis=1)
            found = {}
            for at, i in enumerate(ready):
                if values[at, best[at]] > lookup_values[i]:
                    found.setdefault(live[best[at]], []).append(i)
            num_rows = sum(map(len, found.values()))
        return found

    def _ask(
        self,
        m: int,
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

        drafts = self._unroll(m, rows, requests, int(room[list(rows)].max()), stop)
        if drafts is not None:
            self._offer(m, drafts, rows, requests, room, price, choices)
        return drafts

    def _unroll(
        self, m: int, rows: Sequence[int], requests: Sequence[RequestRow], levels: int, stop: object
    ) -> HeadDrafts | None:
        states = torch.stack([state for i in rows if (state := requests[i].state) is not None])
        newest = [int(requests[i].lookup.tokens[requests[i].lookup.num_tokens - 1]) for i in rows]
        return self._guard.run(
            f"head {self._ids[m]}",
            lambda: self.records[m].unroll(states, np.array(newest), levels, stop),  # type: ignore[arg-type]
            None,
        )

    def _offer(
        self,
        m: int,
        drafts: HeadDrafts,
        rows: Sequence[int],
        requests: Sequence[RequestRow],
        room: NDArray[np.int64],
        price: float,
        choices: list[HeadChoice],
    ) -> None:
        """Note what a head was asked, and its draft where it is a row's best so far."""
        levels, values = worthwhile(drafts.chances[:, None, :], room[list(rows)], price)
        for at, i in enumerate(rows):
            tokens = drafts.token_ids[at].tolist()
            requests[i].heads.asked[m] = (tokens, drafts.cells[at].tolist())
            if values[at, 0] > choices[i].value:
                kept = tokens[: int(levels[at, 0])]
                choices[i] = HeadChoice(self.places[m], kept, float(values[at, 0]))

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
        found = np.full((len(ready), self.num_heads, self._num_levels), NO_TOKEN, dtype=np.int32)
        for m in live:
            drafts = self._unroll(m, ready, requests, self._num_levels, lambda *_: False)
            if drafts is not None:
                found[:, m, : drafts.token_ids.shape[1]] = drafts.token_ids
                self._score_seconds += drafts.seconds
                self._offer(m, drafts, ready, requests, room, price, choices)
        for at, i in enumerate(ready):
            requests[i].recorder.score_at(requests[i].lookup.num_tokens, found[at])
