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
PROMPTS = ("how are", "i don't", "what do you", "have a nice", "thank you so")
A_MILLION = 1_000_000


def demo(
    out: Annotated[Path, typer.Option(help="Where the two run folders go.")] = Path("runs/demo"),
    corpus: Annotated[Path, typer.Option(help="Where the corpus is prepared.")] = Path("corpora/chitchat-demo"),
    rounds: Annotated[int, typer.Option(help="Rounds of each run.", min=1)] = 50,
) -> None:
    """Prepare a small chat corpus, train with and without privacy, and compare. Stopped half-way, it goes on where it was."""
    from unheard.cli.display import console, notes, show
    from unheard.training.loop import resume, train

    _prepare(corpus)
    for name, run in (("plain", _plain(corpus, rounds)), ("private", _private(corpus, rounds))):
        folder = out / name
        notes.print(f"\n[bold]{name}[/]: {_IN_WORDS[name]}")
        show(resume(folder, rounds=rounds) if (folder / "ledger.jsonl").exists() else train(run, folder), name)
    _compare(out)
    console.print(f"\nRun folders: {out / 'plain'}  {out / 'private'}", highlight=False, markup=False)
    console.print(
        f"What the private one guarantees, in full:  unheard statement {out / 'private'}", highlight=False, markup=False
    )


_IN_WORDS = {
    "plain": "FedAvg as in the paper's baseline: 50 users a round, no clip, no noise.",
    "private": "DP-FedAvg: about 100 users a round, each clipped after every local step, Gaussian noise on the average.",
}


def _prepare(corpus: Path) -> None:
    from dataclasses import replace

    from unheard.cli.display import notes
    from unheard.cli.preparing import bar
    from unheard.corpus.chitchat import CHITCHAT
    from unheard.corpus.imports import find_chitchat
    from unheard.corpus.prepare import prepare
    from unheard.corpus.vocabulary_choice import PublicVocabulary

    if (corpus / "corpus.json").exists():
        return
    notes.print(f"Preparing the default corpus (chitchat-dataset: chat, by pseudonymous users) in {corpus}")
    small = replace(
        CHITCHAT,
        vocabulary=PublicVocabulary(size=WORDS),
        streams=replace(CHITCHAT.streams, tokens_per_user=TOKENS_PER_USER),
    )
    with bar() as progress:
        prepare([find_chitchat()], corpus, small, progress=progress)


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
    """The closing table, from what the two run folders hold."""
    from rich.table import Table

    from unheard.cli.display import console, epsilon_text
    from unheard.privacy.accountants import epsilons
    from unheard.privacy.events import PoissonGaussian
    from unheard.privacy.ledger import Ledger
    from unheard.runs import RunFolder
    from unheard.training.released import Released

    plain, private = (out / name for name in ("plain", "private"))
    last = [RunFolder(folder).read_metrics()[-1] for folder in (plain, private)]
    ledger = Ledger.read(RunFolder(private).ledger)
    delta, spent = ledger.facts["delta"], epsilons(ledger.events, ledger.facts["delta"])
    table = Table("", "plain", "private", title="With and without privacy, on people held out of both")
    for key, words in (("accuracy_top1", "AccuracyTop1"), ("accuracy_top3", "AccuracyTop3")):
        table.add_row(words, *(f"{100 * row[key]:.2f} %" for row in last))
    table.add_row("perplexity", *(f"{row['perplexity']:.4g}" for row in last))
    table.add_row("rounds", *(str(row["round"]) for row in last))
    table.add_section()
    for name, words in (("moments", "the paper's moments accountant"), ("rdp", "RDP"), ("pld", "PLD (tightest)")):
        table.add_row(f"ε at δ = {delta:.1e}, by {words}", "∞", epsilon_text(spent[name]))
    table.add_section()
    models = [Released.open(folder) for folder in (plain, private)]
    for prompt in PROMPTS:
        guesses = (", ".join(word for word, _ in model.predict(prompt)) for model in models)
        table.add_row(f"“{prompt} …”", *(guess.replace("[", r"\[") for guess in guesses))
    console.print()
    console.print(table)
    z = next(e.noise_multiplier for e in ledger.events if isinstance(e, PoissonGaussian))
    many = [(PoissonGaussian(sampling_prob=USERS_PER_ROUND / A_MILLION, noise_multiplier=z), len(ledger))]
    would_be = epsilons(many, A_MILLION**-1.1)
    console.print(
        f"\nHonestly: with about {POPULATION} users this ε is too large to promise anybody much. That is not the noise's fault "
        f"but the crowd's: the same noise, clip and rounds, drawn from a million users, would cost ε = "
        f"{epsilon_text(would_be['pld'])} at δ = {A_MILLION**-1.1:.1e} (hypothetical: that run did not happen). "
        "Try your own numbers: unheard plan --help",
        highlight=False,
        markup=False,
    )
