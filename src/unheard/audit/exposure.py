"""Has the model learned a planted secret by heart: the rank of each canary among random phrases of its length.

In: a released model, its vocabulary, and the record of canaries that `unheard prepare --canaries` left with the store. Out: the
exposure of each, log2(candidates) - log2(rank): 0 for the least likely phrase, the most for the likeliest. Of a phrase that was
never seen it exceeds x with probability 2^-x, if its words were drawn at random (`unheard canaries` draws such).
Where from: Carlini et al., "The Secret Sharer" (2019); for federated training Ramaswamy et al. (2020).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from unheard.corpus.vocabulary import BOS
from unheard.engines.distributed.parallel_map import Batch, Spread, in_turn
from unheard.errors import CorpusCorrupt, CorpusMissing, InvalidValue
from unheard.models.model import LanguageModel

FIRST_WORD = 3
"""Ids below are BOS, EOS and UNK."""
PHRASES_AT_ONCE = 256
ROUNDING = 1e-4
"""Of log probabilities, by which the same phrase may differ in another batch; who is as likely as that ranks before."""
SURPRISE = 0.05
"""How unlikely the highest of all exposures must be, by chance, before we say that something was learned by heart."""


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """One canary: how many users carried it, how often each, and how exposed it is. Not what it says."""

    number: int
    users: int
    repeats: int
    rank: int
    exposure: float
    most: float
    """What the likeliest of all candidates would have."""


def read_canaries(store: Path, vocabulary_size: int) -> list[dict[str, Any]]:
    """The record of who carries what; private, and read only here."""
    file = store / "canaries.json"
    if not file.is_file():
        raise CorpusMissing(
            f"{store} has no canaries: none were planted. Draw some with `unheard canaries`, then `unheard prepare --canaries`."
        )
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        for canary in found:
            tokens = [int(t) for t in canary["tokens"]]
            if not tokens or len(tokens) > 10_000 or not all(0 <= t < vocabulary_size for t in tokens):
                raise ValueError
            canary["tokens"], canary["carriers"] = tokens, len(canary["users"])
            canary["repeats"] = int(canary["repeats"])
    except (ValueError, TypeError, KeyError, OSError):
        raise CorpusCorrupt(f"{file} does not read back as written: prepare the store again.") from None
    return found


def exposures(
    model: LanguageModel,
    params_P: Tensor,
    canaries: Sequence[Mapping[str, Any]],
    rng: np.random.Generator,
    *,
    candidates: int = 10_000,
    spread: Spread = in_turn,
) -> Iterator[Exposure]:
    """One at a time, so that a caller can show how far it is. Canaries of one length share their candidates."""
    if candidates < 100:
        raise InvalidValue("Exposure needs at least 100 candidate phrases to rank among.")
    drawn: dict[int, np.ndarray] = {}
    for number, canary in enumerate(canaries):
        words = [t for t in canary["tokens"] if t >= FIRST_WORD]
        if not words:
            raise InvalidValue(f"Canary {number} has no words to rank.")
        if len(words) not in drawn:
            phrases_NL = rng.integers(FIRST_WORD, model.vocabulary_size, size=(candidates, len(words)))
            drawn[len(words)] = log_probability(model, params_P, phrases_NL, spread=spread)
        mine = log_probability(model, params_P, np.array([words]), spread=spread)[0]
        rank = 1 + int((drawn[len(words)] >= mine - ROUNDING).sum())
        most = math.log2(candidates + 1)
        yield Exposure(
            number=number,
            users=canary["carriers"],
            repeats=canary["repeats"],
            rank=rank,
            exposure=most - math.log2(rank),
            most=most,
        )


def log_probability(
    model: LanguageModel, params_P: Tensor, words_NL: np.ndarray, *, spread: Spread = in_turn
) -> np.ndarray:
    """log P(phrase | the beginning of a post), in nats, for phrases of one length."""
    features_F = np.zeros(model.user_features, dtype=np.float32) if model.user_features else None
    batches = [
        Batch(words_NL[start : start + PHRASES_AT_ONCE], features_F)
        for start in range(0, len(words_NL), PHRASES_AT_ONCE)
    ]
    return np.concatenate(list(spread(phrases, model, params_P, batches)))


def phrases(
    model: LanguageModel, params: Mapping[str, Tensor], target_BT: Tensor, features_F: Tensor | None
) -> np.ndarray:
    """One batch of them."""
    begin_B1 = torch.full((len(target_BT), 1), BOS, device=target_BT.device)
    logits_BTV = model.logits(params, torch.cat([begin_B1, target_BT[:, :-1]], dim=1), features_F)
    loss_N = nnf.cross_entropy(logits_BTV.flatten(0, 1).double(), target_BT.flatten(), reduction="none")
    return -loss_N.view_as(target_BT).sum(dim=1).cpu().numpy()


def learned_by_heart(found: Sequence[Exposure]) -> list[Exposure]:
    """Those whose exposure chance does not explain, all canaries that somebody carried taken together."""
    carried = [one for one in found if one.users > 0]
    return [one for one in carried if len(carried) * 2.0**-one.exposure < SURPRISE]
