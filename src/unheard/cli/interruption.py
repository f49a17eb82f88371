"""Ends `unheard prepare` at once on Ctrl-C, SIGTERM or SIGHUP, with one line that says what is kept.

`prepare` leaves only complete files on disk at any moment, so it may end without unwinding. A thread waits for the
signal, since the main thread may be in a query of many seconds. `stop_at_signals` is called when the command line starts
(`cli/__init__.py`), before the slow imports; `set_output` names the store as soon as the options are read.
"""

import multiprocessing
import os
import signal
import socket
import sys
import threading
from pathlib import Path

EXIT_STATUS = 130
"""The exit status of a command that was interrupted."""

_output: list[Path] = []


def stop_at_signals() -> None:
    """End this process at the first SIGINT, SIGTERM or SIGHUP. A signal that the parent process ignores stays ignored."""
    # The tracker of semaphores would print a warning about those of a process that ended without unwinding.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    threading.Thread(target=_wait, args=(reader, writer), daemon=True).start()
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # the thread acts; without a handler nothing would wake it


def set_output(out: Path) -> None:
    """Name the store that is being made, for the line that `stop_at_signals` prints."""
    _output[:] = [out]


def what_is_kept() -> str:
    """The line for a person: what is on disk, and how to go on."""
    out = _output[0] if _output else None
    if out is not None and (out / "corpus.json").is_file():
        return f"Stopped. The store at {out} is complete."
    partial = None if out is None else out.with_name(out.name + ".partial")
    if partial is not None and partial.is_dir():
        return f"Stopped. Finished steps are kept in {partial}; the same command continues from there."
    return "Stopped before anything was written. The same command starts again."


def _wait(reader: socket.socket, writer: socket.socket) -> None:
    reader.recv(1)  # the number of the signal; `writer` is an argument so that it stays open
    show_cursor = "\r\x1b[?25h\x1b[K" if sys.stderr.isatty() else ""  # the progress bar hides it
    os.write(2, f"{show_cursor}unheard: {what_is_kept()}\n".encode())
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(EXIT_STATUS)
