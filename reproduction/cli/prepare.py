"""`python -m reproduction prepare`: the token stores that the runs of the paper need, from one or two corpora.

The output is a folder with one store per role: `main`, `20k` and `30k` (dictionaries of 10,000, 20,000 and 30,000
words), `characters`, and `other` (another corpus with the dictionary of the main one). The options follow the paper:
public dictionaries, 1,600 tokens per user.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click
import typer

if TYPE_CHECKING:
    from unheard.corpus.pipeline import Preparation
    from unheard.corpus.sources import Source

EXAMPLES = """Examples:

  python -m reproduction prepare posts.jsonl.zst --user-field user --text-field text --time-field time --name posts --out corpora/x

  python -m reproduction prepare posts.csv --other speeches.csv --user-field who --text-field said --min-tokens 1500 --out corpora/x

  python -m reproduction prepare chitchat --tokens-per-user 200 --only main --only 20k --out corpora/paper-chat
"""

WORDS = {"main": 10_000, "20k": 20_000, "30k": 30_000}
"""Dictionary size by role."""
ROLES = (*WORDS, "characters", "other")
"""All stores that this command makes."""


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """The columns of the input, as in `unheard prepare`, and the names of the corpora."""

    other: Annotated[
        list[str] | None,
        typer.Option(
            help="Another corpus with the same columns, for runs that start from it or are evaluated on it. May be "
            "repeated.",
            metavar="INPUT",
            show_default="none",
        ),
    ] = None
    user_field: Annotated[
        str | None,
        typer.Option(help="The column that names the user who wrote the text.", metavar="COLUMN", show_default="none"),
    ] = None
    text_field: Annotated[
        str | None, typer.Option(help="The column with the text.", metavar="COLUMN", show_default="none")
    ] = None
    time_field: Annotated[
        str | None,
        typer.Option(
            help="The column that orders the posts of a user.", metavar="COLUMN", show_default="the order of the input"
        ),
    ] = None
    format_: Annotated[
        str | None,
        typer.Option("--format", help="The format of the input.", metavar="FORMAT", show_default="by the file's name"),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(help="The name of the corpus in results.", metavar="NAME", show_default="the input's name"),
    ] = None
    other_name: Annotated[
        str | None, typer.Option(help="The same for --other.", metavar="NAME", show_default="the input's name")
    ] = None


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How text becomes tokens and users are split. The defaults are the paper's."""

    tokens_per_user: Annotated[
        int, typer.Option(min=1, help="Keep exactly the first N tokens of each user.", metavar="N")
    ] = 1600
    min_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Leave out users with fewer tokens.", metavar="N", show_default="as --tokens-per-user"
        ),
    ] = None
    sequence: Annotated[Literal["sentence", "post"], typer.Option(help="What begins with BOS and ends with EOS.")] = (
        "sentence"
    )
    held_out: Annotated[float, typer.Option(help="The fraction of users that is held out.", metavar="F")] = 0.05
    language: Annotated[str, typer.Option(help="The language of the public word list.", metavar="CODE")] = "en"


def prepare(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="As in `unheard prepare`.")],
    *,
    out: Annotated[Path, typer.Option(help="The folder for the stores, one folder each, named by role.")],
    corpus: CorpusOptions,
    text: TextOptions,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this store. May be repeated.", click_type=click.Choice(ROLES), show_default="all of them"
        ),
    ] = None,
) -> None:
    """Make the stores main, 20k, 30k, characters and other, as the paper's corpus was made.

    The dictionaries are public and each user has 1,600 tokens. A store that exists is left as it is, so that the same
    command continues after a stop.
    """
    from unheard.cli.display import say
    from unheard.corpus.sources import find_sources, is_demo_corpus
    from unheard.errors import InvalidValue

    if "other" in (only or ()) and not corpus.other:
        raise InvalidValue("--only other needs the other corpus: --other INPUT.")
    roles = [role for role in (only or ROLES) if corpus.other or role != "other"]
    preparation = _preparation(corpus, text, corpus.name or _stem(inputs[0]), is_chitchat=is_demo_corpus(inputs))
    sources = find_sources(inputs, corpus.format_)
    _make_words(sources, out, preparation, [role for role in WORDS if role in roles], text.language)
    if "characters" in roles:
        _make_characters(sources, out / "characters", preparation, text.language)
    if "other" in roles and corpus.other:
        name = corpus.other_name or _stem(corpus.other[0])
        other = _preparation(corpus, text, name, is_chitchat=False)
        _make_other(find_sources(corpus.other, corpus.format_), out / "other", other, text.language)
    say(f"Next: python -m reproduction run all --corpus {out} --name {preparation.name} --dry-run")


def _preparation(corpus: CorpusOptions, text: TextOptions, name: str, *, is_chitchat: bool) -> "Preparation":
    """Return how to prepare a corpus, without its vocabulary.

    Raises:
        InputError: The columns are not named.
    """
    from unheard.corpus.encode import EncodingOptions
    from unheard.corpus.grouping import SplitRule
    from unheard.corpus.pipeline import Preparation
    from unheard.corpus.sources import CHITCHAT_FIELDS, Fields
    from unheard.errors import InputError

    if not is_chitchat and (corpus.user_field is None or corpus.text_field is None):
        raise InputError("Name the columns: --user-field (who wrote it) and --text-field (what).")
    columns = Fields(user=corpus.user_field or "", text=corpus.text_field or "", time=corpus.time_field)
    return Preparation(
        fields=CHITCHAT_FIELDS if is_chitchat else columns,
        encoding=EncodingOptions(
            sequence=text.sequence,
            min_tokens=text.min_tokens or text.tokens_per_user,
            tokens_per_user=text.tokens_per_user,
        ),
        splits=SplitRule(held_out=text.held_out),
        name=name,
    )


def _make_words(
    sources: list["Source"], out: Path, preparation: "Preparation", roles: list[str], language: str
) -> None:
    """Prepare the store with the largest dictionary, and derive the others from it by shrinking the vocabulary, which
    gives the same bytes as preparing them."""
    from unheard.cli.display import step_bars
    from unheard.corpus.store import TokenStore
    from unheard.corpus.transform import shrink_vocabulary
    from unheard.corpus.vocabulary import PublicVocabulary

    def choice(role: str) -> "Preparation":
        """The preparation of one store, with its dictionary."""
        return replace(preparation, vocabulary=PublicVocabulary(size=WORDS[role], language=language))

    missing = sorted((role for role in roles if not _is_there(out / role, choice(role))), key=lambda r: -WORDS[r])
    if not missing:
        return
    largest = max((role for role in roles if role not in missing), key=lambda role: WORDS[role], default=None)
    if largest is None or WORDS[largest] < WORDS[missing[0]]:
        largest = missing.pop(0)
        _make(sources, out / largest, choice(largest))
    for role in missing:
        with step_bars() as progress:
            shrink_vocabulary(
                TokenStore.open(out / largest), out / role, vocabulary_size=WORDS[role], progress=progress
            )
        print(out / role)


def _make_characters(sources: list["Source"], out: Path, preparation: "Preparation", language: str) -> None:
    """Prepare the character store with all characters, of which there are about a hundred."""
    from unheard.corpus.tokenizers import CharacterTokenizer
    from unheard.corpus.vocabulary import PublicVocabulary

    all_characters = PublicVocabulary(language=language)  # there are about a hundred
    wanted = replace(preparation, tokenizer=CharacterTokenizer(), vocabulary=all_characters)
    if not _is_there(out, wanted):
        _make(sources, out, wanted)


def _make_other(sources: list["Source"], out: Path, preparation: "Preparation", language: str) -> None:
    """Prepare the other corpus with the dictionary of the main one, so that models can be evaluated on both."""
    from unheard.corpus.vocabulary import PublicVocabulary

    wanted = replace(preparation, vocabulary=PublicVocabulary(size=WORDS["main"], language=language))
    if not _is_there(out, wanted):
        _make(sources, out, wanted)


def _make(sources: list["Source"], out: Path, preparation: "Preparation") -> None:
    """Prepare one store and print its counts."""
    from unheard.cli.display import step_bars
    from unheard.cli.prepare import print_counts
    from unheard.corpus.pipeline import build_store

    with step_bars() as progress:
        done = build_store(sources, out, preparation, progress=progress)
    print_counts(done)


def _is_there(path: Path, wanted: "Preparation") -> bool:
    """Whether the store exists with the same choices. Raises `CorpusError` if it exists with others, which would
    otherwise pass for the requested one."""
    from unheard.cli.display import say
    from unheard.corpus.store import TokenStore
    from unheard.errors import CorpusError

    if not (path / "corpus.json").is_file():
        return False
    known = TokenStore.open(path).info
    # The record may say more than was asked: where the words come from. Their number is the role's, or fewer if there are no more.
    differ = [
        f"{table}.{key} = {known.get(table, {}).get(key)}, not {value}"
        for table, options in wanted.choices().items()
        for key, value in options.items()
        if key != "size" and known.get(table, {}).get(key) != value
    ]
    if known.get("name") != wanted.name:
        differ.insert(0, f"it is called {known.get('name')}, not {wanted.name}")
    if differ:
        raise CorpusError(
            f"{path} is there, and is another: {'; '.join(differ)}. Name another folder with --out, or remove this "
            "one first."
        )
    say(f"{path} is there already.")
    return True


def _stem(source: str) -> str:
    """posts_2024.jsonl.zst -> posts_2024"""
    return Path(source).name.split(".")[0].strip("*?[]") or "corpus"
