"""Tables 1, 2 and 3 of the paper: printed numbers next to ours.

`table_rounds` computes all 42 epsilons of Table 1 again and needs no run. `table_accuracy` compares epsilon and
AccuracyTop1 of Table 2. `head_words` counts how many of the ten predictions are frequent words (Table 3). The printed
numbers are in `printed.py`.
"""

from collections.abc import Sequence

from reproduction.exhibit import NOT_RUN, Exhibit, Figure, Line, Table, build_exhibit, signed
from reproduction.printed import (
    ACCURACY_ROUNDS,
    BASELINE_ACCURACY,
    IN_TEXT,
    LARGER,
    POWERS,
    TABLE_1,
    TABLE_2,
    PrintedEpsilon,
    PrintedModel,
    moments,
    today,
)
from reproduction.recipe import Recipe
from reproduction.recipes import noised
from reproduction.results import ResultSet
from reproduction.verdict import (
    NEARLY,
    TRAINED,
    Verdict,
    about_seeds,
    decide,
    imprecise,
    margin,
    missing,
    plural,
    points,
)
from unheard.formatting import NOTHING, epsilon_text, in_points, percent, raised, small

REASONABLE = 10.0
"""Epsilons below this count as reasonable in the rule of Table 1."""
RULE_TABLE_1 = (
    "Every cell, computed again by the moments accountant, has the printed digits, and nine in ten of the printed "
    "epsilons are "
    f"below {REASONABLE:g}."
)


def table_rounds(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Table 1: epsilon after 1 to 10^6 rounds. Below each row of the paper are the same cells by the moments accountant
    and by the tightest accountant of today. The table needs no run."""
    rows = []
    for line in TABLE_1:
        first = line[0]
        name = f"{_power_of_ten(first.population)} users, {first.users_per_round:,} a round, z = {first.noise_multiplier:g}"
        rows.append([f"{name}: paper", *(cell.digits for cell in line)])
        rows.append(["  ours, by its accountant", *(f"{moments(cell):.2f}" for cell in line)])
        rows.append([f"  today, δ = {small(first.delta)}", *(_epsilon_cell(today(cell)) for cell in line)])
    table = Table(
        title="ε after 1 to 10⁶ rounds",
        columns=["", *(f"10{raised(power)}" for power in POWERS)],
        rows=rows,
        note=(
            "All hypothetical: the cost of runs that did not happen. δ = users^-1.1. Today: the smaller of PLD and "
            "RDP; RDP alone "
            "after 10⁶ rounds of 10⁹ users, where rounding errors of PLD could be larger than δ."
        ),
    )
    verdict = judge_table_1([(cell, moments(cell)) for line in TABLE_1 for cell in line])
    return build_exhibit(recipe, results, verdict, tables=[table])


def judge_table_1(cells: Sequence[tuple[PrintedEpsilon, float]]) -> Verdict:
    """Apply the rule of Table 1 to pairs of printed and computed epsilons."""
    if not cells:
        return decide(None, "Nothing was computed.", RULE_TABLE_1)
    equal = sum(cell.agrees(value) for cell, value in cells)
    modest = sum(float(cell.digits) < REASONABLE for cell, _ in cells)
    sentence = (
        f"{equal} of {len(cells)} cells have the printed digits, by the moments accountant; {modest} of the "
        "printed epsilons "
        f"are below {REASONABLE:g}."
    )
    return decide(equal == len(cells) and modest >= 0.9 * len(cells), sentence, RULE_TABLE_1)


def _epsilon_cell(epsilon: float) -> str:
    """Two decimals, or more digits for very small values."""
    return f"{epsilon:.2f}" if epsilon >= 0.005 else epsilon_text(epsilon) if epsilon > 1e-3 else small(epsilon)


def _power_of_ten(users: int) -> str:
    """A power of ten in print: 10⁶."""
    return f"10{raised(len(str(users)) - 1)}"


TABLE_2_RUNS = list(dict.fromkeys(row.run for row in TABLE_2))
"""The runs of Table 2, the baseline first."""
RULE_TABLE_2 = (
    "Every ε, computed again by the moments accountant, has the printed digits; where all runs got to, each σ "
    "costs at most "
    f"{points(NEARLY)} more than it cost the paper, and more noise does not cost less by more than two seeds can "
    "differ. Where the "
    "most noise costs no more than that, it cannot be told."
)


def table_accuracy(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Table 2: epsilon and AccuracyTop1 by sigma, S, population and users per round; also the epsilons that the text of
    the paper states."""
    at = results.rounds(*TABLE_2_RUNS)
    label = NOT_RUN if at is None else f"round {at:,}"
    columns = [
        "σ",
        "S",
        "users",
        "a round",
        "ε paper",
        "ε ours",
        "ε today",
        f"AccT1 paper, round {ACCURACY_ROUNDS:,}",
        f"AccT1 ours, {label}",
        f"cost paper, round {ACCURACY_ROUNDS:,}",
        f"cost ours, {label}",
    ]
    main = Table(
        title=f"ε at δ = 10⁻⁹ after {plural(ACCURACY_ROUNDS)}, and AccuracyTop1",
        columns=columns,
        rows=[_table_2_row(row, results, at) for row in TABLE_2],
        note=(
            "ε is hypothetical: accuracy was trained with 100 users per round, and ε is for the users per round of the "
            "row (z = 1), as in "
            "the paper. ε ours: the moments accountant; ε today: the smaller of PLD and RDP. Costs in points, "
            "against the baseline. " + (f"Ours after {plural(at)}, the mean of all seeds." if at is not None else "")
        ),
    )
    text = Table(
        title="Other epsilons in the text",
        columns=["", "paper", "ours", "today", "printed digits"],
        rows=[
            [
                f"{cell.location}: {cell.users_per_round:,} of {cell.population:,} users, {plural(cell.rounds)}",
                cell.digits,
                f"{moments(cell):.3f}",
                epsilon_text(today(cell)),
                ("cut, equal" if cell.is_cut else "equal") if cell.agrees(moments(cell)) else "different",
            ]
            for cell in IN_TEXT
        ],
        note="z = 1, δ = 10⁻⁹. All hypothetical.",
    )
    return build_exhibit(recipe, results, judge_table_2(results), tables=[main, text], over_seeds=True)


def judge_table_2(results: ResultSet) -> Verdict:
    """Apply the rule: all printed epsilons agree, and no sigma costs much more accuracy than in the paper."""
    if undecided := missing(results, TABLE_2_RUNS, RULE_TABLE_2, against=["baseline"]):
        return undecided
    at = results.rounds(*TABLE_2_RUNS)
    cells = [row.epsilon for row in TABLE_2 if row.epsilon is not None]
    equal = all(cell.agrees(moments(cell)) for cell in cells)
    printed = {row.run: BASELINE_ACCURACY - row.accuracy for row in TABLE_2}
    base = results.mean("baseline", at) or 0.0
    costs = {name: base - (results.mean(name, at) or 0.0) for name in TABLE_2_RUNS[1:]}
    same = margin(results, at)
    growing = all(
        later >= earlier - same for earlier, later in zip([*costs.values()], [*costs.values()][1:], strict=False)
    )
    near = all(costs[name] <= printed[name] + NEARLY for name in costs)
    listed = ", ".join(f"{in_points(costs[name])} ({in_points(printed[name])} in the paper)" for name in costs)
    sentence = (
        f"{'All' if equal else 'Not all'} {len(cells)} printed epsilons come out to the digit. After "
        f"{plural(at or 0)} σ = 0.003, 0.006 "
        f"and 0.012 cost {listed} points. {about_seeds(results, list(costs.values()), at)}"
    )
    holds = equal and near and growing
    return decide(None if holds and costs[TABLE_2_RUNS[-1]] <= same else holds, sentence, RULE_TABLE_2)


def _table_2_row(row: PrintedModel, results: ResultSet, at: int | None) -> list[str]:
    """One row: the settings, epsilon (paper, ours, today), AccuracyTop1 and its loss against the baseline (paper, ours)."""
    norm = "∞" if row.clip_norm is None else f"{row.clip_norm:g}"
    users = "10⁸" if row.population == LARGER else f"{row.population:,}"
    model = [f"{row.noise_std:.3f}", norm, users, f"{row.users_per_round:,}"]
    cell = row.epsilon
    bounds = ["∞"] * 3 if cell is None else [cell.digits, f"{moments(cell):.3f}", epsilon_text(today(cell))]
    ours, base = results.mean(row.run, at), results.mean("baseline", at)
    is_base = cell is None
    cost = NOTHING if is_base else signed(row.accuracy - BASELINE_ACCURACY)
    ours_cost = NOTHING if is_base or ours is None or base is None else signed(ours - base)
    return [*model, *bounds, percent(row.accuracy), NOT_RUN if ours is None else percent(ours), cost, ours_cost]


BASELINE, LEAST_NOISE = "baseline", noised(15, 0.003).name
FEW_USERS, MANY_USERS = noised(15, 0.012).name, noised(15, 0.012, users=1250).name
"""The same sigma with 100 and with 1,250 users per round."""
LABELS = {
    BASELINE: "baseline",
    LEAST_NOISE: "σ = 0.003, S = 15",
    noised(10, 0.006).name: "σ = 0.006, S = 10",
    FEW_USERS: "σ = 0.012, S = 15",
    MANY_USERS: "σ = 0.012, S = 15, 1,250 users per round",
    noised(20, 0.024).name: "σ = 0.024, S = 20",
    noised(20, 0.048).name: "σ = 0.048, S = 20",
}
"""Models of Table 3 by the name of their run."""
HEADS = ("10", "50", "100")
"""Head words are the 10, 50 or 100 most frequent words."""
MIN_MODELS = 4
"""Smallest number of models for a rank correlation."""
MAX_CORRELATION = -0.5
"""The rank correlation must be this or less: better models use fewer head words."""
SMALL_CHANGE = 0.25
"""Largest difference, in words of ten, that counts as little."""
RULE_HEAD_WORDS = (
    f"Over at least {MIN_MODELS} models, trained for {TRAINED:,} rounds or more and of different accuracy, the "
    "rank correlation of "
    "AccuracyTop1 with the mean number of the 100 most frequent words among ten suggestions is "
    f"{MAX_CORRELATION:g} or less, and σ = 0.003 "
    f"differs from the baseline, and 1,250 users per round from 100 at equal σ, by at most {SMALL_CHANGE:g} of the "
    "ten. Two runs are not "
    "compared if one had less than half the rounds of the other: head words become fewer as a model learns."
)


def head_words(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Table 3: how many of the ten predictions are among the most frequent words, for models of different accuracy and
    noise."""
    figure = Figure(
        name="head-words",
        title="Head words among ten suggestions, by accuracy",
        x="AccuracyTop1, %",
        y="head words of ten, mean",
        lines=tuple(
            Line(
                name=f"the {head} most frequent",
                points=tuple((100 * a, m) for a, m in accuracy_and_head_words(results, head)),
            )
            for head in HEADS
        ),
        is_scatter=True,
        is_share=False,
    )
    return build_exhibit(
        recipe,
        results,
        judge_head_words(results),
        tables=[_head_word_table(results, head) for head in HEADS],
        figures=[figure],
    )


def judge_head_words(results: ResultSet) -> Verdict:
    """Apply the rule to the correlation over all models and to two pairs of runs."""
    known = accuracy_and_head_words(results, "100", least=TRAINED)
    base, least_noise = mean_head_words(results, BASELINE, "100"), mean_head_words(results, LEAST_NOISE, "100")
    if not accuracy_and_head_words(results, "100"):
        return decide(None, "Not run.", RULE_HEAD_WORDS)
    if (
        len(known) < MIN_MODELS
        or base is None
        or least_noise is None
        or not _are_alike_trained(results, BASELINE, LEAST_NOISE)
    ):
        requirement = f"the rule asks for {MIN_MODELS}, with {BASELINE} and {LEAST_NOISE} of like length among them"
        return decide(None, f"Head words were counted for {len(known)} trained models; {requirement}.", RULE_HEAD_WORDS)
    accuracies = [accuracy for accuracy, _ in known]
    if max(accuracies) - min(accuracies) <= margin(results):
        return decide(None, "The models are equally good, so they cannot show what quality does.", RULE_HEAD_WORDS)
    if undecided := imprecise(results, [BASELINE, LEAST_NOISE], RULE_HEAD_WORDS):
        return undecided
    correlation = rank_correlation(known)
    sentence = (
        f"Over {len(known)} models the rank correlation of AccuracyTop1 with head words is {correlation:+.2f}. Of "
        "ten "
        f"suggestions {least_noise:.2f} are among the 100 most frequent words at σ = 0.003, {base:.2f} for the "
        "baseline."
    )
    few, many = mean_head_words(results, FEW_USERS, "100"), mean_head_words(results, MANY_USERS, "100")
    is_alike = True
    if few is not None and many is not None:
        sentence += f" With 1,250 users per round {many:.2f} are, with 100 {few:.2f} (σ = 0.012)"
        if _are_alike_trained(results, FEW_USERS, MANY_USERS):
            is_alike = abs(many - few) <= SMALL_CHANGE
            sentence += "."
        else:
            rounds = [plural(results.runs[name].rounds) for name in (MANY_USERS, FEW_USERS)]
            sentence += f", which is left open: one has {rounds[0]}, the other {rounds[1]}."
    return decide(
        correlation <= MAX_CORRELATION and abs(least_noise - base) <= SMALL_CHANGE and is_alike,
        sentence,
        RULE_HEAD_WORDS,
    )


def _are_alike_trained(results: ResultSet, first: str, second: str) -> bool:
    """Whether both runs are long enough and neither has more than twice the rounds of the other. Head words are counted
    at the end of a run, and become fewer as the model learns."""
    shorter, longer = sorted(results.rounds(name) or 0 for name in (first, second))
    return shorter >= TRAINED and 2 * shorter >= longer


def accuracy_and_head_words(results: ResultSet, head: str, least: int = 0) -> list[tuple[float, float]]:
    """Accuracy and mean number of head words of each model with at least `least` rounds."""
    names = [name for name in LABELS if (results.rounds(name) or 0) >= least]
    both = ((results.accuracy(name), mean_head_words(results, name, head)) for name in names)
    return [(accuracy, number) for accuracy, number in both if accuracy is not None and number is not None]


def mean_head_words(results: ResultSet, name: str, head: str) -> float | None:
    """Mean number of head words among the ten predictions of one run; None if they were not counted."""
    counts = results.runs[name].head_words.get(head) if name in results else None
    return sum(i * n for i, n in enumerate(counts)) / sum(counts) if counts and sum(counts) else None


def rank_correlation(known: Sequence[tuple[float, float]]) -> float:
    """Spearman's rank correlation; equal values share their rank.

    >>> rank_correlation([(0.1, 9.0), (0.2, 8.0), (0.3, 7.0)])
    -1.0
    """
    first, second = (_ranks([pair[i] for pair in known]) for i in (0, 1))
    middle = (len(known) - 1) / 2
    covariance = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    spread = [sum((a - middle) ** 2 for a in ranks) for ranks in (first, second)]
    return covariance / (spread[0] * spread[1]) ** 0.5 if all(spread) else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Rank of each value, from 0; equal values have the mean of their ranks."""
    return [sum(other < v for other in values) + (sum(other == v for other in values) - 1) / 2 for v in values]


def _head_word_table(results: ResultSet, head: str) -> Table:
    """For each model the share of positions with 0, 1, ..., 10 head words among the ten predictions."""
    rows = []
    for name, label in LABELS.items():
        counts = results.runs[name].head_words.get(head) if name in results else None
        if not counts or not sum(counts):
            rows.append([label, NOT_RUN, *[NOTHING] * 12])
            continue
        shares = [100 * count / sum(counts) for count in counts]
        cells = [f"{share:.0f}" if share >= 0.5 or not share else "<½" for share in shares]
        rows.append([label, percent(results.accuracy(name)), *cells, f"{mean_head_words(results, name, head):.2f}"])
    note = "In % of all places in the held-out text. More to the right: more head words. The paper shows this table as a picture."
    return Table(
        title=f"How many of ten suggestions are among the {head} most frequent words",
        columns=["", "AccT1", *map(str, range(11)), "mean"],
        rows=rows,
        note=note,
    )
