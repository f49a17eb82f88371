"""A parallel map: applies one function to every batch of tokens, in this process or on all ranks.

Input: a `BatchFunction`, a model, its parameters, and batches of token rows. Output: the numbers that the function
returns for each batch. They come in the order of the batches, so a sum over them is the same to the bit on any number
of ranks. The leader sends the rows to the ranks, so only the leader needs the held-out text. The functions of
evaluation and audit take a `ParallelMap` as the argument `parallel_map`.

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
    """Rows of tokens [B, W], and the features [F] of the user who wrote them if the model takes features."""

    rows_BW: np.ndarray = field(repr=False)
    features_F: np.ndarray | None = field(default=None, repr=False)


BatchFunction = Callable[[LanguageModel, Mapping[str, Tensor], Tensor, Tensor | None], np.ndarray]
"""A function (model, named parameters, rows [B, W], features [F] or None) -> float64 array.

The leader sends only the `__name__` of the function, so workers must have a function of that name (`map_share`).
"""
ParallelMap = Callable[[BatchFunction, LanguageModel, Tensor, Sequence[TokenBatch]], Iterator[np.ndarray]]
"""A function (function, model, params_P, batches) -> iterator over the array of each batch, in order."""


@torch.no_grad()
def sequential_map(
    function: BatchFunction, model: LanguageModel, params_P: Tensor, batches: Sequence[TokenBatch]
) -> Iterator[np.ndarray]:
    """Apply the function to all batches in this process, one after the other. Yield the array of each batch.

    Args:
        function: Computes the array of one batch.
        model: The model that `params_P` belongs to.
        params_P: The parameters. The function runs on their device.
        batches: Rows of tokens.
    """
    params = model.layout.split(params_P)
    for batch in batches:
        features_F = None if batch.features_F is None else torch.as_tensor(batch.features_F, device=params_P.device)
        yield function(model, params, torch.as_tensor(batch.rows_BW, device=params_P.device), features_F)


def map_on_ranks(ranks: ProcessGroup) -> ParallelMap:
    """Return a `ParallelMap` over all n ranks: rank r computes every n-th batch, beginning with batch r."""

    def on_ranks(
        function: BatchFunction, model: LanguageModel, params_P: Tensor, batches: Sequence[TokenBatch]
    ) -> Iterator[np.ndarray]:
        """Compute the batches on all ranks, and return the results in the order of the batches."""
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
    """Compute a worker's share of `map_on_ranks`. Return the encoded results for `ProcessGroup.reply`.

    Args:
        ranks: The process group.
        message: The leader's request, of kind "map".
        functions: The functions that the leader may name.
        model: The model of the run.
    """
    fields = message.fields
    params_P = ranks.broadcast(torch.zeros(model.layout.total, dtype=getattr(torch, fields["dtype"])))
    batches = _decode_batches(fields["batches"], message.numbers)
    return _encode_values(list(sequential_map(functions[fields["function"]], model, params_P, batches)))


def _encode_batches(batches: Sequence[TokenBatch]) -> tuple[list[list[int]], np.ndarray]:
    """Return the shapes of the batches, and all their numbers in one int64 array.

    Features are sent as the bits of float64, so that nothing is rounded.
    """
    parts, shapes = [np.empty(0, dtype=np.int64)], []
    for batch in batches:
        features = np.empty(0) if batch.features_F is None else np.asarray(batch.features_F, dtype=np.float64)
        shapes.append([*batch.rows_BW.shape, features.size])
        parts += [np.asarray(batch.rows_BW, dtype=np.int64).ravel(), features.view(np.int64)]
    return shapes, np.concatenate(parts)


def _decode_batches(shapes: list[list[int]], numbers: np.ndarray) -> list[TokenBatch]:
    """Return the batches that `_encode_batches` encoded."""
    batches, at = [], 0
    for rows, width, num_features in shapes:
        rows_BW = numbers[at : at + rows * width].reshape(rows, width).copy()
        at += rows * width
        features = numbers[at : at + num_features].view(np.float64).astype(np.float32)
        at += num_features
        batches.append(TokenBatch(rows_BW, features if num_features else None))
    return batches


def _encode_values(values: list[np.ndarray]) -> np.ndarray:
    """Return one int64 array with the size and the numbers of each batch.

    The numbers are sent as the bits of float64, so that nothing is rounded.
    """
    parts = [np.empty(0, dtype=np.int64)]
    for value in values:
        parts += [np.array([value.size]), np.ascontiguousarray(value, dtype=np.float64).view(np.int64)]
    return np.concatenate(parts)


def _decode_values(numbers: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the array of each batch from what `_encode_values` encoded."""
    at = 0
    while at < len(numbers):
        count = int(numbers[at])
        yield numbers[at + 1 : at + 1 + count].view(np.float64)
        at += 1 + count
