"""The worker's inbox: a background thread follows policies and releases and loads new weights.

Loading and checking an artifact takes longer than a round, so it happens here, off the serving
path. What cannot be loaded is logged and counted, and the version in force stays.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from inference.drafters.nothing import NothingDrafter
from inference.ports import Drafter
from inference.shadows import beside, nothing_beside
from inference.threads import compute_alone
from learner.spawning import family_of
from pipeline.eventlog.ports import EventLog, EventLogError
from pipeline.messaging.boards import PolicyFollower, ReleaseFollower
from pipeline.releases.registry import ArtifactError
from schemas.events import DrafterReleased, PolicyPublished, ReleaseState

logger = logging.getLogger(__name__)

LoadDrafter = Callable[[DrafterReleased], Drafter]
"""Loads and checks the weights of a release; raises ``ArtifactError`` if it cannot."""


class LogInbox:
    """Implements ``inference.worker.Inbox`` over the event log.

    Args:
        open_log: Opens the event log; called once, in the background thread.
        load: Turns a release into a drafter.
        drafter_ids: Drafters of the pool; releases of others than them and their experts are passed
            over.
        poll_seconds: Time between two looks, > 0.
        canary_share: Share of the requests that a canary serves, in [0, 1).

    Attributes:
        num_refused: Releases that could not be loaded.
        num_failed_looks: Looks at a log that could not be read.
        withdrawn: Per drafter, versions beside or in its own place that were taken back.
    """

    def __init__(
        self,
        open_log: Callable[[], EventLog],
        load: LoadDrafter,
        drafter_ids: Sequence[str],
        *,
        poll_seconds: float,
        canary_share: float = 0.0,
    ) -> None:
        self._open_log = open_log
        self._load = load
        self._drafter_ids = frozenset(drafter_ids)
        self._poll_seconds = poll_seconds
        self._canary_share = canary_share
        self._id_to_loaded: dict[str, tuple[tuple[int, str], Drafter]] = {}
        self._lock = threading.Lock()
        self._policies: dict[str, PolicyPublished] = {}
        self._drafters: dict[str, Drafter] = {}
        self._stop = threading.Event()
        self._has_looked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inbox", daemon=True)
        self._is_cut_off = False
        self._looked_seconds = time.monotonic()
        self.withdrawn: Counter[str] = Counter()
        self.num_refused = 0
        self.num_failed_looks = 0

    def start(self, wait_seconds: float = 30.0) -> None:
        """Begin to follow; returns after the first look, at the latest after ``wait_seconds``."""
        self._thread.start()
        self._has_looked.wait(wait_seconds)

    def close(self) -> None:
        """Stop following."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    @property
    def seconds_since_look(self) -> float:
        """Seconds since policies and releases could last be read."""
        return time.monotonic() - self._looked_seconds

    def take_policies(self) -> Sequence[PolicyPublished]:
        """Return the newest policy of every stream that has a new one."""
        with self._lock:
            taken, self._policies = list(self._policies.values()), {}
        return taken

    def take_drafters(self) -> Sequence[Drafter]:
        """Return drafters that have new weights, in their own place or beside it."""
        with self._lock:
            taken, self._drafters = list(self._drafters.values()), {}
        return taken

    def _run(self) -> None:
        compute_alone()  # loading weights must not slow the serving thread down ever after
        log: EventLog | None = None
        while not self._stop.is_set():
            try:
                if log is None:
                    log = self._open_log()
                    policies, releases = PolicyFollower(log), ReleaseFollower(log)
                self._look(policies, releases)
                self._looked_seconds = time.monotonic()
                self._is_cut_off = False
            except EventLogError as error:
                self._bear(error)
            self._has_looked.set()
            self._stop.wait(self._poll_seconds)
        if log is not None:
            log.close()

    def _bear(self, error: EventLogError) -> None:
        """Go on with what there is; the log may come back. One outage is one warning."""
        self.num_failed_looks += 1
        if not self._is_cut_off:
            logger.warning("the inbox cannot read the event log and will try again: %s", error)
        self._is_cut_off = True

    def _look(self, policies: PolicyFollower, releases: ReleaseFollower) -> None:
        for policy in policies.poll():
            with self._lock:
                self._policies[policy.stream] = policy
        for release in releases.poll():
            if not self._is_ours(release.drafter_id):
                continue
            if release.state is ReleaseState.LIVE:
                self._take(release, lambda drafter: drafter)
            elif release.state is ReleaseState.RETIRED:
                self._put(NothingDrafter(release.drafter_id))
        for release in releases.take_beside():
            if release.drafter_id in self._drafter_ids:
                self._take_beside(release)

    def _is_ours(self, drafter_id: str) -> bool:
        """Tell whether a drafter is of the pool, or an expert of one that is."""
        return drafter_id in self._drafter_ids or family_of(drafter_id) in self._drafter_ids

    def _take_beside(self, release: DrafterReleased) -> None:
        match release.state:
            case ReleaseState.SHADOW:
                self._take(release, beside)
            case ReleaseState.CANARY:
                self._take(release, partial(beside, canary_share=self._canary_share))
            case ReleaseState.CANDIDATE:
                return  # it is not on trial yet
            case _:
                self.withdrawn[release.drafter_id] += 1
                self._put(nothing_beside(release.drafter_id))

    def _take(self, release: DrafterReleased, placed: Callable[[Drafter], Drafter]) -> None:
        try:
            self._put(placed(self._loaded(release)))
        except (ArtifactError, OSError, ValueError) as error:
            self.num_refused += 1
            logger.error(
                "drafter %s version %d is not used: %s", release.drafter_id, release.version, error
            )

    def _loaded(self, release: DrafterReleased) -> Drafter:
        """Load and check a version, unless it is the one loaded last: it only changes its place."""
        mark = (release.version, release.manifest_sha256)
        known = self._id_to_loaded.get(release.drafter_id)
        if known is None or known[0] != mark:
            known = self._id_to_loaded[release.drafter_id] = (mark, self._load(release))
        return known[1]

    def _put(self, drafter: Drafter) -> None:
        with self._lock:
            self._drafters[drafter.version.drafter_id] = drafter
