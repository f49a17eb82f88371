"""A model card in the form that the Hugging Face hub shows, and a folder that can be uploaded to the hub as it is.

    card = model_card("runs/private")                # Markdown with YAML front matter: README.md of the repository
    write_card("runs/private", Path("README.md"))
    write_hub_folder("runs/private", "hub/private")

Files of a hub folder:

    README.md           the model card, with the privacy report of `unheard statement --format report`
    config.json         the model's settings and those of its training, without paths
    model.safetensors   the newest released parameters, by name
    vocabulary.txt, tokens.json, statement.json
    model.onnx, model.int8.onnx, export.json        as `unheard export --to onnx` writes them, for LSTM and GRU models

The folder of a Hugging Face model has the files of `unheard export --to adapter` (LoRA) or `--to merged` and this card.

All figures of the card are released with the run: the privacy statement, the evaluations on held-out users and the run
file. Nothing is uploaded: `hf upload NAME FOLDER` does that.
"""

import json
import math
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.corpus.tokenizers import tokenizer_to_table
from unheard.deployment.export import onnx_files, write_files
from unheard.deployment.model import run_statement
from unheard.errors import InvalidValue, LedgerError, ModelError, UnprovenCombination
from unheard.formatting import number, percent, text_templates
from unheard.models.base import facts_about_base
from unheard.models.hugging_face import HuggingFaceModel
from unheard.privacy.population_statement import all_runs
from unheard.privacy.run_ledger import population_of
from unheard.privacy.statement_formats import markdown_line, read_audit
from unheard.privacy.statement_formats import render as render_statement
from unheard.run_folder import RunFolder, replace_file
from unheard.training.released import Released

SHOWN = {
    "accuracy_top1": ("accuracy", "AccuracyTop1"),
    "accuracy_top3": ("accuracy", "AccuracyTop3"),
    "perplexity": ("perplexity", "perplexity"),
}
"""Figures of an evaluation, with the type and the name that the hub shows."""
USE_AS_RUN = """```bash
unheard predict {name} "how are"
```"""
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


def model_card(run: str | Path, *, license: str | None = None, usage: str = USE_AS_RUN) -> str:
    """The model card of a run's newest model: Markdown with YAML front matter.

    Args:
        run: The run folder.
        license: The licence of the model, as the hub names it (`apache-2.0`); by default the card names none.
        usage: The text of the section on how to use the model; `{name}` is replaced.

    Raises:
        RunFolderError: It is not a run folder, or has released no model yet.
        LedgerError: The ledger does not contain what the model cost.
    """
    folder = RunFolder.open(run)
    released = Released.open(run)
    return _card(folder, released, run_statement(folder), license, usage)


def write_card(run: str | Path, out: str | Path, *, license: str | None = None, force: bool = False) -> Path:
    """Write the model card of a run to a file.

    Args:
        run: The run folder.
        out: The file to write.
        license: The licence for the front matter, as the Hugging Face hub names it; None to leave it out.
        force: Whether to overwrite a file that exists.

    Raises:
        InvalidValue: The file exists and `force` is not set, or cannot be written.
    """
    path = Path(out)
    if path.exists() and not force:
        raise InvalidValue(f"{out} exists. Choose another name, or overwrite it with --force.")
    content = model_card(run, license=license)
    try:
        storage.replace_file(path, content.encode())
    except OSError as error:
        raise InvalidValue(f"Cannot write {out}: {error.strerror}.") from None
    return path


def write_hub_folder(
    run: str | Path,
    out: str | Path,
    *,
    license: str | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[str]:
    """Write a folder that can be uploaded to the hub as it is; it appears as a whole or not at all.

    Args:
        run: The run folder.
        out: The folder to write, which must not exist or be empty.
        license: As for `model_card`.
        progress: Called with the number of texts compared and their total, while ONNX files are checked.

    Returns:
        The names of the files.

    Raises:
        InvalidValue: `out` already holds something.
        RunFolderError: It is not a run folder, or has released no model yet.
        LedgerError: The ledger does not contain what the model cost.
    """
    target = Path(out).resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidValue(f"{out} already holds something: choose another --out, or remove it first.")
    folder = RunFolder.open(run)
    released, statement = Released.open(run), run_statement(folder)
    if isinstance(released.run.model, HuggingFaceModel):
        return _write_language_model(folder, released, statement, target, license)
    device_files = _device_files(run, released, progress)
    usage = USE_AS_EXPORT if device_files else USE_AS_RUN
    files = {
        "README.md": _card(folder, released, statement, license, usage).encode(),
        "config.json": _json(_config(folder, released)),
        "model.safetensors": folder.model.read_bytes(),
        "vocabulary.txt": folder.vocabulary.read_bytes(),
        "tokens.json": _json(tokenizer_to_table(released.tokenizer)),
        "statement.json": _json(statement),
        **device_files,
    }
    write_files(target, files)
    return sorted(files)


def _write_language_model(
    folder: RunFolder, released: Released, statement: Mapping[str, Any], target: Path, license: str | None
) -> list[str]:
    """The folder of a Hugging Face model, as `export --to adapter` or `--to merged` writes it, with this module's card."""
    from unheard.deployment.language_model import write_language_model

    is_lora = isinstance(released.run.model, HuggingFaceModel) and released.run.model.train == "lora"
    written = write_language_model(folder.path, target, "adapter" if is_lora else "merged")
    usage = USE_AS_ADAPTER if is_lora else USE_AS_TRANSFORMERS
    replace_file(target / "README.md", _card(folder, released, statement, license, usage).encode())
    return sorted(written.files)


def _device_files(run: str | Path, released: Released, progress: Callable[[int, int], None]) -> dict[str, bytes]:
    """The files of `export --to onnx`; none for a model without such a step, or where onnx is not installed."""
    from unheard.deployment.step import step_arrays

    try:
        import onnx  # noqa: F401

        step_arrays(released.run.model, released.params_P)
    except (ImportError, ModelError):
        return {}
    return onnx_files(run, progress=progress).files


def _card(folder: RunFolder, released: Released, statement: Mapping[str, Any], license: str | None, usage: str) -> str:
    """Compose the model card from its template."""
    name = markdown_line(folder.path.resolve().name)
    rows = folder.read_metrics()
    last = rows[-1] if rows else {}
    settings = folder.public_settings()
    results = [
        {"type": kind, "name": title, "value": last[key], "shown": _shown(key, last[key])}
        for key, (kind, title) in SHOWN.items()
        if isinstance(last.get(key), int | float) and math.isfinite(last[key])
    ]
    model = released.run.model
    vocabulary = statement["vocabulary"] if isinstance(statement["vocabulary"], Mapping) else {}
    templates = text_templates("unheard.deployment")
    templates.filters["quoted"] = json.dumps  # a JSON string is a YAML string
    return templates.get_template("card.md").render(
        name=name,
        license=None if license is None else markdown_line(license),
        language=vocabulary.get("language"),
        kind=settings.get("model.kind", type(model).__name__),
        parameters=f"{model.layout.total:,}",
        base=list(map(markdown_line, facts_about_base(model))) if isinstance(model, HuggingFaceModel) else [],
        words=f"{len(released.vocabulary):,}",
        version=version("unheard"),
        claim=markdown_line(statement["claim"]),
        all_runs=_over_all_runs(folder, statement),
        usage=usage.format(name=name),
        results=results,
        round=last.get("round"),
        baselines=_baselines(folder),
        settings=[(key, markdown_line(str(value))) for key, value in settings.items()],
        privacy_report=render_statement(statement, "report", audit=read_audit(folder.path, released.id or "")),
    )


def _over_all_runs(folder: RunFolder, statement: Mapping[str, Any]) -> str | None:
    """The claim over all runs on the same users, if the store's ledger is here and holds more than this run."""
    try:
        population = population_of(folder)
        if population is None or len(population.events) <= sum(row["times"] for row in statement["composed"]):
            return None
        return markdown_line(all_runs(population)["claim"])
    except UnprovenCombination as error:
        return markdown_line(str(error))
    except LedgerError as error:
        raise LedgerError(f"The ledger of all runs on these users cannot be used: {error}") from None


def _baselines(folder: RunFolder) -> str:
    """List the AccuracyTop1 of the baselines; empty if they were not measured."""
    measures = folder.read_measures()
    if measures is None:
        return ""
    return "; ".join(
        f"{markdown_line(name)} {percent(scores['tokens']['accuracy_top1'])} AccuracyTop1"
        for name, scores in measures["baselines"].items()
    )


def _shown(key: str, value: float) -> str:
    return percent(value) if key.startswith("accuracy") else number(value)


def _config(folder: RunFolder, released: Released) -> dict[str, Any]:
    """What is needed to build the model again, and how it was trained. Paths of this machine are left out."""
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
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()
