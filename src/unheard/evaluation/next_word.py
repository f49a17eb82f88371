"""How well a model guesses the next word of people it was not trained on.

In: a model, its parameters, held-out users. Out: AccuracyTop1/3/5, loss and perplexity, as plain numbers.
Where in the paper: appendix "Accuracy metrics". A target outside the dictionary is always a mistake, even if the model says UNK.
BOS is never a target; EOS is one, since a keyboard must know when to stop (docs/decisions/0004-what-counts-in-accuracy.md).
The most likely next words after some words.

In: a model and a context. Out: words with probabilities, UNK and BOS left out, since nobody wants them suggested.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from unheard.config import require
from unheard.corpus.vocabulary import BOS, EOS, UNK, Vocabulary
from unheard.engines.distributed.parallel_map import Batch, Spread, in_turn
from unheard.errors import InvalidValue
from unheard.models.model import LanguageModel, window_targets
from unheard.updates.users import User, windows_of


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


TOP = (1, 3, 5)
TOKENS_AT_ONCE = {"cpu": 4_000, "cuda": 80_000}
"""A GPU waits for each of a window's steps, however few windows take it together, so it takes many."""
BYTES_A_SCORE = 40
"""Of a GPU's memory: a score (of one word at one place) takes 9 by count (itself, its logarithm of a share, a comparison), and in
training others hold the rest."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How a run is evaluated."""

    every: int = 20
    """Rounds between evaluations (the paper's 20)."""
    max_tokens: int = 75_000
    """Held-out tokens to use, from the first held-out users on (the paper used 75,122)."""
    unroll: int = 80
    """Tokens of context: text is read in windows of this many, each from a zero state."""

    def __post_init__(self) -> None:
        require(self.every >= 1, "every must be at least 1 round.")
        require(self.max_tokens >= 1, "max_tokens must be at least 1.")
        require(self.unroll >= 1, "unroll must be at least 1 token.")

    def choose(self, users: Iterable[User]) -> list[User]:
        """Whole users, in order, until there are max_tokens; the last one is cut."""
        chosen, left = [], self.max_tokens + 1
        for user in users:
            if left < 2:
                break
            chosen.append(User(user.tokens[:left], user.features))
            left -= len(user.tokens)
        return chosen


@dataclass
class Tally:
    """Sums over targets, batch after batch."""

    targets: int = 0
    words: int = 0
    loss: float = 0.0
    hits: dict[int, int] = field(default_factory=lambda: dict.fromkeys(TOP, 0))
    word_hits: int = 0

    def add(self, row: np.ndarray) -> None:
        """One batch, as `tally` has it."""
        targets, words, loss, word_hits, *hits = row.tolist()
        self.targets += int(targets)
        self.words += int(words)
        self.loss += loss
        self.word_hits += int(word_hits)
        for k, hit in zip(TOP, hits, strict=True):
            self.hits[k] += int(hit)

    def numbers(self) -> dict[str, float]:
        mean = self.loss / self.targets
        return {
            **{f"accuracy_top{k}": self.hits[k] / self.targets for k in TOP},
            "accuracy_top1_words": self.word_hits / max(self.words, 1),
            "loss": mean,
            "perplexity": math.exp(min(mean, 700.0)),
            "tokens": self.targets,
        }


def tally(
    model: LanguageModel, params: Mapping[str, Tensor], windows_BW: Tensor, features_F: Tensor | None
) -> np.ndarray:
    """One batch: targets, words among them, loss, words guessed right, and targets among the first k guesses."""
    input_BT, target_BT, counts_BT = window_targets(windows_BW)
    # Places that do not count are scored too and left out of the sums: copying the scores of the others would cost more.
    logits_NV, target_N = model.logits(params, input_BT, features_F).flatten(0, -2), target_BT.flatten()
    counts_N = counts_BT.flatten()
    place_N = place(logits_NV, target_N)
    is_word_N = counts_N & (target_N != EOS)
    may_hit_N = counts_N & (target_N != UNK) & (place_N > 0)
    found = [
        counts_N.sum(),
        is_word_N.sum(),
        torch.where(counts_N, losses(logits_NV, target_N), 0.0).sum(),
        (may_hit_N & is_word_N & (place_N == 1)).sum(),
        *((may_hit_N & (place_N <= k)).sum() for k in TOP),
    ]
    return torch.stack([one.double() for one in found]).cpu().numpy()


def place(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    """The target's place among all guesses, from 1; behind those that the model likes as much. 0 where its score is no number."""
    # Counted, not sorted: a GPU has the first five of 10,000 sorted long after it has compared all of them.
    return (logits_NV >= logits_NV.gather(1, target_N[:, None])).sum(dim=1, dtype=torch.int32)


def losses(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    """Each target's surprise, in nats. Computed as the scores are, and given in double precision, so that sums are."""
    return nnf.cross_entropy(logits_NV, target_N, reduction="none").double()


def tokens_at_once(model: LanguageModel, device: torch.device) -> int:
    """Places that are scored at a time on such a device: as many as are worth it, if their scores fit."""
    most = TOKENS_AT_ONCE[device.type]
    if device.type != "cuda":
        return most
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(1, min(most, memory // BYTES_A_SCORE // model.vocabulary_size))


def evaluate(
    model: LanguageModel,
    params_P: Tensor,
    users: Sequence[User],
    *,
    unroll: int,
    at_once: int | None = None,
    spread: Spread = in_turn,
) -> dict[str, float]:
    """The numbers of one evaluation; `accuracy_top1_words` leaves EOS out. `spread` says who works on the batches, `at_once` how
    many tokens make one."""
    total = Tally()
    at_once = at_once or tokens_at_once(model, params_P.device)
    batches = list(_batches(users, unroll, max(1, at_once // unroll), bool(model.user_features)))
    for row in spread(tally, model, params_P, batches):
        total.add(row)
    if not total.targets:
        raise InvalidValue("There is no held-out text to evaluate on. Prepare the corpus with held-out users.")
    return total.numbers()


def _batches(users: Sequence[User], unroll: int, size: int, per_user: bool) -> Iterable[Batch]:
    """Windows of many users together; of one user at a time if the model looks at features."""
    if per_user:
        for user in users:
            windows_KW = windows_of(user.tokens, unroll)
            for start in range(0, len(windows_KW), size):
                yield Batch(windows_KW[start : start + size], user.features)
        return
    windows_KW = np.concatenate([windows_of(user.tokens, unroll) for user in users] or [np.empty((0, unroll + 1), int)])
    for start in range(0, len(windows_KW), size):
        yield Batch(windows_KW[start : start + size])
