"""The corpus package: reads posts, each with the id of the user who wrote it, and writes a token store.

No module of this package imports torch. The path of one line of text, with the module that handles each step:

    sources             finds the input files and their formats, groups them into batches, repairs truncated files
    conversion          SQLite databases, Hugging Face datasets and Python objects become files that DuckDB reads
    readers             the query that reads each file format, checks each row and assigns it to the shard of its user
    grouping            groups the rows by user with DuckDB and assigns users to splits; `spark` does it on a cluster
    tokenizers          split text into words, characters or the tokens of a tokenizer.json
    vocabulary          maps words to ids; the words come from a public list or, in `private_vocabulary`, from text
    encode              turns the posts of each user into one stream of ids
    store               the token store, the folder of all shards: the only input of training
    pipeline            runs all of these steps, and resumes after an interruption
    prepare             turns the options of `unheard prepare` into the input of the pipeline; `unheard.prepare`

On request the pipeline also plants secrets for audits (`canaries`). Other modules work on finished stores: `transform`
(a smaller vocabulary, a part of a store), `synthetic` (a store of any size for load tests) and `store_stats` (exact
counts for the owner of the data).

The paper's corpus (appendix, "Dataset") is one such store: 763,430 users with exactly 1,600 tokens each.
"""

import os
from collections.abc import Callable

Progress = Callable[[str, float], None]
"""A callback of long operations. Its arguments are the name of the current step and the finished fraction, 0 to 1."""


def no_progress(step: str, fraction: float) -> None:
    """Do nothing. This is the default callback of functions that take a `Progress`."""


AVAILABLE_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""The number of CPU cores that this process may use."""
