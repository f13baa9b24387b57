"""The place beside a drafter: a second version of it, scored on every window but never awake.

Requests are dealt to a canary by a hash of their id, so that a request has the same version for
all of its life and on every worker. In a canary's requests the two versions change places: the
newer drafts, the live one is scored beside it, and the comparison goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from inference.drafters.nothing import NothingDrafter
from inference.ports import Drafter, DraftSession
from inference.trajectory import Trajectory
from learner.trial import SHADOW, shadow_id
from schemas.events import DrafterVersion


class Placed:
    """A drafter in another place than its own (``inference.ports.Drafter``).

    Args:
        drafter: Any, also one that is scored in groups.
        drafter_id: Id of the place.
        canary_share: Share of the requests in which it drafts in its drafter's place, in [0, 1).
    """

    def __init__(self, drafter: Drafter, drafter_id: str, *, canary_share: float = 0.0) -> None:
        self.drafter = drafter
        self.canary_share = canary_share
        self._drafter_id = drafter_id

    @property
    def version(self) -> DrafterVersion:
        """The drafter's, under the id of the place."""
        return replace(self.drafter.version, drafter_id=self._drafter_id)

    def start(self, trajectory: Trajectory, *, stream: str, draws_drafts: bool) -> DraftSession:
        """Begin a request."""
        return self.drafter.start(trajectory, stream=stream, draws_drafts=draws_drafts)

    def __getattr__(self, name: str) -> Any:
        """Be scored in groups where the drafter is."""
        if name in ("group_key", "predict_group"):
            return getattr(self.drafter, name)
        raise AttributeError(name)


def beside(drafter: Drafter, *, canary_share: float = 0.0) -> Placed:
    """Return a drafter for the place beside the one of its id."""
    return Placed(drafter, shadow_id(drafter.version.drafter_id), canary_share=canary_share)


def nothing_beside(drafter_id: str) -> Placed:
    """Return what empties the place beside a drafter."""
    return beside(NothingDrafter(drafter_id))


class Shadows:
    """The versions beside the drafters of a pool."""

    def __init__(self) -> None:
        self._id_to_beside: dict[str, Placed] = {}
        self._id_to_swapped: dict[str, tuple[Drafter, Drafter]] = {}

    def put(self, placed: Placed) -> None:
        """Put a version beside its drafter, or empty the place."""
        drafter_id = placed.version.drafter_id.removesuffix(SHADOW)
        self._id_to_swapped.pop(drafter_id, None)
        if isinstance(placed.drafter, NothingDrafter):
            self._id_to_beside.pop(drafter_id, None)
        else:
            self._id_to_beside[drafter_id] = placed

    def arranged(self, drafters: Sequence[Drafter], request_id: str | None) -> list[Drafter]:
        """Return the drafters of a request, those beside them last; None = of no request."""
        own, others = list(drafters), []
        for index, drafter in enumerate(drafters):
            placed = self._id_to_beside.get(drafter.version.drafter_id)
            if placed is None or _is_same(placed.drafter, drafter):
                continue
            pair: tuple[Drafter, Drafter] = (drafter, placed)
            if request_id is not None and is_dealt(placed, request_id):
                pair = self._swapped(drafter, placed)
            own[index] = pair[0]
            others.append(pair[1])
        return [*own, *others]

    def _swapped(self, drafter: Drafter, placed: Placed) -> tuple[Drafter, Drafter]:
        """Return the two in each other's place, the same objects as long as they are the same."""
        drafter_id = drafter.version.drafter_id
        known = self._id_to_swapped.get(drafter_id)
        if known is None or not isinstance(known[1], Placed) or known[1].drafter is not drafter:
            known = (placed.drafter, beside(drafter))
            self._id_to_swapped[drafter_id] = known
        return known


def _is_same(left: Drafter, right: Drafter) -> bool:
    return left.version.weights_version == right.version.weights_version


def is_dealt(placed: Placed, request_id: str) -> bool:
    """Tell whether a request is the canary's; another version deals anew."""
    version = placed.drafter.version
    text = f"{version.drafter_id}/{version.weights_version}/{request_id}"
    return int.from_bytes(sha256(text.encode()).digest()[:8]) < placed.canary_share * 2.0**64
