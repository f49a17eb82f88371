"""Figure 1: noised training against the non-private baseline, by round, with every seed."""

from reproduction.exhibit import NOT_RUN, Exhibit, Table
from reproduction.exhibit_parts import by_round, lacking, shown, signed
from reproduction.printed import BASELINE_ROUNDS, COMPUTATION, PRIVATE_ROUNDS, SAME_ACCURACY
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.verdict import NEARLY, TRAINED, Verdict, about_seeds, below, judged, margin, missing, plural, points
from unheard.formatting import NOTHING, percent

BASELINE, LEAST, MIDDLE, MOST = "baseline", "flat-S15-sigma0.003", "flat-S10-sigma0.006", "flat-S15-sigma0.012"
LABELS = {
    BASELINE: "baseline",
    LEAST: "σ = 0.003, S = 15",
    MIDDLE: "σ = 0.006, S = 10",
    MOST: "σ = 0.012, S = 15",
}
MARKS = (100, 500, 1000, 2000, 3000, 4000, 5000)
RULE = (
    f"Where all of their seeds got to, σ = 0.003 is at most {points(NEARLY)} below the baseline; where all three got to, "
    "σ = 0.012 is further below it by more than two seeds can differ; within that it cannot be told."
)


def noised_vs_baseline(recipe: Recipe, found: Found) -> Exhibit:
    figure = by_round(found, "noised-vs-baseline", "AccuracyTop1 by round", LABELS, over_seeds=True)
    tables = [_by_round(found), _computation(found)]
    return shown(recipe, found, judge(found), tables=tables, figures=[figure], over_seeds=True)


def judge(found: Found) -> Verdict:
    """The comparison that matters most is read where it got to, though the run with the most noise may have stopped earlier."""
    if lacking := missing(found, [BASELINE, LEAST, MOST], RULE, against=[BASELINE]):
        return lacking
    seeds = [one for name in (BASELINE, LEAST) for one in found.seeds(name) if (found.rounds(one) or 0) >= TRAINED]
    at, together = found.rounds(*seeds) or 0, found.rounds(*seeds, MOST) or 0
    base, least = (found.mean(name, at) or 0.0 for name in (BASELINE, LEAST))
    base_then, least_then, most = (found.mean(name, together) or 0.0 for name in (BASELINE, LEAST, MOST))
    sentence = (
        f"After {plural(at)} σ = 0.003 is {below(least - base)} the baseline ({percent(least)} against {percent(base)}), "
        f"σ = 0.012 {below(most - base_then)} it{'' if together == at else f' after {plural(together)}'}. "
        f"{about_seeds(found, [least - base], at)}"
    )
    is_near, is_open = least - base >= -NEARLY, abs(least_then - most) <= margin(found, together)
    return judged(None if is_near and is_open else is_near and most < least_then, sentence, RULE)


def _by_round(found: Found) -> Table:
    end = found.rounds(BASELINE) or MARKS[-1]
    marks = [mark for mark in MARKS if mark <= end] or [end]
    rows = []
    for name, label in LABELS.items():
        rows.append([label, str(len(found.seeds(name)) or NOT_RUN), *(_mean(found, name, at) for at in marks)])
        if name != BASELINE:
            rows.append(["  less the baseline, points", "", *(_gap(found, name, at) for at in marks)])
    return Table(
        title="AccuracyTop1 after some rounds, mean of the seeds",
        columns=["", "seeds", *(f"{mark:,}" for mark in marks)],
        rows=rows,
    )


def _computation(found: Found) -> Table:
    """The introduction's comparison: rounds and user updates to the same accuracy."""
    target = found.accuracy(LEAST)
    ours = found.reach(BASELINE, target) if target is not None else None
    private = found.reach(LEAST, target) if target is not None else None
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
        note="Ours: to where σ = 0.003 ended, first seed. User updates for 5,000 users a round at z = 1 against 100: hypothetical.",
    )


def _mean(found: Found, name: str, at: int) -> str:
    value = found.mean(name, at)
    return lacking(found, name, at) if value is None else percent(value)


def _gap(found: Found, name: str, at: int) -> str:
    mine, base = found.mean(name, at), found.mean(BASELINE, at)
    return signed(None if mine is None or base is None else mine - base)
