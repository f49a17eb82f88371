"""The keyboard server: hostile clients are refused or served without a crash, and nothing typed is stored."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from unheard.deployment.keyboard import server as module
from unheard.deployment.keyboard.server import MAX_BODY, MAX_CONNECTIONS, PAGE, KeyboardServer
from unheard.deployment.keyboard.suggestions import Suggester
from unheard.errors import InvalidValue


@pytest.fixture(scope="module")
def server(two_models):
    made = KeyboardServer([Suggester(model) for model in two_models])
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def ask(server, method="POST", path="/suggest", body='{"text": "how are "}', **headers):
    """Send one request on a new connection and return status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    given = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    try:
        connection.request(method, path, body if method == "POST" else None, given)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def raw(server, *pieces: bytes, wait: float = 0.0) -> bytes:
    """Send exactly these bytes and return the answer."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as client:
        for piece in pieces:
            client.sendall(piece)
            time.sleep(wait)
        client.shutdown(socket.SHUT_WR)
        got = b""
        with contextlib.suppress(ConnectionError):
            while part := client.recv(65536):
                got += part
        return got


def still_serves(server) -> bool:
    return ask(server)[0] == 200


def test_a_text_gets_three_suggestions_of_each_model(server):
    status, headers, body = ask(server)
    assert status == 200
    assert headers["Content-Type"] == "application/json"
    found = json.loads(body)["suggestions"]
    assert [len(row) for row in found] == [3, 3]
    assert all(set(one) == {"word", "share"} for row in found for one in row)
    foreseen = json.loads(body)["ahead"]
    assert [row["t"][0] for row in foreseen] == [
        row[0] for row in json.loads(ask(server, body='{"text": "how are t"}')[2])["suggestions"]
    ]


def test_the_server_listens_on_the_loopback_address_only(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("path", [*PAGE, "/about"])
def test_every_answer_forbids_everything_that_is_not_our_own(server, path):
    status, headers, body = ask(server, "GET", path)
    assert status == 200
    assert body
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy
    for name, value in (
        ("X-Content-Type-Options", "nosniff"),
        ("Cache-Control", "no-store"),
        ("X-Frame-Options", "DENY"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Referrer-Policy", "no-referrer"),
    ):
        assert headers[name] == value
    assert "Server" not in headers


def test_the_page_names_nothing_outside_itself():
    from importlib.resources import files

    for name, _ in PAGE.values():
        text = (files("unheard.deployment.keyboard") / "page" / name).read_text()
        for outside in (
            "http://",
            "https://",
            "//cdn",
            "@import",
            "eval(",
            "innerHTML",
            "localStorage",
            "sessionStorage",
        ):
            assert outside not in text.replace("http://www.w3.org/2000/svg", ""), (name, outside)
        assert "<style" not in text
        assert " style=" not in text
        assert " on" + "click=" not in text


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost", "", "[::1]:{port}"]
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("POST", "/suggest")])
def test_another_host_gets_nothing(server, host, method, path):
    """A web site whose name points at 127.0.0.1 (DNS rebinding) sends its own name."""
    status, _, body = ask(server, method, path, Host=host.format(port=server.server_port))
    assert status == 421
    assert b"suggest" not in body


def test_no_host_or_two_are_refused(server):
    assert b" 421 " in raw(server, b"GET / HTTP/1.1\r\n\r\n").split(b"\r\n")[0]
    host = f"Host: 127.0.0.1:{server.server_port}\r\n".encode()
    assert b" 421 " in raw(server, b"GET / HTTP/1.1\r\n" + host + b"Host: evil.example\r\n\r\n").split(b"\r\n")[0]
    assert b" 200 " in raw(server, b"GET / HTTP/1.1\r\n" + host + b"Connection: close\r\n\r\n").split(b"\r\n")[0]


def test_localhost_is_our_name_too(server):
    assert ask(server, Host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1"])
def test_requests_of_another_page_are_refused(server, origin):
    assert ask(server, Origin=origin.format(port=server.server_port))[0] == 403


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_only_the_servers_own_addresses_are_hosts_and_origins(server, name):
    """Not a name that begins or ends with an address, is part of one, or differs in the port or the scheme."""
    port = str(server.server_port)
    own = f"{name}:{port}"
    others = [
        *(f"{own}.example.com", f"{own}0", f"{own}:80", f"{own}/", f"{own}@example.com", f"{own},example.com"),
        *(f"example.com:{own}", f"x{own}", f"www.{own}", f"user@{own}", f"{name}.example.com:{port}"),
        *(name, f"{name}:", f"{name}:{port[:-1]}", f"{name}:{int(port) + 1}", f":{port}", port, "", "*", "null"),
        *(f"0.0.0.0:{port}", f"127.0.0.2:{port}", f"[::1]:{port}", f"127.1:{port}", f"{own}%00", f"{own}?", f"{own}#"),
    ]
    for other in others:
        assert ask(server, Host=other)[0] == 421, other
        for scheme in ("http://", ""):
            assert ask(server, Origin=f"{scheme}{other}")[0] == 403, other
    for scheme in ("https://", "ws://", "file://", "//", "", "HTTP://", "http:", " http:// "):
        assert ask(server, Origin=f"{scheme}{own}")[0] == 403, scheme
    for host in ("127.0.0.1", "localhost"):  # a page under either of the two names is our own page
        assert ask(server, Host=f"{host}:{port}", Origin=f"http://{own}")[0] == 200


def test_a_second_origin_counts_too_and_answers_always_have_headers(server):
    own = f"127.0.0.1:{server.server_port}"
    head = f"Host: {own}\r\nOrigin: http://{own}\r\n".encode()
    asked = b"GET / HTTP/1.1\r\n" + head + b"Origin: http://evil.example\r\n\r\n"
    assert b" 403 " in raw(server, asked).split(b"\r\n")[0]
    assert b" 400 " in raw(server, b"GET /\r\n" + head + b"\r\n").split(b"\r\n")[0]


def test_requests_of_our_own_page_are_answered(server):
    assert ask(server, Origin=f"http://127.0.0.1:{server.server_port}")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "//etc/passwd",
        "/page/../../server.py",
        "/keyboard.js/../server.py",
        "/keyboard.js%00.html",
        "/keyboard.js?x",
        "http://127.0.0.1/keyboard.js",
        "/suggest",
        "*",
    ],
)
def test_no_path_reaches_a_file(server, path):
    status, _, body = ask(server, "GET", path)
    assert status in (404, 421)
    assert body in (b"no such page\n", b"this server answers to its own address only\n")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "BREW"])
def test_other_methods_are_refused_without_repeating_them(server, method):
    status, headers, body = ask(server, method, "/<script>")
    assert status in (404, 501)
    assert b"script" not in body
    assert "Content-Security-Policy" in headers


def test_head_has_no_body(server):
    status, headers, body = ask(server, "HEAD", "/")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("", 400),
        ("{}", 400),
        ("[]", 400),
        ("null", 400),
        ('{"text": 3}', 400),
        ('{"text": ["a"]}', 400),
        ("{", 400),
        (b"\xff\xfe", 400),
        ("[" * 20_000, 400),
        ('{"text": "\\ud800 \\u0000 \\u202e"}', 200),
        ('{"text": ""}', 200),
        (json.dumps({"text": "w" * 20_000}), 200),
        (json.dumps({"text": "👩‍👩‍👧 " * 300}), 200),
        (json.dumps({"text": "a\u0301" * 2_000}), 200),
    ],
)
def test_any_request_body_gets_an_answer(server, body, status):
    assert ask(server, body=body)[0] == status
    assert still_serves(server)


def test_a_body_needs_a_type_and_a_length(server):
    assert ask(server, Content_Type="text/plain")[0] == 415
    head = (
        f"POST /suggest HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nContent-Type: application/json\r\n".encode()
    )
    for length in (b"", b"Content-Length: -5\r\n", b"Content-Length: 1e3\r\n", b"Transfer-Encoding: chunked\r\n"):
        assert b" 411 " in raw(server, head + length + b"\r\n").split(b"\r\n")[0]
    assert b" 413 " in raw(server, head + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n").split(b"\r\n")[0]
    assert still_serves(server)


def test_a_huge_body_is_refused_before_it_is_read(server):
    head = f"POST /suggest HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {10**9}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as client:
        client.sendall(head.encode())
        assert b" 413 " in client.recv(200)
    assert ask(server, body=json.dumps({"text": "x" * MAX_BODY}))[0] == 413
    assert still_serves(server)


@pytest.mark.parametrize(
    "bytes_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
        b"\x00" * 3000,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost" + b"a" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 500 + b"\r\n",
        b"G" * 70_000 + b"\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\n\xff\xfe: \x80\r\n\r\n",
        b"",
    ],
)
def test_malformed_requests_are_refused(server, bytes_):
    answer = raw(server, bytes_)
    assert b" 200 " not in answer[:20]
    assert b"<html" not in answer
    assert still_serves(server)


def test_slow_and_silent_clients_are_hung_up_on(two_models, monkeypatch):
    """One client sends single bytes slowly, one stops in its headers, one in its body, and one sends nothing.

    A timeout of each read would not end the first, so the server limits the whole request."""
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.6)
    made = KeyboardServer([Suggester(two_models[0])])
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    head = (
        f"POST /suggest HTTP/1.1\r\nHost: 127.0.0.1:{made.server_port}\r\nContent-Type: application/json\r\n".encode()
    )
    begun = [b"", b"GET / HTT", head, head + b"Content-Length: 50\r\n\r\n{"]
    clients = [socket.create_connection(("127.0.0.1", made.server_port), timeout=10) for _ in range(len(begun) + 1)]
    try:
        for client, part in zip(clients, begun, strict=False):
            client.sendall(part)
        began, gone = time.monotonic(), False
        while not gone and time.monotonic() - began < 8:
            time.sleep(0.1)
            try:
                clients[-1].sendall(b"X")
            except OSError:
                gone = True
        assert gone
        for client in clients[:-1]:
            with contextlib.suppress(ConnectionError):
                assert client.recv(10) in (b"", b"HTTP/1.1 4")
        assert ask(made)[0] == 200
    finally:
        for client in clients:
            client.close()
        made.shutdown()
        made.server_close()


def test_those_who_hold_connections_open_do_not_stop_it_for_long(two_models, monkeypatch):
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.5)
    made = KeyboardServer([Suggester(two_models[0])])
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    held = [socket.create_connection(("127.0.0.1", made.server_port)) for _ in range(MAX_CONNECTIONS + 10)]
    try:
        time.sleep(0.2)
        assert _status(made) in (503, 0)  # the server is full: it answers 503 or closes the connection
        deadline = time.monotonic() + 8
        while (status := _status(made)) != 200 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert status == 200
    finally:
        for one in held:
            one.close()
        made.shutdown()
        made.server_close()


def _status(server) -> int:
    try:
        return ask(server)[0]
    except OSError:
        return 0
    except http.client.HTTPException:
        return 0


@pytest.mark.system
def test_a_thousand_requests_at_once_are_served_or_refused(server):
    barrier = threading.Barrier(250)

    def four(i: int) -> list[int]:
        barrier.wait(timeout=30)
        return [_status(server) for _ in range(4)]

    with ThreadPoolExecutor(max_workers=250) as pool:
        found = Counter(status for row in pool.map(four, range(250)) for status in row)
    assert sum(found.values()) == 1000
    assert set(found) <= {200, 503, 0}
    assert found[200] > 0
    assert still_serves(server)


def test_a_thousand_connections_opened_before_any_asks_are_served_or_refused(server):
    host = f"Host: 127.0.0.1:{server.server_port}\r\nConnection: close\r\n\r\n"
    clients = [socket.create_connection(("127.0.0.1", server.server_port), timeout=20) for _ in range(1000)]
    found = Counter()
    try:
        for client in clients:
            with contextlib.suppress(OSError):
                client.sendall(f"GET /about HTTP/1.1\r\n{host}".encode())
        for client in clients:
            try:
                found[client.recv(12)[9:12]] += 1
            except OSError:
                found[b"gone"] += 1
    finally:
        for client in clients:
            client.close()
    assert set(found) <= {b"200", b"503", b"", b"gone"}
    assert found[b"200"] >= 1
    assert still_serves(server)


def test_nothing_typed_is_printed_or_written(server, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    secret = "xylophonequartz"
    ask(server, body=json.dumps({"text": secret}))
    ask(server, "GET", f"/{secret}")
    raw(server, f"GET /{secret} HTTP/1.1\r\n".encode())
    out, err = capfd.readouterr()
    assert secret not in out + err
    assert not list(tmp_path.iterdir())
    assert not any(secret in str(value) for value in vars(server).values())


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, KeyError, RecursionError, MemoryError, OSError])
@pytest.mark.parametrize("place", ["suggest", "suggest_ahead", "an answer"])
@pytest.mark.filterwarnings("error")
def test_an_error_while_a_text_is_answered_prints_nothing_of_it(server, monkeypatch, capfd, caplog, kind, place):
    """A traceback has the message of the error, which may have the text, and shows when somebody typed."""
    secret = "xylophonequartz"

    def fail(*given):
        raise kind(f"cannot go on after {given} {secret}")

    failing = SimpleNamespace(suggest=lambda text: [], suggest_ahead=lambda text: None)
    if place == "an answer":
        monkeypatch.setattr(module.KeyboardHandler, "_answer", fail)
    else:
        monkeypatch.setattr(failing, place, fail)
    monkeypatch.setattr(server, "suggesters", [failing])
    with caplog.at_level("DEBUG"), contextlib.suppress(http.client.HTTPException, ConnectionError):
        assert ask(server, body=json.dumps({"text": secret}))[0] >= 500
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    monkeypatch.undo()
    assert still_serves(server)


def test_no_request_error_or_timeout_is_logged(capfd):
    """A line for each request, or for each pause, would show when somebody typed."""
    handler = object.__new__(module.KeyboardHandler)
    handler.client_address, handler.requestline = ("127.0.0.1", 1), "POST /suggest"
    handler.log_request(200, 10)
    handler.log_error("Request timed out: %r", TimeoutError())
    handler.log_message("%s", "how are")
    assert capfd.readouterr() == ("", "")


def test_a_port_in_use_is_a_refusal_with_advice(server, two_models):
    with pytest.raises(InvalidValue, match="choose another --port"):
        KeyboardServer([Suggester(two_models[0])], server.server_port)


def test_ctrl_c_while_a_thread_starts_ends_the_server(two_models, monkeypatch):
    """The thread may end before the main thread continues."""
    server = KeyboardServer([Suggester(model) for model in two_models])
    start = threading.Thread.start

    def start_and_interrupt(thread):
        start(thread)
        thread.join()
        raise KeyboardInterrupt

    with server, socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as client:
        client.shutdown(socket.SHUT_WR)
        monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            server.serve_forever()
        monkeypatch.undo()


def test_closing_waits_for_the_request_that_is_being_answered(two_models):
    """A thread that is inside torch when the interpreter ends would abort the process."""
    begun, ended = threading.Event(), threading.Event()

    class Slow(Suggester):
        def suggest(self, *words, **options):
            begun.set()
            time.sleep(0.3)
            ended.set()
            return super().suggest(*words, **options)

    server = KeyboardServer([Slow(two_models[0])])
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    client = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    client.request("POST", "/suggest", '{"text": "how "}', {"Content-Type": "application/json"})
    assert begun.wait(10)
    server.shutdown()
    server.server_close()
    assert ended.is_set()
    client.close()
