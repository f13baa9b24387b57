"""The schemas of a Confluent-compatible registry, beside those of this build.

A registry numbers schemas itself. With one, messages are written with its ids, and the schema of
an id that this build does not know is asked for, so that an older build reads a newer writer.
A registry that cannot be reached stops nobody: what is known goes on being used, and messages are
written with the ids of ``schemas/``, which every build of Draftloop reads.

``urllib`` speaks to it: a process asks three times at its start and once per foreign schema, so
nothing would be gained by pooled connections, and a client library would be a dependency for that.
"""

from __future__ import annotations

import base64
import json
import logging
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.eventlog.ports import EventLogError
from schemas.avro import PACKAGED, SchemaTable, WireSchema, newest_text, wire_schema
from schemas.errors import ContractError
from schemas.topics import DRAFTER_RELEASES, POLICIES, VERIFICATION_EVENTS

CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"
RETRY_SECONDS = 30.0
"""Time between two tries at a registry that was away, or at an id that it did not know."""
MOST_UNKNOWN_IDS = 1000
"""Ids that are remembered as unknown; broken messages may hold any."""

_NOT_FOUND = 404
_FORBIDDEN = (401, 403)
_CURE = "start it or correct schema_registry.url"

NAME_TO_SUBJECT: Mapping[str, str] = {
    "verification_event": f"{VERIFICATION_EVENTS}-value",
    "policy_published": f"{POLICIES}-value",
    "drafter_released": f"{DRAFTER_RELEASES}-value",
}
"""Subjects by the registry's default rule, topic and ``-value``."""

logger = logging.getLogger(__name__)


class SchemaRegistryError(EventLogError):
    """The registry refuses; the message names it, the subject and the cure."""


class RegistryAwayError(SchemaRegistryError):
    """The registry cannot be reached or does not answer as one; it may come back by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryAddress:
    """Where a registry is and who asks.

    Attributes:
        url: ``http://host:port`` or ``https://host:port``, perhaps with a path.
        username, password: Sent with every request unless the name is empty.
        ca_file: Certificates that its own must be signed by; None = those of the machine.
        timeout_seconds: How long one request may take, > 0.
    """

    url: str
    username: str = ""
    password: str = field(default="", repr=False)
    ca_file: Path | None = None
    timeout_seconds: float = 5.0


class RegistryClient:
    """The four requests that are needed of a registry.

    Every method raises ``RegistryAwayError`` if the registry cannot be reached.
    """

    def __init__(self, address: RegistryAddress) -> None:
        self.url = address.url.rstrip("/")
        self._address = address
        self._tls: ssl.SSLContext | None = None
        if self.url.startswith("https://"):
            self._tls = ssl.create_default_context(cafile=address.ca_file)

    def register(self, subject: str, text: str) -> int:
        """Return the id of a schema under a subject, given to it now unless it has one.

        Raises:
            SchemaRegistryError: If the subject's rule of compatibility refuses it.
        """
        try:
            answer = self._ask(f"/subjects/{quote(subject)}/versions", {"schema": text})
        except urllib.error.HTTPError as error:
            raise SchemaRegistryError(
                f"schema registry {self.url}: subject {subject} refuses the schema of this build "
                f"(status {error.code}: {_reason(error)}); upgrade what reads it first, or relax "
                "the compatibility of the subject"
            ) from error
        return int(self._value(answer, "id"))

    def schema(self, schema_id: int) -> str | None:
        """Return the text of a schema; None if the registry has none of this id."""
        try:
            return str(self._value(self._ask(f"/schemas/ids/{schema_id}"), "schema"))
        except urllib.error.HTTPError as error:
            if error.code == _NOT_FOUND:
                return None
            raise self._away(f"status {error.code}: {_reason(error)}") from error

    def is_compatible(self, subject: str, text: str) -> bool:
        """Tell whether the subject would take this schema; a subject without any takes all."""
        path = f"/compatibility/subjects/{quote(subject)}/versions/latest"
        try:
            return bool(self._value(self._ask(path, {"schema": text}), "is_compatible"))
        except urllib.error.HTTPError as error:
            if error.code == _NOT_FOUND:
                return True
            raise self._away(f"status {error.code}: {_reason(error)}") from error

    def _ask(self, path: str, body: Mapping[str, str] | None = None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Accept": CONTENT_TYPE, "Content-Type": CONTENT_TYPE, **self._proof()},
        )
        try:
            with urllib.request.urlopen(
                request, timeout=self._address.timeout_seconds, context=self._tls
            ) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in _FORBIDDEN:
                raise
            with error:
                raise self._away(f"status {error.code} {error.reason}", _cure(error)) from error
        except (OSError, ValueError) as error:
            raise self._away(str(error)) from error

    def _proof(self) -> dict[str, str]:
        one = self._address
        if not one.username:
            return {}
        pair = base64.b64encode(f"{one.username}:{one.password}".encode()).decode()
        return {"Authorization": f"Basic {pair}"}

    def _value(self, answer: Any, name: str) -> Any:
        if not isinstance(answer, dict) or name not in answer:
            raise self._away(f"the answer has no {name!r}")
        return answer[name]

    def _away(self, cause: str, cure: str = _CURE) -> RegistryAwayError:
        return RegistryAwayError(f"schema registry {self.url}: {cause}; {cure}")


def _cure(error: urllib.error.HTTPError) -> str:
    if error.code in _FORBIDDEN:
        return "correct schema_registry.username or schema_registry.password"
    return _CURE


def _reason(error: urllib.error.HTTPError) -> str:
    """Return what the registry says, in a few words, and release the answer."""
    with error:
        try:
            return str(json.load(error)["message"])[:300]
        except (OSError, ValueError, KeyError, TypeError):
            return str(error.reason)


class RegisteredSchemas:
    """The schemas to write and to read with; called by whoever encodes or decodes.

    Args:
        client: Asks the registry.
        clock: Monotonic seconds.

    Attributes:
        is_degraded: The registry could not be reached when it was last asked.
        num_failures: How often it could not.
    """

    def __init__(self, client: RegistryClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._table = replace(PACKAGED, find=self._find)
        self._is_registered = False
        self._not_before_seconds = float("-inf")
        self._unknown_until: dict[int, float] = {}
        self.is_degraded = False
        self.num_failures = 0

    def __call__(self) -> SchemaTable:
        """Return the schemas, registering this build's first if that has not been done.

        Raises:
            SchemaRegistryError: If the registry refuses a schema of this build.
        """
        if not self._is_registered:
            with self._lock:
                self._register()
        return self._table

    def _register(self) -> None:
        if self._is_registered or self._clock() < self._not_before_seconds:
            return
        try:
            own = {name: self._registered(name) for name in NAME_TO_SUBJECT}
        except RegistryAwayError as error:
            self._bear(error)
            return
        self._recover()
        self._is_registered = True
        by_id = {one.schema_id: one for one in own.values()}
        clashing = sorted(by_id.keys() & PACKAGED.by_id.keys())
        if clashing:
            # Both meanings of such an id may be in the log.
            logger.error(
                "schema registry %s: gives ids %s, which schemas/ has given already; messages "
                "are written with those of schemas/",
                *(self._client.url, clashing),
            )
            return
        self._table = replace(self._table, newest=own, by_id={**self._table.by_id, **by_id})

    def _registered(self, name: str) -> WireSchema:
        schema_id = self._client.register(NAME_TO_SUBJECT[name], newest_text(name))
        return replace(PACKAGED.newest[name], schema_id=schema_id)

    def _find(self, schema_id: int) -> WireSchema | None:
        """Ask for the schema of an id that is not in the table, and remember the answer.

        Raises:
            ContractError: If the registry cannot be asked, or its schema is none of ours.
        """
        with self._lock:
            # Another thread may have asked while this one waited.
            known = self._table.by_id.get(schema_id)
            if known is not None or self._clock() < self._unknown_until.get(schema_id, 0.0):
                return known
            text = self._text(schema_id)
            self._remember_unknown(schema_id)
            if text is None:
                return None
            found = _foreign_schema(schema_id, text)
            self._table = self._table.knowing(found)
            return found

    def _text(self, schema_id: int) -> str | None:
        if self.is_degraded and self._clock() < self._not_before_seconds:
            raise _unasked(schema_id)
        try:
            text = self._client.schema(schema_id)
        except RegistryAwayError as error:
            self._bear(error)
            raise _unasked(schema_id) from error
        self._recover()
        return text

    def _remember_unknown(self, schema_id: int) -> None:
        if len(self._unknown_until) >= MOST_UNKNOWN_IDS:
            self._unknown_until.clear()
        self._unknown_until[schema_id] = self._clock() + RETRY_SECONDS

    def _bear(self, error: RegistryAwayError) -> None:
        """One outage is one warning."""
        self.num_failures += 1
        self._not_before_seconds = self._clock() + RETRY_SECONDS
        if not self.is_degraded:
            logger.warning("degraded, going on with the schemas that are known: %s", error)
        self.is_degraded = True

    def _recover(self) -> None:
        if self.is_degraded:
            logger.warning("schema registry %s: is back", self._client.url)
        self.is_degraded = False


def _unasked(schema_id: int) -> ContractError:
    return ContractError(
        "schema_id", found=schema_id, expected="a known one; the schema registry cannot be asked"
    )


def _foreign_schema(schema_id: int, text: str) -> WireSchema:
    """Parse a schema of the registry as that of one of our messages.

    Raises:
        ContractError: If it is of something else.
    """
    try:
        definition = json.loads(text)
        full_name = f"{definition['namespace']}.{definition['name']}"
        name = {one.parsed["name"]: key for key, one in PACKAGED.newest.items()}[full_name]
        definition["draftloop.schema_id"] = schema_id
        return wire_schema(name, json.dumps(definition))
    except Exception as error:
        # The parser raises whatever the text leads it into.
        raise ContractError(
            "schema_id",
            found=f"{schema_id} ({type(error).__name__}: {error})"[:300],
            expected="the id of a schema of Draftloop",
        ) from error


def incompatible_schemas(client: RegistryClient) -> list[str]:
    """Return one line per subject that would refuse the schema of this build."""
    return [
        f"schema registry {client.url}: subject {subject} would refuse the schema of this build"
        for name, subject in NAME_TO_SUBJECT.items()
        if not client.is_compatible(subject, newest_text(name))
    ]
