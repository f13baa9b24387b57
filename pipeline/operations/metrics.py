"""Prometheus metrics of a worker: sums over its events, named after vLLM's spec-decode counters.

Everything that is averaged is a counter of the sum and one of the count, so that the metrics of
several processes merge by addition. The only label with many values is ``drafter``, and those are
the drafters of the settings. Versions are values, never labels.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from learner.measures import expected_acceptance_length
from schemas.events import NO_DRAFTER, FinishReason, VerificationEvent

PREFIX = "draftloop_"
OTHER = "other"
"""Label of a drafter that the settings do not name."""

DURATION_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)

Values = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What is read from elsewhere when Prometheus asks.

    Attributes:
        counters, gauges: Name without prefix, help text, and a function that returns the value.
        drafter_gauges, drafter_counters: The same, with one value per drafter id.
        kind_counters: The same, with one value per kind, of which there are few.
    """

    counters: Sequence[tuple[str, str, Callable[[], float]]] = ()
    gauges: Sequence[tuple[str, str, Callable[[], float]]] = ()
    drafter_gauges: Sequence[tuple[str, str, Callable[[], Values]]] = ()
    drafter_counters: Sequence[tuple[str, str, Callable[[], Values]]] = ()
    kind_counters: Sequence[tuple[str, str, Callable[[], Values]]] = ()


class WorkerMetrics(Collector):
    """Adds up a worker's events.

    Args:
        drafter_ids: Of the settings; others share one label.
        num_speculative_tokens: K, the number of positions.
        reading: What else there is to read.
    """

    def __init__(
        self, drafter_ids: Sequence[str], num_speculative_tokens: int, reading: Reading
    ) -> None:
        self._labels = (*drafter_ids, OTHER)
        self._reading = reading
        self._lock = threading.Lock()
        size = len(self._labels)
        self._num_rounds = np.zeros(size)
        self._num_drafts = np.zeros(size)
        self._num_drafted = np.zeros(size)
        self._num_accepted = np.zeros(size)
        self._accepted_per_position = np.zeros((size, num_speculative_tokens))
        self._probability_sum = np.zeros(size)
        self._length_sum = np.zeros(size)
        self._played_length_sum = 0.0
        self._num_compared: float = 0
        self._phase_seconds = dict.fromkeys(("draft", "verify", "score"), 0.0)
        self._num_tokens = 0
        self._finished: Counter[str] = Counter()
        self._durations: list[float] = [0.0] * (len(DURATION_BOUNDS) + 1)
        self._duration_sum = 0.0
        self._versions: dict[str, float] = {}
        self._prior: dict[str, float] = {}
        self._policy_version = 0

    def observe(self, event: VerificationEvent) -> None:
        """Add one event; called where events are emitted."""
        places = self._places(event)
        with self._lock:
            self._add_rounds(event, places)
            self._add_windows(event, places)
            self._policy_version = event.policy_version
            for place, drafter in zip(places, event.drafters, strict=True):
                self._versions[self._labels[place]] = drafter.weights_version
            for place, share in zip(places, event.prior_probabilities.tolist(), strict=True):
                self._prior[self._labels[place]] = share

    def finished(self, reason: FinishReason, seconds: float) -> None:
        """Add one request that has ended after so many seconds."""
        # A sum that has met NaN once is NaN for ever.
        seconds = max(seconds, 0.0) if math.isfinite(seconds) else 0.0
        with self._lock:
            self._finished[reason.value] += 1
            self._durations[int(np.searchsorted(DURATION_BOUNDS, seconds))] += 1
            self._duration_sum += seconds

    @property
    def phase_seconds(self) -> float:
        """Seconds of all rounds: drafting, verifying and scoring."""
        with self._lock:
            return sum(self._phase_seconds.values())

    def collect(self) -> Iterable[Metric]:
        """Yield what Prometheus reads."""
        with self._lock:
            yield from self._of_drafters()
            yield from self._of_the_worker()
        yield from _read(self._reading)

    def describe(self) -> Iterable[Metric]:
        """Yield nothing: the names need no value to be known."""
        return ()

    def render(self) -> tuple[bytes, str]:
        """Return the page and its content type."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def _places(self, event: VerificationEvent) -> list[int]:
        known = {label: place for place, label in enumerate(self._labels)}
        last = len(self._labels) - 1
        return [known.get(drafter.drafter_id, last) for drafter in event.drafters]

    def _add_rounds(self, event: VerificationEvent, places: Sequence[int]) -> None:
        rounds = event.rounds
        self._num_tokens += int(rounds.num_emitted_tokens.sum())
        for phase in ("draft", "verify", "score"):
            self._phase_seconds[phase] += float(getattr(rounds, f"{phase}_seconds").sum())
        has_drafter = rounds.drafter_index != NO_DRAFTER
        if not has_drafter.any():
            return
        place = np.array(places)[rounds.drafter_index[has_drafter]]
        drafted = rounds.num_draft_tokens[has_drafter]
        accepted = rounds.num_accepted_tokens[has_drafter]
        np.add.at(self._num_rounds, place, 1)
        np.add.at(self._num_drafts, place, drafted > 0)
        np.add.at(self._num_drafted, place, drafted)
        np.add.at(self._num_accepted, place, accepted)
        np.add.at(self._probability_sum, place, rounds.selection_probability[has_drafter])
        for position in range(self._accepted_per_position.shape[1]):
            np.add.at(self._accepted_per_position[:, position], place, accepted > position)

    def _add_windows(self, event: VerificationEvent, places: Sequence[int]) -> None:
        """Add what every drafter would have had at the rounds that were played and scored."""
        rounds, windows = event.rounds, event.windows
        played = rounds.drafter_index != NO_DRAFTER
        _, chosen, at = np.intersect1d(
            rounds.first_position[played], windows.start, return_indices=True
        )
        if not len(chosen):
            return
        lengths = expected_acceptance_length(
            windows.acceptance_probability[at],
            windows.realised_acceptance[at],
            num_levels=windows.num_levels[at],
        )
        # One that was not scored gave what no drafter gives: one token.
        lengths = np.where(np.isnan(lengths), 1.0, lengths)
        np.add.at(self._length_sum, places, lengths.sum(axis=0))
        index = rounds.drafter_index[played][chosen]
        self._played_length_sum += float(lengths[np.arange(len(chosen)), index].sum())
        self._num_compared += len(chosen)

    def _of_drafters(self) -> Iterable[Metric]:
        for name, text, values in (
            ("spec_decode_num_drafts", "Drafts of at least one token.", self._num_drafts),
            ("spec_decode_num_draft_tokens", "Drafted tokens.", self._num_drafted),
            ("spec_decode_num_accepted_tokens", "Accepted, without bonus.", self._num_accepted),
            ("selected_rounds", "Rounds that selected the drafter.", self._num_rounds),
            (
                "selection_probability_sum",
                "Sum over its rounds of the probability that it was selected with.",
                self._probability_sum,
            ),
            (
                "counterfactual_acceptance_length_sum",
                "Expected acceptance length, summed over the compared rounds.",
                self._length_sum,
            ),
        ):
            yield _counter(name, text, dict(zip(self._labels, values.tolist(), strict=True)))
        per_position = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens per position of the draft, from 0.",
            labels=("drafter", "position"),
        )
        for label, row in zip(self._labels, self._accepted_per_position.tolist(), strict=True):
            for position, count in enumerate(row):
                per_position.add_metric((label, str(position)), count)
        yield per_position
        yield _gauge("drafter_version", "Weights version of the newest event.", self._versions)
        yield _gauge(
            "prior_selection_probability", "Prior that the newest event started from.", self._prior
        )

    def _of_the_worker(self) -> Iterable[Metric]:
        yield _counter("compared_rounds", "Rounds with every drafter scored.", self._num_compared)
        yield _counter(
            "played_acceptance_length_sum",
            "Expected acceptance length of what was played, over the compared rounds.",
            self._played_length_sum,
        )
        best = float(self._length_sum.max()) - self._played_length_sum if self._num_compared else 0
        yield _gauge(
            "regret_to_best_fixed_tokens",
            "Tokens that the best fixed drafter would have had more, over the compared rounds.",
            best,
        )
        yield _counter("generation_tokens", "Emitted tokens.", self._num_tokens)
        phases = CounterMetricFamily(
            PREFIX + "phase_seconds", "Seconds of all rounds, by phase.", labels=("phase",)
        )
        for phase, seconds in sorted(self._phase_seconds.items()):
            phases.add_metric((phase,), seconds)
        yield phases
        ended = CounterMetricFamily(
            PREFIX + "requests_finished", "Requests by how they ended.", labels=("finish_reason",)
        )
        for reason, count in sorted(self._finished.items()):
            ended.add_metric((reason,), count)
        yield ended
        yield _gauge("policy_version", "Policy version of the newest event.", self._policy_version)
        buckets = np.cumsum(self._durations).tolist()
        names = [str(bound) for bound in DURATION_BOUNDS] + ["+Inf"]
        yield HistogramMetricFamily(
            PREFIX + "request_duration_seconds",
            "Seconds from the first round to the last.",
            buckets=list(zip(names, buckets, strict=True)),
            sum_value=self._duration_sum,
        )


def _read(reading: Reading) -> Iterable[Metric]:
    for name, text, value in reading.counters:
        yield _counter(name, text, value())
    for name, text, value in reading.gauges:
        yield _gauge(name, text, value())
    for name, text, values in reading.drafter_counters:
        yield _counter(name, text, values())
    for name, text, values in reading.drafter_gauges:
        yield _gauge(name, text, values())
    for name, text, values in reading.kind_counters:
        yield _counter(name, text, values(), label="kind")


def _counter(name: str, text: str, value: float | Values, *, label: str = "drafter") -> Metric:
    if isinstance(value, Mapping):
        family = CounterMetricFamily(PREFIX + name, text, labels=(label,))
        for labelled, one in value.items():
            family.add_metric((labelled,), one)
        return family
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _gauge(name: str, text: str, value: float | Values) -> Metric:
    if isinstance(value, Mapping):
        family = GaugeMetricFamily(PREFIX + name, text, labels=("drafter",))
        for drafter, one in value.items():
            family.add_metric((drafter,), one)
        return family
    return GaugeMetricFamily(PREFIX + name, text, value=value)
