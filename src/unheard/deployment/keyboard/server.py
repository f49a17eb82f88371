"""Serve the keyboard to browsers on this machine only.

    server = KeyboardServer([Suggester(model)], port=8000)
    server.serve_forever()

    GET /               the page, with its scripts, style and icon
    GET /about          the description of each model, as JSON
    POST /suggest       {"text": "see you"} -> {"suggestions": [...], "ahead": [...]}, one item per model

A strict use of Python's `http.server` on the loopback address. Requests select from a fixed list of paths and never
name a file. Connections are limited in number and each has a deadline. The Host header must be the server's own
address, so that a web site which resolves its name to 127.0.0.1 receives nothing (DNS rebinding). The
Content-Security-Policy forbids everything from other origins. Nothing that is typed is logged or stored.

`describe_model` states the privacy guarantee of a model in two sentences for whoever is typing:

    describe_model(model)["headline"]           # 'A guarantee for every person'

Every number comes from the model's privacy statement. Bounds are rounded up, never down.
"""

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from unheard.deployment.keyboard.suggestions import PieceSuggester, Suggester, Suggestion
from unheard.deployment.model import LoadedModel
from unheard.errors import InvalidValue
from unheard.formatting import accountant_title, colour_numbers, epsilon_text, odds_factor, small

STRONG, WEAK = 1.0, 8.0
"""Up to STRONG an epsilon is called strong, above WEAK weak. A convention: the number is always shown too."""


def describe_model(model: LoadedModel) -> dict[str, Any]:
    """The description of a model that the page shows under its name, as JSON data.

    Returns:
        `name`, `kind`, `is_private`, `words` (size of the vocabulary), `grade` (`none`, `weak`, `fair` or `strong`, for
        the colour), `badge`, `headline`, `sentences`, `claim` and `warnings`.
    """
    statement = model.statement
    epsilon, delta = float(statement["claimed"]["epsilon"]), float(statement["delta"])
    grade = "none" if math.isinf(epsilon) else "strong" if epsilon <= STRONG else "fair" if epsilon <= WEAK else "weak"
    sentences = _sentences(grade, epsilon, delta)
    headline = _HEADLINES[grade]
    if grade != "none" and any("REPRODUCIBLE NOISE" in warning for warning in statement["warnings"]):
        grade, headline = "none", _HEADLINES["seeded"]  # the sentences hold against those who do not know the seed
    if model.kind == "personal":
        sentences = ["It has learned from one person's own text, and is for that person alone.", *sentences]
        sentences[1] = f"Of everybody else: {sentences[1][0].lower()}{sentences[1][1:]}"
        grade, headline = "none", _HEADLINES["personal"]
    return {
        "name": model.name,
        "kind": {"run": "trained here", "export": "exported for devices", "personal": "personal"}[model.kind],
        "words": len(model.vocabulary),
        "grade": grade,
        "is_private": math.isfinite(epsilon),
        "badge": "one person's" if model.kind == "personal" else f"ε = {epsilon_text(epsilon)}{_accountant(statement)}",
        "headline": headline,
        "sentences": sentences,
        "claim": statement["claim"],
        "warnings": [w[0].upper() + w[1:] for w in statement["warnings"] if "epsilon is infinite" not in w],
    }


_HEADLINES = {
    "none": "No privacy guarantee",
    "weak": "A guarantee, but a weak one",
    "fair": "A guarantee for every person",
    "strong": "A strong guarantee for every person",
    "seeded": "An experiment: no guarantee against whoever knows the seed",
    "personal": "A personal model",
}


def _accountant(statement: Mapping[str, Any]) -> str:
    """The accountant of the claim, in brackets; nothing for an infinite epsilon, which no accountant computed."""
    claimed = statement["claimed"]
    is_known = math.isfinite(float(claimed["epsilon"])) and "accountant" in claimed
    return f" ({accountant_title(claimed['accountant'])})" if is_known else ""


def _sentences(grade: str, epsilon: float, delta: float) -> list[str]:
    """Explain the guarantee to whoever types."""
    if grade == "none":
        return ["It was trained without protection: what one person wrote may be read out of it."]
    sentences = [
        "Whether or not a person took part, with everything they wrote, no outcome becomes more than "
        f"{odds_factor(epsilon)} times as likely by it, up to a remainder of δ = {small(delta)}."
    ]
    if grade == "weak":
        sentences.append("That factor is so large that the guarantee says little by itself.")
    return sentences


MAX_BODY = 32 * 1024
"""Bytes of a request body."""
REQUEST_SECONDS = 5.0
"""From the start of a request to its last byte; a slower connection is closed."""
IDLE_SECONDS = 20.0
"""The longest pause between two requests on one connection."""

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
    """Answers one connection. Everything but the requests listed above is refused with one line of text."""

    server: "KeyboardServer"  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    # Send header and body together: in two parts, the second may wait 40 ms for the acknowledgement of the first.
    wbufsize = 1 << 18
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Give a new connection a short time for its first request."""
        super().setup()
        self._seconds_to_start = REQUEST_SECONDS

    def handle_one_request(self) -> None:
        """Set the deadline for the start of the request, then handle it."""
        self.server.expect(self.connection, self._seconds_to_start)
        super().handle_one_request()
        self._seconds_to_start = IDLE_SECONDS  # the client has sent one valid request

    def parse_request(self) -> bool:
        """Read the headers before the deadline, and refuse another Host or Origin."""
        self.server.expect(self.connection, REQUEST_SECONDS)
        if not super().parse_request():
            return False
        # The answers of HTTP/0.9 have no headers, and so none of those that protect the page.
        if self.request_version == "HTTP/0.9":
            self.send_error(400)
            return False
        hosts, origins = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
        if len(hosts) != 1 or hosts[0] not in self.server.hosts:
            self._refuse(421, "this server answers to its own address only")
            return False
        if not {*origins} <= {f"http://{host}" for host in self.server.hosts}:
            self._refuse(403, "other pages may not ask")
            return False
        return True

    def do_GET(self) -> None:
        """Answer with a part of the page."""
        part = self.server.page.get(self.path)
        if part is None:
            self._refuse(404, "no such page")
        else:
            self._answer(200, *part)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Answer a text with the suggestions of each model."""
        if self.path != "/suggest":
            return self._refuse(404, "no such page")
        text = self._text()
        if text is None:
            return None
        now = [_plain(suggester.suggest(text)) for suggester in self.server.suggesters]
        ahead = [
            None if known is None else {key: _plain(suggestions) for key, suggestions in known.items()}
            for known in (suggester.suggest_ahead(text) for suggester in self.server.suggesters)
        ]
        answer = json.dumps({"suggestions": now, "ahead": ahead}).encode()
        return self._answer(200, answer, "application/json")

    def _text(self) -> str | None:
        """The text of a well-formed request; None after a refusal."""
        length = self.headers.get("Content-Length", "")
        if self.headers.get("Transfer-Encoding") or not (length.isascii() and length.isdigit()):
            return self._refuse(411, "say how long the body is")
        if len(length) > 9 or int(length) > MAX_BODY:
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
        # Half a surrogate pair, which cannot be encoded, is replaced.
        return text.encode("utf-8", "replace").decode("utf-8")

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        """Send a response; HEAD gets its headers only."""
        self.send_response_only(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refuse(self, status: int, why: str) -> None:
        """Refuse a request and close the connection. The answer repeats nothing that the client sent."""
        self.close_connection = True
        self._answer(status, f"{why}\n".encode(), "text/plain; charset=utf-8")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse malformed requests and unknown methods like any other, without the HTML page of http.server."""
        self.close_connection = True
        if getattr(self, "request_version", "HTTP/0.9") == "HTTP/0.9":
            self.request_version = "HTTP/1.1"
        self.command = getattr(self, "command", None) or "GET"
        self._answer(int(code), b"refused\n", "text/plain; charset=utf-8")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a log of requests would be a record of what was typed."""


def _plain(suggestions: Sequence[Suggestion]) -> list[dict[str, Any]]:
    """Suggestions as values that JSON can hold."""
    return [
        {"word": suggestion.word, "share": round(suggestion.share, 4)}
        | ({"follows": True} if suggestion.follows else {})
        for suggestion in suggestions
    ]


MAX_CONNECTIONS = 64
"""Simultaneous connections; a further one is answered with 503. A browser opens six."""
CLOSING_SECONDS = 2.0
"""How long closing the server waits for requests that are being answered."""
SCRIPTS = ("keyboard", "keys", "state", "suggesting", "typing")
PAGE = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/keyboard.css": ("keyboard.css", "text/css; charset=utf-8"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in SCRIPTS},
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class KeyboardServer(ThreadingHTTPServer):
    """The server of the keyboard: one thread per connection, at most `MAX_CONNECTIONS`.

    Args:
        suggesters: One or two models.
        port: The port; 0 selects a free one.

    Raises:
        InvalidValue: The port cannot be used.
    """

    daemon_threads = True
    request_queue_size = 1024
    allow_reuse_address = True

    def __init__(self, suggesters: Sequence[Suggester | PieceSuggester], port: int = 0) -> None:
        self.suggesters = suggesters
        folder = files("unheard.deployment.keyboard") / "page"
        # Read once at the start, so that no request names a file.
        self.page = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in PAGE.items()}
        models = [describe_model(suggester.model) for suggester in suggesters]
        for model, number in zip(models, colour_numbers([model["is_private"] for model in models]), strict=True):
            model["colour"] = number
        self.page["/about"] = (json.dumps({"models": models}).encode(), "application/json")
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._deadlines: dict[socket.socket, float] = {}
        try:
            super().__init__(("127.0.0.1", port), KeyboardHandler)
        except OSError as error:
            raise InvalidValue(f"Port {port} cannot be used ({error.strerror}): choose another --port.") from None
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    @property
    def address(self) -> str:
        """The URL of the page."""
        return f"http://127.0.0.1:{self.server_port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or refuse it if there are too many."""
        if not self._free.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.setblocking(False)
                request.send(_UNAVAILABLE)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except Exception:  # no thread could be started; after Ctrl-C there may be one, which releases the slot itself
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection and release its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._deadlines.pop(request, None)
            self._free.release()

    def expect(self, connection: socket.socket, seconds: float) -> None:
        """Set the time by which the current part of a request must be complete.

        Args:
            connection: The socket of the request.
            seconds: The time from now. A connection that is late is closed.
        """
        self._deadlines[connection] = time.monotonic() + seconds

    def service_actions(self) -> None:
        """Close connections that are past their deadline; called twice a second.

        A socket timeout is not sufficient: a client that sends a byte now and then never reaches it.
        """
        now = time.monotonic()
        for connection, deadline in list(self._deadlines.items()):
            if now > deadline:
                self._deadlines.pop(connection, None)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def server_close(self) -> None:
        """Close all connections and wait up to `CLOSING_SECONDS` for their threads.

        A thread that is inside torch when the interpreter ends would abort the process.
        """
        super().server_close()
        for connection in list(self._deadlines):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + CLOSING_SECONDS
        for _ in range(MAX_CONNECTIONS):
            if not self._free.acquire(timeout=max(0.0, until - time.monotonic())):
                break

    def handle_error(self, request: Any, client_address: Any) -> None:
        """End the connection after any error, without printing anything that was typed."""
