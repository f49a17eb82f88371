"""The process group: messages between the leader (rank 0) and the workers, and collectives over all ranks.

Input: the environment variables that torchrun sets. Usage, on every process:

    ranks = ProcessGroup.join()             # None for a single process
    if ranks.is_leader:
        ranks.send_all("begin", {...})      # a request to every worker
        replies = ranks.replies()           # one Reply per worker; raises RankError, which names the rank
        params_P = ranks.broadcast(params_P)
        total = ranks.reduce_sum(units)     # int64 only
        ranks.shutdown()
    else:
        message = ranks.receive(); ...; ranks.reply(numbers)

Messages go to and from one rank at a time over Gloo, so that an error can name the rank that is late or
gone. Collectives use NCCL between GPUs, else Gloo.

`connect_ranks` connects the processes, also after some of them died: torchrun may keep one key-value store for all
attempts, with old addresses in it. Each process publishes a random number; the leader answers it with the prefix of a
fresh part of the store, so that nothing of an earlier attempt is ever read.

Messages are JSON and integers in tensors; nothing is ever unpickled. The leader sends a `Message` to each worker; a
worker sends a `Reply`. Both are encoded as tensors whose sizes the receiver knows before it receives them: a message as
its two sizes and then its content, a reply as a head of fixed size and then its numbers.

    >>> sizes, content = Message("sum", {"dtype": "float32"}, np.arange(3)).encode()
    >>> Message.decode(sizes, content).fields
    {'dtype': 'float32'}
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from unheard.errors import RankError

ERROR_BYTES = 1024
"""Bytes of a reply for the text of an error."""


@dataclass(frozen=True)
class Message:
    """A request of the leader to one worker.

    Args:
        kind: What to do: "begin", "connect", "fingerprint", "sum", "add", "map" or "end".
        fields: Its arguments, as JSON.
        numbers: Its integers, such as the numbers of the users to sum.
    """

    kind: str
    # Not shown: the fields and numbers say how many users were drawn, and which.
    fields: dict[str, Any] = field(default_factory=dict, repr=False)
    numbers: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64), repr=False)

    def encode(self) -> tuple[Tensor, Tensor]:
        """Return two tensors: the sizes (bytes of JSON, number of integers), and the content, first JSON, then integers."""
        text = json.dumps([self.kind, self.fields]).encode()
        numbers = np.ascontiguousarray(self.numbers, dtype=np.int64)
        content = torch.from_numpy(np.frombuffer(text + numbers.tobytes(), dtype=np.uint8).copy())
        return torch.tensor([len(text), numbers.size]), content

    @staticmethod
    def buffer(sizes: Tensor) -> Tensor:
        """A tensor into which the content of a message of these sizes is received."""
        text_bytes, count = sizes.tolist()
        return torch.zeros(text_bytes + 8 * count, dtype=torch.uint8)

    @classmethod
    def decode(cls, sizes: Tensor, content: Tensor) -> "Message":
        """The message from its two tensors."""
        text_bytes, encoded = int(sizes[0]), content.numpy().tobytes()
        kind, fields = json.loads(encoded[:text_bytes])
        return cls(kind, fields, np.frombuffer(encoded[text_bytes:], dtype=np.int64))


@dataclass(frozen=True)
class Reply:
    """The answer of one worker: integers and how long they took to compute, or the text of an error."""

    numbers: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64), repr=False)
    seconds: float = field(default=0.0, repr=False)
    error: str = field(default="", repr=False)

    def encode(self) -> list[Tensor]:
        """A head, always of the same size, and the numbers if there are any."""
        numbers = np.ascontiguousarray(self.numbers, dtype=np.int64)
        text = np.zeros(ERROR_BYTES, dtype=np.uint8)
        encoded = np.frombuffer(self.error.encode()[:ERROR_BYTES], dtype=np.uint8)
        text[: len(encoded)] = encoded
        head = np.concatenate([np.array([numbers.size, int(self.seconds * 1e9)]), text.view(np.int64)])
        return [torch.from_numpy(part.copy()) for part in ((head, numbers) if numbers.size else (head,))]

    @staticmethod
    def buffer(head: Tensor | None = None) -> Tensor:
        """Return an empty tensor to receive a head into; or, if the head is given, one to receive its numbers into."""
        return torch.zeros(2 + ERROR_BYTES // 8 if head is None else int(head[0]), dtype=torch.int64)

    @classmethod
    def decode(cls, head: Tensor, numbers: Tensor) -> "Reply":
        """Return the reply that the two tensors encode."""
        error = head[2:].numpy().tobytes().rstrip(b"\0").decode(errors="replace")
        return cls(numbers.numpy(), int(head[1]) / 1e9, error)


@dataclass(frozen=True)
class PendingSend:
    """A message that is being sent, with its memory, which must stay until it is sent."""

    parts: list[tuple[Any, Tensor]]

    def wait(self, seconds: float) -> None:
        """Wait until all is sent; raises `RuntimeError` if that takes longer than `seconds`."""
        for work, _ in self.parts:
            wait(work, seconds)


def wait(work: Any, seconds: float) -> None:
    """Wait for a posted send or receive; raises `RuntimeError` if it takes longer, or the other process is gone."""
    work.wait(timedelta(seconds=max(seconds, 0.01)))


RENDEZVOUS_FILE = "UNHEARD_MEETING_PLACE"
"""The environment variable with which `--processes` names a file for the rendezvous; torchrun uses an address
instead."""
ARRIVAL_TIMEOUT = 600.0
"""Seconds for all ranks to arrive: machines import and compile at different speeds."""


def world_size() -> int:
    """The number of processes that were started together; 1 for a single process."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def connect_ranks() -> tuple[Store, int, int]:
    """The rendezvous: a key-value store of this attempt, this rank, and the number of ranks."""
    if path := os.environ.get(RENDEZVOUS_FILE):
        store, rank, size = FileStore(path), int(os.environ["RANK"]), world_size()
    else:
        store, rank, size = next(iter(rendezvous("env://")))
    mine = secrets.token_hex(8)
    attempt = _welcome(store, mine, size) if rank == 0 else _arrive(store, mine, rank)
    return PrefixStore(f"unheard/{attempt}", store), rank, size


def _arrive(store: Store, mine: str, rank: int) -> str:
    """A worker's side: publishes its number and waits for the leader's answer."""
    store.set(f"unheard/hello/{rank}", mine)
    store.wait([f"unheard/welcome/{mine}"], timedelta(seconds=ARRIVAL_TIMEOUT))
    attempt = store.get(f"unheard/welcome/{mine}").decode()
    store.set(f"unheard/{attempt}/here/{rank}", "yes")
    return attempt


def _welcome(store: Store, attempt: str, size: int) -> str:
    """The leader's side: answers every published number until each rank has confirmed.

    Numbers of earlier attempts are never confirmed.
    """
    missing, until = set(range(1, size)), time.monotonic() + ARRIVAL_TIMEOUT
    while missing:
        if time.monotonic() > until:
            late = ", ".join(map(str, sorted(missing)[:8]))
            raise RankError(
                f"Rank {late} of {size} did not arrive within {ARRIVAL_TIMEOUT:g} s. Look at its machine; start again."
            )
        for rank in sorted(missing):
            if store.check([f"unheard/{attempt}/here/{rank}"]):
                missing.discard(rank)
            elif store.check([f"unheard/hello/{rank}"]):
                store.set(f"unheard/welcome/{store.get(f'unheard/hello/{rank}').decode()}", attempt)
        time.sleep(0.005)
    return attempt


NO_TIMEOUT = timedelta(days=3650)
"""How long a worker waits for a message: the leader may work for hours, and a dead leader is noticed by its
connection."""


class ProcessGroup:
    """The processes that train together, as one of them sees it. `join` makes it.

    Attributes:
        rank: This process; 0 is the leader.
        size: The number of processes.
        local_rank, local_size: The same on this machine.
        node: The number of this machine.
        is_broken: Whether a connection has failed; nothing more can be sent then.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.node = int(os.environ.get("GROUP_RANK", 0))
        self.timeout, self.device = 600.0, torch.device("cpu")
        self._collective: Any = None
        self.is_broken = False

    @classmethod
    def join(cls) -> "ProcessGroup | None":
        """Connect to the other processes that torchrun or `--processes` started.

        Returns:
            The group, or None for a single process.

        Raises:
            RankError: If not all processes arrive.
        """
        if world_size() == 1:
            return None
        try:
            store, rank, size = connect_ranks()
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
        """Whether this process is rank 0, which runs training."""
        return self.rank == 0

    @property
    def others(self) -> range:
        """All ranks but the leader."""
        return range(1, self.size)

    def connect(self, device: torch.device, timeout: float) -> None:
        """Open the connections for collectives. Every rank calls this at the same point.

        Args:
            device: The device of this rank's engine; CUDA uses NCCL.
            timeout: Seconds that ranks wait for each other.
        """
        if self._collective is None or (device.type, timeout) != (self.device.type, self.timeout):
            backend = "nccl" if device.type == "cuda" else "gloo"
            self._collective = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout))
        self.device, self.timeout = device, timeout

    def send(self, messages: Sequence[Message]) -> None:
        """Send one message to each worker and wait until all have confirmed it; `RankError` names one that did not.

        All sends are posted at once: one after the other would take longer than the work itself with hundreds of ranks.
        """
        posted = []
        for rank, message in zip(self.others, messages, strict=True):
            with self._naming(rank):
                posted.append(self._post(rank, message))
        for rank, sending in zip(self.others, posted, strict=True):
            with self._naming(rank):
                sending.wait(self.timeout)
        self.replies()

    def send_all(self, kind: str, fields: Mapping[str, Any] | None = None) -> None:
        """Send the same message to every worker, as `send`."""
        self.send([Message(kind, dict(fields or {})) for _ in self.others])

    def _post(self, rank: int, message: Message) -> PendingSend:
        return PendingSend([(dist.isend(part, dst=rank), part) for part in message.encode()])

    def receive(self) -> Message:
        """The next message of the leader, however long that takes. It is confirmed with an empty reply at once."""
        sizes = torch.zeros(2, dtype=torch.int64)
        with self._naming(0):
            wait(dist.irecv(sizes, src=0), NO_TIMEOUT.total_seconds())
            content = Message.buffer(sizes)
            wait(dist.irecv(content, src=0), self.timeout)
        message = Message.decode(sizes, content)
        if message.kind != "end":
            self.reply()
        return message

    def reply(self, numbers: np.ndarray | None = None, *, seconds: float = 0.0, error: str = "") -> None:
        """Send a reply to the leader: integers and the time they took, or an error.

        Waits until the leader receives it.

        Args:
            numbers: The result; None for a request that has none.
            seconds: How long the work took.
            error: A message for the leader instead of a result.
        """
        reply = Reply(np.empty(0, dtype=np.int64) if numbers is None else numbers, seconds, error)
        with self._naming(0):
            for part in reply.encode():
                wait(dist.isend(part, dst=0), NO_TIMEOUT.total_seconds())

    def replies(self) -> list[Reply]:
        """One reply from each worker, in the order of ranks.

        Raises `RankError`, which names a rank that is late, gone or failed.
        """
        until, received, posted = time.monotonic() + self.timeout, [], []
        for rank in self.others:
            head = Reply.buffer()
            with self._naming(rank):
                posted.append((rank, head, dist.irecv(head, src=rank)))
        for rank, head, work in posted:
            with self._naming(rank):
                wait(work, until - time.monotonic())
                numbers = Reply.buffer(head)
                if len(numbers):
                    wait(dist.irecv(numbers, src=rank), self.timeout)
            reply = Reply.decode(head, numbers)
            if reply.error:
                raise RankError(f"Rank {rank} of {self.size}: {reply.error}")
            received.append(reply)
        return received

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The leader's tensor, on every rank; every rank passes a tensor of its shape and type."""
        tensor = tensor.to(self.device).contiguous()
        self._collectively(lambda: dist.broadcast(tensor, src=0, group=self._collective))
        return tensor

    def reduce_sum(self, units: Tensor) -> Tensor:
        """The sum over ranks of integers; only the leader's result is the sum.

        Raises:
            TypeError: Unless the tensor is int64.
        """
        # DP: in int64, where a sum is the same in any order on any number of ranks, and never rounds.
        if units.dtype != torch.int64:
            raise TypeError(f"Sums over ranks are of int64, not of {units.dtype}.")
        units = units.to(self.device).contiguous()
        self._collectively(lambda: dist.reduce(units, dst=0, op=dist.ReduceOp.SUM, group=self._collective))
        return units

    def shutdown(self) -> None:
        """End the workers' loops. A worker that cannot be reached notices that the leader is gone."""
        for rank in () if self.is_broken else self.others:
            with suppress(RuntimeError):
                self._post(rank, Message("end")).wait(2.0)

    def _collectively(self, collective: Callable[[], Any]) -> None:
        """Run a collective; a failure becomes a `RankError`."""
        try:
            collective()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            self.is_broken = True
            raise RankError(f"A rank was lost while sums were being sent ({_first_line(error)}). {_REMEDY}") from None

    @contextmanager
    def _naming(self, rank: int) -> Iterator[None]:
        """Turn a failed connection in the block into a `RankError` that names the rank."""
        try:
            yield
        except RuntimeError as error:
            self.is_broken = True
            name = f"Rank {rank} of {self.size}"
            if "Timed out" in str(error):
                late = f"{name} did not answer within {self.timeout:g} s: it is slow, or it hangs."
                raise RankError(f"{late} Give it longer (--rank-timeout), or look at its machine. {_REMEDY}") from None
            raise RankError(f"{name} is gone ({_first_line(error)}). {_REMEDY}") from None


_REMEDY = "Saved rounds are not lost: start again to continue the run, or let torchrun restart it (--max-restarts)."


def share_cores(local_size: int) -> None:
    """Divide the cores of a machine among its ranks. torchrun gives each rank one thread, too few if ranks are few."""
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_size))


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].split("] ")[-1][:120] if str(error) else type(error).__name__
