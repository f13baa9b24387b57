"""A listener that speaks enough of Kafka's protocol to refuse a password."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_API_VERSIONS, _SASL_HANDSHAKE, _SASL_AUTHENTICATE = 18, 17, 36
_UNSUPPORTED_VERSION, _SASL_AUTHENTICATION_FAILED, _UNSUPPORTED_MECHANISM = 35, 58, 33
_KEYS = {_API_VERSIONS: (0, 0), _SASL_HANDSHAKE: (0, 1), _SASL_AUTHENTICATE: (0, 0), 3: (0, 1)}


@contextmanager
def refusing_listener(mechanism: str) -> Iterator[str]:
    """Yield ``host:port`` of one that knows ``mechanism`` and no user."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sockets: list[socket.socket] = []
        thread = threading.Thread(target=_accept, args=(listener, mechanism, sockets))
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        for one in (listener, *sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        thread.join()


def _accept(listener: socket.socket, mechanism: str, sockets: list[socket.socket]) -> None:
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            sockets.append(client)
            with suppress(OSError), client, client.makefile("rb") as stream:
                while head := stream.read(4):
                    request = stream.read(struct.unpack(">i", head)[0])
                    answer = request[4:8] + _answer(request, mechanism)
                    client.sendall(struct.pack(">i", len(answer)) + answer)


def _answer(request: bytes, mechanism: str) -> bytes:
    key, version = struct.unpack_from(">hh", request)
    name = struct.pack(">h", len(mechanism)) + mechanism.encode()
    if key == _API_VERSIONS:
        error = 0 if version == 0 else _UNSUPPORTED_VERSION
        rows = b"".join(struct.pack(">hhh", one, *span) for one, span in _KEYS.items())
        return struct.pack(">hi", error, len(_KEYS)) + rows
    if key == _SASL_HANDSHAKE:
        error = 0 if name in request else _UNSUPPORTED_MECHANISM
        return struct.pack(">hi", error, 1) + name
    text = b"Authentication failed: Invalid username or password"
    empty = struct.pack(">i", 0)
    return struct.pack(">hh", _SASL_AUTHENTICATION_FAILED, len(text)) + text + empty
