"""The protocol of a language model, and the loss of a batch.

A model is a frozen dataclass that describes an architecture. It contains no parameters: callers pass them as named
tensors. So the logits are a pure function of parameters and tokens, and all users of all rounds share one model object.

    params_P = model.initial(seed=0)                                  # [P]
    params = model.layout.split(params_P)                             # named tensors
    logits_BTV = model.logits(params, tokens_BT, None)                # [B, T, V]
    loss = mean_loss(model, params, window_BW, None)                  # the paper's l(theta; b)
    gradient_P = loss_gradient(model, params_P, window_BW, None)      # its gradient by all parameters

`LanguageModel` is the protocol. `BaseModel` implements its optional methods for a model whose initial parameters are
drawn from a seed and whose run file states all of its sizes. Nothing in this package depends on clipping or noise."""

import os
from collections.abc import Mapping
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as nnf
from torch import Tensor

from unheard.corpus.vocabulary import BOS, Vocabulary
from unheard.errors import ModelError
from unheard.parameters import Layout

PAD = -1
"""The value at positions of a window for which the user has no token. It is never an input and never a target."""


def check_memory(layout: Layout) -> None:
    """Raise `ModelError` if the memory of this machine is too small for three float32 vectors of the model's size.

    A round needs at least the parameters, one update and the sum of the updates. Call this before allocating them.
    """
    needed, there = 12 * layout.total, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ModelError(
            f"The model has {layout.total:,} parameters: a round needs at least {needed >> 30:,} GiB of memory, and this "
            f"machine has {there >> 30:,} GiB. Lower the model's sizes (model.hidden_size, model.embedding_size)."
        )


class BaseModel(Protocol):
    """The methods of `LanguageModel` that have a default. A new model inherits from this class.

    The model itself must define `layout`, `vocabulary_size`, `user_features`, `initial` and `logits`.
    """

    def project(self, params_P: Tensor) -> Tensor:
        """Return the parameters after the projection onto the set of allowed values, such as embeddings of norm 1.

        The server calls this after it has added the noisy average. The projection is post-processing and costs no
        privacy. By default the parameters are returned unchanged.
        """
        return params_P

    @property
    def projects_locally(self) -> bool:
        """Whether users project their parameters after each local step. If False, `project_local` changes nothing."""
        return False

    def project_local(self, params_P: Tensor) -> Tensor:
        """Return the parameters of one user, [P], or of several users, [U, P], after the local projection.

        Engines call this after each local step, before the delta is clipped.
        """
        return params_P

    def pinned(self, vocabulary_size: int | None = None) -> Self:
        """Return a copy of the model with its optional values filled in.

        Examples are the vocabulary size and the digest of weights in a file. The hash of a run and its run.toml contain
        the pinned model, so they describe the model completely, without the store or other files. By default there is
        nothing to fill in, and the model itself is returned.

        Args:
            vocabulary_size: The size of the store's vocabulary; None if the model already has its own.
        """
        return self

    def check_store(
        self, tokens: Mapping[str, Any], vocabulary: Vocabulary, *, unrolls: Mapping[str, int], is_private: bool
    ) -> None:
        """Check that the model can be trained on a store. A run calls this before it begins.

        By default only the sizes of the two vocabularies are compared.

        Args:
            tokens: The record of the store's tokenizer (`tokens` of corpus.json).
            vocabulary: The store's vocabulary.
            unrolls: The lengths of the token sequences that the run will use, by key of the run file.
            is_private: Whether the run adds noise.

        Raises:
            ModelError: The model does not fit the store.
            UnprovenCombination: The run is private, but the origin of the model's weights is not known.
        """
        rows: int = self.vocabulary_size  # pyright: ignore[reportAttributeAccessIssue]
        if rows != len(vocabulary):
            raise ModelError(
                f"The model has {rows} rows, but the vocabulary of the store has {len(vocabulary)} words. "
                f"Set model.vocabulary_size = {len(vocabulary)}."
            )

    def origin(self) -> str | None:
        """Return the origin of the initial weights in words, for the header of the ledger.

        Returns None, the default, if `initial` computes all weights from its seed.
        """
        return None

    def weights_digest(self) -> str | None:
        """Return the SHA-256 of the weights that `origin` describes; None if all weights come from the seed."""
        return None

    def factored_logits(
        self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Return the two factors of the logits: outputs [B, T, D] and word vectors [V, D].

        Returns None, the default, for a model whose logits are not such a product. A model that returns factors needs
        less memory in evaluations on a GPU, which then never store all logits. The arguments are those of `logits`.
        """
        return None

    def activations_per_token(self, unroll: int) -> int:
        """Return an estimate of how many numbers a backward pass stores per token, without the logits.

        The engine `vectorised` computes from it how many users fit into memory. 0, the default: no estimate is known.

        Args:
            unroll: T, the number of tokens of a sequence."""
        return 0


class LanguageModel(BaseModel, Protocol):
    """The interface of a model for training, evaluation and export.

    Implementations are `TiedLSTM`, `TiedGRU`, `ModuleModel` (any torch module) and `HuggingFaceModel`.
    docs/extending.md shows how to add one."""

    @property
    def layout(self) -> Layout:
        """The names and shapes of the trained parameters, in the order of the flat vector."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """V, the number of words that the model scores.

        A model may be created without it. Then it is None until `pinned` sets it to the size of the store's vocabulary.
        """
        ...

    @property
    def user_features(self) -> int:
        """F, the number of features of a user that `logits` takes as an extra input; 0 if it takes none."""
        ...

    def initial(self, seed: int) -> Tensor:
        """Return the initial parameters as a flat vector, float32 [P].

        The same seed gives the same parameters on every machine.
        """
        ...

    def logits(self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None) -> Tensor:
        """Return the scores of the next token at every position, [B, T, V].

        Args:
            params: The parameters, by the names of the layout.
            tokens_BT: B sequences of T tokens of one user.
            features_F: The features of the user; None if the model takes none.
        """
        ...


def window_targets(window_BW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs [B, T], the targets [B, T] and a mask of the targets that count, from windows of T + 1 tokens.

    The targets are the inputs shifted by one token. PAD does not count. BOS does not count as a target: it always
    follows EOS, so every model would predict it correctly. In the inputs and targets PAD is replaced by token 0.

    Args:
        window_BW: Windows of W = T + 1 tokens, padded with PAD.
    """
    input_BT, target_BT = window_BW[..., :-1], window_BW[..., 1:]
    counts_BT = (target_BT != PAD) & (target_BT != BOS) & (input_BT != PAD)
    return input_BT.clamp(min=0), target_BT.clamp(min=0), counts_BT


def unknown_features(model: LanguageModel, device: torch.device | str = "cpu") -> Tensor | None:
    """Return the features of a user about whom nothing is known, zeros [F]; None if the model takes no features."""
    return torch.zeros(model.user_features, device=device) if model.user_features else None


def mean_loss(
    model: LanguageModel, params: Mapping[str, Tensor], window_BW: Tensor, features_F: Tensor | None
) -> Tensor:
    """Return the paper's loss l(theta; b): the mean cross-entropy of the next word over the targets of a batch.

    The loss of a batch without targets is 0.

    Args:
        model: The model.
        params: The parameters, by the names of the layout.
        window_BW: Windows of W = T + 1 tokens of one user, padded with PAD.
        features_F: The features of the user; None if the model takes none.
    """
    input_BT, target_BT, counts_BT = window_targets(window_BW)
    logits_BTV = model.logits(params, input_BT, features_F)
    loss_N = nnf.cross_entropy(logits_BTV.flatten(0, -2), target_BT.flatten(), reduction="none")
    counts_N = counts_BT.flatten()
    return torch.where(counts_N, loss_N, 0.0).sum() / counts_N.sum().clamp(min=1)


def loss_gradient(model: LanguageModel, params_P: Tensor, window_BW: Tensor, features_F: Tensor | None) -> Tensor:
    """Return the gradient of `mean_loss` with respect to all parameters, [P].

    Args:
        model: The model.
        params_P: The parameters, as one vector.
        window_BW: Windows of W = T + 1 tokens of one user, padded with PAD.
        features_F: The features of the user; None if the model takes none.
    """
    params = {name: layer.detach().requires_grad_() for name, layer in model.layout.split(params_P).items()}
    loss = mean_loss(model, params, window_BW, features_F)
    gradients = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
    return model.layout.join(dict(zip(params, gradients, strict=True)))
