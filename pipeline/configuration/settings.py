"""Settings: one TOML file plus the environment, checked once, frozen from then on.

The file is ``--config``, else ``DRAFTLOOP_CONFIG``, else ``draftloop.toml`` in the working folder
if there is one. Every key can also come from the environment, which wins:
``DRAFTLOOP_WORKER__SEGMENT_TOKENS=32`` is ``segment_tokens = 32`` under ``[worker]``.

This module alone reads the environment. ``docs/settings.md`` lists every key.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource
from pydantic_settings import SettingsError as SourceError

from learner.selection import DEFAULT_POLICY, parse_policy
from learner.updates import DEFAULT_RULE
from pipeline.configuration.expert_settings import ExpertSection
from pipeline.configuration.gate_settings import GateSection
from pipeline.configuration.pool_settings import (
    DEFAULT_POOL,
    DrafterSettings,
    Identifier,
    Pool,
    Section,
)
from pipeline.configuration.schedule_settings import ScheduleSettings
from pipeline.configuration.server_settings import (
    LogSettings,
    MetricsSettings,
    SchemaRegistrySettings,
    ServerSettings,
)
from pipeline.configuration.vllm_settings import VllmSettings
from schemas.errors import KnownError

PREFIX = "DRAFTLOOP_"
NESTING = "__"
CONFIG = "DRAFTLOOP_CONFIG"
DEFAULT_FILE = Path("draftloop.toml")


class SettingsError(KnownError):
    """A setting cannot be used; the message is one line with its place, value and cure."""


def _policy_name(value: str) -> str:
    parse_policy(value)
    return value


def _rule_text(value: str) -> str:
    # Rules need torch, which takes seconds to import: only those wait who name one.
    from learner.updates.registry import parse_rule

    parse_rule(value)
    return value


def _expanded(value: Path) -> Path:
    return value.expanduser()


Folder = Annotated[Path, AfterValidator(_expanded)]
PolicyName = Annotated[str, AfterValidator(_policy_name)]
RuleText = Annotated[str, AfterValidator(_rule_text)]


class EventLogSettings(Section):
    """Where events, policies and releases travel."""

    url: str = ""
    """A folder, `sqlite:///FILE` or `kafka://host:port,host:port`; empty = in the data folder."""
    num_partitions: int = Field(default=1, ge=1, le=10_000)
    """Partitions of the topic of verification events, which bounds the number of learners."""
    retention_days: float = Field(default=7.0, gt=0, le=3650)
    """Days after which a broker deletes verification events and dead letters."""


class KafkaSettings(Section):
    """How the broker of a `kafka://` event log is talked to."""

    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """`SSL` encrypts, `SASL_...` asks for a name and a password."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    """How name and password are proved."""
    sasl_username: str = ""
    """The name."""
    sasl_password: str = Field(default="", repr=False)
    """The password; better in the environment than in the file."""
    ssl_ca_file: Folder | None = None
    """Certificates that the broker's must be signed by; unset = those of the machine."""
    ssl_certificate_file: Folder | None = None
    """This client's certificate, if the broker asks for one."""
    ssl_key_file: Folder | None = None
    """Private key of that certificate."""
    ssl_checks_hostname: bool = True
    """Refuse a broker whose certificate names another host."""
    compression: Literal["zstd", "lz4"] = "zstd"
    """Codec of the batches: `zstd` is smaller, `lz4` is faster."""
    batch_bytes: int = Field(default=256 * 2**10, ge=2**10, le=8 * 2**20)
    """Bytes of a partition that are sent together."""
    linger_milliseconds: int = Field(default=5, ge=0, le=10_000)
    """How long a batch waits to be filled."""
    timeout_seconds: float = Field(default=30.0, ge=1, le=600)
    """How long a call waits for the broker."""
    session_timeout_seconds: float = Field(default=15.0, ge=1, le=600)
    """A learner that was silent for so long loses its partitions to the others."""
    replication_factor: int = Field(default=-1, ge=-1, le=100)
    """Copies of the topics made here; -1 = the broker's default."""


class ModelSettings(Section):
    """The target."""

    path: str = Field(default="smollm2", min_length=1)
    """A folder with config, safetensors and tokenizer, or `smollm2`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Number format of target and drafters; outputs equal plain decoding exactly in `float32`."""
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """Where target and drafters compute and heads train; `auto` = `cuda` if there is one."""


class WorkerSettings(Section):
    """Decoding and what it reports."""

    worker_id: Identifier = "worker-0"
    """Names this worker in its events; no two running workers may share it."""
    num_speculative_tokens: int = Field(default=4, ge=0, le=64)
    """Most tokens a drafter may propose per round (K)."""
    policy: PolicyName = DEFAULT_POLICY
    """How drafters are selected: a policy, or `name:key=value,...`, or `fixed:<drafter>`."""
    segment_tokens: int = Field(default=64, ge=1, le=100_000)
    """Verified tokens after which a segment of a request is reported."""
    score_block: int = Field(default=8, ge=1, le=100_000)
    """Windows scored together; more is cheaper, fewer lets the policy react sooner."""
    first_level_block: int = Field(default=1, ge=0, le=100_000)
    """Windows whose level 1 is scored together, ahead, if the policy learns it alone; 0 = never."""
    emit_capacity: int = Field(default=1000, ge=1)
    """Events that may wait to be sent; beyond that the oldest are dropped and counted."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """Threads of the tensor library."""
    poll_seconds: float = Field(default=0.5, gt=0, le=3600)
    """Time between two looks for new policies and releases."""


class LearnerSettings(Section):
    """Learning from events."""

    learner_id: Identifier = "learner-0"
    """Names this learner in what it publishes."""
    learning_rate: float = Field(default=1e-3, gt=0, le=1)
    """Step size of the weight updates."""
    update_rule: RuleText = DEFAULT_RULE
    """How weights are updated: a rule, or `name:key=value,...`; see docs/learning.md."""
    steps_per_event: int = Field(default=2, ge=0, le=1000)
    """Weight updates after each event with content; 0 = learn selection only."""
    batch_size: int = Field(default=256, ge=1, le=1_000_000)
    """Positions per weight update."""
    training_levels: int | None = Field(default=None, ge=1, le=64)
    """Levels of every position that heads learn; unset = `worker.num_speculative_tokens`."""
    publish_policy_every_events: int = Field(default=1000, ge=1)
    """Most events that are learned before the policies they changed are published."""
    publish_policy_every_seconds: float = Field(default=0.1, ge=0.0)
    """Longest that a changed policy waits while events keep coming; when none come, it does not."""
    publish_weights_every_events: int = Field(default=2, ge=1)
    """Events between two released versions of a drafter's weights."""
    draft_vocabulary_size: int = Field(default=8192, ge=1)
    """Tokens that a new head can propose, the most frequent of `draft_vocabulary_text`."""
    draft_vocabulary_text: Folder | None = None
    """A text file like the traffic to come; unset = the tokenizer's own order of frequency."""
    keep_versions: int = Field(default=5, ge=1)
    """Newest versions of a drafter's weights kept; those in use stay as well."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of every random draw."""


class ArchiverSettings(Section):
    """The Parquet log."""

    max_events_per_file: int = Field(default=10_000, ge=1)
    """Events after which a file is closed."""
    max_seconds_per_file: float = Field(default=60.0, gt=0, le=86_400)
    """Age at which a file is closed, however few events it holds."""


class ContentSettings(Section):
    """What users wrote and read. Nothing is recorded unless its stream has consented."""

    consenting_streams: tuple[Identifier, ...] = ()
    """Streams whose token ids may be recorded; only they train weights."""


class FeatureSettings(Section):
    """Recorded hidden states of the consenting streams."""

    enabled: bool = False
    """Record the target's hidden states, which some drafters need to train."""
    max_bytes: int = Field(default=10 * 2**30, ge=1)
    """Bytes kept per worker; the oldest files are removed first."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the segments of consenting requests whose hidden states are recorded."""
    source: Literal["recorded", "recomputed", "recorded_or_recomputed"] = "recorded"
    """Where heads learn from; `recomputed` = the learner runs the target over the tokens."""
    recompute_positions: int = Field(default=16_384, ge=0)
    """Positions of unfinished requests in the learner's own caches of the target."""


class Settings(Section):
    """All settings; built directly, with the defaults, it reads neither file nor environment."""

    data: Folder = Path("draftloop-data")
    """Folder of everything Draftloop stores: event log, Parquet log, artifacts, features."""
    cache: Folder | None = None
    """Folder of converted models; unset = the user's cache folder."""
    event_log: EventLogSettings = EventLogSettings()
    kafka: KafkaSettings = KafkaSettings()
    schema_registry: SchemaRegistrySettings = SchemaRegistrySettings()
    model: ModelSettings = ModelSettings()
    drafters: Pool = DEFAULT_POOL
    """The pool, as `[[drafters]]` tables; their order is the order of every array."""
    worker: WorkerSettings = WorkerSettings()
    learner: LearnerSettings = LearnerSettings()
    gate: GateSection = GateSection()
    experts: ExpertSection = ExpertSection()
    schedule: ScheduleSettings = ScheduleSettings()
    archiver: ArchiverSettings = ArchiverSettings()
    content: ContentSettings = ContentSettings()
    features: FeatureSettings = FeatureSettings()
    server: ServerSettings = ServerSettings()
    vllm: VllmSettings = VllmSettings()
    metrics: MetricsSettings = MetricsSettings()
    logs: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _policy_names_a_drafter(self) -> Self:
        kind, _, drafter = self.worker.policy.partition(":")
        ids = [one.drafter_id for one in self.drafters]
        if kind == "fixed" and drafter not in ids:
            raise ValueError(
                f"worker.policy = {self.worker.policy!r}: expected one of the drafters "
                f"{', '.join(ids)}"
            )
        return self


class _Environment(BaseSettings, Settings):  # type: ignore[misc]  # two kinds of model_config
    """Tells the environment source which keys there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingKey:
    """One key as the documentation shows it; ``default`` is written as in TOML."""

    name: str
    default: str
    meaning: str

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.replace(".", NESTING).upper()


def setting_keys() -> list[SettingKey]:
    """Return every key, in the order of the file."""
    return list(_keys(Settings(), ""))


def load_settings(config: Path | None = None) -> Settings:
    """Read file and environment.

    Args:
        config: The file, which must then exist; None to look as the module describes.

    Raises:
        SettingsError: If a key is unknown or a value is not allowed, or the file cannot be read.
    """
    file = _config_file(config)
    document = {} if file is None else _document(file)
    _refuse_unknown_variables()
    try:
        environment = EnvSettingsSource(
            _Environment, env_prefix=PREFIX, env_nested_delimiter=NESTING
        )()
    except SourceError as error:
        raise SettingsError(_not_json()) from error
    try:
        return Settings.model_validate(_merged(document, environment))
    except ValidationError as error:
        raise SettingsError(_one_line(error, file)) from error


def service_environment(settings: Settings) -> dict[str, str]:
    """Return this process's environment with ``settings`` in it, to start a service with.

    A settings file that this process was told to use is not read there.
    """
    variables = {
        PREFIX + name.upper(): value if isinstance(value, str) else json.dumps(value)
        for name, value in settings.model_dump(mode="json").items()
        if value is not None
    }
    kept = {k: v for k, v in os.environ.items() if not k.upper().startswith(PREFIX)}
    return kept | variables


def _keys(section: BaseModel, prefix: str) -> Iterator[SettingKey]:
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield SettingKey(
                name=prefix + name, default=_toml(value), meaning=info.description or ""
            )


def _toml(value: object) -> str:
    """Write a default as TOML would; unset is left blank."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        value = [one.drafter_id if isinstance(one, DrafterSettings) else one for one in value]
    return json.dumps(str(value) if isinstance(value, Path) else value)


def _config_file(config: Path | None) -> Path | None:
    named = config or (Path(os.environ[CONFIG]) if os.environ.get(CONFIG) else None)
    if named is not None:
        return named
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def _document(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SettingsError(f"{file}: not TOML: {error}") from error


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one document over another, table by table."""
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        if isinstance(value, Mapping) and isinstance(lower, Mapping):
            value = _merged(lower, value)
        merged[key] = value
    return merged


def _refuse_unknown_variables() -> None:
    """A misspelt variable must not be ignored: it may be the one that switches content off."""
    known = {key.variable for key in setting_keys()} | {CONFIG}
    known |= {f"{PREFIX}{name}".upper() for name in Settings.model_fields}
    for variable in os.environ:
        name = variable.upper()
        if name.startswith(PREFIX) and name not in known:
            raise SettingsError(f"environment: {variable} is no setting; {_closest(name, known)}")


def _not_json() -> str:
    """Name the variable of a list or table that is not written as JSON."""
    plain = {key.variable for key in setting_keys() if not key.default.startswith("[")} | {CONFIG}
    for variable, value in os.environ.items():
        if variable.upper().startswith(PREFIX) and variable.upper() not in plain:
            try:
                json.loads(value)
            except ValueError as error:
                return (
                    f"{variable} = {_shown(value)}: lists and tables are written as JSON: {error}"
                )
    return "environment: lists and tables are written as JSON"


def _one_line(error: ValidationError, file: Path | None) -> str:
    """Name the place, key, value and what is allowed, for the first of the errors."""
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = {known.name for known in setting_keys()} | set(Settings.model_fields)
        return f"{file}: {key} is no setting; {_closest(key, known)}"
    allowed = first["msg"].removeprefix("Value error, ")
    if not path:  # two keys contradict each other
        return f"{file or 'settings'}: {allowed}"
    value = _shown(first["input"])
    return f"{_place(path, file)}: {key} = {value}: {allowed}"


def _place(path: Sequence[str], file: Path | None) -> str:
    """Name the variable that set the value, else the file."""
    variables = {name.upper(): name for name in os.environ}
    for size in range(len(path), 0, -1):
        variable = PREFIX + NESTING.join(path[:size]).upper()
        if variable in variables:
            return variables[variable]
    return str(file)


def _shown(value: object) -> str:
    """Show a value without the password that a URL may hold."""
    return re.sub(r"//[^/@\s]*@", "//***@", repr(value))[:200]


def _closest(name: str, known: Collection[str]) -> str:
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {found[0]}?" if found else "see docs/settings.md"
