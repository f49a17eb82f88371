"""Users who only shout: each adds the same vector of full length every time they are drawn, in a direction of their own.

In: a round's plan. Out: what each canary user adds, through the same door as everybody (mechanism/aggregation.py), and how loud
each can be heard in a released average. A direction is random signs on a random share of the coordinates; no two shares overlap,
so canaries do not drown each other. The noise is the same in every direction, so for the guarantee one is as good as another.
Where from: Andrew et al., "One-shot Empirical Privacy Estimation for Federated Learning" (2023).
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from unheard.errors import InvalidValue
from unheard.mechanism.clipping import Ball
from unheard.mechanism.plan import RoundPlan
from unheard.mechanism.values import CohortSum
from unheard.parameters import Layout
from unheard.updates.weighting import ONE

ENOUGH = 4000
UNBOUNDED_NORM = 10.0
"""How loud a canary is where nothing bounds it."""


@dataclass(frozen=True, kw_only=True)
class CanaryUsers:
    """`owner_P` says whose each coordinate is (-1: nobody's), `sign_P` which way."""

    count: int
    owner_P: np.ndarray
    sign_P: np.ndarray

    @staticmethod
    def enough(layout: Layout) -> int:
        """As many as say something, and no more than have a few coordinates each in the largest layer."""
        largest = max(where.stop - where.start for where in layout.slices.values())
        return max(2, min(ENOUGH, largest // 4))

    @classmethod
    def draw(cls, count: int, layout: Layout, rng: np.random.Generator) -> "CanaryUsers":
        """Each gets an equal share of every layer that is large enough, so that per-layer clips leave them all as loud."""
        if count < 2:
            raise InvalidValue("An audit needs at least 2 canaries; hundreds say more.")
        owner_P = np.full(layout.total, -1, dtype=np.int64)
        for where in layout.slices.values():
            size = where.stop - where.start
            share = size // count
            owner_P[where] = rng.permutation(
                np.concatenate([np.repeat(np.arange(count), share), np.full(size - share * count, -1)])
            )
        if (owner_P < 0).all():
            raise InvalidValue(
                f"{count} canaries are more than a model of {layout.total} parameters can tell apart: audit with fewer."
            )
        return cls(count=count, owner_P=owner_P, sign_P=rng.choice([-1.0, 1.0], size=layout.total))

    def units(self, plan: RoundPlan) -> Tensor:
        """What each adds, as whole units on its own coordinates. Each goes through the door with its own coordinates only: the rest
        are zeros, which no norm or rounding sees."""
        units_P = torch.zeros(plan.layout.total, dtype=torch.int64)
        shout_P = torch.from_numpy(self._shout(plan))
        own_MN = np.argsort(self.owner_P, kind="stable")[(self.owner_P < 0).sum() :].reshape(self.count, -1)
        balls, begin = [], 0
        for ball in plan.contribution.balls:  # in the same order, cut down to the share that a canary has of each
            share = int((self.owner_P[ball.where] == 0).sum())
            balls.append(Ball(slice(begin, begin + share), ball.radius))
            begin += share
        door = replace(plan.contribution, balls=tuple(balls))
        for own_N in own_MN:
            units_P[own_N] = door.of_users(shout_P[own_N][None], np.array([ONE])).units_P
        return units_P

    def _shout(self, plan: RoundPlan) -> np.ndarray:
        """As loud as the clip lets them be, ball by ball."""
        balls = plan.contribution.balls
        shout_P = np.zeros(plan.layout.total)
        for where, radius in [(b.where, b.radius) for b in balls] or [(slice(0, len(shout_P)), UNBOUNDED_NORM)]:
            share = max(int((self.owner_P[where] == 0).sum()), 1)
            shout_P[where] = self.sign_P[where] * radius / math.sqrt(share)
        return np.where(self.owner_P >= 0, shout_P, 0.0)

    def cohort(self, drawn: np.ndarray, units_P: Tensor, plan: RoundPlan) -> CohortSum:
        """The sum over the drawn canaries; their shares do not overlap, so it is a selection."""
        is_drawn = np.append(np.isin(np.arange(self.count), drawn), False)  # the last: coordinates that are nobody's
        selected_P = torch.where(torch.from_numpy(is_drawn[self.owner_P]), units_P, 0)
        contribution = plan.contribution
        return CohortSum(
            units_P=selected_P, grid=contribution.grid, weight=float(len(drawn)), l2_bound=contribution.l2_bound
        )

    def loudness(self, units_P: Tensor) -> np.ndarray:
        """The norm of what each adds, in units of the grid, [count]."""
        return np.sqrt(self._by_owner(units_P.double().numpy() ** 2))

    def heard(self, average_P: np.ndarray, units_P: Tensor, loud_M: np.ndarray) -> np.ndarray:
        """How far an average goes along each canary's own direction, [count]."""
        return self._by_owner(units_P.numpy() * average_P) / np.maximum(loud_M, 1e-300)

    def _by_owner(self, value_P: np.ndarray) -> np.ndarray:
        mine_P = self.owner_P >= 0
        return np.bincount(self.owner_P[mine_P], weights=value_P[mine_P], minlength=self.count)
