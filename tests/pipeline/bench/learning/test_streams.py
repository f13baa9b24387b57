"""Streams of the learning benchmark, and when feedback arrives."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from pipeline.bench.learning.streams import (
    AWAY,
    ELSEWHERE,
    HOME,
    STREAMS,
    Arrivals,
    Stream,
    arrivals,
    stream,
)

SIZES = {HOME: 100, AWAY: 60, ELSEWHERE: 30}


def made(name: str, seed: int = 0, num_requests: int = 80) -> Stream:
    return stream(name, num_requests, SIZES, np.random.default_rng(seed))


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_has_its_length_and_no_request_twice(name: str) -> None:
    found = made(name)
    places = list(zip(found.domains, found.indices, strict=True))
    assert len(places) == len(set(places)) == len(found.visits) == 80
    assert all(0 <= index < SIZES[domain] for domain, index in places)


def test_a_seed_makes_one_stream_and_another_seed_another_order() -> None:
    assert made("abrupt").indices == made("abrupt").indices
    assert made("abrupt").indices != made("abrupt", seed=1).indices


def test_the_abrupt_stream_switches_once_in_its_middle() -> None:
    found = made("abrupt")
    assert found.domains == (HOME,) * 40 + (AWAY,) * 40
    assert found.switch == 40


def test_the_recurring_stream_comes_back_to_a_in_its_third_visit() -> None:
    found = made("recurring")
    order = [found.domains[found.visits.index(visit)] for visit in range(4)]
    assert order == [HOME, AWAY, HOME, ELSEWHERE]
    assert Counter(found.visits) == {0: 20, 1: 20, 2: 20, 3: 20}


def test_the_gradual_stream_goes_over_bit_by_bit() -> None:
    found = made("gradual", num_requests=80)
    away = [domain == AWAY for domain in found.domains]
    thirds = [sum(away[i : i + 26]) for i in (0, 26, 52)]
    assert thirds[0] < thirds[1] < thirds[2]


def test_the_stationary_stream_never_switches() -> None:
    found = made("stationary")
    assert set(found.domains) == {HOME}
    assert found.switch == 80


@pytest.mark.parametrize("name", STREAMS)
def test_only_the_poison_stream_is_poisoned_in_one_burst_of_a_tenth(name: str) -> None:
    poisoned = np.flatnonzero(made(name).is_poisoned)
    if name == "poison":
        assert len(poisoned) == 8
        assert poisoned[-1] - poisoned[0] == 7
    else:
        assert not len(poisoned)


def test_invalid_streams_are_refused_with_what_is_known() -> None:
    with pytest.raises(ValueError, match="unknown stream 'sudden', expected one of: stationary"):
        made("sudden")
    with pytest.raises(ValueError, match="stationary: 200 requests of maths, there are 100"):
        made("stationary", num_requests=200)


def first_deliveries(found: Arrivals) -> list[int]:
    return list(dict.fromkeys(index for due in found.due for index in due))


@pytest.mark.parametrize("delay", [0, 1, 4, 16])
def test_a_delay_of_d_updates_leaves_d_of_them_out(delay: int) -> None:
    found = arrivals(f"delay:{delay}", [10] * 30, np.random.default_rng(0))
    known: list[int] = []
    for request, due in enumerate(found.due[:-1]):
        known += due
        assert known == list(range(max(request - delay, 0)))
    assert known + list(found.due[-1]) == list(range(30))


@pytest.mark.parametrize("number", [1, 2, 4])
def test_workers_share_the_requests_and_every_event_arrives_once(number: int) -> None:
    sizes = np.random.default_rng(1).integers(5, 50, 60).tolist()
    found = arrivals(f"workers:{number}", sizes, np.random.default_rng(2))
    assert set(found.workers) == set(range(number))
    assert sorted(index for due in found.due for index in due) == list(range(60))
    in_flight = [request - sum(map(len, found.due[: request + 1])) for request in range(60)]
    assert max(in_flight) <= number - 1
    assert_workers_keep_their_order(found)


def test_duplicates_arrive_late_out_of_order_and_some_of_them_twice() -> None:
    sizes = np.random.default_rng(1).integers(5, 50, 60).tolist()
    found = arrivals("duplicates", sizes, np.random.default_rng(3))
    counts = Counter(index for due in found.due for index in due)
    assert set(counts) == set(range(60))
    assert set(counts.values()) == {1, 2}
    order = first_deliveries(found)
    assert order != sorted(order)
    assert_workers_keep_their_order(found)


def assert_workers_keep_their_order(found: Arrivals) -> None:
    for worker in set(found.workers):
        own = [index for index in first_deliveries(found) if found.workers[index] == worker]
        assert own == sorted(own)


def test_invalid_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown order 'soon'"):
        arrivals("soon", [1], np.random.default_rng(0))
