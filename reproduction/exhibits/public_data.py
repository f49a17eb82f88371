"""Section 3 and the appendix: training on another corpus, and starting private training from a public model.

`another_corpus` compares the cost of training on other text (the paper reports 2.50 points) with the cost of privacy.
`public_start` measures how many private rounds a model saves that was first trained on public text, which the paper
recommends and did not do.
"""

from reproduction.exhibit import NOT_RUN, Exhibit, Table, build_exhibit, cell, curves_by_round, reason_missing, signed
from reproduction.printed import BASELINE_ACCURACY, OTHER_CORPUS_COST, PRIVACY_COST
from reproduction.recipe import Recipe
from reproduction.recipes import PUBLIC, noised
from reproduction.results import POINT, ResultSet
from reproduction.verdict import Verdict, about_seeds, decide, missing, plural, points
from unheard.formatting import NOTHING, in_points, percent

OWN_CORPUS, OTHER_CORPUS, PRIVATE = "baseline", PUBLIC.name, noised(15, 0.003).name
RULE_OTHER_CORPUS = (
    "On held-out users of this corpus, after as many rounds, the model trained on the other corpus is more than "
    f"{points(POINT)} below the one trained here, and further below than σ = 0.003 is."
)


def another_corpus(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Accuracy on held-out users of this corpus: trained here, trained here with sigma = 0.003, and trained on another
    corpus."""
    at = results.rounds(OWN_CORPUS, OTHER_CORPUS)
    own, private, other = results.mean(OWN_CORPUS, at), results.mean(PRIVATE, at), accuracy_of_other(results)

    def row(label: str, run: str, value: float | None, printed: str) -> list[str]:
        """One row: a label, our accuracy, its distance to the first row, and the printed number."""
        gap = None if own is None or value is None or at is None else value - own
        return [label, reason_missing(results, run, at) if value is None else percent(value), signed(gap), printed]

    where = plural(at) if at is not None else "as many rounds"
    tried = results.rounds(OTHER_CORPUS)
    later = "" if tried in (None, at) else f" (after {plural(tried)})"
    table = Table(
        title=f"AccuracyTop1 on held-out users of {results.corpus or 'this corpus'}, after {where}",
        columns=["trained on", "AccuracyTop1", "less its own, points", "paper"],
        rows=[
            [
                "this corpus, no privacy",
                reason_missing(results, OWN_CORPUS, at) if own is None else percent(own),
                NOTHING,
                percent(BASELINE_ACCURACY),
            ],
            row("this corpus, σ = 0.003", PRIVATE, private, signed(PRIVACY_COST.value)),
            row(f"another corpus, no privacy{later}", OTHER_CORPUS, other, signed(OTHER_CORPUS_COST.value)),
        ],
        note="Both models use this corpus's dictionary. The paper compared other corpora, which are not public.",
    )
    return build_exhibit(
        recipe, results, judge_other_corpus(results), tables=[table], compared_with=[PRIVATE], over_seeds=True
    )


def judge_other_corpus(results: ResultSet) -> Verdict:
    """Apply the rule. The model of the other corpus was evaluated at its last round only, so the others must have as
    many rounds."""
    if undecided := missing(results, [OWN_CORPUS, OTHER_CORPUS, PRIVATE], RULE_OTHER_CORPUS, against=[OWN_CORPUS]):
        return undecided
    other = accuracy_of_other(results)
    if other is None:
        return decide(None, "The other corpus's model was not tried on this one.", RULE_OTHER_CORPUS)
    at, tried = results.rounds(OWN_CORPUS, OTHER_CORPUS, PRIVATE), results.runs[OTHER_CORPUS].rounds
    if at != tried:  # it was tried at its end, and only there
        return decide(
            None,
            f"The other corpus's model was tried after {plural(tried)}; the others have {at:,}.",
            RULE_OTHER_CORPUS,
        )
    own, private = results.mean(OWN_CORPUS, at) or 0.0, results.mean(PRIVATE, at) or 0.0
    sentence = (
        f"After {plural(at or 0)} the other corpus costs {in_points(own - other)} points (the paper: "
        f"{in_points(-OTHER_CORPUS_COST.value)}), σ = 0.003 "
        f"costs {in_points(own - private)} ({in_points(-PRIVACY_COST.value)}). "
        f"{about_seeds(results, [own - private], at)}"
    )
    return decide(own - other > POINT and other < private, sentence, RULE_OTHER_CORPUS)


def accuracy_of_other(results: ResultSet) -> float | None:
    """Accuracy of the model of the other corpus on held-out users of this corpus."""
    result = results.runs.get(OTHER_CORPUS)
    return None if result is None else result.accuracy_elsewhere.get("main", {}).get("accuracy_top1")


FROM_SCRATCH = noised(15, 0.003).name
FROM_PUBLIC = f"after-public-{FROM_SCRATCH}"
START_LABELS = {FROM_SCRATCH: "from nothing", FROM_PUBLIC: "from the public model"}
MARKS = (100, 200, 500, 1000, 1500, 3000, 5000)
"""Numbers of rounds from scratch in the rows of the table."""
MAX_SHARE = 0.9
"""The public model must need at most this share of the rounds."""
RULE_PUBLIC_START = (
    "The accuracy that training from nothing has where both got to is reached from the public model in at most "
    f"{MAX_SHARE:.0%} of the rounds."
)


def public_start(recipe: Recipe, results: ResultSet) -> Exhibit:
    """Private rounds to the same accuracy, from scratch and from the public model."""
    figure = curves_by_round(results, "public-start", "AccuracyTop1 by private round, σ = 0.003, S = 15", START_LABELS)
    rows = []
    for mark in MARKS:
        target = results.accuracy(FROM_SCRATCH, mark)
        rounds = None if target is None else results.first_round_at(FROM_PUBLIC, target)
        saved = NOTHING if rounds is None else f"{mark - rounds:,}"
        rows.append([f"{mark:,}", cell(results, FROM_SCRATCH, mark), _rounds_cell(results, target, rounds), saved])
    table = Table(
        title="Private rounds to the same accuracy",
        columns=["rounds from nothing", "AccuracyTop1", "from the public model", "saved"],
        rows=rows,
        note=(
            f"Rounds of private training only. The public model ({PUBLIC.name}) cost its own users, who are not "
            "protected, and nobody here."
        ),
    )
    return build_exhibit(recipe, results, judge_public_start(results), tables=[table], figures=[figure])


def _rounds_cell(results: ResultSet, target: float | None, rounds: int | None) -> str:
    """Number of rounds from the public model, or why there is none."""
    if target is None or not results.curve(FROM_PUBLIC):
        return NOTHING if FROM_PUBLIC in results else NOT_RUN
    return f"not within {results.runs[FROM_PUBLIC].rounds:,}" if rounds is None else f"{rounds:,}"


def judge_public_start(results: ResultSet) -> Verdict:
    """Return whether a public start saves private rounds, by `RULE_PUBLIC_START`.

    The target is the accuracy of the run from scratch after the last round that both runs completed.
    """
    if undecided := missing(results, [FROM_SCRATCH, FROM_PUBLIC], RULE_PUBLIC_START, against=[FROM_SCRATCH]):
        return undecided
    at = results.rounds(FROM_SCRATCH, FROM_PUBLIC) or 0
    target = results.accuracy(FROM_SCRATCH, at) or 0.0
    rounds = results.first_round_at(FROM_PUBLIC, target)
    if rounds is None:
        best = max(value for _, value in results.curve(FROM_PUBLIC))
        return decide(
            False,
            f"From nothing {percent(target)} is reached in {plural(at)}; from the public model never (at best "
            f"{percent(best)}).",
            RULE_PUBLIC_START,
        )
    sentence = (
        f"From nothing {percent(target)} takes {plural(at)}, from the public model {rounds:,}: {at - rounds:,} "
        f"private rounds saved, {100 * (at - rounds) / at:.0f} %."
    )
    return decide(rounds <= MAX_SHARE * at, sentence, RULE_PUBLIC_START)
