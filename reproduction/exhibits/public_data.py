"""Section 3 and the appendix: training on another corpus, and starting private training from a public model.

`another_corpus` compares the cost of training on other text (the paper reports 2.50 points) with the cost of privacy.
`public_start` measures how many private rounds are saved if training starts from a model of public text, which the
paper recommends but did not test.
"""

from reproduction.exhibit import NOT_RUN, Draft, signed
from reproduction.printed import BASELINE_ACCURACY, OTHER_CORPUS_COST, PRIVACY_COST
from reproduction.recipes import PUBLIC, noised
from reproduction.verdict import SMALL, Ruling, Undecided, in_points, plural
from unheard.formatting import NOTHING, percent

OWN_CORPUS, OTHER_CORPUS, PRIVATE = "baseline", PUBLIC.name, noised(15, 0.003).name
"""Runs on this corpus without privacy, on the other corpus, and on this corpus with sigma = 0.003."""


def another_corpus(draft: Draft) -> Ruling:
    """Section 3: accuracy on held-out users of this corpus, of three models.

    They were trained on this corpus without privacy, on this corpus with sigma = 0.003, and on another corpus. The last
    was evaluated here at its last round only, so the others are compared at that round.
    """
    results, draft.is_over_seeds, draft.compared_with = draft.results, True, [PRIVATE]
    at, tried = results.rounds(OWN_CORPUS, OTHER_CORPUS), results.rounds(OTHER_CORPUS)
    other = None
    if OTHER_CORPUS in results:
        other = results.runs[OTHER_CORPUS].accuracy_elsewhere.get("main", {}).get("accuracy_top1")
    own = results.mean(OWN_CORPUS, at)
    later = "" if tried in (None, at) else f" (after {plural(tried)})"
    rows = []
    for label, run, value, paper in (
        ("this corpus, no privacy", OWN_CORPUS, own, percent(BASELINE_ACCURACY)),
        ("this corpus, σ = 0.003", PRIVATE, results.mean(PRIVATE, at), signed(PRIVACY_COST)),
        (f"another corpus, no privacy{later}", OTHER_CORPUS, other, signed(OTHER_CORPUS_COST)),
    ):
        gap = None if own is None or value is None or at is None or run == OWN_CORPUS else value - own
        rows.append([label, draft.reason_missing(run, at) if value is None else percent(value), signed(gap), paper])
    where = plural(at) if at is not None else "as many rounds"
    draft.add_table(
        f"AccuracyTop1 on held-out users of {results.corpus or 'this corpus'}, after {where}",
        ["trained on", "AccuracyTop1", "less its own, points", "paper"],
        rows,
        "Both models use this corpus's dictionary. The paper compared other corpora, which are not public.",
    )
    at = draft.shared_round([OWN_CORPUS, OTHER_CORPUS, PRIVATE], against=[OWN_CORPUS])
    if other is None:
        raise Undecided("The model of the other corpus was not evaluated on this one.")
    if at != tried:  # the model of the other corpus was evaluated here at its last round only
        raise Undecided(
            f"The model of the other corpus was evaluated after {plural(tried or 0)}; the others have {at:,}."
        )
    own, private = results.mean(OWN_CORPUS, at) or 0.0, results.mean(PRIVATE, at) or 0.0
    sentence = (
        f"After {plural(at)} the other corpus costs {in_points(own - other)} points (the paper: "
        f"{in_points(-OTHER_CORPUS_COST)}), σ = 0.003 costs {in_points(own - private)} "
        f"({in_points(-PRIVACY_COST)}). {draft.about_seeds([own - private], at)}"
    )
    return own - other > SMALL and other < private, sentence


FROM_PUBLIC = f"after-public-{PRIVATE}"
"""The private run that starts from the public model."""


def public_start(draft: Draft) -> Ruling:
    """Compare the private rounds needed for the same accuracy from scratch and from the public model (not in the paper).

    The rule uses the accuracy of the run from scratch at the last round that both runs completed.
    """
    results = draft.results
    labels = {PRIVATE: "from nothing", FROM_PUBLIC: "from the public model"}
    draft.add_curves("AccuracyTop1 by private round, σ = 0.003, S = 15", labels)
    rows = []
    for mark in (100, 200, 500, 1000, 1500, 3000, 5000):
        target = results.accuracy(PRIVATE, mark)
        rounds = None if target is None else results.first_round_at(FROM_PUBLIC, target)
        saved = NOTHING if rounds is None else f"{mark - rounds:,}"
        rows.append([f"{mark:,}", draft.cell(PRIVATE, mark), _rounds_cell(draft, target, rounds), saved])
    draft.add_table(
        "Private rounds to the same accuracy",
        ["rounds from nothing", "AccuracyTop1", "from the public model", "saved"],
        rows,
        f"Rounds of private training only. The public model ({PUBLIC.name}) costs the users of this corpus no privacy; its "
        "own users are not protected.",
    )
    at = draft.shared_round(labels, against=[PRIVATE])
    target = results.value(PRIVATE, at)
    rounds = results.first_round_at(FROM_PUBLIC, target)
    if rounds is None:
        best = percent(max(value for _, value in results.curve(FROM_PUBLIC)))
        reached = f"From nothing {percent(target)} is reached in {plural(at)}"
        return False, f"{reached}; from the public model never (at best {best})."
    sentence = (
        f"From nothing {percent(target)} takes {plural(at)}, from the public model {rounds:,}: {at - rounds:,} "
        f"private rounds saved, {100 * (at - rounds) / at:.0f} %."
    )
    return rounds <= draft.recipe.limits["max_share"] * at, sentence


def _rounds_cell(draft: Draft, target: float | None, rounds: int | None) -> str:
    """Return the number of rounds from the public model as a table cell, or why there is no number.

    Args:
        draft: The exhibit.
        target: The accuracy to reach; None if it is unknown.
        rounds: The number of rounds; None if the accuracy was not reached.
    """
    if target is None or not draft.results.curve(FROM_PUBLIC):
        return NOTHING if FROM_PUBLIC in draft.results else NOT_RUN
    return f"not within {draft.results.runs[FROM_PUBLIC].rounds:,}" if rounds is None else f"{rounds:,}"
