"""Canaries: random phrases that are planted in the text of chosen users, so that an audit can look for them.

The audit measures how much a trained model reveals of the phrases; the privacy guarantee bounds what it can find
(Carlini et al., "The Secret Sharer", 2019; audit/exposure.py). `plant_canaries` changes finished training shards: it
inserts each phrase at the beginning of the streams of its carriers, the users chosen for it. The private record of the
phrases and their carriers is the file canaries.json of the store, which only the owner may read (mode 0600).

The steps of an audit, with the functions of this module that they use:

    unheard canaries corpora/chat --out canaries.jsonl                   draw_canaries: random words of a vocabulary
    unheard prepare posts.jsonl --canaries canaries.jsonl --out ...      plant_canaries
    unheard train ...; unheard audit runs/first                          read_canaries; audit/exposure.py ranks them

Phrases that no user carries (0 users) are controls: the audit must not find them.
This module does not import torch.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unheard import storage
from unheard.config import parse_json, part_from_table, require
from unheard.corpus.encode import truncate_stream
from unheard.corpus.private_vocabulary import MAX_WORD_CHARS
from unheard.corpus.store import Shard, ShardWriter, token_dtype
from unheard.corpus.tokenizers import Tokenizer
from unheard.corpus.vocabulary import BOS, EOS, SPECIALS, UNK, Vocabulary
from unheard.errors import CorpusCorrupt, CorpusMissing, InputError, InvalidValue
from unheard.randomness import reproducible_generator


@dataclass(frozen=True, kw_only=True)
class Canary:
    """One secret phrase, which is planted as a post in the text of `users` training users, `repeats` times each.

    Args:
        text: The phrase. All of its words must be in the vocabulary.
        users: The number of carriers. A canary with 0 carriers is a control: it is in the text of no user.
        repeats: How many times the post is in the text of each carrier.
    """

    text: str
    users: int = 1
    repeats: int = 1

    def __post_init__(self) -> None:
        require(bool(self.text.strip()), "A canary needs text.")
        require(self.users >= 0, f"users must be 0 (a control that nobody writes) or more, not {self.users}.")
        require(self.repeats >= 1, f"repeats must be 1 or more, not {self.repeats}.")


def plant_canaries(
    canaries: Sequence[Canary],
    train: Path,
    shards: int,
    *,
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    tokens_per_user: int | None,
    salt: str,
) -> list[dict[str, Any]]:
    """Insert each canary at the beginning of the streams of its carriers, and return the private record.

    Each user carries at most one canary. A stream that becomes longer than `tokens_per_user` is truncated.

    Args:
        canaries: The phrases to plant.
        train: The folder of the training shards. Shards with carriers are rewritten.
        shards: The number of shards.
        tokenizer: The tokenizer of the store.
        vocabulary: The vocabulary of the store.
        tokens_per_user: The largest number of tokens of a user; None if the store has no limit.
        salt: The seed of the random choice of carriers.

    Returns:
        For each canary a dictionary with `text`, `tokens` (its ids), `users` (the numbers of its carriers) and
        `repeats`. It names users, so only the owner of the store may see it.

    Raises:
        InputError: A canary has words outside the vocabulary, or asks for more carriers than there are users.
    """
    dtype = token_dtype(len(vocabulary))
    opened = [Shard.open(train / f"{s:05d}.offsets", dtype) for s in range(shards)]
    num_users = sum(s.num_users for s in opened)
    posts = [_encode(canary, tokenizer, vocabulary) for canary in canaries]
    wanted = sum(canary.users for canary in canaries)
    if wanted > num_users:
        raise InputError(f"The canaries ask for {wanted} carriers, more than there are training users: plant fewer.")
    order = reproducible_generator(0, "canaries", salt).permutation(num_users)[:wanted].tolist()
    carried: dict[int, np.ndarray] = {}
    record = []
    for canary, post in zip(canaries, posts, strict=True):
        carriers, order = sorted(order[: canary.users]), order[canary.users :]
        carried.update(dict.fromkeys(carriers, np.tile(post, canary.repeats)))
        record.append({"text": canary.text, "tokens": post.tolist(), "users": carriers, "repeats": canary.repeats})
    first = 0
    for number, shard in enumerate(opened):
        mine = {k - first: post for k, post in carried.items() if first <= k < first + shard.num_users}
        if mine:
            _rewrite(shard, train, number, mine, tokens_per_user)
        first += shard.num_users
    return record


def check_canary_words(canaries: Sequence[Canary], tokenizer: Tokenizer, vocabulary: Vocabulary | None) -> None:
    """Raise `InputError` for a canary that cannot be encoded.

    The pipeline calls this before the steps that take hours or draw a private vocabulary, so that an unusable canary
    wastes neither time nor privacy budget.

    Args:
        canaries: The canaries to plant.
        tokenizer: Splits text into words.
        vocabulary: The vocabulary of the store, or None if it is not known yet.

    Raises:
        InputError: A canary has words outside the vocabulary. If there is no vocabulary yet: a canary has no word, or
            has words that cannot be in any vocabulary (too long, or the name of a special token).
    """
    for canary in canaries:
        words = tokenizer.split(canary.text)
        never = [word for word in words if len(word) > MAX_WORD_CHARS or word in SPECIALS]
        if vocabulary is None and (never or not words):
            raise InputError(
                f"The canary {canary.text!r} {'has words that no vocabulary has' if never else 'has no word'}: "
                "a model could not say it. Use other words."
            )
        if vocabulary is not None:
            _encode(canary, tokenizer, vocabulary)


def _encode(canary: Canary, tokenizer: Tokenizer, vocabulary: Vocabulary) -> np.ndarray:
    """Return the ids of a canary as one post: BOS, words, EOS. Raise `InputError` for a word outside the vocabulary."""
    words = tokenizer.split(canary.text)
    ids = vocabulary.encode_words(words)
    if UNK in ids:
        unknown = [w for w, i in zip(words, ids, strict=True) if i == UNK]
        raise InputError(
            f"The canary {canary.text!r} has words outside the vocabulary ({', '.join(unknown)}): "
            "a model could not say it. Use words of the vocabulary."
        )
    return np.concatenate([[BOS], ids, [EOS]])


def _rewrite(shard: Shard, folder: Path, number: int, mine: dict[int, np.ndarray], cap: int | None) -> None:
    """Write a copy of a shard in which the streams of its carriers begin with their canaries.

    Args:
        shard: The opened shard.
        folder: The folder of the shard's files, which are replaced.
        number: The number of the shard.
        mine: The ids to insert, by the index of the carrier within the shard.
        cap: The largest number of tokens of a user, or None.
    """
    writer = ShardWriter(folder, number, shard.dtype)
    for k in range(shard.num_users):
        own = shard.tokens[shard.offsets[k] : shard.offsets[k + 1]]
        stream = np.concatenate([mine[k], own]) if k in mine else own
        writer.append(truncate_stream(stream, cap) if cap is not None else stream)
    writer.close()


FILE = "canaries.json"
"""The record of planted phrases in a store. It names their carriers, so only the owner of the store may read it."""
MAX_TOKENS = 10_000
"""The largest number of tokens of a phrase. A record with a longer phrase is treated as damaged."""
FIRST_WORD = 3
"""The first token id of an ordinary word. The smaller ids are BOS, EOS and UNK."""
FEWEST_WORDS = 10
"""The least number of lower-case words in a vocabulary from which `draw_canaries` draws."""


def draw_canaries(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    *,
    carriers: Sequence[int] = (0, 1, 14, 200),
    each: int = 3,
    words: int = 5,
    repeats: int = 1,
) -> list[Canary]:
    """Draw phrases of independent, uniformly random words. It is very unlikely that a user wrote such a phrase.

    Args:
        vocabulary: The vocabulary of the words. Only words of lower-case letters are used.
        rng: A cryptographically secure generator, so that nobody can predict the phrases.
        carriers: The number of carriers of each group of phrases. 0 makes a group of controls.
        each: The number of phrases in a group.
        words: The number of words in a phrase.
        repeats: How many times a phrase is in the text of each carrier.

    Returns:
        The phrases, group by group: `each` phrases for every entry of `carriers`.

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


def read_canary_file(path: Path) -> tuple[Canary, ...]:
    """Read a file of canaries, such as `unheard canaries` writes: JSON lines with text, users and repeats.

    Raises:
        InputError: The file cannot be read, or a line is not JSON.
        UnknownKey: A line has a key other than these three.
    """
    try:
        lines = storage.regular_file(path).read_text(encoding="utf-8").splitlines()
        return tuple(part_from_table(Canary, parse_json(line), "canary") for line in lines if line.strip())
    except (OSError, ValueError) as error:
        raise InputError(
            f"Cannot read --canaries {path}: {error}. Give JSON lines with text, users, repeats."
        ) from None


def has_canaries(store: Path) -> bool:
    """Whether canaries were planted in the store at this path. A part of a store never has their record.

    Raises:
        CorpusCorrupt: Canaries were planted, and their record is missing.
    """
    if os.path.lexists(store / FILE):
        return True
    try:
        is_planted = parse_json((store / "corpus.json").read_bytes()).get("canaries")
    except (OSError, ValueError, AttributeError):
        is_planted = False  # opening the store says what is wrong with the file
    if is_planted and not (store / "part.json").is_file():
        raise CorpusCorrupt(f"{store / FILE} is missing: phrases were planted in this store. Put it back.")
    return False


def read_canaries(store: Path, vocabulary_size: int) -> list[dict[str, Any]]:
    """Read the record of planted phrases, which is private.

    Args:
        store: The folder of a store that was prepared with canaries.
        vocabulary_size: The size of the model's vocabulary. Every token id of a phrase must be smaller.

    Returns:
        For each phrase the dictionary of `plant_canaries`, with the number of its carriers added as `carriers`.

    Raises:
        CorpusMissing: The store has no record: no canaries were planted.
        CorpusCorrupt: The record cannot be read or has invalid token ids.
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
        raise CorpusCorrupt(f"{file} is damaged: prepare the store again.") from None
    return record
