"""The application `python -m reproduction`, with the commands `list`, `show`, `page` and `compare`.

`prepare` and `run` have their own modules. Commands import their dependencies when they are called, so that `--help` is
fast.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from reproduction.cli import prepare as paper_prepare
from reproduction.cli import run as paper_run
from reproduction.cli.options import ALL_RESULTS, MostRounds, Results, ScaleName
from reproduction.scheduling import SPEED
from unheard.cli.display import console, notes, print_curves, print_table, say, step_bars
from unheard.cli.main import as_typer_command
from unheard.cli.options import AsJson, number, option
from unheard.errors import CorpusMissing
from unheard.formatting import duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reproduction.exhibit import Exhibit
    from reproduction.recipe import PaperRun, Scale
    from reproduction.results import RunResult

LIST_EXAMPLES = """Examples:

  python -m reproduction list

  python -m reproduction list --results reproduction/results/blogs    (how far each is)

  python -m reproduction list --rounds 1000 --users-per-second 1200

  python -m reproduction list --results reproduction/results/blogs --json
"""

SHOW_EXAMPLES = """Examples:

  python -m reproduction show table-rounds

  python -m reproduction show noised-vs-baseline --results reproduction/results/blogs

  python -m reproduction show clipping --results reproduction/results/blogs --json
"""

PAGE_EXAMPLES = """Examples:

  python -m reproduction page --results reproduction/results --out build/paper

  python -m reproduction page --results reproduction/results/blogs --out build/paper --no-pictures
"""

COMPARE_EXAMPLES = """Examples:

  python -m reproduction compare reproduction/results/blogs reproduction/results/blogs-model.keep_norm=true

  python -m reproduction compare reproduction/results/blogs results/reddit --json
"""


def list_(
    *,
    results: Annotated[
        Path | None,
        option(
            "The results of one corpus, or the folder above them: also show how much of each recipe is done.",
            metavar="DIR",
            otherwise="none",
        ),
    ] = None,
    scale: ScaleName = "full",
    rounds: MostRounds = None,
    users_per_second: Annotated[float, number("User updates per second, for the estimate.", min=0.001)] = SPEED,
    as_json: AsJson = False,
) -> None:
    """List every recipe: its table or figure in the paper, its runs and its user updates.

    Recipes that the paper recommends but did not try are listed too. The estimate of time is for one H200 by default.
    """
    from reproduction.cli.display import say_if_missing
    from reproduction.recipe import distinct, scale_named
    from reproduction.recipes import RECIPES
    from reproduction.results import result_sets

    chosen, first = scale_named(scale), result_sets(results)[0] if results else None
    known, runs = first.runs if first else {}, distinct(RECIPES.values())
    total, done = _updates(runs, known, chosen, rounds)
    if results:
        say_if_missing(results)
    recipes = sorted(RECIPES.values(), key=lambda one: one.rank)
    rows = []
    for recipe in recipes:
        needed, made = _updates(recipe.runs, known, chosen, rounds)
        rows.append(recipe.summary() | {"user_updates": needed, "done": made})
    if as_json:
        whole = {"runs": len(runs), "user_updates": total, "done": done}
        print(json.dumps({"results": first.title if first else "", **whole, "recipes": rows}))
        return
    _print_recipes(rows, first.title if first else None)
    left = f"; {total - done:,} of them are left" if done else ""
    say(
        f"{len(runs)} runs, some shared by several recipes: {total:,} user updates{left}, "
        f"about {duration((total - done) / users_per_second)} at {users_per_second:,.0f} per second."
    )


def show(
    name: Annotated[str, typer.Argument(help="A table or figure, by the name that `list` shows.", metavar="NAME")],
    results: Results = ALL_RESULTS,
    as_json: AsJson = False,
) -> None:
    """Show one table or figure: the paper's numbers next to ours, whether its conclusion held in our runs, and why."""
    from reproduction.cli.display import say_if_missing
    from reproduction.exhibits import exhibit
    from reproduction.results import result_sets

    first, *others = result_sets(results)
    with notes.status("Computing the exhibit"):
        filled = exhibit(name, first)
    if filled.runs.rows:  # an exhibit without runs needs no results
        say_if_missing(results)
    if as_json:
        print(json.dumps(filled.as_json(), allow_nan=False))
    else:
        on = f"Run on {first.title}." if filled.runs.rows and first.runs else ""
        also = f" {results} holds others too: {', '.join(one.folder for one in others)}." if on and others else ""
        _print(filled, on + also)


def page(
    results: Results = ALL_RESULTS,
    out: Annotated[Path, option("The folder for the page and its pictures.")] = Path("build/paper"),
    pictures: Annotated[bool, option("Also write every figure as SVG and PNG.")] = True,
) -> None:
    """Write one page that opens from disk, with every table and figure of the paper and our results.

    It needs no runs, only results. Tables and figures without results say so.
    """
    from reproduction.cli.display import say_if_missing
    from reproduction.page import write_pages

    say_if_missing(results)
    with step_bars() as progress:
        written = write_pages(results, out, pictures=pictures, progress=progress)
    for path in written:
        say(f"The page is written: {path.resolve().as_uri()}")


def compare(
    first: Annotated[Path, typer.Argument(help="A folder of results.", metavar="DIR")],
    second: Annotated[Path, typer.Argument(help="The folder to compare with.", metavar="DIR")],
    as_json: Annotated[bool, option("One JSON list on standard output: both tables.", "--json")] = False,
) -> None:
    """Compare two sets of results: the same runs with another setting (`run --set`), seed or corpus.

    Shows the conclusions from both, and the accuracy of each run after the number of rounds that both completed.
    """
    from reproduction.comparison import comparison_tables
    from reproduction.results import FILE, read_results

    for folder in (first, second):
        if not (folder / FILE).exists():
            raise CorpusMissing(
                f"There is no {folder / FILE}. Give a folder that `python -m reproduction run` wrote results to."
            )
    with notes.status("Computing the comparison"):
        tables = comparison_tables(read_results(first), read_results(second))
    if as_json:
        print(json.dumps([asdict(table) for table in tables]))
    else:
        for table in tables:
            print_table(table)


def _print_recipes(rows: "list[dict[str, Any]]", results: str | None) -> None:
    """Print a table with one row per recipe.

    Args:
        rows: `Recipe.summary()` of each recipe, with the keys `user_updates` and `done` added.
        results: The name of the results, for the title of the table. None leaves out the column `done`.
    """
    from reproduction.cli.display import rich_table

    title = "The paper's recipes, in the order in which `all` runs them"
    columns = ["name", "what", "runs", "user updates"]
    cells = [[r["name"], f"{r['place']}: {r['title']}", str(len(r["runs"])), f"{r['user_updates']:,}"] for r in rows]
    if results is not None:
        title, columns = title + (f", and how far they are on {results}" if results else ""), [*columns, "done"]
        for cell, row in zip(cells, rows, strict=True):
            share = f"{row['done'] / row['user_updates']:.0%}" if row["done"] else "not run"
            cell.append(share if row["runs"] else "needs no run")
    console.print(rich_table(title, columns, cells, left=("name", "what"), folded="what"))


def _updates(
    runs: "Iterable[PaperRun]", known: "Mapping[str, RunResult]", scale: "Scale", cap: int | None
) -> tuple[int, int]:
    """Return the number of user updates that these runs need, and the number that have results.

    Args:
        runs: The runs.
        known: Results by the name of the run.
        scale: Sizes that all runs share.
        cap: Largest number of rounds of every run; None for no limit.
    """
    total = done = 0
    for run in runs:
        rounds = scale.rounds(run, cap)
        total += scale.updates(run, rounds)
        done += scale.updates(run, min(known[run.name].rounds, rounds)) if run.name in known else 0
    return total, done


def _print(filled: "Exhibit", where: str) -> None:
    """Print an exhibit: title, claim, verdict, curves, tables and notes.

    Args:
        filled: The exhibit.
        where: A sentence that says which results it shows; empty for none.
    """
    console.print(Text(f"{filled.recipe.location}: {filled.recipe.title}", style="bold"))
    if where:
        say(where)
    say(f"{filled.recipe.claimed_by}: {filled.recipe.claim}")
    style = {"held": "green", "did not hold": "red"}.get(filled.verdict.outcome, "yellow")
    console.print(Text(filled.verdict.outcome.capitalize(), style=f"bold {style}"))
    say(filled.verdict.sentence)
    say(f"The rule: {filled.verdict.rule}")
    for figure in (figure for figure in filled.figures if figure.x == "round"):
        drawn = [(line.name, x, y) for line in figure.lines if not line.is_thin for x, y in line.points]
        points = [{"run": name, "round": x, "value": y} for name, x, y in drawn]
        print_curves(f"{figure.title}, in %", points, "value", times=100)
    for table in (*filled.tables, filled.runs):
        print_table(table)
    for note in filled.notes:
        console.print(Text(f"Note: {note}", style="dim"), soft_wrap=True)


app = typer.Typer(help="Run and show the tables and figures of the paper.", no_args_is_help=True)
for _name, _function, _examples in (
    ("list", list_, LIST_EXAMPLES),
    ("prepare", paper_prepare.prepare, paper_prepare.EXAMPLES),
    ("run", paper_run.run, paper_run.EXAMPLES),
    ("show", show, SHOW_EXAMPLES),
    ("page", page, PAGE_EXAMPLES),
    ("compare", compare, COMPARE_EXAMPLES),
):
    app.command(_name, epilog=_examples)(as_typer_command(_function))
