"""Synthetic traffic for the selection benchmark: specialists, a generalist, and text that shifts.

Every drafter accepts the target's next token with a rate that depends on the domain of the text.
Rates are given as mean acceptance lengths, as papers report them: a generalist of 5.2 to 6.2
everywhere, specialists of 7 to 8.5 in their own domain and 2 to 4 elsewhere, and further
specialists that are slightly worse copies. Hits are a probit: a difficulty shared by all
drafters, which persists from token to token, and private noise. The target is greedy, so a hit
is acceptance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtri

from learner.walk import WindowTrace

NUM_SPECULATIVE_TOKENS = 10
MAX_DOMAINS = 7
SHARED_VARIANCE = 0.4
"""Share of a hit's variance that is the difficulty of the token, common to all drafters."""

PERSISTENCE = 0.7
"""Correlation of the difficulty from one token to the next."""

STAY = 0.5
"""Chance that a request has the domain of the one before."""

Shift = Literal["none", "inside"]


@dataclass(frozen=True, slots=True)
class SyntheticRequest:
    """One request: its windows and the truth behind them.

    Attributes:
        trace: Its windows.
        domain: Domain of every position, (P,).
    """

    trace: WindowTrace
    domain: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SyntheticPool:
    """The drafters of one simulation.

    Attributes:
        rates: Chance of a hit per domain and drafter, (D, N); drafter 0 is the generalist.
        lengths: The mean acceptance lengths that the rates stand for, (D, N).
    """

    rates: NDArray[np.float64]
    lengths: NDArray[np.float64]

    @property
    def best_of_domain(self) -> NDArray[np.int64]:
        """The best drafter of each domain, (D,)."""
        return np.asarray(self.rates.argmax(axis=1))


def hit_rate(length: float, num_speculative_tokens: int = NUM_SPECULATIVE_TOKENS) -> float:
    """Return the rate a with (1 - a^(K+1)) / (1 - a) = ``length``, in (0, 1).

    Raises:
        ValueError: If no rate gives that length.
    """
    if not 1.0 < length < num_speculative_tokens + 1:
        raise ValueError(f"length={length} outside (1, {num_speculative_tokens + 1})")
    levels = np.arange(num_speculative_tokens + 1)
    return float(brentq(lambda rate: float((rate**levels).sum()) - length, 0.0, 1.0))


def synthetic_pool(num_drafters: int, generator: np.random.Generator) -> SyntheticPool:
    """Draw a generalist and N - 1 specialists over min(7, N - 1) domains.

    From equal generators a pool of 32 begins with the pool of 8.

    Raises:
        ValueError: If there are fewer than two drafters.
    """
    if num_drafters < 2:
        raise ValueError(f"num_drafters={num_drafters}, expected at least 2")
    num_domains = min(MAX_DOMAINS, num_drafters - 1)
    lengths = np.empty((num_domains, num_drafters))
    lengths[:, 0] = generator.uniform(5.2, 6.2, num_domains)
    for drafter in range(1, num_drafters):
        home = (drafter - 1) % num_domains
        lengths[:, drafter] = generator.uniform(2.0, 4.0, num_domains)
        if drafter <= num_domains:
            lengths[home, drafter] = generator.uniform(7.0, 8.5)
        else:
            lengths[home, drafter] = lengths[home, home + 1] - generator.uniform(0.2, 0.8)
    rates = np.vectorize(hit_rate)(lengths)
    return SyntheticPool(rates, lengths)


def synthetic_requests(
    pool: SyntheticPool,
    generator: np.random.Generator,
    *,
    num_requests: int,
    num_tokens: int,
    shift: Shift,
) -> Iterator[SyntheticRequest]:
    """Yield requests whose domain persists, or which go A, B, A inside.

    From equal generators a larger pool, over as many domains, sees the same text and its first
    drafters have the same hits.

    Args:
        pool: The drafters.
        generator: The dice.
        num_requests: How many.
        num_tokens: Tokens per request.
        shift: ``none``: one domain per request; ``inside``: three parts of two domains.
    """
    num_domains = len(pool.rates)
    domain = int(generator.integers(num_domains))
    for _ in range(num_requests):
        if generator.random() >= STAY:
            domain = int(generator.integers(num_domains))
        domains = np.full(num_tokens, domain, dtype=np.int64)
        if shift == "inside" and num_domains > 1:
            other = (domain + int(generator.integers(1, num_domains))) % num_domains
            domains[num_tokens // 3 : 2 * num_tokens // 3] = other
        yield SyntheticRequest(trace_of_domains(pool, domains, generator), domains)


def trace_of_domains(
    pool: SyntheticPool, domains: NDArray[np.int64], generator: np.random.Generator
) -> WindowTrace:
    """Draw a text whose positions have these domains, (P,), and return its windows."""
    return trace_of_hits(_hits(pool, domains, generator))


def _hits(
    pool: SyntheticPool, domains: NDArray[np.int64], generator: np.random.Generator
) -> NDArray[np.bool_]:
    """Return who predicts which token, (P, N)."""
    of_text, of_drafters = generator.spawn(2)
    innovation = of_text.standard_normal(len(domains))
    innovation[1:] *= np.sqrt(1.0 - PERSISTENCE**2)
    difficulty = np.empty_like(innovation)
    last = 0.0
    for position, step in enumerate(innovation):
        last = difficulty[position] = PERSISTENCE * last + step
    private = of_drafters.standard_normal((pool.rates.shape[1], len(domains))).T
    mixed = np.sqrt(SHARED_VARIANCE) * difficulty[:, None]
    mixed = mixed + np.sqrt(1.0 - SHARED_VARIANCE) * private
    return np.asarray(mixed < ndtri(pool.rates)[domains])


def trace_of_hits(
    hits: NDArray[np.bool_], num_speculative_tokens: int = NUM_SPECULATIVE_TOKENS
) -> WindowTrace:
    """Return the windows of drafters that read tokens only.

    Level k of the window that starts at t is then the hit at t + k - 1.

    Args:
        hits: Who predicts which token, (P, N).
        num_speculative_tokens: K.
    """
    num_positions = len(hits)
    padded = np.full(
        (num_positions + num_speculative_tokens - 1, hits.shape[1]), np.nan, np.float16
    )
    padded[:num_positions] = hits
    levels = sliding_window_view(padded, num_speculative_tokens, axis=0).transpose(0, 2, 1)
    left = num_positions - np.arange(num_positions)
    return WindowTrace(
        num_positions=num_positions,
        starts=np.arange(num_positions, dtype=np.int64),
        num_levels=np.minimum(left, num_speculative_tokens).astype(np.int16),
        is_whole=left >= num_speculative_tokens,
        acceptance_probability=levels,
        realised_acceptance=levels,
        is_idle=np.zeros(num_positions, dtype=np.bool_),
    )
