"""The services of a stack: one declaration that ``draftloop up`` and the compose file both follow.

They stop in the order in which they stand here: who produces first, who consumes after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from pipeline.configuration.settings import Settings
from pipeline.operations.loops import Loops
from pipeline.operations.service_page import ServicePage, answering


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """One service.

    Attributes:
        name: As ``up``, its log and the compose file call it.
        arguments: Of ``draftloop``.
        environment: Settings that this service alone has, by variable.
    """

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def health_check(self) -> tuple[str, ...]:
        """Arguments of ``draftloop`` that tell whether it does its work."""
        return ("health", self.name)


WORKER = Service(name="worker", arguments=("serve",))
LEARNER = Service(name="learner", arguments=("learner",))
TRAINER = Service(
    name="trainer",
    arguments=("learner",),
    environment={"DRAFTLOOP_LEARNER__LEARNER_ID": "trainer-0"},
)
"""A learner that may train; over a broker the others leave that to it."""

ARCHIVER = Service(name="archiver", arguments=("archiver",))

SCHEDULER = Service(name="scheduler", arguments=("scheduler",))
"""Only where something has a schedule."""

SERVICES = (WORKER, SCHEDULER, LEARNER, TRAINER, ARCHIVER)

SELECTION_ONLY = {"DRAFTLOOP_LEARNER__STEPS_PER_EVENT": "0"}
"""What makes a learner beside a trainer learn selection alone."""


def services(settings: Settings) -> tuple[Service, ...]:
    """Return the services that a stack with these settings has, in the order of stopping."""
    has_trainer = settings.event_log.url.startswith("kafka://") and bool(
        settings.learner.steps_per_event
    )
    schedule = settings.schedule
    absent = set()
    if not (schedule.refresh or schedule.compact or schedule.report):
        absent.add(SCHEDULER.name)
    if not has_trainer:
        absent.add(TRAINER.name)
    return tuple(
        replace(one, environment=SELECTION_ONLY) if one is LEARNER and has_trainer else one
        for one in SERVICES
        if one.name not in absent
    )


def health_url(name: str, settings: Settings) -> str:
    """Return the page that tells whether a service does its work.

    Raises:
        KeyError: If there is no such service, or it answers on no port.
    """
    port = {
        WORKER.name: settings.server.port,
        LEARNER.name: settings.metrics.learner_port,
        TRAINER.name: settings.metrics.learner_port,
        ARCHIVER.name: settings.metrics.archiver_port,
        SCHEDULER.name: settings.metrics.scheduler_port,
    }[name]
    if not port:
        raise KeyError(f"{name}: metrics.{name}_port is not set, so there is nothing to ask")
    return f"http://127.0.0.1:{port}/{'readyz' if name == WORKER.name else 'healthz'}"


@contextmanager
def open_page(settings: Settings, name: str) -> Iterator[ServicePage]:
    """Show the page of a service for the length of the block, if its port is set.

    Raises:
        SettingsError: If the port cannot be listened on.
    """
    one = settings.metrics
    page = ServicePage(Loops(one.most_still_seconds))
    setting = f"{name}_port"
    with answering(page, one.host, getattr(one, setting), f"metrics.{setting}"):
        yield page
