"""The gate before every route: keys, and the length of bodies.

A route that is in neither of the two lists needs an admin key, so a new one is closed until
somebody opens it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.server.errors import ApiError, error_response
from inference.server.options import KeyRing, ServerOptions

OPEN = frozenset({"/healthz", "/readyz", "/metrics"})
"""Routes for probes and Prometheus: no key."""

FOR_CLIENTS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{model_id:path}",
        "/openapi.json",
    }
)
"""Routes for a client's key."""


MOST_DISCARDED_BYTES = 64 * 2**20
"""A client that is still sending does not read: so much is read and thrown away first."""


class _BodyTooLongError(Exception):
    pass


async def _discard(receive: Receive) -> None:
    """Read a body to its end, up to a limit, and keep nothing of it."""
    num_bytes = 0
    while num_bytes <= MOST_DISCARDED_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def _length_error(most: int) -> ApiError:
    return ApiError(413, f"the body is longer than {most} bytes: shorten it", code="body_too_long")


class _Limited:
    """One request whose body is counted as it is read, as its length may be undeclared.

    Whoever reads the body may take the failure for one of parsing; what it answers is replaced.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted() -> Message:
            message = await receive()
            self._num_bytes += len(message.get("body", b""))
            if self._num_bytes > self._most:
                raise _BodyTooLongError
            return message

        async def answer(message: Message) -> None:
            if self._num_bytes <= self._most:
                await send(message)

        with contextlib.suppress(_BodyTooLongError):
            await self._app(scope, counted, answer)
        if self._num_bytes > self._most:
            await _discard(receive)
            await error_response(_length_error(self._most))(scope, receive, send)


class Gate:
    """An ASGI middleware.

    Args:
        app: What lies behind it.
        routes: Its routes.
        options: Keys and limits.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute], options: ServerOptions) -> None:
        self._app = app
        self._routes = routes
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refusal = self.refusal(scope, headers) or self._too_long(headers.get(b"content-length"))
        if refusal is not None:
            await _discard(receive)
            await error_response(refusal)(scope, receive, send)
            return
        await _Limited(self._app, self._options.max_body_bytes)(scope, receive, send)

    def refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        """Return why a request is not let in, or None."""
        path = self._route_path(scope)
        if path in OPEN:
            return None
        key = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        if path is None or path in FOR_CLIENTS:
            return self._client_refusal(key)
        return _admin_refusal(self._options.admin_keys, key)

    def _client_refusal(self, key: bytes) -> ApiError | None:
        if not len(self._options.api_keys) or self._options.api_keys.holds(key):
            return None
        return ApiError(
            401,
            "no valid API key: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
        )

    def _route_path(self, scope: Scope) -> str | None:
        """Return the pattern of the route that will answer, whatever the method."""
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return getattr(route, "path", "")
        return None

    def _too_long(self, declared: bytes | None) -> ApiError | None:
        if declared is None or not declared.isdigit():
            return None
        most = self._options.max_body_bytes
        return _length_error(most) if int(declared) > most else None


def _admin_refusal(keys: KeyRing, key: bytes) -> ApiError | None:
    if keys.holds(key):
        return None
    cure = "send an admin key" if len(keys) else "set server.admin_keys_file to open them"
    return ApiError(403, f"admin routes are closed: {cure}", code="admin_key_required")
