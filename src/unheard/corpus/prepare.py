"""Turns the options of `unheard prepare` into a `Preparation`, for the command and for the function `unheard.prepare`.

    import unheard

    store = unheard.prepare("posts.parquet", "corpora/posts", user="uid", text="msg", tokens_per_user=1600)
    store = unheard.prepare(rows, "corpora/posts")       # dicts, a pandas or Arrow table, a Hugging Face Dataset

The store is the same as that of the command `unheard prepare` for the same rows. Python objects are first written to a
temporary file next to the store. If the text does not fit in memory, give paths of files.

    make_preparation     applies the defaults that depend on other options, and those of the demo corpus
    choose_vocabulary    where the words come from
    read_user_ids        a file of users to leave out

`build_store` (`pipeline`) then reads the text and writes the store.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from unheard import storage
from unheard.config import nearest
from unheard.corpus import Progress, no_progress
from unheard.corpus.conversion import opened_sources
from unheard.corpus.encode import EncodingOptions, SequenceUnit
from unheard.corpus.grouping import DuckDBBackend, SplitRule
from unheard.corpus.pipeline import Preparation, build_store
from unheard.corpus.private_vocabulary import CorpusVocabulary, PrivateVocabulary
from unheard.corpus.sources import CHITCHAT_FIELDS, Fields, is_demo_corpus
from unheard.corpus.store import TokenStore
from unheard.corpus.tokenizers import HuggingFaceTokenizer, Tokenizer, choose_tokenizer
from unheard.corpus.vocabulary import FileVocabulary, PublicVocabulary, TokenizerVocabulary, VocabularySource
from unheard.errors import InputError, InvalidValue

MAX_BYTES_OF_IDS = 1 << 28
"""The largest size of a file of user ids, in bytes. A larger file is probably given by mistake."""

CHITCHAT = Preparation(
    fields=CHITCHAT_FIELDS,
    encoding=EncodingOptions(min_tokens=100, tokens_per_user=1600),
    splits=SplitRule(held_out=0.1),
    name="chitchat",
)
"""The choices for the demo corpus: real, pseudonymous chat with an MIT licence, from the PyPI package
`chitchat-dataset` 0.9.

The corpus has 1,315 users, two of whom wrote 18 % of the words. Users with at least 100 tokens are kept, and each is
cut at 1,600 tokens.
"""


def prepare(
    source: Any,
    out: str | os.PathLike[str],
    *,
    user: str = "user",
    text: str = "text",
    time: str | None = None,
    time_format: str | None = None,
    table: str | None = None,
    tokens_per_user: int | None = None,
    min_tokens: int | None = None,
    sequence: Literal["post", "sentence"] = "post",
    tokenizer: str | os.PathLike[str] | Tokenizer = "words",
    vocabulary: str | os.PathLike[str] | VocabularySource = "public",
    vocabulary_size: int = 10_000,
    language: str = "en",
    vocabulary_epsilon: float | None = None,
    vocabulary_delta: float | None = None,
    held_out: float | None = None,
    public: float = 0.0,
    salt: str = "unheard",
    test_tokens: int = 0,
    exclude_users: Iterable[str] = (),
    strip_quotes: bool = False,
    drop_duplicates: bool = False,
    continues: str | os.PathLike[str] | None = None,
    name: str = "",
    workers: int = 1,
    progress: Progress = no_progress,
) -> TokenStore:
    """Make a token store of posts, each with the id of the user who wrote it. A repeated call resumes.

    Args:
        source: What to read: a path, a glob, a folder, "hub:NAME" or a list of these; "chitchat", the demo corpus; or
            Python objects: an iterable of dicts, a pandas DataFrame, an Arrow table, a Hugging Face `Dataset`.
        out: The folder of the store. It must be missing or empty.
        user: The column with the id of the user who wrote the text. The guarantee protects all rows with one id.
        text: The column with the text.
        time: The column to sort each user's posts by: numbers, dates or ISO 8601. By default posts stay in the order
            of the input.
        time_format: A `strptime` format for times in other formats.
        table: The table to read, for a database that has several.
        tokens_per_user: Cut the text of each user at exactly this many tokens (1600 in the paper). By default nothing
            is cut.
        min_tokens: Leave out users with fewer tokens. By default `tokens_per_user`, or 1 if that is None.
        sequence: What BOS and EOS enclose: "post" or "sentence".
        tokenizer: "words", "characters", the path of a tokenizer.json, or a `Tokenizer`.
        vocabulary: "public" (the most frequent words of a language; with a tokenizer.json, all of its tokens),
            "private" (the users' own words, chosen with differential privacy), "tokenizer" (all tokens of the
            tokenizer.json), the path of a word list or of another store, or a `VocabularySource`.
        vocabulary_size: The number of words, including BOS, EOS and UNK.
        language: The language of the public vocabulary.
        vocabulary_epsilon, vocabulary_delta: The cost of a private vocabulary. It is part of the epsilon of every run
            on the store.
        held_out: The fraction of users to hold out for evaluation. By default 0.05.
        public: The fraction of users whose text is public.
        salt: The seed of the assignment of users to splits.
        test_tokens: The number of tokens of an additional test set of random held-out posts. By default there is none.
        exclude_users: Ids of users to leave out, for example because they opted out.
        strip_quotes: Remove quoted and forwarded text, which other users wrote.
        drop_duplicates: Leave out posts of at least 100 characters that several users wrote word for word.
        continues: An earlier store with (some of) the same users. Its charges and its budget are copied to the ledger
            of the new store.
        name: The name of the corpus in corpus.json. By default the name of the folder.
        workers: The number of processes; 0 means one per core. A script that uses several needs
            `if __name__ == "__main__":`.
        progress: Called with the name of each step and its finished fraction.

    Returns:
        The opened store. `store.counts["rows"]` says how many rows were used and why others were not; these exact
        counts are for the owner of the data only.

    Raises:
        InputError: A column is missing, no row is usable, or no user is left. Single malformed rows are counted
            instead.
        InvalidValue: An option has a value that is not allowed.
        CorpusError: `out` is not empty, or the disk is full.

    Example:
        >>> import tempfile
        >>> rows = [{"user": f"user {i}", "text": "good morning"} for i in range(100)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = prepare(rows, f"{folder}/store", held_out=0.1)
        ...     print(store.train.num_users + store.held_out.num_users, "users")
        ...     [store.vocabulary.word(i) for i in store.train.tokens(0)]
        100 users
        ['<BOS>', 'good', 'morning', '<EOS>']
    """
    chosen = choose_tokenizer(tokenizer)
    preparation = make_preparation(
        Fields(user=user, text=text, time=time, time_format=time_format, table=table),
        is_demo=is_demo_corpus(source),
        tokenizer=chosen,
        vocabulary=choose_vocabulary(
            vocabulary,
            chosen,
            size=vocabulary_size,
            language=language,
            epsilon=vocabulary_epsilon,
            delta=vocabulary_delta,
        ),
        tokens_per_user=tokens_per_user,
        min_tokens=min_tokens,
        sequence=sequence,
        strip_quotes=strip_quotes,
        held_out=held_out,
        public=public,
        salt=salt,
        test_tokens=test_tokens,
        excluded=tuple(exclude_users),
        drop_duplicates=drop_duplicates,
        name=name,
    )
    with opened_sources(source, out, preparation.fields) as sources:
        backend = DuckDBBackend(workers=workers)
        return build_store(sources, out, preparation, backend=backend, continues=continues, progress=progress).store


def make_preparation(
    fields: Fields,
    *,
    is_demo: bool = False,
    tokens_per_user: int | None = None,
    min_tokens: int | None = None,
    sequence: SequenceUnit = "post",
    strip_quotes: bool = False,
    held_out: float | None = None,
    public: float = 0.0,
    salt: str = "unheard",
    name: str = "",
    **choices: Any,
) -> Preparation:
    """Return the `Preparation` for the options of `unheard prepare`, with defaults that depend on other options.

    Args:
        fields: The columns to read; ignored for the demo corpus, which has its own.
        is_demo: Whether the input is the demo corpus. Then options that are not given have the values of `CHITCHAT`.
        tokens_per_user: The largest number of tokens of a user; None cuts nothing.
        min_tokens: Users with fewer tokens are left out; None means `tokens_per_user`, or 1 if that is None too.
        sequence, strip_quotes: See `EncodingOptions`.
        held_out: The fraction of held-out users; None means 0.05.
        public, salt: See `SplitRule`.
        name: The name of the corpus.
        choices: Other fields of `Preparation`.

    Raises:
        InputError: The column of the user or of the text is not named, or both are the same column.
        InvalidValue: An option has a value that is not allowed.
    """
    if is_demo:
        fields, name = CHITCHAT.fields, name or CHITCHAT.name
        tokens_per_user = tokens_per_user or CHITCHAT.encoding.tokens_per_user
        min_tokens = min_tokens or min(CHITCHAT.encoding.min_tokens, tokens_per_user or 1)
        held_out = CHITCHAT.splits.held_out if held_out is None else held_out
    if not fields.user or not fields.text:
        raise InputError("Name the columns with --user-field (the id of the user) and --text-field (the text).")
    if fields.user == fields.text:
        raise InputError(
            f"The user and the text are both the column '{fields.user}', so every post would be a user of its own. Name two "
            "columns: --user-field and --text-field."
        )
    return Preparation(
        fields=fields,
        encoding=EncodingOptions(
            sequence=sequence,
            min_tokens=min_tokens or tokens_per_user or 1,
            tokens_per_user=tokens_per_user,
            strip_quotes=strip_quotes,
        ),
        splits=SplitRule(held_out=0.05 if held_out is None else held_out, public=public, salt=salt),
        name=name,
        **choices,
    )


def choose_vocabulary(
    given: str | os.PathLike[str] | VocabularySource,
    tokenizer: Tokenizer,
    *,
    size: int = 10_000,
    language: str = "en",
    epsilon: float | None = None,
    delta: float | None = None,
    words_per_user: int = 100,
    corpus: str | None = None,
) -> VocabularySource:
    """Return the vocabulary source that the options of `unheard prepare` describe.

    Args:
        given: "public", "private", "from-corpus", "tokenizer", the path of a word list or of a store, or a
            `VocabularySource`, which is returned unchanged.
        tokenizer: The tokenizer of the store. If it is a tokenizer.json, "public" means all of its tokens.
        size: The number of words, including BOS, EOS and UNK.
        language: The language of a public list.
        epsilon, delta: The cost of a private vocabulary; required for "private" and not allowed otherwise.
        words_per_user: The number of words that each user votes for, if the vocabulary is private.
        corpus: The path of another, public corpus; required for "from-corpus" and not allowed otherwise.

    Raises:
        InvalidValue: The options contradict each other, or `given` is not a known word or an existing file.
    """
    if given == "private":
        if epsilon is None or delta is None:
            raise InvalidValue(
                "A private vocabulary needs its cost: --vocab-epsilon and --vocab-delta (in Python vocabulary_epsilon "
                "and vocabulary_delta)."
            )
        return PrivateVocabulary(epsilon=epsilon, delta=delta, size=size, words_per_user=words_per_user)
    if epsilon is not None or delta is not None:
        raise InvalidValue(
            "--vocab-epsilon and --vocab-delta (in Python vocabulary_epsilon and vocabulary_delta) go with --vocab "
            "private; a public vocabulary costs nothing."
        )
    if (given == "from-corpus") != (corpus is not None):
        raise InvalidValue("--vocab from-corpus and --vocab-corpus OTHER go together: give both or neither.")
    if not isinstance(given, str | os.PathLike):
        return given
    if given == "tokenizer" or (given == "public" and isinstance(tokenizer, HuggingFaceTokenizer)):
        return TokenizerVocabulary()
    if given == "public":
        return PublicVocabulary(size=size, language=language)
    path = Path(corpus or given)
    if corpus is not None or (path / "corpus.json").is_file():
        return CorpusVocabulary(path=str(corpus or path), size=size)
    if not path.is_file():  # checked here, since reading the text first may take hours
        kinds = ("public", "private", "from-corpus", "tokenizer")
        raise InvalidValue(
            f"--vocab {given} is neither a word list file nor a store, nor a known kind of vocabulary.{nearest(str(given), kinds)}"
        )
    return FileVocabulary(path=str(path), size=size)


def read_user_ids(path: Path) -> tuple[str, ...]:
    """Read a file of user ids, one per line: users to leave out, for example because they opted out.

    Raises:
        InputError: The file cannot be read, is not UTF-8, or has more than `MAX_BYTES_OF_IDS` bytes.
    """
    try:
        with open(storage.regular_file(path), "rb") as file:
            content = file.read(MAX_BYTES_OF_IDS + 1)
        if len(content) > MAX_BYTES_OF_IDS:
            raise InputError(
                f"--exclude-users {path} has more than {MAX_BYTES_OF_IDS:,} bytes: it is not a list of user ids."
            )
        return tuple(line for line in content.decode().split("\n") if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Cannot read --exclude-users {path}: {error}. Nothing was prepared.") from None
