"""What is between sigma = 0.003 and the baseline: what the clip takes, what the noise takes, and what a larger S gives back."""

from reproduction.epsilons import claimed_today
from reproduction.exhibit import Exhibit, Table
from reproduction.exhibit_parts import by_round, cell, lacking, shown, signed
from reproduction.printed import ACCURACY_ROUNDS, REDDIT, TINY_DELTA
from reproduction.recipe import Recipe
from reproduction.recipes import GAPS
from reproduction.results_query import Found
from reproduction.runs import clipped, noised
from reproduction.verdict import Verdict, about_seeds, judged, margin, missing, plural
from unheard.formatting import NOTHING, epsilon_text, in_points, percent
from unheard.privacy.events import PoissonGaussian

SIGMA = 0.003
BASELINE = "baseline"
CLIPPED = {norm: clipped(norm).name for norm in GAPS}
NOISED = {norm: noised(norm, SIGMA).name for norm in GAPS}
LEAST, *LARGER = GAPS
MARKS = (500, 1000, 1500, 2000, 2500, 3000)
NARROWER = 0.75
"""At most this share of the gap is left: less of a change could be chance."""
RULE = (
    f"Where all got to, with σ = {SIGMA} the best of S = {' and '.join(str(norm) for norm in LARGER)} is at most {NARROWER:.0%} as "
    f"far below the baseline as S = {LEAST} is. Where S = {LEAST} is no further below it than two seeds can differ, there is "
    "nothing to tell."
)


def closing_the_gap(recipe: Recipe, found: Found) -> Exhibit:
    rows = []
    for norm in GAPS:
        at, users = found.rounds(BASELINE, CLIPPED[norm], NOISED[norm]), round(norm / SIGMA)
        rows.append(
            [
                f"S = {norm}",
                NOTHING if at is None else f"{at:,}",
                cell(found, BASELINE) if at is None else percent(found.mean(BASELINE, at)),
                cell(found, NOISED[norm]) if at is None else percent(found.mean(NOISED[norm], at)),
                signed(found.apart(CLIPPED[norm], BASELINE, at)),
                signed(found.apart(NOISED[norm], CLIPPED[norm], at)),
                f"{users:,}",
                epsilon_text(_claimed(users)),
            ]
        )
    table = Table(
        title=f"Where the points go at σ = {SIGMA}",
        columns=["", "rounds", "baseline", f"σ = {SIGMA}", "the clip", "the noise", "users a round", "ε"],
        rows=rows,
        note=(
            "AccuracyTop1 after as many rounds as all three runs of a row got to. The clip: the clip alone against the baseline; "
            "the noise: what it takes besides; in points. Users a round: what z = 1 needs at this σ and S. ε is hypothetical: with "
            f"{REDDIT:,} users after {plural(ACCURACY_ROUNDS)} at δ = 10⁻⁹, by the smaller of PLD and RDP."
        ),
    )
    labels = {BASELINE: "baseline"} | {NOISED[norm]: f"σ = {SIGMA}, S = {norm}" for norm in GAPS}
    figure = by_round(found, "closing-the-gap", "AccuracyTop1 by round", labels, over_seeds=True)
    return shown(recipe, found, judge(found), tables=[table, _by_round(found)], figures=[figure], over_seeds=True)


def _by_round(found: Found) -> Table:
    """How the gap of each S goes on."""
    end = found.rounds(BASELINE) or MARKS[-1]
    marks = [mark for mark in MARKS if mark <= end] or [end]
    return Table(
        title=f"σ = {SIGMA} less the baseline after some rounds, in points",
        columns=["", *(f"{mark:,}" for mark in marks)],
        rows=[[f"S = {norm}", *(_gap(found, NOISED[norm], mark) for mark in marks)] for norm in GAPS],
    )


def _gap(found: Found, name: str, at: int) -> str:
    apart = found.apart(name, BASELINE, at)
    return lacking(found, name, at) if apart is None else signed(apart)


def judge(found: Found) -> Verdict:
    names = [BASELINE, *CLIPPED.values(), *NOISED.values()]
    if lacking := missing(found, names, RULE, against=[BASELINE]):
        return lacking
    at = found.rounds(*names)
    clip = -(found.apart(CLIPPED[LEAST], BASELINE, at) or 0.0)
    noise = -(found.apart(NOISED[LEAST], CLIPPED[LEAST], at) or 0.0)
    base = found.mean(BASELINE, at) or 0.0
    accuracy = {norm: found.mean(NOISED[norm], at) or 0.0 for norm in GAPS}
    best = max(LARGER, key=lambda norm: accuracy[norm])
    sentence = (
        f"After {plural(at or 0)} the clip of S = {LEAST} costs {in_points(clip)} points and σ = {SIGMA} {in_points(noise)} more. "
        f"S = {best} at the same σ has {percent(accuracy[best])} where S = {LEAST} has {percent(accuracy[LEAST])} and the baseline "
        f"{percent(base)}. {about_seeds(found, [accuracy[best] - accuracy[LEAST]], at)}"
    )
    gap, left = base - accuracy[LEAST], base - accuracy[best]
    return judged(None if gap <= margin(found, at) else left <= NARROWER * gap, sentence, RULE)


def _claimed(users: int) -> float:
    return claimed_today(
        PoissonGaussian(sampling_prob=users / REDDIT, noise_multiplier=1.0), ACCURACY_ROUNDS, TINY_DELTA
    )
