"""What a log says, as plain data: for the terminal, for JSON, and for the tables of the report.

A value that cannot be given is None and carries its reason; nothing here is ever NaN.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from replay.reader import LogSummary

ALL_STREAMS = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRow:
    """One stream, or all of them (``stream`` None).

    ``mean_acceptance_length`` is emitted tokens per round, bonus included; ``num_idle_rounds`` are
    those without drafter. ``tokens_per_second`` counts draft, verify and score seconds.
    """

    stream: str | None
    num_requests: int
    num_tokens: int
    num_rounds: int
    num_idle_rounds: int
    mean_acceptance_length: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainRow:
    """The streams of one domain together.

    Attributes:
        domain: What follows the last ``/``, ``:`` or ``.`` of its streams' ids.
        num_compared: Rounds that the following two are means of.
        played_length: Expected acceptance length of what was played in them.
        best_drafter_id, best_length: The drafter with the largest one in the same rounds.
    """

    domain: str
    num_streams: int
    num_requests: int
    num_tokens: int
    num_rounds: int
    mean_acceptance_length: float | None
    num_compared: int
    played_length: float | None
    best_drafter_id: str | None
    best_length: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterRow:
    """One drafter in one stream, or in all (``stream`` None).

    Attributes:
        num_windows: Windows on which it was scored.
        exact_length, published_length: Mean expected acceptance length over those windows.
        num_rounds: Rounds in which it was played.
        played_length: Emitted tokens per round in those.
        expected_length: Mean of the exact estimator on the windows of the same rounds: far from
            ``played_length`` means that scoring does not see what drafting does.
        acceptance_rate: Accepted per drafted token in those rounds.
    """

    stream: str | None
    drafter_id: str
    num_windows: int
    exact_length: float | None
    published_length: float | None
    num_rounds: int
    played_length: float | None
    expected_length: float | None
    acceptance_rate: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationRow:
    """Whether a drafter was accepted at a level as often as its scores say.

    Attributes:
        level: Place in the draft, from 1.
        num_rounds: Rounds in which the drafter was played and this level was reached.
        predicted: Acceptance probabilities summed over those rounds.
        realised: In how many of them the level was accepted.
        ratio, ratio_low, ratio_high: Realised over predicted, with the 95 % interval that holds 1
            if the scores are right; None where nothing was predicted.
        is_off: Alarm: at some level of this drafter they differ beyond chance.
    """

    drafter_id: str
    level: int
    num_rounds: int
    predicted: float
    realised: float
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    is_off: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RegretRow:
    """Regret against one comparator; positive where the comparator was better.

    ``*_low`` and ``*_high`` bound a 95 % block-bootstrap interval; both are None where there are
    too few rounds for one. ``seconds`` are None where a cost was never measured.
    """

    stream: str | None
    comparator: str
    path_length: int
    num_rounds: int
    tokens: float
    tokens_low: float | None
    tokens_high: float | None
    loss: float
    loss_low: float | None
    loss_high: float | None
    seconds: float | None
    seconds_low: float | None
    seconds_high: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRow:
    """What a policy would have done with the same text.

    Attributes:
        policy: Its specification.
        num_speculative_tokens: Levels it was walked with, the largest where they vary.
        num_requests: Requests walked.
        num_rounds, num_tokens: Verifications it would have taken, and tokens emitted in them.
        num_idle_rounds: Of these rounds, those without drafter.
        num_skipped_tokens: Tokens passed over, in no round: the log has no window there.
        num_switches: Changes of drafter from one round of a stream to the next.
        mean_acceptance_length: Tokens per round, bonus included; where windows were scored by
            sample, each round weighed by one over the chance that its window was.
        lowest_length, highest_length: What it can be at most and at least, whatever the skipped
            tokens would have given: between one and K + 1 per round.
        ratio, ratio_low, ratio_high: Mean acceptance length over the logged one in the same
            requests, with its 95 % interval (paired block bootstrap over requests).
        seconds: What its rounds would have cost, by the cost measured in the log.
        tokens_per_second, speed_ratio, speed_ratio_low, speed_ratio_high: Tokens per such second,
            and over the logged tokens per second.
        estimated_share: Share of the tokens for which rounds are estimates: skipped, or accepted
            by a coin under speculative sampling. 0 = exact.
    """

    policy: str
    num_speculative_tokens: int
    num_requests: int
    num_rounds: int
    num_tokens: int
    num_idle_rounds: int
    num_skipped_tokens: int
    num_switches: int
    mean_acceptance_length: float | None
    lowest_length: float | None
    highest_length: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    seconds: float | None
    tokens_per_second: float | None
    speed_ratio: float | None
    speed_ratio_low: float | None
    speed_ratio_high: float | None
    estimated_share: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class OffPolicyRow:
    """A policy's mean acceptance length, estimated from a log without scoring.

    Attributes:
        policy: Its specification.
        num_rounds: Rounds in which a drafter was played; the estimates are means over them.
        effective_sample_size: Rounds of equal weight that the estimates are worth.
        importance_weighted, doubly_robust: See ``replay.off_policy``; with 95 % intervals; None
            where there is a refusal.
        refusal: Why there is no number.
    """

    policy: str
    num_rounds: int
    effective_sample_size: float
    importance_weighted: float | None
    importance_weighted_low: float | None
    importance_weighted_high: float | None
    doubly_robust: float | None
    doubly_robust_low: float | None
    doubly_robust_high: float | None
    refusal: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseRow:
    """What the gate found when a version changed its state, in one stream or in all (None).

    ``stream`` is empty for those that the evidence does not name, ``num_streams`` of them. Lengths
    and the interval of their difference are in tokens per verification, bonus included.
    """

    drafter_id: str
    version: int
    state: str
    produced_at: str
    stream: str | None
    num_streams: int | None
    num_requests: int | None
    num_windows: int
    new_acceptance_length: float | None
    old_acceptance_length: float | None
    difference_low: float | None
    difference_high: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RerunCheck:
    """Whether the log agrees with itself.

    Attributes:
        num_rounds: Rounds of the log.
        num_checked: Rounds that could be rebuilt from windows.
        num_selections: Rounds with a drafter.
        num_selections_checked: Of these, whose selection probability was rebuilt with the logged
            policy from the logged prior.
        num_disagreements: Numbers that differ.
        examples: The first few of them, or why something could not be checked, in words.
    """

    num_rounds: int
    num_checked: int
    num_selections: int
    num_selections_checked: int
    num_disagreements: int
    examples: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySummary:
    """All tables of a replay.

    Attributes:
        is_partial: Something of the log is missing or could not be read: see ``notes``.
        off_policy: Estimates of the policies where the log knows only what was played; else empty.
        notes: Sentences on what is partial or missing in this log, and why.
        releases: Decisions of the gate, if the log is a data folder that holds some.
    """

    log: LogSummary
    policy_names: tuple[str, ...]
    num_incomplete_requests: int
    num_windows: int
    is_partial: bool
    total: StreamRow
    streams: tuple[StreamRow, ...]
    domains: tuple[DomainRow, ...]
    drafters: tuple[DrafterRow, ...]
    calibration: tuple[CalibrationRow, ...]
    regrets: tuple[RegretRow, ...]
    policies: tuple[PolicyRow, ...]
    off_policy: tuple[OffPolicyRow, ...]
    check: RerunCheck
    notes: tuple[str, ...]
    releases: tuple[ReleaseRow, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON types; docs/replay.md lists the keys."""
        plain: dict[str, Any] = _json_value(asdict(self))
        return plain


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value
