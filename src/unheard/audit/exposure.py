"""Measures whether a model has memorized planted phrases, by the rank of each phrase among random phrases.

The exposure of a phrase is log2(candidates + 1) - log2(rank). `rank` is the position of the phrase when the phrase and
the random candidates of its length are sorted by their probability under the model. The least likely phrase has
exposure 0. If the model never saw a phrase, and its words were drawn at random, its exposure is x or more with
probability at most 2^-x. So an exposure can be used as a statistical test.

    planted = read_canaries(store, model.vocabulary_size)              # corpus/canaries.py
    results = list(exposures(model, params_P, planted, secure_generator()))
    memorized(results)                                                 # exposures that chance does not explain

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
"""The number of phrases that a model scores in one batch."""
FEWEST_CANDIDATES = 100
"""The smallest number of random phrases that a planted phrase may be ranked among."""
ROUNDING = 1e-4
"""The largest difference of the log probability of one phrase between batches, which comes from rounding.

Candidates within this distance rank before the phrase, so that rounding never raises an exposure.
"""
SIGNIFICANCE = 0.05
"""The level of the test of `memorized`: the probability that it reports any phrase although the model has memorized
none."""


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """The exposure of one planted phrase. The object does not contain the phrase.

    Attributes:
        number: The position of the phrase in the record of planted phrases, from 0.
        users: The number of users in whose text the phrase was planted; 0 for a control.
        repeats: How often the phrase is in the text of each of these users.
        rank: The rank of the phrase among the candidates; 1 is the most likely.
        exposure: log2(candidates + 1) - log2(rank), in bits.
        most: The largest possible exposure with this number of candidates.
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
        rng: The generator that draws the candidates. Phrases of the same length are compared with the same candidates.
        candidates: The number of random phrases that each phrase is ranked among, at least 100.
        parallel_map: Computes batches in this process or on all ranks (`engines/distributed/parallel_map.py`).

    Raises:
        InvalidValue: There are too few candidates, or a phrase has no words of the vocabulary.
    """
    if candidates < FEWEST_CANDIDATES:
        raise InvalidValue(
            f"Exposure needs at least {FEWEST_CANDIDATES} candidate phrases, not {candidates}. Give more candidates."
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
    """Return log P(phrase | beginning of a post) in nats, for N phrases of L words each, [N].

    Args:
        model: The model.
        params_P: Its parameters.
        words_NL: The token ids of the phrases.
        parallel_map: Computes batches in this process or on all ranks.
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

    `log_probability` computes this function on other ranks, which look it up by its name.

    Args:
        model: The model.
        params: Its parameters, by layer.
        target_BT: The token ids of the phrases of the batch.
        features_F: The features of a user, if the model takes features; `log_probability` passes zeros.
    """
    begin_B1 = torch.full((len(target_BT), 1), BOS, device=target_BT.device)
    logits_BTV = model.logits(params, torch.cat([begin_B1, target_BT[:, :-1]], dim=1), features_F)
    loss_N = nnf.cross_entropy(logits_BTV.flatten(0, 1).double(), target_BT.flatten(), reduction="none")
    return -loss_N.view_as(target_BT).sum(dim=1).cpu().numpy()


def memorized(results: Sequence[Exposure]) -> list[Exposure]:
    """Return the phrases whose exposure is too large to be explained by chance.

    The test has the level `SIGNIFICANCE` for all planted phrases together (Bonferroni's correction). Controls, which
    are in no user's text, are never returned.
    """
    carried = [result for result in results if result.users > 0]
    return [result for result in carried if len(carried) * 2.0**-result.exposure < SIGNIFICANCE]
