"""Serves the keyboard to this machine's own browser, and to nobody else.

In: suggesters. Out: a page, and suggestions for a text (handler.py). Python's own http.server on the loopback address, made strict:
a fixed list of addresses and no files, a bounded number of connections, a deadline for each, and nothing printed when one breaks.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Sequence
from http.server import ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from unheard.deploy.keyboard.handler import KeyboardHandler
from unheard.deploy.keyboard.suggestions import Suggester
from unheard.deploy.keyboard.words import about
from unheard.errors import InvalidValue

MOST_CONNECTIONS = 64
"""At once; the next one is told to come back. A browser opens six."""
SCRIPTS = ("keyboard", "keys", "state", "suggesting", "typing")
PAGE = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/keyboard.css": ("keyboard.css", "text/css; charset=utf-8"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in SCRIPTS},
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_COME_BACK = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class KeyboardServer(ThreadingHTTPServer):
    """One thread for each connection, and no more than MOST_CONNECTIONS of them."""

    daemon_threads = True
    request_queue_size = 1024
    allow_reuse_address = True

    def __init__(self, suggesters: Sequence[Suggester], port: int = 0) -> None:
        self.suggesters = suggesters
        folder = files("unheard.deploy.keyboard") / "page"
        # Read now, once: no request ever names a file.
        self.page = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in PAGE.items()}
        models = [about(one.model) for one in suggesters]
        self.page["/about"] = (json.dumps({"models": models}).encode(), "application/json")
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._deadlines: dict[socket.socket, float] = {}
        try:
            super().__init__(("127.0.0.1", port), KeyboardHandler)
        except OSError as trouble:
            raise InvalidValue(f"Port {port} cannot be used ({trouble.strerror}): choose another --port.") from None
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.setblocking(False)
                request.send(_COME_BACK)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._deadlines.pop(request, None)
            self._free.release()

    def expect(self, connection: socket.socket, seconds: float) -> None:
        """Something must be complete on this connection by then."""
        self._deadlines[connection] = time.monotonic() + seconds

    def service_actions(self) -> None:
        """Called twice a second: hang up on those who are too slow. A timeout of the socket alone would not do: a client that sends
        a byte now and then never reaches it."""
        now = time.monotonic()
        for connection, deadline in list(self._deadlines.items()):
            if now > deadline:
                self._deadlines.pop(connection, None)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up, or anything else: this connection ends, and nothing of what was typed is printed."""
