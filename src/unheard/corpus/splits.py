"""Assigns users to the splits train, held_out and public, and draws test posts from the held-out users.

The split of a user depends on a hash of the user's id and a salt, and on nothing else: it is the same on every machine
and with every backend, and it needs no privacy budget, since no other user influences it. A user is in one split with
all of their text, so held-out text never comes from a user that the model was trained on.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unheard.config import require
from unheard.corpus.store import UserTokens
from unheard.corpus.vocabulary import BOS


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """The fractions of users in each split; the rest train.

    Args:
        held_out: The fraction of held-out users, on whom models are evaluated.
        public: The fraction of users whose text is public, for training without privacy cost.
        salt: Another salt gives another random split.

    Example:
        >>> SplitRule(held_out=0.5).split_of("ann")
        'held_out'
    """

    held_out: float = 0.05
    public: float = 0.0
    salt: str = "unheard"

    def __post_init__(self) -> None:
        require(0 <= self.held_out < 1, f"held_out must be in [0, 1), not {self.held_out}.")
        require(0 <= self.public < 1, f"public must be in [0, 1), not {self.public}.")
        require(self.held_out + self.public < 1, "held_out and public together leave no user to train on.")

    def split_of(self, user: str) -> str:
        """Return the split of a user: "train", "held_out" or "public"."""
        point = unit_hash(user, prefix=self._prefix)
        if point < self.held_out:
            return "held_out"
        return "public" if point < self.held_out + self.public else "train"

    @cached_property
    def _prefix(self) -> bytes:
        return encode_labels(self.salt, "split")

    def names(self) -> tuple[str, ...]:
        """The splits that the store has."""
        return ("train", "held_out", "public") if self.public else ("train", "held_out")


def unit_hash(*labels: str, prefix: bytes = b"") -> float:
    """Return a pseudo-random number in [0, 1) that depends on the labels alone (and on those encoded in `prefix`)."""
    return int.from_bytes(hashlib.sha256(prefix + encode_labels(*labels)).digest()[:6], "little") / 2.0**48


def encode_labels(*labels: str) -> bytes:
    """Encode labels with their lengths, so that different lists of labels have different encodings."""
    message = b""
    for label in labels:
        encoded = label.encode("utf-8", "surrogatepass")
        message += len(encoded).to_bytes(8, "little") + encoded
    return message


def draw_test_posts(held_out: UserTokens, num_tokens: int, salt: str) -> list[np.ndarray]:
    """Draw random posts of held-out users until they have exactly `num_tokens` predicted tokens (all ids except BOS).

    The paper's test set is 75,122 tokens of random held-out posts. The last post is cut to fit. The result has fewer
    tokens if the held-out users have fewer.
    """
    starts = [np.flatnonzero(held_out.tokens(k) == BOS) for k in range(held_out.num_users)]
    owner = np.repeat(np.arange(len(starts)), [len(s) for s in starts])
    start = np.concatenate(starts) if starts else np.empty(0, dtype=np.int64)
    seed = int.from_bytes(hashlib.sha256(f"test posts\0{salt}".encode()).digest()[:8], "little")
    posts, left = [], num_tokens
    for i in np.random.Generator(np.random.Philox(seed)).permutation(len(start)).tolist():
        if left <= 0:
            break
        tokens = held_out.tokens(int(owner[i]))[start[i] :]
        ends = np.flatnonzero(tokens[1:] == BOS)
        post = tokens[: int(ends[0]) + 1 if len(ends) else len(tokens)][: left + 1]
        posts.append(np.array(post))
        left -= len(post) - 1
    return posts
