"""A proxy before a broker of the tests: TLS, which they have not, slow answers, and lost requests.

A broker tells its clients where it is, so the proxy writes its own port into those answers. Both
numbers take four bytes, so nothing else of an answer changes.
"""

from __future__ import annotations

import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HOST = "127.0.0.1"
JOIN_GROUP = struct.pack(">h", 11)
"""Key of the request, behind its size."""


def make_certificate(folder: Path, name: str, *, address: str = HOST) -> Path:
    """Make a certificate of ``address`` that signs itself, with its key, and return its file."""
    file = folder / f"{name}.pem"
    subprocess.run(
        [
            *["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"],
            *["-nodes", "-days", "2", "-subj", f"/CN={name}"],
            *["-addext", f"subjectAltName=IP:{address}"],
            *["-keyout", str(file.with_suffix(".key")), "-out", str(file)],
        ],
        check=True,
        capture_output=True,
    )
    return file


@contextmanager
def tls_proxy(broker: str, certificate: Path) -> Iterator[str]:
    """Yield ``host:port`` where ``broker`` is reached over TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    with socket.create_server((HOST, 0)) as listener, Proxy(broker, listener, context) as proxy:
        yield proxy.servers


@contextmanager
def slow_proxy(broker: str) -> Iterator[Proxy]:
    """Yield a proxy whose ``delay_seconds`` every answer waits, once it is set.

    It also keeps the next ``num_joins_to_lose`` requests to join a group from the broker.
    """
    with socket.create_server((HOST, 0)) as listener, Proxy(broker, listener, None) as proxy:
        yield proxy


class Proxy:
    """Accepts until its block ends; every connection has a thread per direction."""

    def __init__(
        self, broker: str, listener: socket.socket, context: ssl.SSLContext | None
    ) -> None:
        self.delay_seconds = 0.0
        self.num_joins_to_lose = 0
        self._broker_port = int(broker.rpartition(":")[2])
        self._listener = listener
        self._context = context
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self.port: int = listener.getsockname()[1]

    @property
    def servers(self) -> str:
        return f"{HOST}:{self.port}"

    def __enter__(self) -> Proxy:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                self._sockets.append(plain)
                self._start(self._serve, plain)

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _serve(self, plain: socket.socket) -> None:
        with suppress(OSError):
            client = self._context.wrap_socket(plain, server_side=True) if self._context else plain
            broker = socket.create_connection((HOST, self._broker_port))
            self._sockets += [client, broker]
            self._start(self._answers, broker, client)
            while data := client.recv(65536):
                if self.num_joins_to_lose and data[4:6] == JOIN_GROUP:
                    self.num_joins_to_lose -= 1
                else:
                    broker.sendall(data)
            broker.shutdown(socket.SHUT_WR)

    def _answers(self, broker: socket.socket, client: socket.socket) -> None:
        host = HOST.encode()
        true_place = host + struct.pack(">i", self._broker_port)
        our_place = host + struct.pack(">i", self.port)
        with suppress(OSError), broker.makefile("rb") as stream:
            while head := stream.read(4):
                answer = stream.read(struct.unpack(">i", head)[0])
                time.sleep(self.delay_seconds)
                client.sendall(head + answer.replace(true_place, our_place))
