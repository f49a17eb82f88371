"""Ends a command at once on Ctrl-C, SIGTERM or SIGHUP, with one line that says what is kept and how to go on.

Most commands leave only complete files on disk at any moment, so they may end without unwinding. A thread waits for the
signal, since the main thread may be in a query or an import of many seconds. `stop_at_signals` is called when the
command line starts (`cli/__init__.py`), before the slow imports. A command says with `set_kept` what a stop leaves behind
as soon as its options are read. Commands that train or serve call `let_unwind` before the first step that must end in
order: from then on a signal raises `KeyboardInterrupt`.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

EXIT_STATUS = 130
"""The exit status of a command that was interrupted."""
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
NOTHING_WRITTEN = "Stopped before anything was written. The same command starts again."

_kept: list[Callable[[], str]] = []
_is_armed: list[bool] = []
_ends_at_once = threading.Event()
_is_stopping = threading.Event()


def stop_at_signals() -> None:
    """End this process at the first SIGINT, SIGTERM or SIGHUP. A signal that the parent process ignores stays ignored."""
    # The tracker of semaphores would print a warning about those of a process that ended without unwinding.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    _ends_at_once.set()
    _is_armed.append(True)
    threading.Thread(target=_wait, args=(reader, writer), daemon=True).start()
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in _signals():
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: _is_stopping.set())  # the thread acts; without a handler nothing wakes it


def let_unwind() -> None:
    """From here on a signal raises `KeyboardInterrupt` in the main thread, so that the command ends in order.

    Does nothing if `stop_at_signals` was not called, or in another thread than the main one.
    """
    if not _ends_at_once.is_set() or threading.current_thread() is not threading.main_thread():
        return
    _ends_at_once.clear()
    signal.set_wakeup_fd(-1)
    for number in _signals():
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


def wait_if_stopping() -> None:
    """Wait for the end of this process if a signal is ending it.

    The signal also ends the command's own workers, and the main thread may see that as an error. It must not print it
    beside the line that says what is kept.
    """
    if _ends_at_once.is_set() and _is_stopping.is_set():
        threading.Event().wait(30)


def ignore_signals() -> None:
    """Ignore the signals of `stop_at_signals`: the command is done, and only the interpreter remains to end."""
    if _is_armed:
        for number in _signals():
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """In the block SIGTERM and SIGHUP raise `KeyboardInterrupt`, as Ctrl-C does.

    `kill`, Slurm, Kubernetes and systemd end a job by SIGTERM, a closed terminal by SIGHUP. A signal that the parent
    process ignores (`nohup`) stays ignored. Under `stop_at_signals` the block changes nothing.
    """
    if _ends_at_once.is_set():
        yield
        return
    numbers = [n for n in _signals() if n != signal.SIGINT and signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def set_kept(describe: Callable[[], str]) -> None:
    """Set what `stop_at_signals` prints: a function that looks at the disk and says what is kept and how to go on."""
    _kept[:] = [describe]


def store_kept(out: Path) -> str:
    """What is kept of the store that `prepare` was making."""
    if (out / "corpus.json").is_file():
        return f"Stopped. The store at {out} is complete."
    partial = out.with_name(out.name + ".partial")
    if partial.is_dir():
        return f"Stopped. Finished steps are kept in {partial}; the same command continues from there."
    return NOTHING_WRITTEN


def output_kept(out: Path, *, also: str = "") -> str:
    """What is kept of a file or folder that appears as a whole.

    Args:
        out: The file or folder.
        also: A clause on what else is kept, if `out` is not there yet.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        return f"Stopped. {out} is complete."
    return f"Stopped before {out} was written.{f' {also}' if also else ''} The same command starts again."


def what_is_kept() -> str:
    """The line for a person: what is on disk, and how to go on."""
    return _kept[0]() if _kept else NOTHING_WRITTEN


def _signals() -> list[signal.Signals]:
    return [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]


def _wait(reader: socket.socket, writer: socket.socket) -> None:
    reader.recv(1)  # the number of the signal; `writer` is an argument so that it stays open
    if not _ends_at_once.is_set():
        return
    _delete_staged_folders()
    show_cursor = "\r\x1b[?25h\x1b[K" if sys.stderr.isatty() else ""  # the progress bar hides it
    os.write(2, f"{show_cursor}unheard: {what_is_kept()}\n".encode())
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(EXIT_STATUS)


def _delete_staged_folders() -> None:
    """Delete folders that were being filled, if the module that fills them was imported."""
    if storage := sys.modules.get("unheard.storage"):
        storage.delete_staged()
