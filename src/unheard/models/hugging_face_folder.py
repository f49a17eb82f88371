"""A Hugging Face model as a folder on disk: what must be in it, what names it, how it is read. Nothing is fetched or unpickled.

In: a folder as `save_pretrained` writes it: config.json, tokenizer.json, *.safetensors. Out: module, tokenizer, one digest of all.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unheard.corpus.tokens import TokenizerFile
from unheard.errors import InputError, ModelError

INSTALL = "A Hugging Face model needs an extra: pip install 'unheard[hf]'."
_CHUNK = 2**22


def base_files(path: Path) -> list[Path]:
    """What a base model is: its shape, its tokenizer, its weights. Other files of the folder decide nothing here."""
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
    """transformers also takes weights from where an index or config.json says, and puts on an adapter that it finds."""
    if (path / "adapter_config.json").exists():
        raise ModelError(
            f"{path} holds an adapter beside the model. Merge it into the weights (peft: merge_and_unload) and save the whole, or "
            "take adapter_config.json away."
        )
    named = [_table(path / "config.json").get("transformers_weights")]
    for index in indexes:
        parts = _table(index).get("weight_map")
        named += list(parts.values()) if isinstance(parts, dict) else [index.name]
    # DP: weights that lie elsewhere would be under no digest: others could stand in their place, and nobody would notice.
    if outside := [name for name in named if name is not None and name not in weights]:
        raise ModelError(
            f"{path} takes weights from {str(outside[0])[:100]!r}, which is none of its own *.safetensors. Load the model with "
            "transformers and write it again with `save_pretrained`."
        )


def _table(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a table in JSON. Give a folder of `save_pretrained`.")
    return content


def base_digest(path: Path) -> str:
    """One name for exactly these files, wherever the folder lies."""
    digest = hashlib.sha256()
    for file in base_files(path):
        digest.update(f"{file.name}\n{file.stat().st_size}\n".encode())
        with open(file, "rb") as content:
            while piece := content.read(_CHUNK):
                digest.update(piece)
    return digest.hexdigest()


def read_tokenizer(path: Path) -> TokenizerFile:
    base_files(path)
    try:
        return TokenizerFile.read(path / "tokenizer.json")
    except InputError as refusal:
        raise ModelError(str(refusal)) from None


def read_base(path: Path) -> nn.Module:
    """The causal language model in float32, as it was saved: a weight that is missing is refused, never drawn at random."""
    base_files(path)
    try:
        from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ModelError(INSTALL) from None
    try:
        with _quietly():
            # Code that a folder brings along is never run; plain attention is what torch.func can follow.
            found: Any = AutoModelForCausalLM.from_pretrained(
                path,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
    except Exception as error:  # whatever the library says of what it finds
        raise ModelError(f"{path} cannot be read as a causal language model: {str(error)[:300]}.") from None
    base, told = found
    if lacking := sorted(told["missing_keys"]) + sorted(map(str, told["mismatched_keys"])):
        raise ModelError(f"{path} lacks weights of its own model, {lacking[0]!r} among them. Save it whole.")
    return base


def with_lora(base: nn.Module, *, rank: int, alpha: float, layers: tuple[str, ...]) -> nn.Module:
    """The base with low-rank matrices (peft's LoRA) beside its layers; only those are for training."""
    try:
        from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ModelError(INSTALL) from None
    settings: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
    try:
        with _quietly(), torch.random.fork_rng(devices=[]):
            return get_peft_model(base, LoraConfig(target_modules=list(layers) or None, **settings))  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise ModelError(
            f"LoRA does not fit this model: {str(error)[:300]} Name the layers to adapt in model.lora_layers."
        ) from None


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the library's own bars and remarks, which would stand in the middle of ours."""
    from transformers.utils import logging  # pyright: ignore[reportMissingImports]

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
