"""Define recipes as data: which runs a table or figure of the paper needs, and at which scale they are run.

A `Recipe` lists the runs that one table or figure needs. A `PaperRun` is a list of changes to the common configuration
of the paper (`common_tables`), each in the form `table.key=value`, as on the command line. Runs have unique names;
recipes that need the same run share it.

    run = PaperRun(name="flat-S15", changes=("clip.norm=15", "noise.kind=none"), rounds=3000)
    SMOKE.rounds(run), SMOKE.users(run)     # (2, 2): a small version of the same run

A `Scale` says how large the runs are: `full` as in the paper, `smoke` for a test of all recipes in about a minute.
This module does not import torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unheard.config import nearest
from unheard.errors import InvalidValue

CORPORA = ("main", "20k", "30k", "characters", "other", "synthetic")
"""Roles of token stores. `main` is the corpus itself. `20k`, `30k` and `characters` are the same text with larger
dictionaries or with characters as tokens. `other` is another corpus with the dictionary of the main one. `synthetic` is
a generated corpus of the size of the paper's."""
POPULATION = "POPULATION"
"""Placeholder in the changes of a run. It is replaced by the declared population of the corpus."""


def common_tables(store: Path, population: int, *, vocabulary_size: int) -> dict[str, Any]:
    """Return the tables of a run file that all runs share. Each run adds S, sigma, rounds and evaluations.

    The values are those of Section 3 and Appendix "Experiment details" of the paper: learning rate 6, batch size 8,
    unroll 10, one epoch, 100 users per round by Poisson sampling, the fixed denominator, one common initialisation.

    Args:
        store: The token store.
        population: Its declared population.
        vocabulary_size: The number of its words.
    """
    return {
        "corpus": {"path": str(store)},
        "privacy": {"population": population},
        "model": {"kind": "tied_lstm", "vocabulary_size": vocabulary_size},
        "sampling": {"kind": "poisson", "users_per_round": 100},
        "weights": {"kind": "equal"},
        "update": {"kind": "fedavg", "learning_rate": 6.0, "batch_size": 8, "unroll": 10, "epochs": 1},
        "clip": {"kind": "flat"},
        "estimator": {"kind": "fixed_denominator"},
        "noise": {"kind": "gaussian"},
        "server": {"kind": "add"},
        "training": {"init_seed": 0},
    }


@dataclass(frozen=True, kw_only=True)
class PaperRun:
    """One training run, as changes to the common configuration."""

    name: str
    """Unique name that is also a valid file name, such as `flat-S15-sigma0.003`."""
    changes: tuple[str, ...] = ()
    """Changes to the common configuration, such as `clip.norm=15`. Later changes overwrite earlier ones."""
    rounds: int
    """Number of rounds in the figure of the paper. A run may stop earlier; the exhibit then says so."""
    seed: int = 1
    corpus: str = "main"
    """Role of the corpus: one of `CORPORA`."""
    after: str | None = None
    """Name of the run whose last model this run starts from; None for the common initialisation."""
    is_after_public: bool = False
    """Whether the run that it starts from had other users, so that its model costs the users of this run no privacy."""

    @property
    def users(self) -> int:
        """Expected users per round: 100 as in the paper, unless a change says otherwise."""
        given = [change for change in self.changes if change.startswith("sampling.users_per_round=")]
        return int(given[-1].partition("=")[2]) if given else 100

    def with_seed(self, seed: int) -> "PaperRun":
        """Return the run with another seed. The seed becomes part of the name, unless it is the run's own."""
        return self if seed == self.seed else replace(self, name=f"{self.name}-seed{seed}", seed=seed)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A table, figure or statement of the paper: the runs that it needs, and the conclusion that they test."""

    name: str
    title: str
    location: str
    """Where it is in the paper: `Figure 1`, `Table 2`, `Section 3`; or a text that begins with `Not in the paper`."""
    runs: tuple[PaperRun, ...] = ()
    claim: str
    """The conclusion of the paper in our words, or our expectation if the paper has none."""
    rule: str
    """The rule that decides whether the claim held, in words."""
    limits: dict[str, float] = field(default_factory=dict)
    """Numbers that only the rule of this recipe uses, by name."""
    rank: int
    """Priority if time is short: recipes of rank 1 are run before those of rank 2."""

    @property
    def is_of_the_paper(self) -> bool:
        """Whether the claim is a conclusion of the paper; otherwise it is our own expectation."""
        return not self.location.startswith("Not in the paper")

    def summary(self) -> dict[str, Any]:
        """Return name, location, title, claim and names of the runs, as values that `json.dumps` accepts."""
        what = {"name": self.name, "place": self.location, "title": self.title, "claim": self.claim}
        return what | {"runs": [run.name for run in self.runs]}

    @property
    def claimed_by(self) -> str:
        """The label that a page shows in front of the claim: whose claim it is."""
        return "The paper" if self.is_of_the_paper else "Expected"


def distinct(recipes: Iterable[Recipe]) -> list[PaperRun]:
    """Return every run of some recipes once.

    Args:
        recipes: Recipes, which may share runs.

    Returns:
        The runs in the order of the ranks of their recipes. A run has the largest number of rounds that any of its
        recipes asks for, and comes after the run that it starts from.
    """
    longest: dict[str, PaperRun] = {}
    for recipe in sorted(recipes, key=lambda r: r.rank):
        for run in recipe.runs:
            before = longest.get(run.name, run)
            assert replace(before, rounds=run.rounds) == run, f"two different runs are called {run.name}"
            longest[run.name] = max(before, run, key=lambda r: r.rounds)
    ordered: dict[str, PaperRun] = {}

    def add(run: PaperRun) -> None:
        """Add a run after the run that it starts from."""
        if run.after is not None and run.after not in ordered:
            add(longest[run.after])
        ordered.setdefault(run.name, run)

    for run in longest.values():
        add(run)
    return list(ordered.values())


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes that all runs share: how often they are evaluated, and limits on their rounds and users."""

    name: str
    evaluate_every: int = 100
    """Rounds between evaluations, as registered. A rule that compares runs at round 500 or earlier needs 20 (`--set
    evaluation.every=20`)."""
    held_out_tokens: int = 10_000_000
    """Largest number of held-out tokens in an evaluation. The default is larger than any of our corpora, so that all
    held-out users count. The test set of the paper had 75,122 tokens, as did our runs before the rules were registered.
    """
    checkpoint_every: int = 200
    """Rounds between checkpoints."""
    most_rounds: int | None = None
    """Largest number of rounds of a run; None for no limit."""
    users_divided_by: int = 1
    """Divisor of the users per round; 1 keeps the users per round of each run."""
    users_from_to: tuple[int, int] = (1, 2**40)
    """Smallest and largest number of users per round after the division."""
    changes: tuple[str, ...] = ()
    """Changes to every run, as `table.key=value`, applied after the run's own changes."""

    def changed(self, changes: Sequence[str]) -> "Scale":
        """Return this scale with further changes to every run."""
        return replace(self, changes=(*self.changes, *changes))

    def rounds(self, run: PaperRun, cap: int | None = None) -> int:
        """Return the number of rounds of a run at this scale.

        Args:
            run: The run.
            cap: A limit from the command line or a schedule; None for no limit.
        """
        return min(limit for limit in (run.rounds, self.most_rounds, cap) if limit is not None)

    def users(self, run: PaperRun, population: int | None = None) -> int:
        """Return the users per round of a run at this scale.

        Args:
            run: The run.
            population: The population of the corpus, which limits the users per round if the scale divides them; None
                if it is not known yet.
        """
        if self.users_divided_by == 1:
            return run.users
        least, most = self.users_from_to
        return max(1, min(max(run.users // self.users_divided_by, least), most, population or most))

    def updates(self, run: PaperRun, rounds: int) -> int:
        """Return the number of user updates in some rounds of a run. Estimates of time are proportional to it.

        Args:
            run: The run.
            rounds: The number of rounds.
        """
        return rounds * self.users(run)


FULL = Scale(name="full")
"""The sizes of the paper."""
SMOKE = Scale(
    name="smoke",
    evaluate_every=1,
    held_out_tokens=500,
    most_rounds=2,
    users_divided_by=50,
    users_from_to=(1, 3),
    changes=("model.embedding_size=8", "model.hidden_size=16"),
)
"""A small version of everything, which shows in about a minute that all recipes work on a corpus."""
SCALES = {scale.name: scale for scale in (FULL, SMOKE)}
"""All scales by name."""


def scale_named(name: str) -> Scale:
    """Return the scale with this name. Raise `InvalidValue` if there is none."""
    if name not in SCALES:
        raise InvalidValue(f"Unknown scale '{name}'.{nearest(name, SCALES)}")
    return SCALES[name]
