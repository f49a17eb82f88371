"""`unheard demo`: the whole road on a small real corpus, twice, in a few minutes: plain FedAvg, then DP-FedAvg."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from unheard.training.run import Run

EXAMPLES = """Examples:

  unheard demo

  unheard demo --rounds 20    (a quick look)
"""

WORDS, TOKENS_PER_USER = 3_000, 320
POPULATION = 750
"""Declared, from what the corpus's authors publish (1,315 users) and that about six in ten wrote enough: not counted."""
USERS_PER_ROUND = 100
A_MILLION = 1_000_000


def demo(
    out: Annotated[Path, typer.Option(help="Where the two run folders and the page go.")] = Path("runs/demo"),
    corpus: Annotated[Path, typer.Option(help="Where the corpus is prepared.")] = Path("corpora/chitchat-demo"),
    rounds: Annotated[int, typer.Option(help="Rounds of each run.", min=1)] = 50,
) -> None:
    """Prepare a small chat corpus, train with and without privacy, compare on a page. Stopped half-way, it goes on."""
    from unheard.cli.display import notes, show
    from unheard.training.loop import resume, train

    _prepare(corpus)
    for name, run in (("plain", _plain(corpus, rounds)), ("private", _private(corpus, rounds))):
        folder = out / name
        notes.print(f"\n[bold]{name}[/]: {_IN_WORDS[name]}")
        reports = resume(folder, rounds=rounds) if (folder / "ledger.jsonl").exists() else train(run, folder)
        show(reports, name, folder=folder)
    _compare(out)


_IN_WORDS = {
    "plain": "FedAvg as in the paper's baseline: 50 users a round, no clip, no noise.",
    "private": "DP-FedAvg: about 100 users a round, each clipped after every local step, Gaussian noise on the average.",
}


def _prepare(corpus: Path) -> None:
    from dataclasses import replace

    from unheard.cli.display import notes
    from unheard.cli.preparing import bar
    from unheard.corpus.conversion import find_chitchat
    from unheard.corpus.pipeline import CHITCHAT, build_store
    from unheard.corpus.vocabulary_sources import PublicVocabulary

    if (corpus / "corpus.json").exists():
        return
    notes.print(f"Preparing the default corpus (chitchat-dataset: chat, by pseudonymous users) in {corpus}")
    small = replace(
        CHITCHAT,
        vocabulary=PublicVocabulary(size=WORDS),
        encoding=replace(CHITCHAT.encoding, tokens_per_user=TOKENS_PER_USER),
    )
    with bar() as progress:
        build_store([find_chitchat()], corpus, small, progress=progress)


def _plain(corpus: Path, rounds: int) -> "Run":
    import unheard

    plan = unheard.Plan(
        population=POPULATION,
        sampling=unheard.FixedSizeSampling(users_per_round=50),
        update=unheard.FedAvg(),
        clip=unheard.NoClip(),
        estimator=unheard.TrueAverage(),
        noise=unheard.NoNoise(),
    )
    return _run(corpus, rounds, plan)


def _private(corpus: Path, rounds: int) -> "Run":
    import unheard

    plan = unheard.Plan(
        population=POPULATION,
        sampling=unheard.PoissonSampling(users_per_round=USERS_PER_ROUND),
        update=unheard.FedAvg(),
        clip=unheard.FlatClip(norm=8.0),
        noise=unheard.GaussianNoise(noise_multiplier=0.5),
    )
    return _run(corpus, rounds, plan)


def _run(corpus: Path, rounds: int, plan) -> "Run":
    import unheard

    return unheard.Run(
        corpus=corpus,
        model=unheard.TiedLSTM(vocabulary_size=WORDS, embedding_size=32, hidden_size=64),
        plan=plan,
        training=unheard.Training(rounds=rounds, checkpoint_every=10),
        evaluation=unheard.Evaluation(every=5, max_tokens=10_000),
    )


def _compare(out: Path) -> None:
    """The closing tables and the page, from what the two run folders hold."""
    from unheard.cli.display import notes, print_table, say
    from unheard.cli.measuring import measured
    from unheard.report import tables
    from unheard.report.comparison import Comparison
    from unheard.report.page import write_page

    folders = [out / "plain", out / "private"]
    for folder in folders:
        measured(folder)
    with notes.status("Working out what each run cost, and writing the page"):
        compared = Comparison.read(folders, as_if_users=A_MILLION)
        page = write_page(compared, out / "page")
    for table in (
        tables.summary(compared),
        tables.accuracies(compared.measured),
        tables.predictions(compared.measured),
    ):
        print_table(table)
    for line in (
        f"\nHonestly: with about {POPULATION} users this ε is too large to promise anybody much. That is not the noise's fault "
        "but the crowd's: see the hypothetical ε above. Try your own numbers: unheard plan --help",
        f"\nRun folders: {folders[0]}  {folders[1]}",
        f"What the private one guarantees, in full:  unheard statement {folders[1]}",
        f"The same as a page, to open in a browser:  {page.resolve().as_uri()}",
    ):
        say(line)
