"""The Bayes filter is the limit: exact on a small case, and above what learns."""

from __future__ import annotations

import numpy as np

from learner.selection import DEFAULT_POLICY, parse_policy
from pipeline.bench.bayes_filter import BayesFilter
from pipeline.bench.streams import play, play_choices, selection_stream
from pipeline.bench.synthetic import SyntheticPool, hit_rate, synthetic_pool, synthetic_requests


def test_the_posterior_is_that_of_bayes_rule() -> None:
    rates = np.array([[0.9, 0.3], [0.2, 0.8]])
    told = BayesFilter.of(SyntheticPool(rates, rates), 0.1, knows_difficulty=False)
    belief = told._after(np.array([[0.5], [0.5]]), np.array([True, False]))
    likelihood = np.array([0.9 * 0.7, 0.2 * 0.2])
    posterior = likelihood / likelihood.sum()
    np.testing.assert_allclose(belief[:, 0], 0.9 * posterior + 0.1 * 0.5, atol=1e-12)


def test_it_chooses_the_drafter_of_the_domain_that_it_sees() -> None:
    lengths = np.array([[8.0, 3.0], [3.0, 8.0]])
    pool = SyntheticPool(np.vectorize(hit_rate)(lengths), lengths)
    hits = np.zeros((60, 2), dtype=np.bool_)
    hits[:30, 0] = hits[30:, 1] = True
    told = BayesFilter.of(pool, 1 / 60, knows_difficulty=True)
    (choices,) = told.choices([hits])
    assert set(choices[3:30]) == {0}
    assert set(choices[36:]) == {1}


def test_what_is_told_everything_beats_what_learns() -> None:
    rng = np.random.default_rng(3)
    pool = synthetic_pool(8, rng)
    requests = list(synthetic_requests(pool, rng, num_requests=12, num_tokens=300, shift="inside"))
    stream = selection_stream(
        [str(i) for i in range(8)], [r.trace for r in requests], [r.domain for r in requests], rng
    )
    hits = [r.trace.realised_acceptance[:, 0] > 0 for r in requests]
    learned = play(stream, parse_policy(DEFAULT_POLICY)).mean_acceptance_length
    found = [
        play_choices(
            stream, BayesFilter.of(pool, 2 / 300, knows_difficulty=knows).choices(hits)
        ).mean_acceptance_length
        for knows in (False, True)
    ]
    assert found[1] > found[0] > learned
