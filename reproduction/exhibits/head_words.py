"""Table 3: how many of a model's ten suggestions are head words, for models of different quality and noise."""

from collections.abc import Sequence

from reproduction.exhibit import NOT_RUN, Exhibit, Figure, Line, Table
from reproduction.exhibit_parts import shown
from reproduction.recipe import Recipe
from reproduction.results_query import Found
from reproduction.runs import noised
from reproduction.verdict import TRAINED, Verdict, blurred, judged, margin, plural
from unheard.formatting import NOTHING, percent

BASELINE, QUIET = "baseline", noised(15, 0.003).name
FEW_USERS, MANY_USERS = noised(15, 0.012).name, noised(15, 0.012, users=1250).name
"""A round, at equal sigma."""
LABELS = {
    BASELINE: "baseline",
    QUIET: "σ = 0.003, S = 15",
    noised(10, 0.006).name: "σ = 0.006, S = 10",
    FEW_USERS: "σ = 0.012, S = 15",
    MANY_USERS: "σ = 0.012, S = 15, 1,250 users a round",
    noised(20, 0.024).name: "σ = 0.024, S = 20",
    noised(20, 0.048).name: "σ = 0.048, S = 20",
}
HEADS = ("10", "50", "100")
FEWEST = 4
LEANING = -0.5
LITTLE = 0.25
RULE = (
    f"Over at least {FEWEST} models, trained for {TRAINED:,} rounds or more and of different accuracy, the rank correlation of "
    f"AccuracyTop1 with the mean number of the 100 most frequent words among ten suggestions is {LEANING:g} or less, and σ = 0.003 "
    f"differs from the baseline, and 1,250 users a round from 100 at equal σ, by at most {LITTLE:g} of the ten. Two runs are not "
    "compared if one had less than half the rounds of the other: head words become fewer as a model learns."
)


def head_words(recipe: Recipe, found: Found) -> Exhibit:
    figure = Figure(
        name="head-words",
        title="Head words among ten suggestions, by accuracy",
        x="AccuracyTop1, %",
        y="head words of ten, mean",
        lines=tuple(
            Line(name=f"the {head} most frequent", points=tuple((100 * a, m) for a, m in pairs(found, head)))
            for head in HEADS
        ),
        is_scatter=True,
        is_share=False,
    )
    return shown(recipe, found, judge(found), tables=[_table(found, head) for head in HEADS], figures=[figure])


def judge(found: Found) -> Verdict:
    known = pairs(found, "100", least=TRAINED)
    base, quiet = mean(found, BASELINE, "100"), mean(found, QUIET, "100")
    if not pairs(found, "100"):
        return judged(None, "Not run.", RULE)
    if len(known) < FEWEST or base is None or quiet is None or not _are_alike_trained(found, BASELINE, QUIET):
        asked = f"the rule asks for {FEWEST}, with {BASELINE} and {QUIET} of like length among them"
        return judged(None, f"Head words were counted for {len(known)} trained models; {asked}.", RULE)
    accuracies = [accuracy for accuracy, _ in known]
    if max(accuracies) - min(accuracies) <= margin(found):
        return judged(None, "The models are equally good, so they cannot show what quality does.", RULE)
    if lacking := blurred(found, [BASELINE, QUIET], RULE):
        return lacking
    leaning = rank_correlation(known)
    sentence = (
        f"Over {len(known)} models the rank correlation of AccuracyTop1 with head words is {leaning:+.2f}. Of ten "
        f"suggestions {quiet:.2f} are among the 100 most frequent words at σ = 0.003, {base:.2f} for the baseline."
    )
    few, many = mean(found, FEW_USERS, "100"), mean(found, MANY_USERS, "100")
    is_alike = True
    if few is not None and many is not None:
        sentence += f" With 1,250 users a round {many:.2f} are, with 100 {few:.2f} (σ = 0.012)"
        if _are_alike_trained(found, FEW_USERS, MANY_USERS):
            is_alike = abs(many - few) <= LITTLE
            sentence += "."
        else:
            rounds = [plural(found.runs[name].rounds) for name in (MANY_USERS, FEW_USERS)]
            sentence += f", which is left open: one has {rounds[0]}, the other {rounds[1]}."
    return judged(leaning <= LEANING and abs(quiet - base) <= LITTLE and is_alike, sentence, RULE)


def _are_alike_trained(found: Found, first: str, second: str) -> bool:
    """Long enough, and neither far longer than the other: head words are counted at the end of a run, and become fewer as it
    learns."""
    shorter, longer = sorted(found.rounds(name) or 0 for name in (first, second))
    return shorter >= TRAINED and 2 * shorter >= longer


def pairs(found: Found, head: str, least: int = 0) -> list[tuple[float, float]]:
    """Accuracy and mean number of head words of each model that was trained so long."""
    names = [name for name in LABELS if (found.rounds(name) or 0) >= least]
    both = ((found.accuracy(name), mean(found, name, head)) for name in names)
    return [(accuracy, number) for accuracy, number in both if accuracy is not None and number is not None]


def mean(found: Found, name: str, head: str) -> float | None:
    counts = found.runs[name].head_words.get(head) if name in found else None
    return sum(i * n for i, n in enumerate(counts)) / sum(counts) if counts and sum(counts) else None


def rank_correlation(known: Sequence[tuple[float, float]]) -> float:
    """Spearman's: the correlation of ranks, equal values sharing theirs."""
    first, second = (_ranks([pair[i] for pair in known]) for i in (0, 1))
    middle = (len(known) - 1) / 2
    covariance = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    spread = [sum((a - middle) ** 2 for a in ranks) for ranks in (first, second)]
    return covariance / (spread[0] * spread[1]) ** 0.5 if all(spread) else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < v for other in values) + (sum(other == v for other in values) - 1) / 2 for v in values]


def _table(found: Found, head: str) -> Table:
    rows = []
    for name, label in LABELS.items():
        counts = found.runs[name].head_words.get(head) if name in found else None
        if not counts or not sum(counts):
            rows.append([label, NOT_RUN, *[NOTHING] * 12])
            continue
        shares = [100 * count / sum(counts) for count in counts]
        cells = [f"{share:.0f}" if share >= 0.5 or not share else "<½" for share in shares]
        rows.append([label, percent(found.accuracy(name)), *cells, f"{mean(found, name, head):.2f}"])
    note = "In % of all places in the held-out text. More to the right: more head words. The paper shows this table as a picture."
    return Table(
        title=f"How many of ten suggestions are among the {head} most frequent words",
        columns=["", "AccT1", *map(str, range(11)), "mean"],
        rows=rows,
        note=note,
    )
