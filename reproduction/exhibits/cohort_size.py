"""Figures 6 and 7 and Section 3: the number of users per round.

The paper trained with 100 users per round and estimated the accuracy of private runs, which need thousands for z = 1.
`users_100_vs_1250` (Figure 7) tests this estimate with 1,250, as the paper did. `private_for_real` trains 5,000, which
the paper only estimated, and 1,250. `users_per_round` (Figure 6) shows diminishing returns, and `cost` (not in the
paper) measures the time of a round with thousands of users.
"""

from reproduction.exhibit import NOT_RUN, Draft, own_epsilon, signed
from reproduction.printed import ACCURACY_ROUNDS, REDDIT, TINY_DELTA, PrintedEpsilon, moments, today
from reproduction.recipes import baseline, noised
from reproduction.results import ResultSet, RunResult
from reproduction.verdict import NEARLY, Ruling, Undecided, below, in_points, plural, points
from unheard.formatting import NOTHING, epsilon_text, percent, small

FEW, MANY = noised(15, 0.012).name, noised(15, 0.012, users=1250).name
"""The runs of Figure 7, with 100 and with 1,250 users per round."""


def users_100_vs_1250(draft: Draft) -> Ruling:
    """Figure 7: accuracy by round with 100 and with 1,250 users per round at the same sigma.

    Early rounds are not compared, because smoothing over five evaluations would include the first rounds of training.
    """
    results, first = draft.results, int(draft.recipe.limits["first_compared"])
    labels = {FEW: "100 users per round", MANY: "1,250 users per round"}
    draft.add_curves("AccuracyTop1 by round, σ = 0.012, S = 15", labels)
    rows = [
        [f"{mark:,}", *(draft.cell(name, mark) for name in labels), signed(results.run_difference(MANY, FEW, mark))]
        for mark in (100, 500, 1000, 2000, 3000)
    ]
    columns = ["rounds", *labels.values(), "difference, points"]
    draft.add_table("AccuracyTop1 after some rounds", columns, rows)
    at = draft.shared_round([FEW, MANY], against=[FEW])
    apart = [(r, d) for r, d in results.distances(MANY, FEW, after=first) if r <= at]
    if not apart:
        raise Undecided("The two runs were never evaluated at the same round.")
    few, many = results.value(FEW, at), results.value(MANY, at)
    mean = sum(abs(d) for _, d in apart) / len(apart)
    where, most = max(apart, key=lambda pair: abs(pair[1]))
    sentence = (
        f"From round {first:,} on the curves lie {points(mean)} apart on average, at most {points(most)} (round "
        f"{where:,}). After {plural(at)} 1,250 users per round are {below(many - few)} 100 ({percent(many)} against "
        f"{percent(few)}). {draft.about_seeds([many - few], at)}"
    )
    return mean <= NEARLY and abs(many - few) <= NEARLY, sentence


PAIRS = {
    (15, 0.012, 1250): (MANY, FEW),
    (15, 0.003, 5000): (noised(15, 0.003, users=5000).name, noised(15, 0.003).name),
}
"""The names of a private run and of its estimate with 100 users per round, by S, sigma and users per round."""


def private_for_real(draft: Draft) -> Ruling:
    """Section 3: runs trained with z = 1, next to their estimates with 100 users per round.

    The table has the epsilon for the users of this corpus, and a hypothetical epsilon for the population of the paper.

    The rule is applied to every pair of runs that was trained long enough. Other pairs are shown, but do not count.
    """
    results = draft.results
    done = {key: pair for key, pair in PAIRS.items() if _with_users(results, pair[0], key[2])}
    for (_, sigma, users), (real, estimate) in done.items():
        labels = {estimate: "100 users per round: estimate", real: f"{users:,} users per round: real"}
        title = f"AccuracyTop1 by round, σ = {sigma:g}, {users:,} users per round"
        draft.add_curves(title, labels, name=f"private-for-real-{users}")
    columns = ["rounds", "AccT1 real", "AccT1 estimate", "difference", "ε real, today", "moments", "δ", "of users"]
    draft.add_table(
        "Trained for real at z = 1",
        ["σ, S, users per round", *columns, "ε if 763,430"],
        [_private_row(draft, *key, *pair) for key, pair in PAIRS.items()],
        "ε real is the cost of the run for the users of this corpus; it is large, because a small corpus is sampled often. "
        "ε if 763,430 is hypothetical: the same rounds drawn from the paper's population at δ = 10⁻⁹, by the paper's "
        "accountant and by today's.",
    )
    at, gaps, reasons = {}, {}, {}
    for key, pair in done.items():
        try:
            at[key] = draft.shared_round(pair, against=pair[1:])
            gap = results.run_difference(*pair, at[key])
            if gap is None:
                raise Undecided(f"One of the two runs was not evaluated within {plural(at[key])}.")
            gaps[key] = gap
        except Undecided as reason:
            reasons[key] = str(reason)
    if not gaps:
        raise Undecided(next(iter(reasons.values()), "Not run."))
    listed = "; ".join(
        f"{key[2]:,} users per round at σ = {key[1]:g} end {below(gap)} the estimate after {plural(at[key])}"
        for key, gap in gaps.items()
    )
    last = max(at[key] for key in gaps)
    better = " Where it is above, the estimate was too low." if max(gaps.values()) > results.margin(last) else ""
    early = "".join(f" {key[2]:,} users per round: {why[0].lower()}{why[1:]}" for key, why in reasons.items())
    early += "".join(f" {key[2]:,} users per round were not run." for key in PAIRS if key not in done)
    sentence = f"{listed}.{better}{early} {draft.about_seeds(gaps.values(), last)}"
    return all(abs(gap) <= NEARLY for gap in gaps.values()), sentence


def _with_users(results: ResultSet, name: str, users: int) -> RunResult | None:
    """Return the result of a run; None if there is none, or if it had another number of users per round.

    A smoke test has fewer users per round, and therefore another z.
    """
    result = results.runs.get(name)
    drawn = {} if result is None else result.settings.get("sampling", {})
    return result if drawn.get("users_per_round") == users else None


def _private_row(draft: Draft, norm: float, sigma: float, users: int, real: str, estimate: str) -> list[str]:
    """Return one row of the table of private runs.

    Args:
        draft: The exhibit.
        norm: S.
        sigma: The standard deviation of the noise on the average.
        users: Users per round of the private run.
        real: Name of the private run.
        estimate: Name of its estimate with 100 users per round.
    """
    name, result = f"{sigma:g}, {norm:g}, {users:,}", _with_users(draft.results, real, users)
    if result is None:
        return [name, NOT_RUN, *[NOTHING] * 8]
    at = draft.results.rounds(real, estimate)
    rounds = max(1, result.rounds)
    if_paper = PrintedEpsilon(
        location="", population=REDDIT, users_per_round=users, rounds=rounds, delta=TINY_DELTA, digits=""
    )
    accuracies = [draft.cell(real, at), draft.cell(estimate, at)]
    accuracies.append(signed(draft.results.run_difference(real, estimate, at)))
    bounds = [epsilon_text(own_epsilon(result)), epsilon_text(result.epsilon.get("moments"))]
    bounds += [small(result.epsilon.get("delta") or 0.0), f"{result.population:,}"]
    return [name, f"{result.rounds:,}", *accuracies, *bounds, f"{moments(if_paper):.2f}, {today(if_paper):.2f}"]


BY_USERS = {users: baseline(users).name for users in (10, 30, 100, 300, 1000)}
"""The names of the baseline runs, by users per round."""


def users_per_round(draft: Draft) -> Ruling:
    """Figure 6: accuracy of the baseline with 10 to 1,000 users per round, by round and over users per round.

    The rule: accuracy grows from 10 to 100 users per round, and grows less from 100 to 1,000.
    """
    results, labels = draft.results, {name: f"{users:,} users per round" for users, name in BY_USERS.items()}
    draft.add_curves("AccuracyTop1 by round", labels)
    runs = {float(users): name for users, name in BY_USERS.items()}
    lines = [draft.sweep(runs, mark, f"after {plural(mark)}") for mark in draft.drawn_rounds(labels)]
    title = "AccuracyTop1 against users per round"
    draft.add_figure(title, "users per round", lines, name="users-per-round-by-C", is_log=True)
    draft.add_rounds_table(labels)
    compared = [BY_USERS[users] for users in (10, 100, 1000)]
    at = draft.shared_round(compared, against=[BY_USERS[100]])
    few, some, many = (results.value(name, at) for name in compared)
    first, second = some - few, many - some
    sentence = (
        f"After {plural(at)} going from 10 to 100 users per round gains {in_points(first)} points, from 100 to 1,000 "
        f"{in_points(second)}. {draft.about_seeds([first, second], at)}"
    )
    same = results.margin(at)
    return first > same and -same <= second < first, sentence


def cost(draft: Draft) -> Ruling:
    """Not in the paper: seconds per round with 1,250 and 5,000 users, and the hours that all rounds would take.

    The runs use synthetic text with the population of the paper.
    """
    rows, hours, result = [], 0.0, None
    for users, rounds in ((1250, 3000), (5000, ACCURACY_ROUNDS)):
        label = f"{users:,} users per round, {rounds:,} rounds"
        result = _with_users(draft.results, f"cost-C{users}", users)
        if result is None or not result.rounds:
            rows.append([label, NOT_RUN, *[NOTHING] * 5])
            continue
        seconds = result.seconds / result.rounds
        hours = seconds * rounds / 3600
        figures = [f"{result.rounds:,}", f"{result.population:,}", f"{seconds:.2f}", f"{result.users_per_second:,.0f}"]
        rows.append([label, *figures, f"{hours:.1f}", result.device])
    draft.add_table(
        "Wall time",
        ["", "rounds timed", "of users", "seconds a round", "users/s", "hours in all", "on"],
        rows,
        "Hours in all are the measured seconds a round times the rounds of the row; only the timed rounds were run. The "
        "text is synthetic.",
    )
    if result is None or not result.rounds:  # `result` is that of the last pass: 5,000 users per round
        raise Undecided("Not run.")
    sentence = (
        f"A round of 5,000 users took {result.seconds / result.rounds:.2f} s on {result.device} ({plural(result.rounds)} "
        f"timed); {ACCURACY_ROUNDS:,} rounds take {hours:.1f} hours."
    )
    return hours <= draft.recipe.limits["max_hours"], sentence
