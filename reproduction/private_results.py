"""Apply the registered rules to the result files of `private_run.py` and return a verdict for each rule.

The inputs are the folders reviews_81, reviews_1600_200k, blogs_1600 and blogs_64 of reproduction/results. The verdicts follow
`rules.toml`: a rule whose runs are missing or too short has the outcome "cannot tell". `private_report.py` shows the
verdicts.

    verdicts()["private-run"]

A rule compares a difference of accuracies with a threshold. The interval of the difference combines the bootstrap over
users with the variation between repetitions. If there are fewer repetitions than the rule requires, the registered
single-seed margin is added to the interval.
"""

import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from reproduction.bootstrap import half_width, interval, load, resampled_accuracy
from reproduction.printed import TABLE_1, TABLE_2, by_accountant, moments
from reproduction.private_run import CANDIDATES, FAR, WORDS_OF, read_metrics, smoothed
from reproduction.recipes import TRADES
from reproduction.render_rules import load as load_rules
from unheard.errors import LedgerError, RunFolderError
from unheard.privacy.accountants import epsilon
from unheard.privacy.events import Event, PoissonGaussian
from unheard.privacy.ledger import Ledger
from unheard.privacy.run_ledger import check_ledger, saved_positions
from unheard.privacy.saved_statement import EPSILON_SLACK
from unheard.run_folder import RunFolder

HERE = Path(__file__).resolve().parent
REVIEWS, BLOGS = HERE / "results" / "reviews_81", HERE / "results" / "blogs_64"
"""Results of the private runs on short reviews, and of the runs that chose S."""
LONG = HERE / "results" / "reviews_1600_200k"
"""Results on longer texts, up to 1,600 tokens per user."""
LONG_BLOGS = HERE / "results" / "blogs_1600"
"""Results on the corpus `blogs` of the rules, 1,600 tokens per user."""
RULES = {rule["id"]: rule for rule in load_rules()["rule"]}
"""The registered rules by name."""
TERMS = load_rules()["terms"]
"""The registered margins."""
SEEDED = {
    "baseline, C = 100": "baseline-seed",
    "S = 15, sigma = 0.003, C = 100": "S15-sigma0.003-seed",
    "S = 10, sigma = 0.006, C = 100": "S10-sigma0.006-seed",
    "S = 15, sigma = 0.012, C = 100": "S15-sigma0.012-seed",
    "S = 8, sigma = 0.0016, C = 100 (estimate)": "estimate-seed",
}
"""Runs with several seeds: the prefix of their folders by the label in tables."""


LEARNED = 5.0
"""Smallest accuracy in percent of a run that others are compared with, from the registered terms."""
PAPER_COSTS = {"S10-sigma0.006-seed": 0.83, "S15-sigma0.012-seed": 1.54}
"""Largest cost in points of AccuracyTop1 that rule table-2-cost allows, by run."""
NOISED = ("S15-sigma0.003-seed", *PAPER_COSTS)
"""The runs of Table 2 with noise, in increasing order of sigma."""


@dataclass(frozen=True)
class RuleVerdict:
    """The verdict of a registered rule.

    Attributes:
        outcome: `held`, `did not hold` or `cannot tell`; for the rule private-S, the value that it chose.
        reason: The measured numbers, or why the rule cannot be applied.
    """

    outcome: str
    reason: str


# ------------------------------------------------------------------------------------------------------------------- reading


def folders_of(name: str, root: Path = REVIEWS) -> list[Path]:
    """Return the folders of a run and its repetitions, or of its seeds if the name ends in `-seed`.

    Args:
        name: The name of a run in `rules.toml`.
        root: The folder of the results of a corpus.
    """
    if name.endswith("-seed"):
        return sorted(path for path in root.glob(f"{name}[0-9]") if (path / "metrics.jsonl").exists())
    return sorted(path for path in root.glob(f"{name}*") if (path / "metrics.jsonl").exists() and path.is_dir())


def complete(name: str, at: int, root: Path) -> list[Path]:
    """Return the folders of the repetitions that were evaluated at a round and whose last model was measured.

    Rules use only these repetitions. A repetition that is still in progress, or whose model was lost, does not count.

    Args:
        name: The name of a run in `rules.toml`.
        at: The round.
        root: The folder of the results of a corpus.
    """
    return [path for path in folders_of(name, root) if accuracy([path], at) and (path / "per_user.npz").exists()]


def charged_ledger(folder: Path) -> Ledger:
    """Return the ledger of a run, after checking that nothing of it was changed or is missing.

    Raises:
        LedgerError: The ledger is damaged, or lacks a charge that another file of the folder shows: the model, a
            checkpoint or an evaluation.
    """
    files = RunFolder(folder)
    files.check_files()
    ledger = Ledger.read(files.ledger)
    check_ledger(ledger, saved_positions(files))
    rounds = max((row["round"] for row in read_metrics(folder)), default=0)
    is_whole = set(range(rounds)) <= {entry.round for entry in ledger.entries}
    # A shortened ledger would make the published epsilon too small.
    if not is_whole:
        raise LedgerError(
            f"{ledger.path} lacks charges of this run: it was shortened or replaced. Put the right one back."
        )
    return ledger


def checked_statement(folder: Path) -> dict[str, Any]:
    """Return the privacy statement of a run, after comparing its delta and its epsilons with the ledger.

    Raises:
        LedgerError: As for `charged_ledger`.
        RunFolderError: The statement cannot be read, or has other figures.
    """
    path, ledger = RunFolder(folder).statement, charged_ledger(folder)
    events, statement = list(Counter(ledger.events).items()), {}
    try:
        statement = json.loads(path.read_text(encoding="utf-8"))
        is_same = statement["delta"] == ledger.facts["delta"] and all(
            math.isclose(value, epsilon(events, statement["delta"], name), rel_tol=EPSILON_SLACK)
            for name, value in statement["epsilon"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_same = False
    if not is_same:
        raise RunFolderError(f"{path} is damaged, or its figures are not those of the ledger. Put the right one back.")
    return statement


def charges(folder: Path) -> list[tuple[Event, int]]:
    """Return the events in the ledger of a run and how often each was charged. A repeated round counts again.

    Raises:
        LedgerError: As for `charged_ledger`.
    """
    return list(Counter(charged_ledger(folder).events).items())


def spent(folders: Sequence[Path], delta: float, accountant: str) -> float:
    """Return the largest epsilon of some private runs, computed from the charges in their ledgers.

    Args:
        folders: The results of the runs, at least one.
        delta: The delta of the claim.
        accountant: `pld`, `rdp` or `moments`.
    """
    return max(epsilon(charges(folder), delta, accountant) for folder in folders)


def accuracy(folders: Sequence[Path], at: int, every: int = 1) -> list[float]:
    """Return the accuracy in percent of each run at a round, as the rules define it.

    Args:
        folders: The results of the runs. Runs without an evaluation at the round are left out.
        at: The round.
        every: Only evaluations at multiples of this number of rounds are read, so that runs that were evaluated every 20
            and every 100 rounds can be compared.
    """
    curves = [smoothed([row for row in read_metrics(folder) if row["round"] % every == 0]) for folder in folders]
    return [100 * curve[at] for curve in curves if at in curve]


def mean_accuracy(name: str, at: int, root: Path, every: int = 1) -> float:
    """Return the mean accuracy in percent of the `complete` repetitions of a run at a round.

    Args:
        name: The name of a run in `rules.toml`.
        at: The round.
        root: The folder of the results of a corpus.
        every: As for `accuracy`.
    """
    return float(np.mean(accuracy(complete(name, at, root), at, every)))


def sittings(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all sessions of a run, in order (`private_run.Sitting`)."""
    return [json.loads(line) for line in (folder / "sittings.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------------------ verdicts


@dataclass(frozen=True)
class Measured:
    """A measured difference with its 95 % interval.

    Attributes:
        value: The difference in points of AccuracyTop1.
        half: Half the width of the interval, in points.
        is_short: Whether there are fewer repetitions than the rule requires.
    """

    value: float
    half: float
    is_short: bool

    def is_between(self, least: float | None, most: float | None = None) -> bool | None:
        """Return whether the number is above `least` and below `most`; None if the interval contains a limit.

        Args:
            least: The lower limit; None for no limit.
            most: The upper limit; None for no limit.
        """
        reach = self.half + (TERMS["single_seed_margin"] if self.is_short else 0.0)
        beyond = [] if least is None else [self.value - least]
        beyond += [] if most is None else [most - self.value]
        if any(distance < -reach for distance in beyond):
            return False
        return True if all(distance > reach for distance in beyond) else None

    def __str__(self) -> str:
        short = " (fewer repetitions than required: preliminary)" if self.is_short else ""
        return (
            f"{self.value:+.2f} points, interval {self.value - self.half:+.2f} to {self.value + self.half:+.2f}{short}"
        )


def missing(rounds: dict[str, int], root: Path) -> str | None:
    """Return why a rule cannot be applied, or None if it can.

    A rule needs runs that reached the round at which it compares them, and whose last model was measured.

    Args:
        rounds: The round that each run must have reached, by the name of the run.
        root: The folder of the results of a corpus.
    """
    reached = {name: accuracy(folders_of(name, root), at) for name, at in rounds.items()}
    absent = [f"{name.removesuffix('-seed')} at round {at:,}" for name, at in rounds.items() if not reached[name]]
    models = [name for name, at in rounds.items() if reached[name] and not complete(name, at, root)]
    if absent:
        return f"Missing: {', '.join(absent)}."
    return f"No model was kept of {', '.join(models)}." if models else None


def combined(
    rule: str,
    weights: Mapping[str, float],
    at: int,
    root: Path,
    counted: tuple[str, str] = ("targets", "hits"),
    every: int = 1,
) -> Measured:
    """Return a weighted sum of the accuracies of some runs, in points, with its interval.

    With other `counted` names it is a weighted sum of other means per target, in their own unit.

    Args:
        rule: Name of the rule, which says how many repetitions are required.
        weights: The weight of each run, by its name.
        at: The round. Other means than accuracies are those of the last models.
        root: Folder of the results.
        counted: Names of the counts per user: targets, and what is counted over them.
        every: As for `accuracy`.
    """
    sides = {name: complete(name, at, root) for name in weights}
    counts = {name: [load(folder) for folder in side] for name, side in sides.items()}
    is_accuracy = counted[1] == "hits"
    scale = 100 if is_accuracy else 1
    by_run = {
        name: accuracy(side, at, every)
        if is_accuracy
        else [one[counted[1]].sum() / one[counted[0]].sum() for one in counts[name]]
        for name, side in sides.items()
    }
    resampled = sum(scale * weight * resampled_accuracy(counts[name], counted) for name, weight in weights.items())
    low, high = interval(np.asarray(resampled))
    half, fewest = (high - low) / 2, min(len(values) for values in by_run.values())
    if fewest > 1:
        errors = (weights[name] * np.std(v, ddof=1) / math.sqrt(len(v)) for name, v in by_run.items())
        half = math.hypot(half, 1.96 * math.hypot(*errors))
    value = float(sum(weight * np.mean(by_run[name]) for name, weight in weights.items()))
    return Measured(value, half, fewest < RULES[rule]["seeds"])


def difference(rule: str, first: str, second: str, at: Sequence[int], root: Path, *, change: bool = False) -> Measured:
    """Return the accuracy of the first run minus that of the second, in points, with its interval.

    Args:
        rule: Name of the rule, which says how many repetitions are required.
        first: Name of the first run.
        second: Name of the second run.
        at: Rounds in increasing order; the difference is measured at the last one.
        root: Folder of the results.
        change: Whether to subtract the difference at the first of the rounds, which gives the change between them.
    """
    if not change:
        return combined(rule, {first: 1, second: -1}, at[-1], root)
    sides = [complete(name, at[-1], root) for name in (first, second)]
    by_run = [np.array(accuracy(side, at[-1])) - np.array(accuracy(side, at[0])) for side in sides]
    half = 100 * (half_width(*sides) or 0.0) * math.sqrt(2)
    fewest = min(len(values) for values in by_run)
    if fewest > 1:
        half = math.hypot(half, 1.96 * math.hypot(*(np.std(v, ddof=1) / math.sqrt(len(v)) for v in by_run)))
    return Measured(float(by_run[0].mean() - by_run[1].mean()), half, fewest < RULES[rule]["seeds"])


def cost(name: str, baseline: str, at: int, root: Path) -> str | None:
    """Return the accuracy of a baseline minus that of a run in points, with its 95 % interval; None if it is unknown.

    Args:
        name: The name of a run.
        baseline: The name of its baseline.
        at: The round.
        root: The folder of the results of a corpus.
    """
    if missing({name: at, baseline: at}, root):
        return None
    apart = difference("table-2-cost", baseline, name, [at], root)
    return f"{apart.value:.2f} ({apart.value - apart.half:.2f} to {apart.value + apart.half:.2f})"


Part = tuple[bool | None, str]
"""Whether one condition of a rule holds (None if it is undecided), and the numbers in words."""


def joined(*parts: Part) -> RuleVerdict:
    """Combine the conditions of a rule into its verdict.

    The rule did not hold if a condition is false. Otherwise it is undecided if a condition is undecided.
    """
    answers = [is_so for is_so, _ in parts]
    outcome = "did not hold" if False in answers else "cannot tell" if None in answers else "held"
    return RuleVerdict(outcome, "; ".join(text for _, text in parts) + ".")


def compare(
    rule: str,
    first: str,
    second: str,
    root: Path,
    *,
    least: float | None = None,
    most: float | None = None,
    at: Sequence[int] | None = None,
    change: bool = False,
    words: str | None = None,
) -> Part:
    """Return whether the first run minus the second lies between two limits, and the numbers in words.

    Args:
        rule: The name of the rule.
        first: The name of a run.
        second: The name of the run that it is compared with.
        root: The folder of the results of a corpus.
        least: Lower limit of the difference, in points of AccuracyTop1; None for no limit.
        most: Upper limit of the difference; None for no limit.
        at: Rounds, as in `difference`; None for the registered rounds of the rule.
        change: Whether to use the change of the difference from the first to the last of the rounds.
        words: Text in front of the numbers; None for the names of the runs.
    """
    measured = difference(rule, first, second, at or RULES[rule]["read_at"], root, change=change)
    if words is None:
        words = f"{first.removesuffix('-seed')} against {second.removesuffix('-seed')}: "
    return measured.is_between(least, most), f"{words}{measured}"


def private_norm() -> RuleVerdict:
    """Apply rule private-S to the recorded evaluations: which S has the highest accuracy on blogs_64 at round 1,000."""
    values = {norm: accuracy([BLOGS / f"S{norm}"], 1000) for norm in CANDIDATES}
    best = max(values, key=lambda norm: (values[norm], -norm))
    listed = ", ".join(f"S = {norm}: {value[0]:.2f} %" for norm, value in values.items())
    where = "At the edge of the list." if best in (CANDIDATES[0], CANDIDATES[-1]) else "Inside the list."
    return RuleVerdict(f"chosen: S = {best}", f"{listed}. {where}")


def private_run(root: Path) -> RuleVerdict:
    """Apply rule private-run.

    The accuracy is compared with the baseline that has as many users per round, and epsilon with the paper's 4.634.
    """
    rule = RULES["private-run"]
    gap = compare("private-run", "private", "baseline-C5000-seed", root, least=-rule["threshold"])
    largest = spent(complete("private", rule["rounds"], root), 1e-9, "pld")
    return joined(gap, (largest <= 4.634, f"epsilon {largest:.3f} at delta = 1e-9"))


def mean_curve(name: str, root: Path) -> tuple[list[int], list[float]]:
    """Return the rounds at which all repetitions were evaluated, and their mean accuracy there, in percent.

    Only the repetitions with the largest last round are used.

    Args:
        name: The name of a run.
        root: The folder of the results of a corpus.
    """
    curves = [smoothed(read_metrics(folder)) for folder in folders_of(name, root)]
    curves = [curve for curve in curves if max(curve) == max(max(one) for one in curves)]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    return rounds, [100 * float(np.mean([curve[r] for curve in curves])) for r in rounds]


def private_rounds(root: Path) -> RuleVerdict:
    """Apply rule private-rounds: the private run reaches the baseline's accuracy a given number of rounds later."""
    first, last = RULES["private-rounds"]["read_at"]
    target = float(np.interp(first, *mean_curve("baseline-seed", root)))
    reached = float(np.interp(last, *mean_curve("private", root)))
    ends = difference("private-rounds", "private", "baseline-seed", [5000], root)
    measured = Measured(reached - target, ends.half, ends.is_short)
    return joined((measured.is_between(0.0), f"private at {last:,} against baseline at {first:,}: {measured}"))


def private_estimate(root: Path) -> RuleVerdict:
    """Apply rule private-estimate: training with 100 users per round predicts the accuracy of the private run."""
    rule, runs = "private-estimate", ("private", "estimate-seed")
    return joined(
        *(
            compare(rule, *runs, root, at=[at], least=-0.25, most=0.25, words=f"round {at:,}: ")
            for at in RULES[rule]["read_at"]
        )
    )


def public_start(root: Path) -> RuleVerdict:
    """Apply rule expect-public-start: a start from a public model saves a fifth of the private rounds."""
    rule = RULES["expect-public-start"]
    (at,) = rule["read_at"]
    target, (rounds, means) = mean_accuracy("private", at, root), mean_curve("public-start", root)
    first = next((r for r, mean in zip(rounds, means, strict=True) if mean >= target), None)
    if first is None:
        return RuleVerdict("did not hold", f"the public start does not reach {target:.2f} % in {at:,} rounds.")
    return joined((first / at <= rule["threshold"], f"{target:.2f} % after {first:,} of {at:,} rounds"))


def far(root: Path, rule: str, first: str, second: str, sign: int = 1) -> RuleVerdict:
    """Apply one of the rules expect-far-cost, expect-far-correlated and expect-far-public.

    Args:
        root: Folder of the results on reviews_81.
        rule: Name of the rule.
        first: Name of a run.
        second: Name of the run that it is compared with.
        sign: 1 if the first must be better by the threshold; -1 if it may be worse by the threshold.
    """
    return joined(compare(rule, first, second, root, least=sign * RULES[rule]["threshold"]))


def lora_results(root: Path) -> dict[float | str | None, list[dict[str, Any]]]:
    """Return the results of `benchmarks/llm_finetuning.py` on reviews_81 by epsilon.

    Args:
        root: Folder of the results on reviews_81.

    Returns:
        The lines of each epsilon; None is the run without noise, and "base" the model before fine-tuning.
    """
    file = root / "smollm2" / "results.jsonl"
    by_epsilon: dict[float | str | None, list[dict[str, Any]]] = {}
    for line in map(json.loads, file.read_text().splitlines() if file.exists() else []):
        by_epsilon.setdefault("base" if line["kind"] == "base" else line["epsilon"], []).append(line)
    return by_epsilon


def lora_charges(root: Path) -> dict[str, list[tuple[Event, int]]]:
    """Return the events of each private run of SmolLM2 and how often each was charged, by the name of the run.

    Args:
        root: Folder of the results on reviews_81.
    """
    events = {}
    for claim in FAR:
        for line in lora_results(root).get(claim, []):
            q = line["settings"]["users_per_round"] / line["population"]
            event = PoissonGaussian(sampling_prob=q, noise_multiplier=line["noise_multiplier"])
            events[f"SmolLM2-epsilon{claim}-seed{line['seed']}"] = [(event, line["charged"])]
    return events


def far_lora(root: Path) -> RuleVerdict:
    """Apply rule expect-far-lora: at no epsilon does noise cost a fine-tuned SmolLM2 much of its accuracy per token."""
    rule, lines = RULES["expect-far-lora"], lora_results(root)
    tops = {claim: [100 * line["metrics"]["accuracy_top1"] for line in some] for claim, some in lines.items()}
    if absent := [f"epsilon {claim}" for claim in FAR if len(tops.get(claim, [])) < 2]:
        return RuleVerdict("cannot tell", f"Missing: two repetitions of SmolLM2 at {', '.join(absent)}.")
    if len(free := tops.get(None, [])) < 2:
        return RuleVerdict("cannot tell", "Missing: two repetitions of SmolLM2 without noise.")
    parts = []
    for claim in FAR:
        errors = (np.std(values, ddof=1) / math.sqrt(len(values)) for values in (free, tops[claim]))
        is_short = min(len(free), len(tops[claim])) < rule["seeds"]
        lost = Measured(float(np.mean(free) - np.mean(tops[claim])), 1.96 * math.hypot(*errors), is_short)
        parts.append((lost.is_between(None, rule["threshold"]), f"the cost of epsilon {claim}: {lost}"))
    return joined(*parts)


def word_hits(root: Path) -> dict[str, list[int]]:
    """Return what `benchmarks/next_words.py` wrote: for each model, whether its first suggestion was right at each place.

    Args:
        root: Folder of the results on reviews_81.
    """
    file = root / "next_words.json"
    return json.loads(file.read_text())["hits"] if file.exists() else {}


def far_words(root: Path) -> RuleVerdict:
    """Apply rule expect-far-words: at every epsilon the keyboard suggests more right words with SmolLM2 than with the LSTM."""
    hits, parts = word_hits(root), []
    for claim in FAR:
        pair = [np.array(hits.get(f"{kind}, epsilon {claim}", [])) for kind in ("SmolLM2", "LSTM")]
        if not all(len(one) for one in pair):
            return RuleVerdict("cannot tell", f"Missing: next words of both models at epsilon {claim}.")
        drawn = [resampled_accuracy([{"targets": np.ones(len(one)), "hits": one}]) for one in pair]
        low, high = interval(np.asarray(drawn[0] - drawn[1]))
        gain = Measured(100 * float(pair[0].mean() - pair[1].mean()), 50 * (high - low), is_short=False)
        parts.append((gain.is_between(RULES["expect-far-words"]["threshold"]), f"epsilon {claim}: {gain}"))
    return joined(*parts)


def table_2_cost(root: Path, reading: str = "") -> RuleVerdict:
    """Apply rule table-2-cost: each sigma costs at most the registered limit, and more noise costs more.

    Args:
        root: Folder of the results.
        reading: Prefix of the runs of one reading of the word vectors, such as `server-`.
    """
    rule, baseline, noised = "table-2-cost", f"{reading}baseline-seed", [reading + name for name in NOISED]
    costs = [compare(rule, reading + name, baseline, root, least=-limit) for name, limit in PAPER_COSTS.items()]
    more = [compare(rule, b, a, root, at=[5000], most=0.0) for a, b in itertools.pairwise(noised)]
    return joined(*costs, *more)


def figure_1_later(root: Path, reading: str = "") -> RuleVerdict:
    """Apply rule figure-1-later: the cost of noise grows during training. For `reading`: `table_2_cost`."""
    words = {reading + name: f"cost of {name.removesuffix('-seed')} changes by " for name in NOISED}
    runs = ("figure-1-later", f"{reading}baseline-seed")
    return joined(*(compare(*runs, name, root, least=0.0, change=True, words=words[name]) for name in words))


def figure_7(root: Path) -> RuleVerdict:
    """Apply rule figure-7: 1,250 and 100 users per round have the same accuracy at equal sigma."""
    many, few = "S15-sigma0.012-C1250-seed", "S15-sigma0.012-seed"
    curves = [dict(zip(*mean_curve(name, root), strict=True)) for name in (many, few)]
    shared = [r for r in curves[0] if r in curves[1] and 500 <= r <= 3000]
    apart = float(np.mean([abs(curves[0][r] - curves[1][r]) for r in shared]))
    ends = difference("figure-7", many, few, [3000], root)
    mean = Measured(apart, ends.half, ends.is_short).is_between(None, 0.25)
    return joined(
        (mean, f"mean distance of the curves {apart:.2f} points"),
        compare("figure-7", many, few, root, least=-0.25, most=0.25),
    )


def figure_1_match(root: Path, reading: str = "") -> RuleVerdict:
    """Apply rule figure-1-match: sigma = 0.003 nearly matches the baseline. For `reading`: `table_2_cost`."""
    return joined(
        compare("figure-1-match", f"{reading}S15-sigma0.003-seed", f"{reading}baseline-seed", root, least=-0.25)
    )


def figure_4(root: Path) -> RuleVerdict:
    """Apply rule figure-4: after a change at round 4,885, S = 7.9 is better than each larger S."""
    parts = []
    for norm in (10, 12.6, 20):
        words, other = f"S = 7.9 against S = {norm:g}: ", f"then-S{norm:g}-seed"
        parts.append(compare("figure-4", "then-S7.9-seed", other, root, at=[6000], least=0.0, words=words))
    return joined(*parts)


def figure_8_early(root: Path) -> RuleVerdict:
    """Apply rule figure-8-early: S = 10 and S = 12.6 are nearly as good as the best S, and the worst S is worse."""
    rule, (at,) = "figure-8-early", RULES["figure-8-early"]["read_at"]
    names = {norm: f"trade-S{norm:g}-seed" for norm in TRADES}
    means = {norm: mean_accuracy(name, at, root) for norm, name in names.items()}
    best, worst = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    parts = []
    for norm in (10, 12.6):
        words = f"S = {norm:g} against the best, S = {best:g}: "
        is_near, text = compare(rule, names[norm], names[best], root, least=-0.25, words=words)
        parts.append((norm == best or is_near, text))
    better = max((10, 12.6), key=means.__getitem__)
    words = f"the worst, S = {worst:g}, against S = {better:g}: "
    is_apart, text = compare(rule, names[worst], names[better], root, most=-0.25, words=words)
    # By the rule, a sweep whose values lie close together is "cannot tell", so False becomes None here.
    return joined(*parts, (is_apart or None, text))


def figure_8_seeds(root: Path) -> RuleVerdict:
    """Apply rule figure-8-seeds: three seeds of S = 20 are close together."""
    rule = RULES["figure-8-seeds"]
    values = accuracy(complete("trade-S20-seed", rule["read_at"][0], root), rule["read_at"][0])
    if len(values) < rule["seeds"]:
        return RuleVerdict("cannot tell", f"{len(values)} of {rule['seeds']} seeds.")
    apart = max(values) - min(values)
    return joined((apart <= rule["threshold"], f"range of the seeds {apart:.2f} points"))


FREE_OF_NOISE = "flat-S20-seed"
"""The run of Figure 3 with which the runs with noise are compared."""
ESTIMATORS = tuple(
    f"{name}-seed"
    for name in (
        "fixed-size-true-average",
        "variable-true-average",
        "variable-fixed-denominator",
        "variable-clipped-denominator",
    )
)
"""The runs of Figure 5."""
CLIPPED = tuple(f"{kind}-S{norm}-seed" for kind in ("flat", "per-layer") for norm in (10, 15, 20))
"""The runs of Figure 2 that its rule compares with the run without a clip."""
FEDSGD_CLIPPED = tuple(f"fedsgd-flat-S{norm:g}-seed" for norm in (0.5, 1, 2, 5, 20))
"""The runs of FedSGD in Figure 9."""


def _has_learned(name: str, at: int, root: Path) -> Part:
    """Return the common case "cannot tell": the run that others are compared with has less than 5 % accuracy."""
    mean = mean_accuracy(name, at, root)
    return (True if mean >= LEARNED else None), f"{name.removesuffix('-seed')} has {mean:.2f} % at round {at:,}"


def figure_3_early(root: Path) -> RuleVerdict:
    """Apply rule figure-3-early: sigma = 0.024 costs almost nothing at round 100."""
    (at,) = RULES["figure-3-early"]["read_at"]
    loss = compare("figure-3-early", "flat-S20-sigma0.024-seed", FREE_OF_NOISE, root, least=-0.25)
    return joined(_has_learned(FREE_OF_NOISE, at, root), loss)


def figure_3_late(root: Path) -> RuleVerdict:
    """Apply rule figure-3-late: sigma = 0.012 costs little, 0.024 costs more, and more than it did at round 100."""
    rule, some, more = "figure-3-late", "flat-S20-sigma0.012-seed", "flat-S20-sigma0.024-seed"
    early, late = RULES[rule]["read_at"]
    return joined(
        _has_learned(FREE_OF_NOISE, early, root),
        compare(rule, some, FREE_OF_NOISE, root, at=[late], least=-RULES[rule]["threshold"]),
        compare(rule, more, some, root, at=[late], most=0.0),
        compare(rule, FREE_OF_NOISE, more, root, least=0.0, change=True, words="the loss of sigma = 0.024 changes by "),
    )


def figure_3_destroyed(root: Path) -> RuleVerdict:
    """Apply rule figure-3-destroyed: sigma = 0.2 leaves less than half of the accuracy.

    The interval is that of the accuracy with sigma = 0.2 minus half of the accuracy without noise.
    """
    rule, noised = "figure-3-destroyed", "flat-S20-sigma0.2-seed"
    (at,), share = RULES[rule]["read_at"], RULES[rule]["threshold"]
    beyond = combined(rule, {noised: 1, FREE_OF_NOISE: -share}, at, root)
    left, free = (mean_accuracy(name, at, root) for name in (noised, FREE_OF_NOISE))
    words = f"sigma = 0.2 has {left:.2f} %, {left / free:.3f} of {free:.2f} %"
    return joined(
        _has_learned(FREE_OF_NOISE, at, root),
        (beyond.is_between(None, 0.0), f"{words}; above half of it: {beyond}"),
    )


def figure_5(root: Path) -> RuleVerdict:
    """Apply rule figure-5: at rounds 500 and 3,000 the highest and the lowest of the four runs are close."""
    rule, parts = RULES["figure-5"], []
    for at in rule["read_at"]:
        means = {name: mean_accuracy(name, at, root) for name in ESTIMATORS}
        high, low = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
        words = f"round {at:,}, {high.removesuffix('-seed')} against {low.removesuffix('-seed')}: "
        parts.append(_has_learned(low, at, root))
        parts.append(compare("figure-5", high, low, root, at=[at], most=rule["threshold"], words=words))
    return joined(*parts)


def figure_2(root: Path) -> RuleVerdict:
    """Apply rule figure-2: at three rounds no clip with S from 10 to 20 costs much against no clip."""
    rule, free = RULES["figure-2"], "variable-true-average-seed"
    learned = [_has_learned(free, at, root) for at in rule["read_at"]]
    losses = []
    for at in rule["read_at"]:
        means = {name: mean_accuracy(name, at, root) for name in CLIPPED}
        worst = min(means, key=means.__getitem__)
        words = f"round {at:,}, the worst, {worst.removesuffix('-seed')}, against no clip: "
        losses.append(compare("figure-2", worst, free, root, at=[at], least=-rule["threshold"], words=words))
    return joined(*learned, *losses)


USERS_PER_ROUND = {10: "baseline-C10-seed", 100: "baseline-seed", 1000: "baseline-C1000-seed"}
"""The runs of Figure 6 that its rule compares, by users per round."""


def figure_6(root: Path) -> RuleVerdict:
    """Apply rule figure-6: ten times as many users per round gain less from 100 to 1,000 than from 10 to 100."""
    rule, (at,) = "figure-6", RULES["figure-6"]["read_at"]
    few, some, many = USERS_PER_ROUND.values()
    apart = combined(rule, {some: 2, few: -1, many: -1}, at, root)
    return joined(
        _has_learned(few, at, root),
        compare(rule, some, few, root, least=0.0, words="gain from 10 to 100: "),
        compare(rule, many, some, root, least=-0.25, words="gain from 100 to 1,000: "),
        (apart.is_between(0.0), f"first gain minus second: {apart}"),
    )


HEADS = {
    "baseline": "fixed-size-true-average-seed",
    "S = 15, σ = 0.003": "heads-S15-sigma0.003-seed",
    "S = 10, σ = 0.006": "heads-S10-sigma0.006-seed",
    "S = 15, σ = 0.012": "heads-S15-sigma0.012-seed",
    "S = 15, σ = 0.012, C = 1,250": "heads-S15-sigma0.012-C1250-seed",
    "S = 20, σ = 0.024": "heads-S20-sigma0.024-seed",
    "S = 20, σ = 0.048": "heads-S20-sigma0.048-seed",
}
"""The models of Table 3, all of round 3,000: the prefix of their folders by label."""


def mean_head_words(name: str, root: Path) -> float:
    """Return the mean number of head words among the ten predictions of a model, over targets and seeds.

    Args:
        name: A value of `HEADS`.
        root: The folder of the results of a corpus.
    """
    counts = [load(folder) for folder in complete(name, 3000, root)]
    return float(np.mean([one["head_words"].sum() / one["targets"].sum() for one in counts]))


def table_3_quality(root: Path) -> RuleVerdict:
    """Apply rule table-3-quality: over the seven models (means over seeds), better ones predict fewer head words.

    Here and in the other rule of Table 3 only evaluations every 100 rounds are read, as the rules define accuracy at round
    3,000, because one of the models was evaluated every 20 rounds for Figure 5.
    """
    (at,), limit = RULES["table-3-quality"]["read_at"], RULES["table-3-quality"]["threshold"]
    accuracies = [mean_accuracy(name, at, root, every=100) for name in HEADS.values()]
    heads = [mean_head_words(name, root) for name in HEADS.values()]
    correlation = float(np.corrcoef(rankdata(accuracies), rankdata(heads))[0, 1])  # of Spearman
    span = max(accuracies) - min(accuracies)
    is_so = None if span < 1 else correlation <= limit
    return joined((is_so, f"{len(heads)} models over {span:.2f} points: rank correlation {correlation:+.3f}"))


def table_3_noise(root: Path) -> RuleVerdict:
    """Apply rule table-3-noise: little noise, and more users per round, hardly change the number of head words.

    By the rule's last sentence a pair whose accuracies are more than 0.25 points apart decides nothing.
    """
    rule, (at,) = "table-3-noise", RULES["table-3-noise"]["read_at"]
    limit, parts = RULES[rule]["threshold"], []
    for first, second in (("S = 15, σ = 0.003", "baseline"), ("S = 15, σ = 0.012, C = 1,250", "S = 15, σ = 0.012")):
        pair = {HEADS[first]: 1, HEADS[second]: -1}
        heads = combined(rule, pair, at, root, ("targets", "head_words"))
        apart = combined(rule, pair, at, root, every=100)
        is_close = abs(apart.value) <= TERMS["nearly"]
        words = f"{heads.value:+.3f} head words, interval {heads.value - heads.half:+.3f} to {heads.value + heads.half:+.3f}"
        parts.append((
            heads.is_between(-limit, limit) if is_close else None,
            f"{first} against {second}: {words}; {apart.value:+.2f} points of accuracy",
        ))  # fmt: skip
    return joined(*parts)


def figure_9_clip(root: Path) -> RuleVerdict:
    """Apply rule figure-9-clip: S = 2 is nearly the best S for FedSGD, and much worse than S = 20 for FedAvg."""
    rule, (at,) = RULES["figure-9-clip"], RULES["figure-9-clip"]["read_at"]
    means = {name: mean_accuracy(name, at, root) for name in FEDSGD_CLIPPED}
    best, small = max(means, key=means.__getitem__), "fedsgd-flat-S2-seed"
    is_near, words = compare(rule["id"], small, best, root, least=-rule["threshold"])
    return joined(
        _has_learned(best, at, root),
        (best == small or is_near, words),
        compare(rule["id"], "flat-S2-seed", "flat-S20-seed", root, most=-rule["threshold"]),
    )


def figure_9_rounds(root: Path) -> RuleVerdict:
    """Apply rule figure-9-rounds: FedSGD needs more rounds than FedAvg for the accuracy that it has at the end.

    The rule reads both numbers of rounds from mean curves. It cannot tell if single seeds lie on both sides of the
    threshold, or if a seed is missing.
    """
    rule, (slow, fast) = RULES["figure-9-rounds"], ("fedsgd-flat-S20-seed", "flat-S20-seed")
    (at,), limit = rule["read_at"], rule["threshold"]
    first, second = complete(slow, at, root), complete(fast, at, root)
    ratio = _ratio_of_rounds(first, second, at)
    single = [_ratio_of_rounds([one], [other], at) for one, other in itertools.product(first, second)]
    is_enough = min(len(first), len(second)) >= rule["seeds"]
    is_clear = is_enough and len({one >= limit for one in (ratio, *single)}) == 1
    words = f"FedSGD needs {ratio:.1f} times as many rounds; single seeds {min(single):.1f} to {max(single):.1f}"
    seeds = "" if is_enough else f"; {len(first)} and {len(second)} of {rule['seeds']} seeds"
    return joined(_has_learned(slow, at, root), (ratio >= limit if is_clear else None, words + seeds))


def _ratio_of_rounds(slow: Sequence[Path], fast: Sequence[Path], at: int) -> float:
    """Return how many times as many rounds the slow runs need as the fast ones for one accuracy.

    It is the accuracy of the mean curve of the slow runs at a round. If the fast runs never reach it, the ratio is 0.

    Args:
        slow: Repetitions of the slow run.
        fast: Repetitions of the fast run.
        at: The round.
    """
    means = []
    for side in (slow, fast):
        curves = [smoothed(read_metrics(folder)) for folder in side]
        shared = sorted(set.intersection(*(set(curve) for curve in curves)))
        means.append({r: float(np.mean([curve[r] for curve in curves])) for r in shared})
    target = means[0][at]
    first, second = (next((r for r, value in mean.items() if value >= target), math.inf) for mean in means)
    return first / second


def figure_10(root: Path) -> RuleVerdict:
    """Apply rule figure-10: noise costs FedSGD a larger share of its accuracy than FedAvg, at both levels of noise."""
    (at,), parts = RULES["figure-10"]["read_at"], []
    for sigma in (0.006, 0.024):
        lost = _share_lost("figure-10", f"flat-S20-sigma{sigma}-seed", "flat-S20-seed", at, root)
        words = f"sigma = {sigma}: FedSGD loses {lost.value:+.1f} points more of each 100 of its accuracy"
        interval = f"interval {lost.value - lost.half:+.1f} to {lost.value + lost.half:+.1f}"
        parts.append((lost.is_between(RULES["figure-10"]["threshold"]), f"{words}, {interval}"))
    return joined(_has_learned("fedsgd-flat-S20-seed", at, root), *parts)


def _share_lost(rule: str, noised: str, free: str, at: int, root: Path) -> Measured:
    """Return the share of its accuracy that FedSGD loses minus the share that FedAvg loses, in percent.

    Args:
        rule: Name of the rule, which says how many repetitions are required.
        noised: Name of the run of FedAvg with noise; that of FedSGD has the prefix `fedsgd-`.
        free: Name of the run of FedAvg without noise.
        at: The round.
        root: Folder of the results.
    """
    left, drawn, errors, fewest = [], [], [], math.inf
    for prefix in ("", "fedsgd-"):
        some, whole = (complete(prefix + name, at, root) for name in (noised, free))
        means, spreads = [], []
        for values in (accuracy(some, at), accuracy(whole, at)):
            means.append(float(np.mean(values)))
            spreads.append(np.std(values, ddof=1) / math.sqrt(len(values)) / means[-1] if len(values) > 1 else 0.0)
            fewest = min(fewest, len(values))
        left.append(means[0] / means[1])
        errors += [left[-1] * spread for spread in spreads]  # relative errors of a quotient
        resampled = [
            resampled_accuracy([load(folder) for folder in side], ("targets", "hits")) for side in (some, whole)
        ]
        drawn.append(resampled[0] / resampled[1])
    low, high = interval(np.asarray(drawn[0] - drawn[1]))
    half = math.hypot((high - low) / 2, 1.96 * math.hypot(*errors))
    return Measured(100 * (left[0] - left[1]), 100 * half, fewest < RULES[rule]["seeds"])


NO_CLIP, SIZES = "variable-true-average-seed", tuple(WORDS_OF)
"""The run of Figure 11 without a clip, and the prefixes of the runs with larger dictionaries."""


def figure_11_gain(root: Path) -> RuleVerdict:
    """Apply rule figure-11-gain: larger dictionaries have the same accuracy as 10,000 words, or a modestly higher one.

    Here and in the other rules on dictionaries only every fifth evaluation of runs that have one every 20 rounds is read,
    because the runs with larger dictionaries have one every 100 rounds.
    """
    rule, (at,) = RULES["figure-11-gain"], RULES["figure-11-gain"]["read_at"]
    parts = []
    for size in SIZES:
        gain = combined(rule["id"], {f"{size}-{NO_CLIP}": 1, NO_CLIP: -1}, at, root, every=100)
        parts.append((gain.is_between(-TERMS["nearly"], rule["threshold"]), f"{size} words against 10k: {gain}"))
    return joined(_has_learned(NO_CLIP, at, root), *parts)


def figure_11_clip(root: Path) -> RuleVerdict:
    """Apply rule figure-11-clip: S = 10, 15 and 20 cost larger dictionaries hardly more than 10,000 words."""
    return _costs_of_dictionaries("figure-11-clip", NO_CLIP, [f"flat-S{norm}-seed" for norm in (10, 15, 20)], root)


def figure_12(root: Path) -> RuleVerdict:
    """Apply rule figure-12: noise at S = 20 costs larger dictionaries hardly more than 10,000 words."""
    noised = [f"flat-S20-sigma{sigma}-seed" for sigma in (0.003, 0.006, 0.012)]
    return _costs_of_dictionaries("figure-12", FREE_OF_NOISE, noised, root)


def _costs_of_dictionaries(rule: str, free: str, runs: Sequence[str], root: Path) -> RuleVerdict:
    """Return whether the largest additional cost of some runs with larger dictionaries is below the threshold.

    Args:
        rule: Name of the rule.
        free: Name of the run with 10,000 words that the cost of the others is measured against.
        runs: Names of runs with 10,000 words.
        root: Folder of the results.
    """
    (at,), pairs = RULES[rule]["read_at"], list(itertools.product(SIZES, runs))
    added = {
        (size, run): combined(rule, {f"{size}-{free}": 1, f"{size}-{run}": -1, free: -1, run: 1}, at, root, every=100)
        for size, run in pairs
    }
    size, run = max(pairs, key=lambda pair: added[pair].value)
    worst, words = added[size, run], f"the largest additional cost, of {run.removesuffix('-seed')} with {size} words"
    return joined(_has_learned(free, at, root), (worst.is_between(None, RULES[rule]["threshold"]), f"{words}: {worst}"))


def text_other_corpus(root: Path) -> RuleVerdict:
    """Apply rule text-other-corpus: training on another corpus costs at least 1 point more than sigma = 0.003 does.

    Both costs are against the same baseline, so their difference is that of the two runs.
    """
    rule, (at,) = RULES["text-other-corpus"], RULES["text-other-corpus"]["read_at"]
    noised, other = "growing-S15-sigma0.003-seed", "other-baseline-seed"
    words = "sigma = 0.003 against the other corpus: "
    return joined(
        _has_learned("growing-baseline-seed", at, root),
        compare(rule["id"], noised, other, root, least=rule["threshold"], words=words),
    )


def text_penalty(root: Path) -> RuleVerdict:
    """Apply rule text-penalty: neither penalty on the update gains accuracy."""
    rule, (at,), free = RULES["text-penalty"], RULES["text-penalty"]["read_at"], "growing-flat-S15-seed"
    best = max(PENALTIES, key=lambda name: mean_accuracy(name, at, root))
    return joined(_has_learned(free, at, root), compare(rule["id"], best, free, root, most=rule["threshold"]))


def text_tied(root: Path) -> RuleVerdict:
    """Apply rule text-tied: tied embeddings save 35 to 45 % of the parameters at a small decrease in accuracy."""
    rule, (at,) = RULES["text-tied"], RULES["text-tied"]["read_at"]
    names = ("growing-baseline-seed", "untied-baseline-seed")
    tied, untied = (
        json.loads((complete(name, at, root)[0] / "facts.json").read_text())["parameters"] for name in names
    )
    saved = 1 - tied / untied
    return joined(
        _has_learned(names[1], at, root),
        (0.35 <= saved <= 0.45, f"{100 * saved:.1f} % of the parameters saved"),
        compare(rule["id"], *names, root, least=-rule["threshold"]),
    )


def text_unit_norm(root: Path, reading: str = "growing-") -> RuleVerdict:
    """Apply rule text-unit-norm: vectors of norm 1 need fewer rounds than free ones for the same accuracy.

    Args:
        root: Folder of the results.
        reading: Prefix of the runs of one reading of the word vectors. The registered one is `growing-`.
    """
    rule, free = RULES["text-unit-norm"], "free-flat-S15-seed"
    (at,) = rule["read_at"]
    first, second = complete(free, at, root), complete(f"{reading}flat-S15-seed", at, root)
    ratio = _ratio_of_rounds(first, second, at)
    single = [_ratio_of_rounds([one], [other], at) for one, other in itertools.product(first, second)]
    is_enough = min(len(first), len(second)) >= rule["seeds"]
    is_clear = is_enough and len({one > 1 for one in single}) == 1 and not 1 <= ratio < rule["threshold"]
    words = f"free vectors need {ratio:.2f} times as many rounds; single seeds {min(single):.2f} to {max(single):.2f}"
    return joined(_has_learned(free, at, root), (ratio >= rule["threshold"] if is_clear else None, words))


def larger_norm(root: Path) -> RuleVerdict:
    """Apply rule expect-larger-S: at sigma = 0.003 the better of S = 20 and S = 30 costs at most 0.75 times as much as S = 15.

    The interval is that of the difference between 0.75 times the cost of S = 15 and the cost of the better one.
    """
    rule, (at,) = RULES["expect-larger-S"], RULES["expect-larger-S"]["read_at"]
    share, baseline, first = rule["threshold"], "growing-baseline-seed", "growing-S15-sigma0.003-seed"
    best = max(LARGER, key=lambda name: mean_accuracy(name, at, root))
    paid = difference(rule["id"], baseline, first, [at], root)
    left = combined(rule["id"], {best: 1, baseline: share - 1, first: -share}, at, root)
    words = f"{share:g} of that minus the cost of {best.removesuffix('-seed')}: {left}"
    has_cost = paid.is_between(0.0) or None  # the rule cannot tell if S = 15 may cost nothing
    return joined(
        _has_learned(baseline, at, root),
        (has_cost, f"S = 15 costs {paid}"),
        (left.is_between(0.0) if has_cost else None, words),
    )


def adaptive_clip(root: Path) -> RuleVerdict:
    """Apply rule expect-adaptive: the adaptive clip is nearly as good as the best fixed S."""
    rule, (at,) = RULES["expect-adaptive"], RULES["expect-adaptive"]["read_at"]
    best = max((f"trade-S{norm:g}-seed" for norm in TRADES), key=lambda name: mean_accuracy(name, at, root))
    gap = compare(rule["id"], "adaptive-z0.06-seed", best, root, least=-rule["threshold"])
    return joined(_has_learned(best, at, root), gap)


def other_models(root: Path) -> RuleVerdict:
    """Apply rule expect-other-models: sigma = 0.003 costs a GRU and a character model little."""
    rule, (at,), parts = RULES["expect-other-models"], RULES["expect-other-models"]["read_at"], []
    for kind in ("gru", "characters"):
        free = (f"{kind}-baseline-seed", f"{kind}-flat-S15-seed")
        best = max(free, key=lambda name: mean_accuracy(name, at, root))
        parts.append(_has_learned(best, at, root))
        parts.append(compare(rule["id"], f"{kind}-flat-S15-sigma0.003-seed", best, root, least=-rule["threshold"]))
    return joined(*parts)


LARGER = ("flat-S20-sigma0.003-seed", "flat-S30-sigma0.003-seed")
"""The runs of rule expect-larger-S with a larger S than 15."""
OTHER_MODELS = tuple(
    f"{kind}-{run}-seed" for kind in ("gru", "characters") for run in ("baseline", "flat-S15", "flat-S15-sigma0.003")
)
"""The runs of rule expect-other-models."""
PENALTIES = ("flat-S15-penalty0.001-seed", "flat-S15-penalty0.01-seed")
"""The runs with a penalty on the update."""
OF_READINGS = {
    "figure-1-match": figure_1_match,
    "figure-1-later": figure_1_later,
    "table-2-cost": table_2_cost,
    "text-unit-norm": text_unit_norm,
}
"""The rules whose runs are made on blogs in each reading of the word vectors, and the functions that apply them."""
JUDGES = {
    "private-run": (private_run, {"private": 5000, "baseline-C5000-seed": 5000}),
    "private-rounds": (private_rounds, {"private": 5000, "baseline-seed": 5000}),
    "private-estimate": (private_estimate, {"private": 5000, "estimate-seed": 5000}),
    "figure-1-match": (figure_1_match, {"S15-sigma0.003-seed": 5000, "baseline-seed": 5000}),
    "figure-1-later": (figure_1_later, {name: 5000 for name in SEEDED.values() if name != "estimate-seed"}),
    "table-2-cost": (table_2_cost, {name: 5000 for name in SEEDED.values() if name != "estimate-seed"}),
    "figure-7": (figure_7, {"S15-sigma0.012-C1250-seed": 3000, "S15-sigma0.012-seed": 3000}),
    "expect-public-start": (public_start, {"private": 5000, "public-start": 5000}),
    **{
        rule: (functools.partial(far, rule=rule, first=first, second=second, sign=sign), {first: 5000, second: 5000})
        for rule, first, second, sign in (
            ("expect-far-cost", "epsilon8-correlated", "baseline-C5000-seed", -1),
            ("expect-far-correlated", "epsilon8-correlated", "epsilon8-independent", 1),
            ("expect-far-public", "epsilon1-public-correlated", "epsilon1-correlated", 1),
        )
    },
    "expect-far-lora": (far_lora, {}),
    "expect-far-words": (far_words, {}),
}
"""The function that applies each rule on reviews_81, and the round that each run that it needs must have reached."""
LONG_JUDGES = {
    "figure-4": (figure_4, {f"then-S{norm:g}-seed": 6000 for norm in (7.9, 10, 12.6, 20)}),
    "figure-8-early": (figure_8_early, {f"trade-S{norm:g}-seed": 4885 for norm in TRADES}),
    "figure-8-seeds": (figure_8_seeds, {"trade-S20-seed": 4885}),
    "figure-3-early": (figure_3_early, dict.fromkeys((FREE_OF_NOISE, "flat-S20-sigma0.024-seed"), 100)),
    "figure-3-late": (
        figure_3_late,
        dict.fromkeys((FREE_OF_NOISE, "flat-S20-sigma0.012-seed", "flat-S20-sigma0.024-seed"), 3000),
    ),
    "figure-3-destroyed": (figure_3_destroyed, dict.fromkeys((FREE_OF_NOISE, "flat-S20-sigma0.2-seed"), 3000)),
    "figure-5": (figure_5, dict.fromkeys(ESTIMATORS, 3000)),
    "figure-2": (figure_2, dict.fromkeys((*CLIPPED, "variable-true-average-seed"), 3000)),
    "figure-6": (figure_6, dict.fromkeys(USERS_PER_ROUND.values(), 3000)),
    "table-3-quality": (table_3_quality, dict.fromkeys(HEADS.values(), 3000)),
    "table-3-noise": (table_3_noise, dict.fromkeys(HEADS.values(), 3000)),
    "figure-11-gain": (figure_11_gain, dict.fromkeys([f"{size}-{NO_CLIP}" for size in SIZES] + [NO_CLIP], 3000)),
    "figure-11-clip": (
        figure_11_clip,
        {f"{size}flat-S{norm}-seed": 3000 for size in ("20k-", "30k-", "") for norm in (10, 15, 20)}
        | {f"{size}{NO_CLIP}": 3000 for size in ("20k-", "30k-", "")},
    ),
    "figure-12": (
        figure_12,
        {
            f"{size}flat-S20{sigma}-seed": 3000
            for size in ("20k-", "30k-", "")
            for sigma in ("", "-sigma0.003", "-sigma0.006", "-sigma0.012")
        },
    ),
}
"""The same for the rules on reviews_1600_200k."""
BLOGS_JUDGES = {
    "figure-9-clip": (figure_9_clip, dict.fromkeys((*FEDSGD_CLIPPED, "flat-S2-seed", "flat-S20-seed"), 3000)),
    "figure-9-rounds": (figure_9_rounds, dict.fromkeys(("fedsgd-flat-S20-seed", "flat-S20-seed"), 3000)),
    "figure-10": (
        figure_10,
        {f"{kind}flat-S20{s}-seed": 3000 for kind in ("", "fedsgd-") for s in ("", "-sigma0.006", "-sigma0.024")},
    ),
    "text-other-corpus": (
        text_other_corpus,
        dict.fromkeys(("other-baseline-seed", "growing-baseline-seed", "growing-S15-sigma0.003-seed"), 3000),
    ),
    "text-penalty": (text_penalty, dict.fromkeys((*PENALTIES, "growing-flat-S15-seed"), 3000)),
    "text-tied": (text_tied, dict.fromkeys(("untied-baseline-seed", "growing-baseline-seed"), 3000)),
    "text-unit-norm": (text_unit_norm, dict.fromkeys(("free-flat-S15-seed", "growing-flat-S15-seed"), 3000)),
    "expect-larger-S": (
        larger_norm,
        dict.fromkeys(("growing-baseline-seed", "growing-S15-sigma0.003-seed", *LARGER), 3000),
    ),
    "expect-adaptive": (
        adaptive_clip,
        dict.fromkeys(("adaptive-z0.06-seed", *(f"trade-S{norm:g}-seed" for norm in TRADES)), 3000),
    ),
    "expect-other-models": (other_models, dict.fromkeys(OTHER_MODELS, 3000)),
}
"""The same for the rules on blogs."""


def verdicts(root: Path = REVIEWS, long: Path = LONG, blogs: Path = LONG_BLOGS) -> dict[str, RuleVerdict]:
    """Return the verdict of every rule that is tested by the runs of `private_run.py` or without training.

    Args:
        root: Results on reviews_81.
        long: Results on reviews_1600_200k. Rules without any run there are left out.
        blogs: Results on blogs_1600, in the same way.
    """
    outcomes = {"private-S": private_norm(), "expect-hours": _hours()}
    judged = [(rule, *one, root) for rule, one in JUDGES.items()]
    for place, judges in ((long, LONG_JUDGES), (blogs, BLOGS_JUDGES)):
        judged += [(rule, *one, place) for rule, one in judges.items() if any(folders_of(n, place) for n in one[1])]
    for rule, judge, needed, place in judged:
        why = missing(needed, place)
        outcomes[rule] = RuleVerdict("cannot tell", why) if why else judge(place)
    return outcomes | accounting()


def verdict_of_reading(rule: str, reading: str, root: Path) -> RuleVerdict:
    """Return the verdict of one of `OF_READINGS` by the runs of one reading of the word vectors on blogs.

    Args:
        rule: Name of the rule.
        reading: Prefix of the runs of the reading.
        root: Folder of the results.
    """
    if rule == "text-unit-norm":
        needed = {"free-flat-S15-seed": 3000, f"{reading}flat-S15-seed": 3000}
    else:
        needed = {reading + name: at for name, at in JUDGES[rule][1].items()}
    why = missing(needed, root)
    return RuleVerdict("cannot tell", why) if why else OF_READINGS[rule](root, reading)


def accounting() -> dict[str, RuleVerdict]:
    """Return the verdicts of the rules that need no training: the epsilons of Tables 1 and 2 by three accountants."""
    cells = [cell for line in TABLE_1 for cell in line]
    equal = sum(cell.agrees(moments(cell)) for cell in cells)
    above = sum(by_accountant(cell, "rdp") > float(cell.digits) for cell in cells)
    rows = [row.epsilon for row in TABLE_2 if row.epsilon is not None]
    same = sum(row.agrees(moments(row)) for row in rows)
    larger = sum(by_accountant(row, "pld") > float(row.digits) for row in rows)
    once, often = (by_accountant(TABLE_1[-1][column], "rdp") for column in (0, -1))
    ratio = often / once
    words = f"RDP {once:.3f} after 1 round, {often:.3f} after 10^6: ratio {ratio:.2f}"
    return {
        "table-1-digits": joined((equal == 42 and not above, f"{equal} of 42 cells agree; RDP is above in {above}")),
        "table-1-rounds": joined((ratio <= 1.25, words)),
        "table-2-epsilon": joined((same == 6 and not larger, f"{same} of 6 rows agree; PLD is above in {larger}")),
    }


def _hours() -> RuleVerdict:
    """Apply rule expect-hours: all sessions of the private run together take at most 15 minutes."""
    seen = sittings(REVIEWS / "private")
    rounds, seconds, done = RULES["expect-hours"]["rounds"], sum(one["seconds"] for one in seen), seen[-1]["to_round"]
    if done < rounds:
        whole = rounds * seconds / done / 60
        return RuleVerdict("cannot tell", f"{done:,} of {rounds:,} rounds; at this pace all take {whole:.1f} minutes.")
    return joined((seconds <= 900, f"{seconds / 60:.1f} minutes"))
