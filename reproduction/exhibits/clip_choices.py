"""Figures 4 and 8: how to choose the clipping norm S if the privacy is fixed; an adaptive clip instead of a fixed one.

At equal privacy a larger S needs proportionally more noise (sigma = 0.0006 S at z = 0.06). `trade_offs` varies both
from the first round (Figure 8, left); `trade_offs_adjusted` varies them after 4,885 rounds with S = 20 (Figure 4 and
Figure 8, right). `adaptive_clipping` (not in the paper) compares the best S with a clip that follows the median of
the users' norms (Andrew et al., 2021).
"""

import re
from dataclasses import replace

from reproduction.exhibit import (
    Exhibit,
    Figure,
    Table,
    build_exhibit,
    cell,
    curves_by_round,
    drawn_rounds,
    rounds_table,
    signed,
    sweep_line,
)
from reproduction.recipe import Recipe
from reproduction.recipes import ROUNDS_AFTER, ROUNDS_BEFORE, TRADES, traded
from reproduction.results import ResultSet
from reproduction.verdict import NEARLY, Verdict, about_seeds, below, decide, margin, missing, plural, points, untrained
from unheard.formatting import percent

S20 = traded(20).name
SECOND_SEED = traded(20).with_seed(2).name
FROM_START = {norm: traded(norm).name for norm in TRADES}
"""Runs from the first round, by S."""
ADJUSTED = {norm: traded(norm, after=S20).name for norm in TRADES}
"""Runs that start from the model with S = 20, by S."""
ADJUSTED_PER_LAYER = {norm: traded(norm, "per_layer", after=S20).name for norm in TRADES}
CLAIMED_BEST = (10, 12.6)
"""The norms that work well early in training, by the paper."""
CLAIMED_BETTER = 7.9
"""The norm that the paper recommends later in training."""
RULE_TRADE_OFFS = (
    "Where all got to, no S is above the better of 10 and 12.6 by more than two seeds can differ, and the worst is "
    "below it by "
    f"more; if all six lie within that, it cannot be told. Both are at most {points(NEARLY)} below the best S, and "
    "the two runs "
    f"with S = 20 end at most {points(NEARLY)} apart."
)
RULE_ADJUSTED = (
    "Where both got to, S = 7.9 ends above S = 20, both begun from the same model, by more than two seeds can "
    "differ; within that "
    "it cannot be told."
)


def trade_offs(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Figure 8, left: accuracy by round for six pairs of S and sigma at equal privacy, and a second seed of S = 20."""
    labels = {name: _label(norm) for norm, name in FROM_START.items()} | {SECOND_SEED: f"{_label(20)}, again"}
    figure = _dash_pairs(curves_by_round(results, "trade-offs", "AccuracyTop1 by round, z = 0.06 throughout", labels))
    at = results.rounds(*(name for name in FROM_START.values() if name in results))
    rows = [[_label(norm), cell(results, name, 500), cell(results, name, at)] for norm, name in FROM_START.items()]
    rows.append([f"{_label(20)}, again", cell(results, SECOND_SEED, 500), cell(results, SECOND_SEED, at)])
    end = plural(at) if at else "all rounds"
    table = Table(title="AccuracyTop1", columns=["", "after 500 rounds", f"after {end}"], rows=rows)
    return build_exhibit(recipe, results, judge_trade_offs(results), tables=[table], figures=[figure], over_seeds=True)


def trade_offs_adjusted(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Figure 4 and Figure 8, right: the same pairs after initial training with S = 20, flat and per layer; accuracy over
    S."""
    first = _start_round(results)
    curves = curves_by_round(
        results,
        "trade-offs-adjusted",
        f"AccuracyTop1 by round, adjusted after {first:,}",
        {name: _label(norm) for norm, name in ADJUSTED.items()}
        | {ADJUSTED_PER_LAYER[n]: f"{_label(n)}, per layer" for n in (7.9, 12.6, 20)},
        first=first,
    )
    curves = _dash_pairs(curves)
    at = results.rounds(*(name for name in (*ADJUSTED.values(), *ADJUSTED_PER_LAYER.values()) if name in results))
    half = at // 2 if at else 3000
    end = at or 6000
    from_start = results.rounds(*(name for name in FROM_START.values() if name in results)) or ROUNDS_BEFORE
    by_norm = Figure(
        name="trade-offs-by-S",
        title="AccuracyTop1 against S (σ = 0.0006 S)",
        x="S",
        lines=(
            sweep_line(results, FROM_START, from_start, name=f"from the beginning, {from_start:,} rounds"),
            sweep_line(results, ADJUSTED, half, name=f"adjusted, {half:,} rounds more"),
            sweep_line(
                results,
                ADJUSTED_PER_LAYER,
                half,
                name=f"per layer, {half:,} more",
                tint=f"adjusted, {half:,} rounds more",
                dashed=True,
            ),
            sweep_line(results, ADJUSTED, end, name=f"adjusted, {end:,} rounds more"),
            sweep_line(
                results,
                ADJUSTED_PER_LAYER,
                end,
                name=f"per layer, {end:,} more",
                tint=f"adjusted, {end:,} rounds more",
                dashed=True,
            ),
        ),
    )
    rows = []
    for norm in TRADES:
        gap = results.run_difference(ADJUSTED[norm], ADJUSTED[20], at)
        layered = cell(results, ADJUSTED_PER_LAYER[norm], at) if norm in (7.9, 12.6, 20) else "—"
        rows.append(
            [
                _label(norm),
                cell(results, FROM_START[norm], from_start),
                cell(results, ADJUSTED[norm], at),
                signed(gap),
                layered,
            ]
        )
    table = Table(
        title="AccuracyTop1",
        columns=[
            "",
            f"from the beginning, {from_start:,}",
            f"adjusted, {end:,} more",
            "less S = 20, points",
            "per layer, adjusted",
        ],
        rows=rows,
    )
    return build_exhibit(
        recipe,
        results,
        judge_adjusted(results),
        tables=[table],
        figures=[curves, by_norm],
        compared_with=FROM_START.values(),
    )


def judge_trade_offs(results: ResultSet) -> Verdict:
    """Apply the rule: S = 10 or 12.6 is best early, and two seeds of S = 20 differ little."""
    names = [*FROM_START.values(), SECOND_SEED]
    if undecided := missing(results, names, RULE_TRADE_OFFS):
        return undecided
    at = results.rounds(*names)
    values = {norm: results.accuracy(name, at) or 0.0 for norm, name in FROM_START.items()}
    best = max(values, key=lambda norm: values[norm])
    claimed = max(values[norm] for norm in CLAIMED_BEST)
    twice = abs(values[20] - (results.accuracy(SECOND_SEED, at) or 0.0))
    sentence = (
        f"After {plural(at or 0)} S = {best:g} is best ({percent(values[best])}); "
        f"{' and '.join(f'S = {norm:g} has {percent(values[norm])}' for norm in CLAIMED_BEST)}. Two runs with S = "
        "20 end "
        f"{points(twice)} apart. {about_seeds(results, [values[best] - values[norm] for norm in CLAIMED_BEST], at)}"
    )
    same = margin(results, at)
    if values[best] - min(values.values()) <= same:
        return decide(None, f"{sentence} All six lie within {points(same)}.", RULE_TRADE_OFFS)
    held = values[best] - claimed <= same < claimed - min(values.values())
    do_both = all(values[best] - values[norm] <= NEARLY for norm in CLAIMED_BEST)
    return decide(held and do_both and twice <= NEARLY, sentence, RULE_TRADE_OFFS)


def judge_adjusted(results: ResultSet) -> Verdict:
    """Apply the rule: later in training, S = 7.9 is above S = 20 at the same privacy."""
    names = [ADJUSTED[CLAIMED_BETTER], ADJUSTED[20]]
    if undecided := missing(results, names, RULE_ADJUSTED):
        return undecided
    if len({_start(results, name) for name in names}) > 1:
        return decide(None, "The two were begun from different models.", RULE_ADJUSTED)
    at = results.rounds(*names)
    gap = results.run_difference(names[0], names[1], at) or 0.0
    there = {norm: value for norm, name in ADJUSTED.items() if (value := results.accuracy(name, at)) is not None}
    best = max(there, key=lambda norm: there[norm])
    sentence = (
        f"{plural(at or 0).capitalize()} after the change, which came after {_start_round(results):,} (in the "
        f"paper {ROUNDS_AFTER:,} and "
        f"{ROUNDS_BEFORE:,}), S = 7.9 is {below(gap)} S = 20 at the same privacy; best is S = {best:g} "
        f"({percent(there[best])}). "
        f"{about_seeds(results, [gap])}"
    )
    return decide(None if abs(gap) <= margin(results) else gap > 0, sentence, RULE_ADJUSTED)


def _start_round(results: ResultSet) -> int:
    """The round of the S = 20 run that the adjusted runs started from, as their results state it."""
    for name in (*ADJUSTED.values(), *ADJUSTED_PER_LAYER.values()):
        if match := re.search(r"after (\d+) rounds", _start(results, name)):
            return int(match.group(1))
    return results.runs[S20].rounds if S20 in results else ROUNDS_BEFORE


def _start(results: ResultSet, name: str) -> str:
    """What a run started from, as its result states it: `flat-S20-sigma0.012 after 500 rounds`."""
    return str(results.runs[name].settings.get("training", {}).get("init_from", "")) if name in results else ""


def _label(norm: float) -> str:
    """S and the sigma that belongs to it."""
    return f"S = {norm:g}, σ = {norm * 0.0006:.4g}"


def _dash_pairs(figure: Figure) -> Figure:
    """The figure with the second line of each S (per layer, or another seed) dashed in the colour of the first, as in
    the paper."""
    firsts = {_label(norm) for norm in TRADES}
    pairs = ((line, next(name for name in firsts if line.name.startswith(name))) for line in figure.lines)
    return replace(
        figure,
        lines=tuple(line if line.name == name else replace(line, tint=name, is_dashed=True) for line, name in pairs),
    )


ADAPTIVE = "adaptive-z0.06"
RULE_ADAPTIVE = f"Where all got to, the adaptive clip is at most {points(NEARLY)} below the best S of the sweep."


def adaptive_clipping(recipe: Recipe, results: ResultSet) -> Exhibit:
    """The adaptive clip and six fixed norms at the same z: accuracy by round and after some rounds."""
    labels = {**{name: f"S = {norm:g}" for norm, name in FROM_START.items()}, ADAPTIVE: "adaptive"}
    figure = curves_by_round(results, "adaptive-clipping", "AccuracyTop1 by round, z = 0.06", labels)
    marks = drawn_rounds(results, labels)
    table = rounds_table(results, labels, marks)
    return build_exhibit(recipe, results, judge_adaptive(results), tables=[table], figures=[figure])


def judge_adaptive(results: ResultSet) -> Verdict:
    """Apply the rule: the adaptive clip is nearly as good as the best fixed S."""
    names = [*FROM_START.values(), ADAPTIVE]
    if undecided := missing(results, names, RULE_ADAPTIVE):
        return undecided
    at = results.rounds(*names)
    values = {norm: results.accuracy(name, at) or 0.0 for norm, name in FROM_START.items()}
    best = max(values, key=lambda norm: values[norm])
    if undecided := untrained(results, [FROM_START[best]], RULE_ADAPTIVE, at):
        return undecided
    mine = results.accuracy(ADAPTIVE, at) or 0.0
    sentence = (
        f"After {plural(at or 0)} the adaptive clip has {percent(mine)}, {below(mine - values[best])} the best fixed "
        f"one (S = {best:g}, {percent(values[best])}). {about_seeds(results, [mine - values[best]], at)}"
    )
    return decide(mine >= values[best] - NEARLY, sentence, RULE_ADAPTIVE)
