"""What a recipe is: the runs behind a table or figure of the paper, as data.

In: nothing. Out: PaperRun and Recipe, plain values without torch. A run is the paper's common setting (setting.py) and what it
changes in it, as `table.key=value`, just as on the command line. Runs are named; recipes that need the same run share it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

CORPORA = ("main", "20k", "30k", "characters", "other", "synthetic")
"""Which token store a run is trained on: the corpus; the same with other dictionaries or as characters; another corpus with the
main one's dictionary; a synthetic one of the paper's size."""


@dataclass(frozen=True, kw_only=True)
class PaperRun:
    """One training run."""

    name: str
    """Unique, readable, and a file name: `flat-S15-sigma0.003`."""
    changes: tuple[str, ...] = ()
    """What differs from the common setting: `clip.norm=15`."""
    rounds: int
    """As many as the paper's figure shows; a run may stop earlier, and the figure then says so."""
    seed: int = 1
    corpus: str = "main"
    after: str | None = None
    """The run whose last model this one begins from, if not from the common initialisation."""
    is_after_public: bool = False
    """The model begun from was trained on other people."""

    @property
    def users(self) -> int:
        """Users a round: the paper's 100, unless the run says otherwise."""
        asked = [change for change in self.changes if change.startswith("sampling.users_per_round=")]
        return int(asked[-1].partition("=")[2]) if asked else 100

    def with_seed(self, seed: int) -> "PaperRun":
        """The same run drawn again."""
        return self if seed == self.seed else replace(self, name=f"{self.name}-seed{seed}", seed=seed)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A table or figure: which runs fill it, and what the paper concluded from it."""

    name: str
    title: str
    place: str
    """Where in the paper: `Figure 1`, `Table 2`, `Section 3`."""
    runs: tuple[PaperRun, ...] = ()
    claim: str
    """The paper's conclusion, in our words, or what we expect where it has none; the exhibit says whether it held."""
    rank: int
    """Which comes first when time is short: 1 before 2."""

    @property
    def is_of_the_paper(self) -> bool:
        """Whether the paper concluded it; else we expected it."""
        return not self.place.startswith("Not in the paper")

    @property
    def claimed_by(self) -> str:
        """Whose conclusion it is, as a label."""
        return "The paper" if self.is_of_the_paper else "Expected"


def distinct(recipes: Iterable[Recipe]) -> list[PaperRun]:
    """Every run once and as long as the longest of its recipes asks, the most wanted recipes first, a run after the one that it
    begins from."""
    found: dict[str, PaperRun] = {}
    for recipe in sorted(recipes, key=lambda r: r.rank):
        for run in recipe.runs:
            before = found.get(run.name, run)
            assert replace(before, rounds=run.rounds) == run, f"two different runs are called {run.name}"
            found[run.name] = max(before, run, key=lambda r: r.rounds)
    ordered: dict[str, PaperRun] = {}

    def place(run: PaperRun) -> None:
        if run.after is not None and run.after not in ordered:
            place(found[run.after])
        ordered.setdefault(run.name, run)

    for run in found.values():
        place(run)
    return list(ordered.values())
