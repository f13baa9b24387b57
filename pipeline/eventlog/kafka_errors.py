"""The client's errors as ours: one line that names the place and the cure."""

from __future__ import annotations

from kafka.errors import (
    AuthorizationError,
    InvalidProducerEpochError,
    InvalidSessionTimeoutError,
    InvalidTopicError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumberError,
    SaslAuthenticationFailedError,
    UnknownProducerIdError,
    UnsupportedSaslMechanismError,
)

from pipeline.eventlog.ports import EventLogError, EventLogUnavailableError
from pipeline.messaging.topics import MAX_MESSAGE_BYTES

PRODUCER_FORGOTTEN = (
    OutOfOrderSequenceNumberError,
    UnknownProducerIdError,
    InvalidProducerEpochError,
)
"""A broker that came back no longer knows how far this producer had counted its batches.

The client calls them final; for a producer without transactions a new one cures them.
"""


class BrokerCertificateError(KafkaError):  # type: ignore[misc]  # the client is untyped
    """The broker's certificate is not signed by whom we trust, or is of another host."""


def translated(error: KafkaError, where: str) -> EventLogError:
    """Return the error in one line, with the cure."""
    is_away = isinstance(error, KafkaTimeoutError | KafkaConnectionError) or error.retriable
    is_away = is_away or isinstance(error, PRODUCER_FORGOTTEN)
    kind = EventLogUnavailableError if is_away else EventLogError
    # The client's timeouts say nothing, and its connection errors end with what went wrong.
    cause = (str(error) or type(error).__name__).splitlines()[0][:300]
    return kind(f"{where}: {cause}; {_cure(error)}")


def _cure(error: KafkaError) -> str:
    if isinstance(error, KafkaTimeoutError | KafkaConnectionError):
        # A listener of another protocol is seen as a connection that ends at once.
        return "start the broker, or correct its address or kafka.security_protocol"
    if isinstance(error, BrokerCertificateError):
        return "correct kafka.ssl_ca_file, or the broker's certificate"
    if isinstance(error, UnsupportedSaslMechanismError):
        return "correct kafka.sasl_mechanism"
    if isinstance(error, PRODUCER_FORGOTTEN):
        return "repeat: a new producer counts its batches from the beginning"
    if isinstance(error, SaslAuthenticationFailedError):
        return "correct kafka.sasl_username, kafka.sasl_password or kafka.sasl_mechanism"
    if isinstance(error, InvalidSessionTimeoutError):
        return "set kafka.session_timeout_seconds to what the broker allows (6 to 1800 by default)"
    if isinstance(error, AuthorizationError):
        return "give this user the right to do it"
    if isinstance(error, MessageSizeTooLargeError):
        return f"keep messages under {MAX_MESSAGE_BYTES} bytes"
    if isinstance(error, InvalidTopicError):
        return "use letters, digits, '.', '_' and '-' in topic names"
    return "look at the broker's log, then repeat"
