"""Figures 2, 3, 9, 10, 11 and 12: accuracy as a function of the clipping norm S and of the noise sigma.

Figures 2 and 3 vary S and sigma for FedAvg with flat and per-layer clipping. Figures 9 and 10 do so for FedSGD, which
computes one gradient over all data of a user. Figures 11 and 12 use dictionaries of 20,000 and 30,000 words. Every
sweep shows the accuracy after 100, 500 and 3,000 rounds (`Draft.drawn_rounds` replaces the numbers of rounds that most
runs did not reach).
"""

from collections.abc import Mapping
from typing import Any

from reproduction.exhibit import Draft, signed
from reproduction.printed import DROWNED
from reproduction.recipes import CLIPS, NOISES, SWEPT_CLIPS, SWEPT_NOISES, VARIABLE, clipped, noised
from reproduction.results import ResultSet
from reproduction.verdict import NEARLY, SMALL, Ruling, Undecided, below, in_points, plural, points
from unheard.formatting import percent

CLIP_FLAT = {norm: clipped(norm).name for norm in CLIPS}
CLIP_PER_LAYER = {norm: clipped(norm, "per_layer").name for norm in CLIPS}
"""Runs of Figure 2 with flat and per-layer clipping: the name of the run by S."""
UNCLIPPED = VARIABLE.name
"""The run without a clip, which is the reference of Figure 2."""
RECOMMENDED = (10, 15, 20)
"""The norms for which the paper reports at most a small effect."""


def clipping(draft: Draft) -> Ruling:
    """Figure 2: accuracy over S for flat and per-layer clipping, without noise."""
    results = draft.results
    marks = _add_both_clips(draft, "S", CLIP_FLAT, CLIP_PER_LAYER, ("no clip", UNCLIPPED, ""), is_last=True)
    needed = [UNCLIPPED, *(CLIP_FLAT[norm] for norm in RECOMMENDED)]
    at = draft.shared_round(needed, against=[UNCLIPPED])
    losses = {}
    # Also compare at the last common round: the rounds of the figure may be too early to show an effect.
    for mark in sorted({*marks, at}):
        free = results.accuracy(UNCLIPPED, mark)
        if free is None or any(results.accuracy(CLIP_FLAT[norm], mark) is None for norm in RECOMMENDED):
            continue  # a missing run may be the one with the largest loss
        for kind, runs in (("flat", CLIP_FLAT), ("per layer", CLIP_PER_LAYER)):
            for norm in RECOMMENDED:
                if (value := results.accuracy(runs[norm], mark)) is not None:
                    losses[free - value] = (kind, norm, mark)
    if not losses:
        raise Undecided("No two of the runs were evaluated at the same round.")
    most = max(losses)
    kind, norm, mark = losses[most]
    last = max(where[2] for where in losses.values())
    end = max(loss for loss, where in losses.items() if where[2] == last)
    sentence = (
        f"With S from 10 to 20 the largest loss against no clip is {points(max(most, 0.0))} (S = {norm:g}, {kind}, "
        f"after {plural(mark)}); after {plural(last)} it is {points(max(end, 0.0))}. {draft.about_seeds([most], last)}"
    )
    return most <= SMALL, sentence


NOISE_FLAT = {sigma: noised(20, sigma).name for sigma in NOISES}
NOISE_PER_LAYER = {sigma: noised(20, sigma, "per_layer").name for sigma in NOISES}
"""Runs of Figure 3 with flat and per-layer clipping: the name of the run by sigma."""
NOISELESS, NOISELESS_PER_LAYER = clipped(20).name, clipped(20, "per_layer").name
"""The runs without noise, which are the references of Figure 3."""
SIGMA_AT_Z1 = DROWNED
"""The sigma for z = 1 at S = 20 with 100 users per round: the dashed vertical line of Figure 3."""


def noise(draft: Draft) -> Ruling:
    """Figure 3: accuracy over sigma at S = 20 for flat and per-layer clipping.

    The paper's conclusion: early in training sigma = 0.024 costs nearly nothing; later there is a loss above 0.012; a
    sigma of 0.2 destroys accuracy.
    """
    results, plain = draft.results, ("no noise", NOISELESS, NOISELESS_PER_LAYER)
    _add_both_clips(draft, "σ", NOISE_FLAT, NOISE_PER_LAYER, plain, title=", S = 20", upright=(SIGMA_AT_Z1, "σ = 0.2"))
    needed = [NOISELESS, NOISE_FLAT[0.012], NOISE_FLAT[0.024], NOISE_FLAT[SIGMA_AT_Z1]]
    at, early = draft.shared_round(needed, against=[NOISELESS]), int(draft.recipe.limits["early"])
    soon = _loss(results, NOISELESS, NOISE_FLAT[0.024], early)
    small, more, _ = (_loss(results, NOISELESS, name, at) for name in needed[1:])
    quiet, left = results.value(NOISELESS, at), results.value(needed[-1], at)
    sentence = (
        f"After {early} rounds σ = 0.024 costs {in_points(soon)} points. After {plural(at)} σ = 0.012 costs "
        f"{in_points(small)}, 0.024 {in_points(more)}, and at 0.2 {percent(left)} is left of {percent(quiet)}. "
        f"{draft.about_seeds([small], at)}"
    )
    held = soon <= NEARLY and small <= SMALL and left < quiet / 2
    is_open = abs(more - small) <= results.margin(at)
    return None if held and is_open else held and more > small, sentence


def _add_both_clips(
    draft: Draft,
    axis: str,
    flat: Mapping[float, str],
    per_layer: Mapping[float, str],
    plain: tuple[str, str, str],
    *,
    is_last: bool = False,
    title: str = "",
    **style: Any,
) -> tuple[int, ...]:
    """Add the figure and the table of a sweep with flat and per-layer clipping.

    Args:
        draft: The exhibit.
        axis: The setting that is varied: `S` or `σ`.
        flat: Name of the run with flat clipping, by the value of the setting.
        per_layer: The same for per-layer clipping.
        plain: Label of the reference, and the names of its runs with flat and per-layer clipping (empty if there is no
            such run).
        is_last: Whether the reference is the last row of the table instead of the first.
        title: End of the title of the figure.
        style: Other fields of `Figure`.

    Returns:
        The numbers of rounds after which the sweep shows the accuracy.
    """
    label, *references = plain
    marks = draft.drawn_rounds([*references, *flat.values(), *per_layer.values()])
    lines = []
    for mark in marks:
        name = f"after {plural(mark)}"
        lines += [
            draft.sweep(flat, mark, f"{name}, flat", tint=name),
            draft.sweep(per_layer, mark, f"{name}, per layer", tint=name, dashed=True),
            *draft.level(references[0], mark, f"{name}, {label}", tint=name),
        ]
    draft.add_figure(f"AccuracyTop1 against {axis}{title}", axis, lines, is_log=True, **style)
    rows = [(f"{axis} = {x:g}", flat[x], per_layer[x]) for x in flat]
    rows.insert(len(rows) if is_last else 0, plain)
    draft.add_table(
        f"AccuracyTop1 by {axis}, kind of clip and rounds",
        ["", *(f"{kind}, {mark:,}" for mark in marks for kind in ("flat", "per layer"))],
        [[name, *(draft.cell(run, mark) if run else "" for mark in marks for run in runs)] for name, *runs in rows],
    )
    return marks


FEDSGD_CLIPPED = {norm: f"fedsgd-{clipped(norm).name}" for norm in (0.5, 1, 2, 5, 20)}
FEDSGD_NOISED = {sigma: f"fedsgd-{noised(20, sigma).name}" for sigma in (0.001, 0.002, 0.006, 0.024)}
"""Runs of FedSGD in Figures 9 and 10: the name of the run by S, and by sigma."""
FEDAVG, FEDAVG_NOISED = clipped(20).name, noised(20, 0.024).name
"""Runs of FedAvg with S = 20, without noise and with sigma = 0.024."""
FEDAVG_CLIPPED: dict[float, str] = {norm: clipped(norm).name for norm in (2, 2.5, 5, 10, 20)}
FEDAVG_NOISED_BY = {sigma: noised(20, sigma).name for sigma in (0.002, 0.006, 0.012, 0.024)}
"""Runs of FedAvg in Figures 9 and 10: the name of the run by S, and by sigma."""


def fedsgd_clipping(draft: Draft) -> Ruling:
    """Figure 9: accuracy of FedSGD over S, without noise.

    The paper's conclusion: S = 2 is enough for FedSGD, which needs many more rounds than FedAvg for the same accuracy.
    """
    results = draft.results
    marks = draft.drawn_rounds(FEDSGD_CLIPPED.values())
    _add_both_updates(draft, marks, "S", FEDSGD_CLIPPED, FEDAVG_CLIPPED)
    labels = {name: f"S = {norm:g}" for norm, name in FEDSGD_CLIPPED.items()}
    draft.add_rounds_table(labels | {name: f"FedAvg, S = {norm:g}" for norm, name in FEDAVG_CLIPPED.items()}, marks)
    draft.notes.append(
        "FedSGD draws 50 users per round, FedAvg 100, as in the paper: rounds are compared, not user updates."
    )
    draft.compared_with = FEDAVG_CLIPPED.values()
    draft.shared_round([*FEDSGD_CLIPPED.values(), FEDAVG])
    at = results.rounds(*FEDSGD_CLIPPED.values()) or 0
    values = {norm: results.value(name, at) for norm, name in FEDSGD_CLIPPED.items()}
    best = max(values, key=values.__getitem__)
    draft.require_learned([FEDSGD_CLIPPED[best]], at)
    sooner, ended = results.first_round_at(FEDAVG, values[best]), results.rounds(FEDAVG) or 0
    words = f"FedAvg had that after {plural(sooner)}" if sooner is not None else f"FedAvg never had that in {ended:,}"
    ahead = {n: _lead(results, name, FEDSGD_CLIPPED[2], at) for n, name in FEDSGD_CLIPPED.items() if n != 2}
    is_open = any(abs(more - NEARLY) <= off for more, off in ahead.values())
    is_far = any(more - NEARLY > off for more, off in ahead.values())
    rival = max(ahead, key=ahead.__getitem__)
    more, off = ahead[rival]
    sentence = (
        f"After {plural(at)} FedSGD reached {percent(values[best])} with S = {best:g}; {words}. In the last quarter of "
        f"FedSGD's rounds S = {rival:g} is {below(more)} S = 2, uncertain by {points(off)}."
    )
    if not is_far and sooner is None and 2 * ended < at:
        raise Undecided(f"{sentence} FedAvg stopped before half of FedSGD's rounds.")
    is_slow = sooner is not None and 2 * sooner < at
    return None if is_slow and is_open and not is_far else is_slow and not is_far, sentence


def fedsgd_noise(draft: Draft) -> Ruling:
    """Figure 10: accuracy of FedSGD over sigma at S = 20.

    The rule: sigma = 0.002 costs FedSGD little, and sigma = 0.024 costs FedSGD a larger share of its accuracy than
    FedAvg.
    """
    results, plain = draft.results, FEDSGD_CLIPPED[20]
    marks = draft.drawn_rounds([*FEDSGD_NOISED.values(), plain])
    _add_both_updates(draft, marks, "σ", FEDSGD_NOISED, FEDAVG_NOISED_BY, plain=plain, title=", S = 20")
    labels = {plain: "no noise"} | {name: f"σ = {sigma:g}" for sigma, name in FEDSGD_NOISED.items()}
    labels |= {f"fedsgd-{noised(2, 0.002).name}": "σ = 0.002, S = 2", FEDAVG: "FedAvg, no noise"}
    draft.add_rounds_table(labels | {n: f"FedAvg, σ = {sigma:g}" for sigma, n in FEDAVG_NOISED_BY.items()}, marks)
    draft.notes.append(
        "The paper's text gives 1,500 users per round for S = 2 and σ = 0.002, and 1,000 for S = 15 and σ = 0.01. S/σ "
        "is 1,000 for the first and 1,500 for the second."
    )
    draft.compared_with = [FEDAVG, *FEDAVG_NOISED_BY.values()]
    needed = [plain, FEDSGD_NOISED[0.002], FEDSGD_NOISED[0.024], FEDAVG, FEDAVG_NOISED]
    at = draft.shared_round(needed, against=[plain, FEDAVG])
    quiet, _, much, averaged, averaged_much = (results.value(name, at) for name in needed)
    part, averaged_part = 1 - much / quiet, 1 - averaged_much / averaged
    less, off = _lead(results, plain, FEDSGD_NOISED[0.002], at)
    sentence = (
        f"In the last quarter of {plural(at)} σ = 0.002 costs FedSGD {in_points(less)} points, uncertain by "
        f"{in_points(off)}. At their end σ = 0.024 takes {100 * part:.0f} % of its accuracy, and "
        f"{100 * averaged_part:.0f} % of FedAvg's."
    )
    is_worse, is_open = part > averaged_part, abs(less - NEARLY) <= off
    return None if is_worse and is_open else is_worse and less <= NEARLY, sentence


def _add_both_updates(
    draft: Draft,
    marks: tuple[int, ...],
    axis: str,
    fedsgd: Mapping[float, str],
    fedavg: Mapping[float, str],
    *,
    plain: str = "",
    title: str = "",
) -> None:
    """Add the figure of a sweep with FedSGD and with FedAvg. Lines for the same number of rounds have the same colour.

    Args:
        draft: The exhibit.
        marks: The numbers of rounds.
        axis: The setting that is varied: `S` or `σ`.
        fedsgd: Name of the run of FedSGD, by the value of the setting.
        fedavg: The same for FedAvg.
        plain: Name of the run of FedSGD without noise, which is drawn as a level; empty for none.
        title: End of the title of the figure.
    """
    lines = []
    for mark in marks:
        name = f"after {plural(mark)}"
        lines += [draft.sweep(fedsgd, mark, name), draft.sweep(fedavg, mark, f"{name}, FedAvg", tint=name, dashed=True)]
        lines += draft.level(plain, mark, f"{name}, no noise", tint=name)
    draft.add_figure(f"FedSGD and FedAvg: AccuracyTop1 against {axis}{title}", axis, lines, is_log=True)


def _lead(results: ResultSet, first: str, second: str, at: int) -> tuple[float, float]:
    """Return the mean difference of two runs (first minus second) and its uncertainty (`ResultSet.mean_lead`).

    The uncertainty is at least `ResultSet.margin`. Raise `Undecided` if the runs share fewer than two evaluations.
    """
    apart = results.mean_lead(first, second, at)
    if apart is None:
        raise Undecided("The runs have fewer than two evaluations at the same rounds, so they cannot be compared.")
    return apart[0], max(apart[1], results.margin(at))


SIZES = {"": "10,000", "20k-": "20,000", "30k-": "30,000"}
"""Number of words in a dictionary, by the prefix in the names of its runs."""


def dictionaries_clipping(draft: Draft) -> Ruling:
    """Figure 11: accuracy over S with three dictionaries.

    A word outside the dictionary counts as an error, so the accuracies can be compared. The paper's conclusion: larger
    dictionaries help little, and need no other S.
    """
    results = draft.results
    _add_dictionaries(draft, "S", {norm: clipped(norm).name for norm in SWEPT_CLIPS}, UNCLIPPED, "no clip")
    at, costs = _dictionary_costs(draft, UNCLIPPED, NOISELESS)
    gains = {SIZES[size]: _loss(results, size + UNCLIPPED, UNCLIPPED, at) for size in ("20k-", "30k-")}
    held = all(-NEARLY <= gain <= SMALL for gain in gains.values())
    sentence = (
        f"After {plural(at)} 20,000 words are {below(gains['20,000'])} 10,000, 30,000 words {below(gains['30,000'])}. "
        f"S = 20 costs {_listed(costs)} points. {draft.about_seeds(gains.values(), at)}"
    )
    return held and all(cost - costs["10,000"] <= NEARLY for cost in costs.values()), sentence


def dictionaries_noise(draft: Draft) -> Ruling:
    """Figure 12: accuracy over sigma at S = 20 with three dictionaries.

    The rule: sigma = 0.012 costs a larger dictionary not much more than it costs 10,000 words.
    """
    _add_dictionaries(draft, "σ", {sigma: noised(20, sigma).name for sigma in SWEPT_NOISES}, NOISELESS, "no noise")
    at, costs = _dictionary_costs(draft, NOISELESS, noised(20, 0.012).name)
    seeds = draft.about_seeds(costs.values(), at)
    sentence = f"After {plural(at)} σ = 0.012 costs {_listed(costs)} points. {seeds}"
    return all(cost - costs["10,000"] <= NEARLY for cost in costs.values()), sentence


def _dictionary_costs(draft: Draft, plain: str, other: str) -> tuple[int, dict[str, float]]:
    """Return the last round that all runs reached, and the loss of one run against another, by number of words.

    Args:
        draft: The exhibit.
        plain: Name of the reference run with 10,000 words.
        other: Name of the run whose loss is computed.
    """
    needed = [size + name for size in SIZES for name in (plain, other)]
    at = draft.shared_round(needed, against=[size + plain for size in SIZES])
    return at, {words: _loss(draft.results, size + plain, size + other, at) for size, words in SIZES.items()}


def _listed(costs: Mapping[str, float]) -> str:
    """Return a text that lists the losses in points, each with the size of its dictionary."""
    return ", ".join(f"{in_points(cost)} ({words} words)" for words, cost in costs.items())


def _loss(results: ResultSet, first: str, second: str, at: int) -> float:
    """Return the accuracy of the first run minus that of the second after `at` rounds, as a fraction."""
    return results.value(first, at) - results.value(second, at)


def _add_dictionaries(draft: Draft, axis: str, swept: Mapping[float, str], plain: str, plain_label: str) -> None:
    """Add the figure and table of one sweep for all dictionaries.

    Args:
        draft: The exhibit.
        axis: The setting that is varied: `S` or `σ`.
        swept: Name of the run with 10,000 words, by the value of the setting.
        plain: Name of the reference run with 10,000 words.
        plain_label: Label of the reference: `no clip` or `no noise`.
    """
    draft.compared_with = [*swept.values(), plain]
    marks = draft.drawn_rounds([size + run for size in ("20k-", "30k-") for run in draft.compared_with])
    last, lines, rows = marks[-1], [], []
    for size, words in SIZES.items():
        name = f"{words} words"
        lines.append(draft.sweep({x: size + run for x, run in swept.items()}, last, name))
        lines += draft.level(size + plain, last, f"{name}, {plain_label}", tint=name)
    draft.add_figure(f"AccuracyTop1 against {axis} after {plural(last)}", axis, lines, is_log=True)
    for label, run in [(plain_label, plain), *((f"{axis} = {x:g}", run) for x, run in swept.items())]:
        for size, words in SIZES.items():
            gap = draft.results.run_difference(size + run, run, last) if size else None
            cells = (draft.cell(size + run, mark) for mark in marks)
            rows.append([f"{label}, {words} words", *cells, signed(gap)])
    columns = ["", *(f"{mark:,}" for mark in marks), "less 10,000 words"]
    draft.add_table("AccuracyTop1 after some rounds; difference in points", columns, rows)
