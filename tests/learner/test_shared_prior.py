"""What streams know together: sums that add up, each at one level, shrunk level by level."""

from __future__ import annotations

import numpy as np
import pytest

from learner.prior import PriorSettings, StreamPrior
from learner.shared_prior import SharedPrior, domain_of

IDS = ("a", "b", "c")
SETTINGS = PriorSettings()


def evidence(excess: list[float], windows: float = 500.0) -> StreamPrior:
    """Return evidence with these mean excess losses."""
    return StreamPrior(windows * np.array(excess), np.full(len(excess), windows))


CODE = evidence([-0.2, 0.1, 0.1])
MATHS = evidence([0.1, -0.2, 0.1])


def shared_of(**streams: StreamPrior) -> SharedPrior:
    """Return what these streams know; ``_`` in a name stands for ``.``."""
    shared = SharedPrior(SETTINGS)
    for name, known in streams.items():
        shared.update(name.replace("_", "."), IDS, known)
    return shared


@pytest.mark.parametrize(
    ("stream", "domain"),
    [("acme.code", "code"), ("code", "code"), ("a:b.c", "c"), ("acme/", "acme/")],
)
def test_the_domain_is_what_follows_the_last_separator(stream: str, domain: str) -> None:
    assert domain_of(stream) == domain


def test_nobody_knows_anything_at_first() -> None:
    np.testing.assert_allclose(SharedPrior().of("acme.code", IDS), 1 / 3)


def test_a_stream_alone_has_its_own_prior() -> None:
    found = shared_of(acme_code=CODE).of("acme.code", IDS)
    np.testing.assert_allclose(found, CODE.probabilities(SETTINGS))


def test_a_new_tenant_takes_its_domains_word_before_that_of_others() -> None:
    shared = shared_of(acme_code=CODE, acme_maths=MATHS, globex_maths=MATHS)
    assert shared.of("new.code", IDS).argmax() == 0
    assert shared.of("new.maths", IDS).argmax() == 1
    plain = shared_of(code=CODE).of("new.code", IDS)
    assert plain.argmax() == 0, "a plain name is its own domain"


def test_a_new_domain_takes_others_word_with_care() -> None:
    shared = shared_of(acme_code=CODE, globex_code=CODE)
    domain, elsewhere = shared.of("new.code", IDS), shared.of("new.poetry", IDS)
    assert 1 / 3 < elsewhere[0] < domain[0]
    careless = SharedPrior(PriorSettings(from_other_domains=1.0))
    careless.update("acme.code", IDS, CODE)
    assert careless.of("new.poetry", IDS)[0] > elsewhere[0]


def test_own_evidence_outgrows_that_of_the_domain() -> None:
    shared = shared_of(acme_code=CODE, globex_code=evidence([0.1, -0.2, 0.1], windows=4.0))
    assert shared.of("globex.code", IDS).argmax() == 0
    shared.update("globex.code", IDS, evidence([0.1, -0.2, 0.1], windows=400.0))
    assert shared.of("globex.code", IDS).argmax() == 1


def test_newer_evidence_of_a_stream_replaces_the_older() -> None:
    shared = shared_of(acme_code=MATHS)
    for windows in (3.0, 77.7, 0.1, 500.0):
        shared.update("acme.code", IDS, evidence([-0.2, 0.1, 0.1], windows=windows))
    expected = shared_of(acme_code=CODE)
    for stream in ("acme.code", "new.code", "new.poetry"):
        np.testing.assert_allclose(shared.of(stream, IDS), expected.of(stream, IDS), atol=1e-12)


def test_pools_may_differ_and_strangers_are_average() -> None:
    shared = SharedPrior()
    shared.update("acme.code", ("b", "a"), StreamPrior(np.array([50.0, -50.0]), np.full(2, 500.0)))
    found = shared.of("new.code", ("a", "new", "b"))
    assert found[0] > found[1] > found[2] > 0.0
    assert found.sum() == pytest.approx(1.0)
    shared.update("acme.code", (), StreamPrior.empty(0))
    np.testing.assert_allclose(shared.of("new.code", ("a", "new", "b")), 1 / 3, atol=1e-12)


def test_invalid_trust_in_other_domains() -> None:
    with pytest.raises(ValueError, match=r"from_other_domains=1\.5 outside \[0, 1\]"):
        PriorSettings(from_other_domains=1.5)
