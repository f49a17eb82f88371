"""Run a command in an environment that logs every DNS query and cannot reach other machines.

    unshare --net --mount python dns_trap.py NAMES.txt command [argument ...]

The script must run in new network and mount namespaces. It starts the loopback device, makes 127.0.0.1 the only name
server, answers every query with "no such name", and writes each queried name to a line of NAMES.txt. Its exit status is
that of the command.
"""

import fcntl
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
ADDRESS = ("127.0.0.1", 53)
NO_SUCH_NAME = 0x8183  # the flags of an answer: response, recursion desired and available, status NXDOMAIN
HEADER_BYTES = 12
CONFIGURATION = {"/etc/resolv.conf": "nameserver 127.0.0.1\n", "/etc/nsswitch.conf": "hosts: files dns\n"}
"""The system files that are replaced. nsswitch.conf prevents queries over a Unix socket (systemd-resolved)."""


def start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        request = fcntl.ioctl(device, SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
        flags = struct.unpack_from("h", request, 16)[0]
        fcntl.ioctl(device, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def replace_configuration(folder: Path) -> None:
    for path, text in CONFIGURATION.items():
        if Path(path).exists():  # without resolv.conf, the C library queries 127.0.0.1 by default
            (folder / Path(path).name).write_text(text)
            subprocess.run(["mount", "--bind", folder / Path(path).name, path], check=True)


def question(query: bytes) -> tuple[str, bytes]:
    """Return the name in a DNS query, and the bytes of its question section."""
    labels, at = [], HEADER_BYTES
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii", "replace"))
        at += 1 + query[at]
    return ".".join(labels), query[HEADER_BYTES : at + 5]


class Trap:
    """A name server over UDP and TCP that answers every query with "no such name"."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("a", encoding="utf-8")
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(ADDRESS)
        self._tcp = socket.create_server(ADDRESS)
        for serve in (self._serve_udp, self._serve_tcp):
            threading.Thread(target=serve, daemon=True).start()

    def _answer(self, query: bytes) -> bytes:
        try:
            name, asked = question(query)
        except IndexError:
            name, asked = f"not a DNS query: {query!r}", b""
        self._log.write(name + "\n")
        self._log.flush()
        return query[:2] + struct.pack("!5H", NO_SUCH_NAME, bool(asked), 0, 0, 0) + asked

    def _serve_udp(self) -> None:
        while True:
            query, sender = self._udp.recvfrom(65535)
            self._udp.sendto(self._answer(query), sender)

    def _serve_tcp(self) -> None:
        while True:
            connection, _ = self._tcp.accept()
            threading.Thread(target=self._serve_connection, args=(connection,), daemon=True).start()

    def _serve_connection(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            while len(prefix := stream.read(2)) == 2:
                answer = self._answer(stream.read(int.from_bytes(prefix, "big")))
                connection.sendall(len(answer).to_bytes(2, "big") + answer)


def main(log: str, *command: str) -> int:
    start_loopback()
    with tempfile.TemporaryDirectory() as folder:
        replace_configuration(Path(folder))
        Path(log).touch()
        Trap(Path(log))
        return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
