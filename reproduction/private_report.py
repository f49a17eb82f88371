"""Report the runs of `private_run.py`: a Markdown report, and the variables of a section of the page.

The inputs are the folders reviews_81, blogs_64 and reviews_1600_200k of reproduction/results. Every number is computed
from these files when the report is written. The report says which runs are missing or stopped early.

    python -m reproduction.private_report                        print the report
    python -m reproduction.private_report --out FILE.md          write it to a file

`templates/private_run.md` has the text of the report. `section` returns tables and figures for `page.py`. The verdicts
come from `private_results.py`.
"""

import argparse
import json
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from reproduction import private_tables as tables
from reproduction.bootstrap import USERS, accuracy_interval, load
from reproduction.exhibit import Figure, Line
from reproduction.printed import FIGURES_OF_RULES
from reproduction.private_results import (
    LONG,
    LONG_BLOGS,
    REVIEWS,
    RULES,
    SEEDED,
    RuleVerdict,
    charges,
    checked_statement,
    cost,
    folders_of,
    lora_charges,
    mean_curve,
    private_norm,
    sittings,
    verdicts,
)
from reproduction.private_run import Z1
from reproduction.private_tables import INTERRUPTED, POPULATION, ROUNDS
from reproduction.recipes import TRADES, TRADES_PER_LAYER
from reproduction.render_rules import TEMPLATES
from reproduction.render_rules import load as load_rules
from unheard.errors import UnheardError
from unheard.privacy.accountants import epsilon
from unheard.report.tables import Table

NOT_TESTED = "not tested yet"
"""The outcome that is shown for a rule without any complete run."""
WITHOUT_RUNS = RuleVerdict(NOT_TESTED, "No run of this rule is complete.")


def counted_baselines(root: Path = REVIEWS) -> dict[str, float]:
    """Return the AccuracyTop1, in percent, of models that count unigrams and bigrams without privacy.

    Args:
        root: Folder of the results with `counted.json`, which `private_run counted` writes.
    """
    return json.loads((root / "counted.json").read_text())["accuracy_top1"]


def figures(root: Path = REVIEWS) -> list[Figure]:
    """Return Figures 1 and 7, a figure of the private runs by users per round, and the figures on longer texts.

    A figure with fewer than two lines is left out.

    Args:
        root: Folder of the results on reviews_81.
    """
    named = {label.replace("sigma", "σ").removesuffix(", C = 100"): name for label, name in SEEDED.items()}
    seeds = {label: name for label, name in named.items() if name != "estimate-seed"}
    trades = {f"S = {norm:g}, σ = {0.0006 * norm:.4g}": f"trade-S{norm:g}-seed" for norm in TRADES}
    then = {label: name.replace("trade", "then") for label, name in trades.items()}
    then |= {f"S = {norm:g}, per layer": f"then-S{norm:g}-per-layer-seed" for norm in TRADES_PER_LAYER}
    larger = {"5,000 users per round, S = 8": "private"}
    larger |= {f"{users:,} users per round, S = {norm}": f"z1-C{users}" for users, norm in Z1.items()}
    noise, _, clips = tables.SWEEPS
    fedsgd, fedsgd_noise = tables.FEDSGD
    drawn = [
        _figure("figure-1-reviews", "Figure 1: 100 users per round, mean of seeds", seeds, root),
        _figure("figure-7-reviews", "Figure 7: S = 15, σ = 0.012", tables.FIGURE_7, root),
        _figure("cohorts-reviews", "z = 1 by users per round", larger, root),
        _figure("figure-1-long", "Figure 1 on reviews_1600_200k, mean of seeds", seeds, LONG),
        _figure("figure-3-long", "Figure 3 on reviews_1600_200k: noise at S = 20", tables.SWEEPS[noise], LONG),
        _figure("figure-2-long", "Figure 2 on reviews_1600_200k: clip without noise", tables.SWEEPS[clips], LONG),
        _figure("figure-4-long", "Figure 4 on reviews_1600_200k: S and σ changed after 4,885 rounds", then, LONG),
        _figure("figure-7-long", "Figure 7 on reviews_1600_200k: S = 15, σ = 0.012", tables.FIGURE_7, LONG),
        _figure("figure-8-long", "Figure 8 on reviews_1600_200k: noise against clipping, z = 0.06", trades, LONG),
        _figure(
            "figure-9-blogs", "Figure 9 on blogs_1600: clip of FedSGD and FedAvg", tables.FEDSGD[fedsgd], LONG_BLOGS
        ),
        _figure("figure-10-blogs", "Figure 10 on blogs_1600: noise at S = 20", tables.FEDSGD[fedsgd_noise], LONG_BLOGS),
    ]
    return [figure for figure in drawn if len(figure.lines) > 1]


def _figure(name: str, title: str, runs: dict[str, str], root: Path) -> Figure:
    """Return a figure of the mean accuracy of runs by round. Runs without results are left out.

    Args:
        name: Name of the figure.
        title: Title of the figure.
        runs: Name of each run by the label of its line.
        root: Folder of the results.
    """
    curves = {label: zip(*mean_curve(run, root), strict=True) for label, run in runs.items() if folders_of(run, root)}
    points = {label: tuple((float(r), value / 100) for r, value in curve) for label, curve in curves.items()}
    lines = tuple(Line(name=label, points=drawn) for label, drawn in points.items())
    return Figure(name=name, title=title, x="round", lines=lines)


def section(root: Path = REVIEWS) -> dict[str, Any] | None:
    """Return the variables of `templates/paper.html` for the section on the private run.

    Args:
        root: Folder of the results on reviews_81.

    Returns:
        The sentences, tables, figures and verdicts; None if there is no private run in the folder.
    """
    private = root / "private"
    if not (private / USERS).exists():
        return None
    kept, judged = {"private": private}, verdicts(root)
    if (baselines := folders_of("baseline-C5000-seed", root)) and (baselines[0] / USERS).exists():
        kept["without privacy"] = baselines[0]
    return {
        "sentences": sentences(root),
        "cost": _cost(kept, root),
        "accuracy": tables.accuracy_table(kept),
        "suggestions": _suggestions(kept),
        "state": tables.state_table(root),
        "missing": missing_steps(),
        "tables": tables.all_tables(root),
        "figures": figures(root),
        "rules": [registered(name, judged.get(name)) for name in RULES],
        "counts": counts_of(judged),
        "vectors": readings_of_vectors(),
    }


def sentences(root: Path = REVIEWS) -> list[str]:
    """Return two texts that summarise the private run: its settings and time, then its accuracy and epsilon."""
    private = root / "private"
    statement = checked_statement(private)
    seen, counts = sittings(private), load(private)
    low, high = accuracy_interval([private])
    q, done, stated = 5000 / POPULATION, seen[-1]["to_round"], statement["epsilon"]
    return [
        f"{POPULATION:,} reviewers, 5,000 users per round, z = 1, noise from a secure generator. S = 8 was chosen on another "
        f"corpus by a registered rule; it had also been tried on these reviews before. {done:,} of {ROUNDS:,} rounds in "
        f"{tables.minutes(seen):.1f} minutes on one {seen[-1]['device']}, {seen[-1]['date']}; q = {q:.5f}, {q * done:.1f} "
        "visits per user.",
        f"AccuracyTop1 {tables.share(counts)} (95 % interval over {len(counts['targets']):,} held-out users "
        f"{100 * low:.2f} to {100 * high:.2f} %) at epsilon {stated['pld']:.2f} (PLD; {stated['rdp']:.2f} by RDP) and "
        f"delta {statement['delta']:.2g}. A bigram model counted without privacy has "
        f"{counted_baselines(REVIEWS)['bigram']:.2f} %.",
    ]


def registered(name: str, verdict: RuleVerdict | None) -> dict[str, Any]:
    """Return one registered rule with its verdict, as variables of `templates/paper.html`.

    Args:
        name: Name of the rule.
        verdict: Its verdict; None if none of its runs exist.
    """
    rule, sizes = RULES[name], "No training."
    population = {corpus["name"]: corpus["population"] for corpus in load_rules()["corpus"]}.get(rule["corpus"])
    if population is not None:
        q = rule["users_per_round"] / population
        sizes = (
            f"{rule['corpus']}: {rule['users_per_round']:,} of {population:,} users per round, {rule['rounds']:,} rounds; "
            f"q = {q:.2g}, {q * rule['rounds']:.2g} visits per user; seeds required: {rule['seeds']}."
        )
    seen = verdict or WITHOUT_RUNS
    kind = {NOT_TESTED: "cannot tell"}.get(seen.outcome, "held" if seen.outcome.startswith("chosen") else seen.outcome)
    return rule | {
        "name": name,
        "printed": FIGURES_OF_RULES.get(name, "Curves, or the sentence alone: the paper prints no number for it."),
        "sizes": sizes,
        "outcome": seen.outcome,
        "is_tested": seen.outcome in ("held", "did not hold"),
        "outcome_class": kind.replace(" ", "-"),
        "reason": seen.reason,
    }


def counts_of(judged: dict[str, RuleVerdict]) -> str:
    """Return a sentence without its full stop: how many conclusions of the paper were tested, held, and are undecided.

    Args:
        judged: The verdict of each rule.
    """
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


def missing_steps() -> Table:
    """Return a table of the steps of `schedule.toml` that are not complete, in the order in which they will be run."""
    steps = tomllib.loads((Path(__file__).parent / "schedule.toml").read_text(encoding="utf-8"))["step"]
    rows = [
        (
            step["name"],
            ", ".join(step["rules"]) or step["repetitions"],
            step["corpus"],
            f"{step['minutes']}",
            step["state"],
        )
        for step in steps
        if not step["state"].startswith("complete")
    ]
    columns = ("step", "rules", "corpus", "minutes, estimated", "state")
    note = "In the order of reproduction/schedule.toml. Minutes are for one NVIDIA H200."
    return Table(title="What is missing", columns=columns, rows=rows, note=note)


def readings_of_vectors() -> str:
    """Return a text on which reading of the paper's sentence on word vectors the counts use, as it was registered."""
    vectors = load_rules()["word_vectors"]
    first, second, _ = vectors["chronology"]
    seen = "" if folders_of("step-baseline-seed", LONG_BLOGS) else "; it has no runs yet"
    return (
        f"The counts are for one of three readings of the paper's sentence “{vectors['sentence']}”. {first} {second} All runs "
        "on reviews use the second reading. Third reading: the vectors are projected to norm 1 after each local step "
        f"(model.step_norm = true){seen}. {vectors['units']}"
    )


def _cost(kept: dict[str, Path], root: Path) -> str:
    """Return what privacy cost in accuracy and in time, as the end of a sentence.

    Args:
        kept: Run folders by label, the private run first and its baseline second, if there is one.
        root: Folder of the results with all repetitions of both.
    """
    apart = cost("private", "baseline-C5000-seed", ROUNDS, root)
    if len(kept) < 2 or apart is None:
        return "and accuracy that is not known yet, because its baseline is missing"
    taken = " instead of ".join(f"{tables.minutes(sittings(folder)):.1f}" for folder in kept.values())
    return (
        f"{apart} points of AccuracyTop1 against the same users per round without clip and noise (95 % interval; all "
        f"repetitions, read by the rules), and {taken} minutes"
    )


def _suggestions(kept: dict[str, Path]) -> Table:
    """Return a table of the words that each model suggests after `measures.PROMPTS`, from `facts.json`."""
    facts = {label: json.loads((folder / "facts.json").read_text()) for label, folder in kept.items()}
    suggested = {label: fact.get("suggestions", {}) for label, fact in facts.items()}
    rows = [(text, *(", ".join(words.get(text, ())) for words in suggested.values())) for text in suggested["private"]]
    return Table(title="The three words that each model suggests", columns=("", *suggested), rows=rows)


def report() -> str:
    """Return the report in Markdown, with paragraphs wrapped at 120 characters."""
    private, judged = REVIEWS / "private", verdicts()
    statement = checked_statement(private)
    ends = [REVIEWS / name / "baseline-seed1" for name in ("interrupted", "interrupted_second")]
    ends += [INTERRUPTED / name for name in ("private", "baseline-C5000-seed1")]
    *first_ends, last_end = (f"{tables.last_round(folder):,}" for folder in ends)
    every_rule = {name: judged.get(name, WITHOUT_RUNS) for name in (*judged, *RULES)}
    verdict_rows = [(name, verdict.outcome, verdict.reason) for name, verdict in every_rule.items()]
    text = TEMPLATES.get_template("private_run.md").render(
        registered=load_rules()["about"]["registered"],
        counts=counts_of(judged),
        vectors=readings_of_vectors(),
        state=tables.state_table(),
        missing=missing_steps(),
        sentences=sentences(),
        sittings=[one | {"pace": _pace(one)} for one in sittings(private)],
        statement=statement,
        accuracy=tables.accuracy_table(
            {"private": private, "baseline, C = 5,000": folders_of("baseline-C5000-seed")[0]}
        ),
        by_round=tables.rounds_of_private(),
        composed=composed(statement["delta"]),
        tables=tables.all_tables(),
        interrupted=tables.interrupted_tables(),
        interrupted_at=f"{', '.join(first_ends)} and {last_end}",
        chosen=private_norm().reason,
        verdicts=Table(title="Verdicts", columns=("rule", "outcome", "reason"), rows=verdict_rows),
    )
    is_whole = ("|", "    ", "#", "- ")
    return "\n".join(s if s.startswith(is_whole) else textwrap.fill(s, 120) for s in text.rstrip().splitlines()) + "\n"


def _pace(sitting: dict[str, Any]) -> float:
    """Return the users per second of a session between its first and last evaluation, which leaves out its start."""
    first, last = sitting["marks"][0], sitting["marks"][-1]
    return (last["round"] - first["round"]) * 5000 / max(last["seconds"] - first["seconds"], 1e-9)


def composed(delta: float, root: Path = REVIEWS) -> dict[str, Any]:
    """Return the epsilon of all private runs together, by two accountants, with the charged rounds of each run.

    Their results are published together, so their costs add up. The rounds of the interrupted run count as well.

    Args:
        delta: The delta of the claim.
        root: Folder of the results on reviews_81.
    """
    runs = [
        folder
        for name in ("private", "public-start", "epsilon", *(f"z1-C{users}" for users in Z1))
        for folder in folders_of(name, root)
    ]
    charged = {folder.name: charges(folder) for folder in runs if (folder / "ledger.jsonl").exists()}
    charged |= lora_charges(root)
    lost = charges(INTERRUPTED / "private")
    events = [*lost, *(one for each in charged.values() for one in each)]
    listed = ", ".join(f"{name} ({sum(n for _, n in each):,})" for name, each in charged.items())
    together = {name: epsilon(events, delta, name) for name in ("pld", "rdp")}
    return {"lost": sum(n for _, n in lost), "charged": listed, **together}


def main() -> None:
    """Run the command line of this module: print the report, or write it to the file `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a Markdown file; default: standard output")
    out = parser.parse_args().out
    try:
        text = report()
    except UnheardError as error:
        parser.exit(2, f"{error}\n")
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
