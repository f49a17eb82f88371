"""Random phrases to plant in users' text before an exposure audit, and the record of the phrases that a store holds.

The order of work:

    unheard canaries corpora/chat --out canaries.jsonl                   draw_canaries: random phrases of known words
    unheard prepare posts.jsonl --canaries canaries.jsonl --out ...      corpus/canaries.py plants them
    unheard train ...; unheard audit runs/first                          read_canaries; audit/exposure.py ranks them

Phrases that no user carries (0 users) are controls: the audit must not find them.
This module does not import torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unheard.config import parse_json
from unheard.corpus.canaries import Canary
from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import CorpusCorrupt, CorpusMissing, InvalidValue

FILE = "canaries.json"
"""The record of planted phrases in a store. It names their carriers, so only the owner of the store may read it."""
MAX_TOKENS = 10_000
FIRST_WORD = 3
"""Token ids below are BOS, EOS and UNK."""
FEWEST_WORDS = 10


def draw_canaries(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    *,
    carriers: Sequence[int] = (0, 1, 14, 200),
    each: int = 3,
    words: int = 5,
    repeats: int = 1,
) -> list[Canary]:
    """Draws phrases of independent, uniformly random words, which no user writes by accident.

    Args:
        vocabulary: Where the words come from. Only words of lower-case letters are used.
        rng: A secure generator: a phrase that can be guessed is no secret.
        carriers: Numbers of users; each number makes a group of phrases carried by so many users.
        each: The number of phrases in a group.
        words: The number of words in a phrase.
        repeats: How often each carrier writes its phrase.

    Returns:
        The phrases, `each` for every entry of `carriers`.

    Raises:
        InvalidValue: The vocabulary has too few words of lower-case letters.
    """
    known = (vocabulary.word(i) for i in range(FIRST_WORD, len(vocabulary)))
    choices = [word for word in known if word.isalpha() and word == word.lower()]
    if len(choices) < FEWEST_WORDS:
        raise InvalidValue("The vocabulary has too few plain words to draw secrets from: give a larger vocabulary.")
    return [
        Canary(
            text=" ".join(choices[int(i)] for i in rng.integers(len(choices), size=words)), users=users, repeats=repeats
        )
        for users in carriers
        for _ in range(each)
    ]


def has_canaries(store: Path) -> bool:
    """Whether phrases were planted in a store."""
    return (store / FILE).is_file()


def read_canaries(store: Path, vocabulary_size: int) -> list[dict[str, Any]]:
    """Reads the record of planted phrases, which is private.

    Args:
        store: A token store prepared with canaries.
        vocabulary_size: The size of the model's vocabulary; every token must be below.

    Returns:
        For each phrase a dictionary with `tokens`, `carriers` (how many users carry it) and `repeats`, among others.

    Raises:
        CorpusMissing: Nothing was planted in this store.
        CorpusCorrupt: The record does not read back.
    """
    file = store / FILE
    if not has_canaries(store):
        raise CorpusMissing(
            f"{store} has no canaries: none were planted. Draw some with `unheard canaries`, then `unheard prepare --canaries`."
        )
    try:
        record = parse_json(file.read_text(encoding="utf-8"))
        for canary in record:
            tokens = [int(t) for t in canary["tokens"]]
            if not tokens or len(tokens) > MAX_TOKENS or not all(0 <= t < vocabulary_size for t in tokens):
                raise ValueError
            canary["tokens"], canary["carriers"] = tokens, len(canary["users"])
            canary["repeats"] = int(canary["repeats"])
    except (ValueError, TypeError, KeyError, OSError):
        raise CorpusCorrupt(f"{file} does not read back as written: prepare the store again.") from None
    return record
