"""`unheard statement`: the privacy statement of a run or of a store, computed from its ledger alone.

For a run folder it states epsilon by each accountant, what the guarantee rests on, and warnings
(`privacy/statement.py`). For a store, or with `--all-runs`, it composes every run that was charged to the store's users
(`privacy/population_statement.py`). `--format` gives the statement of a run in the forms that reviewers and registries
ask for (`privacy/statement_formats.py`).
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from unheard.cli.options import AsJson

EXAMPLES = """
Examples:

unheard statement runs/first

unheard statement runs/first --delta 1e-8 --json

unheard statement runs/first --format report    (for a paper or a model card, as Markdown)

unheard statement runs/first --format registry > entry.yaml    (for the registry of deployments)

unheard statement runs/first --all-runs    (everything that was ever charged to these users)

unheard statement corpora/chat    (the same, from the store)
"""


def statement(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A run folder, a store, or the ledger.jsonl of either.", show_default=False),
    ],
    delta: Annotated[
        float | None, typer.Option(help="The delta at which epsilon is stated.", show_default="the declared delta")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Also state the delta at this epsilon.", show_default="none")
    ] = None,
    all_runs: Annotated[
        bool, typer.Option("--all-runs", help="Compose all runs on the same users, from the ledger of the store.")
    ] = False,
    format: Annotated[
        Literal["text", "report", "registry", "nist"],
        typer.Option(
            help="text; report (the items of 'How to DP-fy ML', Markdown); registry (the fields of the Deployments Registry, "
            "JSON); nist (the pyramid of NIST SP 800-226, Markdown).",
        ),
    ] = "text",
    as_json: AsJson = False,
) -> None:
    """State the privacy of a run or of a store, from DIR/ledger.jsonl. Needs no text and no torch. A ledger that lacks
    what the checkpoints, the model or the store's ledger remember is an error."""
    from json import dumps

    from unheard.cli.display import echo
    from unheard.errors import InvalidValue, RunFolderMissing
    from unheard.privacy.ledger import Ledger
    from unheard.privacy.population_statement import all_runs as compose_all_runs
    from unheard.privacy.population_statement import find_population_ledger, render_all_runs, store_statement
    from unheard.privacy.run_ledger import read_run_ledger
    from unheard.privacy.statement import statement as compose_run
    from unheard.privacy.statement_formats import read_audit, render, report_data

    path = folder / "ledger.jsonl" if folder.is_dir() else folder
    if (folder / "corpus.json").is_file() and not path.is_file():
        content = store_statement(folder, delta=delta)
        typer.echo(dumps(content, allow_nan=False, indent=2) if as_json else render_all_runs(content), nl=as_json)
        return
    if not path.is_file():
        raise RunFolderMissing(f"{folder} holds no ledger.jsonl: name the folder that `unheard train --out` wrote.")
    population = find_population_ledger(path, all_runs)
    if population is not None:
        if epsilon is not None:
            raise InvalidValue("--epsilon asks about one run; leave it out for all runs together.")
        if format != "text":
            raise InvalidValue(f"--format {format} is about one run: name a run folder, and leave out --all-runs.")
        content = compose_all_runs(population, delta=delta)
        text = render_all_runs(content)
    else:
        ledger = Ledger.read(path) if path.name != "ledger.jsonl" else read_run_ledger(path.parent)
        content = compose_run(ledger.facts, ledger.entries, delta=delta, epsilon=epsilon)
        audit = None if format == "text" else read_audit(path.parent)
        text = render(content, format, audit=audit)
        content = content if format == "text" else report_data(content, audit=audit)
    if as_json and format != "registry":  # which is JSON by itself
        echo(dumps(content, allow_nan=False, indent=2))
    else:
        echo(text, nl=False)
