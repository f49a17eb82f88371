"""Serve the keyboard to browsers on this machine only.

    server = KeyboardServer([Suggester(model)], port=8000)
    server.serve_forever()

    GET /               the page, with its scripts, style and icon
    GET /about          the description of each model, as JSON
    POST /suggest       {"text": "see you"} -> {"suggestions": [...], "ahead": [...]}, one item per model

The server uses Python's `http.server` and listens on the loopback address only. A request names an entry of a fixed
list, never a file. The number of connections is limited, and each has a deadline. The Host header must be the server's
own address, so that a web site whose name resolves to 127.0.0.1 gets no answer (DNS rebinding). The
Content-Security-Policy forbids the page to load anything from other origins. Nothing that is typed is logged or stored.

`describe_model` explains the privacy guarantee of a model to the person who types:

    describe_model(model)["headline"]           # 'A guarantee for every person'

Every number comes from the model's privacy statement. The factor on the odds is rounded up.
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
"""An epsilon up to STRONG is called strong, and an epsilon above WEAK is called weak. These limits are a convention, so
the page always shows the epsilon too."""


def describe_model(model: LoadedModel) -> dict[str, Any]:
    """Return the description of a model that the page shows, as JSON data.

    Returns:
        A dictionary with `name`, `kind`, `is_private`, `words` (the size of the vocabulary), `grade` (`none`, `weak`,
        `fair` or `strong`; decides the colour of the badge), `badge` (epsilon in a few characters), `headline`,
        `sentences`, `claim` and `warnings`.
    """
    statement = model.statement
    epsilon, delta = float(statement["claimed"]["epsilon"]), float(statement["delta"])
    grade = "none" if math.isinf(epsilon) else "strong" if epsilon <= STRONG else "fair" if epsilon <= WEAK else "weak"
    sentences = _sentences(grade, epsilon, delta)
    headline = _HEADLINES[grade]
    if grade != "none" and any("REPRODUCIBLE NOISE" in warning for warning in statement["warnings"]):
        # The sentences stay, because they hold against everyone who does not know the seed.
        grade, headline = "none", _HEADLINES["seeded"]
    if math.isfinite(epsilon) and any("SYNTHETIC TEXT" in warning for warning in statement["warnings"]):
        grade, headline = "none", _HEADLINES["synthetic"]
    if model.kind == "personal":
        sentences = ["It has learned from one person's own text, and is for that person alone.", *sentences]
        sentences[1] = f"For everybody else: {sentences[1][0].lower()}{sentences[1][1:]}"
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
    "seeded": "An experiment: no guarantee against anyone who knows the seed",
    "synthetic": "No guarantee for the people from whose text the synthetic text was made",
    "personal": "A personal model",
}


def _accountant(statement: Mapping[str, Any]) -> str:
    """Return the accountant of the claim in brackets; an empty string if epsilon is infinite."""
    claimed = statement["claimed"]
    is_known = math.isfinite(float(claimed["epsilon"])) and "accountant" in claimed
    return f" ({accountant_title(claimed['accountant'])})" if is_known else ""


def _sentences(grade: str, epsilon: float, delta: float) -> list[str]:
    """Return sentences that explain the guarantee to the person who types.

    Args:
        grade: The grade of `describe_model`.
        epsilon: The claimed epsilon.
        delta: The delta of the claim.
    """
    if grade == "none":
        return ["It was trained without protection: what one person wrote may be read out of it."]
    sentences = [
        "Whether or not a person took part, with everything they wrote, makes no outcome more than "
        f"{odds_factor(epsilon)} times as likely, except for a remainder of δ = {small(delta)}."
    ]
    if grade == "weak":
        sentences.append("That factor is so large that the guarantee says little by itself.")
    return sentences


MAX_BODY = 32 * 1024
"""The largest number of bytes in the body of a request."""
REQUEST_SECONDS = 5.0
"""The number of seconds from the start of a request to its last byte. A slower connection is closed."""
IDLE_SECONDS = 20.0
"""The largest number of seconds between two requests on one connection."""

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
"""The headers of every answer. They forbid the browser to load anything from other origins, to show the page inside
another page, and to store an answer."""


class KeyboardHandler(BaseHTTPRequestHandler):
    """Answers the requests of one connection.

    Requests other than those in the module's docstring are refused with one line of text.
    """

    server: "KeyboardServer"  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    # Send headers and body in one packet. In two, the body may wait 40 ms for the acknowledgement of the headers.
    wbufsize = 1 << 18
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Set a short deadline for the first request of a new connection."""
        super().setup()
        self._seconds_to_start = REQUEST_SECONDS

    def handle_one_request(self) -> None:
        """Set the deadline by which the request must start, then handle the request."""
        self.server.expect(self.connection, self._seconds_to_start)
        super().handle_one_request()
        self._seconds_to_start = IDLE_SECONDS  # after its first request, a browser may keep the connection open

    def parse_request(self) -> bool:
        """Read the headers within the deadline. Refuse a request whose Host or Origin is not this server.

        Returns:
            Whether the request may be answered.
        """
        self.server.expect(self.connection, REQUEST_SECONDS)
        if not super().parse_request():
            return False
        # An answer in HTTP/0.9 has no headers, so it would lack the headers that protect the page.
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
        """Answer with a file of the page, or with the descriptions of the models."""
        part = self.server.page.get(self.path)
        if part is None:
            self._refuse(404, "no such page")
        else:
            self._answer(200, *part)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Answer a text with the suggestions of each model, now and after each key that may follow."""
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
        """Return the text in the body of a request; None if the request was refused."""
        length = self.headers.get("Content-Length", "")
        if self.headers.get("Transfer-Encoding") or not (length.isascii() and length.isdigit()):
            return self._refuse(411, "the header Content-Length is missing or not a number")
        if len(length) > 9 or int(length) > MAX_BODY:
            return self._refuse(413, "the body is too long")
        if self.headers.get_content_type() != "application/json":
            return self._refuse(415, "the Content-Type must be application/json")
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            return None
        try:
            text = json.loads(body)["text"]
        except (ValueError, KeyError, TypeError, RecursionError):
            text = None
        if not isinstance(text, str):
            return self._refuse(400, 'the body must be JSON like {"text": "see you"}')
        # JSON can contain half of a surrogate pair, which cannot be encoded. Replace it.
        return text.encode("utf-8", "replace").decode("utf-8")

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        """Send an answer. A HEAD request gets only the headers."""
        self.send_response_only(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refuse(self, status: int, why: str) -> None:
        """Send an error status with one line of text and close the connection. The line repeats nothing of the request.

        Args:
            status: The HTTP status.
            why: The line of text.
        """
        self.close_connection = True
        self._answer(status, f"{why}\n".encode(), "text/plain; charset=utf-8")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a malformed request or an unknown method with one word, instead of the HTML page of http.server."""
        self.close_connection = True
        if getattr(self, "request_version", "HTTP/0.9") == "HTTP/0.9":
            self.request_version = "HTTP/1.1"
        self.command = getattr(self, "command", None) or "GET"
        self._answer(int(code), b"refused\n", "text/plain; charset=utf-8")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because a log of requests would show when each key was typed."""


def _plain(suggestions: Sequence[Suggestion]) -> list[dict[str, Any]]:
    """Return suggestions as JSON data. `follows` is left out if it is false."""
    return [
        {"word": suggestion.word, "share": round(suggestion.share, 4)}
        | ({"follows": True} if suggestion.follows else {})
        for suggestion in suggestions
    ]


MAX_CONNECTIONS = 64
"""The largest number of simultaneous connections; a further one is answered with 503. A browser opens six."""
CLOSING_SECONDS = 2.0
"""The number of seconds for which `KeyboardServer.server_close` waits for requests that are being answered."""
SCRIPTS = ("keyboard", "keys", "state", "suggesting", "typing")
"""The names of the page's JavaScript files."""
PAGE = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/keyboard.css": ("keyboard.css", "text/css; charset=utf-8"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in SCRIPTS},
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""The file and the content type for each path of the page."""
_UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class KeyboardServer(ThreadingHTTPServer):
    """Serves the keyboard page on 127.0.0.1, with one thread per connection and at most `MAX_CONNECTIONS`.

    Args:
        suggesters: The suggesters of one or two models.
        port: The port; 0 selects a free one.

    Raises:
        InvalidValue: The port is in use or not allowed.
    """

    daemon_threads = True
    request_queue_size = 1024
    allow_reuse_address = True

    def __init__(self, suggesters: Sequence[Suggester | PieceSuggester], port: int = 0) -> None:
        self.suggesters = suggesters
        folder = files("unheard.deployment.keyboard") / "page"
        # All files are read here, so that no request can make the server open a file.
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
        """Start a thread for a connection. If there are too many connections, answer with 503 instead."""
        if not self._free.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.setblocking(False)
                request.send(_UNAVAILABLE)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except Exception:
            # No thread was started. Ctrl-C is not caught here, because then the thread may run and release the slot.
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection in its thread, then allow another connection in its place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._deadlines.pop(request, None)
            self._free.release()

    def expect(self, connection: socket.socket, seconds: float) -> None:
        """Set the deadline of a connection. `service_actions` closes a connection that is past its deadline.

        Args:
            connection: The socket of the connection.
            seconds: The number of seconds from now to the deadline.
        """
        self._deadlines[connection] = time.monotonic() + seconds

    def service_actions(self) -> None:
        """Close connections that are past their deadline. `serve_forever` calls this twice a second.

        A socket timeout is not sufficient, because it starts again with each byte that a slow client sends.
        """
        now = time.monotonic()
        for connection, deadline in list(self._deadlines.items()):
            if now > deadline:
                self._deadlines.pop(connection, None)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def server_close(self) -> None:
        """Close the server and all connections, and wait up to `CLOSING_SECONDS` for their threads.

        If a thread were still computing in torch when the interpreter exits, the process would abort.
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
        """Print nothing after an error in a connection, because a traceback could contain what was typed."""
