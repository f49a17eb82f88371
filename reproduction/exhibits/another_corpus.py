"""The paper's -2.50 %: what training on another corpus costs, beside what privacy costs."""

from reproduction.exhibit import Exhibit, Table
from reproduction.exhibit_parts import lacking, shown, signed
from reproduction.printed import BASELINE_ACCURACY, OTHER_CORPUS_COST, PRIVACY_COST
from reproduction.recipe import Recipe
from reproduction.recipes import PUBLIC
from reproduction.results_query import POINT, Found
from reproduction.runs import noised
from reproduction.verdict import Verdict, about_seeds, judged, missing, plural, points
from unheard.formatting import NOTHING, in_points, percent

OWN, OTHER, PRIVATE = "baseline", PUBLIC.name, noised(15, 0.003).name
RULE = (
    "On held-out users of this corpus, after as many rounds, the model trained on the other corpus is more than "
    f"{points(POINT)} below the one trained here, and further below than σ = 0.003 is."
)


def another_corpus(recipe: Recipe, found: Found) -> Exhibit:
    at = found.rounds(OWN, OTHER)
    own, private, other = found.mean(OWN, at), found.mean(PRIVATE, at), elsewhere(found)

    def row(label: str, run: str, value: float | None, printed: str) -> list[str]:
        gap = None if own is None or value is None or at is None else value - own
        return [label, lacking(found, run, at) if value is None else percent(value), signed(gap), printed]

    where = plural(at) if at is not None else "as many rounds"
    tried = found.rounds(OTHER)
    later = "" if tried in (None, at) else f" (after {plural(tried)})"
    table = Table(
        title=f"AccuracyTop1 on held-out users of {found.corpus or 'this corpus'}, after {where}",
        columns=["trained on", "AccuracyTop1", "less its own, points", "paper"],
        rows=[
            [
                "this corpus, no privacy",
                lacking(found, OWN, at) if own is None else percent(own),
                NOTHING,
                percent(BASELINE_ACCURACY),
            ],
            row("this corpus, σ = 0.003", PRIVATE, private, signed(PRIVACY_COST.value)),
            row(f"another corpus, no privacy{later}", OTHER, other, signed(OTHER_CORPUS_COST.value)),
        ],
        note="Both models use this corpus's dictionary. The paper compared other corpora, which are not public.",
    )
    return shown(recipe, found, judge(found), tables=[table], beside=[PRIVATE], over_seeds=True)


def judge(found: Found) -> Verdict:
    if lacking := missing(found, [OWN, OTHER, PRIVATE], RULE, against=[OWN]):
        return lacking
    other = elsewhere(found)
    if other is None:
        return judged(None, "The other corpus's model was not tried on this one.", RULE)
    at, tried = found.rounds(OWN, OTHER, PRIVATE), found.runs[OTHER].rounds
    if at != tried:  # it was tried at its end, and only there
        return judged(None, f"The other corpus's model was tried after {plural(tried)}; the others have {at:,}.", RULE)
    own, private = found.mean(OWN, at) or 0.0, found.mean(PRIVATE, at) or 0.0
    sentence = (
        f"After {plural(at or 0)} the other corpus costs {in_points(own - other)} points (the paper: "
        f"{in_points(-OTHER_CORPUS_COST.value)}), σ = 0.003 "
        f"costs {in_points(own - private)} ({in_points(-PRIVACY_COST.value)}). {about_seeds(found, [own - private], at)}"
    )
    return judged(own - other > POINT and other < private, sentence, RULE)


def elsewhere(found: Found) -> float | None:
    """The other corpus's model on this corpus's held-out users."""
    result = found.runs.get(OTHER)
    return None if result is None else result.accuracy_elsewhere.get("main", {}).get("accuracy_top1")
