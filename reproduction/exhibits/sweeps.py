"""Figures 2, 3, 9, 10, 11 and 12: accuracy as a function of the clipping norm S and of the noise sigma.

Figures 2 and 3 vary S and sigma for FedAvg with flat and per-layer clipping. Figures 9 and 10 do so for FedSGD, which
computes one gradient of all data of a user. Figures 11 and 12 use dictionaries of 20,000 and 30,000 words. Every
sweep is drawn after 100, 500 and 3,000 rounds (`drawn_rounds` replaces those that most runs did not reach).
"""

from collections.abc import Mapping

from reproduction.exhibit import (
    Exhibit,
    Figure,
    Line,
    Table,
    build_exhibit,
    cell,
    clip_lines,
    drawn_rounds,
    level_line,
    rounds_table,
    signed,
    sweep_line,
)
from reproduction.printed import DROWNED
from reproduction.recipe import Recipe
from reproduction.recipes import CLIPS, NOISES, SWEPT_CLIPS, SWEPT_NOISES, VARIABLE, clipped, noised
from reproduction.results import ResultSet
from reproduction.verdict import (
    NEARLY,
    SMALL,
    Verdict,
    about_seeds,
    below,
    decide,
    margin,
    missing,
    plural,
    points,
    untrained,
)
from unheard.formatting import in_points, percent

CLIP_FLAT = {norm: clipped(norm).name for norm in CLIPS}
CLIP_PER_LAYER = {norm: clipped(norm, "per_layer").name for norm in CLIPS}
UNCLIPPED = VARIABLE.name
RECOMMENDED = (10, 15, 20)
"""The norms for which the paper reports at most a small effect."""
RULE_CLIPPING = (
    "At every round drawn that all of them reached, and where they all got to, flat and (where it was run) "
    "per-layer clipping with "
    f"S = 10, 15 and 20 are at most {points(SMALL)} below the run without a clip."
)


def clipping(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Figure 2: accuracy over S for flat and per-layer clipping, without noise."""
    marks = _clipping_rounds(results)
    lines = clip_lines(results, marks, CLIP_FLAT, CLIP_PER_LAYER, without=("no clip", UNCLIPPED))
    figure = Figure(name="clipping", title="AccuracyTop1 against S", x="S", lines=lines, is_log=True)
    columns = ["", *(f"{kind}, {mark:,}" for mark in marks for kind in ("flat", "per layer"))]
    rows = [
        [f"S = {norm:g}", *(cell(results, runs[norm], mark) for mark in marks for runs in (CLIP_FLAT, CLIP_PER_LAYER))]
        for norm in CLIPS
    ]
    rows.append(["no clip", *(text for mark in marks for text in (cell(results, UNCLIPPED, mark), ""))])
    table = Table(title="AccuracyTop1 by S, kind of clip and rounds", columns=columns, rows=rows)
    return build_exhibit(recipe, results, judge_clipping(results), tables=[table], figures=[figure])


def judge_clipping(results: ResultSet) -> Verdict:
    """Apply the rule to the largest loss of S = 10, 15 and 20 against training without a clip."""
    needed = [UNCLIPPED, *(CLIP_FLAT[norm] for norm in RECOMMENDED)]
    if undecided := missing(results, needed, RULE_CLIPPING, against=[UNCLIPPED]):
        return undecided
    losses = {}
    # The sweep is drawn where most of its runs got to, which may be too early to tell.
    for mark in sorted({*_clipping_rounds(results), results.rounds(*needed) or 0}):
        free = results.accuracy(UNCLIPPED, mark)
        if any(results.accuracy(CLIP_FLAT[norm], mark) is None for norm in RECOMMENDED):
            continue  # the one that lost most may be the one that is missing
        for kind, runs in (("flat", CLIP_FLAT), ("per layer", CLIP_PER_LAYER)):
            for norm in RECOMMENDED:
                value = results.accuracy(runs[norm], mark)
                if free is not None and value is not None:
                    losses[free - value] = (kind, norm, mark)
    if not losses:
        return decide(None, "No two of the runs were evaluated at the same round.", RULE_CLIPPING)
    most = max(losses)
    kind, norm, mark = losses[most]
    last = max(where[2] for where in losses.values())
    end = max(loss for loss, where in losses.items() if where[2] == last)
    sentence = (
        f"With S from 10 to 20 the largest loss against no clip is {points(max(most, 0.0))} (S = {norm:g}, {kind}, "
        f"after {plural(mark)}); after {plural(last)} it is {points(max(end, 0.0))}. "
        f"{about_seeds(results, [most], last)}"
    )
    return decide(most <= SMALL, sentence, RULE_CLIPPING)


def _clipping_rounds(results: ResultSet) -> tuple[int, ...]:
    """The rounds at which Figure 2 is drawn."""
    return drawn_rounds(results, [UNCLIPPED, *CLIP_FLAT.values(), *CLIP_PER_LAYER.values()])


NOISE_FLAT = {sigma: noised(20, sigma).name for sigma in NOISES}
NOISE_PER_LAYER = {sigma: noised(20, sigma, "per_layer").name for sigma in NOISES}
NOISELESS, NOISELESS_PER_LAYER = clipped(20).name, clipped(20, "per_layer").name
SIGMA_AT_Z1 = DROWNED.value
"""sigma for z = 1 at S = 20 with 100 users per round: the dashed line of Figure 3."""
EARLY = 100
"""Number of rounds that counts as early in training."""
RULE_NOISE = (
    f"With flat clipping: after {EARLY} rounds σ = 0.024 costs at most {points(NEARLY)}; at the end σ = 0.012 "
    "costs at most "
    f"{points(SMALL)}, 0.024 costs more than that, and σ = 0.2 loses more than half of the accuracy. Where 0.024 "
    "and 0.012 lie no "
    "further apart than two seeds can, it cannot be told."
)


def noise(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Figure 3: accuracy over sigma at S = 20 for flat and per-layer clipping."""
    marks = _noise_rounds(results)
    figure = Figure(
        name="noise",
        title="AccuracyTop1 against σ, S = 20",
        x="σ",
        lines=clip_lines(results, marks, NOISE_FLAT, NOISE_PER_LAYER, without=("no noise", NOISELESS)),
        is_log=True,
        upright=(SIGMA_AT_Z1, "σ = 0.2"),
    )
    columns = ["", *(f"{kind}, {mark:,}" for mark in marks for kind in ("flat", "per layer"))]
    rows = [["no noise", *(cell(results, name, mark) for mark in marks for name in (NOISELESS, NOISELESS_PER_LAYER))]]
    rows += [
        [
            f"σ = {sigma:g}",
            *(cell(results, runs[sigma], mark) for mark in marks for runs in (NOISE_FLAT, NOISE_PER_LAYER)),
        ]
        for sigma in NOISES
    ]
    table = Table(title="AccuracyTop1 by σ, kind of clip and rounds", columns=columns, rows=rows)
    return build_exhibit(recipe, results, judge_noise(results), tables=[table], figures=[figure])


def judge_noise(results: ResultSet) -> Verdict:
    """Apply the rule: early, sigma = 0.024 costs nearly nothing; later, the loss grows past 0.012; 0.2 destroys
    accuracy."""
    needed = [NOISELESS, NOISE_FLAT[0.012], NOISE_FLAT[0.024], NOISE_FLAT[SIGMA_AT_Z1]]
    if undecided := missing(results, needed, RULE_NOISE, against=[NOISELESS]):
        return undecided
    at = results.rounds(*needed)
    early, quiet = results.accuracy(NOISELESS, EARLY) or 0.0, results.accuracy(NOISELESS, at) or 0.0
    soon = early - (results.accuracy(NOISE_FLAT[0.024], EARLY) or 0.0)
    small, more, drowned = (
        quiet - (results.accuracy(NOISE_FLAT[sigma], at) or 0.0) for sigma in (0.012, 0.024, SIGMA_AT_Z1)
    )
    left = quiet - drowned
    sentence = (
        f"After {EARLY} rounds σ = 0.024 costs {in_points(soon)} points. After {plural(at or 0)} σ = 0.012 costs "
        f"{in_points(small)}, 0.024 "
        f"{in_points(more)}, and at 0.2 {percent(left)} is left of {percent(quiet)}. "
        f"{about_seeds(results, [small], at)}"
    )
    held = soon <= NEARLY and small <= SMALL and left < quiet / 2
    is_open = abs(more - small) <= margin(results, at)
    return decide(None if held and is_open else held and more > small, sentence, RULE_NOISE)


def _noise_rounds(results: ResultSet) -> tuple[int, ...]:
    """The rounds at which Figure 3 is drawn."""
    return drawn_rounds(results, [NOISELESS, NOISELESS_PER_LAYER, *NOISE_FLAT.values(), *NOISE_PER_LAYER.values()])


FEDSGD_CLIPPED = {norm: f"fedsgd-{clipped(norm).name}" for norm in (0.5, 1, 2, 5, 20)}
FEDSGD_NOISED = {sigma: f"fedsgd-{noised(20, sigma).name}" for sigma in (0.001, 0.002, 0.006, 0.024)}
FEDSGD_CHOSEN = f"fedsgd-{noised(2, 0.002).name}"
FEDAVG, FEDAVG_NOISED = clipped(20).name, noised(20, 0.024).name
"""FedAvg at the same S, without and with noise."""
FEDAVG_CLIPPED: dict[float, str] = {norm: clipped(norm).name for norm in (2, 2.5, 5, 10, 20)}
FEDAVG_NOISED_BY = {sigma: noised(20, sigma).name for sigma in (0.002, 0.006, 0.012, 0.024)}
"""The line of FedAvg in Figures 9 and 10: S and sigma to the name of the run."""
RULE_OF_COMPARISON = (
    " Evaluations of FedSGD swing, so its runs are compared over the last quarter of their rounds, evaluation by "
    "evaluation. The "
    "mean difference is uncertain by two standard errors, and at least by what two seeds can differ; if that "
    "reaches across the "
    "half point, it cannot be told."
)
"""How two runs of FedSGD are compared; a part of both of its rules."""
RULE_FEDSGD_CLIPPING = (
    f"Where all got to, S = 2 is at most {points(NEARLY)} below every other S of FedSGD, and FedAvg (S = 20) reaches "
    f"what FedSGD reached at best in less than half of its rounds.{RULE_OF_COMPARISON}"
)
RULE_FEDSGD_NOISE = (
    f"Where all got to, σ = 0.002 costs FedSGD at most {points(NEARLY)} at S = 20, and σ = 0.024 costs it a larger "
    f"part of its accuracy than it costs FedAvg.{RULE_OF_COMPARISON}"
)


def fedsgd_clipping(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Figure 9: accuracy of FedSGD over S, without noise."""
    marks = drawn_rounds(results, FEDSGD_CLIPPED.values())
    lines = tuple(line for mark in marks for line in _both_updates(results, mark, FEDSGD_CLIPPED, FEDAVG_CLIPPED))
    figure = Figure(
        name="fedsgd-clipping", title="FedSGD and FedAvg: AccuracyTop1 against S", x="S", lines=lines, is_log=True
    )
    labels = {name: f"S = {norm:g}" for norm, name in FEDSGD_CLIPPED.items()}
    labels |= {name: f"FedAvg, S = {norm:g}" for norm, name in FEDAVG_CLIPPED.items()}
    table = rounds_table(results, labels, marks)
    return build_exhibit(
        recipe,
        results,
        judge_fedsgd_clipping(results),
        tables=[table],
        figures=[figure],
        notes=[FEDSGD_NOTE],
        compared_with=FEDAVG_CLIPPED.values(),
    )


def fedsgd_noise(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Figure 10: accuracy of FedSGD over sigma at S = 20."""
    marks = drawn_rounds(results, [*FEDSGD_NOISED.values(), FEDSGD_CLIPPED[20]])
    lines = []
    for mark in marks:
        name = f"after {plural(mark)}"
        lines += [
            *_both_updates(results, mark, FEDSGD_NOISED, FEDAVG_NOISED_BY),
            *level_line(results, FEDSGD_CLIPPED[20], mark, name=f"{name}, no noise", tint=name),
        ]
    figure = Figure(
        name="fedsgd-noise",
        title="FedSGD and FedAvg: AccuracyTop1 against σ, S = 20",
        x="σ",
        lines=tuple(lines),
        is_log=True,
    )
    rows = [["no noise", *(cell(results, FEDSGD_CLIPPED[20], mark) for mark in marks)]]
    rows += [
        [f"σ = {sigma:g}", *(cell(results, name, mark) for mark in marks)] for sigma, name in FEDSGD_NOISED.items()
    ]
    rows.append(["σ = 0.002, S = 2", *(cell(results, FEDSGD_CHOSEN, mark) for mark in marks)])
    rows.append(["FedAvg, no noise", *(cell(results, FEDAVG, mark) for mark in marks)])
    rows += [
        [f"FedAvg, σ = {sigma:g}", *(cell(results, name, mark) for mark in marks)]
        for sigma, name in FEDAVG_NOISED_BY.items()
    ]
    table = Table(title="AccuracyTop1 after some rounds", columns=["", *(f"{mark:,}" for mark in marks)], rows=rows)
    misprint = (
        "The paper's text gives 1,500 users per round for S = 2 and σ = 0.002, and 1,000 for S = 15 and σ = 0.01. S/σ "
        "is 1,000 for the first and 1,500 for the second."
    )
    return build_exhibit(
        recipe,
        results,
        judge_fedsgd_noise(results),
        tables=[table],
        figures=[figure],
        notes=[misprint],
        compared_with=[FEDAVG, *FEDAVG_NOISED_BY.values()],
    )


def _both_updates(
    results: ResultSet, at: int, fedsgd: Mapping[float, str], fedavg: Mapping[float, str]
) -> tuple[Line, Line]:
    """The sweeps of FedSGD and of FedAvg after the same number of rounds, in one colour."""
    name = f"after {plural(at)}"
    return (
        sweep_line(results, fedsgd, at, name=name),
        sweep_line(results, fedavg, at, name=f"{name}, FedAvg", tint=name, dashed=True),
    )


def judge_fedsgd_clipping(results: ResultSet) -> Verdict:
    """Apply the rule: S = 2 is enough for FedSGD, which needs more than twice the rounds of FedAvg for its accuracy."""
    needed = [*FEDSGD_CLIPPED.values(), FEDAVG]
    if undecided := missing(results, needed, RULE_FEDSGD_CLIPPING):
        return undecided
    at = results.rounds(*FEDSGD_CLIPPED.values()) or 0
    values = {norm: results.accuracy(name, at) or 0.0 for norm, name in FEDSGD_CLIPPED.items()}
    best = max(values, key=lambda norm: values[norm])
    if undecided := untrained(results, [FEDSGD_CLIPPED[best]], RULE_FEDSGD_CLIPPING, at):
        return undecided
    sooner, ended = results.first_round_at(FEDAVG, values[best]), results.rounds(FEDAVG) or 0
    words = f"FedAvg had that after {plural(sooner)}" if sooner is not None else f"FedAvg never had that in {ended:,}"
    rivals = {norm: name for norm, name in FEDSGD_CLIPPED.items() if norm != 2}
    ahead = {
        n: apart for n, name in rivals.items() if (apart := _lead(results, name, FEDSGD_CLIPPED[2], at)) is not None
    }
    if len(ahead) < len(rivals):
        return decide(None, NO_SHARED_ROUNDS, RULE_FEDSGD_CLIPPING)
    is_open = any(abs(more - NEARLY) <= off for more, off in ahead.values())
    is_far = any(more - NEARLY > off for more, off in ahead.values())
    rival = max(ahead, key=lambda norm: ahead[norm])
    more, off = ahead[rival]
    sentence = (
        f"After {plural(at)} FedSGD reached {percent(values[best])} with S = {best:g}; {words}. In the last "
        "quarter of FedSGD's "
        f"rounds S = {rival:g} is {points(abs(more))} {'above' if more > 0 else 'below'} S = 2, uncertain by "
        f"{points(off)}."
    )
    if not is_far and sooner is None and 2 * ended < at:
        return decide(None, f"{sentence} FedAvg stopped before half of FedSGD's rounds.", RULE_FEDSGD_CLIPPING)
    is_slow = sooner is not None and 2 * sooner < at
    return decide(
        None if is_slow and is_open and not is_far else is_slow and not is_far, sentence, RULE_FEDSGD_CLIPPING
    )


def judge_fedsgd_noise(results: ResultSet) -> Verdict:
    """Apply the rule: sigma = 0.002 costs FedSGD little, and 0.024 costs it a larger share than FedAvg."""
    needed = [FEDSGD_CLIPPED[20], FEDSGD_NOISED[0.002], FEDSGD_NOISED[0.024], FEDAVG, FEDAVG_NOISED]
    if undecided := missing(results, needed, RULE_FEDSGD_NOISE, against=[FEDSGD_CLIPPED[20], FEDAVG]):
        return undecided
    at = results.rounds(*needed) or 0
    quiet, _, much, averaged, averaged_much = (results.accuracy(name, at) or 0.0 for name in needed)
    part, averaged_part = 1 - much / quiet, 1 - averaged_much / averaged
    if (apart := _lead(results, FEDSGD_CLIPPED[20], FEDSGD_NOISED[0.002], at)) is None:
        return decide(None, NO_SHARED_ROUNDS, RULE_FEDSGD_NOISE)
    less, off = apart
    sentence = (
        f"In the last quarter of {plural(at)} σ = 0.002 costs FedSGD {in_points(less)} points, uncertain by "
        f"{in_points(off)}. "
        f"At their end σ = 0.024 takes {100 * part:.0f} % of its accuracy, and {100 * averaged_part:.0f} % of "
        "FedAvg's."
    )
    is_worse, is_open = part > averaged_part, abs(less - NEARLY) <= off
    return decide(None if is_worse and is_open else is_worse and less <= NEARLY, sentence, RULE_FEDSGD_NOISE)


def _lead(results: ResultSet, first: str, second: str, at: int) -> tuple[float, float] | None:
    """Mean difference of two runs (first minus second) and its uncertainty, which is at least the distance between two
    seeds."""
    apart = results.mean_lead(first, second, at)
    return None if apart is None else (apart[0], max(apart[1], margin(results, at)))


NO_SHARED_ROUNDS = "The runs have fewer than two evaluations at the same rounds, so they cannot be compared."
FEDSGD_NOTE = "FedSGD draws 50 users per round, FedAvg 100, as in the paper: rounds are compared, not user updates."


SIZES = {"": "10,000", "20k-": "20,000", "30k-": "30,000"}
"""Number of words by the prefix of the runs with that dictionary."""
NOISY = noised(20, 0.012).name
"""The run with the noise that the rule of Figure 12 is about."""
DICTIONARY_CLIPS: dict[float, str] = {norm: clipped(norm).name for norm in SWEPT_CLIPS}
DICTIONARY_NOISES = {sigma: noised(20, sigma).name for sigma in SWEPT_NOISES}
RULE_DICTIONARY_CLIPPING = (
    f"Where all got to, without a clip the larger dictionaries are at most {points(NEARLY)} below 10,000 words and "
    "at "
    f"most {points(SMALL)} above; and S = 20 costs them at most {points(NEARLY)} more than it costs 10,000 words."
)
RULE_DICTIONARY_NOISE = (
    f"Where all got to, σ = 0.012 at S = 20 costs 20,000 and 30,000 words at most {points(NEARLY)} more than it "
    "costs "
    "10,000."
)


def dictionaries_clipping(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Figure 11: accuracy over S with three dictionaries. A word outside the dictionary counts as an error, so the three
    can be compared."""
    return build_exhibit(
        recipe,
        results,
        judge_dictionary_clipping(results),
        **_dictionary_parts(results, "dictionaries-clipping", "S", DICTIONARY_CLIPS, UNCLIPPED, "no clip"),
    )


def dictionaries_noise(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Figure 12: accuracy over sigma at S = 20 with three dictionaries."""
    return build_exhibit(
        recipe,
        results,
        judge_dictionary_noise(results),
        **_dictionary_parts(results, "dictionaries-noise", "σ", DICTIONARY_NOISES, NOISELESS, "no noise"),
    )


def judge_dictionary_clipping(results: ResultSet) -> Verdict:
    """Apply the rule: larger dictionaries help little, and S = 20 costs them no more."""
    needed = [size + name for size in SIZES for name in (UNCLIPPED, NOISELESS)]
    if undecided := missing(results, needed, RULE_DICTIONARY_CLIPPING, against=[size + UNCLIPPED for size in SIZES]):
        return undecided
    at = results.rounds(*needed)
    gains = {SIZES[size]: _difference(results, size + UNCLIPPED, UNCLIPPED, at) for size in ("20k-", "30k-")}
    costs = {words: _difference(results, size + UNCLIPPED, size + NOISELESS, at) for size, words in SIZES.items()}
    held = all(-NEARLY <= gain <= SMALL for gain in gains.values())
    held = held and all(cost - costs["10,000"] <= NEARLY for cost in costs.values())
    sentence = (
        f"After {plural(at or 0)} 20,000 words are {below(gains['20,000'])} 10,000, 30,000 words "
        f"{below(gains['30,000'])}. S = 20 "
        f"costs {_listed_costs(costs)} points. {about_seeds(results, list(gains.values()), at)}"
    )
    return decide(held, sentence, RULE_DICTIONARY_CLIPPING)


def judge_dictionary_noise(results: ResultSet) -> Verdict:
    """Apply the rule: sigma = 0.012 costs larger dictionaries no more."""
    needed = [size + name for size in SIZES for name in (NOISELESS, NOISY)]
    if undecided := missing(results, needed, RULE_DICTIONARY_NOISE, against=[size + NOISELESS for size in SIZES]):
        return undecided
    at = results.rounds(*needed)
    costs = {words: _difference(results, size + NOISELESS, size + NOISY, at) for size, words in SIZES.items()}
    held = all(cost - costs["10,000"] <= NEARLY for cost in costs.values())
    sentence = (
        f"After {plural(at or 0)} σ = 0.012 costs {_listed_costs(costs)} points. "
        f"{about_seeds(results, list(costs.values()), at)}"
    )
    return decide(held, sentence, RULE_DICTIONARY_NOISE)


def _listed_costs(costs: Mapping[str, float]) -> str:
    """Losses in points with the size of the dictionary, in words."""
    return ", ".join(f"{in_points(cost)} ({words} words)" for words, cost in costs.items())


def _difference(results: ResultSet, first: str, second: str, at: int | None) -> float:
    """Accuracy of the first run minus the second."""
    return (results.accuracy(first, at) or 0.0) - (results.accuracy(second, at) or 0.0)


def _dictionary_parts(
    results: ResultSet, name: str, axis: str, swept: Mapping[float, str], plain: str, plain_label: str
) -> dict:
    """The figure and table of one sweep for all dictionaries, as arguments of `build_exhibit`.

    Args:
        results: Results of one corpus.
        name: Name of the figure.
        axis: The setting that is varied: `S` or `σ`.
        swept: Value of the setting to the name of the run with 10,000 words.
        plain: Name of the reference run.
        plain_label: Its label: `no clip` or `no noise`.
    """
    everything = [size + run for size in SIZES for run in (*swept.values(), plain)]
    marks = drawn_rounds(results, [run for run in everything if run[:3] in ("20k", "30k")])
    last = marks[-1]
    lines = []
    for size, words in SIZES.items():
        runs = {x: size + run for x, run in swept.items()}
        lines.append(sweep_line(results, runs, last, name=f"{words} words"))
        lines += level_line(results, size + plain, last, name=f"{words} words, {plain_label}", tint=f"{words} words")
    figure = Figure(
        name=name, title=f"AccuracyTop1 against {axis} after {plural(last)}", x=axis, lines=tuple(lines), is_log=True
    )
    rows = []
    for label, run in [(plain_label, plain), *((f"{axis} = {x:g}", run) for x, run in swept.items())]:
        for size, words in SIZES.items():
            value, other = results.accuracy(size + run, last), results.accuracy(run, last)
            gap = None if not size or value is None or other is None else value - other
            rows.append([f"{label}, {words} words", *(cell(results, size + run, mark) for mark in marks), signed(gap)])
    columns = ["", *(f"{mark:,}" for mark in marks), "less 10,000 words"]
    table = Table(title="AccuracyTop1 after some rounds; difference in points", columns=columns, rows=rows)
    return {"tables": [table], "figures": [figure], "compared_with": [*swept.values(), plain]}
