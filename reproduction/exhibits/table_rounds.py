"""Table 1: privacy after 1 to 10^6 rounds, all 42 cells, recomputed; below each row what can be claimed today."""

from collections.abc import Sequence

from reproduction.epsilons import moments, today
from reproduction.exhibit import Exhibit, Table
from reproduction.exhibit_parts import shown
from reproduction.printed import POWERS, TABLE_1, PrintedEpsilon
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.verdict import Verdict, judged
from unheard.formatting import epsilon_text, raised, small

REASONABLE = 10.0
RULE = (
    "Every cell, computed again by the moments accountant, has the printed digits, and nine in ten of the printed epsilons are "
    f"below {REASONABLE:g}."
)


def table_rounds(recipe: Recipe, found: Found) -> Exhibit:
    """No run is needed: the table is accounting alone."""
    rows = []
    for line in TABLE_1:
        first = line[0]
        name = f"{_power(first.population)} users, {first.users_per_round:,} a round, z = {first.noise_multiplier:g}"
        rows.append([f"{name}: paper", *(cell.digits for cell in line)])
        rows.append(["  ours, by its accountant", *(f"{moments(cell):.2f}" for cell in line)])
        rows.append([f"  today, δ = {small(first.delta)}", *(_shown(today(cell)) for cell in line)])
    table = Table(
        title="ε after 1 to 10⁶ rounds",
        columns=["", *(f"10{raised(power)}" for power in POWERS)],
        rows=rows,
        note=(
            "All hypothetical: the cost of runs that did not happen. δ = users^-1.1. Today: the smaller of PLD and RDP; RDP alone "
            "after 10⁶ rounds of 10⁹ users, where rounding errors of PLD could be larger than δ."
        ),
    )
    verdict = judge([(cell, moments(cell)) for line in TABLE_1 for cell in line])
    return shown(recipe, found, verdict, tables=[table])


def judge(cells: Sequence[tuple[PrintedEpsilon, float]]) -> Verdict:
    """Printed and computed side by side."""
    if not cells:
        return judged(None, "Nothing was computed.", RULE)
    equal = sum(cell.agrees(value) for cell, value in cells)
    modest = sum(float(cell.digits) < REASONABLE for cell, _ in cells)
    sentence = (
        f"{equal} of {len(cells)} cells have the printed digits, by the moments accountant; {modest} of the printed epsilons "
        f"are below {REASONABLE:g}."
    )
    return judged(equal == len(cells) and modest >= 0.9 * len(cells), sentence, RULE)


def _shown(epsilon: float) -> str:
    return f"{epsilon:.2f}" if epsilon >= 0.005 else epsilon_text(epsilon) if epsilon > 1e-3 else small(epsilon)


def _power(users: int) -> str:
    return f"10{raised(len(str(users)) - 1)}"
