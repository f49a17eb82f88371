"""Finds the users' own words with user-level differential privacy: bounded votes, Gaussian noise, a threshold.

Each user votes for at most D0 words, with votes of L2 norm at most 1. The votes of each word are summed, Gaussian noise
is added, and the words whose noisy sum exceeds a threshold are released. This costs two events: a Gaussian mechanism,
and the probability that a word which only one user wrote exceeds the threshold.

    release = WordRelease.for_budget(epsilon=1.0, delta=1e-9, words_per_user=100)
    votes = release.vote(len(release.choose(words_of_user, salt, user)))
    passed, noisy = release.release(sums, generator)
    release.events()              # the cost, which every run on the store pays

It is the weighted Gaussian mechanism for set union (Gopi et al., "Differentially Private Set Union", ICML 2020). The
proof is in docs/private-vocabulary.md. The paper's appendix "Model" asks for such a mechanism and leaves it out.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from unheard.config import require
from unheard.privacy.events import Event, FailureProbability, Gaussian

UNIT = 1 << 30
"""The vote 1.0. Votes are integers, so that sums are exact in any order and their low bits reveal nothing."""

MAX_WORD_CHARS = 64
"""Longer words get no votes."""

MAX_EPSILON, MAX_WORDS_PER_USER, MAX_NOISE = 1000.0, 1_000_000, 2.0**28
"""Limits of what is computed: a larger epsilon says nothing, and wider noise would overflow the integers."""


@dataclass(frozen=True, kw_only=True)
class WordRelease:
    """The mechanism: each user votes for at most `words_per_user` words, with an L2 norm of at most `UNIT`.

    Args:
        noise_multiplier: The standard deviation of the noise, in units of the sensitivity.
        threshold_delta: The probability that a word of one user alone is released.
        words_per_user: The largest number of words that a user votes for (D0).
    """

    noise_multiplier: float
    threshold_delta: float
    words_per_user: int

    def __post_init__(self) -> None:
        require(
            0 < self.noise_multiplier <= MAX_NOISE,
            f"noise_multiplier must be above 0 and at most {MAX_NOISE:g}, not {self.noise_multiplier}.",
        )
        require(0 < self.threshold_delta < 1, f"threshold_delta must be in (0, 1), not {self.threshold_delta}.")
        require(
            1 <= self.words_per_user <= MAX_WORDS_PER_USER,
            f"words_per_user must be from 1 to {MAX_WORDS_PER_USER:,}, not {self.words_per_user}.",
        )

    @classmethod
    def for_budget(cls, epsilon: float, delta: float, words_per_user: int) -> "WordRelease":
        """Return the mechanism that costs (epsilon, delta): half of delta for the noise, half for the threshold."""
        import dp_accounting

        require(0 < epsilon <= MAX_EPSILON, f"epsilon must be above 0 and at most {MAX_EPSILON:g}, not {epsilon}.")
        require(0 < delta < 1, f"delta must be in (0, 1), not {delta}.")
        with np.errstate(all="ignore"):  # the search passes through deviations that it rejects
            noise_multiplier = dp_accounting.get_sigma_gaussian(epsilon, delta / 2)
        return cls(noise_multiplier=noise_multiplier, threshold_delta=delta / 2, words_per_user=words_per_user)

    def choose(self, words: Iterable[str], salt: str, user: str) -> list[str]:
        """Return the words that a user votes for: all, or a pseudo-random choice that depends on no other user."""
        words = list(words)
        if len(words) <= self.words_per_user:
            return words
        key = hashlib.sha256(f"{len(salt)}:{salt}{user}".encode("utf-8", "surrogatepass")).digest()
        words.sort(key=lambda w: hashlib.blake2b(w.encode("utf-8", "surrogatepass"), key=key, digest_size=8).digest())
        # DP: no user votes for more words than the threshold was computed for.
        return words[: self.words_per_user]

    def vote(self, num_words: int) -> int:
        """Return the vote for each of a user's words: 1/sqrt(num_words), rounded down. Their norm is at most UNIT."""
        # DP: rounding down keeps num_words * vote^2 <= UNIT^2, the sensitivity that the noise is scaled to.
        return math.isqrt(UNIT * UNIT // num_words)

    def threshold(self) -> int:
        """Return the smallest T that all words of one user alone stay below with probability exp(-threshold_delta).

        For a user with t words: t * -ln Phi((T - vote(t)) / sigma) <= threshold_delta, for the worst t.
        """
        from scipy.special import ndtri_exp

        t = np.arange(1, self.words_per_user + 1)
        # DP: every possible number of words is covered, not only the largest: one word has the largest vote.
        margins = ndtri_exp(-self.threshold_delta / t) * self.noise_multiplier * UNIT
        votes = np.array([self.vote(int(n)) for n in t], dtype=np.float64)
        return math.ceil(float(np.max(votes + margins)))

    def release(self, sums: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Add noise to the sums of votes; return a mask of the words above the threshold, and the noisy sums."""
        # DP: one independent draw for each word, scaled to the sensitivity UNIT, rounded to whole votes.
        noise = np.rint(generator.standard_normal(len(sums)) * (self.noise_multiplier * UNIT)).astype(np.int64)
        noisy = sums + noise
        # DP: strictly above; an equal one would pass more often than the threshold's delta allows.
        passed = noisy > self.threshold()
        return passed, noisy

    def events(self) -> list[Event]:
        """The cost of the release: the Gaussian mechanism, and the failure probability of the threshold."""
        return [Gaussian(noise_multiplier=self.noise_multiplier), FailureProbability(delta=self.threshold_delta)]
