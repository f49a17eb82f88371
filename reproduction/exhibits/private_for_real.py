"""The runs that the paper could only estimate: z = 1 with all its users a round, beside the estimate with 100."""

from reproduction.epsilons import moments, today
from reproduction.exhibit import NOT_RUN, Exhibit, Table
from reproduction.exhibit_parts import by_round, cell, shown, signed
from reproduction.listing import own_epsilon
from reproduction.printed import REDDIT, TINY_DELTA, PrintedEpsilon
from reproduction.recipe import Recipe
from reproduction.results import RunResult
from reproduction.results_query import Found
from reproduction.runs import noised
from reproduction.verdict import NEARLY, TRAINED, Verdict, about_seeds, below, judged, margin, missing, plural, points
from unheard.formatting import NOTHING, epsilon_text, small

PAIRS = {
    (15, 0.012, 1250): (noised(15, 0.012, users=1250).name, noised(15, 0.012).name),
    (15, 0.003, 5000): (noised(15, 0.003, users=5000).name, noised(15, 0.003).name),
}
"""S, sigma and users a round to the real run and to its estimate."""
RULE = (
    f"Every real run that got to {TRAINED:,} rounds, and its estimate with 100 users a round too, ends within {points(NEARLY)} of "
    "it, after as many rounds. A pair that did not is shown, and decides nothing."
)


def private_for_real(recipe: Recipe, found: Found) -> Exhibit:
    figures = []
    for (_, sigma, users), (real, estimate) in PAIRS.items():
        if real_run(found, real, users) is not None:
            labels = {estimate: "100 users a round: estimate", real: f"{users:,} users a round: real"}
            title = f"AccuracyTop1 by round, σ = {sigma:g}, {users:,} users a round"
            figures.append(by_round(found, f"private-for-real-{users}", title, labels))
    columns = [
        "σ, S, users a round",
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
        rows=[_row(found, *key, *pair) for key, pair in PAIRS.items()],
        note=(
            "ε real is what the run cost the users of this corpus, as it is: a small corpus is sampled often, so it is large. "
            "ε if 763,430 is hypothetical: the same rounds drawn from the paper's population at δ = 10⁻⁹, by the paper's "
            "accountant and by today's."
        ),
    )
    return shown(recipe, found, judge(found), tables=[table], figures=figures)


def judge(found: Found) -> Verdict:
    done = {key: pair for key, pair in PAIRS.items() if real_run(found, pair[0], key[2]) is not None}
    lacking = {
        key: missing(found, pair, RULE, against=pair[1:]) or _unmeasured(found, *pair) for key, pair in done.items()
    }
    decided = [key for key, why in lacking.items() if why is None]
    if not decided:
        return next((why for why in lacking.values() if why is not None), judged(None, "Not run.", RULE))
    at = {key: found.rounds(*done[key]) or 0 for key in decided}
    gaps = {key: _gap(found, *done[key], at[key]) or 0.0 for key in decided}
    told = "; ".join(
        f"{users:,} users a round at σ = {sigma:g} end {below(gaps[key])} the estimate after {plural(at[key])}"
        for key in decided
        for _, sigma, users in [key]
    )
    last = max(at.values())
    better = " Where it is above, the estimate was too careful." if max(gaps.values()) > margin(found, last) else ""
    early = "".join(
        f" {key[2]:,} users a round: {why.sentence[0].lower()}{why.sentence[1:]}"
        for key, why in lacking.items()
        if why is not None
    )
    early += "".join(f" {key[2]:,} users a round were not run." for key in PAIRS if key not in done)
    held = all(abs(gap) <= NEARLY for gap in gaps.values())
    return judged(held, f"{told}.{better}{early} {about_seeds(found, list(gaps.values()), last)}", RULE)


def _unmeasured(found: Found, real: str, estimate: str) -> Verdict | None:
    """Why a pair says nothing, if one of them was not evaluated by the round where the other stopped."""
    at = found.rounds(real, estimate)
    if _gap(found, real, estimate, at) is not None:
        return None
    return judged(None, f"Not both were evaluated within {plural(at or 0)}.", RULE)


def real_run(found: Found, name: str, users: int) -> RunResult | None:
    """The run, if it had all its users a round: a tiny version with fewer has another z, and was not trained for real."""
    result = found.runs.get(name)
    drawn = {} if result is None else result.settings.get("sampling", {})
    return result if drawn.get("users_per_round") == users else None


def _row(found: Found, norm: float, sigma: float, users: int, real: str, estimate: str) -> list[str]:
    name = f"{sigma:g}, {norm:g}, {users:,}"
    result = real_run(found, real, users)
    if result is None:
        return [name, NOT_RUN, *[NOTHING] * 8]
    at = found.rounds(real, estimate)
    if_paper = PrintedEpsilon(
        place="", population=REDDIT, users_per_round=users, rounds=max(1, result.rounds), delta=TINY_DELTA, digits=""
    )
    by_moments = result.epsilon.get("moments")
    return [
        name,
        f"{result.rounds:,}",
        cell(found, real, at),
        cell(found, estimate, at),
        signed(_gap(found, real, estimate, at)),
        epsilon_text(own_epsilon(result)),
        "∞" if by_moments is None else epsilon_text(by_moments),
        small(result.epsilon.get("delta") or 0.0),
        f"{result.population:,}",
        f"{moments(if_paper):.2f}, {today(if_paper):.2f}",
    ]


def _gap(found: Found, real: str, estimate: str, at: int | None) -> float | None:
    """The real run less its estimate, after so many rounds."""
    mine, other = found.accuracy(real, at), found.accuracy(estimate, at)
    return None if at is None or mine is None or other is None else mine - other
