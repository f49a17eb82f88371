"""Write a folder with the model of a run that can be uploaded to the Hugging Face hub as it is.

    write_hub_folder("runs/private", "hub/private")

Files of a hub folder:

    README.md           the model card (`card.py`), with the privacy report of `unheard statement --format report`
    config.json         the settings of the model and of its training, without paths
    model.safetensors   the newest released parameters, by layer name
    vocabulary.txt      the words, one per line
    tokens.json         the tokenizer
    statement.json      the privacy statement
    model.onnx, model.int8.onnx, export.json        as `unheard export --to onnx` writes them, for LSTM and GRU models

For a fine-tuned Hugging Face model, the folder has the files that `unheard export --to adapter` (LoRA) or `--to merged`
(all parameters) writes, with this model card. Nothing is uploaded; the user uploads the folder with `hf upload`.
"""

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from unheard.corpus.tokenizers import tokenizer_to_table
from unheard.deployment.card import USE_AS_RUN, render_card
from unheard.deployment.export import onnx_files, write_files
from unheard.deployment.language_model import write_language_model
from unheard.deployment.model import run_statement
from unheard.errors import InvalidValue, ModelError
from unheard.models.hugging_face import HuggingFaceModel
from unheard.run_folder import RunFolder
from unheard.training.released import Released

# The section "Use" of the model card, for an ONNX export, a LoRA adapter and a whole transformers model.
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
        RunFolderError: `run` is not a run folder, is damaged, or has released no model yet.
        LedgerError: The ledger does not contain all charges of the model.
        ModelError: The exported files do not predict what the model of the run predicts, or a package is missing.
    """
    target = Path(out).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidValue(f"{out} already holds something: choose another --out, or remove it first.")
    folder = RunFolder.open(run)
    released, statement = Released.open(run), run_statement(folder)
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
