"""Figures 6 and 7 and Section 3: the number of users per round.

The paper trained with 100 users per round and estimated the accuracy of private runs, which need thousands for z = 1.
`users_100_vs_1250` (Figure 7) tests this estimate with 1,250, as the paper did. `private_for_real` trains 5,000, which
the paper only estimated, and 1,250. `users_per_round` (Figure 6) shows diminishing returns, and `cost` (not in the
paper) measures the time of a round with thousands of users.
"""

from reproduction.exhibit import (
    NOT_RUN,
    Exhibit,
    Figure,
    Table,
    build_exhibit,
    cell,
    curves_by_round,
    drawn_rounds,
    own_epsilon,
    rounds_table,
    signed,
    sweep_line,
)
from reproduction.printed import ACCURACY_ROUNDS, REDDIT, TINY_DELTA, PrintedEpsilon, moments, today
from reproduction.recipe import Recipe
from reproduction.recipes import baseline, noised
from reproduction.results import ResultSet, RunResult
from reproduction.verdict import NEARLY, TRAINED, Verdict, about_seeds, below, decide, margin, missing, plural, points
from unheard.formatting import NOTHING, epsilon_text, in_points, percent, small

FEW, MANY = noised(15, 0.012).name, noised(15, 0.012, users=1250).name
COHORT_LABELS = {FEW: "100 users per round", MANY: "1,250 users per round"}
FIRST_COMPARED = 100
"""Earlier rounds are not compared: smoothing over five evaluations would reach back to the initial model."""
MARKS = (100, 500, 1000, 2000, 3000)
"""Numbers of rounds in the rows of the table."""
RULE_100_VS_1250 = (
    f"From round {FIRST_COMPARED} to where both got, the two smoothed curves lie at most {points(NEARLY)} apart on "
    "average, "
    "and at the end."
)


def users_100_vs_1250(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Figure 7: accuracy by round with 100 and with 1,250 users per round at the same sigma."""
    figure = curves_by_round(results, "users-100-vs-1250", "AccuracyTop1 by round, σ = 0.012, S = 15", COHORT_LABELS)
    rows = []
    for mark in MARKS:
        gap = results.run_difference(MANY, FEW, mark)
        rows.append([f"{mark:,}", cell(results, FEW, mark), cell(results, MANY, mark), signed(gap)])
    table = Table(
        title="AccuracyTop1 after some rounds",
        columns=["rounds", *COHORT_LABELS.values(), "difference, points"],
        rows=rows,
    )
    return build_exhibit(recipe, results, judge_100_vs_1250(results), tables=[table], figures=[figure])


def judge_100_vs_1250(results: ResultSet) -> Verdict:
    """Apply the rule to the mean distance of the two curves and to their distance at the end."""
    if undecided := missing(results, [FEW, MANY], RULE_100_VS_1250, against=[FEW]):
        return undecided
    at = results.rounds(FEW, MANY) or 0
    apart = [(r, d) for r, d in results.distances(MANY, FEW, after=FIRST_COMPARED) if r <= at]
    few, many = results.accuracy(FEW, at) or 0.0, results.accuracy(MANY, at) or 0.0
    if not apart:
        return decide(None, "The two runs were never evaluated at the same round.", RULE_100_VS_1250)
    mean = sum(abs(d) for _, d in apart) / len(apart)
    where, most = max(apart, key=lambda pair: abs(pair[1]))
    sentence = (
        f"From round {FIRST_COMPARED:,} on the curves lie {points(mean)} apart on average, at most {points(most)} "
        f"(round {where:,}). After "
        f"{plural(at)} 1,250 users per round are {below(many - few)} 100 ({percent(many)} against {percent(few)}). "
        f"{about_seeds(results, [many - few], at)}"
    )
    return decide(mean <= NEARLY and abs(many - few) <= NEARLY, sentence, RULE_100_VS_1250)


PAIRS = {
    (15, 0.012, 1250): (noised(15, 0.012, users=1250).name, noised(15, 0.012).name),
    (15, 0.003, 5000): (noised(15, 0.003, users=5000).name, noised(15, 0.003).name),
}
"""S, sigma and users per round, to the name of the private run and of its estimate with 100 users."""
RULE_PRIVATE = (
    f"Every real run that got to {TRAINED:,} rounds, and its estimate with 100 users per round too, ends within "
    f"{points(NEARLY)} of "
    "it, after as many rounds. A pair that did not is shown, and decides nothing."
)


def private_for_real(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Section 3: runs trained with z = 1, next to their estimates with 100 users per round; epsilon for the users of
    this corpus, and hypothetically for the population of the paper."""
    figures = []
    for (_, sigma, users), (real, estimate) in PAIRS.items():
        if real_run(results, real, users) is not None:
            labels = {estimate: "100 users per round: estimate", real: f"{users:,} users per round: real"}
            title = f"AccuracyTop1 by round, σ = {sigma:g}, {users:,} users per round"
            figures.append(curves_by_round(results, f"private-for-real-{users}", title, labels))
    columns = [
        "σ, S, users per round",
        "rounds",
        "AccT1 real",
        "AccT1 estimate",
        "difference",
        "ε real, today",
        "moments",
        "δ",
        "of users",
    ]
    table = Table(
        title="Trained for real at z = 1",
        columns=[*columns, "ε if 763,430"],
        rows=[_private_row(results, *key, *pair) for key, pair in PAIRS.items()],
        note=(
            "ε real is what the run cost the users of this corpus, as it is: a small corpus is sampled often, so "
            "it is large. "
            "ε if 763,430 is hypothetical: the same rounds drawn from the paper's population at δ = 10⁻⁹, by the "
            "paper's "
            "accountant and by today's."
        ),
    )
    return build_exhibit(recipe, results, judge_private(results), tables=[table], figures=figures)


def judge_private(results: ResultSet) -> Verdict:
    """Apply the rule to every pair that was trained long enough. Other pairs are mentioned and decide nothing."""
    done = {key: pair for key, pair in PAIRS.items() if real_run(results, pair[0], key[2]) is not None}
    undecided = {
        key: missing(results, pair, RULE_PRIVATE, against=pair[1:]) or _never_compared(results, *pair)
        for key, pair in done.items()
    }
    decided = [key for key, why in undecided.items() if why is None]
    if not decided:
        return next((why for why in undecided.values() if why is not None), decide(None, "Not run.", RULE_PRIVATE))
    at = {key: results.rounds(*done[key]) or 0 for key in decided}
    gaps = {key: results.run_difference(*done[key], at[key]) or 0.0 for key in decided}
    listed = "; ".join(
        f"{users:,} users per round at σ = {sigma:g} end {below(gaps[key])} the estimate after {plural(at[key])}"
        for key in decided
        for _, sigma, users in [key]
    )
    last = max(at.values())
    better = " Where it is above, the estimate was too careful." if max(gaps.values()) > margin(results, last) else ""
    early = "".join(
        f" {key[2]:,} users per round: {why.sentence[0].lower()}{why.sentence[1:]}"
        for key, why in undecided.items()
        if why is not None
    )
    early += "".join(f" {key[2]:,} users per round were not run." for key in PAIRS if key not in done)
    held = all(abs(gap) <= NEARLY for gap in gaps.values())
    return decide(held, f"{listed}.{better}{early} {about_seeds(results, list(gaps.values()), last)}", RULE_PRIVATE)


def _never_compared(results: ResultSet, real: str, estimate: str) -> Verdict | None:
    """Why a pair decides nothing, if one run was not evaluated by the round at which the other stopped."""
    at = results.rounds(real, estimate)
    if results.run_difference(real, estimate, at) is not None:
        return None
    return decide(None, f"Not both were evaluated within {plural(at or 0)}.", RULE_PRIVATE)


def real_run(results: ResultSet, name: str, users: int) -> RunResult | None:
    """The result of a run, if it had the stated users per round. A smoke test has fewer, and therefore another z."""
    result = results.runs.get(name)
    drawn = {} if result is None else result.settings.get("sampling", {})
    return result if drawn.get("users_per_round") == users else None


def _private_row(results: ResultSet, norm: float, sigma: float, users: int, real: str, estimate: str) -> list[str]:
    """One row of the table of private runs."""
    name = f"{sigma:g}, {norm:g}, {users:,}"
    result = real_run(results, real, users)
    if result is None:
        return [name, NOT_RUN, *[NOTHING] * 8]
    at = results.rounds(real, estimate)
    if_paper = PrintedEpsilon(
        location="", population=REDDIT, users_per_round=users, rounds=max(1, result.rounds), delta=TINY_DELTA, digits=""
    )
    by_moments = result.epsilon.get("moments")
    return [
        name,
        f"{result.rounds:,}",
        cell(results, real, at),
        cell(results, estimate, at),
        signed(results.run_difference(real, estimate, at)),
        epsilon_text(own_epsilon(result)),
        "∞" if by_moments is None else epsilon_text(by_moments),
        small(result.epsilon.get("delta") or 0.0),
        f"{result.population:,}",
        f"{moments(if_paper):.2f}, {today(if_paper):.2f}",
    ]


BY_USERS = {users: baseline(users).name for users in (10, 30, 100, 300, 1000)}
"""Baseline runs by users per round."""
COMPARED = [BY_USERS[10], BY_USERS[100], BY_USERS[1000]]
"""The runs that the rule compares."""
RULE_USERS = (
    "Where all got to, 100 users per round are above 10 by more than two seeds can differ; from 100 to 1,000 the gain "
    "is smaller than from 10 to 100, and no loss beyond that difference."
)


def users_per_round(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Figure 6: accuracy of the baseline with 10 to 1,000 users per round, by round and over users per round."""
    labels = {name: f"{users:,} users per round" for users, name in BY_USERS.items()}
    curves = curves_by_round(results, "users-per-round", "AccuracyTop1 by round", labels)
    marks = drawn_rounds(results, BY_USERS.values())
    by_users = Figure(
        name="users-per-round-by-C",
        title="AccuracyTop1 against users per round",
        x="users per round",
        lines=tuple(
            sweep_line(results, {float(u): n for u, n in BY_USERS.items()}, m, name=f"after {plural(m)}") for m in marks
        ),
        is_log=True,
    )
    table = rounds_table(results, labels, marks)
    return build_exhibit(recipe, results, judge_users(results), tables=[table], figures=[curves, by_users])


def judge_users(results: ResultSet) -> Verdict:
    """Apply the rule: from 10 to 100 users accuracy grows; from 100 to 1,000 it grows less."""
    if undecided := missing(results, COMPARED, RULE_USERS, against=[BY_USERS[100]]):
        return undecided
    at = results.rounds(*COMPARED)
    few, some, many = (results.accuracy(name, at) or 0.0 for name in COMPARED)
    first, second = some - few, many - some
    sentence = (
        f"After {plural(at or 0)} going from 10 to 100 users per round gains {in_points(first)} points, from 100 to "
        "1,000 "
        f"{in_points(second)}. {about_seeds(results, [first, second], at)}"
    )
    same = margin(results, at)
    return decide(first > same and -same <= second < first, sentence, RULE_USERS)


TIMED = {"cost-C1250": (1250, 3000), "cost-C5000": (5000, ACCURACY_ROUNDS)}
"""Users per round, and the number of rounds that the guarantee of the paper is for."""
LARGEST = "cost-C5000"
MAX_HOURS = 24.0
"""A run is affordable up to this time on one device."""
RULE_COST = (
    f"At the measured seconds a round, {ACCURACY_ROUNDS:,} rounds of 5,000 users take at most {MAX_HOURS:.0f} hours "
    "on one device."
)


def cost(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Seconds per round with 1,250 and 5,000 users on synthetic text with the population of the paper, and hours for all
    rounds."""
    rows = []
    for name, (users, rounds) in TIMED.items():
        seconds = seconds_per_round(results, name)
        label = f"{users:,} users per round, {rounds:,} rounds"
        if seconds is None:
            rows.append([label, NOT_RUN, *[NOTHING] * 5])
            continue
        result = results.runs[name]
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
    return build_exhibit(recipe, results, judge_cost(results), tables=[table])


def judge_cost(results: ResultSet) -> Verdict:
    """Apply the rule to the run with the most users per round."""
    seconds = seconds_per_round(results, LARGEST)
    if seconds is None:
        return decide(None, "Not run.", RULE_COST)
    hours = seconds * ACCURACY_ROUNDS / 3600
    result = results.runs[LARGEST]
    sentence = (
        f"A round of 5,000 users took {seconds:.2f} s on {result.device} ({plural(result.rounds)} timed); "
        f"{ACCURACY_ROUNDS:,} rounds take {hours:.1f} hours."
    )
    return decide(hours <= MAX_HOURS, sentence, RULE_COST)


def seconds_per_round(results: ResultSet, name: str) -> float | None:
    """Measured seconds per round; None for a smoke test, which has fewer users per round."""
    result = results.runs.get(name)
    if result is None or not result.rounds:
        return None
    users = result.settings.get("sampling", {}).get("users_per_round")
    return result.seconds / result.rounds if users == TIMED[name][0] else None
