"""`unheard init`: write a commented run file with the paper's settings, ready to edit.

The template below has every table of a run file, with its default values. The only value that has no default is the
population: it is declared by the person who writes the file, never counted from the store.
"""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard init --corpus corpora/chat --population 760000

  unheard init private.toml --corpus corpora/chat --population 760000 --users-per-round 5000 --rounds 5000
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

[model]
kind = "tied_lstm"             # the paper's; or "module" with module = "package.file:Class", your own torch.nn.Module
vocabulary_size = {vocabulary_size}
embedding_size = 96
hidden_size = 256
tied = true                    # input and output share one embedding
unit_norm = true               # the model normalises word vectors to norm 1 when it uses them
keep_norm = false              # true: also normalise them after every round; worse wherever we tried it

[sampling]
kind = "poisson"               # draws each user with probability q in every round; "fixed_size" is for non-private baselines
users_per_round = {users_per_round}      # expected; q = users_per_round / population

[weights]
kind = "equal"                 # or "capped" with weight_cap (w-hat, in tokens) and total_weight (the declared W)

[update]
kind = "fedavg"                # or "fedsgd": one gradient per user
batch_size = 8
unroll = 10
epochs = 1
learning_rate = 6.0

[clip]
kind = "flat"                  # or "per_layer", "adaptive" with initial_norm, or "none" for a non-private baseline
norm = 15.0                    # S: how far one user may move the model

[estimator]
kind = "fixed_denominator"     # or "clipped_denominator" with min_total_weight, or "true_average" (non-private)

[noise]
kind = "gaussian"              # or "exact_gaussian" (drawn exactly in integers), "none"
noise_multiplier = 1.0         # z; or noise_std = sigma

# [[schedule]]                 # changes that are fixed before the run; repeat the block for more
# from_round = 4885
# clip_norm = 7.9
# learning_rate = 3.0

[server]
kind = "add"                   # the paper's; or "momentum", "adam"

[evaluation]
every = 20                     # rounds
max_tokens = 75000             # of held-out users
unroll = 80

[training]
rounds = {rounds}
init_seed = 0                  # runs with the same seed start from the same initial model
checkpoint_every = 20          # rounds; after a crash at most so many are done, and charged, again
# reproducible_seed = 1        # experiments only: the guarantee does not hold against anyone who knows the seed

[engine]
kind = "auto"
device = "auto"
"""


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
    force: Annotated[bool, typer.Option(help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented run file with the paper's settings."""
    import json

    from unheard import storage
    from unheard.cli.display import say
    from unheard.corpus.vocabulary import Vocabulary
    from unheard.errors import InvalidValue

    if run_file.exists() and not force:
        raise InvalidValue(f"{run_file} exists. Choose another name, or overwrite it with --force.")
    if users_per_round is not None and users_per_round > population:
        raise InvalidValue(
            f"--users-per-round {users_per_round:g} is more than the declared population of {population}. Lower it: each user is "
            "drawn with probability (users per round) / population."
        )
    words = corpus / "vocabulary.txt"
    size = len(Vocabulary.load(words)) if words.exists() else 10_000
    per_round = min(100, population) if users_per_round is None else users_per_round
    text = TEMPLATE.format(
        name=run_file,
        corpus=json.dumps(str(corpus)),
        population=population,
        delta=population**-1.1,
        vocabulary_size=size,
        users_per_round=_digits(per_round),
        rounds=rounds,
    )
    try:
        storage.replace_file(run_file, text.encode())
    except OSError as error:
        raise InvalidValue(f"Cannot write {run_file}: {error.strerror}.") from None
    _show_noise(per_round, size)
    say(f"Wrote {run_file}. Next: unheard train {run_file} --out runs/my-run")
    if not words.exists():
        say(f"There is no corpus at {corpus} yet: make it with `unheard prepare`.")


def _show_noise(users_per_round: float, vocabulary_size: int) -> None:
    """Prints sigma of the template, and warns if its noise will drown the updates."""
    from unheard.cli.display import warn_of_noise
    from unheard.privacy.planner import PAPER_CLIP_NORM, PAPER_PARAMETERS, NoiseLevel

    # The template's model is the paper's, with 96 parameters for each word of the vocabulary; its z is 1.
    parameters = PAPER_PARAMETERS + 96 * (vocabulary_size - 10_000)
    sigma = PAPER_CLIP_NORM / users_per_round
    warn_of_noise(NoiseLevel(noise_std=sigma, clip_norm=PAPER_CLIP_NORM, parameters=parameters))


def _digits(number: float) -> str:
    """Returns all digits of a number, and no decimal point for a whole one."""
    return str(int(number)) if float(number).is_integer() else str(number)
