"""Known secrets in chosen users, so that an audit can ask later what of them the model gives away.

In: phrases, how many users carry each and how often; finished training streams. Out: the streams with the phrases in
them, and a record of who carries what, kept apart (canaries.json, mode 0600). Paper: the guarantee bounds what such a
test can find.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unheard.config import require
from unheard.corpus.encode import cut
from unheard.corpus.shards import Shard, ShardWriter, token_dtype
from unheard.corpus.vocabulary import BOS, EOS, UNK, Vocabulary
from unheard.errors import InputError
from unheard.randomness import reproducible_generator

if TYPE_CHECKING:
    from unheard.corpus.pipeline import Preparation


@dataclass(frozen=True, kw_only=True)
class Canary:
    """One secret: a post that `users` training users each write `repeats` times. With `users` = 0 it is a control."""

    text: str
    users: int = 1
    repeats: int = 1

    def __post_init__(self) -> None:
        require(bool(self.text.strip()), "A canary needs text.")
        require(self.users >= 0, f"users must be 0 (a control that nobody writes) or more, not {self.users}.")
        require(self.repeats >= 1, f"repeats must be 1 or more, not {self.repeats}.")


def plant(
    canaries: Sequence[Canary], train: Path, shards: int, vocabulary: Vocabulary, preparation: "Preparation"
) -> list[dict[str, Any]]:
    """Put every canary at the front of its carriers' streams, which keep their cap. No user carries two."""
    dtype = token_dtype(len(vocabulary))
    found = [Shard.found(train / f"{s:05d}.offsets", dtype) for s in range(shards)]
    num_users = sum(s.num_users for s in found)
    posts = [_post(canary, vocabulary, preparation) for canary in canaries]
    wanted = sum(canary.users for canary in canaries)
    if wanted > num_users:
        raise InputError(f"The canaries ask for {wanted} carriers, more than there are training users: plant fewer.")
    order = reproducible_generator(0, "canaries", preparation.splits.salt).permutation(num_users)[:wanted].tolist()
    carried: dict[int, np.ndarray] = {}
    record = []
    for canary, post in zip(canaries, posts, strict=True):
        carriers, order = sorted(order[: canary.users]), order[canary.users :]
        carried.update(dict.fromkeys(carriers, np.tile(post, canary.repeats)))
        record.append({"text": canary.text, "tokens": post.tolist(), "users": carriers, "repeats": canary.repeats})
    first = 0
    for number, shard in enumerate(found):
        mine = {k - first: post for k, post in carried.items() if first <= k < first + shard.num_users}
        if mine:
            _rewrite(shard, train, number, mine, preparation.encoding.tokens_per_user)
        first += shard.num_users
    return record


def _post(canary: Canary, vocabulary: Vocabulary, preparation: "Preparation") -> np.ndarray:
    words = preparation.tokenizer.split(canary.text)
    ids = vocabulary.encode_words(words)
    if UNK in ids:
        lost = [w for w, i in zip(words, ids, strict=True) if i == UNK]
        raise InputError(
            f"The canary {canary.text!r} has words outside the vocabulary ({', '.join(lost)}): "
            "a model could not say it. Use words of the vocabulary."
        )
    return np.concatenate([[BOS], ids, [EOS]])


def _rewrite(shard: Shard, folder: Path, number: int, mine: dict[int, np.ndarray], cap: int | None) -> None:
    """The shard again with its carriers changed: one sequential copy, put in place at the end."""
    writer = ShardWriter(folder, number, shard.dtype)
    for k in range(shard.num_users):
        own = shard.tokens[shard.offsets[k] : shard.offsets[k + 1]]
        stream = np.concatenate([mine[k], own]) if k in mine else own
        writer.append(cut(stream, cap) if cap is not None else stream)
    writer.close()
