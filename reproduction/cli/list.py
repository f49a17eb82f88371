"""`python -m reproduction list`: every recipe with its place in the paper, its user updates, and how much of it is done.

The input is an optional folder of results; the output is a table, or JSON with `--json`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reproduction.cli.run import SPEED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from reproduction.recipe import PaperRun, Recipe, Scale
    from reproduction.results import RunResult

EXAMPLES = """Examples:

  python -m reproduction list

  python -m reproduction list --results reproduction/results/blogs    (how far each is)

  python -m reproduction list --rounds 1000 --users-per-second 1200

  python -m reproduction list --results reproduction/results/blogs --json
"""


def list_(
    results: Annotated[
        Path | None, typer.Option(help="A corpus's results, or the folder above: says how far each recipe is.")
    ] = None,
    scale: Annotated[str, typer.Option(help="full or smoke.")] = "full",
    rounds: Annotated[int | None, typer.Option(min=1, help="At most so many rounds of every run.")] = None,
    users_per_second: Annotated[
        float, typer.Option(min=0.001, help="For the estimate: user updates a second (default: one H200).")
    ] = SPEED,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output: all of it, and each recipe.")
    ] = False,
) -> None:
    """Every table and figure of the paper, and what it recommends but did not do: runs, user updates, how far."""
    import json

    from rich.table import Table

    from reproduction.cli.display import duration, say_if_missing
    from reproduction.recipe import distinct, scale_named
    from reproduction.recipes import RECIPES
    from reproduction.results import result_sets
    from unheard.cli.display import console, say

    chosen, first = scale_named(scale), result_sets(results)[0] if results else None
    known = first.runs if first else {}
    recipes = sorted(RECIPES.values(), key=lambda one: one.rank)
    runs = distinct(RECIPES.values())
    total, done = _updates(runs, known, chosen, rounds)
    if results:
        say_if_missing(results)
    if as_json:
        rows = [_plain(recipe, _updates(recipe.runs, known, chosen, rounds)) for recipe in recipes]
        whole = {"runs": len(runs), "user_updates": total, "done": done}
        print(json.dumps({"results": first.title if first else "", **whole, "recipes": rows}))
        return
    title = "The paper's recipes, in the order in which `all` runs them"
    if first and results:
        title += f", and how far they are on {first.title}" if first.title else ""
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for name in ("name", "what", "runs", "user updates", *(["done"] if results else [])):
        is_figure = name in ("runs", "user updates", "done")
        table.add_column(name, justify="right" if is_figure else "left", no_wrap=is_figure or name == "name")
    for recipe in recipes:
        updates, _ = _updates(recipe.runs, known, chosen, rounds)
        figures = [str(len(recipe.runs)), f"{updates:,}", *([_done(recipe, known, chosen, rounds)] if results else [])]
        table.add_row(recipe.name, f"{recipe.location}: {recipe.title}", *figures)
    console.print(table)
    rows = f"; {total - done:,} of them are left" if done else ""
    say(
        f"{len(runs)} runs, shared where recipes want the same: {total:,} user updates{rows}, "
        f"about {duration((total - done) / users_per_second)} at {users_per_second:,.0f} a second."
    )


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


def _plain(recipe: "Recipe", updates: tuple[int, int]) -> dict[str, "Any"]:
    """One recipe as values that JSON can hold."""
    total, done = updates
    return {
        "name": recipe.name,
        "place": recipe.location,
        "title": recipe.title,
        "claim": recipe.claim,
        "runs": [run.name for run in recipe.runs],
        "user_updates": total,
        "done": done,
    }


def _done(recipe: "Recipe", known: "Mapping[str, RunResult]", scale: "Scale", cap: int | None) -> str:
    """The share of a recipe's user updates that has results."""
    if not recipe.runs:
        return "needs no run"
    total, done = _updates(recipe.runs, known, scale, cap)
    return f"{done / total:.0%}" if done else "not run"
