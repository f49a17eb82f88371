"""Figure 5 and the appendix: variations of the algorithm and of the model.

`estimators` (Figure 5) compares fixed and variable samples and three estimators of the average. `update_penalty` adds
an L2 penalty to the local loss (appendix). `tied_embeddings` and `unit_norm` test two properties of the model
(appendix). `other_models` (not in the paper) trains a GRU and a character model with the same S and sigma.
"""

from reproduction.exhibit import (
    NOT_RUN,
    Exhibit,
    Table,
    build_exhibit,
    cell,
    curves_by_round,
    drawn_rounds,
    rounds_table,
    signed,
)
from reproduction.printed import TIED_SMALLER
from reproduction.recipe import Recipe
from reproduction.recipes import clipped, noised
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

ESTIMATOR_LABELS = {
    "baseline": "fixed sample, true average",
    "variable-true-average": "variable sample, true average",
    "variable-fixed-denominator": "variable sample, fixed denominator",
    "variable-clipped-denominator": "variable sample, clipped denominator",
}
"""Sampling and estimator by the name of the run."""
RULE_ESTIMATORS = f"Where all four got to, the best and the worst are at most {points(NEARLY)} apart."


def estimators(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Figure 5: accuracy by round with fixed and variable samples and three estimators."""
    figure = curves_by_round(results, "estimators", "AccuracyTop1 by round", ESTIMATOR_LABELS)
    marks = drawn_rounds(results, ESTIMATOR_LABELS)
    table = rounds_table(results, ESTIMATOR_LABELS, marks)
    return build_exhibit(recipe, results, judge_estimators(results), tables=[table], figures=[figure])


def judge_estimators(results: ResultSet) -> Verdict:
    """Apply the rule: the best and the worst of the four nearly match."""
    if undecided := missing(results, list(ESTIMATOR_LABELS), RULE_ESTIMATORS):
        return undecided
    at = results.rounds(*ESTIMATOR_LABELS)
    if undecided := untrained(
        results, [max(ESTIMATOR_LABELS, key=lambda name: results.accuracy(name, at) or 0.0)], RULE_ESTIMATORS, at
    ):
        return undecided
    values = {label: results.accuracy(name, at) or 0.0 for name, label in ESTIMATOR_LABELS.items()}
    best, worst = max(values, key=lambda label: values[label]), min(values, key=lambda label: values[label])
    apart = values[best] - values[worst]
    sentence = (
        f"After {plural(at or 0)} all four lie within {points(apart)}: from {percent(values[worst])} ({worst}) to "
        f"{percent(values[best])} ({best}). {about_seeds(results, [apart], at)}"
    )
    return decide(apart <= NEARLY, sentence, RULE_ESTIMATORS)


NO_PENALTY = clipped(15).name
PENALTIES = {penalty: f"{NO_PENALTY}-penalty{penalty:g}" for penalty in (0.001, 0.01)}
RULE_PENALTY = "Where all got to, no penalty is above the run without one by more than two seeds can differ."


def update_penalty(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Accuracy by round with an L2 penalty on the update. It was meant to make clipping unnecessary, and did not help."""
    labels = {NO_PENALTY: "no penalty", **{name: f"penalty {penalty:g}" for penalty, name in PENALTIES.items()}}
    figure = curves_by_round(results, "update-penalty", "AccuracyTop1 by round, S = 15", labels)
    marks = drawn_rounds(results, labels)
    table = rounds_table(results, labels, marks)
    return build_exhibit(recipe, results, judge_penalty(results), tables=[table], figures=[figure])


def judge_penalty(results: ResultSet) -> Verdict:
    """Apply the rule: no penalty improves accuracy by more than two seeds differ."""
    names = [NO_PENALTY, *PENALTIES.values()]
    if undecided := missing(results, names, RULE_PENALTY, against=[NO_PENALTY]):
        return undecided
    at = results.rounds(*names)
    plain = results.accuracy(NO_PENALTY, at) or 0.0
    gains = {penalty: (results.accuracy(name, at) or 0.0) - plain for penalty, name in PENALTIES.items()}
    listed = " and ".join(f"{signed(gain)} points at {penalty:g}" for penalty, gain in gains.items())
    sentence = (
        f"After {plural(at or 0)} the penalty changes AccuracyTop1 by {listed}. "
        f"{about_seeds(results, list(gains.values()), at)}"
    )
    return decide(max(gains.values()) <= margin(results, at), sentence, RULE_PENALTY)


BASELINE, UNTIED = "baseline", "untied-baseline"
UNIT_NORM, FREE_NORM = "flat-S15", "free-norm-flat-S15"
"""Runs with a clip. Without one, vectors of free norm may diverge at this learning rate, which would say nothing about
speed."""
TIED_SMALLER_BY = (TIED_SMALLER.value - 0.05, TIED_SMALLER.value + 0.05)
"""By how much tying may make the model smaller. The paper says about 40 %."""
RULE_TIED = (
    f"The tied model is {TIED_SMALLER_BY[0]:.0%} to {TIED_SMALLER_BY[1]:.0%} smaller than the untied one; where "
    "both got to, it is at most "
    f"{points(SMALL)} below it."
)
RULE_NORM = (
    "Both with a clip of S = 15: with vectors of norm 1 the model reaches, in fewer rounds, the accuracy at which "
    "free vectors "
    "ended (or where both got to), and is then above them by more than chance."
)


def tied_embeddings(recipe: Recipe, results: ResultSet) -> Exhibit:
    """One embedding for input and output against two: accuracy by round and size of the model."""
    labels = {BASELINE: "tied", UNTIED: "untied"}
    return build_exhibit(
        recipe,
        results,
        judge_tied(results),
        tables=[_size_table(results, labels)],
        figures=[curves_by_round(results, "tied-embeddings", "AccuracyTop1 by round", labels)],
    )


def unit_norm(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Word vectors of norm 1 against free ones, with and without a clip."""
    labels = {
        UNIT_NORM: "vectors of norm 1, S = 15",
        FREE_NORM: "free vectors, S = 15",
        BASELINE: "vectors of norm 1, no clip",
        f"free-norm-{BASELINE}": "free vectors, no clip",
    }
    return build_exhibit(
        recipe,
        results,
        judge_norm(results),
        tables=[_size_table(results, labels)],
        figures=[curves_by_round(results, "unit-norm", "AccuracyTop1 by round", labels)],
    )


def judge_tied(results: ResultSet) -> Verdict:
    """Apply the rule to the size and the accuracy of the tied model."""
    if undecided := missing(results, [BASELINE, UNTIED], RULE_TIED, against=[UNTIED]):
        return undecided
    at = results.rounds(BASELINE, UNTIED)
    tied, untied = results.accuracy(BASELINE, at) or 0.0, results.accuracy(UNTIED, at) or 0.0
    share = 1 - results.runs[BASELINE].parameters / results.runs[UNTIED].parameters
    sentence = (
        f"Tied, the model is {100 * share:.0f} % smaller ({results.runs[BASELINE].parameters:,} parameters against "
        f"{results.runs[UNTIED].parameters:,}) "
        f"and after {plural(at or 0)} {below(tied - untied)} the untied one. "
        f"{about_seeds(results, [tied - untied], at)}"
    )
    return decide(TIED_SMALLER_BY[0] <= share <= TIED_SMALLER_BY[1] and tied >= untied - SMALL, sentence, RULE_TIED)


def judge_norm(results: ResultSet) -> Verdict:
    """Apply the rule: vectors of norm 1 reach the final accuracy of free vectors in fewer rounds."""
    if undecided := missing(results, [UNIT_NORM, FREE_NORM], RULE_NORM, against=[FREE_NORM]):
        return undecided
    at = results.rounds(UNIT_NORM, FREE_NORM) or 0
    free, unit = results.accuracy(FREE_NORM, at) or 0.0, results.accuracy(UNIT_NORM, at) or 0.0
    sooner = results.first_round_at(UNIT_NORM, free)
    words = f"reach that after {plural(sooner)}" if sooner is not None else "never reach that"
    sentence = (
        f"Free vectors have {percent(free)} after {plural(at)}; vectors of norm 1 {words}, and end at "
        f"{percent(unit)}. "
        f"{about_seeds(results, [unit - free], at)}"
    )
    if abs(unit - free) <= margin(results, at):
        return decide(None, sentence, RULE_NORM)
    is_faster = sooner is not None and sooner < (results.first_round_at(FREE_NORM, free) or at)
    return decide(is_faster and unit > free, sentence, RULE_NORM)


def _size_table(results: ResultSet, labels: dict[str, str]) -> Table:
    """Number of parameters and AccuracyTop1 after some rounds."""
    marks = drawn_rounds(results, labels)
    rows = []
    for name, label in labels.items():
        size = f"{results.runs[name].parameters:,}" if name in results else NOT_RUN
        rows.append([label, size, *(cell(results, name, mark) for mark in marks)])
    return Table(
        title="Size, and AccuracyTop1 after some rounds",
        columns=["", "parameters", *(f"{mark:,}" for mark in marks)],
        rows=rows,
    )


CLIPPED, NOISED = clipped(15).name, noised(15, 0.003).name
MODEL_LABELS = {BASELINE: "baseline", CLIPPED: "S = 15", NOISED: "σ = 0.003, S = 15"}
MODELS = {"": "LSTM", "gru-": "GRU", "characters-": "characters"}
"""Model by the prefix of its runs."""
RULE_MODELS = (
    f"Where all got to, σ = 0.003 with S = 15 costs the GRU and the character model at most {points(NEARLY)} each, "
    "against the "
    "better of no clip and the clip alone (a model that diverges without a clip is nothing to compare with)."
)


def other_models(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Accuracy of three models without privacy, with a clip, and with a clip and noise."""
    figures = [
        curves_by_round(
            results,
            f"other-models-{kind}",
            f"AccuracyTop1 by round: {label}",
            {f"{kind}-{name}": run_label for name, run_label in MODEL_LABELS.items()},
        )
        for kind, label in (("gru", "GRU"), ("characters", "character model, by character"))
    ]
    rows = []
    for prefix, label in MODELS.items():
        names = [prefix + name for name in MODEL_LABELS]
        at = results.rounds(*names)
        size = f"{results.runs[names[0]].parameters:,}" if names[0] in results else NOT_RUN
        done = "—" if at is None else f"{at:,}"
        rows.append(
            [label, size, done, *(cell(results, name, at) for name in names), signed(_noise_cost(results, prefix, at))]
        )
    table = Table(
        title="The same plan for three models",
        columns=["", "parameters", "rounds", *MODEL_LABELS.values(), "difference, points"],
        rows=rows,
        note=(
            "The difference is from the better of the first two. The character model's accuracy is by character: "
            "compare its "
            "columns with each other only."
        ),
    )
    return build_exhibit(
        recipe, results, judge_models(results), tables=[table], figures=figures, compared_with=MODEL_LABELS
    )


def judge_models(results: ResultSet) -> Verdict:
    """Apply the rule: sigma = 0.003 with S = 15 costs the GRU and the character model little."""
    others = ["gru-", "characters-"]
    needed = [prefix + name for prefix in others for name in MODEL_LABELS]
    if undecided := missing(results, needed, RULE_MODELS, against=[prefix + CLIPPED for prefix in others]):
        return undecided
    at = results.rounds(*needed)
    costs = {MODELS[prefix]: -(_noise_cost(results, prefix, at) or 0.0) for prefix in others}
    listed = " and ".join(
        f"the {'GRU' if name == 'GRU' else 'character model'} {in_points(cost)}" for name, cost in costs.items()
    )
    sentence = (
        f"After {plural(at or 0)} σ = 0.003 costs {listed} points. {about_seeds(results, list(costs.values()), at)}"
    )
    return decide(all(cost <= NEARLY for cost in costs.values()), sentence, RULE_MODELS)


def _noise_cost(results: ResultSet, prefix: str, at: int | None) -> float | None:
    """Accuracy with noise minus the better of no clip and the clip alone. A model that diverges without a clip is not a
    useful reference."""
    plain, clipped_, noised_ = (results.accuracy(prefix + name, at) for name in MODEL_LABELS)
    if at is None or plain is None or clipped_ is None or noised_ is None:
        return None
    return noised_ - max(plain, clipped_)
