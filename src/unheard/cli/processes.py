"""Handles signals, and runs a command in several processes.

**Signals.** Ctrl-C, SIGTERM and SIGHUP end a command at once and print one line that says what is saved and how to
continue. Most commands have only complete files on disk at any moment, so they may end without unwinding. A separate
thread waits for the signal, because the main thread may be in a query or an import of many seconds. `cli/__init__.py`
calls `stop_at_signals` when the command line starts, before the slow imports; this module therefore imports only the
standard library. A command sets the text of the line with `display.set_stop_message` as soon as its options are read. Commands
that train or serve call `let_unwind` before the first step that needs cleaning up; from then on a signal raises
`KeyboardInterrupt`.

**Processes.** `--processes N` runs a command in N processes on one machine; torchrun does so on many machines:

    def work(ranks): ...                        # ranks is None for a single process
    run_on_processes(work, processes, max_restarts)

Rank 0 is the leader. It does the work and is the only process that prints and writes; the others serve its requests
(`training/worker.py`) and print nothing. `--processes N` starts torch's elastic launcher, which runs the same command in
N processes and restarts them if one dies and `--max-restarts` allows it. If the launcher dies for any reason, its ranks
end too: otherwise they would train and charge users without anybody to stop them.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

EXIT_STATUS = 130
"""The exit status of a command that was interrupted."""
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
LAUNCHER = "UNHEARD_LAUNCHER"
"""The environment variable in which the launcher of `--processes` gives its process id to the ranks."""
NOTHING_WRITTEN = "Stopped before anything was written. Run the same command again."

describe_stop: list[Callable[[], str]] = []
"""The function that returns the stop message, if the command has set one (`display.set_stop_message`)."""
_is_armed = threading.Event()
_ends_at_once = threading.Event()
_is_stopping = threading.Event()


def stop_at_signals() -> None:
    """From now on, end this process at the first SIGINT, SIGTERM or SIGHUP.

    A signal that the parent process ignores, for example under `nohup`, stays ignored.
    """
    # Without unwinding, semaphores stay registered, and multiprocessing's resource tracker would warn about them.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    _ends_at_once.set()
    _is_armed.set()
    threading.Thread(target=_wait, args=(reader, writer), daemon=True).start()
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in _signals():
        # The thread ends the process. A handler is needed all the same: without one, nothing wakes the thread.
        signal.signal(number, lambda *_: _is_stopping.set())


def let_unwind(handler: Callable[[int, FrameType | None], Any] = signal.default_int_handler) -> None:
    """From now on, let a signal raise `KeyboardInterrupt` in the main thread, so that `finally` blocks run.

    Does nothing if `stop_at_signals` was not called, or if the caller is not the main thread.

    Args:
        handler: A signal handler that replaces the default one, to raise another exception.
    """
    if not _ends_at_once.is_set() or threading.current_thread() is not threading.main_thread():
        return
    _ends_at_once.clear()
    signal.set_wakeup_fd(-1)
    for number in _signals():
        signal.signal(number, handler)


def wait_if_stopping() -> None:
    """If a signal is ending this process, wait until it has ended.

    The signal also ends worker processes of the command, which the main thread may see as an error. While it waits
    here, it does not print that error in addition to the stop message.
    """
    if _ends_at_once.is_set() and _is_stopping.is_set():
        threading.Event().wait(30)


def ignore_signals() -> None:
    """Ignore further signals. Called when the command is done and only the interpreter has to shut down."""
    if _is_armed.is_set():
        for number in _signals():
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGHUP raise `KeyboardInterrupt`, as Ctrl-C does.

    `kill`, Slurm, Kubernetes and systemd end a job with SIGTERM, a closed terminal with SIGHUP. A signal that the
    parent process ignores (`nohup`) stays ignored. If `stop_at_signals` is in effect, the block changes nothing.
    """
    if _ends_at_once.is_set():
        yield
        return
    numbers = [number for number in _signals() if number != signal.SIGINT]
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_message() -> str:
    """Return the message of a command that is stopped now: what is saved, and how to continue."""
    return describe_stop[0]() if describe_stop else NOTHING_WRITTEN


def is_rank() -> bool:
    """Whether a launcher of `--processes` started this process. If so, the launcher prints the stop message."""
    return os.environ.get(LAUNCHER, str(os.getpid())) != str(os.getpid())


def _signals() -> list[signal.Signals]:
    """Return the signals that end a command, except those that the parent process ignores, for example under `nohup`."""
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def _wait(reader: socket.socket, writer: socket.socket) -> None:
    """Wait for a signal; then end the process, unless `let_unwind` was called in the meantime.

    Args:
        reader: Receives a byte when a signal arrives.
        writer: The other end of the pair. The parameter keeps a reference, so that the socket is not closed.
    """
    reader.recv(1)
    if not _ends_at_once.is_set():
        return
    delete_staged_folders()
    show_cursor = "\r\x1b[?25h\x1b[K" if sys.stderr.isatty() else ""  # progress bars hide the cursor
    os.write(2, f"{show_cursor}unheard: {stop_message()}\n".encode())
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(EXIT_STATUS)


def delete_staged_folders() -> None:
    """Delete the unfinished folders of `storage.staged_folder`, if the module `storage` was imported."""
    # While `storage` is still being imported it has no such function yet, and no folder can exist.
    if delete := getattr(sys.modules.get("unheard.storage"), "delete_staged", None):
        delete()


if TYPE_CHECKING:
    from unheard.engines.distributed.process_group import ProcessGroup

SECONDS_BETWEEN_LOOKS = 0.5
SAVED = "What was saved is kept: `unheard resume` continues"


def run_on_processes(work: "Callable[[ProcessGroup | None], None]", processes: int = 1, max_restarts: int = 0) -> None:
    """Run a command in one or several processes.

    If `processes` is 1, call `work` here. If it is larger, start a launcher, which runs the same command in that many
    processes. In a process that a launcher started, rank 0 calls `work` and the other ranks serve its requests.

    Args:
        work: The function that does what the command does. Its argument is the process group on rank 0, and None in a
            single process. It is not called on other ranks.
        processes: How many processes to start. Ignored in a process that a launcher has started.
        max_restarts: How often to start all processes again after one has died.
    """
    if processes > 1 and "WORLD_SIZE" not in os.environ:
        return _launch(processes, max_restarts)
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        with signals_as_ctrl_c():  # so that a signal unwinds the stack and the run is saved
            return work(None)
    # DP: a rank without a launcher would keep charging users, and nobody would notice.
    die_with(int(os.environ.get(LAUNCHER) or os.getppid()))
    from unheard.engines.distributed.process_group import ProcessGroup

    ranks = ProcessGroup.join()
    assert ranks is not None, "WORLD_SIZE says that there are other ranks"
    if not ranks.is_leader:
        return _serve(ranks)
    # The launcher sends SIGTERM when another rank dies and when it is stopped itself. `sys.exit` runs the `finally`
    # blocks, so that the run is saved.
    for number in _signals():
        if number != signal.SIGINT:
            signal.signal(number, lambda *_: sys.exit(2))
    try:
        work(ranks)
    finally:
        ranks.shutdown()
    return None


def was_restarted() -> bool:
    """Whether torchrun has restarted these processes after one of them died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def die_with(launcher: int) -> None:
    """From now on, end this process at once when its launcher ends.

    On Linux the kernel sends SIGKILL when the parent process ends. On every system a thread also checks whether the
    launcher is still the parent, because it may have ended before the kernel was asked.

    Args:
        launcher: The id of the process that started this one.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0)

    def watch() -> None:
        """Check twice per second whether the launcher is still the parent; if not, end this process."""
        while os.getppid() == launcher:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os._exit(2)

    threading.Thread(target=watch, name="launcher watchdog", daemon=True).start()


def _serve(ranks: "ProcessGroup") -> None:
    """Answer the leader's requests until it ends."""
    import typer

    from unheard.audit.exposure import phrases
    from unheard.errors import RankError
    from unheard.training.worker import JOBS, serve

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader handles Ctrl-C and then ends this process
    warnings.simplefilter("ignore")  # the leader does the same work and prints the same warnings
    try:
        serve(ranks, (*JOBS, phrases))
    except RankError:  # the leader has ended and, if it could, has printed the reason
        raise typer.Exit(2) from None


def _launch(processes: int, max_restarts: int) -> None:
    """Run the same command in several processes under torch's elastic launcher, and wait for them.

    Raises:
        typer.Exit: A signal stopped the command, or the leader ended with an error that it has printed.
        RankError: A rank died.
    """
    import logging
    import tempfile
    import uuid

    import typer
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from unheard.engines.distributed.process_group import RENDEZVOUS_FILE

    def end_ranks(*_: object) -> None:
        """Make the launcher end its ranks with SIGTERM. On SIGINT a rank that is still importing prints an error."""
        raise SignalException("stopped", sigval=signal.SIGTERM)

    # Hide the launcher's log of ranks and exit codes: the leader, or the error of `_raise_first_failure`, says what happened.
    logging.disable(logging.ERROR)
    # DP: sums that ranks send have no noise yet, so they stay on the machine. Gloo binds the address of the machine's host
    # name, which other machines may reach.
    if loopback := [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    # DP: the processes meet in a folder that only this user may open. A TCP store of torch listens to the whole
    # network, and whoever writes into it can make the ranks send their sums to another address.
    with tempfile.TemporaryDirectory(prefix="unheard-") as folder:
        os.environ[RENDEZVOUS_FILE] = str(Path(folder) / "ranks")
        os.environ[LAUNCHER] = str(os.getpid())
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder) / "launcher"),
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=max_restarts,
            monitor_interval=0.2,
            start_method="spawn",
            signals_to_handle="SIGTERM",  # torch installs a handler for SIGTERM; `end_ranks` handles the others
        )
        try:
            let_unwind(end_ranks)
            elastic_launch(config, sys.executable)("-m", "unheard", *sys.argv[1:])
        except SignalException:  # the launcher has ended the ranks after the leader saved the run
            typer.echo(f"unheard: {stop_message()}", err=True)
            raise typer.Exit(EXIT_STATUS) from None
        except ChildFailedError as error:
            _raise_first_failure(error.failures)
        finally:
            del os.environ[RENDEZVOUS_FILE], os.environ[LAUNCHER]


def _raise_first_failure(failures: dict[int, Any]) -> None:
    """Exit with the leader's status if the leader has printed an error; otherwise raise one for the first failure.

    Args:
        failures: The failure of each rank that failed, as torch's launcher reports them.

    Raises:
        typer.Exit: The leader ended with status 1, 2 or 130, so it has printed its message.
        RankError: Another rank failed, or the leader was killed.
    """
    import typer

    from unheard.errors import RankError

    leader = failures.get(0)
    if leader is not None and leader.exitcode in (1, 2, 130):
        raise typer.Exit(leader.exitcode)
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    how = f"by signal {-failure.exitcode}" if failure.exitcode < 0 else f"with status {failure.exitcode}"
    raise RankError(f"Rank {rank} ended {how}. {SAVED}, and --max-restarts does so automatically.")
