"""The output's word table in plain torch, for one user's local batch: the softmax over all words, and the step on them.

In: the shared table, the user's delta and what the places say. Out: sums over words, then the delta one step on. The table goes
through the cache twice a step, some words at a time: once to be normalised, multiplied and exponentiated, once to be stepped on.
Exponentials are never divided by their sum (the 80 rows that they meet are). Plain twins of embedding_kernels.py.
"""

import math

import torch
from torch import Tensor

from unheard.engines.stacked.sizes import Sizes
from unheard.models.tied import SMALLEST_SQUARE

WORDS_AT_ONCE = 3400
"""Rows of a word table taken at a time: few enough for the caches, and so many that two threads seldom wait for each other between
operations."""

SAFE_LOGIT = 60.0
"""e^60 times any vocabulary is far from overflow, and e^-60 from nothing: below it no maximum need be found first."""

BITS = math.log2(math.e)
"""e^x = 2^(BITS x), at a third of the price."""


class PlainTable:
    """What is remembered of the softmax between the two passes: exponentials, and their products with the logits. On the sphere the
    table is multiplied as it is, and logits and exponentials are divided by the words' norms: so no word vector is written twice,
    and the second pass finds exponentials ready for its product."""

    def __init__(self, s: Sizes, like: Tensor) -> None:
        self.unit_norm = s.unit_norm
        self.words_WD = like.new_empty(min(s.V, WORDS_AT_ONCE), s.D)
        self.inverse_V1 = like.new_ones(s.V, 1)
        self.power_VN, self.logit_VN = like.new_empty(2, s.V, s.N)
        self.along_V1, self.left_V1 = like.new_empty(2, s.V, 1)
        self.tiles = _tiles(self.inverse_V1, self.logit_VN, self.power_VN)
        self.place_N = torch.arange(s.N, device=like.device)

    def begin(self, theta0_VD: Tensor, delta_VD: Tensor) -> None:
        """A new user. Views are made here, once: two threads wait for each other at each that is made in a step."""
        self.delta_VD, self.tables = delta_VD, _tiles(theta0_VD, delta_VD, self.along_V1, self.left_V1)

    def attend(self, output_ND: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Sums of exponentials [N, 1], and of word vectors weighted by them [N, D]. The exponentials, on the sphere over the words'
        norms, stay in power_VN; the logits (in bits; on the sphere, times their exponentials) in logit_VN."""
        is_safe = self.unit_norm and float(torch.linalg.vector_norm(output_ND, dim=1).max()) < SAFE_LOGIT
        bits_DN = (output_ND * BITS).T
        total_N, expected_ND = output_ND.new_zeros(len(output_ND)), torch.zeros_like(output_ND)
        for (theta0_WD, delta_WD, *_), (inverse_W1, logit_WN, power_WN) in zip(self.tables, self.tiles, strict=True):
            words_WD = self._words(theta0_WD, delta_WD, scale)
            torch.mm(words_WD, bits_DN, out=logit_WN)
            if self.unit_norm:
                logit_WN.mul_(inverse_norms(words_WD, out=inverse_W1))
            if is_safe:
                torch.exp2(logit_WN, out=power_WN)
                self._expect(words_WD, inverse_W1, logit_WN, power_WN, total_N, expected_ND)
        if not is_safe:
            peak_N = self.logit_VN.amax(dim=0)
            for (theta0_WD, delta_WD, *_), (inverse_W1, logit_WN, power_WN) in zip(
                self.tables, self.tiles, strict=True
            ):
                torch.sub(logit_WN, peak_N, out=power_WN).exp2_()
                words_WD = self._words(theta0_WD, delta_WD, scale)
                self._expect(words_WD, inverse_W1, logit_WN, power_WN, total_N, expected_ND)
        return total_N[:, None], expected_ND

    def _words(self, theta0_WD: Tensor, delta_WD: Tensor, scale: float) -> Tensor:
        return torch.add(theta0_WD, delta_WD, alpha=scale, out=self.words_WD[: len(theta0_WD)])

    def _expect(
        self,
        words_WD: Tensor,
        inverse_W1: Tensor,
        logit_WN: Tensor,
        power_WN: Tensor,
        total_N: Tensor,
        expected_ND: Tensor,
    ) -> None:
        total_N += power_WN.sum(0)
        if self.unit_norm:
            logit_WN.mul_(power_WN)
            power_WN.mul_(inverse_W1)
        expected_ND.addmm_(power_WN.T, words_WD)

    def step(
        self,
        output_ND: Tensor,
        total_N1: Tensor,
        target_N: Tensor,
        true_ND: Tensor,
        share_N1: Tensor,
        eta: float,
        scale: float,
        keep: float,
    ) -> None:
        """delta <- c * keep * delta - eta * gradient. On the sphere the gradient is divided by the word's norm, and what of it
        points outward, `outward` times the word's vector, has no effect. The vector is (theta0 + c * delta) / norm: so it is theta0
        and delta that are added."""
        # e^logit - total where true: the softmax's gradient, but for the total, by which the outputs are divided here.
        self.power_VN[target_N, self.place_N] -= total_N1[:, 0] * self.inverse_V1[target_N, 0]
        pull_ND = output_ND * (share_N1 / total_N1)
        if not self.unit_norm:
            self.delta_VD.addmm_(self.power_VN, pull_ND, beta=scale * keep, alpha=-eta)
            return
        outward_V = torch.mv(self.logit_VN, (share_N1 / (total_N1 * BITS))[:, 0])
        outward_V.index_add_(0, target_N, (output_ND * true_ND * share_N1).sum(1), alpha=-1)
        torch.mul(self.inverse_V1, self.inverse_V1, out=self.along_V1).mul_(outward_V[:, None]).mul_(eta)
        torch.mul(self.along_V1, scale, out=self.left_V1).add_(scale * keep)
        # From the last words to the first: those are still in the cache, and these are what the next step begins with.
        for (theta0_WD, delta_WD, along_W1, left_W1), (_, _, power_WN) in zip(
            reversed(self.tables), reversed(self.tiles), strict=True
        ):
            delta_WD.mul_(left_W1).addcmul_(theta0_WD, along_W1).addmm_(power_WN, pull_ND, alpha=-eta)


def _tiles(*whole: Tensor) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.split(WORDS_AT_ONCE) for tensor in whole), strict=True))


def inverse_norms(rows_WD: Tensor, out: Tensor | None = None) -> Tensor:
    """One over the norm of each row [W, 1]; of a row of zeros, a large number."""
    norm_W1 = torch.linalg.vector_norm(rows_WD, dim=1, keepdim=True, out=out)
    return norm_W1.clamp_(min=SMALLEST_SQUARE**0.5).reciprocal_()
