"""The users' own words, found with user-level differential privacy: bounded votes, Gaussian noise, a threshold.

In: for each word the sum of its users' votes, as integers. Out: the words whose noisy sum passes the threshold, and
the two events that this costs: a Gaussian mechanism, and the probability that a word which only one user wrote gets
through at all. The proof is in docs/private-vocabulary.md. Paper: appendix "Model" asks for such a mechanism and
leaves it out.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from unheard.config import require
from unheard.privacy.events import Event, FailureProbability, Gaussian

UNIT = 1 << 30  # a vote of 1.0: votes are integers, so that sums are exact in any order and low bits tell nothing
MAX_WORD_CHARS = 64


@dataclass(frozen=True, kw_only=True)
class WordRelease:
    """The mechanism: each user votes for at most `words_per_user` words with an L2 norm of at most one unit."""

    noise_multiplier: float
    threshold_delta: float
    words_per_user: int

    def __post_init__(self) -> None:
        require(self.noise_multiplier > 0, f"noise_multiplier must be above 0, not {self.noise_multiplier}.")
        require(0 < self.threshold_delta < 1, f"threshold_delta must be in (0, 1), not {self.threshold_delta}.")
        require(self.words_per_user >= 1, f"words_per_user must be 1 or more, not {self.words_per_user}.")

    @classmethod
    def for_budget(cls, epsilon: float, delta: float, words_per_user: int) -> "WordRelease":
        """Half of delta for the Gaussian mechanism, half for the threshold: together (epsilon, delta)."""
        import dp_accounting

        require(epsilon > 0 and math.isfinite(epsilon), f"epsilon must be above 0, not {epsilon}.")
        require(0 < delta < 1, f"delta must be in (0, 1), not {delta}.")
        noise_multiplier = dp_accounting.get_sigma_gaussian(epsilon, delta / 2)
        return cls(noise_multiplier=noise_multiplier, threshold_delta=delta / 2, words_per_user=words_per_user)

    def choose(self, words: Iterable[str], salt: str, user: str) -> list[str]:
        """The words that a user votes for: all, or a fixed pseudo-random choice that depends on nobody else."""
        words = list(words)
        if len(words) <= self.words_per_user:
            return words
        key = hashlib.sha256(f"{len(salt)}:{salt}{user}".encode("utf-8", "surrogatepass")).digest()
        words.sort(key=lambda w: hashlib.blake2b(w.encode("utf-8", "surrogatepass"), key=key, digest_size=8).digest())
        # DP: no user votes for more words than the threshold was computed for.
        return words[: self.words_per_user]

    def vote(self, num_words: int) -> int:
        """What each of a user's words gets: 1/sqrt(number of words), rounded down, so that the norm is at most UNIT."""
        # DP: rounding down keeps num_words * vote^2 <= UNIT^2, the sensitivity that the noise is scaled to.
        return math.isqrt(UNIT * UNIT // num_words)

    def threshold(self) -> int:
        """The smallest T that the words of one user alone all stay below with probability exp(-threshold_delta).

        For a user with t words: t * -ln Phi((T - vote(t)) / sigma) <= threshold_delta, for the worst t.
        """
        from scipy.special import ndtri_exp

        t = np.arange(1, self.words_per_user + 1)
        # DP: every possible number of words is covered, not only the largest: one word has the largest vote.
        margins = ndtri_exp(-self.threshold_delta / t) * self.noise_multiplier * UNIT
        votes = np.array([self.vote(int(n)) for n in t], dtype=np.float64)
        return math.ceil(float(np.max(votes + margins)))

    def release(self, sums: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Which of these words pass, and their noisy sums. Every word's noise is its own."""
        # DP: one independent draw for each word, scaled to the sensitivity UNIT, rounded to whole votes.
        noise = np.rint(generator.standard_normal(len(sums)) * (self.noise_multiplier * UNIT)).astype(np.int64)
        noisy = sums + noise
        # DP: strictly above; an equal one would pass more often than the threshold's delta allows.
        passed = noisy > self.threshold()
        return passed, noisy

    def events(self) -> list[Event]:
        """What every run on these users starts with: both, since the second is not part of the first."""
        return [Gaussian(noise_multiplier=self.noise_multiplier), FailureProbability(delta=self.threshold_delta)]
