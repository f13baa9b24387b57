"""Events of a described fleet, drawn so that they are as compressible as real ones.

What a column costs after compression is what it repeats, so what real events repeat is drawn as
they repeat it. A drafter that reads tokens only proposes one token per position, whichever window
asks: every window is a shifted copy of the one before, up to where it has no proposal; a head's
windows are drawn one by one. All drafters share the difficulty of the position. Where the target
samples, whoever proposes its most probable token has that token's probability. Ids are random where
they are and repeat where they do; most tokens of a text have occurred before.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from learner.selection import parse_policy
from pipeline.configuration.pool_settings import DrafterSettings
from pipeline.configuration.settings import Settings
from pipeline.operations.estimate_windows import DrawnText
from schemas.events import (
    AcceptanceRule,
    Content,
    DrafterVersion,
    FeatureReference,
    FinishReason,
    Rounds,
    SamplingRule,
    ScoredWindows,
    VerificationEvent,
)

NUM_KEPT_TOKENS = 8
OWN_SHARE, KNOWN_SHARE = 0.5, 0.35
"""Shares of tokens that the request has had before, and that others have: measured on chat with
SmolLM2, where 0.50 of the emitted tokens and 0.54 of the target's most probable ones are of the
first kind, and 0.15 of all are new."""

RANK_SHAPE = (4.0, 2.0)
"""Beta law of log(rank) / log(vocabulary size) of new tokens; quartiles as measured there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The traffic.

    Attributes:
        requests_per_second: Of all workers together.
        prompt_tokens, output_tokens: Per request.
        acceptance_length: Tokens per verification, bonus included, >= 1.
        content_share: Share of requests whose content is recorded, [0, 1].
        hidden_size: H of the target, for recorded features; 0 = none are recorded.
        is_sampled: Whether targets sample: acceptances are then probabilities, which compress less.
        vocabulary_size: Of the target; the ids of recorded tokens cost more the more there are.
    """

    requests_per_second: float
    prompt_tokens: int = 500
    output_tokens: int = 300
    acceptance_length: float = 2.0
    content_share: float = 0.0
    hidden_size: int = 0
    is_sampled: bool = False
    vocabulary_size: int = 49_152


def sample_events(
    settings: Settings, fleet: Fleet, *, num_requests: int, has_content: bool, seed: int = 0
) -> list[VerificationEvent]:
    """Return the events of some requests of the described shape, in order."""
    rng = np.random.default_rng(seed)
    tokens = _Tokens(rng, fleet.vocabulary_size)
    events: list[VerificationEvent] = []
    for _ in range(num_requests):
        content = tokens if has_content else None
        events += _Request(settings, fleet, rng, content).events(len(events))
    return events


class _Tokens:
    """Draws the tokens of one text after another."""

    def __init__(self, rng: np.random.Generator, vocabulary_size: int) -> None:
        self._rng = rng
        self._most = vocabulary_size - 1
        self._known: list[int] = []

    def of_text(self, count: int) -> NDArray[np.int32]:
        """Return the tokens of a text."""
        rank = self._most ** self._rng.beta(*RANK_SHAPE, count)
        kinds, places = self._rng.random((2, count)).tolist()
        own: list[int] = []
        for new, kind, place in zip(rank.astype(int).tolist(), kinds, places, strict=True):
            before = own if kind < OWN_SHARE else self._known
            is_new = not before or kind >= OWN_SHARE + KNOWN_SHARE
            own.append(new if is_new else before[int(place * len(before))])
        self._known += own
        return np.array(own, np.int32)


class _Request:
    """One drawn request."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        rng: np.random.Generator,
        tokens: _Tokens | None,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._rng = rng
        self._tokens = tokens
        self._most = settings.worker.num_speculative_tokens
        self._pool = settings.drafters
        self._id = f"cmpl-{rng.bytes(16).hex()}"
        # Lengths differ, which is what keeps positions from repeating.
        self._num_prompt = max(round(fleet.prompt_tokens * rng.uniform(0.5, 1.5)), 1)
        rule = AcceptanceRule.ONE_HOT if fleet.is_sampled else AcceptanceRule.GREEDY
        self._rule = SamplingRule(acceptance_rule=rule, temperature=float(fleet.is_sampled))
        shape = (fleet.output_tokens, self._most, len(self._pool))
        self._probability = self._realised = np.zeros(shape, np.float16)
        if self._most:
            text = DrawnText(
                rng,
                fleet.output_tokens,
                self._most,
                acceptance_length=fleet.acceptance_length,
                is_sampled=fleet.is_sampled,
            )
            self._probability, self._realised = text.acceptances(self._pool)

    def events(self, sequence: int) -> list[VerificationEvent]:
        """Return its segments, numbered from ``sequence`` on."""
        made: list[VerificationEvent] = []
        position = 0
        while position < self._fleet.output_tokens:
            emitted = self._emitted(self._fleet.output_tokens - position)
            made.append(self._event(emitted, position, sequence + len(made), len(made)))
            position += int(emitted.sum())
        return made

    def _emitted(self, num_left: int) -> NDArray[np.int16]:
        """Draw the tokens of the rounds of one segment, which ends once it is long enough."""
        wanted = min(self._settings.worker.segment_tokens, num_left)
        share = min((self._fleet.acceptance_length - 1.0) / max(self._most, 1), 1.0)
        counts: list[int] = []
        while sum(counts) < wanted:
            drawn = 1 + int(self._rng.binomial(self._most, share))
            counts.append(min(drawn, num_left - sum(counts)))
        return np.array(counts, np.int16)

    def _event(
        self, emitted: NDArray[np.int16], position: int, sequence: int, segment_index: int
    ) -> VerificationEvent:
        num_positions, num_drafters = int(emitted.sum()), len(self._pool)
        is_final = position + num_positions >= self._fleet.output_tokens
        table, numbers = (
            _policy_state(self._rng, num_drafters) if not segment_index else (_NONE,) * 2
        )
        return VerificationEvent(
            event_id=self._rng.bytes(16).hex(),
            produced_at=datetime.now(UTC),
            worker_id=self._settings.worker.worker_id,
            worker_epoch=1,
            sequence=sequence,
            stream="default",
            request_id=self._id,
            segment_index=segment_index,
            is_final=is_final,
            finish_reason=FinishReason.LENGTH if is_final else FinishReason.UNFINISHED,
            target_id="target-of-a-name",
            target_fingerprint=_HASH,
            tokenizer_hash=_HASH,
            policy_name=self._settings.worker.policy,
            policy_version=1,
            prior_probabilities=self._rng.dirichlet(np.ones(num_drafters)),
            policy_table=table,
            policy_numbers=numbers,
            drafters=tuple(map(_version, self._pool)),
            sampling=self._rule,
            num_speculative_tokens=self._most,
            num_prompt_tokens=self._num_prompt,
            first_position=self._num_prompt + position,
            num_positions=num_positions,
            num_awake_rounds=np.full(num_drafters, len(emitted), np.int32),
            rounds=self._rounds(emitted, self._num_prompt + position),
            windows=self._windows(position, position + num_positions, is_final=is_final),
            content=self._content(self._tokens, num_positions, segment_index)
            if self._tokens
            else None,
        )

    def _rounds(self, emitted: NDArray[np.int16], first: int) -> Rounds:
        rng, count = self._rng, len(emitted)
        drafter, chance = _choices(self._settings, rng, count)
        drafted = self._most * rng.integers(0, 2, count)
        seconds = rng.gamma(16.0, 1.0 / 16.0, (3, count)) * [[0.004], [0.04], [0.004]]
        draft, verify, score = seconds.astype(np.float32)
        return Rounds(
            first_position=(first + np.cumsum(emitted) - emitted).astype(np.int32),
            drafter_index=drafter.astype(np.int16),
            num_draft_tokens=np.where(emitted > 1, self._most, drafted).astype(np.int16),
            num_accepted_tokens=(emitted - 1).astype(np.int16),
            num_emitted_tokens=emitted,
            num_scored_windows=emitted,
            selection_probability=chance.astype(np.float32),
            draft_seconds=draft,
            verify_seconds=verify,
            score_seconds=score,
        )

    def _windows(self, first: int, end: int, *, is_final: bool) -> ScoredWindows:
        """Return the windows that the output positions first..end - 1 complete.

        The first output token comes from the prompt's own pass, and the last has no window.
        """
        begin = max(first - self._most, 1)
        start = np.arange(begin, max(end - 1 if is_final else end - self._most, begin))
        num_levels = np.minimum(end - 1 - start, self._most) if is_final else self._most
        levels = np.broadcast_to(num_levels, start.shape)
        is_beyond = np.arange(self._most) >= levels[:, None]
        probability, realised = self._probability[start], self._realised[start]
        probability[is_beyond] = realised[is_beyond] = np.nan
        return ScoredWindows(
            start=(self._num_prompt + start).astype(np.int32),
            num_levels=levels.astype(np.int16),
            acceptance_probability=probability,
            realised_acceptance=realised,
        )

    def _content(self, tokens: _Tokens, count: int, segment_index: int) -> Content:
        rng = self._rng
        log_probs = -np.sort(rng.exponential(4.0, (count, NUM_KEPT_TOKENS)), axis=1)
        features = FeatureReference(
            uri=f"features/2026-01-01/worker-0/1-{segment_index}.safetensors",
            first_row=0,
            num_rows=count,
            sha256=rng.bytes(32).hex(),
        )
        num_prompt = self._num_prompt if segment_index == 0 else 0
        drawn = tokens.of_text(num_prompt + count)
        return Content(
            prompt_token_ids=drawn[:num_prompt],
            token_ids=drawn[num_prompt:],
            target_top_token_ids=tokens.of_text(count * NUM_KEPT_TOKENS).reshape(count, -1),
            target_top_log_probabilities=log_probs.astype(np.float16),
            target_tail_mass=rng.beta(0.3, 3.0, count).astype(np.float16),
            features=features if self._fleet.hidden_size else None,
        )


_HASH = "0123456789abcdef" * 4
_NONE = np.empty(0)


def _version(one: DrafterSettings) -> DrafterVersion:
    return DrafterVersion(
        drafter_id=one.drafter_id,
        weights_version=1,
        draft_vocabulary_hash=_HASH if one.is_trained else "",
    )


def _choices(
    settings: Settings, rng: np.random.Generator, count: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Draw who drafts in each round, and the chance that it was given, (R,) each.

    A policy that plays its best drafter keeps to it, with certainty; others draw every round.
    """
    spec, size = parse_policy(settings.worker.policy), len(settings.drafters)
    if spec.choice == "argmax" or settings.worker.policy.startswith("fixed:"):
        return np.full(count, rng.integers(size)), np.ones(count)
    return rng.integers(0, size, count), rng.uniform(0.05, 0.95, count)


def _policy_state(
    rng: np.random.Generator, num_drafters: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Draw the state that a policy starts a request from: log-weights and accumulators."""
    return -rng.exponential(2.0, 15 * num_drafters), -rng.exponential(2.0, 39)
