"""Figures 4 and 8: S and sigma moved together at equal privacy, from the beginning and after the first 4,885 rounds."""

import re
from dataclasses import replace

from reproduction.exhibit import Exhibit, Figure, Table
from reproduction.exhibit_parts import by_round, cell, shown, signed, sweep
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.runs import FIRST, TRADES, traded
from reproduction.runs import THEN as LATER
from reproduction.verdict import NEARLY, Verdict, about_seeds, below, judged, margin, missing, plural, points
from unheard.formatting import percent

S20 = traded(20).name
AGAIN = traded(20).with_seed(2).name
BEGUN = {norm: traded(norm).name for norm in TRADES}
THEN = {norm: traded(norm, after=S20).name for norm in TRADES}
LAYERED = {norm: traded(norm, "per_layer", after=S20).name for norm in TRADES}
BEST_FIRST = (10, 12.6)
SMALLER = 7.9
RULE_FIRST = (
    "Where all got to, no S is above the better of 10 and 12.6 by more than two seeds can differ, and the worst is below it by "
    f"more; if all six lie within that, it cannot be told. Both are at most {points(NEARLY)} below the best S, and the two runs "
    f"with S = 20 end at most {points(NEARLY)} apart."
)
RULE_THEN = (
    "Where both got to, S = 7.9 ends above S = 20, both begun from the same model, by more than two seeds can differ; within that "
    "it cannot be told."
)


def trade_offs(recipe: Recipe, found: Found) -> Exhibit:
    labels = {name: _label(norm) for norm, name in BEGUN.items()} | {AGAIN: f"{_label(20)}, again"}
    figure = _paired(by_round(found, "trade-offs", "AccuracyTop1 by round, z = 0.06 throughout", labels))
    at = found.rounds(*(name for name in BEGUN.values() if name in found))
    rows = [[_label(norm), cell(found, name, 500), cell(found, name, at)] for norm, name in BEGUN.items()]
    rows.append([f"{_label(20)}, again", cell(found, AGAIN, 500), cell(found, AGAIN, at)])
    end = plural(at) if at else "all rounds"
    table = Table(title="AccuracyTop1", columns=["", "after 500 rounds", f"after {end}"], rows=rows)
    return shown(recipe, found, judge_first(found), tables=[table], figures=[figure], over_seeds=True)


def trade_offs_adjusted(recipe: Recipe, found: Found) -> Exhibit:
    first = _begun_after(found)
    curves = by_round(
        found,
        "trade-offs-adjusted",
        f"AccuracyTop1 by round, adjusted after {first:,}",
        {name: _label(norm) for norm, name in THEN.items()}
        | {LAYERED[n]: f"{_label(n)}, per layer" for n in (7.9, 12.6, 20)},
        first=first,
    )
    curves = _paired(curves)
    at = found.rounds(*(name for name in (*THEN.values(), *LAYERED.values()) if name in found))
    half = at // 2 if at else 3000
    end = at or 6000
    begun = found.rounds(*(name for name in BEGUN.values() if name in found)) or FIRST
    by_norm = Figure(
        name="trade-offs-by-S",
        title="AccuracyTop1 against S (σ = 0.0006 S)",
        x="S",
        lines=(
            sweep(found, BEGUN, begun, name=f"from the beginning, {begun:,} rounds"),
            sweep(found, THEN, half, name=f"adjusted, {half:,} rounds more"),
            sweep(
                found,
                LAYERED,
                half,
                name=f"per layer, {half:,} more",
                tint=f"adjusted, {half:,} rounds more",
                dashed=True,
            ),
            sweep(found, THEN, end, name=f"adjusted, {end:,} rounds more"),
            sweep(
                found, LAYERED, end, name=f"per layer, {end:,} more", tint=f"adjusted, {end:,} rounds more", dashed=True
            ),
        ),
    )
    rows = []
    for norm in TRADES:
        gap = _gap(found, THEN[norm], THEN[20], at)
        layered = cell(found, LAYERED[norm], at) if norm in (7.9, 12.6, 20) else "—"
        rows.append([_label(norm), cell(found, BEGUN[norm], begun), cell(found, THEN[norm], at), signed(gap), layered])
    table = Table(
        title="AccuracyTop1",
        columns=[
            "",
            f"from the beginning, {begun:,}",
            f"adjusted, {end:,} more",
            "less S = 20, points",
            "per layer, adjusted",
        ],
        rows=rows,
    )
    return shown(recipe, found, judge_then(found), tables=[table], figures=[curves, by_norm], beside=BEGUN.values())


def judge_first(found: Found) -> Verdict:
    names = [*BEGUN.values(), AGAIN]
    if lacking := missing(found, names, RULE_FIRST):
        return lacking
    at = found.rounds(*names)
    values = {norm: found.accuracy(name, at) or 0.0 for norm, name in BEGUN.items()}
    best = max(values, key=lambda norm: values[norm])
    claimed = max(values[norm] for norm in BEST_FIRST)
    twice = abs(values[20] - (found.accuracy(AGAIN, at) or 0.0))
    sentence = (
        f"After {plural(at or 0)} S = {best:g} is best ({percent(values[best])}); "
        f"{' and '.join(f'S = {norm:g} has {percent(values[norm])}' for norm in BEST_FIRST)}. Two runs with S = 20 end "
        f"{points(twice)} apart. {about_seeds(found, [values[best] - values[norm] for norm in BEST_FIRST], at)}"
    )
    same = margin(found, at)
    if values[best] - min(values.values()) <= same:
        return judged(None, f"{sentence} All six lie within {points(same)}.", RULE_FIRST)
    held = values[best] - claimed <= same < claimed - min(values.values())
    do_both = all(values[best] - values[norm] <= NEARLY for norm in BEST_FIRST)
    return judged(held and do_both and twice <= NEARLY, sentence, RULE_FIRST)


def judge_then(found: Found) -> Verdict:
    names = [THEN[SMALLER], THEN[20]]
    if lacking := missing(found, names, RULE_THEN):
        return lacking
    if len({_start(found, name) for name in names}) > 1:
        return judged(None, "The two were begun from different models.", RULE_THEN)
    at = found.rounds(*names)
    gap = _gap(found, names[0], names[1], at) or 0.0
    there = {norm: value for norm, name in THEN.items() if (value := found.accuracy(name, at)) is not None}
    best = max(there, key=lambda norm: there[norm])
    sentence = (
        f"{plural(at or 0).capitalize()} after the change, which came after {_begun_after(found):,} (in the paper {LATER:,} and "
        f"{FIRST:,}), S = 7.9 is {below(gap)} S = 20 at the same privacy; best is S = {best:g} ({percent(there[best])}). "
        f"{about_seeds(found, [gap])}"
    )
    return judged(None if abs(gap) <= margin(found) else gap > 0, sentence, RULE_THEN)


def _begun_after(found: Found) -> int:
    """The round of the S = 20 run that the others were begun from, as their results say it."""
    for name in (*THEN.values(), *LAYERED.values()):
        if said := re.search(r"after (\d+) rounds", _start(found, name)):
            return int(said.group(1))
    return found.runs[S20].rounds if S20 in found else FIRST


def _start(found: Found, name: str) -> str:
    """What a run was begun from, as its result says it: `flat-S20-sigma0.012 after 500 rounds`."""
    return str(found.runs[name].settings.get("training", {}).get("init_from", "")) if name in found else ""


def _label(norm: float) -> str:
    return f"S = {norm:g}, σ = {norm * 0.0006:.4g}"


def _gap(found: Found, first: str, second: str, at: int | None) -> float | None:
    mine, other = found.accuracy(first, at), found.accuracy(second, at)
    return None if at is None or mine is None or other is None else mine - other


def _paired(figure: Figure) -> Figure:
    """With the second line of an S (per layer, or run again) dashed in the colour of the first, as in the paper."""
    firsts = {_label(norm) for norm in TRADES}
    pairs = ((line, next(name for name in firsts if line.name.startswith(name))) for line in figure.lines)
    return replace(
        figure,
        lines=tuple(line if line.name == name else replace(line, tint=name, is_dashed=True) for line, name in pairs),
    )
