"""Limits the total time of a server's responses: a connection that exceeds it is shut down.

A timeout between two bytes does not help against a server that sends a byte every few seconds.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from http.client import HTTPResponse

PAGE_SECONDS: Final = 120.0  # for all pages of an index together
FILE_SECONDS: Final = 60.0  # for a file, plus time for each received byte
SLOWEST: Final = 10_000  # bytes per second


class Patience:
    """A time limit for requests; received bytes extend it if a rate is given."""

    def __init__(self, seconds: float = PAGE_SECONDS, rate: float = 0) -> None:
        self.seconds = seconds
        self._rate = rate
        self._until = time.monotonic() + seconds
        self._stopped = threading.Event()
        self._sockets: list[socket.socket] = []
        self.ended = False  # whether a connection was shut down

    @classmethod
    def of_file(cls) -> Patience:
        """Return the limit for a file, which may be large."""
        return cls(FILE_SECONDS, SLOWEST)

    @property
    def left(self) -> float:
        """Remaining seconds."""
        return self._until - time.monotonic()

    def count(self, number: int) -> None:
        """Extend the time for a number of received bytes, if there is a rate."""
        if self._rate:
            self._until += number / self._rate

    def follow(self, connection: socket.socket) -> None:
        """Add a connection to shut down when the time is over, even during its handshake."""
        self._sockets.append(connection.dup())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Shut down the connections made in this block when the time is over."""
        self._stopped = threading.Event()
        watcher = threading.Thread(target=self._watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self._stopped.set()
            watcher.join()
            while self._sockets:
                self._sockets.pop().close()

    def _watch(self) -> None:
        while not self._stopped.wait(max(0.0, min(self.left, 1.0))):
            if self.left <= 0:
                self.ended = True
                for one in tuple(self._sockets):
                    with suppress(OSError):  # the server may have closed the connection
                        one.shutdown(socket.SHUT_RDWR)
                self._stopped.wait(0.1)  # another connection may be starting


def make_handlers(patience: Patience) -> tuple[urllib.request.BaseHandler, ...]:
    """Return handlers for http and https whose connections are shut down when the time is over."""

    class Plain(http.client.HTTPConnection):
        def connect(self) -> None:
            super().connect()
            patience.follow(self.sock)

    class Secure(http.client.HTTPSConnection, Plain):
        """Registers the socket before the TLS handshake: the order of the base classes matters."""

    class PlainHandler(urllib.request.HTTPHandler):
        def http_open(self, req: urllib.request.Request) -> HTTPResponse:
            return self.do_open(Plain, req)

    class SecureHandler(urllib.request.HTTPSHandler):
        def https_open(self, req: urllib.request.Request) -> HTTPResponse:
            return self.do_open(Secure, req)

    return PlainHandler(), SecureHandler()
