"""Work that falls into batches which know nothing of each other: measures and audits, one batch after the other, or on all ranks.

In: a job (a function of a model, its parameters and one batch of rows) and batches. Out: each batch's numbers, in their order, so
that whoever adds them up gets the same sum, to the bit, on any number of ranks. Rows travel to the rank that works on them: no
rank but the leader needs held-out text. Used as `spread=` of evaluation/next_word.py, evaluation/scores.py, audit/exposure.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from unheard.engines.distributed.process_group import Ranks
from unheard.engines.distributed.protocol import Message
from unheard.models.model import LanguageModel


@dataclass(frozen=True)
class Batch:
    """Rows of token ids [B, W], and what is known about their one user if the model takes that."""

    rows_BW: np.ndarray = field(repr=False)
    features_F: np.ndarray | None = field(default=None, repr=False)


Job = Callable[[LanguageModel, Mapping[str, Tensor], Tensor, Tensor | None], np.ndarray]
"""(model, parameters by layer, rows, features) to float64 numbers."""
Spread = Callable[[Job, LanguageModel, Tensor, Sequence[Batch]], Iterator[np.ndarray]]


@torch.no_grad()
def in_turn(job: Job, model: LanguageModel, params_P: Tensor, batches: Sequence[Batch]) -> Iterator[np.ndarray]:
    """All batches here, one after the other."""
    params = model.layout.split(params_P)
    for batch in batches:
        features_F = None if batch.features_F is None else torch.as_tensor(batch.features_F, device=params_P.device)
        yield job(model, params, torch.as_tensor(batch.rows_BW, device=params_P.device), features_F)


def on_ranks(ranks: Ranks) -> Spread:
    """Every rank takes every so-manieth batch."""

    def spread(job: Job, model: LanguageModel, params_P: Tensor, batches: Sequence[Batch]) -> Iterator[np.ndarray]:
        job_name, dtype = getattr(job, "__name__", ""), str(params_P.dtype).removeprefix("torch.")
        messages = []
        for rank in ranks.others:
            shapes, numbers = _packed(batches[rank :: ranks.size])
            messages.append(Message("spread", {"job": job_name, "dtype": dtype, "batches": shapes}, numbers))
        ranks.tell(messages)
        here_P = ranks.hand_out(params_P)
        found: list[np.ndarray | None] = [None] * len(batches)
        for k, values in zip(
            range(0, len(batches), ranks.size), in_turn(job, model, here_P, batches[:: ranks.size]), strict=True
        ):
            found[k] = values
        for rank, answer in zip(ranks.others, ranks.answers(), strict=True):
            for k, values in zip(range(rank, len(batches), ranks.size), _answered(answer.numbers), strict=True):
                found[k] = values
        return iter([values for values in found if values is not None])

    return spread


def work_on(ranks: Ranks, message: Message, jobs: Mapping[str, Job], model: LanguageModel) -> np.ndarray:
    """What a rank answers when it is asked for its batches."""
    facts = message.facts
    params_P = ranks.hand_out(torch.zeros(model.layout.total, dtype=getattr(torch, facts["dtype"])))
    batches = _unpacked(facts["batches"], message.numbers)
    return _packed_values(list(in_turn(jobs[facts["job"]], model, params_P, batches)))


def _packed(batches: Sequence[Batch]) -> tuple[list[list[int]], np.ndarray]:
    """Shapes, and all numbers in a row; features as the bits of float64."""
    parts, shapes = [np.empty(0, dtype=np.int64)], []
    for batch in batches:
        features = np.empty(0) if batch.features_F is None else np.asarray(batch.features_F, dtype=np.float64)
        shapes.append([*batch.rows_BW.shape, features.size])
        parts += [np.asarray(batch.rows_BW, dtype=np.int64).ravel(), features.view(np.int64)]
    return shapes, np.concatenate(parts)


def _unpacked(shapes: list[list[int]], numbers: np.ndarray) -> list[Batch]:
    batches, place = [], 0
    for rows, width, num_features in shapes:
        rows_BW = numbers[place : place + rows * width].reshape(rows, width).copy()
        place += rows * width
        features = numbers[place : place + num_features].view(np.float64).astype(np.float32)
        place += num_features
        batches.append(Batch(rows_BW, features if num_features else None))
    return batches


def _packed_values(values: list[np.ndarray]) -> np.ndarray:
    """Each batch's numbers after their count, as bits: nothing is rounded on the way."""
    parts = [np.empty(0, dtype=np.int64)]
    for one in values:
        parts += [np.array([one.size]), np.ascontiguousarray(one, dtype=np.float64).view(np.int64)]
    return np.concatenate(parts)


def _answered(numbers: np.ndarray) -> Iterator[np.ndarray]:
    place = 0
    while place < len(numbers):
        count = int(numbers[place])
        yield numbers[place + 1 : place + 1 + count].view(np.float64)
        place += 1 + count
