"""What ranks say to each other, and how it lies on the wire: JSON and whole numbers in tensors. Nothing is ever unpickled.

In: what the leader asks of a rank, what a rank answers. Out: tensors whose sizes the other side knows before it receives them; and
back from there. Who speaks when, and who is late: engines/distributed/process_group.py.
"""

import json
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORDS = 1024
"""Bytes of an answer that say what went wrong."""


@dataclass(frozen=True)
class Message:
    """What the leader asks of one rank."""

    job: str
    facts: dict[str, Any] = field(default_factory=dict, repr=False)  # how many users, for one
    numbers: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64), repr=False)

    def packed(self) -> tuple[Tensor, Tensor]:
        """How many bytes of words and how many numbers, and then both in a row."""
        said = json.dumps([self.job, self.facts]).encode()
        numbers = np.ascontiguousarray(self.numbers, dtype=np.int64)
        content = torch.from_numpy(np.frombuffer(said + numbers.tobytes(), dtype=np.uint8).copy())
        return torch.tensor([len(said), numbers.size]), content

    @staticmethod
    def room(sizes: Tensor) -> Tensor:
        """Where a message of these sizes is received."""
        words, count = sizes.tolist()
        return torch.zeros(words + 8 * count, dtype=torch.uint8)

    @classmethod
    def unpacked(cls, sizes: Tensor, content: Tensor) -> "Message":
        words, said = int(sizes[0]), content.numpy().tobytes()
        job, facts = json.loads(said[:words])
        return cls(job, facts, np.frombuffer(said[words:], dtype=np.int64))


@dataclass(frozen=True)
class Answer:
    """What one rank says: numbers, and how long they took; or what went wrong."""

    numbers: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64), repr=False)
    seconds: float = field(default=0.0, repr=False)
    trouble: str = field(default="", repr=False)

    def packed(self) -> list[Tensor]:
        """A head that is always of one size, and the numbers if there are any."""
        numbers = np.ascontiguousarray(self.numbers, dtype=np.int64)
        words = np.zeros(WORDS, dtype=np.uint8)
        said = np.frombuffer(self.trouble.encode()[:WORDS], dtype=np.uint8)
        words[: len(said)] = said
        head = np.concatenate([np.array([numbers.size, int(self.seconds * 1e9)]), words.view(np.int64)])
        return [torch.from_numpy(part.copy()) for part in ((head, numbers) if numbers.size else (head,))]

    @staticmethod
    def room(head: Tensor | None = None) -> Tensor:
        """Where a head is received; and when that is there, where its numbers are."""
        return torch.zeros(2 + WORDS // 8 if head is None else int(head[0]), dtype=torch.int64)

    @classmethod
    def unpacked(cls, head: Tensor, numbers: Tensor) -> "Answer":
        trouble = head[2:].numpy().tobytes().rstrip(b"\0").decode(errors="replace")
        return cls(numbers.numpy(), int(head[1]) / 1e9, trouble)


@dataclass(frozen=True)
class Sending:
    """A message on its way, and its memory, which must stay until it has left."""

    parts: list[tuple[Any, Tensor]]

    def wait(self, seconds: float) -> None:
        for work, _ in self.parts:
            wait(work, seconds)


def wait(work: Any, seconds: float) -> None:
    """For something that was posted; a RuntimeError if it takes longer, or the other side is gone."""
    work.wait(timedelta(seconds=max(seconds, 0.01)))
