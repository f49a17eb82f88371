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

Each message is sent between the leader and one rank over Gloo, so that an error can name the rank that is late or gone.
Collectives use NCCL between GPUs, else Gloo.

`connect_ranks` connects the processes. It also works after a restart: torchrun may keep one key-value store for all
attempts, which then still contains old addresses. Each process publishes a random number in the store, and the leader
answers with the prefix of the keys of this attempt. Keys of an earlier attempt are therefore never read.

Messages consist of JSON and integers in tensors; nothing is unpickled, so a message cannot run code. The leader sends a
`Message` to each worker; a worker sends a `Reply`. Both are encoded as tensors whose sizes the receiver knows before it
receives them: a message as its two sizes and then its content, a reply as a head of fixed size and then its numbers.

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
"""The length in bytes of the error text in a reply. Longer texts are cut."""


@dataclass(frozen=True)
class Message:
    """A request of the leader to one worker.

    Args:
        kind: What to do: "begin", "connect", "fingerprint", "sum", "add", "map" or "end".
        fields: The arguments of the request, as JSON values.
        numbers: The integers of the request, such as the numbers of the users to sum.
    """

    kind: str
    # `repr` leaves these two out: they contain the users drawn and their number, which are private.
    fields: dict[str, Any] = field(default_factory=dict, repr=False)
    numbers: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64), repr=False)

    def encode(self) -> tuple[Tensor, Tensor]:
        """Return two tensors: the sizes (bytes of JSON, number of integers), and the content (JSON, then integers)."""
        text = json.dumps([self.kind, self.fields]).encode()
        numbers = np.ascontiguousarray(self.numbers, dtype=np.int64)
        content = torch.from_numpy(np.frombuffer(text + numbers.tobytes(), dtype=np.uint8).copy())
        return torch.tensor([len(text), numbers.size]), content

    @staticmethod
    def buffer(sizes: Tensor) -> Tensor:
        """Return a tensor to receive the content of a message into.

        Args:
            sizes: The first tensor of `encode`.
        """
        text_bytes, count = sizes.tolist()
        return torch.zeros(text_bytes + 8 * count, dtype=torch.uint8)

    @classmethod
    def decode(cls, sizes: Tensor, content: Tensor) -> "Message":
        """Return the message that the two tensors encode."""
        text_bytes, encoded = int(sizes[0]), content.numpy().tobytes()
        kind, fields = json.loads(encoded[:text_bytes])
        return cls(kind, fields, np.frombuffer(encoded[text_bytes:], dtype=np.int64))


@dataclass(frozen=True)
class Reply:
    """The answer of one worker: integers and the seconds that they took to compute, or the text of an error."""

    numbers: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64), repr=False)
    seconds: float = field(default=0.0, repr=False)
    error: str = field(default="", repr=False)

    def encode(self) -> list[Tensor]:
        """Return a tensor of fixed size, and a second one with the numbers if there are any.

        The first holds the count of the numbers, the nanoseconds, and the error, cut at `ERROR_BYTES`.
        """
        numbers = np.ascontiguousarray(self.numbers, dtype=np.int64)
        text = np.zeros(ERROR_BYTES, dtype=np.uint8)
        encoded = np.frombuffer(self.error.encode()[:ERROR_BYTES], dtype=np.uint8)
        text[: len(encoded)] = encoded
        head = np.concatenate([np.array([numbers.size, int(self.seconds * 1e9)]), text.view(np.int64)])
        return [torch.from_numpy(part.copy()) for part in ((head, numbers) if numbers.size else (head,))]

    @staticmethod
    def buffer(head: Tensor | None = None) -> Tensor:
        """Return a tensor to receive a head into; if the head is given, one to receive the numbers that follow it."""
        return torch.zeros(2 + ERROR_BYTES // 8 if head is None else int(head[0]), dtype=torch.int64)

    @classmethod
    def decode(cls, head: Tensor, numbers: Tensor) -> "Reply":
        """Return the reply that the two tensors encode."""
        error = head[2:].numpy().tobytes().rstrip(b"\0").decode(errors="replace")
        return cls(numbers.numpy(), int(head[1]) / 1e9, error)


@dataclass(frozen=True, repr=False)
class PendingSend:
    """A message that is being sent. It keeps the tensors alive until torch has sent them."""

    parts: list[tuple[Any, Tensor]]

    def wait(self, seconds: float) -> None:
        """Wait until the whole message is sent. Raise `RuntimeError` if a part takes longer than `seconds`."""
        for work, _ in self.parts:
            wait(work, seconds)


def wait(work: Any, seconds: float) -> None:
    """Wait for a posted send or receive.

    Raises:
        RuntimeError: The send or receive takes longer than `seconds`, or the other process is gone.
    """
    work.wait(timedelta(seconds=max(seconds, 0.01)))


RENDEZVOUS_FILE = "UNHEARD_MEETING_PLACE"
"""The environment variable in which `--processes` passes the path of the file through which the processes find each
other. torchrun passes an address instead."""
ARRIVAL_TIMEOUT = 600.0
"""Seconds that the leader waits for all ranks to connect. Machines may need minutes to import and to compile."""


def world_size() -> int:
    """Return the number of processes that were started together; 1 for a single process."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def connect_ranks() -> tuple[Store, int, int]:
    """Find the other processes.

    Returns:
        A key-value store for this attempt, the rank of this process, and the number of ranks.

    Raises:
        RankError: A rank does not arrive within `ARRIVAL_TIMEOUT` seconds; only on the leader.
        RuntimeError: The other processes cannot be reached.
    """
    if path := os.environ.get(RENDEZVOUS_FILE):
        store, rank, size = FileStore(path), int(os.environ["RANK"]), world_size()
    else:
        store, rank, size = next(iter(rendezvous("env://")))
    mine = secrets.token_hex(8)
    attempt = _welcome(store, mine, size) if rank == 0 else _arrive(store, mine, rank)
    return PrefixStore(f"unheard/{attempt}", store), rank, size


def _arrive(store: Store, mine: str, rank: int) -> str:
    """Publish the random number of this worker, and wait for the leader's answer. Return the prefix of this attempt."""
    store.set(f"unheard/hello/{rank}", mine)
    store.wait([f"unheard/welcome/{mine}"], timedelta(seconds=ARRIVAL_TIMEOUT))
    attempt = store.get(f"unheard/welcome/{mine}").decode()
    store.set(f"unheard/{attempt}/here/{rank}", "yes")
    return attempt


def _welcome(store: Store, attempt: str, size: int) -> str:
    """Send the prefix of this attempt to every worker, as the answer to its random number, and return the prefix.

    Returns when every rank has confirmed the answer. The number of a worker of an earlier attempt may still be in the
    store. It is answered too, but no process confirms it.

    Raises:
        RankError: A rank does not confirm within `ARRIVAL_TIMEOUT` seconds.
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
"""How long a worker waits for the leader: in effect forever, because the leader may work for hours between messages.

If the leader dies, its connection breaks, and the worker raises `RankError` immediately.
"""


class ProcessGroup:
    """The connections of this process to the processes that train with it. Use `join` to create one.

    Attributes:
        rank: The number of this process; 0 is the leader.
        size: The number of processes.
        local_rank: The number of this process among the processes of this machine.
        local_size: The number of processes of this machine.
        node: The number of this machine.
        timeout: Seconds that ranks wait for each other.
        device: The device of the tensors in collectives.
        is_broken: Whether a connection has failed. If so, nothing more can be sent.
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
            RankError: A process does not arrive, or cannot be reached.
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
        """All ranks except the leader."""
        return range(1, self.size)

    def connect(self, device: torch.device, timeout: float) -> None:
        """Open the connections for collectives. All ranks must call this at the same time.

        Args:
            device: The device of this rank's engine. CUDA devices use NCCL, others Gloo. All ranks need the same type.
            timeout: Seconds that ranks wait for each other; the same on all ranks.
        """
        if self._collective is None or (device.type, timeout) != (self.device.type, self.timeout):
            backend = "nccl" if device.type == "cuda" else "gloo"
            self._collective = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout))
        self.device, self.timeout = device, timeout

    def send(self, messages: Sequence[Message]) -> None:
        """Send one message to each worker, and wait until every worker has confirmed it.

        All sends are posted at once. With hundreds of ranks, one send after the other would take longer than the work.

        Args:
            messages: One message per worker, in the order of ranks.

        Raises:
            RankError: A worker does not confirm; the message names the rank.
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
        """Send the same message to every worker, and wait until every worker has confirmed it (see `send`)."""
        self.send([Message(kind, dict(fields or {})) for _ in self.others])

    def _post(self, rank: int, message: Message) -> PendingSend:
        """Start to send a message to one rank, without waiting."""
        return PendingSend([(dist.isend(part, dst=rank), part) for part in message.encode()])

    def receive(self) -> Message:
        """Wait for the next message of the leader, confirm it with an empty reply, and return it.

        Waits without a timeout. An "end" message is not confirmed.

        Raises:
            RankError: The leader is gone.
        """
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
        """Send a reply to the leader, and wait until the leader has received it.

        Args:
            numbers: The result; None if the request has no result.
            seconds: How long the work took.
            error: The text of an error; the leader raises it as a `RankError`.
        """
        reply = Reply(np.empty(0, dtype=np.int64) if numbers is None else numbers, seconds, error)
        with self._naming(0):
            for part in reply.encode():
                wait(dist.isend(part, dst=0), NO_TIMEOUT.total_seconds())

    def replies(self) -> list[Reply]:
        """Wait for one reply from each worker, and return the replies in the order of ranks.

        Raises:
            RankError: A worker is late, gone, or replied with an error; the message names the rank.
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
        """Return the leader's tensor on every rank. Every rank must call this with a tensor of the same shape and type.

        Raises:
            RankError: A rank is lost.
        """
        tensor = tensor.to(self.device).contiguous()
        self._collectively(lambda: dist.broadcast(tensor, src=0, group=self._collective))
        return tensor

    def reduce_sum(self, units: Tensor) -> Tensor:
        """Return the sum over ranks of integers. Every rank must call this; only the leader's result is the sum.

        Raises:
            TypeError: The tensor is not int64.
            RankError: A rank is lost.
        """
        # DP: in int64, where a sum is the same in any order on any number of ranks, because nothing is rounded.
        if units.dtype != torch.int64:
            raise TypeError(f"reduce_sum adds int64 tensors only, not {units.dtype}.")
        units = units.to(self.device).contiguous()
        self._collectively(lambda: dist.reduce(units, dst=0, op=dist.ReduceOp.SUM, group=self._collective))
        return units

    def shutdown(self) -> None:
        """Tell every worker to end its loop. A worker that gets no message ends when the leader's connection closes."""
        for rank in () if self.is_broken else self.others:
            with suppress(RuntimeError):
                self._post(rank, Message("end")).wait(2.0)

    def _collectively(self, collective: Callable[[], Any]) -> None:
        """Run a collective operation and wait for the device. Raise `RankError` if it fails."""
        try:
            collective()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            self.is_broken = True
            raise RankError(f"A rank was lost while sums were being sent ({_first_line(error)}). {_REMEDY}") from None

    @contextmanager
    def _naming(self, rank: int) -> Iterator[None]:
        """Raise a `RankError` that names the rank if a connection fails in the `with` block."""
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
    """Set the number of torch threads so that the ranks of this machine share its cores.

    torchrun sets OMP_NUM_THREADS to 1, which leaves cores idle if there are fewer ranks than cores. Another value of
    OMP_NUM_THREADS is kept.
    """
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_size))


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message without torch's prefix in brackets; else the name of its class."""
    return str(error).splitlines()[0].split("] ")[-1][:120] if str(error) else type(error).__name__
