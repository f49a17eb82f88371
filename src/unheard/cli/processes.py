"""Runs a command in several processes: `--processes N` on one machine, torchrun on many.

    def work(ranks): ...                        # ranks is None for a single process
    run_on_processes(work, processes, max_restarts)

Rank 0 is the leader. It does the work and is the only process that prints and writes; the others serve its requests
(`training/worker.py`) and print nothing. `--processes N` starts torch's elastic launcher, which runs the same command
in N processes and restarts them if one dies and `--max-restarts` allows it. If the launcher dies, whatever the reason,
so do its ranks: they must not train and charge users with nobody to stop them.
"""

import ctypes
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from unheard.cli.interruption import let_unwind, signals_as_ctrl_c

if TYPE_CHECKING:
    from unheard.engines.distributed.process_group import ProcessGroup

LAUNCHER = "UNHEARD_LAUNCHER"
"""The environment variable with which `--processes` tells its ranks the id of its process."""
SECONDS_BETWEEN_LOOKS = 0.5
SAVED = "What was saved is kept: `unheard resume` continues"


def run_on_processes(work: "Callable[[ProcessGroup | None], None]", processes: int = 1, max_restarts: int = 0) -> None:
    """Does the work in this process, with the help of the other ranks if there are any, or starts the processes that do
    it.

    Args:
        work: What the command does. It is called with the process group on rank 0, with None in a process that is
        alone, and not
            at all on other ranks.
        processes: How many processes to start. Ignored in a process that a launcher has started.
        max_restarts: How often to start all processes again after one has died.
    """
    if processes > 1 and "WORLD_SIZE" not in os.environ:
        return _launch(processes, max_restarts)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        # DP: a rank without a launcher would go on charging users, and nobody would know.
        die_with(int(os.environ.get(LAUNCHER) or os.getppid()))
    from unheard.engines.distributed.process_group import ProcessGroup

    ranks = ProcessGroup.join()
    if ranks is None:
        with signals_as_ctrl_c():  # so that what was done is saved
            return work(None)
    if not ranks.is_leader:
        return _serve(ranks)
    # When another rank dies, the launcher ends this process by SIGTERM. Leave through `finally`, so that what was done
    # is saved.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    try:
        work(ranks)
    finally:
        ranks.shutdown()
    return None


def die_with(launcher: int) -> None:
    """Ends this process at once when its launcher has ended.

    On Linux the kernel sends SIGKILL. Everywhere a thread compares the parent with the launcher as well: the launcher
    may have ended before the kernel was asked.

    Args:
        launcher: The process that started this one.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0)

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        os._exit(2)

    threading.Thread(target=watch, name="launcher watchdog", daemon=True).start()


def _serve(ranks: "ProcessGroup") -> None:
    """Answers the leader's requests until it ends."""
    from unheard.audit.exposure import phrases
    from unheard.errors import RankError
    from unheard.training.worker import JOBS, serve

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the leader, which then ends this process
    warnings.simplefilter("ignore")  # the leader does the same work and prints the same warnings
    try:
        serve(ranks, (*JOBS, phrases))
    except RankError:  # the leader has ended, and has printed why if it could
        raise typer.Exit(2) from None


def _launch(processes: int, max_restarts: int) -> None:
    """Runs the same command in so many processes under torch's elastic launcher."""
    import logging
    import socket
    import tempfile
    import uuid
    from pathlib import Path

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from unheard.engines.distributed.process_group import RENDEZVOUS_FILE
    from unheard.errors import RankError

    let_unwind()  # the launcher has handlers of its own: it ends its ranks
    # The launcher's log reports ranks and exit codes; the leader, or `_explain` below, says what happened.
    logging.disable(logging.ERROR)
    # DP: sums on their way have no noise yet, so they stay on the machine. Gloo binds the address of the machine's host
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
        )
        try:
            elastic_launch(config, sys.executable)("-m", "unheard", *sys.argv[1:])
        except SignalException as error:
            if error.sigval == signal.SIGINT:  # the leader received it too, and has printed a message
                raise typer.Exit(130) from None
            raise RankError(f"Ended by {error.sigval.name}. {SAVED}.") from None
        except ChildFailedError as error:
            _explain(error.failures)
        finally:
            del os.environ[RENDEZVOUS_FILE], os.environ[LAUNCHER]


def _explain(failures: dict[int, Any]) -> None:
    """Raises the exit status of the leader if it has printed its own message, else an error that names the first rank
    to fail."""
    from unheard.errors import RankError

    leader = failures.get(0)
    if leader is not None and leader.exitcode in (1, 2, 130):
        raise typer.Exit(leader.exitcode)
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    how = f"by signal {-failure.exitcode}" if failure.exitcode < 0 else f"with status {failure.exitcode}"
    raise RankError(f"Rank {rank} ended {how}. {SAVED}, and --max-restarts does so by itself.")
