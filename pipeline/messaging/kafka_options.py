"""From the settings to the clients of the broker, and of the schema registry beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.configuration.settings import KafkaSettings, Settings, SettingsError
from pipeline.eventlog.kafka_clients import KafkaOptions
from pipeline.messaging.schema_registry import RegisteredSchemas, RegistryAddress, RegistryClient
from schemas.avro import PACKAGED, SchemaTable


def kafka_options(settings: KafkaSettings) -> KafkaOptions:
    """Return what the settings ask of a client.

    Raises:
        SettingsError: If a file of certificates cannot be read, or a name or password is missing.
    """
    return KafkaOptions(
        timeout_seconds=settings.timeout_seconds,
        compression=settings.compression,
        batch_bytes=settings.batch_bytes,
        linger_milliseconds=settings.linger_milliseconds,
        replication_factor=settings.replication_factor,
        session_timeout_seconds=settings.session_timeout_seconds,
        security=_security(settings),
    )


def registered_schemas(settings: Settings) -> Callable[[], SchemaTable]:
    """Return what gives the schemas: this build's, or with a registry those it has numbered.

    Raises:
        SettingsError: If the file of certificates cannot be read.
    """
    return _registered(_address(settings)) if settings.schema_registry.url else lambda: PACKAGED


def registry_client(settings: Settings) -> RegistryClient:
    """Return a client of the schema registry that the settings name.

    Raises:
        SettingsError: If the file of certificates cannot be read.
    """
    return RegistryClient(_address(settings))


@cache
def _registered(address: RegistryAddress) -> RegisteredSchemas:
    """Build one per process, which asks once however often the log is opened."""
    return RegisteredSchemas(RegistryClient(address))


def _address(settings: Settings) -> RegistryAddress:
    one = settings.schema_registry
    _readable("schema_registry.ca_file", one.ca_file)
    return RegistryAddress(
        url=one.url,
        username=one.username,
        password=one.password,
        ca_file=one.ca_file,
        timeout_seconds=one.timeout_seconds,
    )


def _security(settings: KafkaSettings) -> dict[str, Any]:
    protocol = settings.security_protocol
    security: dict[str, Any] = {"security_protocol": protocol}
    if "SSL" in protocol.split("_"):
        security |= {
            "ssl_check_hostname": settings.ssl_checks_hostname,
            "ssl_cafile": _readable("kafka.ssl_ca_file", settings.ssl_ca_file),
            "ssl_certfile": _readable("kafka.ssl_certificate_file", settings.ssl_certificate_file),
            "ssl_keyfile": _readable("kafka.ssl_key_file", settings.ssl_key_file),
        }
    if protocol.startswith("SASL"):
        for name in ("sasl_username", "sasl_password"):
            if not getattr(settings, name):
                raise SettingsError(
                    f"kafka.{name} is empty: kafka.security_protocol = {protocol!r} needs it"
                )
        security |= {
            "sasl_mechanism": settings.sasl_mechanism,
            "sasl_plain_username": settings.sasl_username,
            "sasl_plain_password": settings.sasl_password,
        }
    return security


def _readable(name: str, path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        path.open("rb").close()
    except OSError as error:
        raise SettingsError(f"{name} = {str(path)!r}: cannot be read: {error.strerror}") from error
    return str(path)
