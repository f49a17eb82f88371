"""The messages between ranks and their encoding: JSON and integers in tensors. Nothing is ever unpickled.

The leader sends a `Message` to each worker; a worker sends a `Reply`. Both are encoded as tensors whose sizes the
receiver knows before it receives them: a message as its two sizes and then its content, a reply as a head of fixed size
and then its numbers. The exchange itself, its timeouts and its errors are in process_group.py.

    >>> sizes, content = Message("sum", {"dtype": "float32"}, np.arange(3)).encode()
    >>> Message.decode(sizes, content).fields
    {'dtype': 'float32'}
"""

import json
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

ERROR_BYTES = 1024
"""Bytes of a reply for the text of an error."""


@dataclass(frozen=True)
class Message:
    """A request of the leader to one worker.

    Args:
        kind: what to do: "begin", "connect", "fingerprint", "sum", "add", "map" or "end".
        fields: its arguments, as JSON.
        numbers: its integers, such as the numbers of the users to sum.
    """

    kind: str
    # Not shown: the fields and numbers say how many users were drawn, and which.
    fields: dict[str, Any] = field(default_factory=dict, repr=False)
    numbers: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64), repr=False)

    def encode(self) -> tuple[Tensor, Tensor]:
        """The number of bytes of JSON and the number of integers; and the content: both one after the other."""
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
        """A tensor into which a head is received; given the head, one for its numbers."""
        return torch.zeros(2 + ERROR_BYTES // 8 if head is None else int(head[0]), dtype=torch.int64)

    @classmethod
    def decode(cls, head: Tensor, numbers: Tensor) -> "Reply":
        """The reply from its two tensors."""
        error = head[2:].numpy().tobytes().rstrip(b"\0").decode(errors="replace")
        return cls(numbers.numpy(), int(head[1]) / 1e9, error)


@dataclass(frozen=True)
class PendingSend:
    """A message that is being sent, with its memory, which must stay until it is sent."""

    parts: list[tuple[Any, Tensor]]

    def wait(self, seconds: float) -> None:
        """Waits until all is sent; raises `RuntimeError` if that takes longer."""
        for work, _ in self.parts:
            wait(work, seconds)


def wait(work: Any, seconds: float) -> None:
    """Waits for a posted send or receive; raises `RuntimeError` if it takes longer, or the other process is gone."""
    work.wait(timedelta(seconds=max(seconds, 0.01)))
