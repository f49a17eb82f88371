"""Write the model of a run in the formats of Hugging Face: a PEFT adapter, a whole model, GGUF, or a hub folder.

    write_language_model("runs/private", Path("adapter"), "adapter")    # for peft
    write_language_model("runs/private", Path("merged"), "merged")      # for transformers
    write_language_model("runs/private", Path("gguf"), "gguf")          # for llama.cpp and transformers
    write_hub_folder("runs/private", "hub/private")                     # to upload to the hub as it is

**A fine-tuned Hugging Face model** (`write_language_model`). Each folder also has the privacy statement
(statement.json) and the model card (README.md). It contains no path of this machine and no ledger. Metrics are only in
the model card of a hub folder. Before the folder appears, the written model is read again, and its scores are compared
with those of the run's own model.

GGUF is for models of the Llama family. Matrices are stored in float16 and vectors in float32, so the scores differ by
the rounding of float16.

**A hub folder** (`write_hub_folder`). For a fine-tuned Hugging Face model it has the files of an adapter (LoRA) or of a
merged model (all parameters). For any other model it has these files:

    README.md           the model card (`card.py`), with the privacy report of `unheard statement --format report`
    config.json         the settings of the model and of its training, without paths
    model.safetensors   the newest released parameters, by layer name
    vocabulary.txt      the words, one per line
    tokens.json         the tokenizer
    statement.json      the privacy statement
    model.onnx, model.int8.onnx, export.json        as `unheard export --to onnx` writes them, for LSTM and GRU models

Nothing is uploaded; the user uploads the folder with `hf upload`.
"""

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from unheard.corpus.store import TokenStore
from unheard.corpus.tokenizers import tokenizer_to_table
from unheard.deployment.card import USE_AS_RUN, render_card
from unheard.deployment.export import free_target, onnx_files, write_files
from unheard.deployment.model import run_statement
from unheard.errors import InvalidValue, ModelError, RunFolderError
from unheard.models.base import record_of
from unheard.models.hugging_face import INSTALL, HuggingFaceModel, base_digest, quietly, read_base, read_tokenizer
from unheard.run_folder import RunFolder
from unheard.storage import staged_folder
from unheard.training.initialise import population_ledger_of
from unheard.training.released import Released

GGUF_FILE = "model.gguf"
"""The name of the model file in a GGUF folder."""
Format = Literal["adapter", "merged", "gguf"]
USE: dict[Format, str] = {
    "adapter": "`peft.PeftModel.from_pretrained(base_model, folder)` with the base model named below.",
    "merged": "`transformers.AutoModelForCausalLM.from_pretrained(folder)`.",
    "gguf": f"`{GGUF_FILE}` is read by llama.cpp, and by transformers with `gguf_file`.",
}
"""The section "Use" of the model card, for each format."""

# The section "Use" of the model card of a hub folder, for an ONNX export, a LoRA adapter and a whole model.
USE_AS_EXPORT = """```bash
pip install 'unheard[export]'
hf download OWNER/{name} --local-dir {name}
unheard predict {name} "how are"
```"""

USE_AS_ADAPTER = """```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("OWNER/{name}")
```"""
USE_AS_TRANSFORMERS = """```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("OWNER/{name}")
```"""


@dataclass(frozen=True, kw_only=True)
class Written:
    """The result of an export of a fine-tuned language model.

    Args:
        out: The folder that was written.
        files: The size of each file in bytes, by file name.
        statement: The privacy statement of the run.
        difference: The relative difference between the scores of the written model and those of the run's own model.
    """

    out: Path
    files: dict[str, int]
    statement: dict[str, Any]
    difference: float


def write_language_model(run: str | Path, out: Path, to: Format, *, card: str | None = None) -> Written:
    """Write the newest model of a run folder in one of three formats. The folder appears complete or not at all.

    A merged model is also recorded in the ledger of its population, if the store is on this machine, so that no other
    run on these users can declare the model public.

    Args:
        run: The folder of a run that trained a `HuggingFaceModel`.
        out: The folder to write. It must be missing or empty.
        to: "adapter" (only for a run with train = "lora"), "merged" or "gguf".
        card: The text of README.md. By default a card without metrics that says how to use the format.

    Raises:
        InvalidValue: The run trained another kind of model, or the format does not fit the model.
        ModelError: The scores of the written model differ from those of the run's own model, or a package is missing.
        RunFolderError: `run` is not a run folder, is damaged, or has released no model yet.
        LedgerError: The ledger does not contain all charges of the model.
    """
    released = Released.open(run)
    model = released.run.model
    if not isinstance(model, HuggingFaceModel):
        raise InvalidValue(
            f"--to {to} is for Hugging Face models, and {run} trained another kind. Use --to onnx for its LSTM or GRU."
        )
    if to == "adapter" and model.train != "lora":
        raise InvalidValue(f"{run} trained all parameters, so it has no adapter. Use --to merged.")
    folder = RunFolder.open(run)
    statement = run_statement(folder)
    trained = _with_parameters(model, released.params_P)
    with staged_folder(out) as stage, quietly():
        if to == "adapter":
            _write_adapter(trained, stage, _title(model))
            back = _read_adapter(model, stage)
        elif to == "merged":
            merged = _merged(trained)
            _write_merged(merged, model, stage)
            back = read_base(stage)
        else:
            write_gguf_file(_merged(trained), Path(model.path), stage / GGUF_FILE, _title(model))
            back = _read_gguf(stage)
        difference = _difference(trained, back)
        # GGUF has a larger limit, because rounding to float16 changes each weight by up to 2^-11 of its size.
        if not difference < (2e-2 if to == "gguf" else 1e-4):
            raise ModelError(
                f"The model that was written as {to} has other scores than the run's model (relative difference "
                f"{difference:.2g}). Nothing was kept. Use --to merged, or another version of transformers and peft."
            )
        if to == "merged":
            _record_as_base(released, base_digest(stage))
        (stage / "statement.json").write_text(json.dumps(statement, indent=2) + "\n", encoding="utf-8")
        if card is None:
            options = {"usage": USE[to], "difference": difference, "has_accuracy": False}
            card = render_card(folder, released, statement, **options)
        (stage / "README.md").write_text(card, encoding="utf-8")
    files = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
    return Written(out=out, files=files, statement=statement, difference=difference)


def _record_as_base(released: Released, sha256: str) -> None:
    """Record the digest of a merged model in the ledger of its population, if the store is on this machine."""
    if released.id is None or not (Path(released.run.corpus) / "corpus.json").is_file():
        return
    # DP: a merged model can be the base of another run on these users; declared public, it would be free.
    population_ledger_of(released.run, TokenStore.open(released.run.corpus)).record_release(released.id, sha256)


def _title(model: HuggingFaceModel) -> str:
    """Return the title of the base model from its record; without a record, the name of its folder."""
    record = record_of(Path(model.path))
    return record.title if record else Path(model.path).name


def _with_parameters(model: HuggingFaceModel, params_P: Tensor) -> nn.Module:
    """Return a copy of the transformers or peft model, on the CPU, with the released parameters."""
    base = copy.deepcopy(model.store_module.base).cpu().eval()
    named = dict(base.named_parameters())
    with torch.no_grad():
        for name, layer in model.layout.split(params_P.float().cpu()).items():
            named[name].copy_(layer)
    return base


def _merged(trained: Any) -> Any:
    """Return a model whose weights include its LoRA adapter. A model without an adapter is returned unchanged."""
    return copy.deepcopy(trained).merge_and_unload() if hasattr(trained, "merge_and_unload") else trained


# ------------------------------------------------------------------------------------------------- formats


def _write_adapter(trained: Any, stage: Path, title: str) -> None:
    """Write the LoRA adapter with its configuration, in which `title` names the base model instead of a path."""
    for config in trained.peft_config.values():
        config.base_model_name_or_path = title
        config.inference_mode = True
    trained.save_pretrained(stage, safe_serialization=True)


def _read_adapter(model: HuggingFaceModel, stage: Path) -> nn.Module:
    """Read the model from its base and the adapter that was just written."""
    try:
        from peft import PeftModel  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ModelError(INSTALL) from None
    return PeftModel.from_pretrained(read_base(Path(model.path)), stage).eval()  # pyright: ignore[reportArgumentType]


def _write_merged(merged: Any, model: HuggingFaceModel, stage: Path) -> None:
    """Write a merged model with the tokenizer of its base model."""
    merged.save_pretrained(stage)
    (stage / "tokenizer.json").write_bytes((Path(model.path) / "tokenizer.json").read_bytes())
    # Without tokenizer_config.json, transformers does not know the EOS token.
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos_token", "eos_token"):
        number = getattr(merged.config, f"{name}_id")
        number = number[0] if isinstance(number, list) else number
        if number is not None:
            settings[name] = read_tokenizer(Path(model.path)).tokenizer.id_to_token(number)
    (stage / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _read_gguf(stage: Path) -> nn.Module:
    """Read the GGUF file that was just written."""
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    return AutoModelForCausalLM.from_pretrained(stage, gguf_file=GGUF_FILE, dtype=torch.float32).eval()


def write_gguf_file(model: Any, base: Path, file: Path, title: str) -> None:
    """Write a model of the Llama family and its tokenizer as GGUF.

    Args:
        model: A `LlamaForCausalLM`, with any adapter merged.
        base: The folder of the base model, which has tokenizer.json.
        file: The file to write.
        title: The name of the base model, for the name of the model in the file.

    Raises:
        ModelError: The package gguf is not installed.
        InvalidValue: The model is not of the Llama family, its tokenizer is not byte-pair encoding, or GGUF has no name
            for one of its layers.
    """
    try:
        import gguf  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ModelError("GGUF needs an extra: pip install 'unheard[llm]'.") from None
    config: Any = model.config
    if config.model_type != "llama":
        raise InvalidValue(f"--to gguf is for models of the Llama family, not {config.model_type!r}. Use --to merged.")
    writer = gguf.GGUFWriter(str(file), "llama")
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope: Any = getattr(config, "rope_parameters", None) or {}
    writer.add_name(f"{title}, fine-tuned with user-level differential privacy")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    _write_tokenizer(writer, gguf, base, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        numbers = tensor.detach().float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            numbers = _interleaved(numbers, heads if "q_proj" in name else shared)
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if own is None:
            raise InvalidValue(f"GGUF has no name for the layer {name!r} of this model. Use --to merged.")
        writer.add_tensor(own, numbers.astype(np.float16 if numbers.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight_OI: np.ndarray, heads: int) -> np.ndarray:
    """Return the weights of queries or keys with their rows in the order of GGUF.

    Rotary embeddings rotate pairs of rows. In transformers, the first rows of all pairs of a head come before the
    second rows; in GGUF, the two rows of a pair are neighbours.
    """
    pairs = weight_OI.reshape(heads, 2, weight_OI.shape[0] // heads // 2, *weight_OI.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight_OI.shape)


def _write_tokenizer(writer: Any, gguf: Any, base: Path, config: Any) -> None:
    """Write the pieces and merges of the tokenizer.json of the base model.

    Raises:
        InvalidValue: The tokenizer is not byte-pair encoding.
    """
    table = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    own = table.get("model", {})
    if own.get("type") != "BPE":
        raise InvalidValue(f"--to gguf is for byte-pair tokenizers, not {own.get('type')!r}. Use --to merged.")
    pieces = {number: piece for piece, number in own["vocab"].items()}
    special = {added["id"]: added["content"] for added in table.get("added_tokens", [])}
    rows = range(config.vocab_size)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(base))
    writer.add_token_list([special.get(row) or pieces.get(row) or f"[PAD{row}]" for row in rows])
    writer.add_token_types(
        [kinds.CONTROL if row in special else kinds.NORMAL if row in pieces else kinds.UNUSED for row in rows]
    )
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in own["merges"]])
    for add, number in ((writer.add_bos_token_id, config.bos_token_id), (writer.add_eos_token_id, config.eos_token_id)):
        number = number[0] if isinstance(number, list) else number
        if number is not None:
            add(number)


def _pre_tokenizer(base: Path) -> str:
    """Return the name that llama.cpp uses for the rule by which the tokenizer splits text before it merges bytes."""
    record = record_of(base)
    return "smollm" if record and record.title.startswith("SmolLM2") else "default"


# --------------------------------------------------------------------------------------------------------- checks


@torch.no_grad()
def _difference(one: Any, other: Any) -> float:
    """Return the relative difference between the scores of two models on 24 fixed token ids. No user's text is read."""
    rows = torch.arange(24)[None] * 7 % one.config.vocab_size
    expected, given = one(rows, use_cache=False).logits, other(rows, use_cache=False).logits
    return float((expected - given).norm() / expected.norm())


def write_hub_folder(
    run: str | Path,
    out: str | Path,
    *,
    license: str | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[str]:
    """Write a folder that can be uploaded to the hub as it is. The folder appears complete or not at all.

    Args:
        run: The run folder.
        out: The folder to write. It must be missing or empty.
        license: The licence of the model, as the hub names it (`apache-2.0`). By default the card names none.
        progress: Called with the number of texts compared so far and the total number of texts, while the ONNX files
            are compared with PyTorch.

    Returns:
        The names of the files.

    Raises:
        InvalidValue: `out` is a file, or a folder that is not empty.
        RunFolderError: `run` is not a run folder, is damaged, has released no model yet, or was trained further meanwhile.
        LedgerError: The ledger does not contain all charges of the model.
        ModelError: The exported files do not predict what the model of the run predicts, or a package is missing.
    """
    target = free_target(out)
    folder = RunFolder.open(run)
    released, before = Released.open(run), folder.model_digest()
    statement = run_statement(folder)
    model = released.run.model
    if isinstance(model, HuggingFaceModel):
        to, usage = ("adapter", USE_AS_ADAPTER) if model.train == "lora" else ("merged", USE_AS_TRANSFORMERS)
        card = render_card(folder, released, statement, license=license, usage=usage)
        return sorted(write_language_model(run, target, to, card=card).files)
    device_files = _device_files(run, released, progress)
    usage = USE_AS_EXPORT if device_files else USE_AS_RUN
    files = {
        "README.md": render_card(folder, released, statement, license=license, usage=usage).encode(),
        "config.json": _json(_config(folder, released)),
        "model.safetensors": folder.model.read_bytes(),
        "vocabulary.txt": folder.vocabulary.read_bytes(),
        "tokens.json": _json(tokenizer_to_table(released.tokenizer)),
        "statement.json": _json(statement),
        **device_files,
    }
    # DP: a model of later rounds would get a statement that does not contain their charges.
    if hashlib.sha256(files["model.safetensors"]).hexdigest() != before:
        raise RunFolderError(
            f"{run} was trained further while its model was exported. Try again when training has stopped."
        )
    write_files(target, files)
    return sorted(files)


def _device_files(run: str | Path, released: Released, progress: Callable[[int, int], None]) -> dict[str, bytes]:
    """Return the files of `unheard export --to onnx`, by file name.

    The result is empty if the model is neither an LSTM nor a GRU, or if the package onnx is not installed.
    """
    from unheard.deployment.step import step_arrays

    try:
        import onnx  # noqa: F401

        step_arrays(released.run.model, released.params_P)
    except (ImportError, ModelError):
        return {}
    return onnx_files(run, progress=progress).files


def _config(folder: RunFolder, released: Released) -> dict[str, Any]:
    """Return the content of `config.json`: the settings of the model and of its training, without paths."""
    settings = folder.public_settings()
    return {
        "model_type": "unheard",
        "unheard_version": version("unheard"),
        "vocabulary_size": len(released.vocabulary),
        "parameters": released.run.model.layout.total,
        "model": {key.removeprefix("model."): value for key, value in settings.items() if key.startswith("model.")},
        "training": {key: value for key, value in settings.items() if not key.startswith("model.")},
    }


def _json(value: Any) -> bytes:
    """Return a value as JSON text. Raises `ValueError` for infinity and NaN."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()
