"""Figures 4 and 8: how to choose the clip norm S at fixed privacy. In addition, a comparison with an adaptive clip.

At equal privacy a larger S needs proportionally more noise (sigma = 0.0006 S at z = 0.06). `trade_offs` varies both
from the first round (Figure 8, left); `trade_offs_adjusted` varies them after 4,885 rounds with S = 20 (Figure 4 and
Figure 8, right). `adaptive_clipping` (not in the paper) compares the best S with a clip that follows the median of
the users' norms (Andrew et al., 2021).
"""

import re
from collections.abc import Iterable
from dataclasses import replace

from reproduction.exhibit import Draft, signed
from reproduction.recipes import ROUNDS_AFTER, ROUNDS_BEFORE, TRADES, TRADES_PER_LAYER, traded
from reproduction.results import ResultSet
from reproduction.verdict import NEARLY, Ruling, Undecided, below, plural, points
from unheard.formatting import NOTHING, percent

S20 = traded(20).name
SECOND_SEED = traded(20).with_seed(2).name
"""The run with S = 20, and its repetition with another seed."""
FROM_START = {norm: traded(norm).name for norm in TRADES}
"""Runs that have their S from the first round: the name of the run by S."""
ADJUSTED = {norm: traded(norm, after=S20).name for norm in TRADES}
"""Runs that start from the last model of the run with S = 20: the name of the run by S."""
ADJUSTED_PER_LAYER = {norm: traded(norm, "per_layer", after=S20).name for norm in TRADES_PER_LAYER}
"""The same with per-layer clipping."""
CLAIMED_BEST = (10, 12.6)
"""The values of S that work well early in training, according to the paper."""
CLAIMED_BETTER = 7.9
"""The value of S that the paper recommends later in training."""


def trade_offs(draft: Draft) -> Ruling:
    """Figure 8, left: accuracy by round for six pairs of S and sigma at equal privacy, and a second seed of S = 20."""
    results = draft.results
    labels = {name: _label(norm) for norm, name in FROM_START.items()} | {SECOND_SEED: f"{_label(20)}, again"}
    draft.add_curves("AccuracyTop1 by round, z = 0.06 throughout", labels)
    _dash_pairs(draft)
    draft.is_over_seeds = True  # the second seed is shown as its own curve, so no note is needed
    at = _reached(results, FROM_START.values())
    rows = [[label, draft.cell(name, 500), draft.cell(name, at)] for name, label in labels.items()]
    draft.add_table("AccuracyTop1", ["", "after 500 rounds", f"after {plural(at) if at else 'all rounds'}"], rows)
    at = draft.shared_round([*FROM_START.values(), SECOND_SEED])
    values = {norm: results.value(name, at) for norm, name in FROM_START.items()}
    best, worst = max(values, key=values.__getitem__), min(values.values())
    claimed = max(values[norm] for norm in CLAIMED_BEST)
    twice, same = abs(values[20] - results.value(SECOND_SEED, at)), results.margin(at)
    stated = " and ".join(f"S = {norm:g} has {percent(values[norm])}" for norm in CLAIMED_BEST)
    sentence = (
        f"After {plural(at)} S = {best:g} is best ({percent(values[best])}); {stated}. Two runs with S = 20 end "
        f"{points(twice)} apart. {draft.about_seeds([values[best] - values[norm] for norm in CLAIMED_BEST], at)}"
    )
    if values[best] - worst <= same:
        raise Undecided(f"{sentence} All six lie within {points(same)}.")
    held = values[best] - claimed <= same < claimed - worst
    do_both = all(values[best] - values[norm] <= NEARLY for norm in CLAIMED_BEST)
    return held and do_both and twice <= NEARLY, sentence


def trade_offs_adjusted(draft: Draft) -> Ruling:
    """Figure 4 and Figure 8, right: accuracy by round and over S after training has started with S = 20.

    Each run continues the same model with another pair of S and sigma of equal privacy. The clip is flat or per layer.
    """
    results = draft.results
    first = _start_round(results)
    labels = {name: _label(norm) for norm, name in ADJUSTED.items()}
    labels |= {name: f"{_label(norm)}, per layer" for norm, name in ADJUSTED_PER_LAYER.items()}
    draft.add_curves(f"AccuracyTop1 by round, adjusted after {first:,}", labels, first=first)
    _dash_pairs(draft)
    at = _reached(results, labels)
    end = at or ROUNDS_AFTER
    from_start = _reached(results, FROM_START.values()) or ROUNDS_BEFORE
    lines = [draft.sweep(FROM_START, from_start, f"from the beginning, {from_start:,} rounds")]
    for mark in (end // 2, end):
        name, per_layer = f"adjusted, {mark:,} rounds more", f"per layer, {mark:,} more"
        lines.append(draft.sweep(ADJUSTED, mark, name))
        lines.append(draft.sweep(ADJUSTED_PER_LAYER, mark, per_layer, tint=name, dashed=True))
    draft.add_figure("AccuracyTop1 against S (σ = 0.0006 S)", "S", lines, name="trade-offs-by-S")
    rows = []
    for norm in TRADES:
        cells = [draft.cell(FROM_START[norm], from_start), draft.cell(ADJUSTED[norm], at)]
        per_layer = draft.cell(ADJUSTED_PER_LAYER[norm], at) if norm in ADJUSTED_PER_LAYER else NOTHING
        rows.append([_label(norm), *cells, signed(results.run_difference(ADJUSTED[norm], ADJUSTED[20], at)), per_layer])
    columns = [f"from the beginning, {from_start:,}", f"adjusted, {end:,} more"]
    draft.add_table("AccuracyTop1", ["", *columns, "less S = 20, points", "per layer, adjusted"], rows)
    draft.compared_with = FROM_START.values()
    names = [ADJUSTED[CLAIMED_BETTER], ADJUSTED[20]]
    at = draft.shared_round(names)
    if len({_start(results, name) for name in names}) > 1:
        raise Undecided("The two runs started from different models.")
    gap = results.run_difference(names[0], names[1], at) or 0.0
    reached = {norm: value for norm, name in ADJUSTED.items() if (value := results.accuracy(name, at)) is not None}
    best = max(reached, key=reached.__getitem__)
    sentence = (
        f"{plural(at).capitalize()} after the change, which came after {first:,} (in the paper {ROUNDS_AFTER:,} and "
        f"{ROUNDS_BEFORE:,}), S = 7.9 is {below(gap)} S = 20 at the same privacy; best is S = {best:g} "
        f"({percent(reached[best])}). {draft.about_seeds([gap])}"
    )
    return None if abs(gap) <= results.margin() else gap > 0, sentence


def adaptive_clipping(draft: Draft) -> Ruling:
    """Not in the paper: accuracy by round of the adaptive clip and of six fixed values of S at the same z."""
    results, adaptive = draft.results, "adaptive-z0.06"
    labels = {name: f"S = {norm:g}" for norm, name in FROM_START.items()} | {adaptive: "adaptive"}
    draft.add_curves("AccuracyTop1 by round, z = 0.06", labels)
    draft.add_rounds_table(labels)
    at = draft.shared_round(labels)
    values = {norm: results.value(name, at) for norm, name in FROM_START.items()}
    best = max(values, key=values.__getitem__)
    draft.require_learned([FROM_START[best]], at)
    mine = results.value(adaptive, at)
    sentence = (
        f"After {plural(at)} the adaptive clip has {percent(mine)}, {below(mine - values[best])} the best fixed "
        f"one (S = {best:g}, {percent(values[best])}). {draft.about_seeds([mine - values[best]], at)}"
    )
    return mine >= values[best] - NEARLY, sentence


def _reached(results: ResultSet, names: Iterable[str]) -> int | None:
    """Return the last round that all of these runs reached. Runs without a result are ignored."""
    return results.rounds(*(name for name in names if name in results))


def _start_round(results: ResultSet) -> int:
    """Return the round of the run with S = 20 from which the adjusted runs started, as their results state it."""
    for name in (*ADJUSTED.values(), *ADJUSTED_PER_LAYER.values()):
        if match := re.search(r"after (\d+) rounds", _start(results, name)):
            return int(match.group(1))
    return results.runs[S20].rounds if S20 in results else ROUNDS_BEFORE


def _start(results: ResultSet, name: str) -> str:
    """Return what a run started from, such as `flat-S20-sigma0.012 after 500 rounds`; empty if that is unknown."""
    return str(results.runs[name].settings.get("training", {}).get("init_from", "")) if name in results else ""


def _label(norm: float) -> str:
    """Return a label with S and its sigma, which is 0.0006 S."""
    return f"S = {norm:g}, σ = {norm * 0.0006:.4g}"


def _dash_pairs(draft: Draft) -> None:
    """Change the last figure: the second line of each S (per layer, or another seed) is dashed, in the same colour."""
    figure = draft.figures.pop()
    firsts = {_label(norm) for norm in TRADES}
    pairs = ((line, next(name for name in firsts if line.name.startswith(name))) for line in figure.lines)
    lines = (line if line.name == name else replace(line, tint=name, is_dashed=True) for line, name in pairs)
    draft.figures.append(replace(figure, lines=tuple(lines)))
