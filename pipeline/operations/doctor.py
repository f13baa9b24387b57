"""``draftloop doctor``: looks at everything a service needs, changes nothing, names each cure."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from pipeline.configuration.settings import Settings
from pipeline.serving import read_keys
from schemas.errors import KnownError

PACKAGES = ("torch", "transformers", "numpy", "pyarrow", "safetensors", "kafka-python", "fastapi")
LEAST_FREE_BYTES = 2 * 2**30
MOST_SKEW_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one look has found; ``text`` names the cure where ``is_good`` is False."""

    what: str
    is_good: bool
    text: str


class NotWellError(KnownError):
    """At least one look has found something wrong."""


def examine(settings: Settings) -> Iterator[Finding]:
    """Look at versions, keys, disk, log, topics, registry, clock and model, and yield each."""
    looks: tuple[tuple[str, Callable[[Settings], str]], ...] = (
        ("versions", _versions),
        ("keys", _keys),
        ("disk", _disk),
        ("event log", _event_log),
        ("topics", _topics),
        ("registry", _registry),
        ("clock", _clock),
        ("model", _model),
    )
    for what, look in looks:
        try:
            yield Finding(what=what, is_good=True, text=look(settings))
        except (KnownError, OSError, ValueError) as error:
            yield Finding(what=what, is_good=False, text=str(error).replace("\n", " "))


def _versions(_: Settings) -> str:
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError as error:
            raise NotWellError(f"{package} is not installed: install Draftloop again") from error
    return ", ".join(found)


def _keys(settings: Settings) -> str:
    one = settings.server
    clients = read_keys(one.api_keys_file, "server.api_keys_file")
    admins = read_keys(one.admin_keys_file, "server.admin_keys_file")
    if not len(clients) and one.host not in ("127.0.0.1", "::1", "localhost"):
        raise NotWellError(
            f"server.host = {one.host!r} without keys is open to all: set server.api_keys_file"
        )
    return f"{len(clients)} for clients, {len(admins)} for admin routes"


def _disk(settings: Settings) -> str:
    folder = settings.data
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE_BYTES:
        raise NotWellError(
            f"{folder}: {free / 2**30:.1f} GiB free, expected {LEAST_FREE_BYTES / 2**30:.0f}: "
            "make room, or set data"
        )
    return f"{free / 2**30:.0f} GiB free for {settings.data}"


def _event_log(settings: Settings) -> str:
    from pipeline.messaging.event_logs import bare_log

    began = time.perf_counter()
    with bare_log(settings):
        where = settings.event_log.url or str(settings.data)
        return f"{where.rsplit('@', 1)[-1]} answers in {time.perf_counter() - began:.2f} s"


def _topics(settings: Settings) -> str:
    from pipeline.messaging.event_logs import bare_log, check_schemas, topic_plan
    from pipeline.messaging.topics import check_topics

    with bare_log(settings) as log:
        differences = [*check_topics(log, topic_plan(settings)), *check_schemas(settings)]
    if differences:
        raise NotWellError(f"{differences[0]}: run draftloop topics create")
    return "as declared"


def _registry(settings: Settings) -> str:
    from pipeline.messaging.boards import LogReleaseBoard
    from pipeline.messaging.event_logs import bare_log
    from pipeline.releases.registry import DrafterRegistry

    registry = DrafterRegistry(str(settings.data))
    with bare_log(settings) as log:
        releases = LogReleaseBoard(log, source="doctor").read_all()
    for release in releases:
        registry.read_config(release.artifact_uri, manifest_sha256=release.manifest_sha256)
    return f"{len(releases)} drafters released, their files as released"


def _clock(settings: Settings) -> str:
    from pipeline.messaging.event_logs import bare_log
    from schemas.topics import VERIFICATION_EVENTS

    with bare_log(settings) as log:
        end = log.end_offset(VERIFICATION_EVENTS, 0)
        begin = log.begin_offset(VERIFICATION_EVENTS, 0)
        newest = log.read(VERIFICATION_EVENTS, 0, end - 1, max_messages=1) if end > begin else ()
    if not newest:
        return "no event to compare with"
    ahead = (newest[0].appended_at - datetime.now(UTC)).total_seconds()
    if ahead > MOST_SKEW_SECONDS:
        raise NotWellError(
            f"the newest event was stored {ahead:.0f} s in this machine's future: set its clock"
        )
    return "not behind the newest event"


def _model(settings: Settings) -> str:
    from pipeline.wiring import open_target

    target = open_target(settings)
    probe = "Draftloop: 1 + 1 = 2."
    tokens = target.tokenizer(probe)["input_ids"]
    if not tokens or max(tokens) >= target.vocab_size:
        raise NotWellError(
            f"{settings.model.path}: its tokenizer gives tokens beyond the model's "
            f"{target.vocab_size}: use the tokenizer that came with it"
        )
    target.start().forward(tokens)
    return (
        f"{target.target_id}, {target.vocab_size} tokens, context {target.context_length}, "
        f"fingerprint {target.fingerprint[:12]}, computes on {target.device}"
    )
