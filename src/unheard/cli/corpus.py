"""`unheard corpus`: look at a token store, or make a synthetic one of any size."""

from pathlib import Path
from typing import Annotated

import typer

SHOW_EXAMPLES = """Examples:

  unheard corpus show corpora/chitchat

  unheard corpus show corpora/reddit --weight-cap 1600
"""

SYNTH_EXAMPLES = """Examples:

  unheard corpus synth --like corpora/chitchat --users 10000 --tokens-per-user 1600 --out corpora/synth

  unheard corpus synth --like corpora/chitchat --users 763430 --tokens-per-user 1600 --out corpora/paper-size
"""

NARROW_EXAMPLES = """Examples:

  unheard corpus narrow corpora/posts-30k --vocab-size 10000 --out corpora/posts
"""

PART_EXAMPLES = """Examples:

  unheard corpus part corpora/chat --part 2/8 --out /local/chat    (for the second of eight machines)

  torchrun ... -m unheard train run.toml --out runs/r --set engine.corpus_part=/local/chat
"""

app = typer.Typer(
    help="Look at a token store, cut its dictionary or its users, or make a synthetic one of any size.",
    no_args_is_help=True,
)


@app.command("show", epilog=SHOW_EXAMPLES)
def show(
    store: Annotated[Path, typer.Argument(metavar="DIR", help="A token store, made by `unheard prepare`.")],
    weight_cap: Annotated[int | None, typer.Option(min=1, help="Show what this weight cap would do.")] = None,
) -> None:
    """Exact counts of a store, for its owner: users, tokens a user, out-of-dictionary rate, what a weight cap does."""
    from unheard.cli.corpus_display import print_store
    from unheard.corpus.store import TokenStore

    print_store(TokenStore.open(store), weight_cap)


@app.command("synth", epilog=SYNTH_EXAMPLES)
def synth(
    like: Annotated[Path, typer.Option(help="The store whose word statistics to follow.")],
    users: Annotated[int, typer.Option(min=1, help="How many training users.")],
    tokens_per_user: Annotated[int, typer.Option(min=1, help="Exactly how many tokens each has.")],
    out: Annotated[Path, typer.Option(help="The folder to make for the store.")],
    held_out: Annotated[int | None, typer.Option(min=1, help="How many held-out users; 1 in 100 unless given.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same corpus.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 is one for each core.")] = 0,
) -> None:
    """A corpus of any size for load tests, with the word statistics of a real one. Marked synthetic for ever."""
    from unheard.cli.display import bar
    from unheard.corpus.store import TokenStore
    from unheard.corpus.synthetic import synthesise

    with bar() as progress:
        made = synthesise(
            TokenStore.open(like),
            out,
            users=users,
            tokens_per_user=tokens_per_user,
            held_out=held_out,
            seed=seed,
            workers=workers,
            progress=progress,
        )
    print(made.path)


@app.command("narrow", epilog=NARROW_EXAMPLES)
def narrow(
    store: Annotated[Path, typer.Argument(metavar="DIR", help="A token store, made by `unheard prepare`.")],
    vocab_size: Annotated[int, typer.Option(min=4, help="Words to keep, BOS, EOS and UNK among them.")],
    out: Annotated[Path, typer.Option(help="The folder to make for the narrower store.")],
) -> None:
    """The same users with a smaller dictionary: words beyond its first ranks become UNK. No text is needed."""
    from unheard.cli.display import bar
    from unheard.corpus.store import TokenStore
    from unheard.corpus.transform import shrink_vocabulary

    with bar() as progress:
        made = shrink_vocabulary(TokenStore.open(store), out, vocabulary_size=vocab_size, progress=progress)
    print(made.path)


@app.command("part", epilog=PART_EXAMPLES)
def part(
    store: Annotated[Path, typer.Argument(metavar="DIR", help="A whole token store.")],
    part: Annotated[str, typer.Option(help="Which part of how many: 1/8 to 8/8.", metavar="K/N")],
    out: Annotated[Path, typer.Option(help="The folder to make for the part.")],
) -> None:
    """One machine's part of a store, for machines without a shared disk: some training users' text, and all that describes the
    store. The people's ledger is not copied: there is one, with the whole store."""
    from unheard.cli.display import bar
    from unheard.corpus.store import TokenStore
    from unheard.corpus.transform import split_store
    from unheard.errors import InvalidValue

    number, slash, of = part.partition("/")
    if not (slash and number.strip().isdecimal() and of.strip().isdecimal()):
        raise InvalidValue(f"--part {part}: write which part of how many, for example --part 2/8.")
    with bar() as progress:
        made = split_store(TokenStore.open(store), out, part=int(number), of=int(of), progress=progress)
    print(made.path)
