"""Figures 11 and 12: 20,000 and 30,000 words. A word outside the dictionary is a mistake, so all three dictionaries compare."""

from collections.abc import Mapping

from reproduction.exhibit import Exhibit, Figure, Table
from reproduction.exhibit_parts import cell, level, reached, shown, signed, sweep
from reproduction.figures import VARIABLE
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.runs import clipped, noised
from reproduction.verdict import NEARLY, SMALL, Verdict, about_seeds, below, judged, missing, plural, points
from unheard.formatting import in_points

SIZES = {"": "10,000", "20k-": "20,000", "30k-": "30,000"}
FREE, QUIET, NOISY = VARIABLE.name, clipped(20).name, noised(20, 0.012).name
CLIPS: dict[float, str] = {norm: clipped(norm).name for norm in (10, 20)}
NOISES = {sigma: noised(20, sigma).name for sigma in (0.012, 0.048)}
RULE_CLIP = (
    f"Where all got to, without a clip the larger dictionaries are at most {points(NEARLY)} below 10,000 words and at "
    f"most {points(SMALL)} above; and S = 20 costs them at most {points(NEARLY)} more than it costs 10,000 words."
)
RULE_NOISE = (
    f"Where all got to, σ = 0.012 at S = 20 costs 20,000 and 30,000 words at most {points(NEARLY)} more than it costs "
    "10,000."
)


def dictionaries_clipping(recipe: Recipe, found: Found) -> Exhibit:
    return shown(
        recipe, found, judge_clipping(found), **_pieces(found, "dictionaries-clipping", "S", CLIPS, FREE, "no clip")
    )


def dictionaries_noise(recipe: Recipe, found: Found) -> Exhibit:
    return shown(
        recipe, found, judge_noise(found), **_pieces(found, "dictionaries-noise", "σ", NOISES, QUIET, "no noise")
    )


def judge_clipping(found: Found) -> Verdict:
    needed = [size + name for size in SIZES for name in (FREE, QUIET)]
    if lacking := missing(found, needed, RULE_CLIP, against=[size + FREE for size in SIZES]):
        return lacking
    at = found.rounds(*needed)
    gains = {SIZES[size]: _less(found, size + FREE, FREE, at) for size in ("20k-", "30k-")}
    costs = {words: _less(found, size + FREE, size + QUIET, at) for size, words in SIZES.items()}
    held = all(-NEARLY <= gain <= SMALL for gain in gains.values())
    held = held and all(cost - costs["10,000"] <= NEARLY for cost in costs.values())
    sentence = (
        f"After {plural(at or 0)} 20,000 words are {below(gains['20,000'])} 10,000, 30,000 words "
        f"{below(gains['30,000'])}. S = 20 "
        f"costs {_listed(costs)} points. {about_seeds(found, list(gains.values()), at)}"
    )
    return judged(held, sentence, RULE_CLIP)


def judge_noise(found: Found) -> Verdict:
    needed = [size + name for size in SIZES for name in (QUIET, NOISY)]
    if lacking := missing(found, needed, RULE_NOISE, against=[size + QUIET for size in SIZES]):
        return lacking
    at = found.rounds(*needed)
    costs = {words: _less(found, size + QUIET, size + NOISY, at) for size, words in SIZES.items()}
    held = all(cost - costs["10,000"] <= NEARLY for cost in costs.values())
    sentence = f"After {plural(at or 0)} σ = 0.012 costs {_listed(costs)} points. {about_seeds(found, list(costs.values()), at)}"
    return judged(held, sentence, RULE_NOISE)


def _listed(costs: Mapping[str, float]) -> str:
    return ", ".join(f"{in_points(cost)} ({words} words)" for words, cost in costs.items())


def _less(found: Found, first: str, second: str, at: int | None) -> float:
    return (found.accuracy(first, at) or 0.0) - (found.accuracy(second, at) or 0.0)


def _pieces(found: Found, name: str, axis: str, swept: Mapping[float, str], plain: str, plain_label: str) -> dict:
    """The last round drawn for every dictionary as lines; every round in the table, with the difference to 10,000 words."""
    everything = [size + run for size in SIZES for run in (*swept.values(), plain)]
    marks = reached(found, [run for run in everything if run[:3] in ("20k", "30k")])
    last = marks[-1]
    lines = []
    for size, words in SIZES.items():
        runs = {x: size + run for x, run in swept.items()}
        lines.append(sweep(found, runs, last, name=f"{words} words"))
        lines += level(found, size + plain, last, name=f"{words} words, {plain_label}", tint=f"{words} words")
    figure = Figure(
        name=name, title=f"AccuracyTop1 against {axis} after {plural(last)}", x=axis, lines=tuple(lines), is_log=True
    )
    rows = []
    for label, run in [(plain_label, plain), *((f"{axis} = {x:g}", run) for x, run in swept.items())]:
        for size, words in SIZES.items():
            value, other = found.accuracy(size + run, last), found.accuracy(run, last)
            gap = None if not size or value is None or other is None else value - other
            rows.append([f"{label}, {words} words", *(cell(found, size + run, mark) for mark in marks), signed(gap)])
    columns = ["", *(f"{mark:,}" for mark in marks), "less 10,000 words"]
    table = Table(title="AccuracyTop1 after some rounds; difference in points", columns=columns, rows=rows)
    return {"tables": [table], "figures": [figure], "beside": [*swept.values(), plain]}
