"""The baseline of corpus_throughput.py: a simple script with pandas, a regular expression and a dictionary of words.

It does the same work as `unheard prepare` on the same file: group by author, order by time, split into lower-case words
and punctuation, add BOS and EOS, cut each user at a number of tokens, write one flat array and its offsets. It reads
the whole file into memory.

    python benchmarks/corpus_baseline.py INPUT.jsonl OUT TOKENS_PER_USER
"""

import re
import sys
import time
import unicodedata

import numpy as np
import pandas as pd

from unheard.corpus.vocabulary import public_vocabulary

PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "\u200b": "", "\ufeff": "", "\0": " "})
WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*|[^\s]")


def main(path: str, out: str, cap: int) -> None:
    """Write the token ids of a file of JSON lines to OUT.tokens and OUT.offsets.

    Args:
        path: The input, with `author`, `created_utc` and `body`.
        out: Beginning of the names of the files to write.
        cap: Largest number of tokens per user.
    """
    ids = {word: i for i, word in enumerate(public_vocabulary().words)}
    frame = pd.read_json(path, lines=True, dtype=False)
    frame = frame.sort_values(["author", "created_utc"], kind="stable")
    flat: list[int] = []
    offsets = [0]
    for _, posts in frame.groupby("author", sort=True)["body"]:
        count = 0
        for text in posts:
            words = WORD.findall(unicodedata.normalize("NFC", text).translate(PLAIN).lower())
            if not words or count >= cap:
                continue
            taken = ([ids.get(word, 2) for word in words] + [1])[: cap - count]
            flat.append(0)
            flat.extend(taken)
            count += len(taken)
        offsets.append(len(flat))
    np.array(flat, dtype=np.uint16).tofile(out + ".tokens")
    np.array(offsets, dtype=np.int64).tofile(out + ".offsets")


if __name__ == "__main__":
    began = time.perf_counter()
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(time.perf_counter() - began)
