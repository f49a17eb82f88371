"""Processes that train together: rank 0 leads and asks, the others answer. Only messages and sums are here, no meaning.

In: what torchrun puts into the environment. Out: `tell`, `hear`, `answer` and `answers` (small messages, to and from one rank at a
time, over Gloo, so that who is late can be named), `hand_out` and `add_up` (collectives: over NCCL between GPUs, else Gloo).
What a message is: engines/distributed/protocol.py. How it is used: engines/distributed/engine.py, training/worker.py.
How ranks find each other, also after some of them died: torchrun may keep one store for all attempts, with old addresses in it.

In: what torchrun put into the environment. Out: a store of this attempt's own, the rank, how many there are. Each process brings a
number that nobody else has; the leader answers it with the name of a fresh corner of the store, so that nothing old is ever read.
"""

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from unheard.engines.distributed.protocol import Answer, Message, Sending, wait
from unheard.errors import RankError

MEETING_PLACE = "UNHEARD_MEETING_PLACE"
"""The variable by which `--processes` names a file to meet in; torchrun's processes meet at an address instead."""
PATIENCE = 600.0
"""Seconds for all to arrive: machines that start together import and compile at their own pace."""


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)


def was_restarted() -> bool:
    """Whether torchrun has started these processes again after one of them died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def meet() -> tuple[Store, int, int]:
    """The store, this rank, the number of ranks."""
    if place := os.environ.get(MEETING_PLACE):
        store, rank, size = FileStore(place), int(os.environ["RANK"]), world_size()
    else:
        store, rank, size = next(iter(rendezvous("env://")))
    mine = secrets.token_hex(8)
    attempt = _welcome(store, mine, size) if rank == 0 else _arrive(store, mine, rank)
    return PrefixStore(f"unheard/{attempt}", store), rank, size


def _arrive(store: Store, mine: str, rank: int) -> str:
    store.set(f"unheard/hello/{rank}", mine)
    store.wait([f"unheard/welcome/{mine}"], timedelta(seconds=PATIENCE))
    attempt = store.get(f"unheard/welcome/{mine}").decode()
    store.set(f"unheard/{attempt}/here/{rank}", "yes")
    return attempt


def _welcome(store: Store, attempt: str, size: int) -> str:
    """Answer every number that is there, until each rank has said that it has heard: an earlier attempt's are silent."""
    missing, until = set(range(1, size)), time.monotonic() + PATIENCE
    while missing:
        if time.monotonic() > until:
            late = ", ".join(map(str, sorted(missing)[:8]))
            raise RankError(
                f"Rank {late} of {size} did not arrive within {PATIENCE:g} s. Look at its machine; start again."
            )
        for rank in sorted(missing):
            if store.check([f"unheard/{attempt}/here/{rank}"]):
                missing.discard(rank)
            elif store.check([f"unheard/hello/{rank}"]):
                store.set(f"unheard/welcome/{store.get(f'unheard/hello/{rank}').decode()}", attempt)
        time.sleep(0.005)
    return attempt


LONG = timedelta(days=3650)
"""How long a rank waits for work: a leader may audit or save for hours, and one that dies is noticed by its connection."""


class Ranks:
    """The group as one of its processes sees it."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.node = int(os.environ.get("GROUP_RANK", 0))
        self.timeout, self.device = 600.0, torch.device("cpu")
        self._collective: Any = None
        self.is_broken = False

    @classmethod
    def join(cls) -> "Ranks | None":
        """Meet the others that torchrun started; None for a process that is alone."""
        if world_size() == 1:
            return None
        try:
            store, rank, size = meet()
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"The ranks did not find each other ({_first_line(error)}). Start them with torchrun or --processes; on several "
                "machines GLOO_SOCKET_IFNAME names the network to use."
            ) from None
        ranks = cls()
        share_cores(ranks.local_size)
        return ranks

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def others(self) -> range:
        return range(1, self.size)

    def connect(self, device: torch.device, timeout: float) -> None:
        """How sums will travel, and how long ranks wait for each other. Every rank calls this at the same point."""
        if self._collective is None or (device.type, timeout) != (self.device.type, self.timeout):
            backend = "nccl" if device.type == "cuda" else "gloo"
            self._collective = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout))
        self.device, self.timeout = device, timeout

    def tell(self, messages: Sequence[Message]) -> None:
        """The leader asks every other rank for something, each in its own words, and sees that they have heard. All are spoken to
        at once: one after the other, hundreds of ranks would wait longer than they work."""
        posted = []
        for rank, message in zip(self.others, messages, strict=True):
            with self._naming(rank):
                posted.append(self._post(rank, message))
        for rank, sending in zip(self.others, posted, strict=True):
            with self._naming(rank):
                sending.wait(self.timeout)
        self.answers()

    def _post(self, rank: int, message: Message) -> Sending:
        return Sending([(dist.isend(part, dst=rank), part) for part in message.packed()])

    def hear(self) -> Message:
        """What the leader asks next, however long that takes. The answer "heard" goes back at once."""
        sizes = torch.zeros(2, dtype=torch.int64)
        with self._naming(0):
            wait(dist.irecv(sizes, src=0), LONG.total_seconds())
            content = Message.room(sizes)
            wait(dist.irecv(content, src=0), self.timeout)
        message = Message.unpacked(sizes, content)
        if message.job != "end":
            self.answer()
        return message

    def answer(self, numbers: np.ndarray | None = None, *, seconds: float = 0.0, trouble: str = "") -> None:
        """To the leader: numbers, or what went wrong. It listens when it is done with its own share, however long that is."""
        answer = Answer(np.empty(0, dtype=np.int64) if numbers is None else numbers, seconds, trouble)
        with self._naming(0):
            for part in answer.packed():
                wait(dist.isend(part, dst=0), LONG.total_seconds())

    def answers(self) -> list[Answer]:
        """The leader hears every other rank, in order; whoever is late, gone or in trouble is named."""
        until, found, coming = time.monotonic() + self.timeout, [], []
        for rank in self.others:
            head = Answer.room()
            with self._naming(rank):
                coming.append((rank, head, dist.irecv(head, src=rank)))
        for rank, head, work in coming:
            with self._naming(rank):
                wait(work, until - time.monotonic())
                numbers = Answer.room(head)
                if len(numbers):
                    wait(dist.irecv(numbers, src=rank), self.timeout)
            answer = Answer.unpacked(head, numbers)
            if answer.trouble:
                raise RankError(f"Rank {rank} of {self.size}: {answer.trouble}")
            found.append(answer)
        return found

    def hand_out(self, tensor: Tensor) -> Tensor:
        """The leader's tensor, on every rank; all give one of its size and type."""
        tensor = tensor.to(self.device).contiguous()
        self._together(lambda: dist.broadcast(tensor, src=0, group=self._collective))
        return tensor

    def add_up(self, units: Tensor) -> Tensor:
        """The sum over ranks of whole numbers; only the leader's copy is one."""
        # DP: in int64, where a sum is the same in any order on any number of ranks, and never rounds.
        if units.dtype != torch.int64:
            raise TypeError(f"Sums over ranks are of int64, not of {units.dtype}.")
        units = units.to(self.device).contiguous()
        self._together(lambda: dist.reduce(units, dst=0, op=dist.ReduceOp.SUM, group=self._collective))
        return units

    def leave(self) -> None:
        """Let the others go home, if they can still hear; who cannot will notice that we have gone."""
        for rank in () if self.is_broken else self.others:
            with suppress(RuntimeError):
                self._post(rank, Message("end")).wait(2.0)

    def _together(self, collective: Callable[[], Any]) -> None:
        try:
            collective()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            self.is_broken = True
            raise RankError(f"A rank was lost while sums were on their way ({_first_line(error)}). {_CURE}") from None

    def _naming(self, rank: int) -> "_Naming":
        return _Naming(self, rank)


@dataclass
class _Naming:
    """Turns a broken connection into an error that names the rank."""

    ranks: Ranks
    rank: int

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if kind is None or not isinstance(error, RuntimeError):
            return
        self.ranks.is_broken = True
        name = f"Rank {self.rank} of {self.ranks.size}"
        if "Timed out" in str(error):
            late = f"{name} did not answer within {self.ranks.timeout:g} s: it is slow, or it hangs."
            raise RankError(f"{late} Give it longer (--rank-timeout), or look at its machine. {_CURE}") from None
        raise RankError(f"{name} is gone ({_first_line(error)}). {_CURE}") from None


_CURE = "No round is lost that was saved: start again and it goes on, or let torchrun do it (--max-restarts)."


def share_cores(local_size: int) -> None:
    """Ranks of one machine share its cores: torchrun leaves each with one thread, which is few where ranks are few."""
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_size))


def same_for_all(ranks: Ranks, job: str, facts: Mapping[str, Any]) -> list[Message]:
    """One message for every other rank."""
    return [Message(job, dict(facts)) for _ in ranks.others]


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].split("] ")[-1][:120] if str(error) else type(error).__name__
