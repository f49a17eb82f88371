"""A parallel map over batches: the same function on every batch, in this process or on all ranks.

Input: a `BatchFunction` of a model, its parameters and one batch of token rows; and batches. Output: the numbers of
each batch, in the order of the batches, so that sums over them are the same to the bit on any number of ranks. The rows
are sent to the rank that computes them, so only the leader needs held-out text. Evaluation and audit take a
`ParallelMap` as `parallel_map=`.

    values = list(sequential_map(tally, model, params_P, batches))
    values = list(map_on_ranks(ranks)(tally, model, params_P, batches))
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from unheard.engines.distributed.process_group import Message, ProcessGroup
from unheard.models.model import LanguageModel


@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens [B, W] of one user, and the user's features if the model takes them."""

    rows_BW: np.ndarray = field(repr=False)
    features_F: np.ndarray | None = field(default=None, repr=False)


BatchFunction = Callable[[LanguageModel, Mapping[str, Tensor], Tensor, Tensor | None], np.ndarray]
"""(model, named parameters, rows [B, W], features [F] or None) -> float64 numbers. Workers look it up by its name."""
ParallelMap = Callable[[BatchFunction, LanguageModel, Tensor, Sequence[TokenBatch]], Iterator[np.ndarray]]
"""(function, model, params_P, batches) -> the numbers of each batch."""


@torch.no_grad()
def sequential_map(
    function: BatchFunction, model: LanguageModel, params_P: Tensor, batches: Sequence[TokenBatch]
) -> Iterator[np.ndarray]:
    """Apply the function to all batches in this process, one after the other.

    Args:
        function: Computes the numbers of one batch.
        model: The model that `params_P` belongs to.
        params_P: The parameters, which decide the device.
        batches: Rows of tokens.
    """
    params = model.layout.split(params_P)
    for batch in batches:
        features_F = None if batch.features_F is None else torch.as_tensor(batch.features_F, device=params_P.device)
        yield function(model, params, torch.as_tensor(batch.rows_BW, device=params_P.device), features_F)


def map_on_ranks(ranks: ProcessGroup) -> ParallelMap:
    """A `ParallelMap` over all n ranks: rank r computes every n-th batch, beginning with batch r."""

    def on_ranks(
        function: BatchFunction, model: LanguageModel, params_P: Tensor, batches: Sequence[TokenBatch]
    ) -> Iterator[np.ndarray]:
        """Compute the batches on all ranks, and yield the results in the order of the batches."""
        name, dtype = getattr(function, "__name__", ""), str(params_P.dtype).removeprefix("torch.")
        messages = []
        for rank in ranks.others:
            shapes, numbers = _encode_batches(batches[rank :: ranks.size])
            messages.append(Message("map", {"function": name, "dtype": dtype, "batches": shapes}, numbers))
        ranks.send(messages)
        here_P = ranks.broadcast(params_P)
        results: list[np.ndarray | None] = [None] * len(batches)
        for k, values in zip(
            range(0, len(batches), ranks.size),
            sequential_map(function, model, here_P, batches[:: ranks.size]),
            strict=True,
        ):
            results[k] = values
        for rank, reply in zip(ranks.others, ranks.replies(), strict=True):
            for k, values in zip(range(rank, len(batches), ranks.size), _decode_values(reply.numbers), strict=True):
                results[k] = values
        return iter([values for values in results if values is not None])

    return on_ranks


def map_share(
    ranks: ProcessGroup, message: Message, functions: Mapping[str, BatchFunction], model: LanguageModel
) -> np.ndarray:
    """A worker's part of `map_on_ranks`: the encoded numbers of its batches."""
    fields = message.fields
    params_P = ranks.broadcast(torch.zeros(model.layout.total, dtype=getattr(torch, fields["dtype"])))
    batches = _decode_batches(fields["batches"], message.numbers)
    return _encode_values(list(sequential_map(functions[fields["function"]], model, params_P, batches)))


def _encode_batches(batches: Sequence[TokenBatch]) -> tuple[list[list[int]], np.ndarray]:
    """The shapes of the batches, and all their numbers in one array; features as the bits of float64."""
    parts, shapes = [np.empty(0, dtype=np.int64)], []
    for batch in batches:
        features = np.empty(0) if batch.features_F is None else np.asarray(batch.features_F, dtype=np.float64)
        shapes.append([*batch.rows_BW.shape, features.size])
        parts += [np.asarray(batch.rows_BW, dtype=np.int64).ravel(), features.view(np.int64)]
    return shapes, np.concatenate(parts)


def _decode_batches(shapes: list[list[int]], numbers: np.ndarray) -> list[TokenBatch]:
    """Cut the numbers that a process sent into batches."""
    batches, at = [], 0
    for rows, width, num_features in shapes:
        rows_BW = numbers[at : at + rows * width].reshape(rows, width).copy()
        at += rows * width
        features = numbers[at : at + num_features].view(np.float64).astype(np.float32)
        at += num_features
        batches.append(TokenBatch(rows_BW, features if num_features else None))
    return batches


def _encode_values(values: list[np.ndarray]) -> np.ndarray:
    """The count and the numbers of each batch, as the bits of float64: nothing is rounded."""
    parts = [np.empty(0, dtype=np.int64)]
    for value in values:
        parts += [np.array([value.size]), np.ascontiguousarray(value, dtype=np.float64).view(np.int64)]
    return np.concatenate(parts)


def _decode_values(numbers: np.ndarray) -> Iterator[np.ndarray]:
    """Cut the numbers that a process sent into one array for each batch."""
    at = 0
    while at < len(numbers):
        count = int(numbers[at])
        yield numbers[at + 1 : at + 1 + count].view(np.float64)
        at += 1 + count
