"""Serves the keyboard to this machine's own browser, and to nobody else.

In: suggesters. Out: a page, and suggestions for a text (handler.py). Python's own http.server on the loopback address, made strict:
a fixed list of addresses and no files, a bounded number of connections, a deadline for each, and nothing printed when one breaks.
What one request gets: the page, suggestions, or a refusal in one line.

In: a request on the loopback address. Out: an answer under a policy that forbids everything that is not our own. The Host must be
the one that we gave (a web site that points its own name at 127.0.0.1 gets nothing), the body small, the wait short, and not a
word is logged or stored.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from unheard.deployment.keyboard.promises import about
from unheard.deployment.keyboard.suggestions import Suggester, Suggestion
from unheard.errors import InvalidValue

if TYPE_CHECKING:
    pass

LONGEST_BODY = 32 * 1024
SECONDS_TO_ASK = 5.0
"""From a request's first moment to its last byte; who takes longer is hung up on."""
SECONDS_IDLE = 20.0
"""Between two requests on one connection."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class KeyboardHandler(BaseHTTPRequestHandler):
    """GET the page, POST a text to /suggest. Everything else is refused in one line."""

    server: "KeyboardServer"  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = SECONDS_IDLE
    # Head and body go out together: in two parts, the second may wait 40 ms for the first to be acknowledged.
    wbufsize = 1 << 18
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._seconds_to_begin = SECONDS_TO_ASK

    def handle_one_request(self) -> None:
        self.server.expect(self.connection, self._seconds_to_begin)
        super().handle_one_request()
        self._seconds_to_begin = SECONDS_IDLE  # it has asked properly once

    def parse_request(self) -> bool:
        """The first line is here; the rest must follow soon."""
        self.server.expect(self.connection, SECONDS_TO_ASK)
        if not super().parse_request():
            return False
        hosts, origin = self.headers.get_all("Host", []), self.headers.get("Origin")
        if len(hosts) != 1 or hosts[0] not in self.server.hosts:
            self._refuse(421, "this server answers to its own address only")
            return False
        if origin is not None and origin not in {f"http://{host}" for host in self.server.hosts}:
            self._refuse(403, "other pages may not ask")
            return False
        return True

    def do_GET(self) -> None:
        found = self.server.page.get(self.path)
        if found is None:
            self._refuse(404, "no such page")
        else:
            self._answer(200, *found)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        if self.path != "/suggest":
            return self._refuse(404, "no such page")
        text = self._text()
        if text is None:
            return None
        now = [_plain(suggester.suggest(text)) for suggester in self.server.suggesters]
        ahead = [{k: _plain(v) for k, v in suggester.ahead(text).items()} for suggester in self.server.suggesters]
        answer = json.dumps({"suggestions": now, "ahead": ahead}).encode()
        return self._answer(200, answer, "application/json")

    def _text(self) -> str | None:
        """The text of a well-formed request; None after a refusal."""
        length = self.headers.get("Content-Length", "")
        if self.headers.get("Transfer-Encoding") or not (length.isascii() and length.isdigit()):
            return self._refuse(411, "say how long the body is")
        if len(length) > 9 or int(length) > LONGEST_BODY:
            return self._refuse(413, "too long")
        if self.headers.get_content_type() != "application/json":
            return self._refuse(415, "application/json is wanted")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            return None
        try:
            text = json.loads(body)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            return self._refuse(400, 'a body like {"text": "see you"} is wanted')
        return text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair is no text

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        self.send_response_only(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refuse(self, status: int, why: str) -> None:
        """What the client sent is not looked at further, nor repeated to it."""
        self.close_connection = True
        self._answer(status, f"{why}\n".encode(), "text/plain; charset=utf-8")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Malformed requests, unknown methods: as any other refusal, without http.server's page about itself."""
        self.close_connection = True
        if getattr(self, "request_version", "HTTP/0.9") == "HTTP/0.9":
            self.request_version = "HTTP/1.1"
        self.command = getattr(self, "command", None) or "GET"
        self._answer(int(code), b"refused\n", "text/plain; charset=utf-8")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged: a log of requests is a record of typing."""


def _plain(suggestions: Sequence[Suggestion]) -> list[dict[str, Any]]:
    return [{"word": one.word, "share": round(one.share, 4)} for one in suggestions]


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
        folder = files("unheard.deployment.keyboard") / "page"
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
