"""Whether an event is accepted at a glance or rule by rule, the verdict is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schemas import checks
from schemas.errors import ContractError
from schemas.events import FinishReason, VerificationEvent
from schemas.quick_checks import are_good_rounds, are_good_windows
from tests.schemas.builders import make_event

EDGES: dict[str, list[Any]] = {
    "int16": [-(2**15), -2, -1, 0, 1, 2, 3, 4, 5, 2**15 - 1],
    "int32": [-(2**31), -1, 0, 1, 4, 5, 6, 7, 100, 2**31 - 1],
    "float16": [-1.0, -0.0, 0.0, 1.0, 1.001, np.inf, -np.inf, np.nan],
    "float32": [-1.0, -0.0, 0.0, 1e-45, 0.5, 1.0, np.nextafter(np.float32(1), 2), np.inf, np.nan],
}


def some_event(seed: int) -> VerificationEvent:
    reason = FinishReason.STOP if seed % 2 else FinishReason.UNFINISHED
    return make_event(
        seed=seed, finish_reason=reason, is_final=bool(seed % 2), num_windows=5, num_drafters=3
    )


def spoiled(event: VerificationEvent, rng: np.random.Generator) -> dict[str, Any]:
    """Return a part of the event with one element, type or shape changed."""
    part = str(rng.choice(["rounds", "windows"]))
    arrays = getattr(event, part)
    name = str(rng.choice(list(arrays.__dataclass_fields__)))
    values = getattr(arrays, name).copy()
    kind = rng.integers(8)
    if kind == 0:
        values = values[:-1]
    elif kind == 1:
        values = values.astype(np.float64)
    elif kind == 2:
        values = values[None]
    elif values.size:
        place = tuple(int(rng.integers(size)) for size in values.shape)
        values[place] = rng.choice(EDGES[values.dtype.name])
    return {part: replace(arrays, **{name: values})}


def verdict(event: VerificationEvent, changes: dict[str, Any]) -> str:
    try:
        replace(event, **changes)
    except ContractError as error:
        return str(error)
    return "good"


def test_spoiled_events_are_refused_with_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    cases = [
        (event, spoiled(event, rng)) for event in map(some_event, range(20)) for _ in range(60)
    ]
    quick = [verdict(*case) for case in cases]
    monkeypatch.setattr(checks, "are_good_rounds", lambda _: False)
    monkeypatch.setattr(checks, "are_good_windows", lambda _: False)
    assert quick == [verdict(*case) for case in cases]
    assert 0 < quick.count("good") < len(quick) / 2


def test_an_ordinary_event_is_accepted_at_a_glance() -> None:
    event = some_event(0)
    assert are_good_rounds(event)
    assert are_good_windows(event)


@pytest.mark.parametrize("wrong", [None, [1, 2], "text"])
def test_invalid_what_is_no_array_is_left_to_the_rules(wrong: Any) -> None:
    event = some_event(0)
    for part, name in (("rounds", "first_position"), ("windows", "start")):
        arrays = replace(getattr(event, part), **{name: wrong})
        with pytest.raises(ContractError, match=rf"{part}\.{name}"):
            replace(event, **{part: arrays})
