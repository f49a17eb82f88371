"""Figures 9 and 10: FedSGD, one gradient of all of a user's data: a smaller S does, less noise is borne, more rounds are needed."""

from reproduction.exhibit import Exhibit, Figure, Table
from reproduction.exhibit_parts import cell, level, reached, shown, sweep
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.runs import clipped, noised
from reproduction.verdict import NEARLY, Verdict, idle, judged, margin, missing, plural, points
from unheard.formatting import in_points, percent

CLIPPED = {norm: f"fedsgd-{clipped(norm).name}" for norm in (0.5, 1, 2, 5, 20)}
NOISED = {sigma: f"fedsgd-{noised(20, sigma).name}" for sigma in (0.001, 0.002, 0.006, 0.024)}
CHOSEN = f"fedsgd-{noised(2, 0.002).name}"
AVERAGED, AVERAGED_NOISED = clipped(20).name, noised(20, 0.024).name
"""FedAvg at the same S, without and with noise."""
SWINGS = (
    " Evaluations of FedSGD swing, so its runs are compared over the last quarter of their rounds, evaluation by evaluation. The "
    "mean difference is uncertain by two standard errors, and at least by what two seeds can differ; if that reaches across the "
    "half point, it cannot be told."
)
RULE_CLIP = (
    f"Where all got to, S = 2 is at most {points(NEARLY)} below every other S of FedSGD, and FedAvg (S = 20) reaches "
    f"what FedSGD reached at best in less than half of its rounds.{SWINGS}"
)
RULE_NOISE = (
    f"Where all got to, σ = 0.002 costs FedSGD at most {points(NEARLY)} at S = 20, and σ = 0.024 costs it a larger "
    f"part of its accuracy than it costs FedAvg.{SWINGS}"
)


def fedsgd_clipping(recipe: Recipe, found: Found) -> Exhibit:
    marks = reached(found, CLIPPED.values())
    lines = tuple(sweep(found, CLIPPED, mark, name=f"after {plural(mark)}") for mark in marks)
    figure = Figure(name="fedsgd-clipping", title="FedSGD: AccuracyTop1 against S", x="S", lines=lines, is_log=True)
    rows = [[f"S = {norm:g}", *(cell(found, name, mark) for mark in marks)] for norm, name in CLIPPED.items()]
    rows.append(["FedAvg, S = 20", *(cell(found, AVERAGED, mark) for mark in marks)])
    table = Table(title="AccuracyTop1 after some rounds", columns=["", *(f"{mark:,}" for mark in marks)], rows=rows)
    return shown(
        recipe, found, judge_clipping(found), tables=[table], figures=[figure], notes=[_NOTE], beside=[AVERAGED]
    )


def fedsgd_noise(recipe: Recipe, found: Found) -> Exhibit:
    marks = reached(found, [*NOISED.values(), CLIPPED[20]])
    lines = []
    for mark in marks:
        name = f"after {plural(mark)}"
        lines += [
            sweep(found, NOISED, mark, name=name),
            *level(found, CLIPPED[20], mark, name=f"{name}, no noise", tint=name),
        ]
    figure = Figure(
        name="fedsgd-noise", title="FedSGD: AccuracyTop1 against σ, S = 20", x="σ", lines=tuple(lines), is_log=True
    )
    rows = [["no noise", *(cell(found, CLIPPED[20], mark) for mark in marks)]]
    rows += [[f"σ = {sigma:g}", *(cell(found, name, mark) for mark in marks)] for sigma, name in NOISED.items()]
    rows.append(["σ = 0.002, S = 2", *(cell(found, CHOSEN, mark) for mark in marks)])
    table = Table(title="AccuracyTop1 after some rounds", columns=["", *(f"{mark:,}" for mark in marks)], rows=rows)
    slip = (
        "The paper's text gives 1,500 users a round for S = 2 and σ = 0.002, and 1,000 for S = 15 and σ = 0.01. S/σ "
        "is 1,000 for the first and 1,500 for the second."
    )
    return shown(
        recipe,
        found,
        judge_noise(found),
        tables=[table],
        figures=[figure],
        notes=[slip],
        beside=[AVERAGED, AVERAGED_NOISED],
    )


def judge_clipping(found: Found) -> Verdict:
    needed = [*CLIPPED.values(), AVERAGED]
    if lacking := missing(found, needed, RULE_CLIP):
        return lacking
    at = found.rounds(*CLIPPED.values()) or 0
    values = {norm: found.accuracy(name, at) or 0.0 for norm, name in CLIPPED.items()}
    best = max(values, key=lambda norm: values[norm])
    if lacking := idle(found, [CLIPPED[best]], RULE_CLIP, at):
        return lacking
    sooner, ended = found.reach(AVERAGED, values[best]), found.rounds(AVERAGED) or 0
    words = f"FedAvg had that after {plural(sooner)}" if sooner is not None else f"FedAvg never had that in {ended:,}"
    rivals = {norm: name for norm, name in CLIPPED.items() if norm != 2}
    ahead = {n: apart for n, name in rivals.items() if (apart := _ahead(found, name, CLIPPED[2], at)) is not None}
    if len(ahead) < len(rivals):
        return judged(None, _STRANGERS, RULE_CLIP)
    is_open = any(abs(more - NEARLY) <= off for more, off in ahead.values())
    is_far = any(more - NEARLY > off for more, off in ahead.values())
    rival = max(ahead, key=lambda norm: ahead[norm])
    more, off = ahead[rival]
    sentence = (
        f"After {plural(at)} FedSGD reached {percent(values[best])} with S = {best:g}; {words}. In the last quarter of FedSGD's "
        f"rounds S = {rival:g} is {points(abs(more))} {'above' if more > 0 else 'below'} S = 2, uncertain by {points(off)}."
    )
    if not is_far and sooner is None and 2 * ended < at:
        return judged(None, f"{sentence} FedAvg stopped before half of FedSGD's rounds.", RULE_CLIP)
    is_slow = sooner is not None and 2 * sooner < at
    return judged(None if is_slow and is_open and not is_far else is_slow and not is_far, sentence, RULE_CLIP)


def judge_noise(found: Found) -> Verdict:
    needed = [CLIPPED[20], NOISED[0.002], NOISED[0.024], AVERAGED, AVERAGED_NOISED]
    if lacking := missing(found, needed, RULE_NOISE, against=[CLIPPED[20], AVERAGED]):
        return lacking
    at = found.rounds(*needed) or 0
    quiet, _, much, averaged, averaged_much = (found.accuracy(name, at) or 0.0 for name in needed)
    part, averaged_part = 1 - much / quiet, 1 - averaged_much / averaged
    if (apart := _ahead(found, CLIPPED[20], NOISED[0.002], at)) is None:
        return judged(None, _STRANGERS, RULE_NOISE)
    less, off = apart
    sentence = (
        f"In the last quarter of {plural(at)} σ = 0.002 costs FedSGD {in_points(less)} points, uncertain by {in_points(off)}. "
        f"At their end σ = 0.024 takes {100 * part:.0f} % of its accuracy, and {100 * averaged_part:.0f} % of FedAvg's."
    )
    is_worse, is_open = part > averaged_part, abs(less - NEARLY) <= off
    return judged(None if is_worse and is_open else is_worse and less <= NEARLY, sentence, RULE_NOISE)


def _ahead(found: Found, first: str, second: str, at: int) -> tuple[float, float] | None:
    """First less second, and how far that may be off: one seed of each cannot tell them apart better than seeds agree."""
    apart = found.ahead(first, second, at)
    return None if apart is None else (apart[0], max(apart[1], margin(found, at)))


_STRANGERS = "The runs have fewer than two evaluations at the same rounds, so they cannot be compared."
_NOTE = "FedSGD draws 50 users a round, FedAvg 100, as in the paper: rounds are compared, not user updates."
