"""Write the model card of a run: a README.md with the claim, the use, the accuracy and the privacy report of its model.

    card = model_card("runs/private")                # Markdown with YAML front matter, as the Hugging Face hub expects
    write_card("runs/private", Path("README.md"))

Folders in the formats of Hugging Face (`hugging_face_export.py`) contain this card. Its figures come from the privacy
statement, the evaluations on held-out users and the run file, which are released with the model.
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
from unheard.privacy.ledger import run_id
from unheard.privacy.population_statement import all_runs, charges_elsewhere, other_runs
from unheard.privacy.run_ledger import population_of, read_run_ledger
from unheard.privacy.statement_formats import markdown_line, read_audit
from unheard.privacy.statement_formats import render as render_statement
from unheard.run_folder import RunFolder
from unheard.training.released import Released

SHOWN = {
    "accuracy_top1": ("accuracy", "AccuracyTop1"),
    "accuracy_top3": ("accuracy", "AccuracyTop3"),
    "perplexity": ("perplexity", "perplexity"),
}
"""The figures of an evaluation that the card shows, each with its metric type and name on the hub."""
USE_AS_RUN = """```bash
unheard predict {name} "how are"
```"""
"""The section "Use" of the card of a run folder."""


def model_card(run: str | Path, *, license: str | None = None) -> str:
    """Return the model card of a run's newest model, as Markdown with YAML front matter.

    Args:
        run: The run folder.
        license: The licence of the model, as the hub names it (`apache-2.0`). By default the card names none.

    Raises:
        RunFolderError: `run` is not a run folder, is damaged, or has released no model yet.
        LedgerError: The ledger does not contain all charges of the model, or the ledger of all runs on the same users
            is damaged.
    """
    folder = RunFolder.open(run)
    return render_card(folder, Released.open(run), run_statement(folder), license=license)


def write_card(run: str | Path, out: str | Path, *, license: str | None = None, force: bool = False) -> Path:
    """Write the model card of a run to a file, and return the path of the file.

    Args:
        run: The run folder.
        out: The file to write.
        license: The licence of the model, as the hub names it. By default the card names none.
        force: Whether to overwrite a file that exists.

    Raises:
        InvalidValue: The file exists and `force` is not set, or the file cannot be written.
        RunFolderError, LedgerError: As for `model_card`.
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
        released: The model of the run.
        statement: The privacy statement of the run.
        license: The licence of the model, as the hub names it. By default the card names none.
        usage: The text of the section "Use"; `{name}` is replaced by the name of the run folder.
        difference: The relative difference between the scores of the exported files and those of the run's own model.
            None if the files were not compared, or need no comparison.
        has_accuracy: Whether the card shows the accuracy at the last evaluation.
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
    templates.filters["quoted"] = json.dumps  # YAML accepts every JSON string
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
        is_private=math.isfinite(float(statement["claimed"]["epsilon"])),
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
    """Return what the card says about all runs on the same users together.

    Returns:
        The claim with its warnings, or the reason why nothing can be claimed. None if the users were charged for this
        run alone.

    Raises:
        LedgerError: The store's ledger is damaged.
    """
    charges = sum(row["times"] for row in statement["composed"])
    try:
        population, ledger = population_of(folder), read_run_ledger(folder)
        if population is None:
            return "not known, because the ledger of their store was not on the machine that wrote this card"
        # The number of charges does not tell: a run that began from another run has the charges of both.
        others = other_runs(population, run_id(ledger), str(ledger.facts.get("corpus", "")))
        if not others and len(population.events) <= charges and not charges_elsewhere(population):
            return None
        total = all_runs(population)
        # A total without its warnings would promise too much: the seed of another run reveals the noise of that run.
        warnings = [warning[0].upper() + warning[1:].rstrip(".") for warning in total["warnings"]]
        return markdown_line(". ".join([total["claim"], *warnings]))
    except UnprovenCombination as error:
        return markdown_line(str(error))
    except LedgerError as error:
        raise LedgerError(f"The ledger of all runs on these users cannot be used: {error}") from None


def _baselines(folder: RunFolder) -> str:
    """Return the AccuracyTop1 of the simple baselines as text; empty if the run has no full measures."""
    measures = folder.read_measures()
    if measures is None:
        return ""
    return "; ".join(
        f"{markdown_line(name)} {percent(scores['tokens']['accuracy_top1'])} AccuracyTop1"
        for name, scores in measures["baselines"].items()
    )


def _shown(key: str, value: float) -> str:
    """Format a figure: an accuracy in percent, any other figure as a number."""
    return percent(value) if key.startswith("accuracy") else number(value)
