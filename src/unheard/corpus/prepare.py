"""The public function `unheard.prepare`, which makes a token store of files or Python objects.

    import unheard

    store = unheard.prepare("posts.parquet", "corpora/posts", user="uid", text="msg", tokens_per_user=1600)
    store = unheard.prepare(rows, "corpora/posts")       # dicts, a pandas or Arrow table, a Hugging Face Dataset

The store is the same as that of the command `unheard prepare` for the same rows. Python objects are first written to a
temporary file next to the store. If the text does not fit in memory, give paths of files.
"""

import os
from collections.abc import Iterable
from typing import Any, Literal

from unheard.corpus import Progress, no_progress
from unheard.corpus.conversion import opened_sources
from unheard.corpus.grouping import DuckDBBackend
from unheard.corpus.pipeline import build_store, choose_vocabulary, make_preparation
from unheard.corpus.sources import Fields, is_demo_corpus
from unheard.corpus.store import TokenStore
from unheard.corpus.tokenizers import Tokenizer, choose_tokenizer
from unheard.corpus.vocabulary import VocabularySource


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
