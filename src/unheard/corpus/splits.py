"""Who trains and who is held out: decided for each user alone, from a salt, the same on every machine and engine.

In: a user's id and a salt. Out: train, held_out or public. A user is in one split with everything they wrote, so a
measurement on held-out text never meets a person that the model was trained on.
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
    """Fractions of users, by a hash of salt and id. Depends on no other user, so it needs no privacy budget."""

    held_out: float = 0.05
    public: float = 0.0
    salt: str = "unheard"

    def __post_init__(self) -> None:
        require(0 <= self.held_out < 1, f"held_out must be in [0, 1), not {self.held_out}.")
        require(0 <= self.public < 1, f"public must be in [0, 1), not {self.public}.")
        require(self.held_out + self.public < 1, "held_out and public together leave no user to train on.")

    def split_of(self, user: str) -> str:
        point = unit_hash(user, after=self._front)
        if point < self.held_out:
            return "held_out"
        return "public" if point < self.held_out + self.public else "train"

    @cached_property
    def _front(self) -> bytes:
        return labels_bytes(self.salt, "split")

    def names(self) -> tuple[str, ...]:
        return ("train", "held_out", "public") if self.public else ("train", "held_out")


def unit_hash(*labels: str, after: bytes = b"") -> float:
    """A number in [0, 1) that is a fixed, even function of its labels (and of those `after` which they come)."""
    return int.from_bytes(hashlib.sha256(after + labels_bytes(*labels)).digest()[:6], "little") / 2.0**48


def labels_bytes(*labels: str) -> bytes:
    """Each label after its length: no two lists of labels read alike."""
    message = b""
    for label in labels:
        encoded = label.encode("utf-8", "surrogatepass")
        message += len(encoded).to_bytes(8, "little") + encoded
    return message


def draw_test_posts(held_out: UserTokens, num_tokens: int, salt: str) -> list[np.ndarray]:
    """Random posts of held-out users up to exactly `num_tokens` predicted tokens, if there are as many.

    The paper's test set: 75,122 tokens of random held-out posts. The last post is cut to fit.
    """
    starts = [np.flatnonzero(block == BOS) for block in _users_of(held_out)]
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


def _users_of(users: UserTokens):
    return (users.tokens(k) for k in range(users.num_users))
