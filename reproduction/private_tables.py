"""Build the tables of the runs of `private_run.py` from the files under reproduction/results.

`private_report.py` shows these tables in the report and on the page. The cell of a run without results says so.

    cohorts_table()                                     # private runs with z = 1 by users per round, with their costs
    table_2(), figure_7_table(), trade_offs_tables()    # tables and figures of the paper
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from reproduction import private_run
from reproduction.bootstrap import POSTS, USERS, difference_interval, load
from reproduction.exhibit import NOT_RUN
from reproduction.printed import BASELINE_ACCURACY, REDDIT, TABLE_2
from reproduction.private_results import (
    BLOGS,
    HEADS,
    LONG,
    LONG_BLOGS,
    NO_CLIP,
    NOISED,
    OF_READINGS,
    OTHER_MODELS,
    REVIEWS,
    SEEDED,
    accuracy,
    charges,
    complete,
    cost,
    folders_of,
    lora_results,
    mean_head_words,
    sittings,
    spent,
    verdict_of_reading,
    word_hits,
)
from reproduction.recipes import CLIPS, SWEPT_CLIPS, SWEPT_NOISES, TRADES, TRADES_PER_LAYER
from unheard.report.tables import Table

POPULATION = private_run.POPULATIONS["reviews_81"]
"""Declared population of reviews_81."""
INTERRUPTED = REVIEWS / "interrupted"
"""Results of first attempts that were interrupted, and whose models were lost."""
ROUNDS = 5000
"""Number of rounds of Table 2 and of the private runs."""
FIGURE_7 = {"100 users per round": "S15-sigma0.012-seed", "1,250 users per round": "S15-sigma0.012-C1250-seed"}
"""The runs of Figure 7: the prefix of their folders by label."""
WAYS = {
    "AccuracyTop1": (USERS, ("targets", "hits")),
    "without sentence ends": (USERS, ("words", "word_hits")),
    "also without punctuation": (USERS, ("plain", "plain_hits")),
    "random posts": (POSTS, ("targets", "hits")),
}
"""Ways to count accuracy: by the title of the column, the file with the counts and the names of targets and hits."""


def all_tables(root: Path = REVIEWS) -> list[Table]:
    """Return the tables of results on reviews_81, reviews_1600_200k and blogs_1600. Tables without runs are left out.

    Args:
        root: Folder of the results on reviews_81.
    """
    long = [table_2(LONG), figure_7_table(LONG)] if folders_of("baseline-seed", LONG) else []
    more = [*figure_6_table(LONG), *table_3(LONG), *dictionaries_tables(LONG), *fedsgd_tables(LONG_BLOGS)]
    more += [*readings_tables(LONG_BLOGS), *text_tables(LONG_BLOGS)]
    reviews = [cohorts_table(root), *far_tables(root), repetitions_table(root), table_2(root), figure_7_table(root)]
    return [*reviews, *trade_offs_tables(root), *long, *trade_offs_tables(LONG), *sweep_tables(LONG), *more]


def state_table(root: Path = REVIEWS) -> Table:
    """Return a table of what was run: for each step the state of its runs, minutes, users per second, date, commits."""
    rows = []
    homes = dict.fromkeys(("private", *private_run.STEPS, *private_run.MORE_STEPS), root) | {"choose-S": BLOGS}
    homes |= (
        {"public": BLOGS}
        | dict.fromkeys(private_run.LONG_STEPS, LONG)
        | dict.fromkeys(private_run.BLOGS_STEPS, LONG_BLOGS)
    )
    for step, home in homes.items():
        runs = private_run.named_runs(step, BLOGS)
        wanted = {home / name: run.rounds for name, (run, _) in runs.items()}
        wanted |= {folder: run.rounds for name, (run, _) in runs.items() for folder in root.glob(f"{name}-repetition*")}
        records = {folder: sittings(folder) for folder in wanted if (folder / "sittings.jsonl").exists()}
        if not records:
            rows.append((step, f"{len(runs)}", NOT_RUN, "", "", ""))
            continue
        done = {folder: record[-1]["to_round"] for folder, record in records.items()}
        stopped = sorted((at, wanted[folder]) for folder, at in done.items() if at < wanted[folder])
        states = [f"{whole} complete"] if (whole := len(done) - len(stopped)) else []
        if stopped:
            (first, rounds), (last, _) = stopped[0], stopped[-1]
            states.append(f"{len(stopped)} stopped at {first:,}{f' to {last:,}' if last > first else ''} of {rounds:,}")
        if absent := sum(home / name not in records for name in runs):
            states.append(f"{absent} not run")
        seen = next(iter(records.values()))
        pace = sum(one["users_per_second"] * one["seconds"] for one in seen) / sum(one["seconds"] for one in seen)
        everything = [one for record in records.values() for one in record]
        commits = ", ".join(dict.fromkeys(one["commit"][:9] for one in everything))
        figures = (f"{minutes(seen):.1f}", f"{pace:,.0f}", f"{max(one['date'] for one in everything)}, {commits}")
        rows.append((step, f"{len(runs)}", "; ".join(states), *figures))
    return Table(
        title="What was run",
        columns=("step", "runs", "state", "minutes", "users/s", "date, commits"),
        rows=rows,
        note="Minutes and users/s are those of the first run of a step and of the runs that trained side by side with it, "
        "with start and evaluations, on one NVIDIA H200. Table 2 ran as five processes of three seeds at the same time; "
        "z1-C1667 and baseline-C1667 shared the GPU with C1250 and z1-C1250. The steps `long-…` are on reviews_1600_200k; 5 to "
        "16 of their processes shared the GPU. The steps from `fedsgd-clipping` on are on blogs_1600; 11 to 16 processes of "
        "`fedsgd-…` shared the GPU.",
    )


def cohorts_table(root: Path = REVIEWS) -> Table:
    """Return a table of the private runs with z = 1 by users per round, with baselines and the paper's Table 2."""
    printed = {row.users_per_round: row for row in TABLE_2[1:4]}
    rows = []
    for users, clip in ((5000, 8), *private_run.Z1.items()):
        name, baseline = _z1_runs(users)
        q, row, whole = users / POPULATION, printed[users], complete(name, ROUNDS, root)
        sizes = (f"C = {users:,}, S = {clip}, σ = {clip / users:.2g}", f"{q:.2g}", f"{q * ROUNDS:.1f}")
        means = (_mean_cell(folders_of(run, root), ROUNDS) for run in (name, baseline))
        ours = (_epsilons(whole) or NOT_RUN, *means, cost(name, baseline, ROUNDS, root) or "")
        paper = row.epsilon.digits if row.epsilon else "", f"{100 * (BASELINE_ACCURACY - row.accuracy):.2f}"
        rows.append((*sizes, *ours, *paper))
    columns = ("q", "visits", "ε, PLD / RDP", "private", "no privacy", "cost, points", "paper: ε", "paper: cost")
    return Table(
        title="z = 1 on 750,947 users, 5,000 rounds, secure noise",
        columns=("", *columns),
        rows=rows,
        note="C is users per round; visits are per user. AccuracyTop1 after 5,000 rounds as the rules define it, with 95 % "
        "intervals of the cost. ε at δ = 3.4e-7, the largest of the repetitions; the paper's at δ = 1e-9 for 763,430 users, "
        "with S = 15, 10 and 15. The paper estimated the costs of 5,000 and 1,667 users per round with 100 users per round, "
        "and trained 1,250.",
    )


def far_tables(root: Path = REVIEWS) -> list[Table]:
    """Return tables of how far one can go: by epsilon the accuracy of the LSTM, of a fine-tuned SmolLM2, and next words.

    Tables without results are left out.

    Args:
        root: Folder of the results on reviews_81.
    """
    kinds, tables, q = ("independent", "correlated", "public-independent", "public-correlated"), [], 5000 / POPULATION
    rows = []
    for epsilon in private_run.FAR:
        runs = {kind: folders_of(f"epsilon{epsilon}-{kind}", root) for kind in kinds}
        whole = [
            folder for folders in runs.values() for folder in folders if folder in complete(folder.name, ROUNDS, root)
        ]
        if any(runs.values()):
            gain = cost(f"epsilon{epsilon}-independent", f"epsilon{epsilon}-correlated", ROUNDS, root)
            cells = (_mean_cell(folders, ROUNDS) for folders in runs.values())
            rows.append((f"ε = {epsilon}", *cells, gain or "", _epsilons(whole)))
    columns = (
        "",
        "independent",
        "correlated",
        "public, independent",
        "public, correlated",
        "gain, points",
        "ε, PLD / RDP",
    )
    note = f"5,000 users per round, 5,000 rounds, S = 8: q = {q:.2g}, {q * ROUNDS:.1f} visits per user. δ = 3.4e-7. Public: "
    note += "started from a model of blogs. Gain: correlated minus independent noise, with its 95 % interval."
    title = "How far one can go: accuracy of the LSTM by ε and kind of noise"
    tables += [Table(title=title, columns=columns, rows=rows, note=note)] if rows else []
    rows, lines = [], lora_results(root)
    for key in ("base", None, *private_run.FAR):
        some = lines.get(key, [])
        top = [100 * line["metrics"]["accuracy_top1"] for line in some]
        cells = {"base": ("not fine-tuned", "", "", ""), None: ("no noise", "", "")}.get(key, (f"ε = {key}",))
        if some and key not in ("base", None):
            cells += (f"{max(line['claimed']['epsilon'] for line in some):.2f}", f"{some[0]['noise_multiplier']:.3f}")
        if some and key != "base":
            q, rounds = some[0]["settings"]["users_per_round"] / some[0]["population"], some[0]["settings"]["rounds"]
            cells += (f"{q:.2g}, {q * rounds:.2g}",)
        spread = f" ± {np.std(top, ddof=1):.2f}" if len(top) > 1 else ""
        rows += [(cells[0], f"{len(some)}", f"{np.mean(top):.2f}{spread} %", *cells[1:])] if some else []
    columns = ("", "runs", "top-1 per token", "ε spent", "z", "q, visits per user")
    note = (
        "135 million parameters, LoRA of rank 8, by benchmarks/llm_finetuning.py. Its tokens are pieces of words: the "
    )
    note += "figures do not compare with those of the LSTM. The base may have read these reviews."
    title = "How far one can go: SmolLM2 fine-tuned on reviews_81"
    tables += [Table(title=title, columns=columns, rows=rows, note=note)] if rows else []
    rows = [(name, f"{len(hits):,}", f"{100 * np.mean(hits):.1f} %") for name, hits in word_hits(root).items()]
    title, columns = "How far one can go: next words that the keyboard suggests first", ("model", "places", "right")
    return tables + ([Table(title=title, columns=columns, rows=rows)] if rows else [])


def repetitions_table(root: Path = REVIEWS) -> Table:
    """Return a table with one row per repetition of the private runs and of their baselines."""
    rows, names = [], [name for users in (5000, *private_run.Z1) for name in _z1_runs(users)]
    for folder in (folder for name in names for folder in folders_of(name, root)):
        is_measured = (folder / USERS).exists()
        is_noised = is_measured and not folder.name.startswith("baseline")
        records = sittings(folder) if (folder / "sittings.jsonl").exists() else []
        rows.append(
            (
                folder.name,
                _mean_cell([folder], ROUNDS),
                share(load(folder)) if is_measured else "",
                _epsilons([folder]) if is_noised else "",
                f"{sum(count for _, count in charges(folder)):,}" if is_noised else "",
                f"{minutes(records):.1f}",
                ", ".join(dict.fromkeys(f"{one['date']} {one['commit'][:9]}" for one in records)),
            )
        )
    return Table(
        title="Each repetition",
        columns=("run", "by the rules", "last model", "ε, PLD / RDP", "rounds charged", "minutes", "date, commits"),
        rows=rows,
        note="Private runs have secure noise, so a repetition has no seed; baselines have the seed of their name.",
    )


def _z1_runs(users: int) -> tuple[str, str]:
    """Return the names of the private run with z = 1 and of its baseline, for a number of users per round."""
    return "private" if users == 5000 else f"z1-C{users}", f"baseline-C{users}-seed"


def _epsilons(folders: Sequence[Path]) -> str:
    """Return the largest epsilon of some private runs, by PLD and by RDP, as text; empty if there are none."""
    return " / ".join(f"{spent(folders, POPULATION**-1.1, by):.2f}" for by in ("pld", "rdp")) if folders else ""


def trade_offs_tables(root: Path = REVIEWS) -> list[Table]:
    """Return tables of Figure 8 (noise traded against clipping) and Figure 4 (both changed after 4,885 rounds).

    Tables without runs are left out.

    Args:
        root: Folder of the results, which has the name of the corpus.
    """
    early, later = (500, 1000, 2000, 4000, 4885), (500, 1000, 3000, 6000)
    first = {f"S = {norm:g}, σ = {round(0.0006 * norm, 6):g}": f"trade-S{norm:g}-seed" for norm in TRADES}
    then = {f"S = {norm:g}, flat": f"then-S{norm:g}-seed" for norm in TRADES}
    then |= {f"S = {norm:g}, per layer": f"then-S{norm:g}-per-layer-seed" for norm in TRADES_PER_LAYER}
    on, q = _on(root), _q(root)
    note = f"100 users per round: q = {q:.2g}. ± is the standard deviation over seeds."
    figure_8 = f"Figure 8: noise against clipping at z = 0.06, from the start{on}"
    figure_4 = f"Figure 4: noise and clip changed after 4,885 rounds with S = 20{on}"
    tables = []
    for title, column, labels, marks in (
        (figure_8, "round {:,}", first, early),
        (figure_4, "{:,} rounds later", then, later),
    ):
        rows = _rows(labels, marks, root)
        visits = q * (marks[-1] + (4885 if labels is then else 0))
        columns = ("", *(column.format(at) for at in marks))
        tables += [Table(title=title, columns=columns, rows=rows, note=f"{note} {visits:.2g} visits per user.")]
    return [table for table in tables if table.rows]


SWEEPS = {
    "Figure 3: noise at S = 20": {
        "no noise": "flat-S20-seed",
        "σ = 0.012": "flat-S20-sigma0.012-seed",
        "σ = 0.024": "flat-S20-sigma0.024-seed",
        "σ = 0.2": "flat-S20-sigma0.2-seed",
    },
    "Figure 5: sampling and estimators, without clip and noise": {
        "fixed size, true average": "fixed-size-true-average-seed",
        "Poisson, true average": "variable-true-average-seed",
        "Poisson, fixed denominator": "variable-fixed-denominator-seed",
        "Poisson, clipped denominator": "variable-clipped-denominator-seed",
    },
    "Figure 2: clip without noise": {
        "no clip": "variable-true-average-seed",
        **{
            f"S = {norm:g}, {kind.replace('-', ' ')}": f"{kind}-S{norm:g}-seed"
            for kind in ("flat", "per-layer")
            for norm in CLIPS
        },
    },
}
"""The sweeps of `private_run.SWEEP_STEPS`: for each table the prefix of the folders of its runs by label."""


def sweep_tables(root: Path) -> list[Table]:
    """Return tables of Figures 3, 5 and 2, each if at least two of its runs have results.

    Args:
        root: Folder of the results, which has the name of the corpus.
    """
    q = _q(root)
    note = f"100 users per round: q = {q:.2g}, {q * 3000:.2g} visits per user. ± is the standard deviation over seeds."
    tables = _by_round(SWEEPS, (100, 500, 1000, 3000), note, root, least=2)
    curve = (
        "The rule reads S = 10, 15 and 20. It names S = 2.5, 5, 30 and 40 for the curve alone; they are not run yet."
    )
    return [replace(one, note=f"{one.note} {curve}") if one.title.startswith("Figure 2") else one for one in tables]


FEDSGD = {
    "Figure 9: clip of FedSGD and FedAvg, without noise": {
        **{f"FedSGD, S = {norm:g}": f"fedsgd-flat-S{norm:g}-seed" for norm in (0.5, 1, 2, 5, 20)},
        **{f"FedAvg, S = {norm:g}": f"flat-S{norm:g}-seed" for norm in (2, 20)},
    },
    "Figure 10: noise of FedSGD and FedAvg at S = 20": {
        f"{kind}, {label}": f"{prefix}flat-S20{suffix}-seed"
        for kind, prefix, sigmas in (
            ("FedSGD", "fedsgd-", ("", "0.001", "0.002", "0.006", "0.024")),
            ("FedAvg", "", ("", "0.002", "0.006", "0.024")),
        )
        for label, suffix in ((f"σ = {one}", f"-sigma{one}") if one else ("no noise", "") for one in sigmas)
    },
}
"""Figures 9 and 10: for each table the prefix of the folders of its runs by label."""


def fedsgd_tables(root: Path) -> list[Table]:
    """Return tables of Figures 9 and 10, FedSGD against FedAvg. A table with fewer than three runs is left out.

    Args:
        root: Folder of the results, which has the name of the corpus.
    """
    note = (
        f"FedSGD has 50 users per round: q = {_q(root, 50):.2g}, {_q(root, 50) * 3000:.2g} visits per user. FedAvg has 100: "
        f"q = {_q(root):.2g}, {_q(root) * 3000:.2g} visits. ± is the standard deviation over seeds."
    )
    return _by_round(FEDSGD, (500, 1000, 2000, 3000), note, root, least=3)


def figure_6_table(root: Path) -> list[Table]:
    """Return a table of Figure 6, the baseline by users per round; no table if only the baseline of Table 2 has results.

    Args:
        root: Folder of the results, which has the name of the corpus.
    """
    marks, rows = (500, 1000, 2000, 3000), []
    for users in (10, 30, 100, 300, 1000):
        name, q = ("" if users == 100 else f"-C{users}"), _q(root, users)
        if folders := folders_of(f"baseline{name}-seed", root):
            cells = (_mean_cell(folders, at) for at in marks)
            rows.append((f"{users:,} users per round", *cells, f"{q:.2g}, {q * 3000:.2g}"))
    columns = ("", *(f"round {at:,}" for at in marks), "q, visits per user")
    title, note = (
        f"Figure 6: users per round, without clip and noise{_on(root)}",
        "± is the standard deviation over seeds.",
    )
    return [Table(title=title, columns=columns, rows=rows, note=note)] if len(rows) > 1 else []


DICTIONARIES = {
    "Figure 11: clip with larger dictionaries, without noise": {
        "no clip": NO_CLIP,
        **{f"S = {norm}": f"flat-S{norm}-seed" for norm in SWEPT_CLIPS},
    },
    "Figure 12: noise with larger dictionaries, at S = 20": {
        "no noise": "flat-S20-seed",
        **{f"σ = {sigma}": f"flat-S20-sigma{sigma}-seed" for sigma in SWEPT_NOISES},
    },
}
"""Figures 11 and 12: for each table the names of its runs with 10,000 words by label."""


def dictionaries_tables(root: Path) -> list[Table]:
    """Return tables of Figures 11 and 12, each if a run with a larger dictionary has results.

    Args:
        root: Folder of the results, which has the name of the corpus.
    """
    sizes, tables = ("", "20k-", "30k-"), []
    for title, labels in DICTIONARIES.items():
        if any(folders_of(size + name, root) for name in labels.values() for size in sizes[1:]):
            rows = [
                (label, *(_mean_cell(folders_of(size + name, root), 3000, every=100) for size in sizes))
                for label, name in labels.items()
            ]
            columns = ("", "10,000 words", "20,000 words", "30,000 words")
            note = f"AccuracyTop1 at round 3,000 by evaluations every 100 rounds. 100 users per round: q = {_q(root):.2g}, "
            note += f"{_q(root) * 3000:.2g} visits per user. ± is the standard deviation over seeds."
            tables.append(Table(title=f"{title}{_on(root)}", columns=columns, rows=rows, note=note))
    return tables


READINGS = {"growing-": "grow", "server-": "server projects them", "step-": "users project them after each step"}
"""What happens to the length of word vectors in each reading, by the prefix of its runs."""


def readings_tables(root: Path) -> list[Table]:
    """Return a table of the main runs in the readings of the word vectors, and one of their verdicts by reading.

    Tables without runs are left out.

    Args:
        root: Folder of the results, which has the name of the corpus.
    """
    rows, marks = [], (1000, 3000, ROUNDS)
    present = [reading for reading in READINGS if folders_of(f"{reading}baseline-seed", root)]
    for reading in present:
        for name in ("baseline-seed", *NOISED):
            folders = folders_of(reading + name, root)
            paid = (
                "" if name == "baseline-seed" else cost(reading + name, f"{reading}baseline-seed", ROUNDS, root) or ""
            )
            label = name.removesuffix("-seed").replace("-sigma", ", σ = ").replace("S1", "S = 1")
            rows.append((f"{label}, {READINGS[reading]}", *(_mean_cell(folders, at) for at in marks), paid))
    if not rows:
        return []
    columns = ("word vectors", *(f"round {at:,}" for at in marks), "cost at 5,000, points")
    note = f"100 users per round: q = {_q(root):.2g}, {_q(root) * ROUNDS:.2g} visits per user. ± is the standard deviation "
    note += "over seeds."
    by_rule = {rule: [verdict_of_reading(rule, reading, root).outcome for reading in present] for rule in OF_READINGS}
    held = [f"{sum(one[i] == 'held' for one in by_rule.values())} of {len(by_rule)}" for i in range(len(present))]
    return [
        Table(title=f"Table 2 by reading of the word vectors{_on(root)}", columns=columns, rows=rows, note=note),
        Table(
            title=f"Verdicts by reading of the word vectors{_on(root)}",
            columns=("rule", *(READINGS[reading] for reading in present)),
            rows=[*((rule, *outcomes) for rule, outcomes in by_rule.items()), ("held", *held)],
            note="The rules on Table 2 and Figure 1 are decided on reviews_81; here they are shown.",
        ),
    ]


TEXT = {
    "Penalty, tied embeddings, word vectors and another corpus": {
        "S = 15, vectors of norm 1 that grow": "growing-flat-S15-seed",
        "S = 15, the server projects vectors": "server-flat-S15-seed",
        "S = 15, users project vectors after each step": "step-flat-S15-seed",
        "S = 15, free vectors": "free-flat-S15-seed",
        "S = 15, penalty 0.001": "flat-S15-penalty0.001-seed",
        "S = 15, penalty 0.01": "flat-S15-penalty0.01-seed",
        "baseline, tied": "growing-baseline-seed",
        "baseline, untied": "untied-baseline-seed",
        "baseline, trained on the other corpus": "other-baseline-seed",
    },
    "Larger S with σ = 0.003": {
        "baseline": "growing-baseline-seed",
        "S = 15": "growing-S15-sigma0.003-seed",
        "S = 20": "flat-S20-sigma0.003-seed",
        "S = 30": "flat-S30-sigma0.003-seed",
        "S = 20, no noise": "flat-S20-seed",
        "S = 30, no noise": "flat-S30-seed",
    },
    "Adaptive clip at z = 0.06": {
        "adaptive": "adaptive-z0.06-seed",
        **{f"S = {norm:g}": f"trade-S{norm:g}-seed" for norm in TRADES},
    },
    "A GRU and a character model": dict(
        zip(
            (f"{kind}, {run}" for kind in ("GRU", "characters") for run in ("no clip", "S = 15", "S = 15, σ = 0.003")),
            OTHER_MODELS,
            strict=True,
        )
    ),
}
"""The runs of the rules `text-…` and `expect-…` on blogs: for each table the prefix of their folders by label."""


def text_tables(root: Path) -> list[Table]:
    """Return tables of the runs behind sentences of the paper without a figure and behind expectations of our own.

    A table with fewer than four runs is left out: three of them may belong to other tables.

    Args:
        root: Folder of the results, which has the name of the corpus.
    """
    note = f"Evaluated on held-out bloggers. 100 users per round: q = {_q(root):.2g}, {_q(root) * 3000:.2g} visits per user. "
    note += "± is the standard deviation over seeds."
    return _by_round(TEXT, (500, 1000, 2000, 3000), note, root, least=4)


def table_3(root: Path) -> list[Table]:
    """Return Table 3, the head words of models of round 3,000 by accuracy; no table if no model was measured.

    Args:
        root: Folder of the results, which has the name of the corpus.
    """
    rows = []
    for label, name in HEADS.items():
        if complete(name, 3000, root):
            rows.append(
                (label, _mean_cell(folders_of(name, root), 3000, every=100), f"{mean_head_words(name, root):.2f}")
            )
    title, columns = (
        f"Table 3: head words of the models of round 3,000{_on(root)}",
        ("", "AccuracyTop1", "head words of ten"),
    )
    note = (
        "The mean number of the 100 most frequent words of the dictionary among the ten predictions for each target of the "
        "held-out users, over three seeds. 100 users per round, except where C = 1,250. AccuracyTop1 by evaluations every 100 "
        "rounds."
    )
    return [Table(title=title, columns=columns, rows=rows, note=note)] if len(rows) > 1 else []


def table_2(root: Path = REVIEWS) -> Table:
    """Return Table 2 with 100 users per round: the paper's accuracies next to ours.

    Args:
        root: Folder of the results, which has the name of the corpus.
    """
    printed = {row.noise_std: row.accuracy for row in TABLE_2}
    sigmas = dict(zip(SEEDED.values(), printed, strict=False))  # both in the order of Table 2
    q, rows = _q(root), []
    for label, name in SEEDED.items():
        if name == "estimate-seed" and root == LONG:
            continue
        paper, is_baseline = printed.get(sigmas.get(name, -1.0)), name == "baseline-seed"
        paper_cost = f"{100 * (BASELINE_ACCURACY - paper):.2f}" if paper and not is_baseline else ""
        means = (_mean_cell(folders_of(name, root), at) for at in (1000, 3000, ROUNDS))
        our_cost = "" if is_baseline else cost(name, "baseline-seed", ROUNDS, root) or ""
        label = label.replace("sigma", "σ").replace(", C = 100", "")
        rows.append((label, f"{100 * paper:.2f} %" if paper else "", paper_cost, *means, our_cost))
    rounds = ("round 1,000", "round 3,000", "round 5,000")
    return Table(
        title=f"Table 2 with 100 users per round, as the paper trained it{_on(root)}",
        columns=("", "paper, round 5,000", "paper: cost", *rounds, "cost at 5,000, points"),
        rows=rows,
        note=f"q = {q:.2g}, {q * ROUNDS:.2f} visits per user; in the paper {100 * ROUNDS / REDDIT:.2f}. ± is the standard "
        "deviation over seeds. Costs with 95 % intervals over users and seeds. These runs stand for larger cohorts: for "
        "themselves they have no useful ε.",
    )


def _on(root: Path) -> str:
    """Return the end of a title: ` on reviews_1600_200k` or ` on blogs_1600`, or nothing for reviews_81."""
    return f" on {root.name}" if root in (LONG, LONG_BLOGS) else ""


def _q(root: Path, users: int = 100) -> float:
    """Return the probability that a user takes part in a round, for a number of users per round."""
    return users / private_run.POPULATIONS.get(root.name, POPULATION)


def _rows(labels: dict[str, str], marks: Sequence[int], root: Path) -> list[tuple[str, ...]]:
    """Return a row for each run that has results: its label and its mean accuracy at some rounds.

    Args:
        labels: The prefix of the folders of each run by label.
        marks: The rounds.
        root: Folder of the results of a corpus.
    """
    named = {label: folders for label, name in labels.items() if (folders := folders_of(name, root))}
    return [(label, *(_mean_cell(folders, at) for at in marks)) for label, folders in named.items()]


def _by_round(
    groups: dict[str, dict[str, str]], marks: Sequence[int], note: str, root: Path, least: int
) -> list[Table]:
    """Return a table for each group of runs: a row per run that has results, a column per round.

    Args:
        groups: For each title, the prefix of the folders of each run by label.
        marks: The rounds.
        note: The text below each table.
        root: Folder of the results of a corpus.
        least: Smallest number of rows; tables with fewer are left out.
    """
    named = {title: _rows(labels, marks, root) for title, labels in groups.items()}
    columns = ("", *(f"round {at:,}" for at in marks))
    shown = {f"{title}{_on(root)}": rows for title, rows in named.items() if len(rows) >= least}
    return [Table(title=title, columns=columns, rows=rows, note=note) for title, rows in shown.items()]


def figure_7_table(root: Path = REVIEWS) -> Table:
    """Return a table of Figure 7: accuracy by round with 100 and 1,250 users per round and the same noise.

    Args:
        root: Folder of the results, which has the name of the corpus.
    """
    rows, marks = [], (500, 1000, 2000, 3000)
    for (label, name), users in zip(FIGURE_7.items(), (100, 1250), strict=True):
        q, folders = _q(root, users), folders_of(name, root)
        rows.append((label, *(_mean_cell(folders, mark) for mark in marks), f"{q:.2g}, {q * 3000:.2g}"))
    columns = ("", *(f"round {mark:,}" for mark in marks), "q, visits per user")
    return Table(title=f"Figure 7: S = 15, σ = 0.012{_on(root)}", columns=columns, rows=rows)


def last_round(folder: Path) -> int:
    """Return the round of the last evaluation of a run."""
    return private_run.read_metrics(folder)[-1]["round"]


def minutes(records: Sequence[dict[str, Any]]) -> float:
    """Return the total time of all sessions of a run in minutes (`private_results.sittings`)."""
    return sum(one["seconds"] for one in records) / 60


def _mean_cell(folders: Sequence[Path], at: int, every: int = 1) -> str:
    """Return the mean accuracy of the repetitions at a round with their standard deviation, or why there is none.

    If some repetitions did not reach the round, the cell says how many did.

    Args:
        folders: The results of the repetitions.
        at: The round.
        every: As for `private_results.accuracy`.
    """
    if not folders:
        return NOT_RUN
    mean, reached = _mean(folders, at, every), len(accuracy(folders, at, every))
    some = "" if reached == len(folders) else f" ({reached} of {len(folders)} seeds)"
    if mean:
        return f"{mean} %{some}"
    ends = sorted(last_round(folder) for folder in folders)
    return f"stopped at {ends[0]:,}{f' to {ends[-1]:,}' if ends[-1] > ends[0] else ''}"


def _mean(folders: Sequence[Path], at: int, every: int = 1) -> str:
    """Return the mean accuracy of the repetitions at a round with their standard deviation; empty if there is none."""
    values = accuracy(folders, at, every)
    spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{spread}" if values else ""


def accuracy_table(kept: dict[str, Path]) -> Table:
    """Return a table of the accuracies of the last models by each of `WAYS`, and the difference with a 95 % interval.

    Args:
        kept: Run folders by label, the private run first and its baseline second.
    """
    rows = [(label, *(_accuracy_cell(folder, way) for way in WAYS)) for label, folder in kept.items()]
    folders = list(kept.values())
    if len(folders) > 1:
        rows.append(("difference, points", *(difference_cell(folders[0], folders[1], way) for way in WAYS)))
    note = "Differences with 95 % intervals: paired bootstrap over users, and over posts in the last column."
    if (folders[0] / POSTS).exists():
        posts = load(folders[0], POSTS)["targets"]
        note += f" Random posts: {len(posts):,} posts of held-out users with {posts.sum():,} predicted tokens, as the paper."
    return Table(title="The last models on all held-out users", columns=("", *WAYS), rows=rows, note=note)


def _accuracy_cell(folder: Path, way: str) -> str:
    """Return the accuracy of a model, in percent as text, by one of `WAYS`."""
    file_name, kind = WAYS[way]
    return share(load(folder, file_name), kind) if (folder / file_name).exists() else "not measured"


def difference_cell(first: Path, second: Path, way: str) -> str:
    """Return the accuracy of the first model minus that of the second, in points, with its 95 % interval, as text.

    Args:
        first: Run folder of the first model.
        second: Run folder of the second model.
        way: One of `WAYS`.
    """
    file_name, kind = WAYS[way]
    if any(not (folder / file_name).exists() for folder in (first, second)):
        return "not measured"
    counts = (load(folder, file_name) for folder in (first, second))
    mine, other = (100 * one[kind[1]].sum() / one[kind[0]].sum() for one in counts)
    low, high = difference_interval([first], [second], file_name, kind)
    return f"{mine - other:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"


def share(counts: dict[str, np.ndarray], kind: tuple[str, str] = ("targets", "hits")) -> str:
    """Return an accuracy over all users (or posts) in percent, as text.

    Args:
        counts: Counts per user or post (`bootstrap.load`).
        kind: Names of the counts of targets and of hits.
    """
    return f"{100 * counts[kind[1]].sum() / counts[kind[0]].sum():.2f} %"


def rounds_of_private() -> Table:
    """Return a table of the accuracy and epsilon of the private run by round."""
    evaluations = private_run.read_metrics(REVIEWS / "private")
    curve = private_run.smoothed(evaluations)
    rows = [
        (f"{at:,}", f"{100 * row['accuracy_top1']:.2f}", f"{100 * curve[at]:.2f}", f"{row['epsilon']:.2f}")
        for row in evaluations
        if (at := row["round"]) in (100, 1400, 1700, 2200, 3400) or at % 500 == 0
    ]
    columns = ("round", "accuracy at this evaluation, %", "accuracy by the rules, %", "epsilon, RDP")
    return Table(title="The private run by round", columns=columns, rows=rows)


def interrupted_tables() -> tuple[Table, Table]:
    """Return two tables that compare the interrupted runs with the complete ones: accuracies, and their differences.

    The models of the interrupted runs were not kept, so the differences have no intervals.
    """
    # The interrupted attempts have one repetition, so only the first repetition of the complete runs is compared.
    named = {
        "private": folders_of("private")[:1],
        "baseline, C = 5,000": folders_of("baseline-C5000-seed")[:1],
        "private, first attempt": folders_of("private", INTERRUPTED),
        "baseline, C = 5,000, first attempt": folders_of("baseline-C5000-seed", INTERRUPTED),
        **{label: folders_of(name, INTERRUPTED) for label, name in SEEDED.items()},
    }
    marks = (100, 500, 1000, 1400, 1700, 2200)
    beside = Table(
        title="Beside the interrupted runs, accuracy by the rules, %",
        columns=("run", *(f"{mark:,}" for mark in marks)),
        rows=[(label, *(_mean(folders, mark) for mark in marks)) for label, folders in named.items()],
        note="± is the standard deviation over three seeds.",
    )
    pairs = [("private", named["private"], "baseline-C5000", 1400), ("private", named["private"], "estimate", 1700)]
    noised = {label: name for label, name in SEEDED.items() if name != "baseline-seed"}
    pairs += [(name.removesuffix("-seed"), named[label], "baseline", 1700) for label, name in noised.items()]
    gaps = []
    for name, folders, other, at in pairs:
        gap = np.mean(accuracy(folders, at)) - np.mean(accuracy(folders_of(f"{other}-seed", INTERRUPTED), at))
        gaps.append((name, other, f"{at:,}", f"{gap:+.2f}"))
    return beside, Table(
        title="Differences at the last round that both reached",
        columns=("first", "second", "round", "first minus second, points"),
        rows=gaps,
        note="It is not the round of any rule, so it decides nothing.",
    )
