"""Table 2: privacy and AccuracyTop1 by sigma, S, users and C: every printed figure beside ours."""

from reproduction.epsilons import moments, today
from reproduction.exhibit import NOT_RUN, Exhibit, Table
from reproduction.exhibit_parts import shown, signed
from reproduction.printed import ACCURACY_ROUNDS, BASELINE_ACCURACY, IN_TEXT, LARGER, TABLE_2, PrintedModel
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.verdict import NEARLY, Verdict, about_seeds, judged, margin, missing, plural, points
from unheard.formatting import NOTHING, epsilon_text, in_points, percent

RUNS = list(dict.fromkeys(row.run for row in TABLE_2))
RULE = (
    "Every ε, computed again by the moments accountant, has the printed digits; where all runs got to, each σ costs at most "
    f"{points(NEARLY)} more than it cost the paper, and more noise does not cost less by more than two seeds can differ. Where the "
    "most noise costs no more than that, it cannot be told."
)


def table_accuracy(recipe: Recipe, found: Found) -> Exhibit:
    at = found.rounds(*RUNS)
    columns = [
        "σ",
        "S",
        "users",
        "a round",
        "ε paper",
        "ε ours",
        "ε today",
        "AccT1 paper",
        "AccT1 ours",
        "cost paper",
        "cost ours",
    ]
    main = Table(
        title=f"ε at δ = 10⁻⁹ after {plural(ACCURACY_ROUNDS)}, and AccuracyTop1",
        columns=columns,
        rows=[_row(row, found, at) for row in TABLE_2],
        note=(
            "ε is hypothetical: accuracy was trained with 100 users a round, and ε is for the users a round of the "
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
                f"{cell.place}: {cell.users_per_round:,} of {cell.population:,} users, {plural(cell.rounds)}",
                cell.digits,
                f"{moments(cell):.3f}",
                epsilon_text(today(cell)),
                ("cut, equal" if cell.is_cut else "equal") if cell.agrees(moments(cell)) else "different",
            ]
            for cell in IN_TEXT
        ],
        note="z = 1, δ = 10⁻⁹. All hypothetical.",
    )
    return shown(recipe, found, judge(found), tables=[main, text], over_seeds=True)


def judge(found: Found) -> Verdict:
    if lacking := missing(found, RUNS, RULE, against=["baseline"]):
        return lacking
    at = found.rounds(*RUNS)
    cells = [row.epsilon for row in TABLE_2 if row.epsilon is not None]
    equal = all(cell.agrees(moments(cell)) for cell in cells)
    printed = {row.run: BASELINE_ACCURACY - row.accuracy for row in TABLE_2}
    base = found.mean("baseline", at) or 0.0
    costs = {name: base - (found.mean(name, at) or 0.0) for name in RUNS[1:]}
    same = margin(found, at)
    growing = all(
        later >= earlier - same for earlier, later in zip([*costs.values()], [*costs.values()][1:], strict=False)
    )
    near = all(costs[name] <= printed[name] + NEARLY for name in costs)
    listed = ", ".join(f"{in_points(costs[name])} ({in_points(printed[name])} in the paper)" for name in costs)
    sentence = (
        f"{'All' if equal else 'Not all'} {len(cells)} printed epsilons come out to the digit. After "
        f"{plural(at or 0)} σ = 0.003, 0.006 "
        f"and 0.012 cost {listed} points. {about_seeds(found, list(costs.values()), at)}"
    )
    is_so = equal and near and growing
    return judged(None if is_so and costs[RUNS[-1]] <= same else is_so, sentence, RULE)


def _row(row: PrintedModel, found: Found, at: int | None) -> list[str]:
    norm = "∞" if row.clip_norm is None else f"{row.clip_norm:g}"
    users = "10⁸" if row.population == LARGER else f"{row.population:,}"
    model = [f"{row.noise_std:.3f}", norm, users, f"{row.users_per_round:,}"]
    cell = row.epsilon
    bounds = ["∞"] * 3 if cell is None else [cell.digits, f"{moments(cell):.3f}", epsilon_text(today(cell))]
    ours, base = found.mean(row.run, at), found.mean("baseline", at)
    is_base = cell is None
    cost = NOTHING if is_base else signed(row.accuracy - BASELINE_ACCURACY)
    ours_cost = NOTHING if is_base or ours is None or base is None else signed(ours - base)
    return [*model, *bounds, percent(row.accuracy), NOT_RUN if ours is None else percent(ours), cost, ours_cost]
