"""A Hugging Face causal language model from a folder on disk. All parameters are trained, or only LoRA matrices.

    model = HuggingFaceModel(path="models/gpt2", train="lora", lora_rank=8, base_is_public=True)

**The folder** is one that `save_pretrained` writes: config.json, tokenizer.json and *.safetensors. Nothing is
downloaded, and no pickle and no code of the folder is read. `base_digest` is a SHA-256 over these files. A run records
it as `base_sha256` and refuses a folder with another digest.

**Trained parameters** are all parameters of the model, or the LoRA matrices (peft). Only they are in the layout, and so
in updates, noise, checkpoints and the released file. All other weights are constants, which are never copied.

**Rows and words.** The model has one row of scores for each token of its tokenizer. In a store that was prepared with
the model's tokenizer.json, the ids 0, 1 and 2 are BOS, EOS and UNK, and the tokens of the tokenizer follow in their
order. In the model, config.json decides which rows are the special tokens; sometimes one row serves for all three.
`StoreVocabularyModel` maps the ids of the store to rows of the model. If several words of the store have the same row,
the first of them in the order EOS, BOS, UNK, other tokens owns it. The others get a small fixed probability, cause no
gradient as targets, and are never predicted.

Reference: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
"""

import hashlib
import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unheard.config import read_json, require, require_positive
from unheard.corpus.tokenizers import HuggingFaceTokenizer, tokenizer_from_table
from unheard.corpus.vocabulary import BOS, EOS, SPECIALS, UNK, Vocabulary
from unheard.errors import InputError, ModelError, UnprovenCombination
from unheard.models.model import BaseModel
from unheard.models.module import PureModule, shell_of
from unheard.parameters import Layout

INSTALL = "A Hugging Face model needs an extra: pip install 'unheard[hf]'."
"""The message for a missing optional package."""


def base_files(path: Path) -> list[Path]:
    """Return the files that define a base model: config.json, tokenizer.json, weights and their index.

    Other files of the folder have no effect on the model.

    Raises:
        ModelError: A file is missing, or transformers would read weights from other files.
    """
    weights = sorted(path.glob("*.safetensors"))
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path} is not a Hugging Face model: it has no config.json. Give a folder of `save_pretrained`."
        )
    if not weights:
        raise ModelError(
            f"{path} holds no *.safetensors. Load the model with transformers and write it again with `save_pretrained`; "
            "weights in pickle files are never read."
        )
    if not (path / "tokenizer.json").is_file():
        raise ModelError(
            f"{path} has no tokenizer.json. Save the model's tokenizer into this folder (`save_pretrained` of the fast "
            "tokenizer)."
        )
    indexes = sorted(path.glob("*.safetensors.index.json"))
    _check_nothing_else_is_read(path, indexes, {file.name for file in weights})
    return [path / "config.json", path / "tokenizer.json", *indexes, *weights]


def _check_nothing_else_is_read(path: Path, indexes: list[Path], weights: set[str]) -> None:
    """Raise `ModelError` if an index, config.json or an adapter makes transformers read weights from other files.

    Args:
        path: The folder of the model.
        indexes: The index files of the folder.
        weights: The names of the *.safetensors files of the folder.
    """
    if (path / "adapter_config.json").exists():
        raise ModelError(
            f"{path} contains an adapter, whose weights would be added to the model. Merge it into the weights (peft: "
            "merge_and_unload) and save the whole model, or remove adapter_config.json."
        )
    named = [_table(path / "config.json").get("transformers_weights")]
    for index in indexes:
        parts = _table(index).get("weight_map")
        named += list(parts.values()) if isinstance(parts, dict) else [index.name]
    # DP: weights that lie elsewhere would be under no digest: others could stand in their place, and nobody would
    # notice.
    if outside := [name for name in named if name is not None and name not in weights]:
        raise ModelError(
            f"{path} takes weights from {str(outside[0])[:100]!r}, which is not one of its *.safetensors files. Load "
            "the model with transformers and write it again with `save_pretrained`."
        )


def _table(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise `ModelError` if the file contains anything else."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a table in JSON. Give a folder of `save_pretrained`.")
    return content


def base_digest(path: Path) -> str:
    """Return the SHA-256 of the names, sizes and contents of the model's files, without the path of the folder."""
    digest = hashlib.sha256()
    for file in base_files(path):
        digest.update(f"{file.name}\n{file.stat().st_size}\n".encode())
        with open(file, "rb") as content:
            hashlib.file_digest(content, lambda: digest)
    return digest.hexdigest()


def read_tokenizer(path: Path) -> HuggingFaceTokenizer:
    """Read the tokenizer.json of a model folder. Raise `ModelError` if the folder is incomplete or the file damaged."""
    base_files(path)
    try:
        return HuggingFaceTokenizer.read(path / "tokenizer.json")
    except InputError as error:
        raise ModelError(str(error)) from None


def read_base(path: Path) -> nn.Module:
    """Read the causal language model of a folder, in float32.

    Raises:
        ModelError: transformers is not installed, the folder cannot be read, or weights are missing. (transformers
            alone would draw missing weights at random.)
    """
    base_files(path)
    try:
        from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ModelError(INSTALL) from None
    try:
        with quietly():
            # Code in the folder must not run. torch.func can only differentiate the "eager" attention.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
    except Exception as error:  # loading can raise anything
        raise ModelError(f"{path} cannot be read as a causal language model: {str(error)[:300]}.") from None
    base, info = loaded
    if lacking := sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"])):
        raise ModelError(f"{path} lacks weights of its model, for example {lacking[0]!r}. Save the whole model again.")
    return base


def with_lora(base: nn.Module, *, rank: int, alpha: float, layers: tuple[str, ...]) -> nn.Module:
    """Return the base model with LoRA matrices (peft) added to its layers. Only these matrices can be trained.

    Args:
        base: The model. It is changed.
        rank: The rank of the matrices.
        alpha: The scale: the product of the matrices is multiplied by alpha / rank.
        layers: The names of the layers to adapt. If it is empty, peft chooses them by the kind of model.

    Raises:
        ModelError: peft is not installed, or it finds no layer to adapt.
    """
    try:
        from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ModelError(INSTALL) from None
    settings: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
    try:
        with quietly(), torch.random.fork_rng(devices=[]):
            return get_peft_model(base, LoraConfig(target_modules=list(layers) or None, **settings))  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise ModelError(
            f"LoRA does not fit this model: {str(error)[:300]} Name the layers to adapt in model.lora_layers."
        ) from None


def freeze_a(lora: nn.Module) -> None:
    """Draw the A matrices of LoRA from a fixed seed and freeze them.

    The values are the same on every machine. They are constants of the model and are not trained.

    Reference: Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024.
    """
    generator = torch.Generator().manual_seed(0)
    for name, parameter in lora.named_parameters():
        if "lora_A" in name:
            bound = parameter.shape[1] ** -0.5  # the distribution that peft uses: Kaiming uniform with a = sqrt(5)
            values = (2 * torch.rand(parameter.shape, generator=generator) - 1) * bound
            with torch.no_grad():
                parameter.copy_(values.to(parameter))
            parameter.requires_grad_(False)


@contextmanager
def quietly() -> Iterator[None]:
    """Return a context manager that silences the progress bars and warnings of transformers and all standard error."""
    from transformers.utils import logging  # pyright: ignore[reportMissingImports]

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Some progress bars of transformers cannot be turned off, and nothing else writes to standard error here.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


UNSAID = 20.0
"""The probability of a word that does not own its row is e^-20 times the total probability of the words that do."""


class StoreVocabularyModel(nn.Module):
    """A causal language model that takes token ids of the store and returns scores of the store's words.

    Args:
        base: A transformers model. Its input are row numbers [B, T], and its output has `.logits` [B, T, rows].
        rows: The row of the model for each word of the store (`rows_of`).
    """

    def __init__(self, base: nn.Module, rows: list[int]) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("row_V", torch.tensor(rows))
        first = _first_owners(rows)
        self.register_buffer("is_said_V", torch.tensor([first[row] == word for word, row in enumerate(rows)]))
        self.all_are_said = len(first) == len(rows)
        # In most models the tokens have the rows 0, 1, 2, ... in order. Then `forward` can take a slice instead of
        # indexing; the gradient of a slice is a copy, which is faster than a scatter.
        self.num_words = len(rows) - len(SPECIALS)
        self.in_order = rows[len(SPECIALS) :] == list(range(self.num_words))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits over the store's words, [B, T, V], for token ids of the store."""
        row_V, is_said_V = self.get_buffer("row_V"), self.get_buffer("is_said_V")
        scores_BTR = self.base(row_V[tokens_BT], use_cache=False).logits
        special_BT3 = scores_BTR[..., row_V[: len(SPECIALS)]]
        word_BTW = scores_BTR[..., : self.num_words] if self.in_order else scores_BTR[..., row_V[len(SPECIALS) :]]
        logits_BTV = torch.cat([special_BT3, word_BTW], dim=-1)
        if self.all_are_said:
            return logits_BTV
        total_BT1 = logits_BTV.masked_fill(~is_said_V, float("-inf")).logsumexp(dim=-1, keepdim=True)
        return torch.where(is_said_V, logits_BTV, total_BT1 - UNSAID)


def rows_of(words: Vocabulary, tokenizer: HuggingFaceTokenizer, config: Any) -> list[int]:
    """Return the row number in the model for each word of the store.

    BOS and UNK have the row of EOS if the model has no token for them.

    Args:
        words: The vocabulary of the store.
        tokenizer: The tokenizer of the model.
        config: The configuration of the model.

    Raises:
        ModelError: config.json has no end-of-text token, or the tokenizer has tokens beyond the rows of the model.
    """
    own: Any = tokenizer.tokenizer
    eos = _first(getattr(config, "eos_token_id", None))
    if eos is None:
        raise ModelError("The model's config.json names no eos_token_id: a model must know how a text ends. Add it.")
    bos = _first(getattr(config, "bos_token_id", None))
    unk = getattr(own.model, "unk_token", None)
    unk = own.token_to_id(unk) if unk else None
    special = {BOS: eos if bos is None else bos, EOS: eos, UNK: eos if unk is None else unk}
    rows = [special[word] for word in range(len(SPECIALS))] + [own.token_to_id(w) for w in words.words[len(SPECIALS) :]]
    if not 0 <= min(rows) <= max(rows) < config.vocab_size:
        raise ModelError(
            f"The tokenizer has pieces up to number {max(rows)}, the model {config.vocab_size} rows: they do not belong together. "
            "Take tokenizer.json and weights from one model."
        )
    return rows


def _first_owners(rows: list[int]) -> dict[int, int]:
    """Return the word that owns each row, by row number.

    If words share a row, EOS has priority over BOS, since BOS is never a target, and both over UNK, which is not a
    word. All three have priority over other tokens.
    """
    owner: dict[int, int] = {}
    for word in (EOS, BOS, UNK, *range(len(SPECIALS), len(rows))):
        owner.setdefault(rows[word], word)
    return owner


def _first(number: int | list[int] | None) -> int | None:
    """Return the first token id if config.json has a list of them, as some models do for end-of-text tokens."""
    return number[0] if isinstance(number, list) else number


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel(BaseModel):
    """A causal language model from a folder of `save_pretrained`. All parameters are trained, or only LoRA matrices.

    Dropout is off, so the update of a user depends only on parameters and tokens. The store must be prepared with the
    model's own tokenizer (`unheard prepare --tokens PATH/tokenizer.json`).

    Args:
        path: The folder.
        train: "all" trains all parameters, "lora" only LoRA matrices.
        lora_rank: The rank of the LoRA matrices.
        lora_alpha: The scale of LoRA: the product of the matrices is multiplied by alpha / rank.
        lora_layers: The names of the layers to adapt. If it is empty, peft chooses them by the kind of model.
        lora_freeze_a: Whether the A matrices keep their random initial values and only the B matrices are trained. Then
            the average of the users' matrices gives the average of the users' products A B, which is not so if both are
            trained, and noise is added to only about half as many parameters.
        base_is_public: Declares that no user of the corpus contributed to the weights of the folder. Training with
            noise requires this declaration.
        base_sha256: The digest of the folder's files. A run fills it in when it begins, and then refuses a folder with
            another digest.

    Raises:
        InvalidValue: The path is empty, or a number is out of range.
        ModelError: The folder is incomplete or has changed. Raised when the folder is first read.
        UnprovenCombination: The run has noise, and `base_is_public` is False.

    Example:
        >>> import unheard
        >>> model = unheard.HuggingFaceModel(path="models/gpt2", train="lora", base_is_public=True)
        >>> model.train, model.lora_rank
        ('lora', 8)
    """

    path: str
    train: Literal["all", "lora"] = "all"
    lora_rank: int = 8
    lora_alpha: float = 16.0
    lora_layers: tuple[str, ...] = ()
    lora_freeze_a: bool = False
    base_is_public: bool = False
    base_sha256: str | None = None

    user_features = 0

    def __post_init__(self) -> None:
        require(bool(self.path.strip()), "path must name the folder of a Hugging Face model.")
        require(1 <= self.lora_rank <= 4096, "lora_rank must be from 1 to 4096.")
        require_positive(lora_alpha=self.lora_alpha)

    def pinned(self, vocabulary_size: int | None = None) -> "HuggingFaceModel":
        """Return the model with its absolute path and its digest filled in.

        The digest is part of the hash of a run. The path is not, so the folder may be moved.
        """
        if self.base_sha256 is None or not Path(self.path).is_absolute():
            folder = Path(self.path).resolve()
            model = replace(self, path=str(folder), base_sha256=self.base_sha256 or base_digest(folder))
            model.__dict__.update(
                {
                    key: self.__dict__[key]
                    for key in ("_tokenizer", "words", "store_module", "_layout", "_pure")
                    if key in self.__dict__
                }
            )
            return model
        return self

    @cached_property
    def _tokenizer(self) -> HuggingFaceTokenizer:
        """The tokenizer of the folder."""
        return read_tokenizer(Path(self.path))

    @cached_property
    def words(self) -> Vocabulary:
        """The vocabulary of a store that was prepared with the model's own tokenizer.json."""
        from unheard.corpus.vocabulary import tokenizer_vocabulary

        return tokenizer_vocabulary(self._tokenizer)

    @property
    def vocabulary_size(self) -> int:
        """V, the number of tokens of the model's tokenizer, including BOS, EOS and UNK of the store."""
        return len(self.words)

    @cached_property
    def store_module(self) -> StoreVocabularyModel:
        """The base model for token ids of a store, with LoRA matrices if `train` is "lora".

        Raises `ModelError` if the files have changed.
        """
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
            if self.lora_freeze_a:
                freeze_a(base)
        return StoreVocabularyModel(base, rows)

    @property
    def layout(self) -> Layout:
        """The names and shapes of the trained parameters: the LoRA matrices, or all parameters."""
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        """The cached value of `layout`. The names are those of transformers or peft."""
        return Layout.of({name: p for name, p in self.store_module.base.named_parameters() if p.requires_grad})

    @cached_property
    def _pure(self) -> PureModule:
        """The module as a pure function of parameters and tokens."""
        _ = self._layout  # `PureModule` freezes all parameters; after that the layout could not find the trained ones.
        return PureModule(self.store_module)

    @cached_property
    def context(self) -> int | None:
        """The largest number of tokens in a sequence; None if config.json sets no limit."""
        config: Any = self.store_module.base.config
        return getattr(config, "max_position_embeddings", None)

    def activations_per_token(self, unroll: int) -> int:
        """Return an estimate (see `LanguageModel`): 32 times the width plus 4 times the attention weights per layer."""
        config: Any = self.store_module.base.config
        layers, width, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
        return layers * (32 * width + 4 * heads * unroll)

    def initial(self, seed: int) -> Tensor:
        """Return the initial trained parameters [P].

        With `train="all"` they are the weights of the folder. With "lora" the matrices A, if they are trained, are
        drawn from the seed, and the matrices B are zero, so that the initial model computes the same as the base.
        """
        fresh = shell_of(self._pure.module, own=[f"base.{name}" for name in self.layout.names]).get_submodule("base")
        if self.train == "lora" and not self.lora_freeze_a:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                for layer in fresh.modules():
                    if callable(draw := getattr(layer, "reset_lora_parameters", None)):
                        draw("default", True)
        trained = {name: p.detach().cpu() for name, p in fresh.named_parameters() if name in self.layout.slices}
        return self.layout.join(trained)

    def check_length(self, tokens: int) -> None:
        """Raise `ModelError` if sequences of this many tokens are longer than the model's context."""
        if self.context is not None and tokens > self.context:
            raise ModelError(
                f"{self.path} reads at most {self.context} tokens, not {tokens}. "
                "Lower update.unroll or evaluation.unroll."
            )

    def logits(self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None = None) -> Tensor:
        """Return the scores of the store's words with the given trained parameters (see `LanguageModel.logits`).

        All other parameters have the values of the base.

        Raises:
            ModelError: The sequences are longer than the context, or the model fails on these tokens.
        """
        self.check_length(tokens_BT.shape[-1])
        own = {f"base.{name}": layer for name, layer in params.items()}
        try:
            return self._pure(own, tokens_BT, device=tokens_BT.device)
        except (IndexError, ValueError, TypeError, RuntimeError) as error:
            raise ModelError(f"{self.path} fails on tokens of shape {tuple(tokens_BT.shape)}: {error}.") from error

    def check_store(
        self, tokens: Mapping[str, Any], vocabulary: Vocabulary, *, unrolls: Mapping[str, int], is_private: bool
    ) -> None:
        """Check that the model can be trained on a store (see `LanguageModel.check_store`).

        Raises:
            ModelError: The store was not prepared with this model's tokenizer, or sequences exceed the context.
            UnprovenCombination: The run adds noise, and the base was not declared public.
        """
        if is_private and not self.base_is_public:
            # DP: weights of unknown origin may have seen these users without noise.
            raise UnprovenCombination(
                f"{self.path} is a model without a ledger, so its privacy cost is unknown. If no user of the corpus "
                "contributed to it, set model.base_is_public = true."
            )
        self.check_words(tokens, vocabulary)
        if self.context is not None and max(unrolls.values(), default=0) > self.context:
            lengths = " or ".join(f"{key} = {unroll}" for key, unroll in unrolls.items())
            raise ModelError(f"{self.path} reads at most {self.context} tokens. Lower {lengths}.")
        super().check_store(tokens, vocabulary, unrolls=unrolls, is_private=is_private)

    def origin(self) -> str | None:
        """Return in words whether the base model was declared public."""
        return "a model declared public" if self.base_is_public else "a model of unknown cost"

    def weights_digest(self) -> str | None:
        """Return the SHA-256 of the base model's files; None before the model is `pinned`."""
        return self.base_sha256

    def check_words(self, tokens: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        """Raise `ModelError` if the store was not prepared with this model's tokenizer.

        Args:
            tokens: The record of the store's tokenizer.
            vocabulary: The vocabulary of the store.
        """
        cure = f"Prepare the corpus with --tokens {Path(self.path) / 'tokenizer.json'} (and no --vocab)."
        made_with = tokenizer_from_table(tokens) if tokens else None
        if not isinstance(made_with, HuggingFaceTokenizer):
            raise ModelError(
                f"The corpus was not tokenized with the tokenizer of {self.path}, so its ids stand for other tokens. {cure}"
            )
        same = made_with.definition == self._tokenizer.definition
        if not same and made_with.tokenizer.to_str() != self._tokenizer.tokenizer.to_str():
            raise ModelError(f"The corpus was tokenized with another tokenizer than that of {self.path}. {cure}")
        if vocabulary != self.words:
            raise ModelError(
                f"The vocabulary of the corpus has other tokens, or another order, than the tokenizer of {self.path}. {cure}"
            )
