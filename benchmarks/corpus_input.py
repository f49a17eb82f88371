"""Write a synthetic input for load tests: JSON lines like the export of a message board.

    python benchmarks/corpus_input.py OUT.jsonl GIBIBYTES [USERS]

Words are drawn by their public frequencies; no text is from a real person. A few users write much and most write little
(user n writes in proportion to n^(-2/3)). Posts have 35 words on average, and are not in order of time.
"""

import json
import sys

import numpy as np
from wordfreq import get_frequency_dict

WORDS = 200_000
"""Number of different words."""
POSTS_AT_ONCE = 20_000
"""Number of posts that are drawn and written together."""


def write_input(path: str, gibibytes: float, users: int) -> int:
    """Write the input and return the number of posts.

    Args:
        path: The file to write.
        gibibytes: Its least size.
        users: Number of users.
    """
    frequencies = get_frequency_dict("en")
    words = np.array(list(frequencies)[:WORDS], dtype=object)
    weights = np.array([frequencies[word] for word in words])
    cumulative = np.cumsum(weights / weights.sum())
    generator = np.random.Generator(np.random.Philox(1))
    written = posts = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < gibibytes * (1 << 30):
            lengths = generator.geometric(1 / 35, size=POSTS_AT_ONCE)
            drawn = words[np.minimum(np.searchsorted(cumulative, generator.random(lengths.sum())), WORDS - 1)].tolist()
            authors = (users * generator.random(POSTS_AT_ONCE) ** 3).astype(int).tolist()
            lines, begin = [], 0
            for length, author in zip(lengths.tolist(), authors, strict=True):
                text = drawn[begin : begin + length]
                begin += length
                text[6::9] = [word + "," for word in text[6::9]]
                text[0] = text[0].capitalize()
                posts += 1
                row = {"id": f"t1_{posts:x}", "author": f"user_{author}", "subreddit": "all", "score": author % 50}
                row |= {"created_utc": 1_300_000_000 + posts * 7_919 % 100_000_000, "body": " ".join(text) + "."}
                lines.append(json.dumps(row))
            block = "\n".join(lines) + "\n"
            file.write(block)
            written += len(block)
    return posts


if __name__ == "__main__":
    write_input(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 200_000)
