"""Settings of the HTTP server, of metrics and of logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pipeline.configuration.pool_settings import Identifier, Section


def _expanded(value: Path) -> Path:
    return value.expanduser()


KeysFile = Annotated[Path, AfterValidator(_expanded)]


class ServerSettings(Section):
    """The OpenAI API of `draftloop serve`."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; `0.0.0.0` = every one, which wants `api_keys_file`."""
    port: int = Field(default=8000, ge=0, le=65_535)
    """Port to listen on; 0 = any free one, which is logged."""
    model_name: str = Field(default="", pattern=r"^[^:\x00-\x1f]*$")
    """Name that clients ask for; empty = the target's own."""
    default_stream: Identifier = "default"
    """Stream of requests that name none."""
    streams: tuple[Identifier, ...] = ()
    """Streams that requests may name; empty = any."""
    default_max_tokens: int = Field(default=256, ge=1)
    """Most tokens of an answer whose request does not say."""
    max_running: int = Field(default=8, ge=1, le=10_000)
    """Requests that take turns, round by round."""
    max_waiting: int = Field(default=64, ge=0, le=1_000_000)
    """Requests that wait for a turn; beyond that, status 429."""
    max_body_bytes: int = Field(default=4 * 2**20, ge=2**10)
    """Longest body of a request."""
    client_seconds: float = Field(default=60.0, gt=0, le=3600)
    """How long a client may leave its stream unread before it is cut."""
    api_keys_file: KeysFile | None = None
    """Keys of clients, one a line; unset = no key is asked for."""
    admin_keys_file: KeysFile | None = None
    """Keys of admin routes, one a line; unset = those routes are closed."""


class MetricsSettings(Section):
    """What Prometheus reads of the services that serve no HTTP otherwise."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on."""
    learner_port: int = Field(default=0, ge=0, le=65_535)
    """Port of the learner's metrics; 0 = none."""
    archiver_port: int = Field(default=0, ge=0, le=65_535)
    """Port of the archiver's metrics; 0 = none."""
    scheduler_port: int = Field(default=0, ge=0, le=65_535)
    """Port of the scheduler's metrics; 0 = none."""
    most_still_seconds: float = Field(default=120.0, gt=0, le=86_400)
    """A service whose loop stands still for longer is unhealthy (`/healthz`)."""


class SchemaRegistrySettings(Section):
    """A Confluent-compatible schema registry beside the broker of a `kafka://` event log."""

    url: str = Field(default="", pattern=r"^(https?://[^/@\s]+(/\S*)?)?$")
    """`http://host:port` or `https://host:port`; empty = none, and ids come from `schemas/`."""
    username: str = ""
    """Name for HTTP basic authentication; empty = none."""
    password: str = Field(default="", repr=False)
    """Its password; better in the environment than in the file."""
    ca_file: KeysFile | None = None
    """Certificates that the registry's must be signed by; unset = those of the machine."""
    timeout_seconds: float = Field(default=5.0, gt=0, le=600)
    """How long one request may take."""


class LogSettings(Section):
    """What services write to the standard error. Prompts, answers and keys are never in it."""

    format: Literal["text", "json"] = "text"
    """`json` = one object a line, for a log collector."""
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """The least important lines that are written."""
