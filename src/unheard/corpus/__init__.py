"""The corpus package: reads text that is labelled with its author and writes a token store. It never imports torch.

The path of one line of text, with the module that handles each step:

    sources             which files there are, their formats, how they are grouped into batches; truncated files
    conversion          SQLite databases, Hugging Face datasets and Python objects become files that DuckDB reads
    readers             the query that reads each file format, checks each row and assigns it to the shard of its user
    grouping            the grouping by user, and which users train; on one machine with DuckDB, spark on a cluster
    tokenizers          text to words, characters or the tokens of a tokenizer.json
    vocabulary          words to ids, and where the words come from; private_vocabulary counts them in text
    encode              the posts of each user become one stream of ids
    store               the token store, the folder of all shards: the only thing that training reads
    pipeline            runs all of these steps, and resumes after an interruption
    prepare             the public function `unheard.prepare`

On request the pipeline also plants secrets for audits (`canaries`) and writes the owner's map of user ids (`user_map`).
Other modules work on finished stores: `transform` (a smaller vocabulary, a part of a store), `synthetic` (a store of any
size for load tests) and `store_stats` (exact counts for the owner of the data).

The paper's corpus (appendix, "Dataset") is one such store: 763,430 users with exactly 1,600 tokens each.
"""

import os
from collections.abc import Callable

Progress = Callable[[str, float], None]
"""A function that long operations call with the name of the current step and the finished fraction of it."""


def no_progress(step: str, fraction: float) -> None:
    """The default `Progress`: reports nothing."""


AVAILABLE_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""The number of CPU cores that this process may use."""
