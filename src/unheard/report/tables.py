"""The tables that a comparison shows, as text in cells: the terminal and the page print the same ones.

In: a Comparison, or full measures by run. Out: `Table`. An epsilon that does not exist is ∞; one of a run that did not happen
stands in a row that says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unheard.formatting import NOTHING, epsilon_text, number, percent, shown_word, small
from unheard.report.comparison import Comparison
from unheard.report.run_record import RunRecord, final_accuracy

Measures = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text; the first cell of each names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def summary(compared: Comparison) -> Table:
    """The runs at one look."""
    records = compared.records
    rows = [
        ["AccuracyTop1, held-out", *(percent(_last(r.metrics, "accuracy_top1")) for r in records)],
        ["  smoothed over 5 evaluations", *(percent(final_accuracy(r)) for r in records)],
        ["AccuracyTop3", *(percent(_last(r.metrics, "accuracy_top3")) for r in records)],
        ["perplexity", *(number(_last(r.metrics, "perplexity")) for r in records)],
        ["ε, claimed", *(_claim(r) for r in records)],
        ["  by the paper's accountant", *(epsilon_text(float(r.statement["epsilon"]["moments"])) for r in records)],
        ["δ", *(small(r.delta) if r.is_private else NOTHING for r in records)],
        ["rounds", *(f"{r.rounds:,}" for r in records)],
        ["users a round, expected", *(f"{r.users_per_round:,.10g}" for r in records)],
        ["users, declared", *(f"{r.population:,}" for r in records)],
    ]
    would = {one.run: one for one in compared.hypotheticals}
    note = ""
    if would:
        some = next(iter(would.values()))
        cells = [f"{epsilon_text(would[r.name].epsilon)}" if r.name in would else NOTHING for r in records]
        rows.insert(7, [f"ε hypothetical, as if {some.users:,} users", *cells])
        note = some.words if len(would) == 1 else some.words_for_several
    return Table(title="At one look", columns=["", *(r.name for r in records)], rows=rows, note=note)


def accuracies(measured: Measures) -> Table:
    """Each model, and below them the floor: baselines on the same targets."""
    rows = [[name, *_figures(m["tokens"])] for name, m in measured.items()]
    fitted = set()
    first = next(iter(measured.values()), {})
    for name, figures in first.get("baselines", {}).items():
        rows.append([f"{name} (baseline)", *_figures(figures["tokens"])])
        fitted.add(first["baselines_fitted_on"])
    note = f"The baselines were counted in the text of {', '.join(fitted)}, never of training users." if fitted else ""
    columns = ["held-out text, by token", "top 1", "top 1, words", "top 3", "top 5", "perplexity"]
    return Table(title="Accuracy, and the floor under it", columns=columns, rows=rows, note=note)


def users(measured: Measures) -> Table:
    """AccuracyTop1 over held-out users."""
    shown = ("mean", "p5", "p25", "p50", "p75", "p95")
    rows = [[name, *(percent(m["users"]["accuracy_top1"][key], 1) for key in shown)] for name, m in measured.items()]
    names = ["mean", "5th percentile", "25th", "median", "75th", "95th"]
    note = "Every held-out user counts once, however much they wrote."
    return Table(title="AccuracyTop1 by user", columns=["over held-out users", *names], rows=rows, note=note)


def bands(measured: Measures) -> Table:
    """AccuracyTop1 by how frequent the word is in the dictionary."""
    names = list(measured)
    by_band = {name: {band["band"]: band for band in m["bands"]} for name, m in measured.items()}
    order = list(dict.fromkeys(band for bands in by_band.values() for band in bands))
    last = "not in the dictionary"
    rows = []
    for band in sorted(order, key=lambda b: b == last):
        cells = [by_band[name].get(band, {}) for name in names]
        share = next((c["share"] for c in cells if c), None)
        rows.append([band, percent(share, 1), *(percent(c.get("accuracy_top1"), 1) for c in cells)])
    note = "Ranks are the dictionary's own, which is public or paid for. A word outside it is always a mistake."
    return Table(
        title="AccuracyTop1 by word frequency", columns=["words", "share of text", *names], rows=rows, note=note
    )


def head_words(measured: Measures) -> Table:
    """The paper's last table: how many of the top 10 suggestions are head words, as shares of all places in the text."""
    rows = []
    for head in ("10", "50", "100"):
        for name, m in measured.items():
            counts = m["head_words"][head]
            mean = sum(i * c for i, c in enumerate(counts)) / max(sum(counts), 1)
            rows.append([f"{head} · {name}", *(_share(c, counts) for c in counts), f"{mean:.2f}"])
    columns = ["among the", *map(str, range(11)), "mean"]
    note = (
        "How many of a model's 10 best suggestions are among the 10, 50, 100 most frequent words, in % of all places in the "
        "text. A model that leans on frequent words has more of its mass to the right."
    )
    return Table(title="Head words among the suggestions", columns=columns, rows=rows, note=note)


def predictions(measured: Measures) -> Table:
    """What each model would suggest."""
    texts = list(dict.fromkeys(p["text"] for m in measured.values() for p in m["prompts"]))
    said = {name: {p["text"]: p["words"] for p in m["prompts"]} for name, m in measured.items()}
    rows = [[f"{text} …", *(_suggestions(said[name].get(text, [])) for name in measured)] for text in texts]
    return Table(title="What they suggest", columns=["after", *measured], rows=rows)


def computation(compared: Comparison) -> Table:
    """Rounds and user updates to the baseline's accuracy."""
    rows, target = [], 0.0
    for line in compared.compute_costs:
        target = line.target
        rounds = "not reached" if line.rounds is None else f"{line.rounds:,}"
        updates = NOTHING if line.updates is None else f"{line.updates:,.0f}"
        times = NOTHING if line.times is None else f"{line.times:,.3g} ×"
        rows.append([line.run, percent(line.best), rounds, updates, times])
    if not rows:
        target_words = "nothing was evaluated yet"
    elif compared.accuracy is None:
        target_words = f"{percent(target)} AccuracyTop1, where {compared.baseline.name} ended"
    else:
        target_words = f"{percent(target)} AccuracyTop1"
    note = f"To {target_words}; smoothed over 5 evaluations. Updates are expected: rounds times the declared users a round."
    columns = ["", "best", "rounds to it", "user updates", f"of {compared.baseline.name}"]
    return Table(title="What it took to be as accurate", columns=columns, rows=rows, note=note)


def configuration(compared: Comparison) -> tuple[Table, Table]:
    """The run files side by side: what differs between the runs, and what is the same in all."""
    flat = [_flat(record.tables) for record in compared.records]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    rows = [[key, *(one.get(key, NOTHING) for one in flat)] for key in keys]
    differ = [row for row in rows if len(set(row[1:])) > 1]
    same = [row[:2] for row in rows if len(set(row[1:])) == 1]
    names = [record.name for record in compared.records]
    return (
        Table(title="What differs", columns=["", *names], rows=differ),
        Table(title="The same in all" if len(names) > 1 else names[0], columns=["", "value"], rows=same),
    )


def _claim(record: RunRecord) -> str:
    by = record.statement["claimed"]["accountant"].upper()
    return f"{epsilon_text(record.epsilon)} by {by}" if record.is_private else "∞"


def _flat(tables: Mapping[str, Any]) -> dict[str, str]:
    """table.key and its value. A folder is named without its place, which is nobody's business."""
    found = {}
    for table, keys in tables.items():
        for key, value in keys.items() if isinstance(keys, Mapping) else [("", keys)]:
            name = f"{table}.{key}" if key else table
            if name in ("corpus.path", "training.init_from"):
                found[name] = str(value).rstrip("/").rsplit("/", 1)[-1]
            elif name == "training.reproducible_seed":
                # DP: whoever knows the seed can take the noise off; a page is sent around.
                found[name] = "set, and not shown"
            else:
                found[name] = _plain(value)
    return found


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _figures(tokens: Mapping[str, Any]) -> list[str]:
    names = ("accuracy_top1", "accuracy_top1_words", "accuracy_top3", "accuracy_top5")
    return [*(percent(tokens[name]) for name in names), number(tokens["perplexity"])]


def _share(count: int, counts: Sequence[int]) -> str:
    share = 100 * count / max(sum(counts), 1)
    return f"{share:.0f}" if share >= 0.5 or not count else "<½"


def _suggestions(words: Sequence[Mapping[str, Any]]) -> str:
    return (
        ", ".join(f"{shown_word(word['word'])}\u00a0{100 * word['probability']:.0f}\u00a0%" for word in words)
        or NOTHING
    )


def _last(metrics: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return metrics[-1].get(name) if metrics else None
