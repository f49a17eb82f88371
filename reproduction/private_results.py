"""Tables and verdicts of the runs of `private_run.py`, computed from the result files.

The inputs are reproduction/results/reviews_81 and reproduction/results/blogs_64; the output is Markdown on standard
output. Verdicts follow `rules.toml`: a rule whose runs are missing or too short has the outcome "cannot tell".

    python -m reproduction.private_results

A difference is tested against a threshold with an interval that combines the bootstrap over users with the variation
between repetitions. With fewer repetitions than a rule requires, the registered single-seed margin is added.
"""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reproduction.bootstrap import POSTS, USERS, accuracy_interval, difference_interval, half_width, load
from reproduction.private_run import CANDIDATES, POPULATIONS, read_metrics, smoothed
from reproduction.render_rules import load as load_rules
from unheard.report.tables import Table

HERE = Path(__file__).resolve().parent
REVIEWS, BLOGS = HERE / "results" / "reviews_81", HERE / "results" / "blogs_64"
INTERRUPTED = REVIEWS / "interrupted"
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
BIGRAM = 18.55
"""AccuracyTop1 in % of a bigram model on the same held-out users, counted without privacy
(results/reviews_81/README.md)."""
MARKS = (100, 500, 1000, 1400, 1700, 2200, 3000, 3400, 5000)
"""Rounds in the table of the private run."""


@dataclass(frozen=True)
class Verdict:
    """An outcome of `rules.toml` and the reason for it."""

    outcome: str
    reason: str


# ------------------------------------------------------------------------------------------------------------------- reading


def folders_of(name: str, root: Path = REVIEWS) -> list[Path]:
    """The folders of a run and its repetitions, or of its seeds if the name ends in `-seed`."""
    if name.endswith("-seed"):
        return sorted(path for path in root.glob(f"{name}[0-9]") if (path / "metrics.jsonl").exists())
    return sorted(path for path in root.glob(f"{name}*") if (path / "metrics.jsonl").exists() and path.is_dir())


def accuracy(folders: Sequence[Path], at: int) -> list[float]:
    """Accuracy in percent of each run at a round, as the rules define it. Runs without an evaluation at that round are
    left out."""
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

    def against(self, threshold: float) -> str:
        """Compare with a threshold: `above`, `below` or `cannot tell`."""
        margin = TERMS["single_seed_margin"] if self.is_short else 0.0
        if abs(self.value - threshold) <= self.half + margin:
            return "cannot tell"
        return "above" if self.value > threshold else "below"

    def __str__(self) -> str:
        short = " (fewer repetitions than required: preliminary)" if self.is_short else ""
        return (
            f"{self.value:+.2f} points, interval {self.value - self.half:+.2f} to {self.value + self.half:+.2f}{short}"
        )


def missing(rounds: dict[str, int], root: Path) -> str | None:
    """Why a rule cannot be applied: runs that did not reach the round at which they are read, or whose model was not
    kept. None if it can."""
    absent = [
        f"{n.removesuffix('-seed')} at round {at:,}"
        for n, at in rounds.items()
        if not accuracy(folders_of(n, root), at)
    ]
    models = [n for n in rounds if any(not (f / "per_user.npz").exists() for f in folders_of(n, root))]
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
    sides = [folders_of(first, root), folders_of(second, root)]
    by_run = [np.array(accuracy(side, at[-1])) for side in sides]
    if change:
        by_run = [values - np.array(accuracy(side, at[0])) for values, side in zip(by_run, sides, strict=True)]
    half = 100 * (half_width(*sides) or 0.0) * (math.sqrt(2) if change else 1)
    fewest = min(len(values) for values in by_run)
    if fewest > 1:
        half = math.hypot(half, 1.96 * math.hypot(*(np.std(v, ddof=1) / math.sqrt(len(v)) for v in by_run)))
    return Measured(float(by_run[0].mean() - by_run[1].mean()), half, fewest < RULES[rule]["seeds"])


def joined(parts: Sequence[tuple[bool | None, str]]) -> Verdict:
    """Combine the parts of a rule: it did not hold if one part is false, and is undecided if one part is."""
    reason = "; ".join(text for _, text in parts) + "."
    if any(is_so is False for is_so, _ in parts):
        return Verdict("did not hold", reason)
    return Verdict("cannot tell" if any(is_so is None for is_so, _ in parts) else "held", reason)


def is_so(seen: str, wanted: str) -> bool | None:
    """Whether an outcome is the wanted one; None for `cannot tell`."""
    return None if seen == "cannot tell" else seen == wanted


def within(
    rule: str, first: str, second: str, limit: float, root: Path, *, both: bool = False
) -> tuple[bool | None, str]:
    """Whether the first run is at most `limit` points below the second (with `both`, also not above) at the last round
    of the rule; and the numbers in words."""
    measured = difference(rule, first, second, RULES[rule]["read_at"], root)
    lower = is_so(measured.against(-limit), "above")
    upper = is_so(measured.against(limit), "below") if both else True
    answer = False if False in (lower, upper) else None if None in (lower, upper) else True
    return answer, f"{first.removesuffix('-seed')} against {second.removesuffix('-seed')}: {measured}"


def private_norm() -> Verdict:
    """Rule private-S, computed again from the evaluations."""
    values = {norm: accuracy([BLOGS / f"S{norm}"], 1000) for norm in CANDIDATES}
    best = max(values, key=lambda norm: (values[norm], -norm))
    is_edge = best in (CANDIDATES[0], CANDIDATES[-1])
    listed = ", ".join(f"S = {norm}: {value[0]:.2f} %" for norm, value in values.items())
    return Verdict(
        "chosen: S = " + str(best), f"{listed}. {'At the edge of the list.' if is_edge else 'Inside the list.'}"
    )


def private_run(root: Path) -> Verdict:
    """Rule private-run: accuracy against the baseline with as many users, and epsilon at most that of the paper."""
    from unheard.privacy.accountants import epsilon
    from unheard.privacy.events import PoissonGaussian

    q = RULES["private-run"]["users_per_round"] / POPULATIONS["reviews_81"]
    event = PoissonGaussian(sampling_prob=q, noise_multiplier=1.0)
    spent = epsilon([(event, RULES["private-run"]["rounds"])], 1e-9, "pld")
    gap = within("private-run", "private", "baseline-C5000-seed", RULES["private-run"]["threshold"], root)
    return joined([gap, (spent <= 4.634, f"epsilon {spent:.3f} at delta = 1e-9")])


def mean_curve(name: str, root: Path) -> tuple[list[int], list[float]]:
    """Rounds at which all repetitions were evaluated, and their mean accuracy there."""
    curves = [smoothed(read_metrics(folder)) for folder in folders_of(name, root)]
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    return rounds, [100 * float(np.mean([curve[r] for curve in curves])) for r in rounds]


def private_rounds(root: Path) -> Verdict:
    """Rule private-rounds: the private run reaches the accuracy of the baseline a given number of rounds later."""
    first, last = RULES["private-rounds"]["read_at"]
    target = float(np.interp(first, *mean_curve("baseline-seed", root)))
    drawn_rounds = float(np.interp(last, *mean_curve("private", root)))
    ends = difference("private-rounds", "private", "baseline-seed", [5000], root)
    measured = Measured(drawn_rounds - target, ends.half, ends.is_short)
    return joined(
        [(is_so(measured.against(0.0), "above"), f"private at {last:,} against baseline at {first:,}: {measured}")]
    )


def private_estimate(root: Path) -> Verdict:
    """Rule private-estimate: training with 100 users per round predicts the accuracy of the private run."""
    parts = []
    for at in RULES["private-estimate"]["read_at"]:
        measured = difference("private-estimate", "private", "estimate-seed", [at], root)
        inside = (is_so(measured.against(-0.25), "above"), is_so(measured.against(0.25), "below"))
        parts.append((False if False in inside else None if None in inside else True, f"round {at:,}: {measured}"))
    return joined(parts)


def table_2_cost(root: Path) -> Verdict:
    """Rule table-2-cost: each sigma costs no more than in the paper, and more noise costs more."""
    names = [name for label, name in SEEDED.items() if label.startswith("S = 1")]
    parts = [
        within("table-2-cost", name, "baseline-seed", limit, root)
        for name, limit in zip(names[1:], (0.83, 1.54), strict=True)
    ]
    for less, more in itertools.pairwise(names):
        measured = difference("table-2-cost", more, less, [5000], root)
        words = f"{more.removesuffix('-seed')} against {less.removesuffix('-seed')}: {measured}"
        parts.append((is_so(measured.against(0.0), "below"), words))
    return joined(parts)


def figure_1_later(root: Path) -> Verdict:
    """Rule figure-1-later: the cost of noise grows during training."""
    parts = []
    for name in (name for label, name in SEEDED.items() if label.startswith("S = 1")):
        measured = difference(
            "figure-1-later", "baseline-seed", name, RULES["figure-1-later"]["read_at"], root, change=True
        )
        parts.append(
            (is_so(measured.against(0.0), "above"), f"cost of {name.removesuffix('-seed')} changes by {measured}")
        )
    return joined(parts)


def figure_7(root: Path) -> Verdict:
    """Rule figure-7: 1,250 and 100 users per round have the same accuracy at equal sigma."""
    many, few = "S15-sigma0.012-C1250-seed", "S15-sigma0.012-seed"
    curves = [dict(zip(*mean_curve(name, root), strict=True)) for name in (many, few)]
    shared = [r for r in curves[0] if r in curves[1] and 500 <= r <= 3000]
    apart = float(np.mean([abs(curves[0][r] - curves[1][r]) for r in shared]))
    ends = difference("figure-7", many, few, [3000], root)
    mean = Measured(apart, ends.half, ends.is_short)
    words = f"mean distance of the curves {apart:.2f} points"
    return joined([(is_so(mean.against(0.25), "below"), words), within("figure-7", many, few, 0.25, root, both=True)])


def figure_1_match(root: Path) -> Verdict:
    """Rule figure-1-match: sigma = 0.003 nearly matches the baseline."""
    return joined([within("figure-1-match", "S15-sigma0.003-seed", "baseline-seed", 0.25, root)])


JUDGES = {
    "private-run": (private_run, {"private": 5000, "baseline-C5000-seed": 5000}),
    "private-rounds": (private_rounds, {"private": 5000, "baseline-seed": 5000}),
    "private-estimate": (private_estimate, {"private": 5000, "estimate-seed": 5000}),
    "figure-1-match": (figure_1_match, {"S15-sigma0.003-seed": 5000, "baseline-seed": 5000}),
    "figure-1-later": (figure_1_later, {name: 5000 for name in SEEDED.values() if name != "estimate-seed"}),
    "table-2-cost": (table_2_cost, {name: 5000 for name in SEEDED.values() if name != "estimate-seed"}),
    "figure-7": (figure_7, {"S15-sigma0.012-C1250-seed": 3000, "S15-sigma0.012-seed": 3000}),
}
"""The function of each rule, and the runs that it needs with the round that they must have reached."""


def verdicts(root: Path = REVIEWS) -> dict[str, Verdict]:
    """The verdict of every rule that the runs of `private_run.py` belong to."""
    outcomes = {"private-S": private_norm(), "expect-hours": _hours()}
    for rule, (judge, needed) in JUDGES.items():
        why = missing(needed, root)
        outcomes[rule] = Verdict("cannot tell", why) if why else judge(root)
    return outcomes | accounting()


def accounting() -> dict[str, Verdict]:
    """The verdicts of the rules that need no training: Tables 1 and 2 by three accountants."""
    from reproduction.printed import TABLE_1, TABLE_2, moments
    from unheard.privacy.accountants import epsilon
    from unheard.privacy.events import PoissonGaussian

    def by(accountant: Any, cell: Any) -> float:
        q = cell.users_per_round / cell.population
        event = PoissonGaussian(sampling_prob=q, noise_multiplier=cell.noise_multiplier)
        return epsilon([(event, cell.rounds)], cell.delta, accountant)

    cells = [cell for line in TABLE_1 for cell in line]
    equal = sum(cell.agrees(moments(cell)) for cell in cells)
    above = sum(by("rdp", cell) > float(cell.digits) for cell in cells)
    rows = [row.epsilon for row in TABLE_2 if row.epsilon is not None]
    same = sum(row.agrees(moments(row)) for row in rows)
    larger = sum(by("pld", row) > float(row.digits) for row in rows)
    many = TABLE_1[-1]
    once, often = by("rdp", many[0]), by("rdp", many[-1])
    ratio = often / once
    return {
        "table-1-digits": joined([(equal == 42 and not above, f"{equal} of 42 cells agree; RDP is above in {above}")]),
        "table-1-rounds": joined(
            [
                (
                    ratio <= 1.25,
                    f"RDP {once:.3f} after 1 round, {often:.3f} after 10^6: ratio {ratio:.2f}",
                )
            ]
        ),
        "table-2-epsilon": joined([(same == 6 and not larger, f"{same} of 6 rows agree; PLD is above in {larger}")]),
    }


def _hours() -> Verdict:
    """Rule expect-hours: the private run takes at most 15 minutes, all its sessions together."""
    seen = sittings(REVIEWS / "private")
    rounds, seconds, done = RULES["expect-hours"]["rounds"], sum(one["seconds"] for one in seen), seen[-1]["to_round"]
    if done < rounds:
        whole = rounds * seconds / done / 60
        return Verdict("cannot tell", f"{done:,} of {rounds:,} rounds; at this pace all take {whole:.1f} minutes.")
    return Verdict("held" if seconds <= 900 else "did not hold", f"{seconds / 60:.1f} minutes.")


# -------------------------------------------------------------------------------------------------------------------- tables


def main() -> None:
    """Print the tables and verdicts as Markdown."""
    private = REVIEWS / "private"
    statement = json.loads((private / "statement.json").read_text())
    seen, counts = sittings(private), load(private)
    rounds = seen[-1]["to_round"]
    low, high = accuracy_interval([private])
    final = counts["hits"].sum() / counts["targets"].sum()
    print("## The private run\n")
    print(f"{rounds:,} of 5,000 rounds in {len(seen)} sessions.\n")
    for one in seen:
        first_mark, last_mark = one["marks"][0], one["marks"][-1]
        seconds = last_mark["seconds"] - first_mark["seconds"]
        pace = (last_mark["round"] - first_mark["round"]) * 5000 / max(seconds, 1e-9)
        print(f"- Rounds {one['from_round']:,} to {one['to_round']:,}: {one['seconds']:.0f} s, ", end="")
        print(f"{one['users_per_second']:,.0f} users/s ({pace:,.0f} without the start), {one['device']}, ", end="")
        print(f"torch {one['torch']}, {one['date']}, commit {one['commit'][:12]}.")
    print()
    q = 5000 / POPULATIONS["reviews_81"]
    print(f"q = {q:.5f}, {q * rounds:.1f} visits per user.\n")
    epsilon = statement["epsilon"]
    print(f"Epsilon at delta = {statement['delta']:.3g}: PLD {epsilon['pld']:.3f}, RDP {epsilon['rdp']:.3f}, ", end="")
    print(f"moments accountant {epsilon['moments']:.3f}.\n")
    print(f"AccuracyTop1 of the last model on {len(counts['targets']):,} held-out users: {100 * final:.2f} % ", end="")
    print(f"(95 % interval over users {100 * low:.2f} to {100 * high:.2f} %); ", end="")
    print(f"without sentence ends {100 * counts['word_hits'].sum() / counts['words'].sum():.2f} %, ", end="")
    print(f"also without punctuation {100 * counts['plain_hits'].sum() / counts['plain'].sum():.2f} %.\n")
    _ways_of_counting(private)
    print(
        "| round | accuracy at this evaluation, % | accuracy by the rules, % | epsilon, RDP |\n| ---: | ---: | "
        "---: | ---: |"
    )
    curve = smoothed(read_metrics(private))
    for row in read_metrics(private):
        if row["round"] in MARKS or row["round"] % 500 == 0:
            print(
                f"| {row['round']:,} | {100 * row['accuracy_top1']:.2f} | {100 * curve[row['round']]:.2f} | "
                f"{row['epsilon']:.2f} |"
            )
    _composed(rounds, statement["delta"])
    _interrupted(curve)
    print("\n## S, chosen on blogs_64 (rule private-S)\n")
    print(f"{private_norm().reason}\n")
    print("## Verdicts\n\n| rule | outcome | reason |\n| --- | --- | --- |")
    for name, verdict in verdicts().items():
        print(f"| {name} | {verdict.outcome} | {verdict.reason} |")


def section(root: Path = REVIEWS) -> dict[str, Any] | None:
    """The private run as variables of `templates/paper.html`.

    Args:
        root: Folder of the results on reviews_81.

    Returns:
        The sentences, tables and verdicts; None if there is no private run in the folder.
    """
    private, rounds = root / "private", RULES["private-run"]["rounds"]
    if not (private / "per_user.npz").exists():
        return None
    statement = json.loads((private / "statement.json").read_text())
    seen = sittings(private)
    low, high = accuracy_interval([private])
    q, done, delta = 5000 / POPULATIONS["reviews_81"], seen[-1]["to_round"], statement["delta"]
    minutes = sum(one["seconds"] for one in seen) / 60
    epsilon = statement["epsilon"]
    sentences = [
        f"{POPULATIONS['reviews_81']:,} reviewers, 5,000 users per round, z = 1, S = 8 (chosen on another corpus), "
        f"noise from a secure generator. {done:,} of {rounds:,} rounds in {minutes:.1f} minutes on one "
        f"{seen[-1]['device']}; q = {q:.5f}, {q * done:.1f} visits per user.",
        f"AccuracyTop1 {_share(load(private), 'hits', 'targets')} (95 % interval over {len(load(private)['targets']):,} "
        f"held-out users {100 * low:.2f} to {100 * high:.2f} %) at epsilon {epsilon['pld']:.2f} (PLD; "
        f"{epsilon['rdp']:.2f} by RDP) and delta {delta:.2g}. A bigram model counted without privacy has {BIGRAM} %.",
    ]
    named = {"private": [private], "without privacy": folders_of("baseline-C5000-seed", root)[:1]}
    kept = {label: folders[0] for label, folders in named.items() if folders and (folders[0] / "per_user.npz").exists()}
    suggested = {label: _suggestions(folder) for label, folder in kept.items()}
    judged = verdicts(root)
    return {
        "sentences": sentences,
        "cost": _cost(kept),
        "accuracy": accuracy_table(kept),
        "suggestions": Table(
            title="The three words that each model suggests",
            columns=("", *suggested),
            rows=[
                (text, *(", ".join(words.get(text, ())) for words in suggested.values()))
                for text in suggested["private"]
            ],
        ),
        "rules": [registered(name, judged.get(name)) for name in RULES],
        "counts": _counts(judged),
    }


WAYS = {
    "AccuracyTop1": (USERS, ("targets", "hits")),
    "without sentence ends": (USERS, ("words", "word_hits")),
    "also without punctuation": (USERS, ("plain", "plain_hits")),
    "random posts": (POSTS, ("targets", "hits")),
}
"""Ways of counting that are reported beside AccuracyTop1: the file with the counts, the names of targets and hits."""


def accuracy_table(kept: dict[str, Path]) -> Table:
    """The accuracies of the last models by each way of counting, and their difference with its 95 % interval.

    Args:
        kept: Run folders by label, the private run first and its baseline second.
    """
    rows = [(label, *(_accuracy_cell(folder, way) for way in WAYS)) for label, folder in kept.items()]
    folders = list(kept.values())
    if len(folders) > 1:
        rows.append(("difference, points", *(_difference_cell(folders[0], folders[1], way) for way in WAYS)))
    posts = load(folders[0], POSTS)["targets"] if (folders[0] / POSTS).exists() else None
    note = "Differences with 95 % intervals: paired bootstrap over users, and over posts in the last column."
    if posts is not None:
        note += f" Random posts: {len(posts):,} posts of held-out users with {posts.sum():,} predicted tokens, as the paper."
    return Table(title="The last models on all held-out users", columns=("", *WAYS), rows=rows, note=note)


def _accuracy_cell(folder: Path, way: str) -> str:
    """The accuracy of a model by one way of counting."""
    file_name, (targets, hits) = WAYS[way]
    return _share(load(folder, file_name), hits, targets) if (folder / file_name).exists() else "not measured"


def _difference_cell(first: Path, second: Path, way: str) -> str:
    """The accuracy of the first model minus that of the second, with its interval."""
    file_name, kind = WAYS[way]
    if any(not (folder / file_name).exists() for folder in (first, second)):
        return "not measured"
    shares = [load(folder, file_name) for folder in (first, second)]
    apart = [100 * counts[kind[1]].sum() / counts[kind[0]].sum() for counts in shares]
    low, high = difference_interval([first], [second], file_name, kind)
    return f"{apart[0] - apart[1]:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"


def _ways_of_counting(private: Path) -> None:
    """Print the accuracies of the last models by each way of counting."""
    labels = ("private", "baseline, C = 5,000")
    table = accuracy_table(dict(zip(labels, (private, *folders_of("baseline-C5000-seed")), strict=False)))
    print("| " + " | ".join(table.columns) + " |\n| --- |" + " ---: |" * len(WAYS))
    for row in table.rows:
        print("| " + " | ".join(row) + " |")
    print(f"\n{table.note}\n")


NOT_TESTED = "not tested yet"
"""Outcome of a rule whose runs do not exist."""


def registered(name: str, verdict: Verdict | None) -> dict[str, str]:
    """One registered rule with its verdict, as variables of `templates/paper.html`.

    Args:
        name: Name of the rule.
        verdict: Its verdict; None if none of its runs exist.
    """
    rule = RULES[name]
    population = {corpus["name"]: corpus["population"] for corpus in load_rules()["corpus"]}.get(rule["corpus"])
    if population is None:
        sizes = "No training."
    else:
        q = rule["users_per_round"] / population
        sizes = (
            f"{rule['corpus']}: {rule['users_per_round']:,} of {population:,} users per round, {rule['rounds']:,} rounds; "
            f"q = {q:.2g}, {q * rule['rounds']:.2g} visits per user; seeds required: {rule['seeds']}."
        )
    outcome = NOT_TESTED if verdict is None else verdict.outcome
    kind = "held" if outcome.startswith("chosen") else outcome
    return {
        "name": name,
        "exhibit": rule["exhibit"],
        "is_of_paper": "yes" if rule["counts"] == "paper" else "",
        "sentence": rule["sentence"],
        "where": rule["where"],
        "measure": rule["measure"],
        "sizes": sizes,
        "holds": rule["holds"],
        "outcome": outcome,
        "is_tested": "yes" if outcome in ("held", "did not hold") else "",
        "outcome_class": "cannot-tell" if outcome == NOT_TESTED else kind.replace(" ", "-"),
        "reason": "No run of this rule is complete." if verdict is None else verdict.reason,
        "growing": rule["old_growing"],
        "projected": rule["old_projected"],
    }


def _counts(judged: dict[str, Verdict]) -> str:
    """How many conclusions of the paper were tested by the registered rules, each counted once, and with which result."""
    of_paper = [name for name, rule in RULES.items() if rule["counts"] == "paper"]
    outcomes = [judged[name].outcome for name in of_paper if name in judged]
    held, failed = outcomes.count("held"), outcomes.count("did not hold")
    preliminary = sum(
        judged[name].outcome == "did not hold" and "preliminary" in judged[name].reason
        for name in of_paper
        if name in judged
    )
    few = " (preliminary: fewer repetitions than required)" if preliminary else ""
    return (
        f"{held + failed} of the paper\u2019s {len(of_paper)} conclusions are tested by rules that were registered before "
        f"the runs: {held} held, {failed} did not hold{few}. The other {len(of_paper) - held - failed} lack runs"
    )


def _cost(kept: dict[str, Path]) -> str:
    """What privacy cost in accuracy and in time, in words."""
    if len(kept) < 2:
        return "and accuracy that is not known yet, because its baseline is missing"
    seconds = [sum(one["seconds"] for one in sittings(folder)) for folder in kept.values()]
    first, second, *_ = kept.values()
    apart = _difference_cell(first, second, "AccuracyTop1")
    return (
        f"{apart.lstrip('-').split(' ')[0]} points of AccuracyTop1 against the same users per round without clip and "
        f"noise, and {seconds[0] / 60:.1f} instead of {seconds[1] / 60:.1f} minutes"
    )


def _share(counts: Any, hits: str, of: str) -> str:
    """A share of counted words in percent."""
    return f"{100 * counts[hits].sum() / counts[of].sum():.2f} %"


def _suggestions(folder: Path) -> dict[str, list[str]]:
    """What a model suggests, as `private_run.measure` recorded it."""
    return json.loads((folder / "facts.json").read_text()).get("suggestions", {})


def _composed(rounds: int, delta: float) -> None:
    """Print the epsilon of both private attempts together, because evaluations of the first one are published too."""
    from unheard.privacy.accountants import epsilon
    from unheard.privacy.events import PoissonGaussian

    first = sum(
        '"poisson_gaussian"' in line for line in (INTERRUPTED / "private" / "ledger.jsonl").read_text().splitlines()
    )
    q = RULES["private-run"]["users_per_round"] / POPULATIONS["reviews_81"]
    event = PoissonGaussian(sampling_prob=q, noise_multiplier=1.0)
    spent = {name: epsilon([(event, first + rounds)], delta, name) for name in ("pld", "rdp")}
    print(f"\nThe interrupted first attempt had charged {first:,} rounds when its ledger was last copied. ", end="")
    print(f"Both private attempts together: PLD {spent['pld']:.3f}, RDP {spent['rdp']:.3f}. ", end="")
    print(
        "The baselines and the runs with C = 100 are experiments without a useful guarantee on the same public corpus."
    )


def _interrupted(curve: dict[int, float]) -> None:
    """Print the accuracy of the interrupted runs. Their models were not kept, so there are no intervals over users."""
    marks = (100, 500, 1000, 1400, 1700, 2200)
    print("\n## Beside the interrupted runs, accuracy by the rules, %\n")
    print("| run | " + " | ".join(f"{mark:,}" for mark in marks) + " |\n| --- |" + " ---: |" * len(marks))
    print("| private | " + " | ".join(f"{100 * curve[mark]:.2f}" for mark in marks) + " |")
    if whole := folders_of("baseline-C5000-seed"):
        cells = (f"{np.mean(accuracy(whole, mark)):.2f}" for mark in marks)
        print("| baseline, C = 5,000 | " + " | ".join(cells) + " |")
    named = {"private, first attempt": "private", "baseline, C = 5,000, first attempt": "baseline-C5000-seed"} | SEEDED
    for label, name in named.items():
        side = folders_of(name, INTERRUPTED)
        cells = []
        for mark in marks:
            values = accuracy(side, mark)
            spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
            cells.append(f"{np.mean(values):.2f}{spread}" if values else "")
        print(f"| {label} | " + " | ".join(cells) + " |")
    print("\n± is the standard deviation over three seeds.")
    pairs = (
        ("private", REVIEWS, "baseline-C5000-seed", 1400),
        ("private", REVIEWS, "estimate-seed", 1700),
        *((name, INTERRUPTED, "baseline-seed", 1700) for name in SEEDED.values() if name != "baseline-seed"),
    )
    print(
        "\nDifferences at the last round that both reached. It is not the round of any rule, so it decides nothing.\n"
    )
    print("| first | second | round | first minus second, points |\n| --- | --- | ---: | ---: |")
    for name, root, other, at in pairs:
        gap = np.mean(accuracy(folders_of(name, root), at)) - np.mean(accuracy(folders_of(other, INTERRUPTED), at))
        print(f"| {name.removesuffix('-seed')} | {other.removesuffix('-seed')} | {at:,} | {gap:+.2f} |")


if __name__ == "__main__":
    main()
