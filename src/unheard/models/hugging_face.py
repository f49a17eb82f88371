"""A Hugging Face causal language model from a folder on disk, trained whole or through LoRA.

    model = HuggingFaceModel(path="models/gpt2", train="lora", lora_rank=8, base_is_public=True)

**The folder** is one that `save_pretrained` writes: config.json, tokenizer.json and *.safetensors. Nothing is
downloaded, unpickled or executed from it. `base_digest` is one SHA-256 over these files; a run records it and refuses
other weights (`base_sha256`).

**What is trained** is what the layout holds, and so what updates, clip, noise, checkpoints and the released file hold:
all parameters, or the LoRA matrices (peft). The rest of the weights are constants and are never copied.

**Words.** A store that was prepared with the model's tokenizer.json numbers BOS, EOS and UNK first and then the
tokenizer's pieces in their order. A model has its pieces at its own row numbers, and its special tokens where
config.json says, sometimes one token for all three. `StoreVocabularyModel` translates between both. If one row stands
for several words, the first of EOS, BOS, UNK and the pieces has it, and the others keep a fixed small probability: as
targets they teach nothing, and they are never predicted.

Reference: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
"""

import hashlib
import io
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unheard.config import require, require_positive
from unheard.corpus.tokenizers import HuggingFaceTokenizer, tokenizer_from_table
from unheard.corpus.vocabulary import BOS, EOS, SPECIALS, UNK, Vocabulary
from unheard.errors import InputError, ModelError, UnprovenCombination
from unheard.models.model import BaseModel
from unheard.models.module import PureModule, shell_of
from unheard.parameters import Layout

INSTALL = "A Hugging Face model needs an extra: pip install 'unheard[hf]'."


def base_files(path: Path) -> list[Path]:
    """The files that define a base model: config.json, tokenizer.json, weights and their index.

    Other files have no effect.

    Raises:
        ModelError: If a file is missing, or weights would be read from elsewhere.
    """
    weights = sorted(path.glob("*.safetensors"))
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is no Hugging Face model: it has no config.json. Give a folder of `save_pretrained`.")
    if not weights:
        raise ModelError(
            f"{path} holds no *.safetensors. Load the model with transformers and write it again with `save_pretrained`; "
            "weights in pickle files are never read."
        )
    if not (path / "tokenizer.json").is_file():
        raise ModelError(
            f"{path} has no tokenizer.json. Save the model's tokenizer beside it (`save_pretrained` of the fast tokenizer)."
        )
    indexes = sorted(path.glob("*.safetensors.index.json"))
    _check_nothing_else_is_read(path, indexes, {file.name for file in weights})
    return [path / "config.json", path / "tokenizer.json", *indexes, *weights]


def _check_nothing_else_is_read(path: Path, indexes: list[Path], weights: set[str]) -> None:
    """Refuse a folder from which transformers would read other weights: by an index, config.json or an adapter."""
    if (path / "adapter_config.json").exists():
        raise ModelError(
            f"{path} holds an adapter beside the model. Merge it into the weights (peft: merge_and_unload) and save the whole, or "
            "take adapter_config.json away."
        )
    named = [_table(path / "config.json").get("transformers_weights")]
    for index in indexes:
        parts = _table(index).get("weight_map")
        named += list(parts.values()) if isinstance(parts, dict) else [index.name]
    # DP: weights that lie elsewhere would be under no digest: others could stand in their place, and nobody would
    # notice.
    if outside := [name for name in named if name is not None and name not in weights]:
        raise ModelError(
            f"{path} takes weights from {str(outside[0])[:100]!r}, which is none of its own *.safetensors. Load the model with "
            "transformers and write it again with `save_pretrained`."
        )


def _table(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a table in JSON. Give a folder of `save_pretrained`.")
    return content


def base_digest(path: Path) -> str:
    """The SHA-256 of the names, sizes and contents of the model's files; the path of the folder has no part in it."""
    digest = hashlib.sha256()
    for file in base_files(path):
        digest.update(f"{file.name}\n{file.stat().st_size}\n".encode())
        with open(file, "rb") as content:
            hashlib.file_digest(content, lambda: digest)
    return digest.hexdigest()


def read_tokenizer(path: Path) -> HuggingFaceTokenizer:
    """Read the tokenizer.json of a model folder; raises `ModelError` if there is none."""
    base_files(path)
    try:
        return HuggingFaceTokenizer.read(path / "tokenizer.json")
    except InputError as error:
        raise ModelError(str(error)) from None


def read_base(path: Path) -> nn.Module:
    """The causal language model in float32. A missing weight is an error, never drawn at random."""
    base_files(path)
    try:
        from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ModelError(INSTALL) from None
    try:
        with quietly():
            # Code in the folder is never run; torch.func can only differentiate the eager attention.
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
        raise ModelError(f"{path} lacks weights of its own model, {lacking[0]!r} among them. Save it whole.")
    return base


def with_lora(base: nn.Module, *, rank: int, alpha: float, layers: tuple[str, ...]) -> nn.Module:
    """The base with low-rank matrices (peft's LoRA) added to its layers; only those matrices are trained."""
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
    """Freeze the A matrices at values that are the same on every machine: they are a part of the model, not trained.

    Reference: Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024.
    """
    generator = torch.Generator().manual_seed(0)
    for name, parameter in lora.named_parameters():
        if "lora_A" in name:
            bound = parameter.shape[1] ** -0.5  # as peft draws them: uniform, by Kaiming's rule with a = sqrt(5)
            values = (2 * torch.rand(parameter.shape, generator=generator) - 1) * bound
            with torch.no_grad():
                parameter.copy_(values.to(parameter))
            parameter.requires_grad_(False)


@contextmanager
def quietly() -> Iterator[None]:
    """In the block, silence the progress bars and warnings of transformers, which would interrupt other displays."""
    from transformers.utils import logging  # pyright: ignore[reportMissingImports]

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Some progress bars of transformers have no switch; they are all that writes to standard error here.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


UNSAID = 20.0
"""A word without a row of its own has e^-20 of the total probability, whatever the model predicts."""


class StoreVocabularyModel(nn.Module):
    """A causal language model that takes token numbers of the store and returns scores over the store's words.

    Args:
        base: A transformers model: row numbers [B, T] in, `.logits` [B, T, rows] out.
        rows: For each word of the store, the model's row (`rows_of`).
    """

    def __init__(self, base: nn.Module, rows: list[int]) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("row_V", torch.tensor(rows))
        first = _first_owners(rows)
        self.register_buffer("is_said_V", torch.tensor([first[row] == word for word, row in enumerate(rows)]))
        self.all_are_said = len(first) == len(rows)
        # In most models the pieces are in order from row 0 on. Then a slice is enough, whose gradient is a copy instead
        # of a scatter.
        self.num_words = len(rows) - len(SPECIALS)
        self.in_order = rows[len(SPECIALS) :] == list(range(self.num_words))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits over the store's words, [B, T, V]."""
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
    """For each word of the store, the model's row number.

    Raises:
        ModelError: If config.json has no end-of-text token, or the tokenizer has more pieces than the model has rows.
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
    """The word that owns each row.

    BOS is never a target, so EOS comes first; UNK is not a word, so it comes after both.
    """
    owner: dict[int, int] = {}
    for word in (EOS, BOS, UNK, *range(len(SPECIALS), len(rows))):
        owner.setdefault(rows[word], word)
    return owner


def _first(number: int | list[int] | None) -> int | None:
    """The first of several end-of-text tokens, which some configs have."""
    return number[0] if isinstance(number, list) else number


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel(BaseModel):
    """A causal language model from a folder of `save_pretrained`, trained whole or through LoRA.

    Dropout is off: what a user adds is a function of parameters and tokens alone. The store must be prepared with the
    model's own tokenizer (`unheard prepare --tokens PATH/tokenizer.json`).

    Args:
        path: The folder.
        train: "all" parameters, or the "lora" matrices only.
        lora_rank: The rank of the LoRA matrices.
        lora_alpha: Their scale: alpha / rank.
        lora_layers: Names of the layers to adapt; none: those that peft chooses for this kind of model.
        lora_freeze_a: Whether the A matrices keep their random initialisation, and only B is trained. The average of
            users' A and B is not the average of their products; with A frozen it is, and there is half as much to noise.
        base_is_public: Declares that no user of the corpus contributed to the weights of the folder. Training with
            noise needs it.
        base_sha256: The digest of the folder's files. A run fills it in when it begins, and refuses other weights from
            then on.

    Raises:
        InvalidValue: For an empty path or a number out of range.
        ModelError: When the folder is first read, if it is incomplete or has changed.
        UnprovenCombination: By a run with noise, if `base_is_public` is not set.

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
        """The model with its absolute path and its digest. The digest is part of the run's hash, the path is not."""
        if self.base_sha256 is None or not Path(self.path).is_absolute():
            folder = Path(self.path).resolve()
            model = replace(self, path=str(folder), base_sha256=self.base_sha256 or base_digest(folder))
            model.__dict__.update(
                {
                    key: self.__dict__[key]
                    for key in ("_tokenizer", "words", "_module", "_layout", "_pure")
                    if key in self.__dict__
                }
            )
            return model
        return self

    @cached_property
    def _tokenizer(self) -> HuggingFaceTokenizer:
        return read_tokenizer(Path(self.path))

    @cached_property
    def words(self) -> Vocabulary:
        """The vocabulary of a store that was prepared with the model's own tokenizer.json."""
        from unheard.corpus.vocabulary import tokenizer_vocabulary  # imports DuckDB, which training does not need

        return tokenizer_vocabulary(self._tokenizer)

    @property
    def vocabulary_size(self) -> int:
        """The number of the model's tokens."""
        return len(self.words)

    @cached_property
    def _module(self) -> StoreVocabularyModel:
        """Read the base model and add what is trained."""
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
    def store_module(self) -> StoreVocabularyModel:
        """The module: token numbers of the store in, scores over its words out."""
        return self._module

    @property
    def layout(self) -> Layout:
        """The trained parameters: those of LoRA, or all of them."""
        return self._layout

    @cached_property
    def _layout(self) -> Layout:
        """The trained parameters, by the names that transformers or peft give them."""
        return Layout.of({name: p for name, p in self._module.base.named_parameters() if p.requires_grad})

    @cached_property
    def _pure(self) -> PureModule:
        _ = self._layout  # before everything in the module is frozen
        return PureModule(self._module)

    @cached_property
    def context(self) -> int | None:
        """The largest number of tokens that the model takes; None if its config sets no limit."""
        config: Any = self._module.base.config
        return getattr(config, "max_position_embeddings", None)

    def activations_per_token(self, unroll: int) -> int:
        """An estimate: in each layer 32 times its width, and four times its attention weights (eager attention)."""
        config: Any = self._module.base.config
        layers, width, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
        return layers * (32 * width + 4 * heads * unroll)

    def initial(self, seed: int) -> Tensor:
        """The folder's weights. LoRA matrices are drawn from the seed as usual, and leave the output unchanged."""
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
        """Raise `ModelError` for windows that are longer than the model's context."""
        if self.context is not None and tokens > self.context:
            raise ModelError(
                f"{self.path} reads at most {self.context} tokens, not {tokens}. "
                "Lower update.unroll or evaluation.unroll."
            )

    def logits(self, params: Mapping[str, Tensor], tokens_BT: Tensor, features_F: Tensor | None = None) -> Tensor:
        """The scores of the model with the given parameters; those that are not trained come from the base."""
        self.check_length(tokens_BT.shape[-1])
        own = {f"base.{name}": layer for name, layer in params.items()}
        try:
            return self._pure(own, tokens_BT, device=tokens_BT.device)
        except (IndexError, ValueError, TypeError, RuntimeError) as error:
            raise ModelError(f"{self.path} fails on tokens of shape {tuple(tokens_BT.shape)}: {error}.") from error

    def check_store(
        self, tokens: Mapping[str, Any], vocabulary: Vocabulary, *, unrolls: Mapping[str, int], is_private: bool
    ) -> None:
        """Check that the store was tokenized by this model's tokenizer."""
        if is_private and not self.base_is_public:
            # DP: weights of unknown origin may have seen these users without noise.
            raise UnprovenCombination(
                f"{self.path} is a model without a ledger: nobody can say what it cost these users. If none of them had "
                "a part in it, set model.base_is_public = true."
            )
        self.check_words(tokens, vocabulary)
        if self.context is not None and max(unrolls.values(), default=0) > self.context:
            lengths = " or ".join(f"{key} = {unroll}" for key, unroll in unrolls.items())
            raise ModelError(f"{self.path} reads at most {self.context} tokens. Lower {lengths}.")
        super().check_store(tokens, vocabulary, unrolls=unrolls, is_private=is_private)

    def origin(self) -> str | None:
        """Whether the base model was declared public, in words for the statement."""
        return "a model declared public" if self.base_is_public else "a model of unknown cost"

    def weights_digest(self) -> str | None:
        """The SHA-256 of the base model's files."""
        return self.base_sha256

    def check_words(self, tokens: Mapping[str, Any], vocabulary: Vocabulary) -> None:
        """Raise `ModelError` unless the store was prepared with this model's tokenizer."""
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
