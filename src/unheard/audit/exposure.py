"""Measures whether a model has memorized planted phrases: the rank of each phrase among random phrases of its length.

The exposure of a phrase is log2(candidates + 1) - log2(rank), where `rank` is its position when it and the random
candidates are sorted by their probability under the model. The least likely phrase has exposure 0. A phrase that the
model never saw, and whose words were drawn at random, exceeds an exposure of x with probability 2^-x; that turns
exposure into a test.

    planted = read_canaries(store, model.vocabulary_size)              # corpus/canaries.py
    results = list(exposures(model, params_P, planted, secure_generator()))
    memorized(results)                                                 # those that chance does not explain

References: Carlini et al., "The Secret Sharer: Evaluating and Testing Unintended Memorization in Neural Networks",
USENIX Security 2019, https://arxiv.org/abs/1802.08232. For federated training: Ramaswamy et al., "Training Production
Language Models without Memorizing User Data", 2020, https://arxiv.org/abs/2009.10031.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from unheard.corpus.canaries import FIRST_WORD
from unheard.corpus.vocabulary import BOS
from unheard.engines.distributed.parallel_map import ParallelMap, TokenBatch, sequential_map
from unheard.errors import InvalidValue
from unheard.models.model import LanguageModel

PHRASES_PER_BATCH = 256
FEWEST_CANDIDATES = 100
ROUNDING = 1e-4
"""The log probability of one phrase may differ by so much between batches. Candidates within this distance rank before
the phrase, so that rounding never raises an exposure."""
SIGNIFICANCE = 0.05
"""Phrases count as memorized if chance explains their exposures, all carried phrases together, with less than this
probability."""


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """The exposure of one planted phrase. It does not hold the phrase itself.

    Attributes:
        number: The position of the phrase in the record, from 0.
        users: How many users carried the phrase.
        repeats: How often each of them wrote it.
        rank: Its rank among the candidates, 1 for the most likely.
        exposure: log2(candidates + 1) - log2(rank), in bits.
        most: The largest exposure that this number of candidates can show.
    """

    number: int
    users: int
    repeats: int
    rank: int
    exposure: float
    most: float


def exposures(
    model: LanguageModel,
    params_P: Tensor,
    canaries: Sequence[Mapping[str, Any]],
    rng: np.random.Generator,
    *,
    candidates: int = 10_000,
    parallel_map: ParallelMap = sequential_map,
) -> Iterator[Exposure]:
    """Yield the exposure of each planted phrase, one at a time, so that a caller can show progress.

    Args:
        model: The language model.
        params_P: Its parameters.
        canaries: The record of planted phrases (`corpus.canaries.read_canaries`).
        rng: Draws the candidates. Phrases of one length share their candidates.
        candidates: The number of random phrases to rank among, at least 100.
        parallel_map: How batches are computed: in this process, or on all ranks (`engines/distributed/parallel_map.py`).

    Raises:
        InvalidValue: Too few candidates, or a phrase without words.
    """
    if candidates < FEWEST_CANDIDATES:
        raise InvalidValue(
            f"Exposure needs at least {FEWEST_CANDIDATES} candidate phrases to rank among, not {candidates}. Give more."
        )
    most = math.log2(candidates + 1)
    candidate_scores: dict[int, np.ndarray] = {}
    for number, canary in enumerate(canaries):
        words = [t for t in canary["tokens"] if t >= FIRST_WORD]
        length = len(words)
        if not words:
            raise InvalidValue(
                f"Canary {number} has no words of the vocabulary, so it cannot be ranked. Plant another phrase."
            )
        if length not in candidate_scores:
            phrases_NL = rng.integers(FIRST_WORD, model.vocabulary_size, size=(candidates, length))
            candidate_scores[length] = log_probability(model, params_P, phrases_NL, parallel_map=parallel_map)
        score = log_probability(model, params_P, np.array([words]), parallel_map=parallel_map)[0]
        rank = 1 + int((candidate_scores[length] >= score - ROUNDING).sum())
        yield Exposure(
            number=number,
            users=canary["carriers"],
            repeats=canary["repeats"],
            rank=rank,
            exposure=most - math.log2(rank),
            most=most,
        )


def log_probability(
    model: LanguageModel, params_P: Tensor, words_NL: np.ndarray, *, parallel_map: ParallelMap = sequential_map
) -> np.ndarray:
    """Return log P(phrase | beginning of a post) in nats for N phrases of L words each, [N].

    Args:
        model: The model.
        params_P: Its parameters.
        words_NL: The token ids of the phrases.
        parallel_map: Computes the batches here or on all ranks.
    """
    features_F = np.zeros(model.user_features, dtype=np.float32) if model.user_features else None
    batches = [
        TokenBatch(words_NL[start : start + PHRASES_PER_BATCH], features_F)
        for start in range(0, len(words_NL), PHRASES_PER_BATCH)
    ]
    return np.concatenate(list(parallel_map(phrases, model, params_P, batches)))


def phrases(
    model: LanguageModel, params: Mapping[str, Tensor], target_BT: Tensor, features_F: Tensor | None
) -> np.ndarray:
    """Return the log probability of each phrase of one batch, [B].

    This is the job that `log_probability` gives to other ranks, which know it by the name of this function.

    Args:
        model: The model.
        params: Its parameters by layer.
        target_BT: The token ids of the phrases of the batch.
        features_F: The features of the user who types them, if the model takes features.
    """
    begin_B1 = torch.full((len(target_BT), 1), BOS, device=target_BT.device)
    logits_BTV = model.logits(params, torch.cat([begin_B1, target_BT[:, :-1]], dim=1), features_F)
    loss_N = nnf.cross_entropy(logits_BTV.flatten(0, 1).double(), target_BT.flatten(), reduction="none")
    return -loss_N.view_as(target_BT).sum(dim=1).cpu().numpy()


def memorized(results: Sequence[Exposure]) -> list[Exposure]:
    """Return the phrases whose exposure chance does not explain.

    The test has Bonferroni's correction over all carried phrases.

    Controls, which no user carried, are never returned.
    """
    carried = [result for result in results if result.users > 0]
    return [result for result in carried if len(carried) * 2.0**-result.exposure < SIGNIFICANCE]
