"""Recipes as data: which runs a table or figure of the paper needs, and at which scale they are run.

A `Recipe` names the runs behind one table or figure. A `PaperRun` is the common configuration of the paper
(`common_tables`) and a list of changes in the form `table.key=value`, as on the command line. Runs have unique
names; recipes that need the same run share it.

    run = PaperRun(name="flat-S15", changes=("clip.norm=15", "noise.kind=none"), rounds=3000)
    SMOKE.rounds(run), SMOKE.users(run)     # (2, 2): a small version of the same run

A `Scale` says how large the runs are: `full` as in the paper, `smoke` for a test of everything in about a minute.
This module has no dependency on torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unheard.config import nearest
from unheard.errors import InvalidValue

CORPORA = ("main", "20k", "30k", "characters", "other", "synthetic")
"""Roles of token stores: the corpus itself; the same text with larger dictionaries or as characters; another corpus with
the dictionary of the main one; a synthetic corpus with the size of the paper's."""


def common_tables(store: Path, population: int, *, vocabulary_size: int) -> dict[str, Any]:
    """Return the tables of a run file that all runs share. Each run adds S, sigma, rounds and evaluations.

    Paper: Section 3 and Appendix "Experiment details": learning rate 6, batch size 8, unroll 10, one epoch, 100 users per
    round by Poisson sampling, the fixed denominator, one common initialisation.

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
    """One training run, described relative to the common configuration."""

    name: str
    """Unique, readable and valid as a file name: `flat-S15-sigma0.003`."""
    changes: tuple[str, ...] = ()
    """Differences from the common configuration: `clip.norm=15`."""
    rounds: int
    """Number of rounds in the figure of the paper. A run may stop earlier; the exhibit then says so."""
    seed: int = 1
    corpus: str = "main"
    after: str | None = None
    """Name of the run whose last model this run starts from. None: the common initialisation."""
    is_after_public: bool = False
    """Whether the initial model was trained on other users, so that it costs no privacy here."""

    @property
    def users(self) -> int:
        """Expected users per round: 100 as in the paper, unless a change says otherwise."""
        given = [change for change in self.changes if change.startswith("sampling.users_per_round=")]
        return int(given[-1].partition("=")[2]) if given else 100

    def with_seed(self, seed: int) -> "PaperRun":
        """The same run with another seed, which is part of its name."""
        return self if seed == self.seed else replace(self, name=f"{self.name}-seed{seed}", seed=seed)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A table or figure: the runs that fill it, and the conclusion of the paper that the exhibit checks."""

    name: str
    title: str
    location: str
    """Where it is in the paper: `Figure 1`, `Table 2`, `Section 3`."""
    runs: tuple[PaperRun, ...] = ()
    claim: str
    """The conclusion of the paper in our words, or our expectation if the paper has none."""
    rule: str
    """The rule that decides whether the claim held, in words."""
    limits: dict[str, float] = field(default_factory=dict)
    """The limits of the rule that no other recipe has, by name."""
    rank: int
    """Priority if time is short: 1 is run before 2."""

    @property
    def is_of_the_paper(self) -> bool:
        """Whether the claim is a conclusion of the paper; otherwise it is an expectation of our own."""
        return not self.location.startswith("Not in the paper")

    def summary(self) -> dict[str, Any]:
        """What it is and which runs it needs, as values that JSON can hold."""
        what = {"name": self.name, "place": self.location, "title": self.title, "claim": self.claim}
        return what | {"runs": [run.name for run in self.runs]}

    @property
    def claimed_by(self) -> str:
        """Label for the source of the claim."""
        return "The paper" if self.is_of_the_paper else "Expected"


def distinct(recipes: Iterable[Recipe]) -> list[PaperRun]:
    """Every run of some recipes once.

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
    """Sizes that all runs share: how often they are evaluated, how many rounds and users they have."""

    name: str
    evaluate_every: int = 100
    """Rounds between evaluations, as registered; 20 where a rule is read at round 500 or before (`--set
    evaluation.every=20`)."""
    held_out_tokens: int = 10_000_000
    """Size of the evaluation set in tokens: all held-out users. The test set of the paper had 75,122, and so did the
    runs before the rules were registered."""
    checkpoint_every: int = 200
    most_rounds: int | None = None
    users_divided_by: int = 1
    users_from_to: tuple[int, int] = (1, 2**40)
    changes: tuple[str, ...] = ()
    """Further changes to every run."""

    def changed(self, changes: Sequence[str]) -> "Scale":
        """This scale with further changes to every run."""
        return replace(self, changes=(*self.changes, *changes))

    def rounds(self, run: PaperRun, cap: int | None = None) -> int:
        """Return the number of rounds of a run at this scale.

        Args:
            run: The run.
            cap: A limit that the user sets; None for no limit.
        """
        return min(limit for limit in (run.rounds, self.most_rounds, cap) if limit is not None)

    def users(self, run: PaperRun, population: int | None = None) -> int:
        """Return the users per round of a run. The smoke scale takes no more than a small corpus has.

        Args:
            run: The run.
            population: The declared population of the corpus; None if it is not known yet.
        """
        if self.users_divided_by == 1:
            return run.users
        least, most = self.users_from_to
        return max(1, min(max(run.users // self.users_divided_by, least), most, population or most))

    def updates(self, run: PaperRun, rounds: int) -> int:
        """Return the user updates of some rounds of a run: the unit in which time is estimated.

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


def scale_named(name: str) -> Scale:
    """Look up a scale by its name; raises `InvalidValue` if there is none."""
    if name not in SCALES:
        raise InvalidValue(f"Unknown scale '{name}'.{nearest(name, SCALES)}")
    return SCALES[name]
