"""Commands on several processes: `--processes N` starts them with torch's own launcher, torchrun starts them on many machines.

In: a verb's work. Out: rank 0 does it and alone prints and writes; the others serve it (training/worker.py) and say nothing.
"""

import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from unheard.engines.distributed.process_group import Ranks

Processes = Annotated[
    int, typer.Option(min=1, max=1024, help="Processes on this machine that share the work; the result is the same.")
]
MaxRestarts = Annotated[
    int, typer.Option(min=0, help="With --processes: how often to start again and go on if one of them dies.")
]
RankTimeout = Annotated[
    float | None,
    typer.Option(min=0.001, help="Seconds that processes wait for each other before the late one is named (600)."),
]

SAVED = "What was saved is kept: `unheard resume` goes on"


def lead(work: "Callable[[Ranks | None], None]", processes: int = 1, max_restarts: int = 0) -> None:
    """Do the work here, with the other ranks' help if there are others; or start the processes that will."""
    if processes > 1 and "WORLD_SIZE" not in os.environ:
        return _launch(processes, max_restarts)
    from unheard.engines.distributed.process_group import Ranks

    ranks = Ranks.join()
    if ranks is None:
        # `kill`, Slurm, Kubernetes and systemd all end a job by SIGTERM: as by Ctrl-C, so that what was done is saved.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            return work(None)
        finally:
            signal.signal(signal.SIGTERM, before)
    if not ranks.is_leader:
        return _serve(ranks)
    # When another rank dies the launcher asks us to stop: leave the rounds as by Ctrl-C, so that what was done is saved.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    try:
        work(ranks)
    finally:
        ranks.leave()
    return None


def again() -> bool:
    """Whether these processes are in the place of others that died: a run that they began goes on."""
    from unheard.engines.distributed.process_group import was_restarted

    return was_restarted()


def _serve(ranks: "Ranks") -> None:
    from unheard.audit.exposure import phrases
    from unheard.errors import RankError
    from unheard.training.worker import JOBS, serve

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the leader, who lets us go
    warnings.simplefilter("ignore")  # the leader, who does the same work, says them
    try:
        serve(ranks, (*JOBS, phrases))
    except RankError:  # the leader has gone, and has said why if it could
        raise typer.Exit(2) from None


def _launch(processes: int, max_restarts: int) -> None:
    """The same command in so many processes, watched by torch's elastic agent."""
    import logging
    import socket
    import tempfile
    import uuid
    from pathlib import Path

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from unheard.engines.distributed.process_group import MEETING_PLACE
    from unheard.errors import RankError

    # Its log speaks of ranks and exit codes; the leader says what happened, and so do we below.
    logging.disable(logging.ERROR)
    # DP: sums on their way have no noise yet, so they stay on the machine. Gloo binds the address that the machine's name stands
    # for, which others may reach.
    if loopback := [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    # DP: they meet in a folder that nobody else may open. A store of torch's on a port listens to the whole network, and whoever
    # writes into it can send the ranks, and their sums, to an address of their own.
    with tempfile.TemporaryDirectory(prefix="unheard-") as folder:
        os.environ[MEETING_PLACE] = str(Path(folder) / "ranks")
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
        except SignalException as stop:
            if stop.sigval == signal.SIGINT:  # the leader had it too, and has spoken
                raise typer.Exit(130) from None
            raise RankError(f"Ended by {stop.sigval.name}. {SAVED}.") from None
        except ChildFailedError as failed:
            _explain(failed.failures)
        finally:
            del os.environ[MEETING_PLACE]


def _explain(failures: dict[int, Any]) -> None:
    from unheard.errors import RankError

    leader = failures.get(0)
    if leader is not None and leader.exitcode in (1, 2, 130):  # it has spoken for itself
        raise typer.Exit(leader.exitcode)
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    how = f"by signal {-failure.exitcode}" if failure.exitcode < 0 else f"with status {failure.exitcode}"
    raise RankError(f"Rank {rank} ended {how}. {SAVED}, and --max-restarts does so by itself.")
