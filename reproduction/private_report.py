"""The runs of `private_run.py` as tables and figures: one Markdown report, and the variables of the page.

The inputs are reproduction/results/reviews_81 and reproduction/results/blogs_64. Every number is computed from these
files when the report is written; a run that is missing or stopped is named as such.

    python -m reproduction.private_report                        the report on standard output
    python -m reproduction.private_report --out FILE.md          the same into a file

`section` returns the same tables and figures for `page.py`. Verdicts: `private_results.py`.
"""

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reproduction.bootstrap import POSTS, USERS, accuracy_interval, difference_interval, load
from reproduction.exhibit import Figure, Line
from reproduction.printed import BASELINE_ACCURACY, FIGURES_OF_RULES, TABLE_2
from reproduction.private_results import (
    BLOGS,
    REVIEWS,
    RULES,
    SEEDED,
    Verdict,
    accuracy,
    cost,
    folders_of,
    mean_curve,
    private_norm,
    sittings,
    verdicts,
)
from reproduction.private_run import MORE_STEPS, POPULATIONS, STEPS, Z1, read_metrics, runs_of, smoothed
from reproduction.render_rules import load as load_rules
from unheard.report.tables import Table

POPULATION = POPULATIONS["reviews_81"]
INTERRUPTED = REVIEWS / "interrupted"
ROUNDS = 5000
"""Rounds of Table 2 and of the private runs."""
NOT_RUN, NOT_TESTED = "not run", "not tested yet"
"""A cell without a run, and the outcome of a rule whose runs do not exist."""
EARLY_MARKS = (100, 500, 1000, 1400, 1700, 2200)
"""Rounds in the table of the interrupted runs."""
WAYS = {
    "AccuracyTop1": (USERS, ("targets", "hits")),
    "without sentence ends": (USERS, ("words", "word_hits")),
    "also without punctuation": (USERS, ("plain", "plain_hits")),
    "random posts": (POSTS, ("targets", "hits")),
}
"""Ways of counting that are reported beside AccuracyTop1: the file with the counts, the names of targets and hits."""


def counted_baselines(root: Path = REVIEWS) -> dict[str, float]:
    """AccuracyTop1 in % of the unigram and the bigram model, counted without privacy (`private_run counted`)."""
    return json.loads((root / "counted.json").read_text())["accuracy_top1"]


# -------------------------------------------------------------------------------------------------------------------- tables


def state_table(root: Path = REVIEWS) -> Table:
    """What was run: for each step the rounds that its runs reached, their seconds, device and commit."""
    rows = []
    for step in ("private", *(one for one in (*STEPS, *MORE_STEPS) if one != "private")):
        names = list(runs_of(step, BLOGS))
        home = BLOGS if step == "choose-S" else root
        wanted = max(run["training"]["rounds"] for run in runs_of(step, BLOGS).values())
        folders = [home / name for name in names if (home / name / "sittings.jsonl").exists()]
        if repeated := [path for path in root.glob(f"{step}-repetition*") if (path / "sittings.jsonl").exists()]:
            folders += repeated
        done = [sittings(folder)[-1]["to_round"] for folder in folders]
        if not folders:
            rows.append((step, f"{len(names)}", NOT_RUN, "", "", ""))
            continue
        complete = sum(one >= wanted for one in done)
        reached = f"{complete} complete" if complete == len(folders) else f"stopped at {min(done):,} of {wanted:,}"
        seen = sittings(folders[0])
        minutes = sum(one["seconds"] for one in seen) / 60
        pace = sum(one["users_per_second"] * one["seconds"] for one in seen) / sum(one["seconds"] for one in seen)
        commits = ", ".join(dict.fromkeys(one["commit"][:9] for one in seen))
        rows.append(
            (step, f"{len(names)}", reached, f"{minutes:.1f}", f"{pace:,.0f}", f"{seen[-1]['date']}, {commits}")
        )
    return Table(
        title="What was run",
        columns=("step", "runs", "state", "minutes", "users/s", "date, commits"),
        rows=rows,
        note="Minutes and users/s are those of the first run of a step and of the runs that trained side by side with it, "
        "with start and evaluations, on one NVIDIA H200. Table 2 ran as five processes of three seeds at the same time; "
        "z1-C1667 and baseline-C1667 shared the GPU with C1250 and z1-C1250.",
    )


def cohorts_table(root: Path = REVIEWS) -> Table:
    """The private runs at z = 1 by users per round, with their baselines and the rows of Table 2 in the paper."""
    from unheard.privacy.accountants import epsilon
    from unheard.privacy.events import PoissonGaussian

    printed = {row.users_per_round: row for row in TABLE_2[1:4]}
    rows = []
    for users, clip in ((5000, 8), *Z1.items()):
        name = "private" if users == 5000 else f"z1-C{users}"
        q = users / POPULATION
        event = [(PoissonGaussian(sampling_prob=q, noise_multiplier=1.0), ROUNDS)]
        spent = (
            [f"{epsilon(event, POPULATION**-1.1, by):.2f}" for by in ("pld", "rdp")] if _is_complete(name, root) else []
        )
        row = printed[users]
        rows.append(
            (
                f"C = {users:,}, S = {clip}, σ = {clip / users:.2g}",
                f"{q:.2g}",
                f"{q * ROUNDS:.1f}",
                " / ".join(spent) or NOT_RUN,
                _mean_cell(folders_of(name, root), ROUNDS),
                _mean_cell(folders_of(f"baseline-C{users}-seed", root), ROUNDS),
                cost(name, f"baseline-C{users}-seed", ROUNDS, root) or "",
                row.epsilon.digits if row.epsilon else "",
                f"{100 * (BASELINE_ACCURACY - row.accuracy):.2f}",
            )
        )
    return Table(
        title="z = 1 on 750,947 users, 5,000 rounds, secure noise",
        columns=(
            "",
            "q",
            "visits",
            "ε, PLD / RDP",
            "private",
            "no privacy",
            "cost, points",
            "paper: ε",
            "paper: cost",
        ),
        rows=rows,
        note="C is users per round; visits are per user. AccuracyTop1 after 5,000 rounds as the rules define it, with 95 % "
        "intervals of the cost. ε at δ = 3.4e-7; the paper's at δ = 1e-9 for 763,430 users, with S = 15, 10 and 15. The "
        "paper estimated the costs of 5,000 and 1,667 users per round "
        "with 100 users per round, and trained 1,250.",
    )


def table_2(root: Path = REVIEWS) -> Table:
    """Table 2 with 100 users per round: the paper's accuracies and ours."""
    printed = {row.noise_std: row.accuracy for row in TABLE_2}
    q, rows = 100 / POPULATION, []
    for label, name in SEEDED.items():
        folders = folders_of(name, root)
        sigma = 0.0 if name == "baseline-seed" else float(label.split("sigma = ")[1].split(",")[0].split(" ")[0])
        paper = printed.get(sigma)
        rows.append(
            (
                label.replace("sigma", "σ").replace(", C = 100", ""),
                f"{100 * paper:.2f} %" if paper else "",
                f"{100 * (BASELINE_ACCURACY - paper):.2f}" if paper and sigma else "",
                *(_mean_cell(folders, at) for at in (1000, 3000, ROUNDS)),
                "" if name == "baseline-seed" else cost(name, "baseline-seed", ROUNDS, root) or "",
            )
        )
    return Table(
        title="Table 2 with 100 users per round, as the paper trained it",
        columns=(
            "",
            "paper, round 5,000",
            "paper: cost",
            "round 1,000",
            "round 3,000",
            "round 5,000",
            "cost at 5,000, points",
        ),
        rows=rows,
        note=f"q = {q:.2g}, {q * ROUNDS:.2f} visits per user; in the paper {100 * ROUNDS / 763_430:.2f}. ± is the standard "
        "deviation over seeds. Costs with 95 % intervals over users and seeds. These runs stand for larger cohorts: for "
        "themselves they have no useful ε.",
    )


def figure_7_table(root: Path = REVIEWS) -> Table:
    """Figure 7: 100 and 1,250 users per round with the same noise, by round."""
    names = {"100 users per round": "S15-sigma0.012-seed", "1,250 users per round": "S15-sigma0.012-C1250-seed"}
    marks = (500, 1000, 2000, 3000)
    rows = [
        (label, *(_mean_cell(folders_of(name, root), mark) for mark in marks), _exposure(users, 3000))
        for (label, name), users in zip(names.items(), (100, 1250), strict=True)
    ]
    return Table(
        title="Figure 7: S = 15, σ = 0.012",
        columns=("", *(f"round {mark:,}" for mark in marks), "q, visits per user"),
        rows=rows,
    )


def _last_round(folder: Path) -> int:
    return read_metrics(folder)[-1]["round"]


def _exposure(users: int, rounds: int) -> str:
    q = users / POPULATION
    return f"{q:.2g}, {q * rounds:.2g}"


def _is_complete(name: str, root: Path) -> bool:
    return bool(accuracy(folders_of(name, root), ROUNDS))


def _mean_cell(folders: Sequence[Path], at: int) -> str:
    """Mean accuracy of the repetitions at a round, with their standard deviation, or why there is none."""
    if not folders:
        return NOT_RUN
    values = accuracy(folders, at)
    if not values:
        return f"stopped at {max(_last_round(folder) for folder in folders):,}"
    spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread} %"


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


def _share(counts: Any, hits: str, of: str) -> str:
    """A share of counted words in percent."""
    return f"{100 * counts[hits].sum() / counts[of].sum():.2f} %"


def rounds_of_private(root: Path = REVIEWS) -> Table:
    """Accuracy and epsilon of the private run by round."""
    curve = smoothed(read_metrics(root / "private"))
    rows = [
        (
            f"{row['round']:,}",
            f"{100 * row['accuracy_top1']:.2f}",
            f"{100 * curve[row['round']]:.2f}",
            f"{row['epsilon']:.2f}",
        )
        for row in read_metrics(root / "private")
        if row["round"] in (100, 1400, 1700, 2200, 3400) or row["round"] % 500 == 0
    ]
    columns = ("round", "accuracy at this evaluation, %", "accuracy by the rules, %", "epsilon, RDP")
    return Table(title="The private run by round", columns=columns, rows=rows)


def interrupted_tables() -> tuple[Table, Table]:
    """The runs that were lost, beside the complete ones. Their models were not kept, so there are no intervals."""
    named = [
        ("private", "private", REVIEWS),
        ("baseline, C = 5,000", "baseline-C5000-seed", REVIEWS),
        ("private, first attempt", "private", INTERRUPTED),
        ("baseline, C = 5,000, first attempt", "baseline-C5000-seed", INTERRUPTED),
        *((label, name, INTERRUPTED) for label, name in SEEDED.items()),
    ]
    rows = []
    for label, name, root in named:
        # Of runs that have several repetitions by now, the first stands beside the interrupted ones.
        folders = folders_of(name, root)[:1] if root is REVIEWS else folders_of(name, root)
        cells = []
        for mark in EARLY_MARKS:
            values = accuracy(folders, mark)
            spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
            cells.append(f"{np.mean(values):.2f}{spread}" if values else "")
        rows.append((label, *cells))
    beside = Table(
        title="Beside the interrupted runs, accuracy by the rules, %",
        columns=("run", *(f"{mark:,}" for mark in EARLY_MARKS)),
        rows=rows,
        note="± is the standard deviation over three seeds.",
    )
    pairs = (
        ("private", REVIEWS, "baseline-C5000-seed", 1400),
        ("private", REVIEWS, "estimate-seed", 1700),
        *((name, INTERRUPTED, "baseline-seed", 1700) for name in SEEDED.values() if name != "baseline-seed"),
    )
    gaps = []
    for name, root, other, at in pairs:
        first = folders_of(name, root)[:1] if root is REVIEWS else folders_of(name, root)
        gap = np.mean(accuracy(first, at)) - np.mean(accuracy(folders_of(other, INTERRUPTED), at))
        gaps.append((name.removesuffix("-seed"), other.removesuffix("-seed"), f"{at:,}", f"{gap:+.2f}"))
    return beside, Table(
        title="Differences at the last round that both reached",
        columns=("first", "second", "round", "first minus second, points"),
        rows=gaps,
        note="It is not the round of any rule, so it decides nothing.",
    )


# ------------------------------------------------------------------------------------------------------------------- figures


def figures(root: Path = REVIEWS) -> list[Figure]:
    """Figures 1 and 7 on reviews_81, and the private runs by users per round; those without runs are left out."""
    seeds = {
        label.replace("sigma", "σ").removesuffix(", C = 100"): name
        for label, name in SEEDED.items()
        if name != "estimate-seed"
    }
    larger = {"5,000 users per round, S = 8": "private"}
    larger |= {f"{users:,} users per round, S = {norm}": f"z1-C{users}" for users, norm in Z1.items()}
    both = {"100 users per round": "S15-sigma0.012-seed", "1,250 users per round": "S15-sigma0.012-C1250-seed"}
    drawn = [
        _figure("figure-1-reviews", "Figure 1: 100 users per round, mean of seeds", seeds, root),
        _figure("figure-7-reviews", "Figure 7: S = 15, σ = 0.012", both, root),
        _figure("cohorts-reviews", "z = 1 by users per round", larger, root),
    ]
    return [figure for figure in drawn if len(figure.lines) > 1]


def _figure(name: str, title: str, runs: dict[str, str], root: Path) -> Figure:
    lines = []
    for label, run in runs.items():
        if folders_of(run, root):
            rounds, values = mean_curve(run, root)
            points = tuple((float(r), value / 100) for r, value in zip(rounds, values, strict=True))
            lines.append(Line(name=label, points=points))
    return Figure(name=name, title=title, x="round", lines=tuple(lines))


# ---------------------------------------------------------------------------------------------------------------------- page


def section(root: Path = REVIEWS) -> dict[str, Any] | None:
    """The private run as variables of `templates/paper.html`.

    Args:
        root: Folder of the results on reviews_81.

    Returns:
        The sentences, tables, figures and verdicts; None if there is no private run in the folder.
    """
    private = root / "private"
    if not (private / "per_user.npz").exists():
        return None
    named = {"private": [private], "without privacy": folders_of("baseline-C5000-seed", root)[:1]}
    kept = {label: folders[0] for label, folders in named.items() if folders and (folders[0] / "per_user.npz").exists()}
    suggested = {label: _suggestions(folder) for label, folder in kept.items()}
    judged = verdicts(root)
    return {
        "sentences": sentences(root),
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
        "state": state_table(root),
        "tables": [cohorts_table(root), table_2(root), figure_7_table(root)],
        "figures": figures(root),
        "rules": [registered(name, judged.get(name)) for name in RULES],
        "counts": counts_of(judged),
    }


def sentences(root: Path = REVIEWS) -> list[str]:
    """The private run in two sentences."""
    private = root / "private"
    statement = json.loads((private / "statement.json").read_text())
    seen, counts = sittings(private), load(private)
    low, high = accuracy_interval([private])
    q, done, epsilon = 5000 / POPULATION, seen[-1]["to_round"], statement["epsilon"]
    minutes = sum(one["seconds"] for one in seen) / 60
    return [
        f"{POPULATION:,} reviewers, 5,000 users per round, z = 1, S = 8 (chosen on another corpus), noise from a secure "
        f"generator. {done:,} of {ROUNDS:,} rounds in {minutes:.1f} minutes on one {seen[-1]['device']}; q = {q:.5f}, "
        f"{q * done:.1f} visits per user.",
        f"AccuracyTop1 {_share(counts, 'hits', 'targets')} (95 % interval over {len(counts['targets']):,} held-out users "
        f"{100 * low:.2f} to {100 * high:.2f} %) at epsilon {epsilon['pld']:.2f} (PLD; {epsilon['rdp']:.2f} by RDP) and "
        f"delta {statement['delta']:.2g}. A bigram model counted without privacy has "
        f"{counted_baselines(REVIEWS)['bigram']:.2f} %.",
    ]


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
        "printed": FIGURES_OF_RULES.get(name, "Curves, or the sentence alone: the paper prints no number for it."),
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


def counts_of(judged: dict[str, Verdict]) -> str:
    """How many conclusions of the paper were tested by the registered rules, each counted once, and with which result."""
    of_paper = [name for name, rule in RULES.items() if rule["counts"] == "paper"]
    tested = [judged[name] for name in of_paper if name in judged and judged[name].outcome in ("held", "did not hold")]
    held = sum(verdict.outcome == "held" for verdict in tested)
    preliminary = sum("preliminary" in verdict.reason for verdict in tested)
    few = f" ({preliminary} preliminary: fewer repetitions than required)" if preliminary else ""
    return (
        f"{len(tested)} of the paper\u2019s {len(of_paper)} conclusions are tested by rules that were registered before "
        f"the runs: {held} held, {len(tested) - held} did not hold{few}. For the other {len(of_paper) - len(tested)}, runs "
        "are missing or do not decide"
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


def _suggestions(folder: Path) -> dict[str, list[str]]:
    """What a model suggests, as `private_run.measure` recorded it."""
    return json.loads((folder / "facts.json").read_text()).get("suggestions", {})


# -------------------------------------------------------------------------------------------------------------------- report


def report() -> str:
    """The report in Markdown, paragraphs wrapped."""
    lines = "\n".join(_lines()).splitlines()
    return (
        "\n".join(line if line.startswith(("|", "    ", "#", "- ")) else textwrap.fill(line, 120) for line in lines)
        + "\n"
    )


def _lines() -> Iterator[str]:
    private, judged, rules = REVIEWS / "private", verdicts(), load_rules()["about"]
    seen = sittings(private)
    yield "# The private run on reviews_81\n"
    yield (
        "Written by `python -m reproduction.private_report` from `reproduction/results/`. Stacked engine, bfloat16, one "
        "local step (eta = 6, batch size 8, unroll 10), growing word vectors. The rules were committed on "
        f"{rules['registered']}, before the first run; every run comes from a clean commit, which its record names.\n"
    )
    yield f"{counts_of(judged)}.\n"
    yield from _markdown(state_table())
    yield (
        "S = 8 was chosen on blogs_64 by rule private-S. It is also the value that had been tried on reviews before the rules "
        "were written.\n"
    )
    yield "To repeat it:\n\n    make private-run DATA=folder-of-the-corpora\n"
    yield "## The private run\n"
    yield "\n\n".join(sentences()) + "\n"
    for one in seen:
        first_mark, last_mark = one["marks"][0], one["marks"][-1]
        seconds = last_mark["seconds"] - first_mark["seconds"]
        pace = (last_mark["round"] - first_mark["round"]) * 5000 / max(seconds, 1e-9)
        yield (
            f"- Rounds {one['from_round']:,} to {one['to_round']:,}: {one['seconds']:.0f} s, "
            f"{one['users_per_second']:,.0f} users/s ({pace:,.0f} without the start), {one['device']}, torch {one['torch']}, "
            f"{one['date']}, commit {one['commit'][:12]}."
        )
    yield ""
    statement = json.loads((private / "statement.json").read_text())
    epsilon = statement["epsilon"]
    yield (
        f"Epsilon at delta = {statement['delta']:.3g}: PLD {epsilon['pld']:.3f}, RDP {epsilon['rdp']:.3f}, moments "
        f"accountant {epsilon['moments']:.3f}.\n"
    )
    both = {"private": private, "baseline, C = 5,000": folders_of("baseline-C5000-seed")[0]}
    yield from _markdown(accuracy_table(both))
    yield from _markdown(rounds_of_private())
    yield _composed(seen[-1]["to_round"], statement["delta"]) + "\n"
    for table in (cohorts_table(), table_2(), figure_7_table()):
        yield f"## {table.title}\n"
        yield from _markdown(table)
    yield "## The interrupted first attempts\n"
    ends = [_last_round(REVIEWS / name / "baseline-seed1") for name in ("interrupted", "interrupted_second")]
    ends += [_last_round(INTERRUPTED / name) for name in ("private", "baseline-C5000-seed1")]
    yield (
        "Two attempts of Table 2 were lost, and one each of the private run and of its baseline. Their last evaluations are "
        "of rounds {:,}, {:,}, {:,} and {:,}. No models were kept, so these runs decide nothing.\n".format(*ends)
    )
    for table in interrupted_tables():
        yield f"{table.title}:\n"
        yield from _markdown(table)
    yield "## S, chosen on blogs_64 (rule private-S)\n"
    yield f"{private_norm().reason}\n"
    yield "## Verdicts\n"
    rows = [(name, verdict.outcome, verdict.reason) for name, verdict in judged.items()]
    yield from _markdown(Table(title="Verdicts", columns=("rule", "outcome", "reason"), rows=rows), numbers=False)


def _markdown(table: Table, *, numbers: bool = True) -> Iterator[str]:
    """A table in Markdown, with its note."""
    yield "| " + " | ".join(table.columns) + " |"
    yield "| --- |" + (" ---: |" if numbers else " --- |") * (len(table.columns) - 1)
    for row in table.rows:
        yield "| " + " | ".join(row) + " |"
    yield ""
    if table.note:
        yield f"{table.note}\n"


def _composed(rounds: int, delta: float) -> str:
    """The epsilon of both private attempts together, because evaluations of the first one are published too."""
    from unheard.privacy.accountants import epsilon
    from unheard.privacy.events import PoissonGaussian

    first = sum(
        '"poisson_gaussian"' in line for line in (INTERRUPTED / "private" / "ledger.jsonl").read_text().splitlines()
    )
    event = PoissonGaussian(sampling_prob=5000 / POPULATION, noise_multiplier=1.0)
    spent = {name: epsilon([(event, first + rounds)], delta, name) for name in ("pld", "rdp")}
    return (
        f"The interrupted first attempt had charged {first:,} rounds when its ledger was last copied. Both private "
        f"attempts together: PLD {spent['pld']:.3f}, RDP {spent['rdp']:.3f}. The baselines and the runs with C = 100 are "
        "experiments without a useful guarantee on the same public corpus."
    )


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a Markdown file; default: standard output")
    out = parser.parse_args().out
    if out is None:
        print(report(), end="")
    else:
        out.write_text(report(), encoding="utf-8")


if __name__ == "__main__":
    main()
