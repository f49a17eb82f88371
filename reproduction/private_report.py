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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reproduction.bootstrap import accuracy_interval, load
from reproduction.exhibit import Figure, Line
from reproduction.printed import FIGURES_OF_RULES
from reproduction.private_results import (
    REVIEWS,
    RULES,
    SEEDED,
    RuleVerdict,
    charges,
    folders_of,
    mean_curve,
    private_norm,
    sittings,
    verdicts,
)
from reproduction.private_run import Z1
from reproduction.private_tables import (
    INTERRUPTED,
    POPULATION,
    ROUNDS,
    accuracy_table,
    cohorts_table,
    difference_cell,
    figure_7_table,
    interrupted_tables,
    last_round,
    long_tables,
    repetitions_table,
    rounds_of_private,
    share,
    state_table,
    table_2,
    trade_offs_tables,
)
from reproduction.render_rules import load as load_rules
from unheard.privacy.accountants import epsilon
from unheard.report.tables import Table

NOT_TESTED = "not tested yet"
"""The outcome of a rule whose runs do not exist."""


def counted_baselines(root: Path = REVIEWS) -> dict[str, float]:
    """AccuracyTop1 in % of the unigram and the bigram model, counted without privacy (`private_run counted`)."""
    return json.loads((root / "counted.json").read_text())["accuracy_top1"]


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
        "tables": [
            cohorts_table(root),
            repetitions_table(root),
            table_2(root),
            figure_7_table(root),
            *trade_offs_tables(root),
            *long_tables(),
        ],
        "figures": figures(root),
        "rules": [registered(name, judged.get(name)) for name in RULES],
        "counts": counts_of(judged),
        "vectors": readings_of_vectors(),
    }


def sentences(root: Path = REVIEWS) -> list[str]:
    """The private run in two sentences."""
    private = root / "private"
    statement = json.loads((private / "statement.json").read_text())
    seen, counts = sittings(private), load(private)
    low, high = accuracy_interval([private])
    q, done, stated = 5000 / POPULATION, seen[-1]["to_round"], statement["epsilon"]
    minutes = sum(one["seconds"] for one in seen) / 60
    return [
        f"{POPULATION:,} reviewers, 5,000 users per round, z = 1, S = 8 (chosen on another corpus), noise from a secure "
        f"generator. {done:,} of {ROUNDS:,} rounds in {minutes:.1f} minutes on one {seen[-1]['device']}; q = {q:.5f}, "
        f"{q * done:.1f} visits per user.",
        f"AccuracyTop1 {share(counts, 'hits', 'targets')} (95 % interval over {len(counts['targets']):,} held-out users "
        f"{100 * low:.2f} to {100 * high:.2f} %) at epsilon {stated['pld']:.2f} (PLD; {stated['rdp']:.2f} by RDP) and "
        f"delta {statement['delta']:.2g}. A bigram model counted without privacy has "
        f"{counted_baselines(REVIEWS)['bigram']:.2f} %.",
    ]


def registered(name: str, verdict: RuleVerdict | None) -> dict[str, str]:
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


def counts_of(judged: dict[str, RuleVerdict]) -> str:
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


def readings_of_vectors() -> str:
    """Which reading of the paper's sentence on word vectors these counts are for, and how it was chosen, as registered."""
    vectors = load_rules()["word_vectors"]
    first, second, _ = vectors["chronology"]
    return (
        f"The counts are for one of three readings of the paper's sentence “{vectors['sentence']}”. {first} {second} All runs "
        "on reviews use the second reading. Third reading: the vectors are projected to norm 1 after each local step "
        f"(`model.step_norm`); it has no runs yet. {vectors['units']}"
    )


def _cost(kept: dict[str, Path]) -> str:
    """What privacy cost in accuracy and in time, in words."""
    if len(kept) < 2:
        return "and accuracy that is not known yet, because its baseline is missing"
    seconds = [sum(one["seconds"] for one in sittings(folder)) for folder in kept.values()]
    first, second, *_ = kept.values()
    apart = difference_cell(first, second, "AccuracyTop1")
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
    yield f"{readings_of_vectors()}\n"
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
    stated = statement["epsilon"]
    yield (
        f"Epsilon at delta = {statement['delta']:.3g}: PLD {stated['pld']:.3f}, RDP {stated['rdp']:.3f}, moments "
        f"accountant {stated['moments']:.3f}.\n"
    )
    both = {"private": private, "baseline, C = 5,000": folders_of("baseline-C5000-seed")[0]}
    yield from _markdown(accuracy_table(both))
    yield from _markdown(rounds_of_private())
    yield _composed(statement["delta"]) + "\n"
    tables = [cohorts_table(), repetitions_table(), table_2(), figure_7_table(), *trade_offs_tables(), *long_tables()]
    for table in tables:
        yield f"## {table.title}\n"
        yield from _markdown(table)
    yield "## The interrupted first attempts\n"
    ends = [last_round(REVIEWS / name / "baseline-seed1") for name in ("interrupted", "interrupted_second")]
    ends += [last_round(INTERRUPTED / name) for name in ("private", "baseline-C5000-seed1")]
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


def _composed(delta: float) -> str:
    """The epsilon of all private runs together, because their results are published together."""
    runs = {name: folders_of(name) for name in ("private", *(f"z1-C{users}" for users in Z1))}
    folders = [folder for repeated in runs.values() for folder in repeated if (folder / "ledger.jsonl").exists()]
    lost = charges(INTERRUPTED / "private")
    events = [*lost, *(charged for folder in folders for charged in charges(folder))]
    together = {name: epsilon(events, delta, name) for name in ("pld", "rdp")}
    listed = ", ".join(f"{folder.name} ({sum(n for _, n in charges(folder)):,})" for folder in folders)
    return (
        f"The interrupted first attempt had charged {sum(n for _, n in lost):,} rounds when its ledger was last copied. It "
        f"and all private runs with the rounds that they were charged, {listed}, cost their users together: PLD "
        f"{together['pld']:.3f}, RDP {together['rdp']:.3f}. The baselines and the runs with C = 100 are experiments without a "
        "useful guarantee on the same public corpus."
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
