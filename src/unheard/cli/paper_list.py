"""`unheard paper list`: every recipe, where it stands in the paper, what it takes, and how far it is."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unheard.cli.paper_run import SPEED

if TYPE_CHECKING:
    from unheard.paper.recipe import Recipe
    from unheard.paper.results import RunResult
    from unheard.paper.scale import Scale

EXAMPLES = """Examples:

  unheard paper list

  unheard paper list --results results/blogs    (how far each is)

  unheard paper list --rounds 1000 --users-per-second 1200
"""


def list_(
    results: Annotated[
        Path | None, typer.Option(help="A corpus's results, to say how far each recipe is: results/blogs.")
    ] = None,
    scale: Annotated[str, typer.Option(help="full or smoke.")] = "full",
    rounds: Annotated[int | None, typer.Option(min=1, help="At most so many rounds of every run.")] = None,
    users_per_second: Annotated[
        float, typer.Option(min=0.001, help="For the estimate: user updates a second (default: one H200).")
    ] = SPEED,
) -> None:
    """Every table and figure of the paper, and what it recommends but did not do: runs, user updates, how far."""
    from rich.table import Table

    from unheard.cli.display import console, say
    from unheard.cli.paper_display import duration
    from unheard.paper.recipe import distinct
    from unheard.paper.recipes import RECIPES
    from unheard.paper.results import read
    from unheard.paper.scale import scale_named

    chosen, found = scale_named(scale), read(results) if results else {}
    title = "The paper's recipes, in the order in which `all` runs them"
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for name in ("name", "what", "runs", "user updates", *(["done"] if results else [])):
        is_figure = name in ("runs", "user updates", "done")
        table.add_column(name, justify="right" if is_figure else "left", no_wrap=is_figure or name == "name")
    for recipe in sorted(RECIPES.values(), key=lambda one: one.rank):
        updates = sum(chosen.updates(run, chosen.rounds(run, rounds)) for run in recipe.runs)
        figures = [str(len(recipe.runs)), f"{updates:,}", *([_done(recipe, found, chosen, rounds)] if results else [])]
        table.add_row(recipe.name, f"{recipe.place}: {recipe.title}", *figures)
    console.print(table)
    runs = distinct(RECIPES.values())
    total = sum(chosen.updates(run, chosen.rounds(run, rounds)) for run in runs)
    say(
        f"{len(runs)} runs, shared where recipes want the same: {total:,} user updates, "
        f"about {duration(total / users_per_second)} at {users_per_second:,.0f} a second."
    )


def _done(recipe: "Recipe", found: dict[str, "RunResult"], scale: "Scale", cap: int | None) -> str:
    """The part of a recipe's rounds that there are results of."""
    if not recipe.runs:
        return "needs no run"
    wanted = {run.name: scale.rounds(run, cap) for run in recipe.runs}
    done = sum(min(found[name].rounds, rounds) for name, rounds in wanted.items() if name in found)
    return f"{done / sum(wanted.values()):.0%}" if done else "not run"
