"""`unheard prepare`: turn files, tables or databases of user-keyed text into a token store.

The command collects its options into a `Preparation` and calls `build_store` (`corpus/pipeline.py`).
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from unheard.cli.options import MACHINE, Workers

if TYPE_CHECKING:
    from unheard.corpus.canaries import Canary
    from unheard.corpus.pipeline import PreparedStore
    from unheard.corpus.tokenizers import Tokenizer
    from unheard.corpus.vocabulary import VocabularySource

EXAMPLES = """Examples:

  unheard prepare chitchat --out corpora/chitchat    (the corpus that comes with the demo)

  unheard prepare posts.parquet --user-field uid --text-field msg --tokens-per-user 1600 --out corpora/posts

  unheard prepare 'RC_*.jsonl.zst' --user-field author --text-field body --time-field created_utc --out corpora/reddit

  unheard prepare 2026-11/*.jsonl --user-field author --text-field body --continues corpora/october --out corpora/november

  unheard prepare mail.db --table messages --user-field sender --text-field body --strip-quotes --out corpora/mail
"""

INPUT, USERS, TOKENS, VOCABULARY, PRIVACY = "Input", "Users and splits", "Tokenizer", "Vocabulary", "Privacy and audits"
DEFAULT_HELD_OUT = 0.05


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT...", help="Files, globs, folders, databases, hub:NAME, or the word chitchat."),
    ],
    out: Annotated[Path, typer.Option(help="The store to create.")],
    user_field: Annotated[
        str | None,
        typer.Option(
            help="The column that names the user who wrote the text.",
            rich_help_panel=INPUT,
            metavar="COLUMN",
            show_default="none; required for all inputs but chitchat",
        ),
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option(
            help="The column with the text.",
            rich_help_panel=INPUT,
            metavar="COLUMN",
            show_default="none; required for all inputs but chitchat",
        ),
    ] = None,
    time_field: Annotated[
        str | None,
        typer.Option(
            help="The column that orders the posts of a user.",
            rich_help_panel=INPUT,
            metavar="COLUMN",
            show_default="the order of the input",
        ),
    ] = None,
    time_format: Annotated[
        str | None,
        typer.Option(
            help="The format of times, as in strptime.",
            rich_help_panel=INPUT,
            metavar="FORMAT",
            show_default="numbers or ISO 8601",
        ),
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(
            help="The table of a database.",
            rich_help_panel=INPUT,
            metavar="NAME",
            show_default="the only one",
        ),
    ] = None,
    format_: Annotated[
        Literal["jsonl", "json", "csv", "tsv", "parquet", "duckdb", "sqlite"] | None,
        typer.Option(
            "--format",
            help="The format of the input.",
            rich_help_panel=INPUT,
            show_default="by the file's name",
        ),
    ] = None,
    strip_quotes: Annotated[
        bool, typer.Option("--strip-quotes", help="Remove quoted and forwarded text.", rich_help_panel=INPUT)
    ] = False,
    drop_duplicates: Annotated[
        bool,
        typer.Option(
            "--drop-duplicates", help="Drop posts that several users posted word for word.", rich_help_panel=INPUT
        ),
    ] = False,
    duplicate_chars: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="The shortest post that counts as such a duplicate.", rich_help_panel=INPUT
        ),
    ] = 100,
    tokens_per_user: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Keep exactly the first N tokens of each user.",
            rich_help_panel=USERS,
            show_default="no limit",
        ),
    ] = None,
    min_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Leave out users with fewer tokens.",
            rich_help_panel=USERS,
            show_default="--tokens-per-user, or 1",
        ),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            help="The fraction of users that is held out for evaluation.", rich_help_panel=USERS, show_default="0.05"
        ),
    ] = None,
    public: Annotated[
        float, typer.Option(help="The fraction of users whose text is public.", rich_help_panel=USERS)
    ] = 0.0,
    salt: Annotated[str, typer.Option(help="Decides which user is in which split.", rich_help_panel=USERS)] = "unheard",
    test_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Also a test set of random held-out posts with so many tokens (paper: 75122).",
            rich_help_panel=USERS,
        ),
    ] = 0,
    exclude_users: Annotated[
        Path | None,
        typer.Option(
            help="A file of users to leave out, one id per line.", rich_help_panel=USERS, show_default="nobody"
        ),
    ] = None,
    tokens: Annotated[
        str, typer.Option(help="words, characters, or the path of a tokenizer.json.", rich_help_panel=TOKENS)
    ] = "words",
    punctuation: Annotated[
        Literal["tokens", "drop"],
        typer.Option(help="Whether punctuation marks are tokens or are dropped.", rich_help_panel=TOKENS),
    ] = "tokens",
    sequence: Annotated[
        Literal["post", "sentence"],
        typer.Option(help="What BOS and EOS enclose.", rich_help_panel=TOKENS),
    ] = "post",
    vocab: Annotated[
        str,
        typer.Option(help="public, private, from-corpus, tokenizer, or a word list file.", rich_help_panel=VOCABULARY),
    ] = "public",
    vocab_corpus: Annotated[
        str | None,
        typer.Option(
            help="With from-corpus: another, public corpus, as text or as a store.",
            rich_help_panel=VOCABULARY,
            metavar="INPUT",
            show_default="none",
        ),
    ] = None,
    vocab_size: Annotated[
        int,
        typer.Option(
            min=4,
            metavar="N",
            help="Words in the vocabulary, including BOS, EOS and UNK.",
            rich_help_panel=VOCABULARY,
        ),
    ] = 10_000,
    vocab_language: Annotated[
        str, typer.Option(help="Language of the public word list.", rich_help_panel=VOCABULARY)
    ] = "en",
    vocab_epsilon: Annotated[
        float | None,
        typer.Option(help="The epsilon of a private vocabulary.", rich_help_panel=PRIVACY, show_default="none"),
    ] = None,
    vocab_delta: Annotated[
        float | None,
        typer.Option(help="The delta of a private vocabulary.", rich_help_panel=PRIVACY, show_default="none"),
    ] = None,
    vocab_words_per_user: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="With a private vocabulary: how many words each user votes for.",
            rich_help_panel=PRIVACY,
        ),
    ] = 100,
    canaries: Annotated[
        Path | None,
        typer.Option(
            help="Phrases to plant for an audit: JSON lines with text, users, repeats.",
            rich_help_panel=PRIVACY,
            show_default="none",
        ),
    ] = None,
    user_map: Annotated[
        Path | None,
        typer.Option(
            help="Write the id and the number of each user to this file, outside the store: .csv, .json, .jsonl or "
            ".parquet.",
            rich_help_panel=PRIVACY,
            show_default="not written",
        ),
    ] = None,
    continues: Annotated[
        Path | None,
        typer.Option(
            help="An earlier store with (some of) the same users, for example of last month: what they were charged "
            "there counts for the new store too. The earlier store may be deleted afterwards.",
            rich_help_panel=PRIVACY,
            metavar="STORE",
            show_default="none: a new population",
        ),
    ] = None,
    engine: Annotated[
        Literal["duckdb", "spark"],
        typer.Option(help="What groups the posts by user; spark needs the extra `spark`.", rich_help_panel=MACHINE),
    ] = "duckdb",
    master: Annotated[str, typer.Option(help="With spark: the address of its master.", rich_help_panel=MACHINE)] = (
        "local[*]"
    ),
    memory: Annotated[
        float, typer.Option(min=0.1, metavar="GIB", help="Memory for the grouping, in GiB.", rich_help_panel=MACHINE)
    ] = 1.0,
    workers: Workers = 0,
    shards: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Shards of the store; 0 chooses by the input's size.", rich_help_panel=MACHINE
        ),
    ] = 0,
) -> None:
    """Turn user-keyed text into a token store. After a stop the same command continues where it was."""
    from unheard.cli.processes import set_kept, store_kept

    set_kept(lambda: store_kept(out))
    from unheard.cli.display import note, step_bars
    from unheard.corpus.conversion import CHITCHAT_FIELDS, find_chitchat
    from unheard.corpus.encode import EncodingOptions
    from unheard.corpus.grouping import DuckDBBackend, SplitRule
    from unheard.corpus.pipeline import CHITCHAT, Preparation, build_store
    from unheard.corpus.sources import Fields, find_sources
    from unheard.errors import InputError, InvalidValue

    is_chitchat = inputs == ["chitchat"] and not Path("chitchat").exists()
    if not is_chitchat and (user_field is None or text_field is None):
        raise InputError("Name the columns: --user-field (who wrote it) and --text-field (what).")
    if user_field is not None and user_field == text_field:
        raise InputError(
            f"--user-field and --text-field are both '{user_field}': every post would be a user of its own."
        )
    _check_user_map(user_map, out)
    fields = Fields(user=user_field or "", text=text_field or "", time=time_field, time_format=time_format, table=table)
    if is_chitchat:
        fields = CHITCHAT_FIELDS
        tokens_per_user = tokens_per_user or CHITCHAT.encoding.tokens_per_user
        min_tokens = min_tokens or min(CHITCHAT.encoding.min_tokens, tokens_per_user or 1)
        held_out = CHITCHAT.splits.held_out if held_out is None else held_out
    tokenizer = _tokenizer(tokens, punctuation)
    if vocab != "private" and (vocab_epsilon is not None or vocab_delta is not None):
        raise InvalidValue(
            "--vocab-epsilon and --vocab-delta go with --vocab private; a public vocabulary costs nothing."
        )
    preparation = Preparation(
        fields=fields,
        tokenizer=tokenizer,
        vocabulary=_private_vocabulary(vocab_epsilon, vocab_delta, vocab_size, vocab_words_per_user)
        if vocab == "private"
        else _public_vocabulary(tokenizer, vocab, vocab_corpus, vocab_size, vocab_language, inputs),
        encoding=EncodingOptions(
            sequence=sequence,
            min_tokens=min_tokens or tokens_per_user or 1,
            tokens_per_user=tokens_per_user,
            strip_quotes=strip_quotes,
        ),
        splits=SplitRule(held_out=DEFAULT_HELD_OUT if held_out is None else held_out, public=public, salt=salt),
        excluded=_read_ids(exclude_users),
        drop_duplicates=drop_duplicates,
        duplicate_chars=duplicate_chars,
        test_tokens=test_tokens,
        canaries=_read_canaries(canaries),
        shards=shards,
        name="chitchat" if is_chitchat else "",
    )
    if engine == "spark":
        from unheard.corpus.spark import SparkBackend

        backend = SparkBackend(master=master)
    else:
        backend = DuckDBBackend(workers=workers)
    sources = [find_chitchat()] if is_chitchat else find_sources(inputs, format_)
    with step_bars() as progress:
        prepared = build_store(
            sources,
            out,
            preparation,
            backend=backend,
            memory_bytes=int(memory * (1 << 30)),
            user_map=user_map,
            continues=continues,
            progress=progress,
        )
    print_counts(prepared)
    if continues is not None:
        note(f"{out} continues the ledger of {continues}: every run on either is charged to {out}.")


def _tokenizer(kind: str, punctuation: Literal["tokens", "drop"]) -> "Tokenizer":
    from unheard.corpus.tokenizers import CharacterTokenizer, HuggingFaceTokenizer, WordTokenizer

    if kind == "words":
        return WordTokenizer(punctuation=punctuation)
    return CharacterTokenizer() if kind == "characters" else HuggingFaceTokenizer.read(kind)


def _private_vocabulary(
    epsilon: float | None, delta: float | None, size: int, words_per_user: int
) -> "VocabularySource":
    from unheard.corpus.private_vocabulary import PrivateVocabulary
    from unheard.errors import InvalidValue

    if epsilon is None or delta is None:
        raise InvalidValue("--vocab private needs its price: --vocab-epsilon and --vocab-delta.")
    return PrivateVocabulary(epsilon=epsilon, delta=delta, size=size, words_per_user=words_per_user)


def _public_vocabulary(
    tokens: "Tokenizer", kind: str, corpus: str | None, size: int, language: str, inputs: list[str]
) -> "VocabularySource":
    """Returns the source of a vocabulary that is public: a word list, a tokenizer, or another corpus."""
    from unheard.config import nearest
    from unheard.corpus.private_vocabulary import CorpusVocabulary
    from unheard.corpus.tokenizers import HuggingFaceTokenizer
    from unheard.corpus.vocabulary import FileVocabulary, PublicVocabulary, TokenizerVocabulary
    from unheard.errors import InvalidValue

    if (kind == "from-corpus") != (corpus is not None):
        raise InvalidValue("--vocab from-corpus and --vocab-corpus OTHER go together.")
    if corpus is not None:
        _check_other_text(corpus, inputs)
        return CorpusVocabulary(path=corpus, size=size)
    if kind == "tokenizer" or (kind == "public" and isinstance(tokens, HuggingFaceTokenizer)):
        return TokenizerVocabulary()
    if kind == "public":
        return PublicVocabulary(size=size, language=language)
    if not Path(kind).is_file():  # checked before the text is read, which may take hours
        kinds = ("public", "private", "from-corpus", "tokenizer")
        raise InvalidValue(f"--vocab {kind} is no word list file, nor one of these.{nearest(kind, kinds)}")
    return FileVocabulary(path=kind, size=size)


def _check_other_text(corpus: str, inputs: list[str]) -> None:
    """Raises `PrivacyError` if the "public" corpus is the users' own text."""
    from unheard.corpus.sources import find_sources
    from unheard.errors import PrivacyError

    if (Path(corpus) / "corpus.json").is_file() or not Path(corpus).exists() or corpus.endswith(".txt"):
        return
    own = {Path(source.path).resolve() for source in find_sources(inputs) if source.format != "hub"}
    if own & {Path(source.path).resolve() for source in find_sources([corpus]) if source.format != "hub"}:
        raise PrivacyError(
            f"{corpus} is the users' own text: its words are not public. Use --vocab private, which pays for them."
        )


def _check_user_map(path: Path | None, out: Path) -> None:
    """Checks, before hours of work, that the map of user ids can be written and is not inside the store."""
    from unheard.corpus.pipeline import USER_MAP_SUFFIXES
    from unheard.errors import InputError, PrivacyError

    if path is None:
        return
    if path.suffix.lower() not in USER_MAP_SUFFIXES:
        raise InputError(
            f"--user-map {path}: its name must end in {', '.join(USER_MAP_SUFFIXES)}, which is the format."
        )
    if path.resolve().is_relative_to(out.resolve()):
        raise PrivacyError(f"--user-map {path} lies in the store, which holds no ids. Name a file outside {out}.")
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise InputError(f"--user-map {path} is not a file in a folder that is there: make the folder first.")


def _read_ids(path: Path | None) -> tuple[str, ...]:
    """Reads the ids of users who opted out or asked to be erased, one per line."""
    from unheard.errors import InputError

    if path is None:
        return ()
    try:
        return tuple(line for line in path.read_text(encoding="utf-8").split("\n") if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Cannot read --exclude-users {path}: {error}. Nothing was prepared.") from None


def _read_canaries(path: Path | None) -> "tuple[Canary, ...]":
    """Reads the phrases that `unheard canaries` wrote."""

    from unheard.config import parse_json, part_from_table
    from unheard.corpus.canaries import Canary
    from unheard.errors import InputError

    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return tuple(part_from_table(Canary, parse_json(line), "canary") for line in lines if line.strip())
    except (OSError, ValueError) as error:
        raise InputError(
            f"Cannot read --canaries {path}: {error}. Give JSON lines with text, users, repeats."
        ) from None


def _unit(info: dict[str, Any]) -> str:
    """What the vocabulary of a store lists."""
    return "characters" if info["tokens"]["kind"] == "characters" else "words"


def _cure_of_unknown(info: dict[str, Any], language: str | None) -> str:
    """What helps if many words are not in the vocabulary, and was not done already.

    Args:
        info: The record of the store.
        language: The language that the text seems to be in; None if that is not known.
    """
    vocabulary, unit = info["vocabulary"], _unit(info)
    tokens = "the tokenizer.json of a model (--tokens FILE)"
    tokens += "" if unit == "characters" else " or --tokens characters"
    if vocabulary["kind"] == "private":
        return (
            f"A larger --vocab-epsilon, or more users, release more {unit}. A public list costs nothing: --vocab public with "
            f"--vocab-language. Or use {tokens}."
        )
    if vocabulary["kind"] != "public":
        return f"Use a list of such text, the users' own {unit} (--vocab private), or {tokens}."
    listed = f"The list is that of the language '{vocabulary['language']}'"
    if language is None:
        listed += ". If the text is in another language, name it (--vocab-language CODE); otherwise"
    elif language == vocabulary["language"]:
        listed += ", in which the text seems to be:"
    else:
        listed += f", but the text seems to be in '{language}': use --vocab-language {language}; otherwise"
    if unit == "characters":
        return f"{listed} use the users' own characters (--vocab private) or a list of them (--vocab FILE)."
    return (
        f"{listed} ask for more words (--vocab-size {3 * vocabulary['size']}), or use the users' own words (--vocab "
        f"private), a word list of such text (--vocab FILE), {tokens}."
    )


def print_counts(prepared: "PreparedStore") -> None:
    """Prints what was read, left out and kept, on standard error, and the path of the store on standard output.

    The counts are exact, so the first line says that only the owner of the data may see them.
    """
    from rich.markup import escape

    from unheard.cli.display import echo, notes
    from unheard.corpus.encode import unknown_rate
    from unheard.corpus.pipeline import MANY_UNKNOWN
    from unheard.corpus.vocabulary import SPECIALS

    def line(count: int, words: str) -> None:
        notes.print(f"  {count:>12,} {words}", soft_wrap=True)

    def notice(sentence: str) -> None:
        notes.print(f"[bold yellow]Notice:[/] {sentence}", soft_wrap=True)

    counts = prepared.counts
    rows, users = counts["rows"], counts["users"]
    notes.print("[bold]For the owner of the data only; exact counts of private users are unsafe to publish:[/]")
    line(rows["rows"], f"rows read, {rows['kept']:,} used")
    for name, words in {
        "malformed": "rows that are no valid JSON or CSV or no valid UTF-8",
        "no_user": "rows without a user",
        "no_text": "rows without text",
        "no_time": "rows whose time is missing or cannot be read (kept, after the others)",
        "excluded": "rows of excluded users",
    }.items():
        if rows.get(name):
            line(rows[name], words)
    if rows.get("merged_users"):
        line(
            rows["merged_users"], "users whose id has several spellings (such as 1 and 1.0), each merged into one user"
        )
    for sentence in counts["noticed"]:
        notice(escape(sentence))
    if counts["duplicate_posts"]:
        what = "dropped" if prepared.store.info["drop_duplicates"] else "kept; --drop-duplicates drops them"
        line(counts["duplicate_posts"], f"posts that several users posted word for word ({what})")
    line(users["users_seen"], f"users, {users.get('users_too_short', 0):,} too short and left out")
    for split in ("train", "held_out", "public"):
        if users.get(f"{split}_users"):
            line(users[f"{split}_users"], f"users in {split}, {users[f'{split}_tokens']:,} tokens")
    words = prepared.store.info["vocabulary"]
    if words["kind"] == "private":
        asked = f"{words['asked'] - len(SPECIALS):,}"
        line(words["size"] - len(SPECIALS), f"words released by --vocab private, of {asked} asked for")
    unknown = f"% of the training {_unit(prepared.store.info)} are not in the vocabulary"
    notes.print(f"  {100 * unknown_rate(users):>10.2f} {unknown}", soft_wrap=True)
    if unknown_rate(users) > MANY_UNKNOWN:
        notice(
            f"{100 * unknown_rate(users):.0f} {unknown}: they become <UNK>, which no model can turn back into text. "
            + _cure_of_unknown(prepared.store.info, prepared.language)
        )
    if not users.get("held_out_users"):
        notice(
            "no user is held out, so training, which measures accuracy on held-out users, will refuse this store. "
            "Raise --held-out, or gather more users."
        )
    echo(str(prepared.store.path))
