"""What a round costs at the paper's population, on synthetic text of its size: seconds a round, hours for all of it."""

from reproduction.exhibit import NOT_RUN, Exhibit, Table
from reproduction.exhibit_parts import shown
from reproduction.printed import ACCURACY_ROUNDS
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.verdict import Verdict, judged, plural
from unheard.formatting import NOTHING

RUNS = {"cost-C1250": (1250, 3000), "cost-C5000": (5000, ACCURACY_ROUNDS)}
"""Users a round, and the rounds that the paper's guarantee is for."""
DEAREST = "cost-C5000"
AFFORDABLE = 24.0
RULE = (
    f"At the measured seconds a round, {ACCURACY_ROUNDS:,} rounds of 5,000 users take at most {AFFORDABLE:.0f} hours "
    "on one device."
)


def cost(recipe: Recipe, found: Found) -> Exhibit:
    rows = []
    for name, (users, rounds) in RUNS.items():
        seconds = seconds_a_round(found, name)
        label = f"{users:,} users a round, {rounds:,} rounds"
        if seconds is None:
            rows.append([label, NOT_RUN, *[NOTHING] * 5])
            continue
        result = found.runs[name]
        rows.append(
            [
                label,
                f"{result.rounds:,}",
                f"{result.population:,}",
                f"{seconds:.2f}",
                f"{result.users_per_second:,.0f}",
                f"{seconds * rounds / 3600:.1f}",
                result.device,
            ]
        )
    table = Table(
        title="Wall time",
        columns=["", "rounds timed", "of users", "seconds a round", "users/s", "hours in all", "on"],
        rows=rows,
        note=(
            "Hours in all are the measured seconds a round times the rounds of the row: those runs were not done to "
            "the end. Text is synthetic."
        ),
    )
    return shown(recipe, found, judge(found), tables=[table])


def judge(found: Found) -> Verdict:
    seconds = seconds_a_round(found, DEAREST)
    if seconds is None:
        return judged(None, "Not run.", RULE)
    hours = seconds * ACCURACY_ROUNDS / 3600
    result = found.runs[DEAREST]
    sentence = (
        f"A round of 5,000 users took {seconds:.2f} s on {result.device} ({plural(result.rounds)} timed); "
        f"{ACCURACY_ROUNDS:,} rounds take {hours:.1f} hours."
    )
    return judged(hours <= AFFORDABLE, sentence, RULE)


def seconds_a_round(found: Found, name: str) -> float | None:
    """As timed with the users a round of its row; a run with fewer (a tiny version) says nothing about that."""
    result = found.runs.get(name)
    if result is None or not result.rounds:
        return None
    users = result.settings.get("sampling", {}).get("users_per_round")
    return result.seconds / result.rounds if users == RUNS[name][0] else None
