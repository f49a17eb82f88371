"""A causal language model of Hugging Face's, from a folder on disk, trained whole or through LoRA alone.

In: a folder with config.json, tokenizer.json and *.safetensors. Out: a LanguageModel. Only what is trained is in the layout, and so
in updates, clip, noise, checkpoints and the released file; the rest are constants, never copied, named by a digest in the run file.
Words are the model's own: a store prepared with its tokenizer.json has the same pieces, behind BOS, EOS and UNK.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from unheard.corpus.tokens import TokenizerFile, tokens_from_table
from unheard.corpus.vocabulary import Vocabulary
from unheard.corpus.vocabulary_choice import tokenizer_vocabulary
from unheard.errors import ModelError
from unheard.models.hugging_face_folder import base_digest, read_base, read_tokenizer, with_lora
from unheard.models.hugging_face_words import InWordsOfTheStore, rows_of
from unheard.models.pure import PureModule, shell_of
from unheard.parameters import Layout
from unheard.parts import require, require_positive


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """Which folder, and what of it is trained. Dropout is off: what a user adds is a function of parameters and tokens alone."""

    path: str
    train: Literal["all", "lora"] = "all"
    lora_rank: int = 8
    lora_alpha: float = 16.0
    lora_layers: tuple[str, ...] = ()
    """Names of the layers to adapt; none: those that peft chooses for this kind of model."""
    base_is_public: bool = False
    """Declares that no user of the corpus had a part in the weights of the folder. Training with noise needs it."""
    base_sha256: str | None = None
    """Names the folder's files. Written when a run begins; other weights are then refused."""

    user_features = 0

    def __post_init__(self) -> None:
        require(bool(self.path.strip()), "path must name the folder of a Hugging Face model.")
        require(1 <= self.lora_rank <= 4096, "lora_rank must be from 1 to 4096.")
        require_positive(lora_alpha=self.lora_alpha)

    def pinned(self) -> "HuggingFaceModel":
        """The same with its digest, which is part of what a run means; the path is not."""
        if self.base_sha256 is None or not Path(self.path).is_absolute():
            folder = Path(self.path).resolve()
            model = replace(self, path=str(folder), base_sha256=self.base_sha256 or base_digest(folder))
            model.__dict__.update(
                {key: self.__dict__[key] for key in ("_module", "_layout", "_pure") if key in self.__dict__}
            )
            return model
        return self

    @cached_property
    def _tokenizer(self) -> TokenizerFile:
        return read_tokenizer(Path(self.path))

    @cached_property
    def words(self) -> Vocabulary:
        """The vocabulary of a store that was prepared with the model's own tokenizer.json."""
        return tokenizer_vocabulary(self._tokenizer)

    @property
    def vocabulary_size(self) -> int:
        return len(self.words)

    @cached_property
    def _module(self) -> InWordsOfTheStore:
        folder = Path(self.path)
        # DP: what was declared public is exactly these files, and an update was paid for on them.
        if self.base_sha256 is not None and base_digest(folder) != self.base_sha256:
            raise ModelError(
                f"{folder} is not the model that this run began from: its files have changed. Put them back, or name the folder "
                "that holds them in model.path."
            )
        base = read_base(folder)
        rows = rows_of(self.words, self._tokenizer, base.config)
        if self.train == "lora":
            base = with_lora(base, rank=self.lora_rank, alpha=self.lora_alpha, layers=self.lora_layers)
        return InWordsOfTheStore(base, rows)

    @property
    def layout(self) -> Layout:
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        """What is trained, by the names that transformers or peft have for it."""
        return Layout.of({name: p for name, p in self._module.base.named_parameters() if p.requires_grad})

    @cached_property
    def _pure(self) -> PureModule:
        _ = self._layout  # before everything in the module is frozen
        return PureModule(self._module)

    @cached_property
    def context(self) -> int | None:
        """The most tokens that the model can look at; None if its config sets no limit."""
        config: Any = self._module.base.config
        return getattr(config, "max_position_embeddings", None)

    def numbers_inside(self, unroll: int) -> int:
        """About how many numbers a backward pass keeps for each token, beside the scores: in a layer some thirty of its width, and
        the attention's, which plain attention writes out four times."""
        config: Any = self._module.base.config
        layers, width, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
        return layers * (32 * width + 4 * heads * unroll)

    def initial(self, seed: int) -> Tensor:
        """The folder's own weights; of LoRA, matrices from the seed beside matrices of zeros, so that nothing is changed yet."""
        fresh = shell_of(self._pure.module, own=[f"base.{name}" for name in self.layout.names]).get_submodule("base")
        if self.train == "lora":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                for layer in fresh.modules():
                    if callable(draw := getattr(layer, "reset_lora_parameters", None)):
                        draw("default", True)
        trained = {name: p.detach().cpu() for name, p in fresh.named_parameters() if name in self.layout.slices}
        return self.layout.join(trained)

    def logits(self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None = None) -> Tensor:
        if self.context is not None and tokens_BT.shape[-1] > self.context:
            raise ModelError(
                f"{self.path} looks at {self.context} tokens at most, not at {tokens_BT.shape[-1]}. "
                "Lower update.unroll or evaluation.unroll."
            )
        own = {f"base.{name}": layer for name, layer in params.items()}
        try:
            return self._pure(own, tokens_BT, device=tokens_BT.device)
        except (IndexError, ValueError, TypeError, RuntimeError) as error:
            raise ModelError(f"{self.path} fails on tokens of shape {tuple(tokens_BT.shape)}: {error}.") from error

    def project(self, params_P: Tensor) -> Tensor:
        return params_P

    def check_words(self, tokens: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        """Refuse a corpus whose numbers are not this model's words."""
        cure = f"Prepare the corpus with --tokens {Path(self.path) / 'tokenizer.json'} (and no --vocab)."
        made_with = tokens_from_table(tokens) if tokens else None
        if not isinstance(made_with, TokenizerFile):
            raise ModelError(
                f"The corpus was not cut by the tokenizer of {self.path}, so its numbers are other words. {cure}"
            )
        same = made_with.definition == self._tokenizer.definition
        if not same and made_with.tokenizer.to_str() != self._tokenizer.tokenizer.to_str():
            raise ModelError(f"The corpus was cut by another tokenizer than that of {self.path}. {cure}")
        if vocabulary != self.words:
            raise ModelError(f"The corpus has other words, or another order, than the tokenizer of {self.path}. {cure}")
