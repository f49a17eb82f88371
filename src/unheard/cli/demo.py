"""`unheard demo`: prepare a small chat corpus, train with and without privacy, and compare, in a few minutes.

The command writes a store (`corpora/chitchat-demo`), two run folders (`runs/demo/plain`, `runs/demo/private`) and a
page that compares them. A second call skips the steps that are complete and continues the others.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from unheard.cli.display import (
    confirm_no_noise,
    if_interrupted,
    notes,
    print_table,
    say,
    set_stop_message,
    show_rounds,
    step_bars,
    store_stop_message,
)
from unheard.cli.options import Yes, number, option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from unheard.corpus.pipeline import Preparation
    from unheard.mechanism.plan import Plan
    from unheard.training.run import Run

EXAMPLES = """Examples:

  unheard demo

  unheard demo --rounds 20    (a quick look)
"""

WORDS, TOKENS_PER_USER = 3_000, 320
POPULATION = 800
"""The declared population. It is an estimate from public numbers, not a count: the corpus has 1,315 users by its
authors' own description, and about six in ten of them wrote enough text."""
USERS_PER_ROUND = 100
AS_IF_USERS = 1_000_000
ABOUT = {
    "plain": f"FedAvg as in the paper's baseline: {USERS_PER_ROUND} users per round, no clip, no noise.",
    "private": f"DP-FedAvg: about {USERS_PER_ROUND} users per round, "
    "each clipped after every local step, Gaussian noise on the average.",
}


def demo(
    out: Annotated[Path, option("The folder for the two run folders and the page.")] = Path("runs/demo"),
    corpus: Annotated[Path, option("The store to create.")] = Path("corpora/chitchat-demo"),
    rounds: Annotated[int, number("Rounds of each run.", min=1)] = 50,
    yes: Yes = False,
) -> None:
    """Prepare a small chat corpus, train with and without privacy, and compare both on a page.

    After a stop, the same command continues.
    """
    from unheard.training.loop import resume, train

    set_stop_message(lambda: f"{store_stop_message(corpus)} `unheard demo` continues from what is there.")
    _prepare(corpus)
    if not _is_demo_corpus(corpus):
        confirm_no_noise([_run(corpus, rounds, _plain_plan())], yes)
    for name, plan in (("plain", _plain_plan()), ("private", _private_plan())):
        folder = out / name
        notes.print(f"\n[bold]{name}[/]: {ABOUT[name]}")
        is_begun = (folder / "ledger.jsonl").exists()
        if is_begun:
            reports = resume(folder, rounds=rounds, allow_no_privacy=True)
        else:
            reports = train(_run(corpus, rounds, plan), folder, allow_no_privacy=True)
        show_rounds(reports, name, folder=folder)
    with if_interrupted("The two runs are complete: the same command continues with the page."):
        _compare(out)


def _prepare(corpus: Path) -> None:
    """Prepare the demo's public chat corpus as a store at `corpus`, unless a store is there already."""
    from unheard.corpus.pipeline import build_store
    from unheard.corpus.sources import find_chitchat

    if (corpus / "corpus.json").exists():
        return
    notes.print(f"Preparing the default corpus (chitchat-dataset: chat, by pseudonymous users) in {corpus}")
    with step_bars() as progress:
        build_store([find_chitchat()], corpus, _preparation(), progress=progress)


def _preparation() -> "Preparation":
    """Return the options of `unheard prepare chitchat`, with a smaller vocabulary and less text of each user."""
    from unheard.corpus.prepare import CHITCHAT
    from unheard.corpus.vocabulary import PublicVocabulary

    return replace(
        CHITCHAT,
        vocabulary=PublicVocabulary(size=WORDS),
        encoding=replace(CHITCHAT.encoding, tokens_per_user=TOKENS_PER_USER),
    )


def _is_demo_corpus(corpus: Path) -> bool:
    """Whether the store holds the demo's public corpus, so that a run without noise on it needs no confirmation.

    Compares the name and the preparation options of the store with those of the demo. A store with the same name but
    other options may hold private text.
    """
    from unheard.corpus.store import TokenStore

    info, demo = TokenStore.open(corpus).info, _preparation()
    choices = demo.choices()
    return info.get("name") == demo.name and all(
        info.get(key) == choices[key] for key in ("tokens", "streams", "splits")
    )


def _plain_plan() -> "Plan":
    """Return the plan of the baseline: FedAvg without clipping and without noise."""
    import unheard

    return unheard.Plan(
        population=POPULATION,
        sampling=unheard.FixedSizeSampling(users_per_round=USERS_PER_ROUND),
        update=unheard.FedAvg(),
        clip=unheard.NoClip(),
        estimator=unheard.TrueAverage(),
        noise=unheard.NoNoise(),
    )


def _private_plan() -> "Plan":
    """Return the plan of the private run: FedAvg with flat clipping and Gaussian noise."""
    import unheard

    return unheard.Plan(
        population=POPULATION,
        sampling=unheard.PoissonSampling(users_per_round=USERS_PER_ROUND),
        update=unheard.FedAvg(),
        clip=unheard.FlatClip(norm=8.0),
        noise=unheard.GaussianNoise(noise_multiplier=0.5),
    )


def _run(corpus: Path, rounds: int, plan: "Plan") -> "Run":
    """Return a run of a small LSTM, evaluated every 5 rounds so that the curves have enough points."""
    import unheard

    return unheard.Run(
        corpus=corpus,
        model=unheard.TiedLSTM(vocabulary_size=WORDS, embedding_size=32, hidden_size=64),
        plan=plan,
        training=unheard.Training(rounds=rounds, checkpoint_every=10),
        evaluation=unheard.Evaluation(every=5, max_tokens=10_000),
    )


def beside_bigram(measured: "Mapping[str, Any]") -> list[str]:
    """Return a sentence that compares each model with a bigram model on the same held-out text.

    Args:
        measured: The full measures of each run, by its name.

    Returns:
        A list of one sentence; an empty list if the first run has no measures of a bigram model.
    """
    first = next(iter(measured.values()), {})
    bigram = next((m["tokens"] for name, m in first.get("baselines", {}).items() if "bigram" in name), None)
    if bigram is None:
        return []
    accuracy, perplexity = bigram["accuracy_top1"], bigram["perplexity"]
    parts = []
    for name, measures in measured.items():
        own = measures["tokens"]
        points = 100 * (own["accuracy_top1"] - accuracy)
        parts.append(
            f"{name} is {abs(points):.1f} points {'above' if points >= 0 else 'below'} it with {100 * own['accuracy_top1']:.1f} % "
            f"(perplexity {own['perplexity']:.0f})"
        )
    return [
        f"A bigram model, counted without privacy in {first['baselines_fitted_on']}' text, predicts {100 * accuracy:.1f} % of the "
        f"same words (perplexity {perplexity:.0f}): {'; '.join(parts)}. Both networks have seen few rounds."
    ]


def _compare(out: Path) -> None:
    """Measure both runs, print the tables that compare them, and write the page into `out`/page."""
    from unheard.cli.evaluate import full_measures_of
    from unheard.report import tables
    from unheard.report.comparison import Comparison
    from unheard.report.page import write_page

    folders = [out / "plain", out / "private"]
    for folder in folders:
        full_measures_of(folder)
    with notes.status("Computing what each run cost, and writing the page"):
        comparison = Comparison.read(folders, as_if_users=AS_IF_USERS)
        page = write_page(comparison, out / "page", force=True)
    print_table(tables.summary(comparison))
    print_table(tables.accuracies(comparison.measured))
    print_table(tables.predictions(comparison.measured))
    for sentence in beside_bigram(comparison.measured):
        say(f"\n{sentence}")
    say(
        f"\nWith about {POPULATION} users this ε is too large for a useful guarantee. The cause is the small "
        "population, not the noise: see the hypothetical ε above. Try your own numbers: unheard plan --help"
    )
    say(f"\nRun folders: {folders[0]}  {folders[1]}")
    say(f"The guarantee of the private run, in full:  unheard statement {folders[1]}")
    say(f"This comparison as a page, for a browser:  {page.resolve().as_uri()}")
