"""Events of two versions of a drafter side by side, with as much acceptance as a test wants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from learner.trial import shadow_id
from schemas.events import AcceptanceRule, DrafterVersion, VerificationEvent
from tests.schemas.builders import make_event, make_windows

HEAD = "head"


def paired_event(
    request: int,
    *,
    own: int,
    beside: int | None,
    acceptance: dict[int, float],
    rng: np.random.Generator,
    num_windows: int = 24,
    num_speculative_tokens: int = 4,
    stream: str = "stream-a",
) -> VerificationEvent:
    """Return an event of one request with a version in the head's place and one beside it.

    Args:
        request: Number of the request.
        own: Version in the drafter's own place.
        beside: Version beside it; None = nothing is.
        acceptance: Version to the chance that each of its levels is accepted; NaN = no answer.
        rng: Draws the windows; the request is easier or harder for both alike.
        num_windows: W.
        num_speculative_tokens: K.
        stream: Of the request.
    """
    versions = [own] if beside is None else [own, beside]
    event = make_event(
        sequence=request,
        num_drafters=len(versions),
        num_windows=num_windows,
        num_speculative_tokens=num_speculative_tokens,
    )
    hardness = rng.normal(0.0, 0.05)
    common = rng.random((num_windows, num_speculative_tokens, 1))
    own_luck = rng.random((num_windows, num_speculative_tokens, len(versions)))
    luck = np.where(rng.random(own_luck.shape) < 0.5, common, own_luck)
    rates = np.array([acceptance[version] for version in versions]) + hardness
    accepted = np.where(np.isnan(rates), np.nan, luck < rates)
    windows = make_windows(
        rng,
        num_windows=num_windows,
        num_drafters=len(versions),
        num_speculative_tokens=num_speculative_tokens,
        first_position=int(event.windows.start[0]),
        rule=AcceptanceRule.GREEDY,
        acceptance_probability=accepted,
    )
    ids = [HEAD, shadow_id(HEAD)][: len(versions)]
    num_rounds = len(event.rounds.first_position)
    awake = [0 if np.isnan(acceptance[own]) else num_rounds, 0][: len(versions)]
    return replace(
        event,
        stream=stream,
        request_id=f"request-{request}",
        drafters=tuple(
            DrafterVersion(drafter_id=drafter_id, weights_version=version)
            for drafter_id, version in zip(ids, versions, strict=True)
        ),
        windows=windows,
        num_awake_rounds=np.array(awake, np.int32),
    )
