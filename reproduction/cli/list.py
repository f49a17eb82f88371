"""`python -m reproduction list`: every recipe with its place in the paper, its user updates, and how much of it is done.

The input is an optional folder of results; the output is a table, or JSON with `--json`.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from reproduction.cli.options import MostRounds, ScaleName
from reproduction.scheduling import SPEED
from unheard.cli.display import console, say
from unheard.cli.options import AsJson, number, option
from unheard.formatting import duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from reproduction.recipe import PaperRun, Scale
    from reproduction.results import RunResult

EXAMPLES = """Examples:

  python -m reproduction list

  python -m reproduction list --results reproduction/results/blogs    (how far each is)

  python -m reproduction list --rounds 1000 --users-per-second 1200

  python -m reproduction list --results reproduction/results/blogs --json
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
        f"{len(runs)} runs, shared where recipes want the same: {total:,} user updates{left}, "
        f"about {duration((total - done) / users_per_second)} at {users_per_second:,.0f} a second."
    )


def _print_recipes(rows: "list[dict[str, Any]]", results: str | None) -> None:
    """Print one row for each recipe; `results` is the title of the results that say how much is done, if any."""
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
    """User updates that these runs take, and the part of them that has results."""
    total = done = 0
    for run in runs:
        rounds = scale.rounds(run, cap)
        total += scale.updates(run, rounds)
        done += scale.updates(run, min(known[run.name].rounds, rounds)) if run.name in known else 0
    return total, done
