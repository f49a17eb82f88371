"""Tables of the runs of `private_run.py`, from the files under reproduction/results.

`private_report.py` puts them into the report and onto the page. A cell without a run says so.

    cohorts_table()            the private runs at z = 1 by users per round, with their costs
    table_2(), figure_7_table(), trade_offs_tables()
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reproduction.bootstrap import POSTS, USERS, difference_interval, load
from reproduction.printed import BASELINE_ACCURACY, TABLE_2
from reproduction.private_results import (
    BLOGS,
    LONG,
    REVIEWS,
    SEEDED,
    accuracy,
    charges,
    complete,
    cost,
    folders_of,
    sittings,
    spent,
)
from reproduction.private_run import (
    MORE_STEPS,
    POPULATIONS,
    STEPS,
    TRADES,
    TRADES_PER_LAYER,
    Z1,
    read_metrics,
    runs_of,
    smoothed,
)
from unheard.report.tables import Table

POPULATION = POPULATIONS["reviews_81"]
INTERRUPTED = REVIEWS / "interrupted"
ROUNDS = 5000
"""Rounds of Table 2 and of the private runs."""
NOT_RUN = "not run"
"""A cell without a run."""
EARLY_MARKS = (100, 500, 1000, 1400, 1700, 2200)
"""Rounds in the table of the interrupted runs."""
WAYS = {
    "AccuracyTop1": (USERS, ("targets", "hits")),
    "without sentence ends": (USERS, ("words", "word_hits")),
    "also without punctuation": (USERS, ("plain", "plain_hits")),
    "random posts": (POSTS, ("targets", "hits")),
}
"""Ways of counting that are reported beside AccuracyTop1: the file with the counts, the names of targets and hits."""


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
        whole, stopped = sum(one >= wanted for one in done), [one for one in done if one < wanted]
        states = [f"{whole} complete"] if whole else []
        states += [f"stopped at {', '.join(f'{one:,}' for one in stopped)} of {wanted:,}"] if stopped else []
        reached = "; ".join(states)
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
    printed = {row.users_per_round: row for row in TABLE_2[1:4]}
    rows = []
    for users, clip in ((5000, 8), *Z1.items()):
        name = "private" if users == 5000 else f"z1-C{users}"
        q, row, whole = users / POPULATION, printed[users], complete(name, ROUNDS, root)
        epsilons = [f"{spent(whole, POPULATION**-1.1, by):.2f}" for by in ("pld", "rdp")] if whole else []
        rows.append(
            (
                f"C = {users:,}, S = {clip}, σ = {clip / users:.2g}",
                f"{q:.2g}",
                f"{q * ROUNDS:.1f}",
                " / ".join(epsilons) or NOT_RUN,
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
        "intervals of the cost. ε at δ = 3.4e-7, the largest of the repetitions; the paper's at δ = 1e-9 for 763,430 users, "
        "with S = 15, 10 and 15. The paper estimated the costs of 5,000 and 1,667 users per round with 100 users per round, "
        "and trained 1,250.",
    )


def repetitions_table(root: Path = REVIEWS) -> Table:
    """Each repetition of the private runs and of their baselines."""
    rows = []
    for users in (5000, *Z1):
        for name in ("private" if users == 5000 else f"z1-C{users}", f"baseline-C{users}-seed"):
            for folder in folders_of(name, root):
                counts = load(folder) if (folder / "per_user.npz").exists() else None
                is_noised = not name.endswith("-seed") and counts is not None
                epsilons = [spent([folder], POPULATION**-1.1, by) for by in ("pld", "rdp")] if is_noised else []
                charged = sum(count for _, count in charges(folder)) if is_noised else None
                records = sittings(folder) if (folder / "sittings.jsonl").exists() else []
                rows.append(
                    (
                        folder.name,
                        _mean_cell([folder], ROUNDS),
                        "" if counts is None else share(counts, "hits", "targets"),
                        " / ".join(f"{value:.2f}" for value in epsilons),
                        "" if charged is None else f"{charged:,}",
                        f"{sum(one['seconds'] for one in records) / 60:.1f}",
                        ", ".join(dict.fromkeys(f"{one['date']} {one['commit'][:9]}" for one in records)),
                    )
                )
    return Table(
        title="Each repetition",
        columns=("run", "by the rules", "last model", "ε, PLD / RDP", "rounds charged", "minutes", "date, commits"),
        rows=rows,
        note="Private runs have secure noise, so a repetition has no seed; baselines have the seed of their name.",
    )


def trade_offs_tables(root: Path = REVIEWS) -> list[Table]:
    """Figures 4 and 8: noise traded against clipping, and changed after 4,885 rounds; those without runs are left out.

    Args:
        root: Folder of the results, which has the name of the corpus.
    """
    population = POPULATIONS.get(root.name, POPULATION)
    early, later = (500, 1000, 2000, 4000, 4885), (500, 1000, 3000, 6000)
    first = [
        (f"S = {norm:g}, σ = {round(0.0006 * norm, 6):g}", *(_mean_cell(folders, at) for at in early))
        for norm in TRADES
        if (folders := folders_of(f"trade-S{norm:g}-seed", root))
    ]
    then = [
        (f"S = {norm:g}, {kind}", *(_mean_cell(folders, at) for at in later))
        for kind, label, norms in (("flat", "", TRADES), ("per layer", "-per-layer", TRADES_PER_LAYER))
        for norm in norms
        if (folders := folders_of(f"then-S{norm:g}{label}-seed", root))
    ]
    on, q = "" if root != LONG else f" on {root.name}", 100 / population
    note = f"100 users per round: q = {q:.2g}. ± is the standard deviation over seeds."
    tables = [
        Table(
            title=f"Figure 8: noise against clipping at z = 0.06, from the start{on}",
            columns=("", *(f"round {at:,}" for at in early)),
            rows=first,
            note=f"{note} {q * 4885:.2g} visits per user.",
        ),
        Table(
            title=f"Figure 4: noise and clip changed after 4,885 rounds with S = 20{on}",
            columns=("", *(f"{at:,} rounds later" for at in later)),
            rows=then,
            note=f"{note} {q * 10885:.2g} visits per user.",
        ),
    ]
    return [table for table in tables if table.rows]


def table_2(root: Path = REVIEWS) -> Table:
    """Table 2 with 100 users per round: the paper's accuracies and ours.

    Args:
        root: Folder of the results, which has the name of the corpus.
    """
    printed = {row.noise_std: row.accuracy for row in TABLE_2}
    q, rows = 100 / POPULATIONS.get(root.name, POPULATION), []
    for label, name in SEEDED.items():
        folders = folders_of(name, root)
        if name == "estimate-seed" and root == LONG:
            continue
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
        title="Table 2 with 100 users per round, as the paper trained it"
        + ("" if root != LONG else f" on {root.name}"),
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


def long_tables(root: Path = LONG) -> list[Table]:
    """Table 2 and Figures 4 and 8 on reviews_1600_200k; those without runs are left out."""
    return [*([table_2(root)] if folders_of("baseline-seed", root) else []), *trade_offs_tables(root)]


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


def last_round(folder: Path) -> int:
    """The round of the last evaluation of a run."""
    return read_metrics(folder)[-1]["round"]


def _exposure(users: int, rounds: int) -> str:
    q = users / POPULATION
    return f"{q:.2g}, {q * rounds:.2g}"


def _mean_cell(folders: Sequence[Path], at: int) -> str:
    """Mean accuracy of the repetitions at a round, with their standard deviation, or why there is none."""
    if not folders:
        return NOT_RUN
    values = accuracy(folders, at)
    if not values:
        return f"stopped at {max(last_round(folder) for folder in folders):,}"
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
        rows.append(("difference, points", *(difference_cell(folders[0], folders[1], way) for way in WAYS)))
    posts = load(folders[0], POSTS)["targets"] if (folders[0] / POSTS).exists() else None
    note = "Differences with 95 % intervals: paired bootstrap over users, and over posts in the last column."
    if posts is not None:
        note += f" Random posts: {len(posts):,} posts of held-out users with {posts.sum():,} predicted tokens, as the paper."
    return Table(title="The last models on all held-out users", columns=("", *WAYS), rows=rows, note=note)


def _accuracy_cell(folder: Path, way: str) -> str:
    """The accuracy of a model by one way of counting."""
    file_name, (targets, hits) = WAYS[way]
    return share(load(folder, file_name), hits, targets) if (folder / file_name).exists() else "not measured"


def difference_cell(first: Path, second: Path, way: str) -> str:
    """The accuracy of the first model minus that of the second, with its interval."""
    file_name, kind = WAYS[way]
    if any(not (folder / file_name).exists() for folder in (first, second)):
        return "not measured"
    shares = [load(folder, file_name) for folder in (first, second)]
    apart = [100 * counts[kind[1]].sum() / counts[kind[0]].sum() for counts in shares]
    low, high = difference_interval([first], [second], file_name, kind)
    return f"{apart[0] - apart[1]:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"


def share(counts: Any, hits: str, of: str) -> str:
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
