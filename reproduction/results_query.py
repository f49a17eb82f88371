"""What the runs on one corpus found, asked by the name of a run: accuracy at a round, curves, how far apart seeds lie.

In: a folder of results. Out: Found. Accuracy is AccuracyTop1 as a fraction, smoothed as the paper's figures are; what was not run,
or did not get so far, is None and never a number.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from reproduction import results
from reproduction.curves import curve, last_quarter
from reproduction.results import RunResult
from unheard.curves import Points, mean_and_error
from unheard.errors import InvalidValue

POINT = 0.01
"""One point of accuracy: a percent of all words."""
SEED = re.compile(r"-seed\d+$")


@dataclass(frozen=True)
class Found:
    """The results on one corpus."""

    corpus: str = ""
    """The name that the corpus goes by in print; empty where nothing was run."""
    runs: dict[str, RunResult] = field(default_factory=dict)
    folder: str = ""
    """The name of the folder that they were read from."""

    @property
    def title(self) -> str:
        """The corpus, and where other seeds, other settings or tiny runs have a folder of their own, what that adds to it."""
        added = self.changed or self.folder
        return self.corpus if self.folder in ("", self.corpus) else f"{self.corpus} ({added})"

    @property
    def changed(self) -> str:
        """What was changed in all of the paper's runs, by the folder: `seeds+10`, `smoke`, `model.keep_norm=true`; or nothing."""
        is_other = self.corpus and self.folder.startswith(f"{self.corpus}-")
        return self.folder.removeprefix(f"{self.corpus}-") if is_other else ""

    def __contains__(self, name: str) -> bool:
        return name in self.runs

    def curve(self, name: str, measure: str = "accuracy_top1") -> Points:
        """Smoothed by round; empty where there is nothing."""
        return curve(self.runs[name], measure) if name in self.runs else ()

    def rounds(self, *names: str) -> int | None:
        """How far all of them got; None where one of them has no evaluation at all."""
        ends = [self.runs[name].rounds if self.curve(name) else None for name in names if name in self.runs]
        known = [end for end in ends if end is not None]
        return min(known) if names and len(known) == len(names) else None

    def accuracy(self, name: str, at: int | None = None) -> float | None:
        """After so many rounds, or at the end; None if the run did not get there."""
        points = self.curve(name)
        if not points or (at is not None and self.runs[name].rounds < at):
            return None
        reached = [value for round_, value in points if at is None or round_ <= at]
        return reached[-1] if reached else None

    def targets(self, name: str) -> int | None:
        """How many held-out words it was measured on, as its head words were counted; None where they were not."""
        counts = next(iter(self.runs[name].head_words.values()), []) if name in self.runs else []
        return sum(counts) or None

    def seeds(self, name: str) -> list[str]:
        """The run and its repetitions with other seeds, those that are there."""
        return sorted(one for one in self.runs if SEED.sub("", one) == name)

    def mean(self, name: str, at: int | None = None) -> float | None:
        """Accuracy over all seeds that got so far."""
        values = [value for one in self.seeds(name) if (value := self.accuracy(one, at)) is not None]
        return sum(values) / len(values) if values else None

    def apart(self, first: str, second: str, at: int | None) -> float | None:
        """First less second after so many rounds, each the mean of its seeds; None where one of them did not get there."""
        mine, its = self.mean(first, at), self.mean(second, at)
        return None if at is None or mine is None or its is None else mine - its

    def ahead(self, first: str, second: str, at: int) -> tuple[float, float] | None:
        """First less second over the last quarter of so many rounds, and how far that may be off: two standard errors. For runs
        that swing more than five evaluations smooth. Evaluation by evaluation: where both drew the same users, most of their
        swings are the same, and no part of how far apart they are. None where fewer than two evaluations meet."""
        others = dict(last_quarter(self.runs[second], at))
        both = [value - others[r] for r, value in last_quarter(self.runs[first], at) if r in others]
        if len(both) < 2:
            return None
        less, error = mean_and_error(both)
        return less, 2 * error

    def reach(self, name: str, target: float) -> int | None:
        """The first evaluated round at which the smoothed accuracy was at least the target."""
        return next((int(round_) for round_, value in self.curve(name) if value >= target), None)

    def distances(self, first: str, second: str, after: int = 0) -> list[tuple[int, float]]:
        """First less second at every round where both were evaluated, from a round on."""
        others = dict(self.curve(second))
        return [(int(r), value - others[r]) for r, value in self.curve(first) if r in others and r >= after]

    def seed_distance(self, at: int | None = None) -> float | None:
        """The largest distance between two seeds of any run, at a round or where the seeds of that run last meet."""
        found = []
        for name in {SEED.sub("", one) for one in self.runs}:
            seeds = self.seeds(name)
            meet = self.rounds(*seeds)
            if len(seeds) > 1 and meet is not None:
                values = [self.accuracy(one, min(meet, at or meet)) for one in seeds]
                known = [value for value in values if value is not None]
                found += [max(known) - min(known)] if len(known) > 1 else []
        return max(found, default=None)


def read(folder: Path) -> Found:
    """The results of one corpus, from its own folder."""
    runs = results.read(folder)
    names = [run.corpus for run in runs.values()]
    # The dictionaries and the other corpus have names of their own; most runs are on the corpus itself.
    return Found(max(names, key=names.count) if names else folder.name, runs, folder.name)


def corpora(folder: Path) -> list[Found]:
    """Every set of results under a folder, or the folder's own one; one with no runs where there are none. Most rounds first, but
    the paper with something changed (`blogs-model.keep_norm=true`) after the paper as it stands, and tiny versions of it last."""
    if (folder / results.FILE).exists():
        return [read(folder)]
    if folder.exists() and not folder.is_dir():
        raise InvalidValue(f"{folder} is a file. Give the folder that holds {results.FILE}, or the one above it.")
    found = [read(path) for path in _folders(folder) if (path / results.FILE).exists()]

    def rank(one: Found) -> tuple[bool, bool, int]:
        return one.changed.startswith("smoke"), bool(one.changed), -sum(run.rounds for run in one.runs.values())

    return sorted(found, key=rank) or [Found()]


def _folders(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ()
