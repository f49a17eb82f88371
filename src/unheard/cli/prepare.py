"""`unheard prepare`: a table or a heap of files in, a token store out."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard prepare chitchat --out corpora/chitchat    (the corpus that comes with the demo)

  unheard prepare posts.parquet --user-field uid --text-field msg --tokens-per-user 1600 --out corpora/posts

  unheard prepare 'RC_*.jsonl.zst' --user-field author --text-field body --time-field created_utc --out corpora/reddit

  unheard prepare mail.db --table messages --user-field sender --text-field body --strip-quotes --out corpora/mail
"""


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT...", help="Files, globs, folders, databases, hub:NAME, or the word chitchat."),
    ],
    out: Annotated[Path, typer.Option(help="The folder to make for the store.")],
    user_field: Annotated[str | None, typer.Option(help="The column that says who wrote it.")] = None,
    text_field: Annotated[str | None, typer.Option(help="The column with the text.")] = None,
    time_field: Annotated[str | None, typer.Option(help="The column to order by; else the order of the input.")] = None,
    time_format: Annotated[
        str | None, typer.Option(help="How to read times that are neither numbers nor ISO 8601, as in strptime.")
    ] = None,
    table: Annotated[str | None, typer.Option(help="Which table of a database.")] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="jsonl, json, csv, tsv, parquet ..., if the name does not say.")
    ] = None,
    tokens_per_user: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Cut each user at exactly this many tokens.")
    ] = None,
    min_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Leave out users with fewer; unless given, --tokens-per-user, or 1."),
    ] = None,
    sequence: Annotated[str, typer.Option(help="What BOS and EOS go around: post or sentence.")] = "post",
    tokens: Annotated[str, typer.Option(help="words, characters, or the path of a tokenizer.json.")] = "words",
    punctuation: Annotated[str, typer.Option(help="tokens or drop: whether marks are tokens of their own.")] = "tokens",
    vocab: Annotated[
        str, typer.Option(help="public, private, from-corpus, tokenizer, or a word list file.")
    ] = "public",
    vocab_corpus: Annotated[
        str | None, typer.Option(help="With from-corpus: another, public, corpus, raw or a store.")
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(min=4, metavar="N", help="Words in the vocabulary, BOS, EOS and UNK among them.")
    ] = 10_000,
    vocab_language: Annotated[str, typer.Option(help="Language of the public word list.")] = "en",
    vocab_epsilon: Annotated[float | None, typer.Option(help="What a private vocabulary may cost: epsilon.")] = None,
    vocab_delta: Annotated[float | None, typer.Option(help="What a private vocabulary may cost: delta.")] = None,
    vocab_words_per_user: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many words each user votes for.")
    ] = 100,
    held_out: Annotated[float | None, typer.Option(help="Part of the users that is held out.")] = None,
    public: Annotated[float, typer.Option(help="Part of the users whose text is public.")] = 0.0,
    salt: Annotated[str, typer.Option(help="Decides who is in which part.")] = "unheard",
    test_tokens: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Also a test set of random held-out posts of this size (paper: 75122)."),
    ] = 0,
    exclude_users: Annotated[Path | None, typer.Option(help="Users to leave out, one id on each line.")] = None,
    strip_quotes: Annotated[bool, typer.Option("--strip-quotes", help="Take out quoted and forwarded text.")] = False,
    drop_duplicates: Annotated[
        bool, typer.Option("--drop-duplicates", help="Drop posts that stand word for word under several users.")
    ] = False,
    duplicate_chars: Annotated[
        int, typer.Option(min=1, metavar="N", help="How long a post must be to count as such a duplicate.")
    ] = 100,
    canaries: Annotated[
        Path | None, typer.Option(help="Secrets to plant for an audit: JSON lines of text, users, repeats.")
    ] = None,
    user_map: Annotated[
        Path | None, typer.Option(help="Write who is which number to this file, outside the store.")
    ] = None,
    engine: Annotated[str, typer.Option(help="duckdb, or spark (extra).")] = "duckdb",
    master: Annotated[str, typer.Option(help="Spark's master.")] = "local[*]",
    memory: Annotated[float, typer.Option(min=0.1, metavar="GIB", help="Memory for the grouping, GiB.")] = 1.0,
    workers: Annotated[int, typer.Option(min=0, metavar="N", help="Processes; 0 is one for each core.")] = 0,
    shards: Annotated[
        int, typer.Option(min=0, metavar="N", help="Parts of the store; 0 lets the input's size decide.")
    ] = 0,
) -> None:
    """Turn user-keyed text into a token store. Run it again after a stop: it goes on where it was."""
    from unheard.cli.preparing import (
        bar,
        check_user_map,
        choose_tokens,
        choose_vocabulary,
        read_canaries,
        read_ids,
        report,
    )
    from unheard.corpus.backends.duckdb import DuckDBBackend
    from unheard.corpus.conversion import CHITCHAT_FIELDS, find_chitchat
    from unheard.corpus.encode import EncodingOptions
    from unheard.corpus.pipeline import CHITCHAT, Preparation, build_store
    from unheard.corpus.sources import Fields, find_sources
    from unheard.corpus.splits import SplitRule
    from unheard.errors import InputError, InvalidValue

    default = inputs == ["chitchat"] and not Path("chitchat").exists()
    if not default and (user_field is None or text_field is None):
        raise InputError("Name the columns: --user-field (who wrote it) and --text-field (what).")
    if user_field is not None and user_field == text_field:
        raise InputError(
            f"--user-field and --text-field are both '{user_field}': every post would be a user of its own."
        )
    check_user_map(user_map, out)
    if sequence not in ("post", "sentence"):
        raise InvalidValue(f"--sequence must be post or sentence, not '{sequence}'.")
    if default:
        tokens_per_user = tokens_per_user or CHITCHAT.encoding.tokens_per_user
        min_tokens = min_tokens or min(CHITCHAT.encoding.min_tokens, tokens_per_user or 1)
        held_out = CHITCHAT.splits.held_out if held_out is None else held_out
    cut = choose_tokens(tokens, punctuation)
    fields = Fields(user=user_field or "", text=text_field or "", time=time_field, time_format=time_format, table=table)
    preparation = Preparation(
        fields=CHITCHAT_FIELDS if default else fields,
        tokenizer=cut,
        vocabulary=choose_vocabulary(
            cut,
            vocab,
            vocab_corpus,
            vocab_size,
            vocab_language,
            vocab_epsilon,
            vocab_delta,
            vocab_words_per_user,
            inputs,
        ),
        encoding=EncodingOptions(
            sequence=sequence,
            min_tokens=min_tokens or tokens_per_user or 1,
            tokens_per_user=tokens_per_user,
            strip_quotes=strip_quotes,
        ),
        splits=SplitRule(held_out=0.05 if held_out is None else held_out, public=public, salt=salt),
        excluded=read_ids(exclude_users),
        drop_duplicates=drop_duplicates,
        duplicate_chars=duplicate_chars,
        test_tokens=test_tokens,
        canaries=read_canaries(canaries),
        shards=shards,
        name="chitchat" if default else "",
    )
    if engine == "spark":
        from unheard.corpus.backends.spark import SparkBackend

        chosen = SparkBackend(master=master)
    elif engine == "duckdb":
        chosen = DuckDBBackend(workers=workers)
    else:
        raise InvalidValue(f"--engine must be duckdb or spark, not '{engine}'.")
    sources = [find_chitchat()] if default else find_sources(inputs, format_)
    with bar() as progress:
        done = build_store(
            sources,
            out,
            preparation,
            backend=chosen,
            memory_bytes=int(memory * (1 << 30)),
            user_map=user_map,
            progress=progress,
        )
    report(done)
