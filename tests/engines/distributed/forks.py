"""Process groups for tests: ranks are forks of the test's process, because importing torch takes seconds.

The ranks communicate over Gloo. Rank 0 runs the work of the test and the others serve, as `unheard` does under torchrun
(test_commands.py tests that).
"""

import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import unheard.mechanism.noise
from unheard.engines.distributed.process_group import ProcessGroup
from unheard.training import worker

Lead = Callable[[ProcessGroup], np.ndarray | None]


def on_ranks(
    size: int, lead: Lead, follow: Callable[[ProcessGroup], None] = worker.serve, *, patience: float = 120
) -> np.ndarray:
    """Return the result of the leader's work. Fail with its message if it raised, or if a process did not end."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, started(size, lead, follow, Path(folder)) as processes:
        until = time.monotonic() + patience
        while os.waitpid(processes[0], os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                raise TimeoutError("the ranks did not come to an end")
            time.sleep(0.01)
        said = Path(folder, "said")
        if said.exists():
            raise LeaderFailed(said.read_text())
        return np.load(Path(folder, "found.npy"))


class LeaderFailed(Exception):
    pass


@contextlib.contextmanager
def started(size: int, lead: Lead, follow: Callable[[ProcessGroup], None], folder: Path) -> Iterator[list[int]]:
    """Yield the processes by rank. Processes that are still running at the end are killed."""
    port = _free_port()
    processes = [_fork(rank, size, port, lead, follow, folder) for rank in range(size)]
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def _fork(rank: int, size: int, port: int, lead: Lead, follow: Callable[[ProcessGroup], None], folder: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        unheard.mechanism.noise._threads.cache_clear()  # threads do not survive a fork
        torch.set_num_threads(1)
        where = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        os.environ |= {k: str(v) for k, v in where.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = ProcessGroup.join()
        if ranks is None or ranks.is_leader:
            found = lead(ranks)  # pyright: ignore[reportArgumentType] (of one rank: None)
            np.save(folder / "found.npy", np.empty(0) if found is None else found)
            if ranks is not None:
                ranks.shutdown()
        else:
            follow(ranks)
        status = 0
    except BaseException as trouble:
        if rank == 0:
            (folder / "said.new").write_text(f"{type(trouble).__name__}: {trouble}\n{traceback.format_exc()}")
            os.replace(folder / "said.new", folder / "said")
    finally:
        sys.stdout.flush()
        os._exit(status)


def _free_port() -> int:
    """Return a free port outside the range of ephemeral ports.

    An ephemeral port could be given to a process of another test before the leader binds it.
    """
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
