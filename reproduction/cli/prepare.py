"""`python -m reproduction prepare`: prepare the token stores that the runs of the paper need, from one or two corpora.

The output is a folder with one store per role: `main`, `20k` and `30k` (dictionaries of 10,000, 20,000 and 30,000
words), `characters`, and `other` (another corpus with the dictionary of the main one). The defaults follow the paper:
public dictionaries, 1,600 tokens per user.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click
import typer

from unheard.cli.display import say, step_bars
from unheard.cli.options import number, option
from unheard.cli.prepare import InputOptions
from unheard.errors import CorpusError, InvalidValue

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
"""Roles of all stores that this command makes."""


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """Options that name the second corpus, and the names of both corpora in results."""

    other: Annotated[
        list[str] | None,
        option(
            "Another corpus with the same columns, for runs that start from it or are evaluated on it. May be "
            "repeated.",
            metavar="INPUT",
            otherwise="none",
        ),
    ] = None
    name: Annotated[
        str | None, option("The name of the corpus in results.", metavar="NAME", otherwise="the input's name")
    ] = None
    other_name: Annotated[str | None, option("The same for --other.", metavar="NAME", otherwise="the input's name")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Options that say how text becomes tokens and how users are split. The defaults follow the paper."""

    tokens_per_user: Annotated[int, number("Keep exactly the first N tokens of each user.", min=1)] = 1600
    min_tokens: Annotated[
        int | None, number("Leave out users with fewer tokens.", min=1, otherwise="as --tokens-per-user")
    ] = None
    sequence: Annotated[Literal["sentence", "post"], option("What begins with BOS and ends with EOS.")] = "sentence"
    held_out: Annotated[float, option("The fraction of users that is held out.", metavar="F")] = 0.05
    language: Annotated[str, option("The language of the public word list.", metavar="CODE")] = "en"


def prepare(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="As in `unheard prepare`.")],
    *,
    out: Annotated[Path, option("The folder for the stores, one folder each, named by role.")],
    columns: InputOptions,
    corpus: CorpusOptions,
    text: TextOptions,
    only: Annotated[
        list[str] | None,
        option("Only this store. May be repeated.", click_type=click.Choice(ROLES), otherwise="all of them"),
    ] = None,
) -> None:
    """Prepare the stores main, 20k, 30k, characters and other with the options of the paper's corpus.

    The dictionaries are public and each user has 1,600 tokens. A store that exists is kept, so that the same command
    continues after a stop.
    """
    from unheard.corpus.sources import find_sources
    from unheard.corpus.tokenizers import CharacterTokenizer
    from unheard.corpus.vocabulary import PublicVocabulary

    if "other" in (only or ()) and not corpus.other:
        raise InvalidValue("--only other needs the other corpus: --other INPUT.")
    roles = [role for role in (only or ROLES) if corpus.other or role != "other"]
    preparation = _preparation(inputs, columns, text, corpus.name)
    sources = find_sources(inputs, columns.format_)
    words = {
        role: replace(preparation, vocabulary=PublicVocabulary(size=size, language=text.language))
        for role, size in WORDS.items()
    }
    _make_words(sources, out, {role: wanted for role, wanted in words.items() if role in roles})
    if "characters" in roles:  # no size: the dictionary has all characters, about a hundred
        vocabulary = PublicVocabulary(language=text.language)
        _make(sources, out / "characters", replace(preparation, tokenizer=CharacterTokenizer(), vocabulary=vocabulary))
    # The other corpus has the dictionary of the main one, so that models can be evaluated on both.
    if "other" in roles and corpus.other:
        other = _preparation(corpus.other, columns, text, corpus.other_name)
        vocabulary = words["main"].vocabulary
        _make(find_sources(corpus.other, columns.format_), out / "other", replace(other, vocabulary=vocabulary))
    say(f"Next: python -m reproduction run all --corpus {out} --name {preparation.name} --dry-run")


def _preparation(inputs: list[str], columns: InputOptions, text: TextOptions, name: str | None) -> "Preparation":
    """Return the settings for preparing one corpus. The caller sets the vocabulary."""
    from unheard.corpus.prepare import make_preparation
    from unheard.corpus.sources import is_demo_corpus

    return make_preparation(
        columns.fields(),
        is_demo=is_demo_corpus(inputs),
        tokens_per_user=text.tokens_per_user,
        min_tokens=text.min_tokens or text.tokens_per_user,
        sequence=text.sequence,
        strip_quotes=columns.strip_quotes,
        held_out=text.held_out,
        name=name or Path(inputs[0]).name.split(".")[0].strip("*?[]") or "corpus",  # posts_2024.jsonl.zst: posts_2024
        drop_duplicates=columns.drop_duplicates,
        duplicate_chars=columns.duplicate_chars,
    )


def _make_words(sources: list["Source"], out: Path, wanted: "dict[str, Preparation]") -> None:
    """Prepare the store with the largest dictionary, and derive the others by shrinking its vocabulary.

    A derived store has the same bytes as one that is prepared from the text, and takes less time. Stores that exist are
    kept.

    Args:
        sources: The files of the corpus.
        out: Folder of the stores.
        wanted: How to prepare each store, by its role.
    """
    from unheard.corpus.store import TokenStore
    from unheard.corpus.transform import shrink_vocabulary

    is_there = {role: _is_there(out / role, preparation) for role, preparation in wanted.items()}
    by_size = sorted(wanted, key=lambda role: -WORDS[role])
    for role in (role for role in by_size if not is_there[role]):
        if role == by_size[0]:
            _make(sources, out / role, wanted[role])
            continue
        with step_bars() as progress:
            largest = TokenStore.open(out / by_size[0])
            shrink_vocabulary(largest, out / role, vocabulary_size=WORDS[role], progress=progress)
        print(out / role)


def _make(sources: list["Source"], out: Path, preparation: "Preparation") -> None:
    """Prepare one store and print its counts. A store that exists is kept."""
    from unheard.cli.prepare import print_counts
    from unheard.corpus.pipeline import build_store

    if not _is_there(out, preparation):
        with step_bars() as progress:
            done = build_store(sources, out, preparation, progress=progress)
        print_counts(done)


def _is_there(path: Path, wanted: "Preparation") -> bool:
    """Return whether the store exists and was prepared with the same options.

    Raises:
        CorpusError: The store was prepared with other options. Training would otherwise use the wrong store.
    """
    from unheard.corpus.store import TokenStore

    if not (path / "corpus.json").is_file():
        return False
    known = TokenStore.open(path).info
    # Compare only the requested options: the store also records other facts, such as the source of the words. The size
    # of the vocabulary is not compared, because a short word list gives fewer words than requested.
    differ = [
        f"{table}.{key} = {known.get(table, {}).get(key)}, not {value}"
        for table, options in wanted.choices().items()
        for key, value in options.items()
        if key != "size" and known.get(table, {}).get(key) != value
    ]
    if known.get("name") != wanted.name:
        differ.insert(0, f"its name is {known.get('name')}, not {wanted.name}")
    if differ:
        raise CorpusError(
            f"{path} exists with other options: {'; '.join(differ)}. Name another folder with --out, or remove this "
            "one first."
        )
    say(f"{path} exists already and is kept.")
    return True
