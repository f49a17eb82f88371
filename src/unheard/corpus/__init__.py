"""The corpus package: reads text that is labelled with its author and writes a token store. It never imports torch.

The path of one line of text, with the module that handles each step:

    sources             which files there are, their formats, how they are grouped into batches; truncated files
    conversion          SQLite databases, Hugging Face datasets and Python objects become files that DuckDB reads
    readers             SQL for each file format: one row (problem, user, text, time) per record
    scan                the query that checks each row, normalises the user id and assigns the row to a shard
    backends            the grouping by user, on one machine (duckdb) or on a cluster (spark)
    tokenizers          text to words, characters or the tokens of a tokenizer.json
    vocabulary          words to ids; vocabulary_sources and private_vocabulary decide which words
    splits              which users train and which are held out
    encode              the posts of each user become one stream of ids; fast_encoder makes this fast
    shards              the files of ids: NNNNN.tokens and NNNNN.offsets
    store               the token store, the folder of all shards: the only thing that training reads
    pipeline            runs all of these steps, and resumes after an interruption
    prepare             the public function `unheard.prepare`

Other modules work on finished stores: `canaries` (planted secrets for audits), `transform` (a smaller vocabulary, a
part of a store), `synthetic` (a store of any size for load tests) and `store_stats` (exact counts for the owner of the
data).

The paper's corpus (appendix, "Dataset") is one such store: 763,430 users with exactly 1,600 tokens each.
"""

import os
from collections.abc import Callable

Progress = Callable[[str, float], None]
"""A function that long operations call with the name of the current step and the finished fraction of it."""


def no_progress(step: str, fraction: float) -> None:
    """The default `Progress`: reports nothing."""


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
