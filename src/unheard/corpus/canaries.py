"""Plants canaries (known secrets) in the text of chosen users. An audit measures how much a model reveals of them.

`plant_canaries` changes finished training shards: it puts each phrase in front of the streams of its carriers. The
record of who carries what is kept apart from the store's public files (canaries.json, mode 0600). The privacy guarantee
bounds what the audit can find (Carlini et al., "The Secret Sharer", 2019; audit/exposure.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unheard.config import require
from unheard.corpus.encode import truncate_stream
from unheard.corpus.private_vocabulary import MAX_WORD_CHARS
from unheard.corpus.shards import Shard, ShardWriter, token_dtype
from unheard.corpus.tokenizers import Tokenizer
from unheard.corpus.vocabulary import BOS, EOS, SPECIALS, UNK, Vocabulary
from unheard.errors import InputError
from unheard.randomness import reproducible_generator


@dataclass(frozen=True, kw_only=True)
class Canary:
    """One secret: a post that `users` training users each write `repeats` times.

    Args:
        text: The secret. All of its words must be in the vocabulary.
        users: The number of carriers. With 0 the canary is a control, which nobody writes.
        repeats: How often each carrier writes it.
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
    """Put each canary in front of the streams of its carriers, which stay within the cap. No user carries two.

    Args:
        canaries: The secrets.
        train: The folder of the training shards, which are rewritten.
        shards: The number of shards.
        tokenizer: The tokenizer of the store.
        vocabulary: The vocabulary of the store.
        tokens_per_user: The cap of the store.
        salt: Decides who the carriers are.

    Returns:
        The record: text, ids, carriers and repeats of each canary.

    Raises:
        InputError: A canary has words outside the vocabulary, or there are not enough users.
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
    """Check the canaries before hours of work, and before the draw of a private vocabulary.

    Args:
        canaries: The canaries to plant.
        tokenizer: Splits text into words.
        vocabulary: The words of the ids; None if they are not known yet. Then only words that no vocabulary has are
            refused.

    Raises:
        InputError: A canary has no word, or words outside the vocabulary.
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
    """Write the shard again with its carriers changed, in one sequential copy."""
    writer = ShardWriter(folder, number, shard.dtype)
    for k in range(shard.num_users):
        own = shard.tokens[shard.offsets[k] : shard.offsets[k + 1]]
        stream = np.concatenate([mine[k], own]) if k in mine else own
        writer.append(truncate_stream(stream, cap) if cap is not None else stream)
    writer.close()
