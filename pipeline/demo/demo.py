"""The demo: a whole turn of the loop on a real model, watched live, proved by a report.

Worker, learner and archiver are the real services over the embedded event log; learner and
archiver are processes of their own. The traffic changes its domain once, and the heads, which
know nothing at first, follow it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console

from inference.model_files import resolve_target
from inference.sampling import SamplingParams
from inference.target import Target
from inference.worker import Completion, Request
from pipeline.configuration.gate_settings import GateSection
from pipeline.configuration.settings import (
    ArchiverSettings,
    ContentSettings,
    FeatureSettings,
    LearnerSettings,
    ModelSettings,
    Settings,
    SettingsError,
    WorkerSettings,
    service_environment,
)
from pipeline.demo.check import OutputCheck
from pipeline.demo.releases import ReleaseReport, Trials
from pipeline.demo.traffic import TrafficStatistics
from pipeline.demo.view import DemoView
from pipeline.json_files import write_json
from pipeline.messaging.boards import LogPolicyBoard, LogReleaseBoard
from pipeline.messaging.event_logs import open_log
from pipeline.prompts import OWN_PROMPTS, Prompt, PromptsError, read_prompts
from pipeline.releases.release_history import ReleaseHistory
from pipeline.replaying import ReplayRequest, replay_log
from pipeline.wiring import RunningWorker, open_target, start_worker
from schemas.errors import KnownError
from schemas.topics import DRAFTER_RELEASES, VERIFICATION_EVENTS


class DemoError(KnownError):
    """A service of the demo did not do its part; the message says where to look."""


STREAM = "demo"
PHASE_TOKENS = (3800, 2800)
"""Tokens of the first and the second domain; the heads reach their level within each."""

SAMPLED_CHECKS = 2
"""Outputs per phase compared with plain decoding unless all are asked for."""

START_SECONDS = 120.0
STOP_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """What the command line asks for.

    Attributes:
        data: Folder in which the run gets a folder of its own.
        prompts: Prompts file; None for the project's own.
        dtype: ``bfloat16`` or ``float32``.
        checks_all: Compare every output with plain decoding.
        max_tokens: Tokens per answer.
        phase_tokens: Tokens per phase, in the order of the domains; empty for the default.
        minutes: Longest time of serving, shared by the phases as their tokens are; 0 = no limit.
        json_file: Where to write the numbers.
        has_gate: New weights go live by candidate, shadow and canary, instead of at once.
    """

    data: Path
    prompts: Path | None
    dtype: str
    checks_all: bool
    max_tokens: int
    phase_tokens: tuple[int, ...]
    minutes: float
    json_file: Path | None
    has_gate: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One domain's share of the traffic."""

    domain: str
    prompts: tuple[Prompt, ...]
    num_tokens: int
    seconds: float


def run_demo(options: DemoOptions, console: Console) -> None:
    """Run the demo and print where its report lies."""
    began = time.monotonic()
    phases = demo_phases(
        read_prompts(options.prompts), options.phase_tokens or PHASE_TOKENS, options.minutes
    )
    folder = options.data / f"demo-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    settings = demo_settings(options, folder)
    with console.status("preparing the target (the first time it is converted: about 20 s)"):
        resolve_target(settings.model.path, settings.cache)
    statistics = TrafficStatistics()
    with DemoView(console, statistics) as view, _services(settings, view) as services:
        target = open_target(settings)
        check = OutputCheck(target)
        with (
            _worker(settings, target, services, statistics) as running,
            _trials(settings, view),
        ):
            for phase in phases:
                _serve_phase(phase, options, running, target, statistics, check, view)
        view.say("waiting for the learner and the archiver to finish")
        _wait_until_learned(settings)
    report = folder / "report.html"
    analysis = replay_log(folder, ReplayRequest(report=report), console=console)
    seconds = time.monotonic() - began
    releases = ReleaseReport(ReleaseHistory(str(folder)))
    result = {
        "seconds": seconds,
        "dtype": options.dtype,
        "report": str(report),
        "phases": statistics.results(),
        "outputs": check.results(),
        "has_gate": options.has_gate,
        "releases": releases.results(),
        "rerun_disagreements": analysis.summary.check.num_disagreements,
    }
    statistics.show(console)
    check.show(console)
    releases.show(console)
    console.print(f"{seconds:.0f} s in all. Open the report: {report}", soft_wrap=True)
    if options.json_file is not None:
        write_json(options.json_file, result)
    check.refuse_differences_in_float32(options.dtype)


def demo_phases(
    prompts: Sequence[Prompt], phase_tokens: Sequence[int], minutes: float
) -> list[Phase]:
    """Return one phase per domain, in the order of the file, as many as there are token counts."""
    domain_to_prompts: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domain_to_prompts.setdefault(prompt.domain, []).append(prompt)
    if phase_tokens != PHASE_TOKENS and len(phase_tokens) > len(domain_to_prompts):
        raise PromptsError(
            f"{len(phase_tokens)} --phase-tokens, but the prompts have "
            f"{len(domain_to_prompts)} domains: {', '.join(domain_to_prompts)}"
        )
    seconds = 60.0 * minutes or float("inf")
    return [
        Phase(
            domain=domain,
            prompts=tuple(members),
            num_tokens=num_tokens,
            seconds=seconds * num_tokens / sum(phase_tokens),
        )
        for (domain, members), num_tokens in zip(
            domain_to_prompts.items(), phase_tokens, strict=False
        )
    ]


def demo_settings(options: DemoOptions, folder: Path) -> Settings:
    """Return the settings of all services of one run."""
    try:
        model = ModelSettings.model_validate({"dtype": options.dtype})
    except ValidationError as error:
        raise SettingsError(f"--dtype {options.dtype}: expected bfloat16 or float32") from error
    return Settings(
        data=folder,
        model=model,
        worker=WorkerSettings(worker_id="demo-worker", poll_seconds=0.1),
        learner=LearnerSettings(
            learner_id="demo-learner",
            keep_versions=2,
            draft_vocabulary_text=options.prompts or OWN_PROMPTS,
        ),
        # The heads begin from nothing: there is nothing that a release could hurt, and a gate makes
        # them wait for evidence at every step.
        gate=GateSection(enabled=options.has_gate),
        archiver=ArchiverSettings(max_seconds_per_file=10.0),
        content=ContentSettings(consenting_streams=(STREAM,)),
        features=FeatureSettings(enabled=True),
    )


def _serve_phase(
    phase: Phase,
    options: DemoOptions,
    running: RunningWorker,
    target: Target,
    statistics: TrafficStatistics,
    check: OutputCheck,
    view: DemoView,
) -> None:
    """Serve one domain until its tokens or its time are used up, its prompts in turn."""
    statistics.begin_phase(phase.domain)
    deadline = time.monotonic() + phase.seconds
    view.say(f"serving {phase.domain}")
    params = SamplingParams(max_tokens=options.max_tokens)
    number = 0
    while statistics.phases[-1].num_tokens < phase.num_tokens and time.monotonic() < deadline:
        prompt = phase.prompts[number % len(phase.prompts)]
        request = Request(
            request_id=f"{phase.domain}-{number:04d}",
            stream=STREAM,
            prompt_token_ids=target.encode(prompt.text),
            params=params,
            has_consent=True,
        )
        completion: Completion = running.worker.serve(request)
        if options.checks_all or number < SAMPLED_CHECKS:
            check.compare(request.prompt_token_ids, params, completion.token_ids)
        view.update()
        number += 1


@contextmanager
def _services(settings: Settings, view: DemoView) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run learner and archiver; on the way out, let them finish what they have begun."""
    view.say("starting learner and archiver, loading the target")
    processes = [_start(name, settings) for name in ("learner", "archiver")]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(STOP_SECONDS)


@contextmanager
def _worker(
    settings: Settings,
    target: Target,
    services: Sequence[subprocess.Popen[bytes]],
    statistics: TrafficStatistics,
) -> Iterator[RunningWorker]:
    """Run the worker once the learner has released the untrained heads."""
    _wait_for_first_releases(settings, services[0])
    running = start_worker(settings, target, tap=statistics.add)
    try:
        yield running
    finally:
        running.close()


@contextmanager
def _trials(settings: Settings, view: DemoView) -> Iterator[None]:
    """Let the view show what is on trial while there is a gate."""
    if not settings.gate.enabled:
        yield
        return
    with closing(open_log(settings)) as log:
        view.trials = Trials(LogReleaseBoard(log, source="demo"))
        try:
            yield
        finally:
            view.trials = None


def _start(name: str, settings: Settings) -> subprocess.Popen[bytes]:
    settings.data.mkdir(parents=True, exist_ok=True)
    with (settings.data / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            # -P: modules of the user's working folder must not stand in for ours.
            [sys.executable, "-P", "-m", "pipeline.cli", name],
            env=service_environment(settings),
            stdout=log,
            stderr=log,
        )


def _wait_for_first_releases(settings: Settings, learner: subprocess.Popen[bytes]) -> None:
    heads = sum(drafter.is_trained for drafter in settings.drafters)
    log = open_log(settings)
    try:
        deadline = time.monotonic() + START_SECONDS
        while log.end_offset(DRAFTER_RELEASES, 0) < heads:
            if learner.poll() is not None or time.monotonic() > deadline:
                raise DemoError(f"the learner did not start: see {settings.data / 'learner.log'}")
            time.sleep(0.1)
    finally:
        log.close()


def _wait_until_learned(settings: Settings) -> None:
    log = open_log(settings)
    try:
        deadline = time.monotonic() + STOP_SECONDS
        board = LogPolicyBoard(log, source="demo")
        while time.monotonic() < deadline:
            learned = [
                policy.watermark.partition_to_offset.get(0, 0) for policy in board.read_all()
            ]
            if max(learned, default=0) >= log.end_offset(VERIFICATION_EVENTS, 0):
                return
            time.sleep(0.1)
    finally:
        log.close()
