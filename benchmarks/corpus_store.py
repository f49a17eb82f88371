"""Measure a store of the paper's size: the time to make it, to open it, to draw a cohort and to read its users.

    python benchmarks/corpus_store.py FOLDER [USERS] [TOKENS]

FOLDER needs 3 GB for the paper's 763,430 users of 1,600 tokens. The store has the word statistics of the demo corpus
(chitchat). Reading is measured twice: just after opening, and again with the same cohort in the page cache.
"""

import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

import unheard
from unheard.corpus.store import TokenStore
from unheard.corpus.synthetic import synthesise
from unheard.mechanism.sampling import PoissonSampling
from unheard.randomness import secure_generator


def milliseconds(action, times: int) -> tuple[float, object]:
    """Call a function several times; return the median of its milliseconds, and its last result."""
    found, result = [], None
    for _ in range(times):
        began = time.perf_counter()
        result = action()
        found.append(1e3 * (time.perf_counter() - began))
    return float(np.median(found)), result


def main(folder: Path, users: int, tokens: int) -> None:
    """Make the store in a folder unless it exists, and print the times.

    Args:
        folder: The folder of the stores.
        users: Number of users.
        tokens: Tokens per user.
    """
    like = folder / "chitchat"
    store = TokenStore.open(like) if like.exists() else unheard.prepare("chitchat", like)
    if not (folder / "load").exists():
        began = time.perf_counter()
        synthesise(store, folder / "load", users=users, tokens_per_user=tokens)
        print(f"made {users:,} x {tokens:,} in {time.perf_counter() - began:.0f} s")
    taken, store = milliseconds(lambda: TokenStore.open(folder / "load"), 11)
    print(f"opened in {taken:.1f} ms")
    assert isinstance(store, TokenStore)
    sampling = PoissonSampling(users_per_round=5000)
    for population in (users, 10**8):
        taken, cohort = milliseconds(lambda n=population: sampling.draw(n, n, secure_generator()), 101)
        print(f"Poisson draw of about 5,000 from {population:,}: {taken:.2f} ms")
    cohort = np.sort(secure_generator().choice(users, 5000, replace=False))
    first, _ = milliseconds(lambda: store.train.users(cohort), 1)
    again, read = milliseconds(lambda: store.train.users(cohort), 11)
    assert isinstance(read, list)
    print(f"5,000 users, {sum(map(len, read)):,} ids: first {first:.0f} ms, from the page cache {again:.1f} ms")
    print(
        f"peak memory of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB, {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    given = [int(number) for number in sys.argv[2:4]]
    main(Path(sys.argv[1]), *(given + [763_430, 1_600][len(given) :]))
