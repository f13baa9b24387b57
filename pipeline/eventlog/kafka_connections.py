"""Why a broker could not be connected to.

The client (3.0.12) tries again until its time is up and then says that its time was up, also where
the password is wrong or the certificate is not one that we trust. Here such refusals end the first
try, and what else went wrong is kept for the error.
"""

from __future__ import annotations

from typing import Any

from kafka.errors import (
    AuthorizationError,
    SaslAuthenticationFailedError,
    UnsupportedSaslMechanismError,
)
from kafka.net.manager import KafkaConnectionManager

from pipeline.eventlog.kafka_errors import BrokerCertificateError

REFUSALS = (
    AuthorizationError,
    BrokerCertificateError,
    SaslAuthenticationFailedError,
    UnsupportedSaslMechanismError,
)
"""What no repetition cures."""


class TellingManager(KafkaConnectionManager):  # type: ignore[misc]  # the client is untyped
    """The client's connections, with the reason why the last one failed.

    Attributes:
        failure: Why the last connection could not be made; None if none has failed.
    """

    failure: Exception | None = None

    def get_connection(self, node_id: Any, *arguments: Any, **named: Any) -> Any:
        """Return the connection to a node, made now unless there is one."""
        connection = super().get_connection(node_id, *arguments, **named)
        if not connection.init_future.is_done:
            connection.init_future.add_errback(self._note)
        return connection

    def maybe_raise_auth_failure(self, node_id: Any) -> None:
        """Raise what the node, or any other, has refused us for."""
        if isinstance(self.failure, REFUSALS):
            failure, self.failure = self.failure, None
            raise failure
        super().maybe_raise_auth_failure(node_id)

    def _note(self, error: Exception) -> None:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            error = BrokerCertificateError(str(error))
        self.failure = error
