"""The full measures of one released model, as one JSON object: what the page and every comparison read.

In: a model, held-out users, its words. Out: `measures.json` of the run folder, written whole. `report/` reads it without torch.
The head-word histograms are the paper's last table. Numbers here are exact functions of held-out people's text; they have no
noise, and those people no guarantee. Nothing here looks at a training user.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from unheard.corpus.tokenizers import Tokenizer
from unheard.corpus.vocabulary import Vocabulary
from unheard.engines.distributed.parallel_map import Spread, in_turn
from unheard.evaluation.baselines import score_baselines
from unheard.evaluation.next_word import Evaluation, predict
from unheard.evaluation.scores import by_band, by_token, by_user, score
from unheard.models.model import LanguageModel
from unheard.run_folder import MEASURES_FORMAT, RunFolder, replace_file
from unheard.updates.users import User

SUGGESTIONS = 5
PROMPTS = ("how are", "i don't", "what do you", "have a nice", "thank you so")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A model with the text to measure it on."""

    model: LanguageModel
    params_P: Tensor
    vocabulary: Vocabulary
    tokens: Tokenizer
    held_out: Sequence[User]
    """Held-out users in the store's order: at least those that are measured; the baselines count in all of them."""
    public: Sequence[np.ndarray] = field(default=())
    """Text of the corpus's public users, if it has some: the baselines are then fitted on it."""


def full_measures(
    what: Measured,
    how: Evaluation,
    *,
    prompts: Sequence[str] = PROMPTS,
    progress: Callable[[int, int], None] | None = None,
    spread: Spread = in_turn,
) -> dict[str, Any]:
    """By token, by user, by band; head words; baselines on the same targets; what the model says after a few prompts."""
    users, size = how.choose(what.held_out), len(what.vocabulary)
    scores, heads = score(what.model, what.params_P, users, unroll=how.unroll, progress=progress, spread=spread)
    others = what.public or [user.tokens for user in what.held_out]
    baselines = score_baselines(users, others, size, are_public=bool(what.public))
    found = {
        "format": MEASURES_FORMAT,
        "max_tokens": how.max_tokens,
        "unroll": how.unroll,
        "tokens": by_token(scores),
        "users": by_user(scores),
        "bands": by_band(scores, size),
        "head_words": {str(head): counts.tolist() for head, counts in heads.histograms.items()},
        "baselines": {
            name: {"tokens": by_token(s), "users": by_user(s), "bands": by_band(s, size)}
            for name, s in baselines.items()
        },
        "baselines_fitted_on": "the corpus's public users" if what.public else "other held-out users",
        "prompts": [{"text": text, "words": _said(what, text)} for text in prompts],
    }
    return _finite(found)


def write_measures(folder: RunFolder, measures: dict[str, Any]) -> None:
    """Keep the measures with the model that they are about."""
    content = {**measures, "model_sha256": folder.model_digest()}
    replace_file(folder.measures, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def _said(what: Measured, text: str) -> list[dict[str, Any]]:
    words = predict(what.model, what.params_P, what.vocabulary, what.tokens.split(text), SUGGESTIONS)
    return [{"word": word, "probability": p} for word, p in words if math.isfinite(p)]


def _finite(value: Any) -> Any:
    """A model that has diverged has no loss: JSON knows no NaN, and a figure that does not exist is null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
