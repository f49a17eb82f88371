"""Figure 1: what privacy costs in accuracy, and where the cost comes from.

`noised_vs_baseline` compares three amounts of noise with the non-private baseline by round, over all seeds.
`closing_the_gap` (not in the paper) separates the loss due to the clip from the loss due to the noise, and tests
whether a larger S reduces the gap.
"""

from reproduction import printed
from reproduction.exhibit import NOT_RUN, Draft, signed
from reproduction.printed import ACCURACY_ROUNDS, REDDIT, TINY_DELTA
from reproduction.recipes import GAP_NORMS, MAIN, clipped, noised
from reproduction.results import ResultSet
from reproduction.verdict import NEARLY, TRAINED, Ruling, below, in_points, plural
from unheard.formatting import NOTHING, epsilon_text, percent
from unheard.privacy.events import PoissonGaussian

BASELINE, LEAST_NOISE, MIDDLE_NOISE, MOST_NOISE = (run.name for run in MAIN)
LABELS = {
    BASELINE: "baseline",
    LEAST_NOISE: "σ = 0.003, S = 15",
    MIDDLE_NOISE: "σ = 0.006, S = 10",
    MOST_NOISE: "σ = 0.012, S = 15",
}
"""The four runs of Figure 1, which are also the rows of Table 2."""


def noised_vs_baseline(draft: Draft) -> Ruling:
    """Figure 1: accuracy by round for the baseline and three amounts of noise.

    Two tables have the mean of the seeds after some rounds, and the computation that the baseline and sigma = 0.003
    need for the same accuracy.

    The rule compares sigma = 0.003 with the baseline at the last round that both completed, even if the run with
    sigma = 0.012 stopped earlier.
    """
    results, draft.is_over_seeds = draft.results, True
    draft.add_curves("AccuracyTop1 by round", LABELS)
    marks = _marks(results, (100, 500, 1000, 2000, 3000, 4000, 5000))
    rows = []
    for name, label in LABELS.items():
        seeds = str(len(results.seeds(name)) or NOT_RUN)
        rows.append([label, seeds, *(draft.cell(name, at, over_seeds=True) for at in marks)])
        if name != BASELINE:
            gaps = (signed(results.difference(name, BASELINE, at)) for at in marks)
            rows.append(["  less the baseline, points", "", *gaps])
    title = "AccuracyTop1 after some rounds, mean of the seeds"
    draft.add_table(title, ["", "seeds", *(f"{mark:,}" for mark in marks)], rows)
    _add_computation(draft)
    draft.shared_round([BASELINE, LEAST_NOISE, MOST_NOISE], against=[BASELINE])
    both = [*results.seeds(BASELINE), *results.seeds(LEAST_NOISE)]
    trained = [one for one in both if (results.rounds(one) or 0) >= TRAINED]
    at, together = results.rounds(*trained) or 0, results.rounds(*trained, MOST_NOISE) or 0
    gap = results.difference(LEAST_NOISE, BASELINE, at) or 0.0
    base, least = (results.mean(name, at) for name in (BASELINE, LEAST_NOISE))
    most_gap = results.difference(MOST_NOISE, BASELINE, together) or 0.0
    more = results.difference(LEAST_NOISE, MOST_NOISE, together) or 0.0
    sentence = (
        f"After {plural(at)} σ = 0.003 is {below(gap)} the baseline ({percent(least)} against {percent(base)}), "
        f"σ = 0.012 {below(most_gap)} it{'' if together == at else f' after {plural(together)}'}. "
        f"{draft.about_seeds([gap], at)}"
    )
    is_near, is_open = gap >= -NEARLY, abs(more) <= results.margin(together)
    return None if is_near and is_open else is_near and more > 0, sentence


def _add_computation(draft: Draft) -> None:
    """Add a table of the rounds and user updates needed for the same accuracy, as in the introduction of the paper."""
    results = draft.results
    target = results.accuracy(LEAST_NOISE)
    both = (BASELINE, LEAST_NOISE)
    ours, private = (None if target is None else results.first_round_at(name, target) for name in both)
    times = f"{private * 5000 / (ours * 100):.0f} ×" if ours and private else NOTHING
    paper = [f"{rounds:,}" for rounds in (printed.BASELINE_ROUNDS, printed.PRIVATE_ROUNDS)]
    draft.add_table(
        "Computation for the same accuracy",
        ["", "AccuracyTop1", "rounds, baseline", "rounds, σ = 0.003", "user updates"],
        [
            ["paper", percent(printed.SAME_ACCURACY, 1), *paper, f"{printed.COMPUTATION} ×"],
            ["ours", percent(target), *(NOTHING if r is None else f"{r:,}" for r in (ours, private)), times],
        ],
        "Ours: up to the last accuracy of σ = 0.003, first seed. User updates are hypothetical: they compare 5,000 users per "
        "round at z = 1 with 100 users per round.",
    )


SIGMA = 0.003
"""The sigma of `closing_the_gap`."""
CLIPPED = {norm: clipped(norm).name for norm in GAP_NORMS}
NOISED = {norm: noised(norm, SIGMA).name for norm in GAP_NORMS}
"""Runs with the clip alone, and with clip and noise: the name of the run by S."""


def closing_the_gap(draft: Draft) -> Ruling:
    """For each S at sigma = 0.003: the accuracy, the cost of the clip and the cost of the noise.

    The table also has the users per round that z = 1 needs, and the epsilon for the population of the paper.
    """
    results, draft.is_over_seeds = draft.results, True
    rows = []
    for norm in GAP_NORMS:
        at, users = results.rounds(BASELINE, CLIPPED[norm], NOISED[norm]), round(norm / SIGMA)
        event = PoissonGaussian(sampling_prob=users / REDDIT, noise_multiplier=1.0)
        cells = (draft.cell(name, at, over_seeds=at is not None) for name in (BASELINE, NOISED[norm]))
        pairs = (CLIPPED[norm], BASELINE), (NOISED[norm], CLIPPED[norm])
        costs = (signed(results.difference(*pair, at)) for pair in pairs)
        epsilon = epsilon_text(printed.best_epsilon_today(event, ACCURACY_ROUNDS, TINY_DELTA))
        rows.append([f"S = {norm}", NOTHING if at is None else f"{at:,}", *cells, *costs, f"{users:,}", epsilon])
    draft.add_table(
        f"Where the points go at σ = {SIGMA}",
        ["", "rounds", "baseline", f"σ = {SIGMA}", "the clip", "the noise", "users per round", "ε"],
        rows,
        "AccuracyTop1 after the rounds that all three runs of a row completed. The clip: points of the clip alone against "
        "the baseline. The noise: points of the noise in addition. Users per round: for z = 1 at this σ and S. ε is "
        f"hypothetical: with {REDDIT:,} users after {plural(ACCURACY_ROUNDS)} at δ = 10⁻⁹, by the smaller of PLD and RDP.",
    )
    marks = _marks(results, (500, 1000, 1500, 2000, 2500, 3000))
    rows = [[f"S = {norm}", *(_gap_cell(draft, NOISED[norm], mark) for mark in marks)] for norm in GAP_NORMS]
    title = f"σ = {SIGMA} less the baseline after some rounds, in points"
    draft.add_table(title, ["", *(f"{mark:,}" for mark in marks)], rows)
    labels = {NOISED[norm]: f"σ = {SIGMA}, S = {norm}" for norm in GAP_NORMS}
    draft.add_curves("AccuracyTop1 by round", {BASELINE: "baseline"} | labels)
    smallest, *larger = GAP_NORMS
    at = draft.shared_round([BASELINE, *CLIPPED.values(), *NOISED.values()], against=[BASELINE])
    clip = -(results.difference(CLIPPED[smallest], BASELINE, at) or 0.0)
    noise = -(results.difference(NOISED[smallest], CLIPPED[smallest], at) or 0.0)
    base = results.mean(BASELINE, at) or 0.0
    accuracy = {norm: results.mean(NOISED[norm], at) or 0.0 for norm in GAP_NORMS}
    best = max(larger, key=accuracy.__getitem__)
    sentence = (
        f"After {plural(at)} the clip of S = {smallest} costs {in_points(clip)} points and σ = {SIGMA} "
        f"{in_points(noise)} more. S = {best} at the same σ has {percent(accuracy[best])} where S = {smallest} has "
        f"{percent(accuracy[smallest])} and the baseline {percent(base)}. "
        f"{draft.about_seeds([accuracy[best] - accuracy[smallest]], at)}"
    )
    gap, left = base - accuracy[smallest], base - accuracy[best]
    return None if gap <= results.margin(at) else left <= draft.recipe.limits["narrower"] * gap, sentence


def _gap_cell(draft: Draft, name: str, at: int) -> str:
    """Return the difference from the baseline in points as a table cell, or the reason why there is no value."""
    apart = draft.results.difference(name, BASELINE, at)
    return draft.reason_missing(name, at) if apart is None else signed(apart)


def _marks(results: ResultSet, marks: tuple[int, ...]) -> list[int]:
    """Return the numbers of rounds that the baseline reached, or its last round if it reached none of them."""
    end = results.rounds(BASELINE) or marks[-1]
    return [mark for mark in marks if mark <= end] or [end]
