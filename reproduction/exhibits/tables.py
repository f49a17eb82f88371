"""Tables 1, 2 and 3 of the paper: printed numbers next to ours.

`table_rounds` computes all 42 epsilons of Table 1 again and needs no run. `table_accuracy` compares epsilon and
AccuracyTop1 of Table 2. `head_words` counts how many of the ten predictions are frequent words (Table 3). The printed
numbers are in `printed.py`.
"""

import itertools
from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata

from reproduction import printed
from reproduction.exhibit import NOT_RUN, Draft, Line, signed
from reproduction.recipes import MAIN, noised
from reproduction.results import ResultSet
from reproduction.verdict import NEARLY, TRAINED, Ruling, Undecided, in_points, plural
from unheard.formatting import NOTHING, epsilon_text, percent, raised, small

BASELINE, LEAST_NOISE, MIDDLE_NOISE, FEW_USERS = (run.name for run in MAIN)
MANY_USERS = noised(15, 0.012, users=1250).name
"""A run with the sigma of `FEW_USERS` and 1,250 users per round instead of 100."""


def table_rounds(draft: Draft) -> Ruling:
    """Table 1: epsilon after 1 to 10^6 rounds.

    Below each row of the paper are the same epsilons computed by the moments accountant and by the tightest accountants
    of `unheard`. The table needs no run.
    """
    rows = []
    for line in printed.TABLE_1:
        first = line[0]
        users = f"10{raised(len(str(first.population)) - 1)}"
        name = f"{users} users, {first.users_per_round:,} a round, z = {first.noise_multiplier:g}"
        rows.append([f"{name}: paper", *(cell.digits for cell in line)])
        rows.append(["  ours, by its accountant", *(f"{printed.moments(cell):.2f}" for cell in line)])
        rows.append([f"  today, δ = {small(first.delta)}", *(_epsilon_cell(printed.today(cell)) for cell in line)])
    draft.add_table(
        "ε after 1 to 10⁶ rounds",
        ["", *(f"10{raised(power)}" for power in printed.POWERS)],
        rows,
        "All hypothetical: the cost of runs that did not happen. δ = users^-1.1. Today: the smaller of PLD and RDP; RDP "
        "alone after 10⁶ rounds of 10⁹ users, where rounding errors of PLD could be larger than δ.",
    )
    cells = [(cell, printed.moments(cell)) for line in printed.TABLE_1 for cell in line]
    return judge_table_1(cells, draft.recipe.limits["reasonable"])


def judge_table_1(cells: Sequence[tuple[printed.PrintedEpsilon, float]], reasonable: float) -> Ruling:
    """Apply the rule of Table 1 to pairs of printed and computed epsilons.

    Args:
        cells: Pairs of a printed cell and the epsilon that the moments accountant computes for it.
        reasonable: Epsilons below this count as reasonable.

    Raises:
        Undecided: There are no cells.
    """
    if not cells:
        raise Undecided("Nothing was computed.")
    equal = sum(cell.agrees(value) for cell, value in cells)
    modest = sum(float(cell.digits) < reasonable for cell, _ in cells)
    sentence = (
        f"{equal} of {len(cells)} cells have the printed digits, by the moments accountant; {modest} of the printed "
        f"epsilons are below {reasonable:g}."
    )
    return equal == len(cells) and modest >= 0.9 * len(cells), sentence


def _epsilon_cell(epsilon: float) -> str:
    """Return an epsilon with two decimals, or with more digits if it is very small."""
    return f"{epsilon:.2f}" if epsilon >= 0.005 else epsilon_text(epsilon) if epsilon > 1e-3 else small(epsilon)


def table_accuracy(draft: Draft) -> Ruling:
    """Table 2: epsilon and AccuracyTop1 by sigma, S, population and users per round.

    A second table has the epsilons in the text of the paper.
    """
    results, draft.is_over_seeds = draft.results, True
    runs = list(dict.fromkeys(row.run for row in printed.TABLE_2))
    at = results.rounds(*runs)
    rounds = [f"paper, round {printed.ACCURACY_ROUNDS:,}", f"ours, {NOT_RUN if at is None else f'round {at:,}'}"]
    draft.add_table(
        f"ε at δ = 10⁻⁹ after {plural(printed.ACCURACY_ROUNDS)}, and AccuracyTop1",
        [
            *("σ", "S", "users", "a round", "ε paper", "ε ours", "ε today"),
            *(f"{what} {where}" for what in ("AccT1", "cost") for where in rounds),
        ],
        [_table_2_row(row, results, at) for row in printed.TABLE_2],
        "ε is hypothetical: accuracy was trained with 100 users per round, and ε is for the users per round of the row "
        "(z = 1), as in the paper. ε ours: the moments accountant; ε today: the smaller of PLD and RDP. Costs in points, "
        "against the baseline. " + (f"Ours after {plural(at)}, the mean of all seeds." if at is not None else ""),
    )
    rows = []
    for cell in printed.IN_TEXT:
        name = f"{cell.location}: {cell.users_per_round:,} of {cell.population:,} users, {plural(cell.rounds)}"
        equal = ("cut, equal" if cell.is_cut else "equal") if cell.agrees(printed.moments(cell)) else "different"
        rows.append([name, *_three_epsilons(cell), equal])
    columns = ["", "paper", "ours", "today", "printed digits"]
    draft.add_table("Other epsilons in the text", columns, rows, "z = 1, δ = 10⁻⁹. All hypothetical.")
    at = draft.shared_round(runs, against=[BASELINE])
    cells = [row.epsilon for row in printed.TABLE_2 if row.epsilon is not None]
    equal = all(cell.agrees(printed.moments(cell)) for cell in cells)
    paper = {row.run: printed.BASELINE_ACCURACY - row.accuracy for row in printed.TABLE_2}
    base, same = results.mean(BASELINE, at) or 0.0, results.margin(at)
    costs = {name: base - (results.mean(name, at) or 0.0) for name in runs[1:]}
    growing = all(later >= earlier - same for earlier, later in itertools.pairwise(costs.values()))
    near = all(costs[name] <= paper[name] + NEARLY for name in costs)
    listed = ", ".join(f"{in_points(costs[name])} ({in_points(paper[name])} in the paper)" for name in costs)
    sentence = (
        f"{'All' if equal else 'Not all'} {len(cells)} printed epsilons come out to the digit. After {plural(at)} "
        f"σ = 0.003, 0.006 and 0.012 cost {listed} points. {draft.about_seeds(costs.values(), at)}"
    )
    holds = equal and near and growing
    return None if holds and costs[runs[-1]] <= same else holds, sentence


def _three_epsilons(cell: printed.PrintedEpsilon) -> list[str]:
    """Return an epsilon as the paper prints it, by the moments accountant, and by the tightest accountants of today."""
    return [cell.digits, f"{printed.moments(cell):.3f}", epsilon_text(printed.today(cell))]


def _table_2_row(row: printed.PrintedModel, results: ResultSet, at: int | None) -> list[str]:
    """Return a row of Table 2: settings, epsilon (paper, ours, today), AccuracyTop1 and its cost (paper, ours).

    Args:
        row: The row of the paper.
        results: Results of one corpus.
        at: The round at which our accuracy is measured; None if runs are missing.
    """
    norm = "∞" if row.clip_norm is None else f"{row.clip_norm:g}"
    users = "10⁸" if row.population == printed.LARGER else f"{row.population:,}"
    model = [f"{row.noise_std:.3f}", norm, users, f"{row.users_per_round:,}"]
    cell = row.epsilon
    bounds = ["∞"] * 3 if cell is None else _three_epsilons(cell)
    ours, base = results.mean(row.run, at), results.mean(BASELINE, at)
    cost = None if cell is None else row.accuracy - printed.BASELINE_ACCURACY
    ours_cost = None if cell is None or ours is None or base is None else ours - base
    accuracies = [percent(row.accuracy), NOT_RUN if ours is None else percent(ours)]
    return [*model, *bounds, *accuracies, signed(cost), signed(ours_cost)]


LABELS = {
    BASELINE: "baseline",
    LEAST_NOISE: "σ = 0.003, S = 15",
    MIDDLE_NOISE: "σ = 0.006, S = 10",
    FEW_USERS: "σ = 0.012, S = 15",
    MANY_USERS: "σ = 0.012, S = 15, 1,250 users per round",
    noised(20, 0.024).name: "σ = 0.024, S = 20",
    noised(20, 0.048).name: "σ = 0.048, S = 20",
}
"""Labels of the models of Table 3, by the name of their run."""
HEADS = ("10", "50", "100")
"""Numbers of most frequent words that count as head words, as keys of `RunResult.head_words`."""


def head_words(draft: Draft) -> Ruling:
    """Table 3: how many of the ten predictions are among the most frequent words, for models of different accuracy.

    The rule uses the rank correlation over all models, and the differences within two pairs of runs.
    """
    results, limits = draft.results, draft.recipe.limits
    points = {head: tuple((100 * a, mean) for a, mean in _accuracy_and_mean(results, head)) for head in HEADS}
    lines = [Line(name=f"the {head} most frequent", points=drawn) for head, drawn in points.items()]
    title, y = "Head words among ten suggestions, by accuracy", "head words of ten, mean"
    draft.add_figure(title, "AccuracyTop1, %", lines, y=y, is_scatter=True, is_share=False)
    for head in HEADS:
        _add_histogram(draft, head)
    if not _accuracy_and_mean(results, "100"):
        raise Undecided("Not run.")
    known = _accuracy_and_mean(results, "100", least=TRAINED)
    runs = (BASELINE, LEAST_NOISE, FEW_USERS, MANY_USERS)
    base, least_noise, few, many = (mean_head_words(results, name, "100") for name in runs)
    is_like = _are_alike_trained(results, BASELINE, LEAST_NOISE)
    if len(known) < limits["min_models"] or base is None or least_noise is None or not is_like:
        needed = f"{limits['min_models']}, including {BASELINE} and {LEAST_NOISE} with similar numbers of rounds"
        raise Undecided(f"Head words were counted for {len(known)} trained models; the rule needs {needed}.")
    accuracies, means = zip(*known, strict=True)
    if max(accuracies) - min(accuracies) <= results.margin():
        raise Undecided("The models have nearly the same accuracy, so the rule cannot compare good and bad models.")
    draft.require_precise([BASELINE, LEAST_NOISE])
    ranks = rankdata(accuracies), rankdata(means)
    correlation = float(np.corrcoef(*ranks)[0, 1]) if len(set(means)) > 1 else 0.0  # of Spearman
    sentence = (
        f"Over {len(known)} models the rank correlation of AccuracyTop1 with head words is {correlation:+.2f}. Of ten "
        f"suggestions {least_noise:.2f} are among the 100 most frequent words at σ = 0.003, {base:.2f} for the baseline."
    )
    is_alike = True
    if few is not None and many is not None:
        sentence += f" With 1,250 users per round {many:.2f} are, with 100 {few:.2f} (σ = 0.012)"
        if _are_alike_trained(results, FEW_USERS, MANY_USERS):
            is_alike = abs(many - few) <= limits["small_change"]
            sentence += "."
        else:
            rounds = [plural(results.runs[name].rounds) for name in (MANY_USERS, FEW_USERS)]
            sentence += f", which is left open: one has {rounds[0]}, the other {rounds[1]}."
    is_same = abs(least_noise - base) <= limits["small_change"]
    return correlation <= limits["max_correlation"] and is_same and is_alike, sentence


def _are_alike_trained(results: ResultSet, first: str, second: str) -> bool:
    """Return whether both runs are long enough and neither has more than twice the rounds of the other.

    Head words are counted at the end of a run, and their number falls as the model learns.
    """
    shorter, longer = sorted(results.rounds(name) or 0 for name in (first, second))
    return shorter >= TRAINED and 2 * shorter >= longer


def _accuracy_and_mean(results: ResultSet, head: str, least: int = 0) -> list[tuple[float, float]]:
    """Return the accuracy and the mean number of head words of each model that has at least `least` rounds."""
    names = [name for name in LABELS if (results.rounds(name) or 0) >= least]
    both = ((results.accuracy(name), mean_head_words(results, name, head)) for name in names)
    return [(accuracy, number) for accuracy, number in both if accuracy is not None and number is not None]


def mean_head_words(results: ResultSet, name: str, head: str) -> float | None:
    """Return the mean number of head words among the ten predictions of one run; None if they were not counted.

    Args:
        results: Results of one corpus.
        name: The name of the run.
        head: One of `HEADS`.
    """
    counts = results.runs[name].head_words.get(head) if name in results else None
    return sum(i * n for i, n in enumerate(counts)) / sum(counts) if counts and sum(counts) else None


def _add_histogram(draft: Draft, head: str) -> None:
    """Add a table of the share of positions with 0, 1, ..., 10 head words among the ten predictions, by model."""
    results, rows = draft.results, []
    for name, label in LABELS.items():
        mean = mean_head_words(results, name, head)
        if mean is None:
            rows.append([label, NOT_RUN, *[NOTHING] * 12])
            continue
        counts = results.runs[name].head_words[head]
        shares = [100 * count / sum(counts) for count in counts]
        cells = [f"{share:.0f}" if share >= 0.5 or not share else "<½" for share in shares]
        rows.append([label, percent(results.accuracy(name)), *cells, f"{mean:.2f}"])
    draft.add_table(
        f"How many of ten suggestions are among the {head} most frequent words",
        ["", "AccT1", *map(str, range(11)), "mean"],
        rows,
        "Cells are percentages of all positions in the held-out text; columns on the right have more head words. The paper "
        "shows this table as a picture.",
    )
