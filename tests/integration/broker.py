"""A Kafka-protocol broker for tests: the one the environment names, or one started here.

``KAFKA_BOOTSTRAP_SERVERS`` names a real one, with ``KAFKA_SECURITY_PROTOCOL``,
``KAFKA_SSL_CA_FILE``, ``KAFKA_SASL_MECHANISM``, ``KAFKA_SASL_USERNAME`` and
``KAFKA_SASL_PASSWORD`` where it asks for them. It should be there for tests alone: what is named
``draftloop.*`` on it is deleted, if ``KAFKA_TESTS_MAY_DELETE`` is 1 or the tests have made it
themselves.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from pipeline.configuration.settings import KafkaSettings
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.kafka_clients import KafkaOptions
from pipeline.local_broker import free_port, local_broker
from pipeline.messaging.kafka_options import kafka_options

__all__ = ["free_port"]

BOOTSTRAP_VARIABLE = "KAFKA_BOOTSTRAP_SERVERS"

MAY_DELETE_VARIABLE = "KAFKA_TESTS_MAY_DELETE"
VARIABLE_TO_KEY = {
    "KAFKA_SECURITY_PROTOCOL": "security_protocol",
    "KAFKA_SSL_CA_FILE": "ssl_ca_file",
    "KAFKA_SASL_MECHANISM": "sasl_mechanism",
    "KAFKA_SASL_USERNAME": "sasl_username",
    "KAFKA_SASL_PASSWORD": "sasl_password",
}
PREFIX = "draftloop."

_START_SECONDS = 60.0


@contextmanager
def broker(folder: Path) -> Iterator[str]:
    """Yield ``host:port`` of a broker, started with ``folder`` as its data unless one is given."""
    given = os.environ.get(BOOTSTRAP_VARIABLE)
    if given:
        yield given
    else:
        with own_broker(folder, free_port()) as servers:
            yield servers


def kafka_settings(servers: str) -> KafkaSettings:
    """Return how a broker is to be talked to: as the environment says, if it has named this one."""
    if servers != os.environ.get(BOOTSTRAP_VARIABLE):
        return KafkaSettings()
    given = {key: os.environ[name] for name, key in VARIABLE_TO_KEY.items() if name in os.environ}
    return KafkaSettings.model_validate(given)


def settings_text(servers: str) -> str:
    """Return the section of a settings file with which a service talks to a broker."""
    one = kafka_settings(servers)
    given = {key: getattr(one, key) for key in VARIABLE_TO_KEY.values() if getattr(one, key)}
    return "\n".join(["[kafka]", *(f"{key} = {json.dumps(str(v))}" for key, v in given.items())])


def kafka_log(servers: str, options: KafkaOptions | None = None) -> KafkaEventLog:
    """Return the event log on a broker, with the security that it asks for."""
    security = kafka_options(kafka_settings(servers)).security
    options = replace(options or KafkaOptions(), security=security)
    return KafkaEventLog(servers.split(","), options)


def kafka_admin(servers: str) -> Any:
    """Return the client's own administrator of a broker."""
    security = kafka_options(kafka_settings(servers)).security
    return KafkaAdminClient(bootstrap_servers=servers.split(","), **security)


@contextmanager
def blank_broker(folder: Path) -> Iterator[str]:
    """Yield ``host:port`` of a broker without topics or groups of the loop's own fixed names.

    One that the environment names is shared, so it is lent to one test at a time.
    """
    given = os.environ.get(BOOTSTRAP_VARIABLE)
    if not given:
        with own_broker(folder, free_port()) as servers:
            yield servers
        return
    with (Path(tempfile.gettempdir()) / "draftloop-tests-broker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with closing(kafka_admin(given)) as admin:
            _refuse_foreign_topics(admin)
            _delete_everything(admin)
            try:
                yield given
            finally:
                _delete_everything(admin)


def _refuse_foreign_topics(admin: Any) -> None:
    found = sorted(name for name in admin.list_topics() if name.startswith(PREFIX))
    if found and os.environ.get(MAY_DELETE_VARIABLE) != "1":
        raise RuntimeError(
            f"the broker that {BOOTSTRAP_VARIABLE} names holds {', '.join(found)}: name one for "
            f"tests alone, or set {MAY_DELETE_VARIABLE}=1 to have them deleted"
        )


def _delete_everything(admin: Any) -> None:
    """Delete topics and groups; members that were killed are waited for."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        names = [name for name in admin.list_topics() if name.startswith(PREFIX)]
        groups = [one["group_id"] for one in admin.list_groups()]
        groups = [group for group in groups if group.startswith(PREFIX)]
        if not names and not groups:
            return
        with suppress(KafkaError):
            if names:
                admin.delete_topics(names)
            if groups:
                admin.delete_groups(groups)
        time.sleep(0.2)
    raise RuntimeError(f"topics {names} and groups {groups} of the broker could not be deleted")


@contextmanager
def own_broker(folder: Path, port: int) -> Iterator[str]:
    """Yield ``host:port`` of a broker that is started here and ends with the block."""
    with local_broker(folder, port) as servers:
        yield servers
