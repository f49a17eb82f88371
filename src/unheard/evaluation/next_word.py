"""Computes next-word accuracy and loss on held-out users, and predicts the most likely next words after a text.

    users = Evaluation(max_tokens=75_000).choose(users_in_turn(store.held_out, model))
    evaluate(model, params_P, users, unroll=80)         # {"accuracy_top1": ..., "loss": ..., "perplexity": ...}
    predict(model, params_P, vocabulary, ["how", "are"])   # [("you", 0.41), ...]

Paper: appendix "Accuracy metrics". A target outside the dictionary always counts as a mistake, even if the model
predicts UNK. BOS is never a target. EOS is a target, because a keyboard must predict the end of a sentence
(docs/decisions/0004-what-counts-in-accuracy.md).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from unheard.config import require
from unheard.corpus.vocabulary import BOS, EOS, UNK, Vocabulary
from unheard.engines.distributed.parallel_map import ParallelMap, TokenBatch, sequential_map
from unheard.errors import InvalidValue
from unheard.mechanism.aggregation import has_kernels
from unheard.models.model import LanguageModel, unknown_features, window_targets
from unheard.parameters import to_device
from unheard.updates.user_update import User, windows_of

TOP = (1, 3, 5)
"""The values of k for which a top-k accuracy is reported."""
TOKENS_AT_ONCE = {"cpu": 4_000, "cuda": 80_000}
"""The number of positions to score at a time. On a GPU a time step takes about as long for many windows as for few, so
large batches are faster."""
BYTES_PER_SCORE = 40
"""Bytes of GPU memory to reserve per score (one word at one position). The computation itself needs about 9: the score,
its log-softmax and a comparison. The rest is for what training keeps in memory at the same time."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How often, and on how much held-out text, a run is evaluated.

    >>> Evaluation(every=50).max_tokens
    75000

    Args:
        every: Rounds between evaluations (20 in the paper). The last round is always evaluated.
        max_tokens: The number of held-out tokens to use, starting with the first held-out user (75,122 in the paper).
        unroll: The length of a window in tokens. Each window starts from a zero state, so this limits the context.

    Raises:
        InvalidValue: A value is below 1, or `unroll` is above a million.
    """

    every: int = 20
    max_tokens: int = 75_000
    unroll: int = 80

    def __post_init__(self) -> None:
        require(self.every >= 1, "every must be at least 1 round.")
        require(self.max_tokens >= 1, "max_tokens must be at least 1.")
        require(1 <= self.unroll <= 10**6, "unroll must be at least 1 token, and at most a million.")

    def choose(self, users: Iterable[User]) -> list[User]:
        """Return the first users, up to `max_tokens` + 1 tokens in total (the first token is never a target).

        The text of the last of them is cut to fit. `users` may be a generator: later users are not read.
        """
        chosen, left = [], self.max_tokens + 1
        for user in users:
            if left < 2:
                break
            chosen.append(User(user.tokens[:left], user.features))
            left -= len(user.tokens)
        return chosen


@dataclass
class Totals:
    """Sums over the targets of all batches of one evaluation.

    Attributes:
        targets: The number of targets that count.
        words: The number of those targets that are not EOS.
        loss: The sum of their cross-entropies, in nats.
        hits: For each k of TOP, how many targets are among the k most likely words.
        word_hits: How many targets other than EOS are the most likely word.
    """

    targets: int = 0
    words: int = 0
    loss: float = 0.0
    hits: dict[int, int] = field(default_factory=lambda: dict.fromkeys(TOP, 0))
    word_hits: int = 0

    def add(self, row: np.ndarray) -> None:
        """Add the sums of one batch, as `count_batch` returns them."""
        targets, words, loss, word_hits, *hits = row.tolist()
        self.targets += int(targets)
        self.words += int(words)
        self.loss += loss
        self.word_hits += int(word_hits)
        for k, hit in zip(TOP, hits, strict=True):
            self.hits[k] += int(hit)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the evaluation, with the keys that `evaluate` lists."""
        mean = self.loss / self.targets
        return {
            **{f"accuracy_top{k}": self.hits[k] / self.targets for k in TOP},
            "accuracy_top1_words": self.word_hits / max(self.words, 1),
            "loss": mean,
            "perplexity": perplexity(mean),
            "tokens": self.targets,
        }


def perplexity(mean_loss: float) -> float:
    """Return exp of the mean loss, in nats. The loss counts as at most 700, so that exp does not overflow."""
    return math.exp(min(mean_loss, 700.0))


def count_batch(
    model: LanguageModel, params: Mapping[str, Tensor], windows_BW: Tensor, features_F: Tensor | None
) -> np.ndarray:
    """Compute the sums of one batch, in the order in which `Totals.add` reads them.

    Args:
        model: The model.
        params: Its parameters by layer.
        windows_BW: Windows of token ids; all from one user if the model takes features.
        features_F: The features of that user; None if the model takes none.

    Returns:
        Float64 numbers: targets, targets that are words, loss, words predicted correctly, and for each k of TOP the
        targets among the top k.
    """
    return batch_sums(model, params, windows_BW, features_F).cpu().numpy()


def batch_sums(
    model: LanguageModel, params: Mapping[str, Tensor], windows_BW: Tensor, features_F: Tensor | None
) -> Tensor:
    """Compute the sums of `count_batch` as a float64 tensor on the device. On a GPU this returns before they are ready.

    Args:
        model: The model.
        params: Its parameters by layer.
        windows_BW: Windows of token ids; all from one user if the model takes features.
        features_F: The features of that user; None if the model takes none.
    """
    input_BT, target_BT, counts_BT = window_targets(windows_BW)
    # Score all positions and leave out of the sums those that do not count: selecting scores first would copy them.
    target_N, counts_N = target_BT.flatten(), counts_BT.flatten()
    rank_N, loss_N = target_scores(model, params, input_BT, features_F, target_N)
    is_word_N = counts_N & (target_N != EOS)
    may_hit_N = counts_N & (target_N != UNK) & (rank_N > 0)
    sums = [
        counts_N.sum(),
        is_word_N.sum(),
        torch.where(counts_N, loss_N.double(), 0.0).sum(),
        (may_hit_N & is_word_N & (rank_N == 1)).sum(),
        *((may_hit_N & (rank_N <= k)).sum() for k in TOP),
    ]
    return torch.stack([value.double() for value in sums])


def target_scores(
    model: LanguageModel,
    params: Mapping[str, Tensor],
    input_BT: Tensor,
    features_F: Tensor | None,
    target_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the rank of each target, counted as in `target_rank`, and its cross-entropy in nats, both [N].

    On a GPU, a model whose logits are a product of outputs and word vectors, such as the paper's LSTM, is scored by a
    kernel that does not store the logits of all words.
    """
    factors = model.factored_logits(params, input_BT, features_F) if has_kernels(input_BT.device) else None
    if factors is not None and factors[0].dtype == torch.float32:
        from unheard.evaluation.kernels import score_targets

        output_BTD, vector_VD = factors
        return score_targets(output_BTD.flatten(0, -2), vector_VD, target_N)
    logits_NV = model.logits(params, input_BT, features_F).flatten(0, -2)
    return target_rank(logits_NV, target_N), losses(logits_NV, target_N)


def target_rank(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    """Return the rank of each target among all words, int32 [N]. The rank of the most likely word is 1.

    A target ranks behind other words with the same score. The rank is 0 if the score of the target is NaN.

    Args:
        logits_NV: Scores of all words.
        target_N: The ids of the targets.
    """
    # Count the scores that are not lower: on a GPU this is much faster than finding the top 5 of 10,000 words.
    return (logits_NV >= logits_NV.gather(1, target_N[:, None])).sum(dim=1, dtype=torch.int32)


def losses(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    """Return the cross-entropy of each target in nats, [N]. It is float64 so that sums over many targets are precise.

    Args:
        logits_NV: Scores of all words.
        target_N: The ids of the targets.
    """
    return nnf.cross_entropy(logits_NV, target_N, reduction="none").double()


def tokens_at_once(model: LanguageModel, device: torch.device) -> int:
    """Return how many positions to score at a time: TOKENS_AT_ONCE, or fewer if the scores do not fit into GPU memory.

    Args:
        model: The model, for the size of its vocabulary.
        device: The device that computes the scores.
    """
    most = TOKENS_AT_ONCE[device.type]
    if device.type != "cuda":
        return most
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(1, min(most, memory // BYTES_PER_SCORE // model.vocabulary_size))


def evaluate(
    model: LanguageModel,
    params_P: Tensor,
    users: Sequence[User],
    *,
    unroll: int,
    at_once: int | None = None,
    parallel_map: ParallelMap = sequential_map,
) -> dict[str, float]:
    """Evaluate a model on held-out users.

    Args:
        model: The model.
        params_P: Its parameters, on the device to evaluate on.
        users: Held-out users, usually from `Evaluation.choose`.
        unroll: Tokens per window; each window starts from a zero state.
        at_once: Tokens per batch; None for the number that `tokens_at_once` returns for the device.
        parallel_map: Computes the batches: `sequential_map` in this process, or a map over ranks (training/worker.py).

    Returns:
        `accuracy_top1`, `accuracy_top3`, `accuracy_top5`, `accuracy_top1_words` (top 1 over targets other than EOS),
        `loss` in nats per target, `perplexity`, and `tokens`, the number of targets. Accuracies are fractions.

    Raises:
        InvalidValue: The users have no text to predict.
    """
    text = HeldOutText(model, users, unroll=unroll, device=params_P.device, at_once=at_once)
    return text.start(params_P, parallel_map)()


class HeldOutText:
    """Held-out text, divided into batches once and used for several evaluations of one model.

    The first evaluation copies the batches to the device, where they stay. Evaluations over ranks do not need the copy.

    Args:
        model: The model to evaluate.
        users: Held-out users, usually from `Evaluation.choose`.
        unroll: Tokens per window.
        device: The device of the parameters.
        at_once: Tokens per batch; None for the number that `tokens_at_once` returns for the device.
    """

    def __init__(
        self,
        model: LanguageModel,
        users: Sequence[User],
        *,
        unroll: int,
        device: torch.device,
        at_once: int | None = None,
    ) -> None:
        self.model, self.device = model, device
        size = max(1, (at_once or tokens_at_once(model, device)) // unroll)
        self.batches = [batch for batch, _ in batches_of_users(users, unroll, size, bool(model.user_features))]

    @cached_property
    def _on_device(self) -> list[tuple[Tensor, Tensor | None]]:
        rows = [to_device(batch.rows_BW, self.device) for batch in self.batches]
        features = [None if b.features_F is None else to_device(b.features_F, self.device) for b in self.batches]
        return list(zip(rows, features, strict=True))

    def start(self, params_P: Tensor, parallel_map: ParallelMap = sequential_map) -> Callable[[], dict[str, float]]:
        """Start an evaluation and return a function that waits for the result and returns the metrics.

        To keep a GPU busy, start several evaluations before you call the first of these functions.

        Args:
            params_P: The parameters, on the device.
            parallel_map: Computes the batches. With a map over ranks, `start` itself waits for the result.
        """
        if parallel_map is not sequential_map:
            return partial(_metrics, list(parallel_map(count_batch, self.model, params_P, self.batches)))
        params = self.model.layout.split(params_P)
        with torch.no_grad():
            return partial(_metrics, [batch_sums(self.model, params, *batch) for batch in self._on_device])


def _metrics(rows: Sequence[Tensor | np.ndarray]) -> dict[str, float]:
    """Compute the metrics of an evaluation from the sums of its batches.

    Raises:
        InvalidValue: No batch has a target.
    """
    totals = Totals()
    for row in rows:
        totals.add(row.cpu().numpy() if isinstance(row, Tensor) else row)
    if not totals.targets:
        raise InvalidValue("There is no held-out text to evaluate on. Prepare the corpus with held-out users.")
    return totals.metrics()


def batches_of_users(
    users: Sequence[User], unroll: int, size: int, per_user: bool
) -> Iterator[tuple[TokenBatch, np.ndarray]]:
    """Divide the text of users into batches of windows.

    Args:
        users: The users.
        unroll: Tokens per window.
        size: Windows per batch.
        per_user: Whether each batch holds windows of one user only, with that user's features. If False, a batch may
            hold windows of several users and has no features.

    Yields:
        A batch; and for each of its windows, the position of the window's user in `users`, [B].
    """
    everybody = list(range(len(users)))
    for group in [[i] for i in everybody] if per_user else [everybody]:
        windows = [windows_of(users[i].tokens, unroll) for i in group]
        windows_KW = np.concatenate(windows or [np.empty((0, unroll + 1), int)])
        owner_K = np.repeat(group, [len(own) for own in windows])
        for start in range(0, len(windows_KW), size):
            features_F = users[group[0]].features if per_user else None
            yield TokenBatch(windows_KW[start : start + size], features_F), owner_K[start : start + size]


@torch.no_grad()
def predict(
    model: LanguageModel, params_P: Tensor, vocabulary: Vocabulary, words: Sequence[str], top: int = 3
) -> list[tuple[str, float]]:
    """Predict the next word after some words. A model that takes features of a user is given zeros.

    Args:
        model: The model.
        params_P: Its parameters.
        vocabulary: The words of its output layer.
        words: The text so far, as words. If it is longer than the model's context, only its end is used.
        top: How many words to return.

    Returns:
        The most likely words with their probabilities, most likely first. EOS may be among them, UNK and BOS are not.
    """
    ids = [BOS, *vocabulary.encode_words(words).tolist()]
    context_1T = torch.tensor([ids[-(getattr(model, "context", None) or len(ids)) :]], device=params_P.device)
    features_F = unknown_features(model, params_P.device)
    logits_V = model.logits(model.layout.split(params_P), context_1T, features_F)[0, -1].double()
    probs_V = torch.softmax(logits_V, dim=-1)
    probs_V[[BOS, UNK]] = 0.0
    best = probs_V.topk(min(top, len(vocabulary) - 2))
    return [(vocabulary.word(i), p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
