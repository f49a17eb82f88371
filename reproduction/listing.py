"""The runs that an exhibit is made of: the list of them with what each cost, and notes on what they lack.

In: a recipe's runs and what was found. Out: a table and notes.
"""

import math
from collections.abc import Iterable, Sequence

from reproduction.exhibit import NOT_RUN, Table
from reproduction.recipe import PaperRun, Recipe, distinct
from reproduction.recipes import RECIPES
from reproduction.results import RunResult
from reproduction.results_query import Found
from unheard.formatting import NOTHING, epsilon_text, percent, small


def ordered(recipe: Recipe, beside: Iterable[str] = ()) -> list[PaperRun]:
    """The recipe's runs, then those of other recipes, each once."""
    known = {run.name: run for run in distinct(RECIPES.values())}
    return list(({run.name: run for run in recipe.runs} | {name: known[name] for name in beside}).values())


def lacks(runs: Sequence[PaperRun], found: Found) -> list[str]:
    """What was not run, what stopped early, what was tiny: a sentence for each."""
    absent = [run.name for run in runs if run.name not in found]
    asked = {run.name: _asked(run, found) for run in runs if run.name in found}
    stopped = [name for name, rounds in asked.items() if found.runs[name].rounds < rounds]
    notes = []
    if any(_is_tiny(run, found) for run in runs):
        notes.append(
            "Tiny runs, with fewer users a round than stated: they show that all of it works, and nothing else."
        )
    if absent:
        notes.append(f"Not run: {', '.join(absent)}.")
    by_end: dict[tuple[int, int], list[str]] = {}
    for name in stopped:
        by_end.setdefault((found.runs[name].rounds, asked[name]), []).append(name)
    notes += [f"Stopped at {done:,} of {all_:,} rounds: {', '.join(names)}." for (done, all_), names in by_end.items()]
    return notes


def _asked(run: PaperRun, found: Found) -> int:
    """The rounds that this recipe is for; tiny runs have a length of their own."""
    return found.runs[run.name].planned if _is_tiny(run, found) else run.rounds


def _is_tiny(run: PaperRun, found: Found) -> bool:
    drawn = found.runs[run.name].settings.get("sampling", {}) if run.name in found else {}
    return drawn.get("users_per_round", run.users) != run.users


def run_table(runs: Sequence[PaperRun], found: Found) -> Table:
    """A row for each run, also for those that were not run."""
    rows = []
    for run in runs:
        result = found.runs.get(run.name)
        rows.append([run.name, NOT_RUN, *[NOTHING] * 8] if result is None else _row(run, result, found))
    columns = ["run", "rounds", "of", "seed", "AccuracyTop1", "ε", "δ", "users/s", "on", "date, commit"]
    note = (
        "AccuracyTop1 at the end, smoothed over 5 evaluations. ε is what that run itself cost its own users, as it is: the smaller "
        "of PLD and RDP. The runs are seeded, to be repeated: against whoever knows the seed no ε holds."
    )
    return Table(title="The runs", columns=columns, rows=rows, note=note if rows else "No run is needed for this one.")


def _row(run: PaperRun, result: RunResult, found: Found) -> list[str]:
    epsilon = own_epsilon(result)
    return [
        run.name,
        f"{result.rounds:,}",
        f"{_asked(run, found):,}",
        str(result.seed),
        percent(found.accuracy(run.name)),
        epsilon_text(epsilon),
        NOTHING if math.isinf(epsilon) else small(result.epsilon.get("delta") or 0.0),
        f"{result.users_per_second:,.0f}",
        result.device,
        f"{result.date}, {result.commit[:9]}",
    ]


def own_epsilon(result: RunResult) -> float:
    """What the run cost its own population: the smaller bound of PLD and RDP."""
    bounds = [value for by in ("pld", "rdp") if (value := result.epsilon.get(by)) is not None]
    return min(bounds, default=math.inf)
