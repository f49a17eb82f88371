"""The most likely next words after some words.

In: a model and a context. Out: words with probabilities, UNK and BOS left out, since nobody wants them suggested.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unheard.corpus.vocabulary import BOS, UNK, Vocabulary
from unheard.models.model import LanguageModel


@torch.no_grad()
def predict(
    model: LanguageModel, params_P: Tensor, vocabulary: Vocabulary, words: Sequence[str], top: int = 3
) -> list[tuple[str, float]]:
    """The `top` next words; EOS shows as it stands in the vocabulary."""
    ids = [BOS, *vocabulary.encode_words(words).tolist()]
    context_1T = torch.tensor([ids[-(getattr(model, "context", None) or len(ids)) :]], device=params_P.device)
    features_F = torch.zeros(model.user_features, device=params_P.device) if model.user_features else None
    logits_V = model.logits(model.layout.split(params_P), context_1T, features_F)[0, -1].double()
    probs_V = torch.softmax(logits_V, dim=-1)
    probs_V[[BOS, UNK]] = 0.0
    best = probs_V.topk(min(top, len(vocabulary)))
    return [(vocabulary.word(i), p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
