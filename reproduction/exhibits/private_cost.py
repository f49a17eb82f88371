"""Figure 1: what privacy costs in accuracy, and where the cost comes from.

`noised_vs_baseline` compares three amounts of noise with the non-private baseline by round, over all seeds.
`closing_the_gap` (not in the paper) separates the loss due to the clip from the loss due to the noise, and tests
whether a larger S reduces the gap.
"""

from reproduction.exhibit import NOT_RUN, Exhibit, Table, build_exhibit, cell, curves_by_round, reason_missing, signed
from reproduction.printed import (
    ACCURACY_ROUNDS,
    BASELINE_ROUNDS,
    COMPUTATION,
    PRIVATE_ROUNDS,
    REDDIT,
    SAME_ACCURACY,
    TINY_DELTA,
    best_epsilon_today,
)
from reproduction.recipe import Recipe
from reproduction.recipes import GAP_NORMS, clipped, noised
from reproduction.results import ResultSet
from reproduction.verdict import NEARLY, TRAINED, Verdict, about_seeds, below, decide, margin, missing, plural, points
from unheard.formatting import NOTHING, epsilon_text, in_points, percent
from unheard.privacy.events import PoissonGaussian

BASELINE, LEAST_NOISE, MIDDLE_NOISE, MOST_NOISE = (
    "baseline",
    "flat-S15-sigma0.003",
    "flat-S10-sigma0.006",
    "flat-S15-sigma0.012",
)
LABELS = {
    BASELINE: "baseline",
    LEAST_NOISE: "σ = 0.003, S = 15",
    MIDDLE_NOISE: "σ = 0.006, S = 10",
    MOST_NOISE: "σ = 0.012, S = 15",
}
"""The four runs of Figure 1, which are also the rows of Table 2."""
MARKS = (100, 500, 1000, 2000, 3000, 4000, 5000)
"""Numbers of rounds in the columns of the table."""
RULE_NOISED = (
    f"Where all of their seeds got to, σ = 0.003 is at most {points(NEARLY)} below the baseline; where all three "
    "got to, "
    "σ = 0.012 is further below it by more than two seeds can differ; within that it cannot be told."
)


def noised_vs_baseline(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Figure 1: accuracy by round for the baseline and three amounts of noise, the mean of the seeds after some rounds,
    and the computation that both need for the same accuracy."""
    figure = curves_by_round(results, "noised-vs-baseline", "AccuracyTop1 by round", LABELS, over_seeds=True)
    tables = [_accuracy_table(results), _computation_table(results)]
    return build_exhibit(recipe, results, judge_noised(results), tables=tables, figures=[figure], over_seeds=True)


def judge_noised(results: ResultSet) -> Verdict:
    """Apply the rule. The least noise is compared with the baseline after all rounds that both completed, although the
    run with the most noise may have stopped earlier."""
    if undecided := missing(results, [BASELINE, LEAST_NOISE, MOST_NOISE], RULE_NOISED, against=[BASELINE]):
        return undecided
    seeds = [
        one for name in (BASELINE, LEAST_NOISE) for one in results.seeds(name) if (results.rounds(one) or 0) >= TRAINED
    ]
    at, together = results.rounds(*seeds) or 0, results.rounds(*seeds, MOST_NOISE) or 0
    base, least = (results.mean(name, at) or 0.0 for name in (BASELINE, LEAST_NOISE))
    base_then, least_then, most = (results.mean(name, together) or 0.0 for name in (BASELINE, LEAST_NOISE, MOST_NOISE))
    sentence = (
        f"After {plural(at)} σ = 0.003 is {below(least - base)} the baseline ({percent(least)} against "
        f"{percent(base)}), "
        f"σ = 0.012 {below(most - base_then)} it{'' if together == at else f' after {plural(together)}'}. "
        f"{about_seeds(results, [least - base], at)}"
    )
    is_near, is_open = least - base >= -NEARLY, abs(least_then - most) <= margin(results, together)
    return decide(None if is_near and is_open else is_near and most < least_then, sentence, RULE_NOISED)


def _accuracy_table(results: ResultSet) -> Table:
    """Mean accuracy of each run after some rounds, and its difference from the baseline."""
    end = results.rounds(BASELINE) or MARKS[-1]
    marks = [mark for mark in MARKS if mark <= end] or [end]
    rows = []
    for name, label in LABELS.items():
        rows.append([label, str(len(results.seeds(name)) or NOT_RUN), *(_mean_cell(results, name, at) for at in marks)])
        if name != BASELINE:
            rows.append(["  less the baseline, points", "", *(_gap_cell(results, name, at) for at in marks)])
    return Table(
        title="AccuracyTop1 after some rounds, mean of the seeds",
        columns=["", "seeds", *(f"{mark:,}" for mark in marks)],
        rows=rows,
    )


def _computation_table(results: ResultSet) -> Table:
    """Rounds and user updates to the same accuracy, as in the introduction of the paper."""
    target = results.accuracy(LEAST_NOISE)
    ours = results.first_round_at(BASELINE, target) if target is not None else None
    private = results.first_round_at(LEAST_NOISE, target) if target is not None else None
    times = f"{private * 5000 / (ours * 100):.0f} ×" if ours and private else NOTHING
    rows = [
        [
            "paper",
            percent(SAME_ACCURACY.value, 1),
            f"{BASELINE_ROUNDS.value:,.0f}",
            f"{PRIVATE_ROUNDS.value:,.0f}",
            f"{COMPUTATION.value:.0f} ×",
        ],
        ["ours", percent(target), *(NOTHING if r is None else f"{r:,}" for r in (ours, private)), times],
    ]
    return Table(
        title="Computation for the same accuracy",
        columns=["", "AccuracyTop1", "rounds, baseline", "rounds, σ = 0.003", "user updates"],
        rows=rows,
        note="Ours: to where σ = 0.003 ended, first seed. Updates of 5,000 users per round at z = 1 against 100: hypothetical.",
    )


def _mean_cell(results: ResultSet, name: str, at: int) -> str:
    """Mean accuracy over the seeds as a table cell."""
    value = results.mean(name, at)
    return reason_missing(results, name, at) if value is None else percent(value)


def _gap_cell(results: ResultSet, name: str, at: int) -> str:
    """Difference from the baseline as a table cell."""
    mine, base = results.mean(name, at), results.mean(BASELINE, at)
    return signed(None if mine is None or base is None else mine - base)


SIGMA = 0.003
BASELINE = "baseline"
CLIPPED = {norm: clipped(norm).name for norm in GAP_NORMS}
NOISED = {norm: noised(norm, SIGMA).name for norm in GAP_NORMS}
SMALLEST_S, *LARGER_S = GAP_NORMS
GAP_MARKS = (500, 1000, 1500, 2000, 2500, 3000)
"""Numbers of rounds in the columns of the table of gaps."""
NARROWER = 0.75
"""The larger S must leave at most this share of the gap; a smaller change could be chance."""
RULE_GAP = (
    f"Where all got to, with σ = {SIGMA} the best of S = {' and '.join(str(norm) for norm in LARGER_S)} is at most "
    f"{NARROWER:.0%} as "
    f"far below the baseline as S = {SMALLEST_S} is. Where S = {SMALLEST_S} is no further below it than two seeds "
    "can differ, there is "
    "nothing to tell."
)


def closing_the_gap(recipe: Recipe, results: ResultSet) -> Exhibit:
    """For each S at sigma = 0.003: accuracy, loss due to the clip, additional loss due to the noise, users per round for
    z = 1, and epsilon with the population of the paper."""
    rows = []
    for norm in GAP_NORMS:
        at, users = results.rounds(BASELINE, CLIPPED[norm], NOISED[norm]), round(norm / SIGMA)
        rows.append(
            [
                f"S = {norm}",
                NOTHING if at is None else f"{at:,}",
                cell(results, BASELINE) if at is None else percent(results.mean(BASELINE, at)),
                cell(results, NOISED[norm]) if at is None else percent(results.mean(NOISED[norm], at)),
                signed(results.difference(CLIPPED[norm], BASELINE, at)),
                signed(results.difference(NOISED[norm], CLIPPED[norm], at)),
                f"{users:,}",
                epsilon_text(_epsilon_at_z1(users)),
            ]
        )
    table = Table(
        title=f"Where the points go at σ = {SIGMA}",
        columns=["", "rounds", "baseline", f"σ = {SIGMA}", "the clip", "the noise", "users per round", "ε"],
        rows=rows,
        note=(
            "AccuracyTop1 after as many rounds as all three runs of a row got to. The clip: the clip alone against "
            "the baseline; "
            "the noise: what it takes besides; in points. Users per round: what z = 1 needs at this σ and S. ε is "
            "hypothetical: with "
            f"{REDDIT:,} users after {plural(ACCURACY_ROUNDS)} at δ = 10⁻⁹, by the smaller of PLD and RDP."
        ),
    )
    labels = {BASELINE: "baseline"} | {NOISED[norm]: f"σ = {SIGMA}, S = {norm}" for norm in GAP_NORMS}
    figure = curves_by_round(results, "closing-the-gap", "AccuracyTop1 by round", labels, over_seeds=True)
    return build_exhibit(
        recipe, results, judge_gap(results), tables=[table, _gap_table(results)], figures=[figure], over_seeds=True
    )


def _gap_table(results: ResultSet) -> Table:
    """Difference between noised training and the baseline after some rounds, for each S."""
    end = results.rounds(BASELINE) or GAP_MARKS[-1]
    marks = [mark for mark in GAP_MARKS if mark <= end] or [end]
    return Table(
        title=f"σ = {SIGMA} less the baseline after some rounds, in points",
        columns=["", *(f"{mark:,}" for mark in marks)],
        rows=[
            [f"S = {norm}", *(_gap_to_baseline(results, NOISED[norm], mark) for mark in marks)] for norm in GAP_NORMS
        ],
    )


def _gap_to_baseline(results: ResultSet, name: str, at: int) -> str:
    """Difference from the baseline, or the reason why there is none."""
    apart = results.difference(name, BASELINE, at)
    return reason_missing(results, name, at) if apart is None else signed(apart)


def judge_gap(results: ResultSet) -> Verdict:
    """Apply the rule to the best of the larger norms."""
    names = [BASELINE, *CLIPPED.values(), *NOISED.values()]
    if undecided := missing(results, names, RULE_GAP, against=[BASELINE]):
        return undecided
    at = results.rounds(*names)
    clip = -(results.difference(CLIPPED[SMALLEST_S], BASELINE, at) or 0.0)
    noise = -(results.difference(NOISED[SMALLEST_S], CLIPPED[SMALLEST_S], at) or 0.0)
    base = results.mean(BASELINE, at) or 0.0
    accuracy = {norm: results.mean(NOISED[norm], at) or 0.0 for norm in GAP_NORMS}
    best = max(LARGER_S, key=lambda norm: accuracy[norm])
    sentence = (
        f"After {plural(at or 0)} the clip of S = {SMALLEST_S} costs {in_points(clip)} points and σ = {SIGMA} "
        f"{in_points(noise)} more. "
        f"S = {best} at the same σ has {percent(accuracy[best])} where S = {SMALLEST_S} has "
        f"{percent(accuracy[SMALLEST_S])} and the baseline "
        f"{percent(base)}. {about_seeds(results, [accuracy[best] - accuracy[SMALLEST_S]], at)}"
    )
    gap, left = base - accuracy[SMALLEST_S], base - accuracy[best]
    return decide(None if gap <= margin(results, at) else left <= NARROWER * gap, sentence, RULE_GAP)


def _epsilon_at_z1(users: int) -> float:
    """Epsilon with z = 1 for the population, the rounds and the delta of Table 2."""
    return best_epsilon_today(
        PoissonGaussian(sampling_prob=users / REDDIT, noise_multiplier=1.0), ACCURACY_ROUNDS, TINY_DELTA
    )
