"""Store the results of runs, one line of JSON per run, and query the results of one corpus.

`results/<corpus>/runs.jsonl` holds everything that the tables and figures are computed from. `append` writes lines,
`read_runs` reads one file, `read_results` returns its content as a `ResultSet`, and `result_sets` finds all sets under
a folder. If a file has several lines for one run, the line with the most rounds counts.

    results = read_results(Path("reproduction/results/blogs"))
    results.accuracy("baseline", 1000)              # smoothed AccuracyTop1 after 1,000 rounds, or None
    results.difference("flat-S15", "baseline", 1000)

Inputs are the `RunResult` values that `measures.record` computes from run folders. Outputs are numbers and curves for
the exhibits. Accuracy is AccuracyTop1 as a fraction, smoothed over five evaluations like the figures of the paper
(Section 3). A value that was not measured is None. The files hold aggregate numbers only, and nothing about a single
user, a cohort or a text. This module does not import torch.
"""

import json
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.errors import InvalidValue, RunFolderError
from unheard.formatting import Points, smoothed

FILE = "runs.jsonl"
"""Name of the file that holds the results of one corpus."""
WAIT_SECONDS = 60.0
"""How long `append` waits for another process that holds the lock."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of one run, up to its last completed round.

    A line of `runs.jsonl` has these fields. Fields that this version does not know are ignored when a file is read.
    """

    name: str
    corpus: str
    """Display name of the corpus, such as `blogs`."""
    seed: int
    rounds: int
    """Number of completed rounds."""
    planned: int
    """Number of rounds that the recipe asks for."""
    settings: dict[str, Any]
    """The run file as tables, without paths and engine (`base_config.settings_of`)."""
    evaluations: list[dict[str, Any]]
    """One row per evaluation with round, accuracy_top1, accuracy_top3, accuracy_top5, loss and perplexity. A value that
    is not finite is None."""
    head_words: dict[str, list[int]] = field(default_factory=dict)
    """For n = 10, 50, 100: the number of targets for which 0, 1, ..., 10 of the ten predictions are among the n most
    frequent words (Table 3)."""
    accuracy_elsewhere: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Metrics of the last model on held-out users of another corpus, by the role of that corpus (`main`)."""
    parameters: int
    """Number of parameters of the model."""
    epsilon: dict[str, float | None]
    """Epsilon of this run for its own population, by accountant, and `delta`. None means infinite."""
    population: int
    store: str = ""
    """Name of the store in ledgers: a digest of how it was prepared. Empty in lines of early versions."""
    seconds: float
    """Wall time of the rounds, including evaluation. Runs that trained side by side share the time in proportion to
    their user updates. The first round of a group, which compiles kernels, and the rounds of a killed process count as
    if they had the throughput of the other rounds."""
    users_per_second: float
    """User updates per second of the whole group that the run trained with in its last session; 0 if unknown."""
    device: str
    date: str
    commit: str


def append(folder: Path, results: Iterable[RunResult]) -> None:
    """Append one line per result to `folder/runs.jsonl`.

    A lock makes concurrent processes wait for each other. An incomplete last line, which a killed process leaves, is
    removed first.

    Args:
        folder: Folder of the results of one corpus. It is created if it does not exist.
        results: The results to append.

    Raises:
        RunFolderError: The file cannot be written.
    """
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with storage.locked(folder / f".{FILE}.lock", wait=WAIT_SECONDS):
            size, whole = path.stat().st_size if path.exists() else 0, len(_complete_lines(path))
            if whole < size:  # a killed process left the last line incomplete
                storage.truncate(path, whole, expected_size=size)
            for result in results:
                storage.append_line(path, json.dumps(asdict(result), allow_nan=False).encode())
    except OSError as error:
        raise RunFolderError(
            f"Cannot write {path}: {error.strerror}. The run folders are kept: free some space, or name another folder "
            "with --results."
        ) from None


def read_runs(folder: Path) -> dict[str, RunResult]:
    """Read `folder/runs.jsonl`.

    Returns:
        The result of each run by its name. If a run has several lines, the line with the most rounds counts, and among
        lines with equal rounds the last. Empty if there is no file.

    Raises:
        InvalidValue: A line is not a result. The message names the line.
    """
    path, known = folder / FILE, {f.name for f in fields(RunResult)}
    by_name: dict[str, RunResult] = {}
    for number, line in enumerate(_complete_lines(path).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            result = RunResult(**{key: value for key, value in json.loads(line).items() if key in known})
            rounds = int(result.rounds)
        except (ValueError, TypeError, AttributeError):
            raise InvalidValue(
                f"{path}, line {number}, is not a result. Remove the line; `python -m reproduction run` makes it again."
            ) from None
        before = by_name.get(result.name)
        if before is None or rounds >= before.rounds:
            by_name[result.name] = result
    return by_name


def _complete_lines(path: Path) -> bytes:
    """Return the content of the file without an incomplete last line, which a killed process leaves."""
    if not path.exists():
        return b""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    try:
        json.loads(content[end:] or b"0")
    except ValueError:
        return content[:end]
    return content


def _evaluations(result: RunResult) -> Points:
    """Return round and AccuracyTop1, not smoothed, of the regular evaluations of a run and of its last evaluation.

    A run that was interrupted has an additional evaluation where the session ended. It is left out, because otherwise
    smoothing over five evaluations would cover fewer rounds than in an uninterrupted run.
    """
    known = {row["round"]: row["accuracy_top1"] for row in result.evaluations if row.get("accuracy_top1") is not None}
    every = result.settings.get("evaluation", {}).get("every", 1)
    return tuple((r, known[r]) for r in sorted(known) if r % every == 0 or r == max(known))


POINT = 0.01
"""One percentage point of accuracy."""
UNCERTAIN = 0.2 * POINT
"""Two single runs count as different only if their accuracies differ by more than this, and by more than two seeds of
one run do."""
SEED_SUFFIX = re.compile(r"-seed\d+$")
"""Pattern of the end of the name of a repetition with another seed, such as `baseline-seed2`."""


@dataclass(frozen=True)
class ResultSet:
    """The results of all runs on one corpus, with the queries that exhibits use.

    Queries take the names of runs (`RECIPES` lists them). Most return None, or an empty curve, if a run is missing or
    stopped too early; `value` returns 0.
    """

    corpus: str = ""
    """Display name of the corpus; empty if nothing was run."""
    runs: dict[str, RunResult] = field(default_factory=dict)
    folder: str = ""
    """Name of the folder that the results were read from."""
    _curves: dict[str, Points] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def title(self) -> str:
        """The corpus and, in parentheses, the change that all runs share, such as `blogs (seeds+10)`."""
        added = self.changed or self.folder
        return self.corpus if self.folder in ("", self.corpus) else f"{self.corpus} ({added})"

    @property
    def changed(self) -> str:
        """The change that all runs of this set share, as the name of the folder states it.

        Examples are `seeds+10`, `smoke` and `model.keep_norm=true`. It is empty for the settings of the paper.
        """
        is_other = self.corpus and self.folder.startswith(f"{self.corpus}-")
        return self.folder.removeprefix(f"{self.corpus}-") if is_other else ""

    def __contains__(self, name: str) -> bool:
        """Whether there is a result of this run."""
        return name in self.runs

    def curve(self, name: str) -> Points:
        """Return the smoothed AccuracyTop1 by round; empty if there is no result."""
        if name not in self.runs:
            return ()
        if name not in self._curves:  # cached, because exhibits query the same curve hundreds of times
            rows = _evaluations(self.runs[name])
            values = smoothed([value for _, value in rows])
            self._curves[name] = tuple((round_, value) for (round_, _), value in zip(rows, values, strict=True))
        return self._curves[name]

    def rounds(self, *names: str) -> int | None:
        """Return the number of rounds that all of these runs completed; None if one is missing or not evaluated."""
        ends = [self.runs[name].rounds for name in names if self.curve(name)]
        return min(ends) if names and len(ends) == len(names) else None

    def accuracy(self, name: str, at: int | None = None) -> float | None:
        """Return the smoothed AccuracyTop1 of one run.

        Args:
            name: Name of the run.
            at: Number of rounds; None for the end of the run.

        Returns:
            The accuracy at the last evaluation up to that round; None if the run stopped before that round or has no
            result.
        """
        points = self.curve(name)
        if not points or (at is not None and self.runs[name].rounds < at):
            return None
        return next((value for round_, value in reversed(points) if at is None or round_ <= at), None)

    def value(self, name: str, at: int | None = None) -> float:
        """Return the smoothed AccuracyTop1 of one run, or 0 if it is not known.

        Args:
            name: Name of the run.
            at: Number of rounds; None for the end of the run.
        """
        return self.accuracy(name, at) or 0.0

    def targets(self, name: str) -> int | None:
        """Return the number of held-out words that the run was evaluated on; None if its head words were not counted.

        The number is the sum of the counts of head words.
        """
        counts = next(iter(self.runs[name].head_words.values()), []) if name in self.runs else []
        return sum(counts) or None

    def seeds(self, name: str) -> list[str]:
        """Return the names of the run and of its repetitions with other seeds that have results."""
        return sorted(run for run in self.runs if SEED_SUFFIX.sub("", run) == name)

    def mean(self, name: str, at: int | None = None) -> float | None:
        """Return the mean accuracy over the seeds that completed `at` rounds; None if there is none.

        Args:
            name: The name of the run, without the suffix of a seed.
            at: A number of rounds; None for the end of each seed.
        """
        values = [value for run in self.seeds(name) if (value := self.accuracy(run, at)) is not None]
        return sum(values) / len(values) if values else None

    def run_difference(self, first: str, second: str, at: int | None) -> float | None:
        """Return the accuracy of one run minus that of another: like `difference`, without an average over seeds.

        Args:
            first: The name of a run.
            second: The name of another run.
            at: The number of rounds after which both are compared; None gives None.
        """
        mine, other = self.accuracy(first, at), self.accuracy(second, at)
        return None if at is None or mine is None or other is None else mine - other

    def difference(self, first: str, second: str, at: int | None) -> float | None:
        """Return the accuracy of the first run minus that of the second, each averaged over its seeds.

        Args:
            first: The name of a run.
            second: The name of another run.
            at: The number of rounds after which both are compared; None gives None.

        Returns:
            The difference as a fraction, or None if one of them did not complete `at` rounds.
        """
        mine, its = self.mean(first, at), self.mean(second, at)
        return None if at is None or mine is None or its is None else mine - its

    def mean_lead(self, first: str, second: str, at: int) -> tuple[float, float] | None:
        """Return the mean difference (first minus second) over the last quarter of `at` rounds, and two standard errors.

        Use this for runs whose accuracy varies too much to be smoothed over five evaluations (FedSGD). The differences
        are computed evaluation by evaluation. If both runs drew the same cohorts, most of the variation cancels.

        Args:
            first: The name of a run.
            second: The name of another run.
            at: The number of rounds whose last quarter is compared.

        Returns:
            The mean difference and its uncertainty, or None if the runs share fewer than two evaluations.
        """
        mine, others = (dict(_evaluations(self.runs[name])) for name in (first, second))
        both = [mine[r] - others[r] for r in mine if r in others and 3 * at < 4 * r <= 4 * at]
        if len(both) < 2:
            return None
        return statistics.fmean(both), 2 * statistics.stdev(both) / math.sqrt(len(both))

    def first_round_at(self, name: str, target: float) -> int | None:
        """Return the first evaluated round at which the smoothed accuracy is at least `target`, or None.

        Args:
            name: The name of the run.
            target: An accuracy, as a fraction.
        """
        return next((int(round_) for round_, value in self.curve(name) if value >= target), None)

    def distances(self, first: str, second: str, after: int = 0) -> list[tuple[int, float]]:
        """Return round and difference (first minus second) at every round at which both runs were evaluated.

        Args:
            first: The name of a run.
            second: The name of another run.
            after: The first round to compare.
        """
        others = dict(self.curve(second))
        return [(int(r), value - others[r]) for r, value in self.curve(first) if r in others and r >= after]

    def seed_distance(self, at: int | None = None) -> float | None:
        """Return the largest distance between two seeds of any run.

        This estimates how much chance alone can change an accuracy.

        Args:
            at: The round at which seeds are compared; None for the last round that the seeds of a run share.

        Returns:
            The distance as a fraction, or None if no run has several seeds.
        """
        distances = []
        for seeds in map(self.seeds, {SEED_SUFFIX.sub("", run) for run in self.runs}):
            if len(seeds) > 1 and (meet := self.rounds(*seeds)) is not None:
                values = [self.accuracy(run, min(meet, at or meet)) for run in seeds]
                known = [value for value in values if value is not None]
                distances += [max(known) - min(known)] if len(known) > 1 else []
        return max(distances, default=None)

    def margin(self, at: int | None = None) -> float:
        """Return the difference that counts as real: `UNCERTAIN`, or the distance between seeds if that is larger.

        Args:
            at: The round at which seeds are compared (`seed_distance`).
        """
        return max(UNCERTAIN, self.seed_distance(at) or 0.0)


def read_results(folder: Path) -> ResultSet:
    """Read the results of one corpus from its folder.

    >>> from pathlib import Path
    >>> read_results(Path("no-such-folder")).runs
    {}
    """
    runs = read_runs(folder)
    names = [run.corpus for run in runs.values()]
    # Runs on larger dictionaries or on the other corpus have other names. The most frequent name is the main corpus.
    return ResultSet(max(names, key=names.count) if names else folder.name, runs, folder.name)


def result_sets(folder: Path) -> list[ResultSet]:
    """Find all sets of results under a folder.

    Args:
        folder: The folder of one corpus, or the folder above it.

    Returns:
        The sets with the settings of the paper, then sets with changed settings (`blogs-model.keep_norm=true`), then
        smoke tests; within each kind, those with the most rounds first. One empty set if there are no results.

    Raises:
        InvalidValue: `folder` is a file.
    """
    if (folder / FILE).exists():
        return [read_results(folder)]
    if folder.exists() and not folder.is_dir():
        raise InvalidValue(f"{folder} is a file. Give the folder that holds {FILE}, or the one above it.")
    subfolders = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ()
    sets = [read_results(path) for path in subfolders if (path / FILE).exists()]

    def rank(run: ResultSet) -> tuple[bool, bool, int]:
        """Return the sort key: settings of the paper, changed settings, smoke tests; within each, more rounds first."""
        return run.changed.startswith("smoke"), bool(run.changed), -sum(run.rounds for run in run.runs.values())

    return sorted(sets, key=rank) or [ResultSet()]
