"""The protocol of a language model, and the loss of a batch.

A model is a frozen dataclass that describes an architecture. It holds no parameters: they are passed as named tensors,
so that the logits are a pure function of parameters and tokens, and one model object serves every user of every round.

    params_P = model.initial(seed=0)                                  # [P]
    params = model.layout.split(params_P)                             # named tensors
    logits_BTV = model.logits(params, tokens_BT, None)                # [B, T, V]
    loss = mean_loss(model, params, window_BW, None)                  # the paper's l(theta; b)

`LanguageModel` is the protocol. `BaseModel` has default behaviour for those of its methods with which a run examines
its model: a model whose record in the run file is complete and whose first parameters come from the seed inherits them.
Nothing in this package depends on users, clipping or noise."""

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
"""Marks a place in a window where the user has no token. It is never an input and never a target."""


def check_memory(layout: Layout) -> None:
    """Check, before anything is allocated, that this machine can hold the parameters, a sum and an update of them.

    Raises:
        ModelError: The memory of this machine is too small.
    """
    needed, there = 12 * layout.total, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ModelError(
            f"The model has {layout.total:,} parameters: a round needs at least {needed >> 30:,} GiB of memory, and this "
            f"machine has {there >> 30:,} GiB. Lower the model's sizes (model.hidden_size, model.embedding_size)."
        )


class LanguageModel(Protocol):
    """What training, evaluation and export need of a model.

    Implementations: `TiedLSTM`, `TiedGRU`, `ModuleModel` (any torch module), `HuggingFaceModel`; docs/extending.md
    shows another."""

    @property
    def layout(self) -> Layout:
        """The names and shapes of the trained parameters, in the order of the flat vector."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """V, the number of words that the model scores.

        A model may take it from the store: it is then None until `pinned`.
        """
        ...

    @property
    def user_features(self) -> int:
        """F, the length of the vector about the user that `logits` takes; 0 for none."""
        ...

    def initial(self, seed: int) -> Tensor:
        """The first parameters, params_P; one seed gives the same parameters on every machine."""
        ...

    def logits(self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None) -> Tensor:
        """The scores of the next token at every position, [B, T, V].

        Args:
            params: The layers by name.
            tokens_BT: B rows of T tokens.
            features_F: The user's features, if the model takes any.
        """
        ...

    def project(self, params_P: Tensor) -> Tensor:
        """The parameters projected onto the model's set (e.g. embeddings of norm 1).

        The server calls it after the noise.
        """
        ...

    @property
    def projects_locally(self) -> bool:
        """Whether users project their parameters after each local step; if not, `project_local` changes nothing."""
        ...

    def project_local(self, params_P: Tensor) -> Tensor:
        """The parameters of a user, [P], or of several, [U, P], projected after a local step and before its clip."""
        ...

    def pinned(self, vocabulary_size: int | None = None) -> Self:
        """The model with every value that its meaning depends on and that its configuration leaves out.

        A run is hashed and written to run.toml with the pinned model, so neither depends on the store or on files
        elsewhere.

        Args:
            vocabulary_size: The number of words of the store, for a model that takes it from there. None: it is known
                already.
        """
        ...

    def check_store(
        self, tokens: Mapping[str, Any], vocabulary: Vocabulary, *, unrolls: Mapping[str, int], is_private: bool
    ) -> None:
        """Check that a run on this store fits the model, before the run begins.

        Args:
            tokens: How the store's text was cut into tokens, as the store records it.
            vocabulary: The store's vocabulary.
            unrolls: The lengths of token sequences that the run will pass, by the name of their key in the run file.
            is_private: Whether the run adds noise.

        Raises:
            ModelError: If the model does not fit the store.
            UnprovenCombination: If a private run may not begin from the model's weights.
        """
        ...

    def origin(self) -> str | None:
        """Where the weights come from, for the ledger's header; None if `initial` draws them from its seed alone."""
        ...

    def weights_digest(self) -> str | None:
        """The SHA-256 of the weights that `origin` is about; None if there are none."""
        ...

    def factored_logits(
        self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """The factors of `logits`, outputs [B, T, D] and word vectors [V, D], if it is their product; else None."""
        ...

    def activations_per_token(self, unroll: int) -> int:
        """About how many numbers a backward pass keeps for each token besides the logits.

        The engine `vectorised` derives from it how many users fit into memory."""
        ...


class BaseModel:
    """Defaults for the methods of `LanguageModel` with which a run examines its model.

    A new model inherits from this class.
    """

    def project(self, params_P: Tensor) -> Tensor:
        """The parameters after the server's step; unchanged by default."""
        return params_P

    @property
    def projects_locally(self) -> bool:
        """Whether users project after each local step; False by default."""
        return False

    def project_local(self, params_P: Tensor) -> Tensor:
        """The parameters after a local step; unchanged by default."""
        return params_P

    def pinned(self, vocabulary_size: int | None = None) -> Self:
        """The model with all sizes and file digests filled in; itself by default."""
        return self

    def check_store(
        self, tokens: Mapping[str, Any], vocabulary: Vocabulary, *, unrolls: Mapping[str, int], is_private: bool
    ) -> None:
        """Raise `ModelError` if the model's vocabulary is not the store's."""
        rows: int = self.vocabulary_size  # pyright: ignore[reportAttributeAccessIssue]
        if rows != len(vocabulary):
            raise ModelError(
                f"The model has {rows} rows, the corpus's vocabulary {len(vocabulary)} words. "
                f"Set model.vocabulary_size = {len(vocabulary)}."
            )

    def origin(self) -> str | None:
        """Where the initial weights come from if they were not drawn at random; None by default."""
        return None

    def weights_digest(self) -> str | None:
        """The SHA-256 of initial weights that were read from a file; None by default."""
        return None

    def factored_logits(
        self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """The factors of `logits`, outputs [B, T, D] and word vectors [V, D], if it is their product; None by default.

        Evaluations on a GPU use them, so that the scores of all words are never in memory.
        """
        return None

    def activations_per_token(self, unroll: int) -> int:
        """Numbers that the backward pass keeps per token, to estimate memory; 0: unknown."""
        return 0


def window_targets(window_BW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and which targets count, from windows of T + 1 tokens (W = T + 1).

    BOS is an input only: it always follows EOS, so predicting it would be a free point. PAD is nobody's word.
    """
    input_BT, target_BT = window_BW[..., :-1], window_BW[..., 1:]
    counts_BT = (target_BT != PAD) & (target_BT != BOS) & (input_BT != PAD)
    return input_BT.clamp(min=0), target_BT.clamp(min=0), counts_BT


def mean_loss(
    model: LanguageModel, params: Mapping[str, Tensor], window_BW: Tensor, features_F: Tensor | None
) -> Tensor:
    """The paper's l(theta; b): cross-entropy of the next word, averaged over the targets in the batch.

    0 if there are none.

    Args:
        model: The model.
        params: Its layers by name.
        window_BW: Windows of T + 1 tokens, padded with PAD.
        features_F: The user's features, if the model takes any.
    """
    input_BT, target_BT, counts_BT = window_targets(window_BW)
    logits_BTV = model.logits(params, input_BT, features_F)
    loss_N = nnf.cross_entropy(logits_BTV.flatten(0, -2), target_BT.flatten(), reduction="none")
    counts_N = counts_BT.flatten()
    return torch.where(counts_N, loss_N, 0.0).sum() / counts_N.sum().clamp(min=1)
