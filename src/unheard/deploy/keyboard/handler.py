"""What one request gets: the page, suggestions, or a refusal in one line.

In: a request on the loopback address. Out: an answer under a policy that forbids everything that is not our own. The Host must be
the one that we gave (a web site that points its own name at 127.0.0.1 gets nothing), the body small, the wait short, and not a
word is logged or stored.
"""

import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from unheard.deploy.keyboard.suggestions import Suggestion

if TYPE_CHECKING:
    from unheard.deploy.keyboard.server import KeyboardServer

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
