"""Writes a new run file: every key with a comment, and the noise that a target epsilon needs.

    new = new_run_file("run.toml", corpus=Path("corpora/chat"), population=760_000, epsilon=2.0)
    new.text          # the TOML text
    new.sentences     # what was chosen, to print
    new.noise         # sigma beside S, to warn about

The settings are the paper's, or for a base model those of fine-tuning with LoRA. Without a target z = 1; with a target z
is the least that meets it after all rounds (`privacy/planner.py`), or the best of several kinds of noise
(`privacy/noise_choice.py`). `unheard init` writes the text to a file.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import InvalidValue
from unheard.privacy.noise_choice import best, compare_noise
from unheard.privacy.planner import PAPER_CLIP_NORM, PAPER_PARAMETERS, NoiseLevel, default_delta
from unheard.privacy.planner import plan as solve

PAPER_VOCABULARY, PAPER_EMBEDDING = 10_000, 96
LONG_VALUE = 60
"""The comment of a key stands above it where key and value take more columns than this."""
Progress = Callable[[str], None]

TEMPLATE = """\
# A run: the model, the users and the privacy of one training. Every key is explained; a key that you leave out takes
# the value shown. Start it with:  unheard train {name} --out runs/my-run

[corpus]
path = {corpus}\t# made by `unheard prepare`

[privacy]
population = {population}\t# how many users there are, as you may say in public. q, W and the check of delta use this
\t# number, never the true count of the store, which is private.
delta = {delta:.3e}\t# epsilon is stated at this delta; must be below 1 / population
# budget_epsilon = 8.0\t# stop before the round that would exceed it ...
# budget_accountant = "rdp"\t# ... as computed by this accountant: rdp, moments

{model}

[sampling]
{sampling}

[weights]
kind = "equal"\t# or "capped" with weight_cap (w-hat, in tokens) and total_weight (the declared W)

{update}

[estimator]
kind = "fixed_denominator"\t# or "clipped_denominator" with min_total_weight, or "true_average" (non-private)

[noise]
{noise}

# [[schedule]]\t# changes that are fixed before the run; repeat the block for more
# from_round = 4885
# clip_norm = 7.9
# learning_rate = 3.0

[server]
kind = "add"\t# the paper's; or "momentum", "adam"

[evaluation]
every = 20\t# rounds
max_tokens = 75000\t# of held-out users
unroll = {unroll}

[training]
rounds = {rounds}
init_seed = 0\t# runs with the same seed start from the same initial model
checkpoint_every = 20\t# rounds; after a crash at most this many are done, and charged, again
# reproducible_seed = 1\t# experiments only: the guarantee does not hold against anyone who knows the seed

[engine]
kind = "auto"
device = "auto"
"""


PAPER_MODEL = """\
[model]
kind = "tied_lstm"\t# the paper's; or "module" with module = "package.file:Class", your own torch.nn.Module
vocabulary_size = {vocabulary_size}
embedding_size = 96
hidden_size = 256
tied = true\t# input and output share one embedding
unit_norm = true\t# the model normalises word vectors to norm 1 when it uses them
keep_norm = false\t# true: also normalise them after every round; worse wherever we tried it"""

PAPER_UPDATE = """\
[update]
kind = "fedavg"\t# or "fedsgd": one gradient per user
batch_size = 8
unroll = 10
epochs = 1
learning_rate = 6.0

[clip]
kind = "flat"\t# or "per_layer", "adaptive" with initial_norm, or "none" for a non-private baseline
norm = 15.0\t# S: how far one user may move the model"""

BASE_MODEL = """\
[model]
kind = "hugging_face"
path = {base}\t# made by `unheard base`
train = "lora"\t# the low-rank matrices only; or "all": every parameter
lora_rank = 8
lora_layers = []\t# names of the layers to adapt; empty: those that peft chooses for this kind of model
lora_freeze_a = false\t# true: the A matrices keep their random values, half as much to train and to noise
base_is_public = false\t# true: you declare that no user of the corpus contributed to the base; training needs it"""

BASE_UPDATE = """\
[update]
kind = "fedavg"\t# or "fedsgd": one gradient per user
batch_size = 2\t# windows of a local step
unroll = 512\t# tokens of a window, up to the model's context
epochs = 1
learning_rate = 0.3

[clip]
kind = "flat"\t# or "per_layer", "adaptive" with initial_norm, or "none" for a non-private baseline
norm = 0.5\t# S: how far one user may move the model"""

POISSON = """\
kind = "poisson"\t# draws each user with probability q in every round; "fixed_size" is for non-private baselines
users_per_round = {users_per_round}\t# expected; q = users_per_round / population"""

CYCLIC = """\
kind = "cyclic_poisson"\t# groups take turns; in its turn each user of a group is drawn with probability q'
users_per_round = {users_per_round}\t# expected; q' = groups * users_per_round / population
groups = {separation}\t# b: two rounds of one user are at least this many apart"""

SEPARATED = """\
kind = "min_separation"\t# each user takes part in every b-th round; the guarantee does not rest on sampling
separation = {separation}\t# b; population / b users are expected per round"""

INDEPENDENT = """\
kind = "gaussian"\t# or "correlated" (docs: Correlated noise), "exact_gaussian" (drawn in integers), "none"
noise_multiplier = {z:g}\t# z; or noise_std = sigma"""

CORRELATED = """\
kind = "correlated"\t# chosen by `unheard init --noise auto`: {gain} less error than independent noise
strategy = "{strategy}"
noise_multiplier = {z:g}\t# z, for epsilon {epsilon:.4g} at delta {delta:.3g} after {rounds} rounds
rounds = {rounds}\t# T, which the coefficients are optimised for{bands}"""


@dataclass(frozen=True, kw_only=True)
class NewRunFile:
    """A run file that is not written yet.

    Attributes:
        text: Its content.
        sentences: What was chosen for a target epsilon, and what the user has to declare.
        noise: The noise of one round beside S; None where the number of parameters or sigma is not known here (a base
            model, or noise that was chosen by comparison).
        has_store: Whether the store that it names exists.
    """

    text: str
    sentences: tuple[str, ...]
    noise: NoiseLevel | None
    has_store: bool


def new_run_file(
    name: str | Path,
    *,
    corpus: Path,
    population: int,
    users_per_round: float | None = None,
    rounds: int = 1000,
    epsilon: float | None = None,
    compares_noise: bool = False,
    base: Path | None = None,
    progress: Progress = lambda step: None,
) -> NewRunFile:
    """Compose a commented run file.

    Args:
        name: The name of the file, for the comment on how to start the run.
        corpus: The token store. If it exists, the size of its vocabulary is written.
        population: The declared number of users.
        users_per_round: Expected users per round; None for 100, or all users if there are fewer.
        rounds: Rounds to train.
        epsilon: A target that the run meets after all rounds; None for z = 1.
        compares_noise: Whether to choose between independent and correlated noise at the target.
        base: The folder of a base model to fine-tune; None for the paper's LSTM.
        progress: Called with a line of text before each trial of a search for z.

    Raises:
        InvalidValue: A value is out of range, `compares_noise` has no target, or `base` is not the folder of a model.
        AccountingError: No noise meets the target.
    """
    if users_per_round is not None and users_per_round <= 0:
        raise InvalidValue(f"--users-per-round must be above 0, not {users_per_round:g}.")
    if users_per_round is not None and users_per_round > population:
        raise InvalidValue(
            f"--users-per-round {users_per_round:g} is more than the declared population of {population}. Lower it: each user is "
            "drawn with probability (users per round) / population."
        )
    if compares_noise and epsilon is None:
        raise InvalidValue("Give --noise auto together with --epsilon: kinds of noise are compared at one epsilon.")
    if base is not None and not (base / "config.json").is_file():
        raise InvalidValue(
            f"{base} is not the folder of a language model: it has no config.json. Make it with `unheard base`."
        )
    words = corpus / "vocabulary.txt"
    vocabulary_size = len(Vocabulary.load(words)) if words.exists() else PAPER_VOCABULARY
    per_round = min(100, population) if users_per_round is None else users_per_round
    delta = float(f"{default_delta(population):.3e}")  # as it is written
    target = (population, per_round, rounds, epsilon, delta)
    tables = _best_tables(*target, progress) if compares_noise else _independent_tables(*target, progress)
    text = _aligned(
        TEMPLATE.format(
            name=name,
            corpus=json.dumps(str(corpus)),
            population=population,
            delta=delta,
            model=PAPER_MODEL.format(vocabulary_size=vocabulary_size)
            if base is None
            else BASE_MODEL.format(base=json.dumps(str(base))),
            update=PAPER_UPDATE if base is None else BASE_UPDATE,
            unroll=80 if base is None else 512,
            sampling=tables.sampling,
            noise=tables.noise,
            rounds=rounds,
        )
    )
    noise, sentences = None, [tables.sentence] if tables.sentence else []
    if base is not None:
        sentences.append(
            "The guarantee does not cover what the base has seen: set model.base_is_public = true if no user contributed."
        )
    elif tables.noise_multiplier is not None:
        # The model is the paper's, with a vector for each word of the vocabulary.
        parameters = PAPER_PARAMETERS + PAPER_EMBEDDING * (vocabulary_size - PAPER_VOCABULARY)
        sigma = tables.noise_multiplier * PAPER_CLIP_NORM / per_round
        noise = NoiseLevel(noise_std=sigma, clip_norm=PAPER_CLIP_NORM, parameters=parameters)
    return NewRunFile(text=text, sentences=tuple(sentences), noise=noise, has_store=words.exists())


@dataclass(frozen=True, kw_only=True)
class _Tables:
    """The tables [sampling] and [noise], what to say about the choice, and z if the noise is independent."""

    sampling: str
    noise: str
    sentence: str = ""
    noise_multiplier: float | None = None


def _independent_tables(
    population: int, users_per_round: float, rounds: int, epsilon: float | None, delta: float, progress: Progress
) -> _Tables:
    """Return the tables of independent noise, with the least z that meets the target."""
    z, sentence = 1.0, ""
    if epsilon is not None:
        run = {"users": population, "users_per_round": users_per_round, "rounds": rounds}
        z = solve(**run, epsilon=epsilon, delta=delta, progress=progress).estimate.noise_multiplier
        sentence = f"z = {z:g} meets epsilon {epsilon:g} at delta {delta:.4g} after {rounds:,} rounds."
    sampling = POISSON.format(users_per_round=_digits(users_per_round))
    return _Tables(sampling=sampling, noise=INDEPENDENT.format(z=z), sentence=sentence, noise_multiplier=z)


def _best_tables(
    population: int, users_per_round: float, rounds: int, epsilon: float | None, delta: float, progress: Progress
) -> _Tables:
    """Return the tables with the smallest error at the target, of independent and correlated noise."""
    assert epsilon is not None
    options = compare_noise(
        population=population,
        users_per_round=users_per_round,
        rounds=rounds,
        epsilon=epsilon,
        delta=delta,
        progress=progress,
    )
    chosen, independent = best(options), options[0]
    matrix, digits = chosen.factorisation, _digits(users_per_round)
    if matrix is None:
        z = independent.noise_multiplier
        sentence = f"Independent noise is best here: z = {z:g} meets epsilon {epsilon:g}."
        sampling = POISSON.format(users_per_round=digits)
        return _Tables(sampling=sampling, noise=INDEPENDENT.format(z=z), sentence=sentence)
    gain = f"{1 - chosen.rms_error / independent.rms_error:.0%}"
    bands = ""
    if chosen.kind == "banded" and len(matrix.coefficients) < matrix.separation:
        bands = f"\nbands = {len(matrix.coefficients)}"
    sampling = CYCLIC if chosen.sampling == "cyclic_poisson" else SEPARATED
    return _Tables(
        sampling=sampling.format(users_per_round=digits, separation=matrix.separation),
        noise=CORRELATED.format(
            gain=gain,
            strategy=chosen.kind,
            z=chosen.noise_multiplier,
            epsilon=chosen.epsilon,
            delta=delta,
            rounds=rounds,
            bands=bands,
        ),
        sentence=f"Correlated noise ({chosen.kind}, {chosen.sampling}) has {gain} less error than independent noise.",
    )


def _aligned(text: str) -> str:
    """Align the comments of each table. In the templates a tab, which no value holds, stands before a comment."""
    lines: list[str] = []
    for table in text.split("\n\n"):
        rows = [line.partition("\t# ") for line in table.split("\n")]
        short = [len(value) for value, tab, _ in rows if tab and len(value) <= LONG_VALUE]
        width = max([29, *short])
        for value, tab, comment in rows:
            if tab and len(value) > LONG_VALUE:
                lines += [f"# {comment}", value]
            else:
                lines.append(f"{value:<{width}}  # {comment}" if tab else value)
        lines.append("")
    return "\n".join(lines[:-1])


def _digits(number: float) -> str:
    """Return all digits of a number, and no decimal point for a whole one."""
    return str(int(number)) if float(number).is_integer() else str(number)
