"""`unheard corpus`: commands that show a token store or make a new store from one.

show    check the files of a store and print exact statistics, for its owner only
synth   make a synthetic store of any size, with the word statistics of a given store
narrow  make a store of the same users with a smaller vocabulary
part    make the part of a store that one of several machines needs
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from unheard.cli.display import console, echo, notes, output_stop_message, set_stop_message, step_bars
from unheard.cli.options import StoreDir, Workers, number, option
from unheard.errors import InvalidValue

if TYPE_CHECKING:
    from unheard.corpus.store_stats import SplitStatistics

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
    help="Show a token store, reduce its vocabulary or its users, or make a synthetic one of any size.",
    no_args_is_help=True,
)


@app.command("show", epilog=SHOW_EXAMPLES)
def show(
    store: StoreDir,
    weight_cap: Annotated[
        int | None, number("Also show the effect of this weight cap.", min=1, otherwise="none")
    ] = None,
) -> None:
    """Show exact counts of a store, for its owner only: users, tokens per user, out-of-vocabulary rate.

    First compares the SHA-256 digest of every file of the store with the recorded one.
    """
    from unheard.corpus.store import TokenStore
    from unheard.corpus.store_stats import cap_effect, split_statistics
    from unheard.corpus.vocabulary import vocabulary_unit

    opened = TokenStore.open(store)
    with notes.status("Checking every file of the store"):
        checked = opened.check_files()
    info = opened.info
    words, unit = info["vocabulary"], vocabulary_unit(info)
    source = f" ({words['source']})" if words.get("source") else ""
    synthetic = "  (synthetic)" if info.get("synthetic") else ""
    console.print(f"[bold]{info.get('name', opened.path.name)}[/]{synthetic}", highlight=False)
    console.print(f"vocabulary: {words['size']:,} {unit}, {words['kind']}{source}", highlight=False)
    console.print(f"tokens: {info.get('tokens', {}).get('kind', 'not recorded')}", highlight=False)
    files = "not recorded by the version that wrote the store" if checked is None else f"{checked} files as written"
    console.print(f"digests: {files}", highlight=False)
    console.print("\n[bold red]Exact statistics of private users: for the owner of the data, unsafe to publish.[/]\n")
    for name in ("train", "held_out", "public", "test_posts"):
        users = getattr(opened, name)
        if users is not None and users.num_users:
            _print_split(name, split_statistics(users), unit)
    if weight_cap is not None:
        effect = cap_effect(opened, weight_cap)
        console.print(
            f"[bold]weight cap {weight_cap}[/]: {100 * effect.users_at_cap:.1f} % of training users reach it; "
            f"mean weight {effect.mean_weight:.3f}, total weight {effect.total_weight:,.1f}",
            highlight=False,
        )


def _print_split(name: str, split: "SplitStatistics", words: str) -> None:
    """Print the counts of one split, and percentiles and a histogram of the number of tokens per user.

    Args:
        name: The name of the split. `test_posts` holds posts instead of users.
        split: The exact statistics of the split.
        words: What the vocabulary lists: "words" or "characters".
    """
    from unheard.corpus.store_stats import PERCENTILES

    unit = "post" if name == "test_posts" else "user"
    console.print(
        f"[bold]{name}[/]: {split.users:,} {unit}s, {split.tokens:,} tokens, {split.posts:,} sequences, "
        f"{100 * split.out_of_dictionary:.2f} % of {words} out of the vocabulary, "
        f"largest {unit} {100 * split.largest_user_share:.2f} %",
        highlight=False,
    )
    table = Table(title=f"tokens per {unit}", title_justify="left", show_edge=False)
    for percent in PERCENTILES:
        table.add_column(f"{percent} %", justify="right")
    table.add_row(*(f"{value:,}" for value in split.percentiles))
    console.print(table)
    most = max((n for _, _, n in split.histogram), default=0)
    for begin, end, count in split.histogram:
        if count:
            length = max(1, round(40 * count / most))
            console.print(f"  {begin:>9,} - {end:>9,} {count:>11,} {'█' * length}", highlight=False)
    console.print()


@app.command("synth", epilog=SYNTH_EXAMPLES)
def synth(
    like: Annotated[Path, option("The store whose word statistics to imitate.")],
    users: Annotated[int, number("The number of training users.", min=1)],
    tokens_per_user: Annotated[int, number("The exact number of tokens of each user.", min=1)],
    out: Annotated[Path, option("The store to create.")],
    held_out: Annotated[int | None, number("The number of held-out users.", min=1, otherwise="1 in 100")] = None,
    seed: Annotated[int, number("The same seed gives the same corpus.")] = 0,
    workers: Workers = 0,
) -> None:
    """Make a synthetic store of any size for load tests, with the word statistics of a real store.

    The new store is marked as synthetic in its corpus.json.
    """
    from unheard.corpus.store import TokenStore
    from unheard.corpus.synthetic import synthesise

    set_stop_message(lambda: output_stop_message(out))
    with step_bars() as progress:
        created = synthesise(
            TokenStore.open(like),
            out,
            users=users,
            tokens_per_user=tokens_per_user,
            held_out=held_out,
            seed=seed,
            workers=workers,
            progress=progress,
        )
    echo(str(created.path))


@app.command("narrow", epilog=NARROW_EXAMPLES)
def narrow(
    store: StoreDir,
    vocab_size: Annotated[int, number("Words to keep, including BOS, EOS and UNK.", min=4)],
    out: Annotated[Path, option("The store to create.")],
) -> None:
    """Make a store of the same users with a smaller vocabulary: rarer words become UNK. No text is needed."""
    from unheard.corpus.store import TokenStore
    from unheard.corpus.transform import shrink_vocabulary

    set_stop_message(lambda: output_stop_message(out))
    with step_bars() as progress:
        created = shrink_vocabulary(TokenStore.open(store), out, vocabulary_size=vocab_size, progress=progress)
    echo(str(created.path))


@app.command("part", epilog=PART_EXAMPLES)
def part(
    store: StoreDir,
    part: Annotated[str, option("Which part of how many: 1/8 to 8/8.", metavar="K/N")],
    out: Annotated[Path, option("The part to create.")],
) -> None:
    """Make one machine's part of a store, for machines without a shared disk.

    The part holds the token ids of some training users, and everything that describes the store.
    The ledger is not copied: a store has one ledger, which stays with the whole store.
    """
    from unheard.corpus.store import TokenStore
    from unheard.corpus.transform import split_store

    number, slash, of = part.partition("/")
    if not (slash and number.strip().isdecimal() and of.strip().isdecimal()):
        raise InvalidValue(f"--part {part}: write which part of how many, for example --part 2/8.")
    set_stop_message(lambda: output_stop_message(out))
    with step_bars() as progress:
        created = split_store(TokenStore.open(store), out, part=int(number), of=int(of), progress=progress)
    echo(str(created.path))
