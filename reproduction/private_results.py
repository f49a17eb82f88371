"""Verdicts on the runs of `private_run.py` by the registered rules, computed from the result files.

The inputs are reproduction/results/reviews_81 and reproduction/results/blogs_64; the outputs are verdicts by rule.
They follow `rules.toml`: a rule whose runs are missing or too short has the outcome "cannot tell". `private_report.py`
shows them.

    verdicts()["private-run"]

A difference is tested against a threshold with an interval that combines the bootstrap over users with the variation
between repetitions. With fewer repetitions than a rule requires, the registered single-seed margin is added.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reproduction.bootstrap import half_width
from reproduction.printed import TABLE_1, TABLE_2, by_accountant, moments
from reproduction.private_run import CANDIDATES, read_metrics, smoothed
from reproduction.recipes import TRADES
from reproduction.render_rules import load as load_rules
from unheard.privacy.accountants import epsilon
from unheard.privacy.events import Event, from_record

HERE = Path(__file__).resolve().parent
REVIEWS, BLOGS = HERE / "results" / "reviews_81", HERE / "results" / "blogs_64"
LONG = HERE / "results" / "reviews_1600_200k"
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
"""Prefix of the folders of the runs with several seeds, by label."""


PAPER_COSTS = {"S10-sigma0.006-seed": 0.83, "S15-sigma0.012-seed": 1.54}
"""The most points that a sigma may cost by rule table-2-cost."""
NOISED = ("S15-sigma0.003-seed", *PAPER_COSTS)
"""The runs of Table 2 with noise, the least first."""


@dataclass(frozen=True)
class RuleVerdict:
    """An outcome of `rules.toml` and the reason for it."""

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
    """The repetitions of a run that count at a round: they were evaluated there, and their last model was measured.

    One that is still in progress, or whose model was lost, is a missing repetition.
    """
    return [path for path in folders_of(name, root) if accuracy([path], at) and (path / "per_user.npz").exists()]


def charges(folder: Path) -> list[tuple[Event, int]]:
    """The events in the ledger of a run, and how often each was charged. A round that was done again counts again."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    records = Counter(json.dumps(line["event"]) for line in lines if "event" in line)  # thousands of lines, few events
    return [(from_record(json.loads(record)), number) for record, number in records.items()]


def spent(folders: Sequence[Path], delta: float, accountant: str) -> float:
    """The largest epsilon of some private runs, by what each was charged."""
    return max(epsilon(charges(folder), delta, accountant) for folder in folders)


def accuracy(folders: Sequence[Path], at: int) -> list[float]:
    """Return the accuracy in percent of each run at a round, as the rules define it.

    Args:
        folders: The results of the runs. Runs without an evaluation at the round are left out.
        at: The round.
    """
    curves = [smoothed(read_metrics(folder)) for folder in folders]
    return [100 * curve[at] for curve in curves if at in curve]


def sittings(folder: Path) -> list[dict[str, Any]]:
    """The records of all sessions of a run, in order."""
    return [json.loads(line) for line in (folder / "sittings.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------------------------------------ verdicts


@dataclass(frozen=True)
class Measured:
    """A number with its 95 % interval, and whether there are fewer repetitions than its rule requires."""

    value: float
    half: float
    is_short: bool

    def is_between(self, least: float | None, most: float | None = None) -> bool | None:
        """Return whether the number is above `least` and below `most`; None if the interval does not decide."""
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

    A rule needs runs that reached the round at which they are read, and whose last model was measured.

    Args:
        rounds: The round at which each run is read, by the name of the run.
        root: The folder of the results of a corpus.
    """
    reached = {name: accuracy(folders_of(name, root), at) for name, at in rounds.items()}
    absent = [f"{name.removesuffix('-seed')} at round {at:,}" for name, at in rounds.items() if not reached[name]]
    models = [name for name, at in rounds.items() if reached[name] and not complete(name, at, root)]
    if absent:
        return f"Missing: {', '.join(absent)}."
    return f"No model was kept of {', '.join(models)}." if models else None


def difference(rule: str, first: str, second: str, at: Sequence[int], root: Path, *, change: bool = False) -> Measured:
    """Accuracy of the first run minus the second, in points, with its interval.

    Args:
        rule: Name of the rule, which says how many repetitions are required.
        first: Name of the first run.
        second: Name of the second run.
        at: Rounds; the difference is read at the last one.
        root: Folder of the results.
        change: Whether to subtract the same difference at the first of the rounds.
    """
    sides = [complete(name, at[-1], root) for name in (first, second)]
    by_run = [np.array(accuracy(side, at[-1])) for side in sides]
    if change:
        by_run = [values - np.array(accuracy(side, at[0])) for values, side in zip(by_run, sides, strict=True)]
    half = 100 * (half_width(*sides) or 0.0) * (math.sqrt(2) if change else 1)
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
"""Whether a part of a rule holds (None if it is undecided), and the numbers in words."""


def joined(*parts: Part) -> RuleVerdict:
    """Combine the parts of a rule: it did not hold if one part is false, and is undecided if one part is."""
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
        least: The difference is above this, in points of AccuracyTop1; None for no limit.
        most: The difference is below this.
        at: Rounds; None for those of the rule. See `difference`.
        change: Whether the change of the difference between the rounds is meant.
        words: What the numbers are about; None for the names of the runs.
    """
    measured = difference(rule, first, second, at or RULES[rule]["read_at"], root, change=change)
    if words is None:
        words = f"{first.removesuffix('-seed')} against {second.removesuffix('-seed')}: "
    return measured.is_between(least, most), f"{words}{measured}"


def private_norm() -> RuleVerdict:
    """Rule private-S, computed again from the evaluations."""
    values = {norm: accuracy([BLOGS / f"S{norm}"], 1000) for norm in CANDIDATES}
    best = max(values, key=lambda norm: (values[norm], -norm))
    listed = ", ".join(f"S = {norm}: {value[0]:.2f} %" for norm, value in values.items())
    where = "At the edge of the list." if best in (CANDIDATES[0], CANDIDATES[-1]) else "Inside the list."
    return RuleVerdict(f"chosen: S = {best}", f"{listed}. {where}")


def private_run(root: Path) -> RuleVerdict:
    """Rule private-run: accuracy against the baseline with as many users, and epsilon at most that of the paper."""
    rule = RULES["private-run"]
    gap = compare("private-run", "private", "baseline-C5000-seed", root, least=-rule["threshold"])
    largest = spent(complete("private", rule["rounds"], root), 1e-9, "pld")
    return joined(gap, (largest <= 4.634, f"epsilon {largest:.3f} at delta = 1e-9"))


def mean_curve(name: str, root: Path) -> tuple[list[int], list[float]]:
    """Return the rounds at which the repetitions were evaluated, and their mean accuracy there, in percent.

    Repetitions that are behind the others are left out.

    Args:
        name: The name of a run.
        root: The folder of the results of a corpus.
    """
    curves = [smoothed(read_metrics(folder)) for folder in folders_of(name, root)]
    curves = [curve for curve in curves if max(curve) == max(max(one) for one in curves)]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    return rounds, [100 * float(np.mean([curve[r] for curve in curves])) for r in rounds]


def private_rounds(root: Path) -> RuleVerdict:
    """Rule private-rounds: the private run reaches the accuracy of the baseline a given number of rounds later."""
    first, last = RULES["private-rounds"]["read_at"]
    target = float(np.interp(first, *mean_curve("baseline-seed", root)))
    reached = float(np.interp(last, *mean_curve("private", root)))
    ends = difference("private-rounds", "private", "baseline-seed", [5000], root)
    measured = Measured(reached - target, ends.half, ends.is_short)
    return joined((measured.is_between(0.0), f"private at {last:,} against baseline at {first:,}: {measured}"))


def private_estimate(root: Path) -> RuleVerdict:
    """Rule private-estimate: training with 100 users per round predicts the accuracy of the private run."""
    rule, runs = "private-estimate", ("private", "estimate-seed")
    return joined(
        *(
            compare(rule, *runs, root, at=[at], least=-0.25, most=0.25, words=f"round {at:,}: ")
            for at in RULES[rule]["read_at"]
        )
    )


def table_2_cost(root: Path) -> RuleVerdict:
    """Rule table-2-cost: each sigma costs no more than in the paper, and more noise costs more."""
    costs = [compare("table-2-cost", name, "baseline-seed", root, least=-limit) for name, limit in PAPER_COSTS.items()]
    more = [compare("table-2-cost", b, a, root, at=[5000], most=0.0) for a, b in itertools.pairwise(NOISED)]
    return joined(*costs, *more)


def figure_1_later(root: Path) -> RuleVerdict:
    """Rule figure-1-later: the cost of noise grows during training."""
    words = {name: f"cost of {name.removesuffix('-seed')} changes by " for name in NOISED}
    runs = ("figure-1-later", "baseline-seed")
    return joined(*(compare(*runs, name, root, least=0.0, change=True, words=words[name]) for name in NOISED))


def figure_7(root: Path) -> RuleVerdict:
    """Rule figure-7: 1,250 and 100 users per round have the same accuracy at equal sigma."""
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


def figure_1_match(root: Path) -> RuleVerdict:
    """Rule figure-1-match: sigma = 0.003 nearly matches the baseline."""
    return joined(compare("figure-1-match", "S15-sigma0.003-seed", "baseline-seed", root, least=-0.25))


def figure_4(root: Path) -> RuleVerdict:
    """Rule figure-4: after a change at round 4,885, S = 7.9 is better than the larger S."""
    parts = []
    for norm in (10, 12.6, 20):
        words, other = f"S = 7.9 against S = {norm:g}: ", f"then-S{norm:g}-seed"
        parts.append(compare("figure-4", "then-S7.9-seed", other, root, at=[6000], least=0.0, words=words))
    return joined(*parts)


def figure_8_early(root: Path) -> RuleVerdict:
    """Rule figure-8-early: S = 10 and S = 12.6 are nearly as good as the best S, and the sweep tells values of S apart."""
    rule, (at,) = "figure-8-early", RULES["figure-8-early"]["read_at"]
    names = {norm: f"trade-S{norm:g}-seed" for norm in TRADES}
    means = {norm: float(np.mean(accuracy(complete(name, at, root), at))) for norm, name in names.items()}
    best, worst = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    parts = []
    for norm in (10, 12.6):
        words = f"S = {norm:g} against the best, S = {best:g}: "
        is_near, text = compare(rule, names[norm], names[best], root, least=-0.25, words=words)
        parts.append((norm == best or is_near, text))
    better = max((10, 12.6), key=means.__getitem__)
    words = f"the worst, S = {worst:g}, against S = {better:g}: "
    is_apart, text = compare(rule, names[worst], names[better], root, most=-0.25, words=words)
    # The rule has no outcome "did not hold" for a sweep whose values lie close together: it cannot tell.
    return joined(*parts, (is_apart or None, text))


def figure_8_seeds(root: Path) -> RuleVerdict:
    """Rule figure-8-seeds: three seeds of S = 20 are close together."""
    rule = RULES["figure-8-seeds"]
    values = accuracy(complete("trade-S20-seed", rule["read_at"][0], root), rule["read_at"][0])
    if len(values) < rule["seeds"]:
        return RuleVerdict("cannot tell", f"{len(values)} of {rule['seeds']} seeds.")
    apart = max(values) - min(values)
    return joined((apart <= rule["threshold"], f"range of the seeds {apart:.2f} points"))


JUDGES = {
    "private-run": (private_run, {"private": 5000, "baseline-C5000-seed": 5000}),
    "private-rounds": (private_rounds, {"private": 5000, "baseline-seed": 5000}),
    "private-estimate": (private_estimate, {"private": 5000, "estimate-seed": 5000}),
    "figure-1-match": (figure_1_match, {"S15-sigma0.003-seed": 5000, "baseline-seed": 5000}),
    "figure-1-later": (figure_1_later, {name: 5000 for name in SEEDED.values() if name != "estimate-seed"}),
    "table-2-cost": (table_2_cost, {name: 5000 for name in SEEDED.values() if name != "estimate-seed"}),
    "figure-7": (figure_7, {"S15-sigma0.012-C1250-seed": 3000, "S15-sigma0.012-seed": 3000}),
}
"""The function of each rule on reviews_81, and the runs that it needs with the round that they must have reached."""
LONG_JUDGES = {
    "figure-4": (figure_4, {f"then-S{norm:g}-seed": 6000 for norm in (7.9, 10, 12.6, 20)}),
    "figure-8-early": (figure_8_early, {f"trade-S{norm:g}-seed": 4885 for norm in TRADES}),
    "figure-8-seeds": (figure_8_seeds, {"trade-S20-seed": 4885}),
}
"""The same for the rules on reviews_1600_200k."""


def verdicts(root: Path = REVIEWS, long: Path = LONG) -> dict[str, RuleVerdict]:
    """The verdict of every rule that the runs of `private_run.py` belong to.

    Args:
        root: Results on reviews_81.
        long: Results on reviews_1600_200k. Rules without any run there are left out.
    """
    outcomes = {"private-S": private_norm(), "expect-hours": _hours()}
    judged = [(rule, *one, root) for rule, one in JUDGES.items()]
    judged += [(rule, *one, long) for rule, one in LONG_JUDGES.items() if any(folders_of(n, long) for n in one[1])]
    for rule, judge, needed, place in judged:
        why = missing(needed, place)
        outcomes[rule] = RuleVerdict("cannot tell", why) if why else judge(place)
    return outcomes | accounting()


def accounting() -> dict[str, RuleVerdict]:
    """The verdicts of the rules that need no training: Tables 1 and 2 by three accountants."""
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
    """Rule expect-hours: the private run takes at most 15 minutes, all its sessions together."""
    seen = sittings(REVIEWS / "private")
    rounds, seconds, done = RULES["expect-hours"]["rounds"], sum(one["seconds"] for one in seen), seen[-1]["to_round"]
    if done < rounds:
        whole = rounds * seconds / done / 60
        return RuleVerdict("cannot tell", f"{done:,} of {rounds:,} rounds; at this pace all take {whole:.1f} minutes.")
    return joined((seconds <= 900, f"{seconds / 60:.1f} minutes"))
