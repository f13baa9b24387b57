"""The three messages of the loop, as frozen dataclasses that are checked once, when built.

Axes used in the shapes below:

- ``R`` rounds of the segment, ``P`` verified positions of the segment,
- ``W`` scored windows, ``K`` levels of a window (the logged ``num_speculative_tokens``),
- ``N`` drafters, in the order of ``VerificationEvent.drafters``,
- ``C`` tokens kept of the target's distribution per position.

Positions count tokens of the whole sequence from 0, prompt included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from schemas import checks, state_checks

NO_DRAFTER = -1
"""Drafter index of a round in which nothing was drafted."""


class FinishReason(StrEnum):
    """Why a request ended; ``UNFINISHED`` on every segment but the last."""

    UNFINISHED = "unfinished"
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


class AcceptanceRule(StrEnum):
    """How verification decides (notes on the estimators: selection.md section 1.2)."""

    GREEDY = "greedy"
    ONE_HOT = "one_hot"
    SPECULATIVE_SAMPLING = "speculative_sampling"


class ReleaseState(StrEnum):
    """Life of one version of a drafter's weights."""

    CANDIDATE = "candidate"
    SHADOW = "shadow"
    CANARY = "canary"
    LIVE = "live"
    RETIRED = "retired"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterVersion:
    """One drafter of the pool as it was when the segment was decoded.

    ``weights_version`` is 0 for a drafter without parameters. ``draft_vocabulary_hash`` is empty
    for a drafter that can propose every token of the target.
    """

    drafter_id: str
    weights_version: int
    draft_vocabulary_hash: str = ""

    def __post_init__(self) -> None:
        checks.drafter_version(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRule:
    """How the target's distribution was processed before verification.

    ``temperature`` is 0 exactly when ``acceptance_rule`` is greedy. ``top_p`` is in (0, 1];
    ``top_k`` is 0 for "no limit".
    """

    acceptance_rule: AcceptanceRule
    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        checks.member("sampling.acceptance_rule", self.acceptance_rule, AcceptanceRule)
        checks.sampling_rule(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """The verifications of a segment, one element each, shape (R,).

    Attributes:
        first_position: int32, position of the round's first emitted token.
        drafter_index: int16, index into ``drafters``, or ``NO_DRAFTER`` (then nothing is drafted).
        num_draft_tokens: int16, tokens proposed, 0..K.
        num_accepted_tokens: int16, tokens accepted **without** bonus, 0..num_draft_tokens.
        num_emitted_tokens: int16, tokens that reached the output, bonus included; accepted + 1
            unless the request's end cut them off (then every later round of it emits 0).
        num_scored_windows: int16, windows that the request's selector learned right after this
            round, >= 0, in order of their start; tells a re-run when to learn what. A policy that
            learns level 1 alone may have learned it before the window was complete.
        selection_probability: float32, the drafter's probability when selected, in (0, 1].
        draft_seconds, verify_seconds, score_seconds: float32, monotonic clock, >= 0.
        batch_size: int16, sequences that the target verified together, >= 1; 1 unless given.
        score_probability: float32, chance in (0, 1] that the windows which start at the round's
            emitted positions are scored, drawn without looking at them; 1 unless given.
    """

    first_position: NDArray[np.int32]
    drafter_index: NDArray[np.int16]
    num_draft_tokens: NDArray[np.int16]
    num_accepted_tokens: NDArray[np.int16]
    num_emitted_tokens: NDArray[np.int16]
    num_scored_windows: NDArray[np.int16]
    selection_probability: NDArray[np.float32]
    draft_seconds: NDArray[np.float32]
    verify_seconds: NDArray[np.float32]
    score_seconds: NDArray[np.float32]
    batch_size: NDArray[np.int16] = field(default_factory=lambda: np.empty(0, np.int16))
    score_probability: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))

    def __post_init__(self) -> None:
        for name in ("batch_size", "score_probability"):
            given = getattr(self, name)
            if isinstance(given, np.ndarray) and given.shape == (0,):
                ones = np.ones(np.size(self.first_position), given.dtype)
                object.__setattr__(self, name, ones)
        _protect_arrays(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredWindows:
    """Every drafter scored on verified windows (full information).

    Level ``k`` (array index ``k - 1``) of the window that starts at ``t`` is the drafter's
    prediction of position ``t + k - 1`` as it would have been made from ``t``. A window is
    logged only once complete: it has all K levels, or the request has ended and it has the levels
    that a round there could still use (``num_levels`` < K, the same for all drafters; the last
    token of a request is never followed by a bonus token, so it may be left out).

    Attributes:
        start: int32 (W,), position of level 1, strictly increasing.
        num_levels: int16 (W,), levels that exist, 1..K.
        acceptance_probability: float16 (W, K, N), in [0, 1]; NaN = not scored.
        realised_acceptance: float16 (W, K, N), in [0, 1]; NaN = not scored.
    """

    start: NDArray[np.int32]
    num_levels: NDArray[np.int16]
    acceptance_probability: NDArray[np.float16]
    realised_acceptance: NDArray[np.float16]

    def __post_init__(self) -> None:
        _protect_arrays(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureReference:
    """Where the target's hidden states of this segment are recorded.

    Row ``i`` of the recorded array is the target's last hidden state (after the final norm) that
    predicted the token at ``first_position + i``; ``num_rows`` equals the segment's positions.
    """

    uri: str
    first_row: int
    num_rows: int
    sha256: str

    def __post_init__(self) -> None:
        checks.feature_reference(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What the user wrote and read; present only where the stream has consented.

    Attributes:
        prompt_token_ids: int32, the prompt, in the first segment only (else empty).
        token_ids: int32 (P,), the verified tokens of the segment.
        target_top_token_ids: int32 (P, C), the target's most probable tokens.
        target_top_log_probabilities: float16 (P, C), natural logarithms at temperature 1.
        target_tail_mass: float16 (P,), probability outside the C tokens.
        features: Recorded hidden states, if any.
    """

    prompt_token_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    target_top_token_ids: NDArray[np.int32]
    target_top_log_probabilities: NDArray[np.float16]
    target_tail_mass: NDArray[np.float16]
    features: FeatureReference | None = None

    def __post_init__(self) -> None:
        _protect_arrays(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationEvent:
    """One segment of one request: consecutive verified positions under unchanged versions.

    The message key is ``stream``; the idempotence key is (worker_id, worker_epoch, sequence).
    With ``prior_probabilities`` (N,), sum 1, the carried state, and the windows, selection can be
    re-run exactly though the policy itself has long been replaced.

    Attributes:
        prior_probabilities: The stream's prior; a request without carried state starts from it.
        policy_table: The state that the request's policy started from, its rows (S, N) one after
            the other; in segment 0 only. Empty = it started afresh.
        policy_numbers: The rest of that state; empty if the table is.
        num_awake_rounds: int32 (N,): a drafter may fail once in a segment, and can be selected in
            so many of its rounds, from the first on. Empty = not recorded.
    """

    event_id: str
    worker_id: str
    worker_epoch: int
    sequence: int
    produced_at: datetime
    stream: str
    request_id: str
    segment_index: int
    is_final: bool
    finish_reason: FinishReason
    target_id: str
    target_fingerprint: str
    tokenizer_hash: str
    policy_name: str
    policy_version: int
    prior_probabilities: NDArray[np.float64]
    policy_table: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    policy_numbers: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    drafters: tuple[DrafterVersion, ...]
    sampling: SamplingRule
    num_speculative_tokens: int
    num_prompt_tokens: int
    first_position: int
    num_positions: int
    num_awake_rounds: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    rounds: Rounds
    windows: ScoredWindows
    content: Content | None = None

    def __post_init__(self) -> None:
        checks.member("finish_reason", self.finish_reason, FinishReason)
        checks.verification_event(self)

    @property
    def drafter_ids(self) -> tuple[str, ...]:
        """Ids in the order that indexes every per-drafter array."""
        return tuple(drafter.drafter_id for drafter in self.drafters)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Measured seconds per drafter, each shape (N,), and per verification.

    ``draft_seconds`` is per drafted token, ``score_seconds`` per scored window,
    ``verify_seconds`` per verification with 1..K+1 rows, shape (K + 1,). NaN = never measured.
    """

    draft_seconds: NDArray[np.float64]
    score_seconds: NDArray[np.float64]
    verify_seconds: NDArray[np.float64]

    def __post_init__(self) -> None:
        _protect_arrays(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Watermark:
    """Up to where events are contained in a published state.

    Attributes:
        partition_to_offset: Per partition, the first offset **not** contained.
        worker_to_sequence: Per ``"<worker_id>/<worker_epoch>"``, the highest contained sequence.
    """

    partition_to_offset: Mapping[int, int] = field(default_factory=dict)
    worker_to_sequence: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        state_checks.watermark(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyPublished:
    """The learner's whole state of one stream, on a compacted topic with key = stream.

    ``version`` counts the events learned in this stream, so it depends on the events alone.

    Attributes:
        log_weights: float64 (N,), the learner's log-weights over drafters.
        accumulators: Named float64 arrays, all that the learner needs to go on.
        selection_probabilities: float64 (N,), sums to 1.
        num_speculative_tokens: Per drafter, shape (N,), int16.
    """

    stream: str
    version: int
    parent_version: int
    produced_at: datetime
    learner_id: str
    policy_name: str
    drafters: tuple[DrafterVersion, ...]
    log_weights: NDArray[np.float64]
    accumulators: Mapping[str, NDArray[np.float64]]
    selection_probabilities: NDArray[np.float64]
    num_speculative_tokens: NDArray[np.int16]
    cost: CostModel
    watermark: Watermark

    def __post_init__(self) -> None:
        _protect_arrays(self)
        state_checks.policy_published(self)
        accumulators = {name: _read_only(values) for name, values in self.accumulators.items()}
        object.__setattr__(self, "accumulators", accumulators)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamComparison:
    """What ``GateEvidence`` says, of the requests of one stream, or of all streams not named.

    ``stream`` is empty for those that are not named, ``num_streams`` of them together. The interval
    is wider than that of all streams: the gate's error is shared among those that it judges. NaN
    below 2 requests.
    """

    stream: str
    num_streams: int
    num_requests: int
    num_windows: int
    new_acceptance_length: float
    old_acceptance_length: float
    difference_low: float
    difference_high: float

    def __post_init__(self) -> None:
        state_checks.stream_comparison(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class GateEvidence:
    """Acceptance length of the released and the previous version on the same windows.

    Lengths are mean acceptance lengths, bonus included, with an interval of the paired
    difference, as wide as the gate's look asks for; NaN where nothing was compared (a first
    version). ``streams`` says the same of single streams, those where the version is surely worse
    first, then those with the most windows, and last the rest together.
    """

    num_windows: int
    new_acceptance_length: float
    old_acceptance_length: float
    difference_low: float
    difference_high: float
    streams: tuple[StreamComparison, ...] = ()

    def __post_init__(self) -> None:
        state_checks.gate_evidence(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterReleased:
    """A version of a drafter's weights changed its state; compacted topic, key = drafter id.

    ``artifact_uri`` names the folder of the version; ``manifest_sha256`` proves its manifest.
    ``training_window`` names the events that trained it. ``parent_version`` is -1 for the first.
    """

    drafter_id: str
    version: int
    parent_version: int
    state: ReleaseState
    produced_at: datetime
    artifact_uri: str
    manifest_sha256: str
    architecture: str
    target_fingerprint: str
    tokenizer_hash: str
    draft_vocabulary_hash: str
    training_window: Watermark
    evidence: GateEvidence | None
    reason: str

    def __post_init__(self) -> None:
        checks.member("state", self.state, ReleaseState)
        state_checks.drafter_released(self)


def _protect_arrays(
    message: Rounds | ScoredWindows | Content | CostModel | PolicyPublished,
) -> None:
    """Replace every array field by a read-only view: what was checked once stays as it was."""
    for name in message.__dataclass_fields__:
        values = getattr(message, name)
        if isinstance(values, np.ndarray) and values.flags.writeable:
            object.__setattr__(message, name, _read_only(values))


def _read_only(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a view that cannot be written, and leave the caller's array as it is."""
    view = values.view()
    view.flags.writeable = False
    return view
