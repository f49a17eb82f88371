"""The full evaluation of a released model as one JSON object, measures.json in the run folder.

    measures = full_measures(Measured(model=..., params_P=..., ...), run.evaluation)
    write_measures(folder, measures)

Input: a model, held-out users and the vocabulary. Output: accuracies by token, by user and by word frequency, the
paper's head-word histograms (its last table), baselines on the same targets, and predictions after a few prompts.
`report/` reads the file without torch. The numbers are exact functions of held-out users' text: they have no noise, and
held-out users have no guarantee. Nothing here reads a training user.
"""

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from unheard.corpus.tokenizers import Tokenizer
from unheard.corpus.vocabulary import Vocabulary
from unheard.engines.distributed.parallel_map import ParallelMap, sequential_map
from unheard.evaluation.baselines import score_baselines
from unheard.evaluation.next_word import Evaluation, predict
from unheard.evaluation.scores import by_band, by_token, by_user, score
from unheard.models.model import LanguageModel
from unheard.run_folder import MEASURES_FORMAT, RunFolder, replace_file
from unheard.updates.users import User

SUGGESTIONS = 5
"""Predicted words per prompt."""
logger = logging.getLogger("unheard.evaluation")
PROMPTS = ("how are", "i don't", "what do you", "have a nice", "thank you so")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A model with the text to evaluate it on.

    Args:
        model: The model.
        params_P: Its parameters.
        vocabulary: The words of its output layer.
        tokens: How prompts are split into tokens.
        held_out: Held-out users in the store's order: at least those that are evaluated. The baselines count in all.
        public: Text of the corpus's public users, if it has some: the baselines are then fitted on it.
    """

    model: LanguageModel
    params_P: Tensor
    vocabulary: Vocabulary
    tokens: Tokenizer
    held_out: Sequence[User]
    public: Sequence[np.ndarray] = field(default=())


def full_measures(
    what: Measured,
    how: Evaluation,
    *,
    prompts: Sequence[str] = PROMPTS,
    progress: Callable[[int, int], None] | None = None,
    spread: ParallelMap = sequential_map,
) -> dict[str, Any]:
    """Compute the content of measures.json.

    Args:
        what: The model and the text.
        how: How much held-out text, in which windows.
        prompts: Texts whose most likely next words are included.
        progress: Called with the number of users done and their total.
        spread: How the batches are distributed: one after the other, or over ranks (training/worker.py).
    """
    users, size = how.choose(what.held_out), len(what.vocabulary)
    scores, heads = score(what.model, what.params_P, users, unroll=how.unroll, progress=progress, spread=spread)
    others = what.public or [user.tokens for user in what.held_out]
    baselines = score_baselines(users, others, size, are_public=bool(what.public))
    measures = {
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
        "prompts": [{"text": text, "words": _predictions(what, text)} for text in prompts],
    }
    return _finite(measures)


def write_measures(folder: RunFolder, measures: dict[str, Any]) -> None:
    """Write measures.json, with the digest of the model that it describes."""
    content = {**measures, "model_sha256": folder.model_digest()}
    replace_file(folder.measures, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    logger.info("%s: measures.json written", folder.path.name)


def _predictions(what: Measured, text: str) -> list[dict[str, Any]]:
    words = predict(what.model, what.params_P, what.vocabulary, what.tokens.split(text), SUGGESTIONS)
    return [{"word": word, "probability": p} for word, p in words if math.isfinite(p)]


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinity, which JSON does not have: a model that diverged has no loss."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
