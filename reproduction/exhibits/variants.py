"""Figure 5 and the appendix: variations of the algorithm and of the model.

`estimators` (Figure 5) compares fixed and variable samples and three estimators of the average. `update_penalty` adds
an L2 penalty to the local loss (appendix). `tied_embeddings` and `unit_norm` test two properties of the model
(appendix). `other_models` (not in the paper) trains a GRU and a character model with the same S and sigma.
"""

from reproduction.exhibit import NOT_RUN, Draft, signed
from reproduction.recipes import clipped, noised
from reproduction.results import ResultSet
from reproduction.verdict import NEARLY, SMALL, Ruling, Undecided, below, in_points, plural, points
from unheard.formatting import NOTHING, percent

BASELINE, CLIPPED, NOISED = "baseline", clipped(15).name, noised(15, 0.003).name
"""Runs without privacy, with a clip alone, and with clip and noise."""
ESTIMATOR_LABELS = {
    BASELINE: "fixed sample, true average",
    "variable-true-average": "variable sample, true average",
    "variable-fixed-denominator": "variable sample, fixed denominator",
    "variable-clipped-denominator": "variable sample, clipped denominator",
}
"""Labels of the runs of Figure 5: sampling and estimator, by the name of the run."""


def estimators(draft: Draft) -> Ruling:
    """Figure 5: accuracy by round with fixed and variable samples and three estimators.

    The rule: all four runs nearly match.
    """
    results = draft.results
    draft.add_curves("AccuracyTop1 by round", ESTIMATOR_LABELS)
    draft.add_rounds_table(ESTIMATOR_LABELS)
    at = draft.shared_round(ESTIMATOR_LABELS)
    values = {name: results.value(name, at) for name in ESTIMATOR_LABELS}
    best, worst = max(values, key=values.__getitem__), min(values, key=values.__getitem__)
    draft.require_learned([best], at)
    apart = values[best] - values[worst]
    sentence = (
        f"After {plural(at)} all four lie within {points(apart)}: from {percent(values[worst])} "
        f"({ESTIMATOR_LABELS[worst]}) to {percent(values[best])} ({ESTIMATOR_LABELS[best]}). "
        f"{draft.about_seeds([apart], at)}"
    )
    return apart <= NEARLY, sentence


def update_penalty(draft: Draft) -> Ruling:
    """Appendix: accuracy by round with an L2 penalty on the update, which did not help in the paper."""
    results, penalties = draft.results, {f"{CLIPPED}-penalty{penalty}": penalty for penalty in ("0.001", "0.01")}
    labels = {CLIPPED: "no penalty"} | {name: f"penalty {penalty}" for name, penalty in penalties.items()}
    draft.add_curves("AccuracyTop1 by round, S = 15", labels)
    draft.add_rounds_table(labels)
    at = draft.shared_round(labels, against=[CLIPPED])
    gains = {penalty: results.value(name, at) - results.value(CLIPPED, at) for name, penalty in penalties.items()}
    listed = " and ".join(f"{signed(gain)} points at {penalty}" for penalty, gain in gains.items())
    seeds = draft.about_seeds(gains.values(), at)
    sentence = f"After {plural(at)} the penalty changes AccuracyTop1 by {listed}. {seeds}"
    return max(gains.values()) <= results.margin(at), sentence


def tied_embeddings(draft: Draft) -> Ruling:
    """Appendix: accuracy by round and size of a model with tied embeddings, and of one with two embeddings."""
    results, untied, limits = draft.results, "untied-baseline", draft.recipe.limits
    _add_sizes(draft, {BASELINE: "tied", untied: "untied"})
    at = draft.shared_round([BASELINE, untied], against=[untied])
    gap = results.value(BASELINE, at) - results.value(untied, at)
    sizes = [results.runs[name].parameters for name in (BASELINE, untied)]
    share = 1 - sizes[0] / sizes[1]
    sentence = (
        f"Tied, the model is {100 * share:.0f} % smaller ({sizes[0]:,} parameters against {sizes[1]:,}) "
        f"and after {plural(at)} {below(gap)} the untied one. {draft.about_seeds([gap], at)}"
    )
    return limits["least_smaller"] <= share <= limits["most_smaller"] and gap >= -SMALL, sentence


def unit_norm(draft: Draft) -> Ruling:
    """Appendix: word vectors of norm 1 compared with vectors of free norm, with and without a clip.

    The rule uses the runs with a clip. Without a clip, training with vectors of free norm may diverge at this learning
    rate, and then says nothing about the speed of convergence.
    """
    results, unit_run, free_run = draft.results, CLIPPED, f"free-norm-{CLIPPED}"
    labels = {
        unit_run: "vectors of norm 1, S = 15",
        free_run: "free vectors, S = 15",
        BASELINE: "vectors of norm 1, no clip",
        f"free-norm-{BASELINE}": "free vectors, no clip",
    }
    _add_sizes(draft, labels)
    at = draft.shared_round([unit_run, free_run], against=[free_run])
    free, unit = results.value(free_run, at), results.value(unit_run, at)
    sooner = results.first_round_at(unit_run, free)
    words = f"reach that after {plural(sooner)}" if sooner is not None else "never reach that"
    sentence = (
        f"Free vectors have {percent(free)} after {plural(at)}; vectors of norm 1 {words}, and end at "
        f"{percent(unit)}. {draft.about_seeds([unit - free], at)}"
    )
    if abs(unit - free) <= results.margin(at):
        raise Undecided(sentence)
    is_faster = sooner is not None and sooner < (results.first_round_at(free_run, free) or at)
    return is_faster and unit > free, sentence


def _add_sizes(draft: Draft, labels: dict[str, str]) -> None:
    """Add the curves of some models, and a table of their number of parameters and AccuracyTop1 after some rounds."""
    draft.add_curves("AccuracyTop1 by round", labels)
    marks = draft.drawn_rounds(labels)
    cells = {name: [_size(draft.results, name), *(draft.cell(name, mark) for mark in marks)] for name in labels}
    columns = ["", "parameters", *(f"{mark:,}" for mark in marks)]
    draft.add_table(
        "Size, and AccuracyTop1 after some rounds", columns, [[labels[name], *row] for name, row in cells.items()]
    )


def _size(results: ResultSet, name: str) -> str:
    """Return the number of parameters of the model of a run as a table cell."""
    return f"{results.runs[name].parameters:,}" if name in results else NOT_RUN


MODEL_LABELS = {BASELINE: "baseline", CLIPPED: "S = 15", NOISED: "σ = 0.003, S = 15"}
"""Labels of the three runs of each model, by the name of the run."""
MODELS = {"": "LSTM", "gru-": "GRU", "characters-": "characters"}
"""Labels of the models, by the prefix in the names of their runs."""


def other_models(draft: Draft) -> Ruling:
    """Not in the paper: accuracy of three models without privacy, with a clip, and with clip and noise.

    The rule: clip and noise cost the GRU and the character model little.
    """
    results, others = draft.results, {"gru-": "GRU", "characters-": "character model"}
    for prefix, label in (("gru-", "GRU"), ("characters-", "character model, by character")):
        labels = {prefix + name: run_label for name, run_label in MODEL_LABELS.items()}
        draft.add_curves(f"AccuracyTop1 by round: {label}", labels, name=f"other-models-{prefix[:-1]}")
    rows = []
    for prefix, label in MODELS.items():
        names = [prefix + name for name in MODEL_LABELS]
        at = results.rounds(*names)
        done, gap = NOTHING if at is None else f"{at:,}", signed(_noise_gap(results, prefix, at))
        rows.append([label, _size(results, names[0]), done, *(draft.cell(name, at) for name in names), gap])
    note = "The difference is from the better of the first two. The character model's accuracy is by character: compare its "
    columns = ["", "parameters", "rounds", *MODEL_LABELS.values(), "difference, points"]
    draft.add_table("The same plan for three models", columns, rows, f"{note}columns with each other only.")
    draft.compared_with = MODEL_LABELS
    needed = [prefix + name for prefix in others for name in MODEL_LABELS]
    at = draft.shared_round(needed, against=[prefix + CLIPPED for prefix in others])
    costs = {label: -(_noise_gap(results, prefix, at) or 0.0) for prefix, label in others.items()}
    listed = " and ".join(f"the {label} {in_points(cost)}" for label, cost in costs.items())
    sentence = f"After {plural(at)} σ = 0.003 costs {listed} points. {draft.about_seeds(costs.values(), at)}"
    return all(cost <= NEARLY for cost in costs.values()), sentence


def _noise_gap(results: ResultSet, prefix: str, at: int | None) -> float | None:
    """Return the accuracy with noise minus the better of no clip and the clip alone; None if one is unknown.

    The better of both is the reference, because some models diverge without a clip.

    Args:
        results: Results of one corpus.
        prefix: Prefix in the names of the runs of a model.
        at: The number of rounds; None gives None.
    """
    plain, clip, noise = (results.accuracy(prefix + name, at) for name in MODEL_LABELS)
    return None if at is None or plain is None or clip is None or noise is None else noise - max(plain, clip)
