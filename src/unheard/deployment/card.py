"""The model card: README.md beside a model, with its claim, its use, its accuracy and its privacy report.

    card = model_card("runs/private")                # Markdown with YAML front matter, as the Hugging Face hub shows it
    write_card("runs/private", Path("README.md"))

Hub folders (`hub.py`) and exported language models (`language_model.py`) hold the same card. All its figures are
released with the run: the privacy statement, the evaluations on held-out users and the run file.
"""

import json
import math
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.deployment.model import run_statement
from unheard.errors import InvalidValue, LedgerError, UnprovenCombination
from unheard.formatting import number, percent, text_templates
from unheard.models.base import facts_about_base
from unheard.models.hugging_face import HuggingFaceModel
from unheard.privacy.population_statement import all_runs
from unheard.privacy.run_ledger import population_of
from unheard.privacy.statement_formats import markdown_line, read_audit
from unheard.privacy.statement_formats import render as render_statement
from unheard.run_folder import RunFolder
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


def model_card(run: str | Path, *, license: str | None = None) -> str:
    """The model card of a run's newest model: Markdown with YAML front matter.

    Args:
        run: The run folder.
        license: The licence of the model, as the hub names it (`apache-2.0`); by default the card names none.

    Raises:
        RunFolderError: It is not a run folder, or has released no model yet.
        LedgerError: The ledger does not contain what the model cost.
    """
    folder = RunFolder.open(run)
    return render_card(folder, Released.open(run), run_statement(folder), license=license)


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


def render_card(
    folder: RunFolder,
    released: Released,
    statement: Mapping[str, Any],
    *,
    license: str | None = None,
    usage: str = USE_AS_RUN,
    difference: float | None = None,
    has_accuracy: bool = True,
) -> str:
    """Render the card of a released model from the template `card.md`.

    Args:
        folder: The run folder.
        released: Its model.
        statement: Its privacy statement.
        license: As for `model_card`.
        usage: The text of the section on how to use the model; `{name}` is replaced.
        difference: The relative difference of scores between the exported files and the model of the run; None if the
            files are those of the run.
        has_accuracy: Whether the card has the figures of the last evaluation.
    """
    name = markdown_line(folder.path.resolve().name)
    rows = folder.read_metrics() if has_accuracy else []
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
        difference=None if difference is None else f"{difference:.1g}",
        has_accuracy=has_accuracy,
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
