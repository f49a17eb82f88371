"""The commands that read and limit ledgers: `statement`, `budget` and `verify`.

    statement  print the privacy statement of a run, or of all runs on a store, computed from the ledger alone
    budget     show or limit what all runs on a store together spend, and join stores that hold the same users
    verify     check that the files of a run folder agree, and recompute its epsilon

A statement has epsilon by each accountant, the assumptions of the guarantee, and warnings (`privacy/statement.py`,
`privacy/population_statement.py`; `privacy/statement_formats.py` writes the formats that reviewers and registries ask
for). A budget is kept in the ledger of the store (`privacy/population_ledger.py`), so it limits every later run, even
if the run file sets another budget. `verify` prints one line for each check of `audit/verification.py`: passed, failed,
or impossible here, for example because the store is not on this machine.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from unheard.cli.display import console, echo, note, notes, say
from unheard.cli.options import AsJson, Corpus, RunDir, option
from unheard.errors import InvalidValue, RunFolderMissing
from unheard.run_folder import RunFolder

if TYPE_CHECKING:
    from unheard.privacy.population_ledger import PopulationLedger

STATEMENT_EXAMPLES = """
Examples:

unheard statement runs/first

unheard statement runs/first --delta 1e-8 --json

unheard statement runs/first --format report    (for a paper or a model card, as Markdown)

unheard statement runs/first --format registry > entry.yaml    (for the registry of deployments)

unheard statement runs/first --all-runs    (all runs that were charged to the same users)

unheard statement corpora/chat    (the same, from the store)
"""


@dataclass(frozen=True, kw_only=True)
class StatementOptions:
    """The options of `unheard statement`: which guarantee to state, and in which format."""

    delta: Annotated[float | None, option("The delta for which to state epsilon.", otherwise="the declared delta")] = (
        None
    )
    epsilon: Annotated[float | None, option("Also state the delta for this epsilon.", otherwise="none")] = None
    all_runs: Annotated[
        bool, option("Compose all runs on the same users, from the ledger of the store.", "--all-runs")
    ] = False
    format: Annotated[
        Literal["text", "report", "registry", "nist"],
        option(
            "text; report (the items of 'How to DP-fy ML', Markdown); registry (the fields of the Deployments Registry, "
            "JSON); nist (the pyramid of NIST SP 800-226, Markdown)."
        ),
    ] = "text"


def statement(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A run folder, a store, or the ledger.jsonl of either.", show_default=False),
    ],
    *,
    options: StatementOptions,
    as_json: AsJson = False,
) -> None:
    """Print the privacy statement of a run or of a store, computed from DIR/ledger.jsonl.

    Needs neither text nor torch. Rounds that are in the checkpoints, the model or the store's ledger but not in
    DIR/ledger.jsonl are an error."""
    from unheard.privacy.population_statement import render_all_runs, store_statement

    path = folder / "ledger.jsonl" if folder.is_dir() else folder
    if (folder / "corpus.json").is_file() and not path.is_file():
        content = store_statement(folder, delta=options.delta)
        text = render_all_runs(content)
    elif path.is_file():
        content, text = _read_statement(path, options)
    else:
        raise RunFolderMissing(f"{folder} holds no ledger.jsonl: name the folder that `unheard train --out` wrote.")
    if as_json and options.format != "registry":  # the registry format is JSON already
        echo(json.dumps(content, allow_nan=False, indent=2))
    else:
        echo(text, nl=False)


def _read_statement(path: Path, options: StatementOptions) -> tuple[dict[str, Any], str]:
    """Return the statement of one run, or of all runs on its users, as data and as text.

    Args:
        path: The ledger of a run or of a store.
        options: The options of the command.

    Raises:
        InvalidValue: An option for one run is given together with --all-runs or the ledger of a store.
    """
    from unheard.privacy.ledger import Ledger, run_id
    from unheard.privacy.population_statement import all_runs, find_population_ledger, render_all_runs
    from unheard.privacy.run_ledger import is_alone, read_run_ledger
    from unheard.privacy.statement import compute_statement
    from unheard.privacy.statement_formats import read_audit, render, report_data

    population = find_population_ledger(path, options.all_runs)
    if population is not None:
        if options.epsilon is not None:
            raise InvalidValue("--epsilon asks about one run; leave it out for all runs together.")
        if options.format != "text":
            raise InvalidValue(
                f"--format {options.format} is about one run: name a run folder, and leave out --all-runs."
            )
        content = all_runs(population, delta=options.delta)
        return content, render_all_runs(content)
    is_copy = path.name != "ledger.jsonl"
    ledger = Ledger.read(path) if is_copy else read_run_ledger(path.parent)
    alone = is_copy or is_alone(RunFolder(path.parent))
    content = compute_statement(
        ledger.facts, ledger.entries, delta=options.delta, epsilon=options.epsilon, is_alone=alone
    )
    if options.format == "text":
        return content, render(content, "text")
    audit = read_audit(path.parent, run_id(ledger))
    return report_data(content, audit=audit), render(content, options.format, audit=audit)


BUDGET_EXAMPLES = """Examples:

  unheard budget corpora/chat    (what was spent so far)

  unheard budget corpora/chat --epsilon 8 --delta 1e-7

  unheard budget corpora/chat --same-users corpora/chat-may    (two stores with the same users share one ledger)
"""


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """The budget to set, the ledger that holds it, and stores to join to the same ledger."""

    epsilon: Annotated[
        float | None, option("The epsilon that all runs together may reach.", otherwise="no budget is set")
    ] = None
    delta: Annotated[
        float | None, option("The delta of --epsilon, or of what is shown.", otherwise="that of the present budget")
    ] = None
    accountant: Annotated[Literal["rdp", "moments"], option("The accountant that checks the budget.")] = "rdp"
    same_users: Annotated[
        list[Path] | None,
        option(
            "Another store with (some of) the same users. May be repeated.",
            "--same-users",
            "--same-people",  # the name in version 0.1
            metavar="STORE",
            otherwise="none",
        ),
    ] = None
    ledger: Annotated[
        Path | None, option("The ledger that the run files name as privacy.ledger.", otherwise="the store's own")
    ] = None


def budget(
    store: Annotated[Path, typer.Argument(help="A token store, made by `unheard prepare`.", metavar="STORE")],
    *,
    options: BudgetOptions,
    as_json: AsJson = False,
) -> None:
    """Show or set the privacy budget of all runs on a store together.

    A run stops before the round that would exceed the budget.
    """
    from unheard.privacy.population_ledger import check_one_ledger
    from unheard.privacy.population_statement import all_runs, render_all_runs

    population = _population_ledger(store, options.ledger)
    for other in options.same_users or []:
        population.join(_population_ledger(other))
        note(f"{other} and {store} are one population from now on: {population.path}")
    for place in (store, *(options.same_users or [])):
        check_one_ledger(place, population.path, population)
    if options.epsilon is not None:
        _set_budget(population, options.epsilon, options.delta, options.accountant)
    elif options.delta is not None and not population.events:
        raise InvalidValue("Nothing was charged yet. To set a budget give --epsilon with --delta.")
    if not population.events and population.budget is None:
        echo("{}" if as_json else f"Nothing was charged to {population.path} yet, and no budget is set.")
        return
    content = all_runs(population, delta=options.delta)
    echo(json.dumps(content, allow_nan=False, indent=2) if as_json else render_all_runs(content), nl=as_json)


def _population_ledger(store: Path, path: Path | None = None) -> "PopulationLedger":
    """Open the ledger of the users of a store: the file at `path`, or the store's own ledger if `path` is None."""
    from unheard.corpus.store import TokenStore
    from unheard.privacy.population_ledger import open_population_ledger

    opened = TokenStore.open(store)
    return open_population_ledger(opened.path, opened.name, opened.vocabulary_events, path)


def _set_budget(population: "PopulationLedger", epsilon: float, delta: float | None, accountant: str) -> None:
    """Set the budget of a population. If `delta` is None, the delta of the present budget is kept.

    Raises:
        InvalidValue: `delta` is None and there is no budget yet.
    """
    from unheard.privacy.accountants import FILTER_ORDERS
    from unheard.privacy.budget import Budget

    if delta is None:
        if population.budget is None:
            raise InvalidValue("A budget is an epsilon at a delta: give --delta too, below 1 / users.")
        delta = population.budget.delta
    # DP: at fixed orders the budget holds whatever is chosen after a look at results: a privacy filter.
    orders = FILTER_ORDERS if accountant == "rdp" else ()
    population.set_budget(Budget(epsilon=epsilon, delta=delta, accountant=accountant, orders=orders))


VERIFY_EXAMPLES = """Examples:

  unheard verify runs/first

  unheard verify runs/first --corpus /data/chat --json
"""

MARKS = {True: "[green]fits[/]", False: "[bold red]DOES NOT FIT[/]", None: "[yellow]not checked[/]"}


def verify(folder: RunDir, corpus: Corpus = None, as_json: AsJson = False) -> None:
    """Recompute epsilon from the ledger, and check that all other files of a run folder agree with the ledger.

    The exit status is 2 if a check fails.
    """
    from unheard.audit.verification import verify as verify_folder

    with notes.status("Reading the folder and recomputing epsilon"):
        findings = verify_folder(folder, corpus)
    wrong = [finding.name for finding in findings if finding.fits is False]
    if as_json:
        print(json.dumps({"fits": not wrong, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        table = Table("", "", "", show_header=False, box=None)
        for finding in findings:
            table.add_row(MARKS[finding.fits], finding.name, escape(finding.words))
        console.print(table)
        say(f"This folder cannot be trusted: {', '.join(wrong)}." if wrong else "Everything that was checked fits.")
    if wrong:
        raise typer.Exit(2)
