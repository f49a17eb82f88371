"""A GRU and a character model under the plan of the LSTM: the same S and sigma, and what they cost there."""

from reproduction.exhibit import NOT_RUN, Exhibit, Table
from reproduction.exhibit_parts import by_round, cell, shown, signed
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.runs import clipped, noised
from reproduction.verdict import NEARLY, Verdict, about_seeds, judged, missing, plural, points
from unheard.formatting import in_points

PLAIN, CLIPPED, NOISED = "baseline", clipped(15).name, noised(15, 0.003).name
LABELS = {PLAIN: "baseline", CLIPPED: "S = 15", NOISED: "σ = 0.003, S = 15"}
MODELS = {"": "LSTM", "gru-": "GRU", "characters-": "characters"}
RULE = (
    f"Where all got to, σ = 0.003 with S = 15 costs the GRU and the character model at most {points(NEARLY)} each, against the "
    "better of no clip and the clip alone (a model that diverges without a clip is nothing to compare with)."
)


def other_models(recipe: Recipe, found: Found) -> Exhibit:
    figures = [
        by_round(
            found,
            f"other-models-{kind}",
            f"AccuracyTop1 by round: {label}",
            {f"{kind}-{name}": told for name, told in LABELS.items()},
        )
        for kind, label in (("gru", "GRU"), ("characters", "character model, by character"))
    ]
    rows = []
    for prefix, label in MODELS.items():
        names = [prefix + name for name in LABELS]
        at = found.rounds(*names)
        size = f"{found.runs[names[0]].parameters:,}" if names[0] in found else NOT_RUN
        done = "—" if at is None else f"{at:,}"
        rows.append([label, size, done, *(cell(found, name, at) for name in names), signed(_cost(found, prefix, at))])
    table = Table(
        title="The same plan for three models",
        columns=["", "parameters", "rounds", *LABELS.values(), "difference, points"],
        rows=rows,
        note=(
            "The difference is from the better of the first two. The character model's accuracy is by character: compare its "
            "columns with each other only."
        ),
    )
    return shown(recipe, found, judge(found), tables=[table], figures=figures, beside=LABELS)


def judge(found: Found) -> Verdict:
    others = ["gru-", "characters-"]
    needed = [prefix + name for prefix in others for name in LABELS]
    if lacking := missing(found, needed, RULE, against=[prefix + CLIPPED for prefix in others]):
        return lacking
    at = found.rounds(*needed)
    costs = {MODELS[prefix]: -(_cost(found, prefix, at) or 0.0) for prefix in others}
    listed = " and ".join(
        f"the {'GRU' if name == 'GRU' else 'character model'} {in_points(cost)}" for name, cost in costs.items()
    )
    sentence = (
        f"After {plural(at or 0)} σ = 0.003 costs {listed} points. {about_seeds(found, list(costs.values()), at)}"
    )
    return judged(all(cost <= NEARLY for cost in costs.values()), sentence, RULE)


def _cost(found: Found, prefix: str, at: int | None) -> float | None:
    plain, clipped_, noised_ = (found.accuracy(prefix + name, at) for name in LABELS)
    if at is None or plain is None or clipped_ is None or noised_ is None:
        return None
    return noised_ - max(plain, clipped_)
