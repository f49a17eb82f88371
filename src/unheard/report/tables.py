"""The tables that compare runs, with every cell as text. The terminal and the HTML page show the same tables.

Each function takes a `Comparison`, or the full measures by run name (`Comparison.measured`), and returns a `Table`:

    summary              the main figures of each run: accuracy, perplexity, epsilon, rounds, users
    accuracies           the accuracy of each model and of simple baselines on the same held-out text
    users                percentiles of AccuracyTop1 over held-out users
    bands                AccuracyTop1 by word frequency
    head_words           the paper's head-word histograms
    predictions          the suggestions of each model after each prompt
    computation          the rounds and user updates that each run needed to reach the baseline's accuracy
    accuracy_by_round    the numbers of the plot of accuracy by round
    epsilon_by_round     the numbers of the plot of epsilon by round
    configuration        the settings of the run files side by side (returns two tables)

An infinite epsilon is shown as ∞, a missing value as a dash. The hypothetical epsilon of a run that did not happen has
its own row, which says that it is hypothetical.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unheard.formatting import (
    NOTHING,
    SEPARATOR,
    TIMES,
    accountant_title,
    epsilon_text,
    number,
    percent,
    shown_word,
    small,
)
from unheard.report.comparison import Comparison
from unheard.report.run_record import RunRecord, accuracy_points, epsilon_points, final_accuracy, latest
from unheard.run_folder import LOCAL_KEYS

Measures = Mapping[str, Mapping[str, Any]]
"""The content of `measures.json` by run name."""
PERCENTILES = {"p5": "5th percentile", "p25": "25th", "p50": "median", "p75": "75th", "p95": "95th"}
"""The keys of the percentiles over users in `measures.json`, with their names in tables and plots."""
ROWS_BY_ROUND = 40
"""From twice this number of rounds on, a table by round shows only every n-th round. It has at least this many rows
then, and always fewer than twice as many."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text: a title, one title per column, rows of cells, and a note that is shown below the table.

    The first cell of a row is the title of the row. If it begins with two spaces, the row is shown as a detail of the
    row above.

    >>> table = Table(title="Users", columns=["", "plain"], rows=[["users", "60"], ["  per round", "6"]])
    >>> table.rows[1][0]
    '  per round'
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def summary(compared: Comparison) -> Table:
    """Return the main figures of each run, one column per run.

    Accuracy and perplexity are those of the last evaluation. The claimed epsilon is the smaller of the bounds of the
    RDP and PLD accountants. The row below it shows the bound of the moments accountant, which the paper uses.
    """
    records = compared.records
    rows = [
        ["AccuracyTop1, held-out", *(percent(latest(r, "accuracy_top1")) for r in records)],
        ["  smoothed over 5 evaluations", *(percent(final_accuracy(r)) for r in records)],
        ["AccuracyTop3", *(percent(latest(r, "accuracy_top3")) for r in records)],
        ["perplexity", *(number(latest(r, "perplexity")) for r in records)],
        ["ε, claimed", *(_claim(r) for r in records)],
        ["  by moments, as in the paper", *(epsilon_text(float(r.statement["epsilon"]["moments"])) for r in records)],
        ["δ", *(small(r.delta) if r.is_private else NOTHING for r in records)],
        ["rounds", *(f"{r.rounds:,}" for r in records)],
        ["users per round, expected", *(f"{r.users_per_round:,.10g}" for r in records)],
        ["users, declared", *(f"{r.population:,}" for r in records)],
    ]
    note = ""
    if would_be := {other.run: other for other in compared.hypotheticals}:
        first = next(iter(would_be.values()))
        cells = [would_be[r.name].figure if r.name in would_be else NOTHING for r in records]
        rows.insert(7, [f"ε hypothetical, as if {first.users:,} users", *cells])
        note = first.words if len(would_be) == 1 else first.words_for_several
    return Table(title="Summary", columns=["", *(r.name for r in records)], rows=rows, note=note)


def accuracies(measured: Measures) -> Table:
    """Return the accuracy and perplexity of each model, and of the simple baselines on the same held-out text.

    The baselines are those of the first run in `measured`.
    """
    rows = [[name, *_accuracy_cells(m["tokens"])] for name, m in measured.items()]
    first = next(iter(measured.values()), {})
    baselines = first.get("baselines", {})
    rows += [[f"{name} (baseline)", *_accuracy_cells(figures["tokens"])] for name, figures in baselines.items()]
    note = ""
    if baselines:
        note = (
            f"The baselines were fitted on the text of {first['baselines_fitted_on']}, never on text of training users."
        )
    columns = ["held-out text, by token", "top 1", "top 1, words", "top 3", "top 5", "perplexity"]
    return Table(title="Accuracy of the models and of simple baselines", columns=columns, rows=rows, note=note)


def users(measured: Measures) -> Table:
    """Return the mean and percentiles of AccuracyTop1 over held-out users, one row per run."""
    columns = {"mean": "mean", **PERCENTILES}
    rows = [[name, *(percent(m["users"]["accuracy_top1"][key], 1) for key in columns)] for name, m in measured.items()]
    return Table(
        title="AccuracyTop1 by user",
        columns=["over held-out users", *columns.values()],
        rows=rows,
        note="Every held-out user counts once, however much they wrote.",
    )


def bands(measured: Measures) -> Table:
    """Return AccuracyTop1 by word frequency.

    A row has the words of one range of ranks in the dictionary, most frequent words first. The last row has the words
    outside the dictionary.
    """
    by_band = {name: {band["band"]: band for band in m["bands"]} for name, m in measured.items()}
    order = list(dict.fromkeys(band for of_run in by_band.values() for band in of_run))
    rows = []
    for band in sorted(order, key=lambda name: name == "not in the dictionary"):
        cells = [by_band[name].get(band, {}) for name in measured]
        share = next((cell["share"] for cell in cells if cell), None)
        rows.append([band, percent(share, 1), *(percent(cell.get("accuracy_top1"), 1) for cell in cells)])
    return Table(
        title="AccuracyTop1 by word frequency",
        columns=["words", "share of text", *measured],
        rows=rows,
        note="Words are ranked by the dictionary, which is public or was charged to the ledger. A word outside it "
        "always counts as wrong.",
    )


def head_words(measured: Measures) -> Table:
    """Return how many of a model's 10 best suggestions are among the most frequent words (Table 3 of the paper).

    There is one row for each head size (the 10, 50 or 100 most frequent words) and run. Column n, from 0 to 10, shows
    at which share of all positions, in percent, n of the 10 suggestions are head words.
    """
    rows = []
    for head in ("10", "50", "100"):
        for name, m in measured.items():
            counts = m["head_words"][head]
            total = max(sum(counts), 1)
            mean = sum(i * count for i, count in enumerate(counts)) / total
            rows.append(
                [f"{head}{SEPARATOR}{name}", *(_rounded_share(100 * count / total) for count in counts), f"{mean:.2f}"]
            )
    return Table(
        title="Head words among the suggestions",
        columns=["among the", *map(str, range(11)), "mean"],
        rows=rows,
        note="How many of a model's 10 best suggestions are among the 10, 50 or 100 most frequent words, in % of "
        "all positions of the text. A model that suggests mostly frequent words has larger percentages in the right columns.",
    )


def predictions(measured: Measures) -> Table:
    """Return the suggestions of each model after each prompt, with their probabilities."""
    texts = list(dict.fromkeys(prompt["text"] for m in measured.values() for prompt in m["prompts"]))
    words = {name: {prompt["text"]: prompt["words"] for prompt in m["prompts"]} for name, m in measured.items()}
    rows = [[f"{text} …", *(_suggestion_cell(words[name].get(text, [])) for name in measured)] for text in texts]
    return Table(title="What they suggest", columns=["after", *measured], rows=rows)


def computation(compared: Comparison) -> Table:
    """Return the rounds and user updates that each run needed to reach the target accuracy (see `comparison.py`)."""
    rows, target = [], 0.0
    for cost in compared.compute_costs:
        target = cost.target
        rounds = "not reached" if cost.rounds is None else f"{cost.rounds:,}"
        updates = NOTHING if cost.updates is None else f"{cost.updates:,.0f}"
        times = NOTHING if cost.times is None else f"{cost.times:,.3g} {TIMES}"
        rows.append([cost.run, percent(cost.best), rounds, updates, times])
    if not rows:
        goal = "the accuracy of the baseline, which has not been evaluated yet"
    elif compared.accuracy is None:
        goal = f"{percent(target)} AccuracyTop1, the final accuracy of {compared.baseline.name}"
    else:
        goal = f"{percent(target)} AccuracyTop1"
    return Table(
        title="Computation to the same accuracy",
        columns=["", "best", "rounds to it", "user updates", f"of {compared.baseline.name}"],
        rows=rows,
        note=f"To reach {goal}, smoothed over 5 evaluations. User updates are expected numbers: rounds times the "
        "declared users per round.",
    )


def accuracy_by_round(compared: Comparison) -> Table:
    """Return the smoothed AccuracyTop1 by round, one column per run. Of many rounds only every n-th is shown."""
    values = {r.name: {p["round"]: p["smoothed"] for p in accuracy_points(r)} for r in compared.records}
    return _by_round("AccuracyTop1 by round, smoothed over 5 evaluations", values, percent)


def epsilon_by_round(compared: Comparison) -> Table:
    """Return epsilon by round, computed by the RDP accountant, one column per private run.

    Of many rounds only every n-th is shown.
    """
    private = [record for record in compared.records if record.is_private]
    values = {r.name: {p["round"]: p["epsilon"] for p in epsilon_points(r)} for r in private}
    return _by_round("ε by round, by RDP", values, epsilon_text)


def configuration(compared: Comparison) -> tuple[Table, Table]:
    """Return the settings of the run files. The seed of a reproducible run is never shown.

    Returns:
        A table of the settings that differ between the runs, and a table of the settings that all runs share.
    """
    settings = [_settings(record.tables) for record in compared.records]
    keys = list(dict.fromkeys(key for of_run in settings for key in of_run))
    rows = [[key, *(of_run.get(key, NOTHING) for of_run in settings)] for key in keys]
    differ = [row for row in rows if len(set(row[1:])) > 1]
    same = [row[:2] for row in rows if len(set(row[1:])) == 1]
    names = [record.name for record in compared.records]
    return (
        Table(title="What differs", columns=["", *names], rows=differ),
        Table(title="The same in all" if len(names) > 1 else names[0], columns=["", "value"], rows=same),
    )


def _by_round(title: str, values: Mapping[str, Mapping[int, float]], text: Callable[[float], str]) -> Table:
    """Return a table with one row per round and one column per run.

    Args:
        title: The title of the table.
        values: The value at each round, by run name.
        text: Formats a value.
    """
    rounds = sorted({round_ for of_run in values.values() for round_ in of_run})
    every = max(1, len(rounds) // ROWS_BY_ROUND)
    shown = rounds[::-1][::every][::-1]  # count from the end, so that the last round is always shown
    rows = [[f"{r:,}", *(text(of_run[r]) if r in of_run else NOTHING for of_run in values.values())] for r in shown]
    return Table(title=title, columns=["round", *values], rows=rows)


def _claim(record: RunRecord) -> str:
    """Return the claimed epsilon of a run with its accountant, or ∞."""
    return f"{epsilon_text(record.epsilon)} by {claimed_by(record)}" if record.is_private else "∞"


def claimed_by(record: RunRecord) -> str:
    """Return the accountant that computed the claimed epsilon of a run, as it is written in a sentence."""
    return accountant_title(str(record.statement["claimed"]["accountant"]))


def _settings(tables: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a run file by `table.key`.

    Of a path only the last part is shown, because the rest tells about the machine that trained. The seed is hidden.
    """
    settings = {}
    for table, keys in tables.items():
        for key, value in keys.items() if isinstance(keys, Mapping) else [("", keys)]:
            name = f"{table}.{key}" if key else table
            if name in LOCAL_KEYS:
                settings[name] = str(value).rstrip("/").rsplit("/", 1)[-1]
            elif name == "training.reproducible_seed":
                # DP: whoever knows the seed can subtract the noise, and a page is passed on to others.
                settings[name] = "set, and not shown"
            else:
                settings[name] = _setting(value)
    return settings


def _setting(value: Any) -> str:
    """Format one value of a run file."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _accuracy_cells(tokens: Mapping[str, Any]) -> list[str]:
    """Return the cells of one row of `accuracies`.

    Args:
        tokens: The figures over all held-out tokens, from `measures.json`.
    """
    names = ("accuracy_top1", "accuracy_top1_words", "accuracy_top3", "accuracy_top5")
    return [*(percent(tokens[name]) for name in names), number(tokens["perplexity"])]


def _rounded_share(share: float) -> str:
    """Format a share in percent as a whole number. A share that is not zero but rounds to zero is shown as "<½"."""
    return f"{share:.0f}" if share >= 0.5 or share == 0 else "<½"


def _suggestion_cell(words: Sequence[Mapping[str, Any]]) -> str:
    """Return suggestions and their probabilities as one cell. Non-breaking spaces keep each word with its number."""
    cells = (f"{shown_word(word['word'])}\u00a0{100 * word['probability']:.0f}\u00a0%" for word in words)
    return ", ".join(cells) or NOTHING
