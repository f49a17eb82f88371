"""The users of the one-run audit: canary users, and background users of the store.

A canary user adds the same vector of maximal norm in every round in which it is drawn. `CanaryUsers` divides the
coordinates of the model among the canaries. The vector of a canary has random signs on its own coordinates and zeros
elsewhere, so canaries are orthogonal and do not mask each other. Gaussian noise is the same in every direction, so for
the guarantee any direction is as good as another; these are the easiest to detect. The vectors go through the same
clip, grid and weights as the update of any user (`mechanism/aggregation.py`).

    canaries = CanaryUsers.draw(1000, run.model.layout, rng)
    units_P = canaries.units(plan)                           # the vectors of all canaries, on the integer grid
    norm_M = canaries.norms(units_P)
    cohort = canaries.cohort(drawn, units_P, plan)           # the sum over the canaries that were drawn
    ...                                                      # average and noise, as in training
    canaries.projections(average_P, units_P, norm_M)         # the test statistic of each canary

The parameter axis is P, the canary axis M, the coordinates of one canary N.

Reference: Andrew et al., "One-shot Empirical Privacy Estimation for Federated Learning", ICLR 2024,
https://arxiv.org/abs/2302.03098.

`BackgroundUsers` adds the users of the store, so that the canary users are audited among real updates. In each round it
draws a cohort from the store, computes its updates with the engine and adds their sum to that of the canaries; after
the noise it applies the server's step, so that the model trains as it does in a real run. Without background users the
audit reads no text and charges nothing.

An audit with background users publishes a function of noisy averages, so it is a release like any training run. Every
round is charged to the ledger of the store's population before a user is drawn.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from unheard.corpus.store import TokenStore
from unheard.engines.engine import Engine
from unheard.errors import InvalidValue
from unheard.mechanism.aggregation import CohortSum, NoisyAverage
from unheard.mechanism.clipping import Ball
from unheard.mechanism.plan import RoundPlan
from unheard.parameters import Layout
from unheard.privacy.events import Event
from unheard.privacy.ledger import new_run_id
from unheard.privacy.population_ledger import PopulationLedger
from unheard.randomness import Streams
from unheard.training.initialise import first_state
from unheard.training.round import State, step
from unheard.training.run import Run
from unheard.updates.user_update import ONE, StoredUsers

DEFAULT_COUNT = 4000
UNBOUNDED_NORM = 10.0
"""The norm of a canary's vector where the plan has no clip."""


@dataclass(frozen=True, kw_only=True)
class CanaryUsers:
    """A set of canary users, described by the coordinates that each of them owns.

    Attributes:
        count: The number of canaries.
        owner_P: The canary that owns each coordinate, or -1 where no canary does.
        sign_P: The sign of its owner's vector at each coordinate.
    """

    count: int
    owner_P: np.ndarray
    sign_P: np.ndarray

    @staticmethod
    def default_count(layout: Layout) -> int:
        """Return a count that gives a strong audit and leaves each canary a few coordinates in the largest layer."""
        largest = max(where.stop - where.start for where in layout.slices.values())
        return max(2, min(DEFAULT_COUNT, largest // 4))

    @classmethod
    def draw(cls, count: int, layout: Layout, rng: np.random.Generator) -> "CanaryUsers":
        """Draw coordinates and signs for each canary.

        Every canary gets an equal share of each layer that is large enough, so that a per-layer clip bounds all
        canaries alike.

        Args:
            count: The number of canaries, at least 2.
            layout: The layout of the model's parameters.
            rng: The source of randomness.

        Raises:
            InvalidValue: Fewer than 2 canaries, or more than the model has coordinates for.
        """
        if count < 2:
            raise InvalidValue(f"An audit needs at least 2 canaries, not {count}. Hundreds give a tighter bound.")
        owner_P = np.full(layout.total, -1, dtype=np.int64)
        for where in layout.slices.values():
            size = where.stop - where.start
            share = size // count
            owner_P[where] = rng.permutation(
                np.concatenate([np.repeat(np.arange(count), share), np.full(size - share * count, -1)])
            )
        if (owner_P < 0).all():
            raise InvalidValue(
                f"{count} canaries do not each get a coordinate of a model of {layout.total} parameters: audit with fewer."
            )
        return cls(count=count, owner_P=owner_P, sign_P=rng.choice([-1.0, 1.0], size=layout.total))

    def units(self, plan: RoundPlan) -> Tensor:
        """Return the contributions of all canaries in integer units of the grid, each on its own coordinates, [P].

        Each canary's vector passes through the plan's clip, weight and grid. Only the canary's own coordinates are
        given to them: the others are zero, and zeros change neither a norm nor the rounding.
        """
        units_P = torch.zeros(plan.layout.total, dtype=torch.int64)
        delta_P = torch.from_numpy(self._deltas(plan))
        own_MN = np.argsort(self.owner_P, kind="stable")[(self.owner_P < 0).sum() :].reshape(self.count, -1)
        balls, begin = [], 0
        for ball in plan.contribution.balls:  # the same balls in the same order, restricted to one canary's coordinates
            share = int((self.owner_P[ball.where] == 0).sum())
            balls.append(Ball(slice(begin, begin + share), ball.radius))
            begin += share
        contribution = replace(plan.contribution, balls=tuple(balls))
        for own_N in own_MN:
            units_P[own_N] = contribution.of_users(delta_P[own_N][None], np.array([ONE])).units_P
        return units_P

    def _deltas(self, plan: RoundPlan) -> np.ndarray:
        """Return the vectors of all canaries before the clip, with the largest norm that each ball of the clip
        allows."""
        balls = plan.contribution.balls
        delta_P = np.zeros(plan.layout.total)
        for where, radius in [(b.where, b.radius) for b in balls] or [(slice(0, len(delta_P)), UNBOUNDED_NORM)]:
            share = max(int((self.owner_P[where] == 0).sum()), 1)
            delta_P[where] = self.sign_P[where] * radius / math.sqrt(share)
        return np.where(self.owner_P >= 0, delta_P, 0.0)

    def cohort(self, drawn: np.ndarray, units_P: Tensor, plan: RoundPlan) -> CohortSum:
        """Sum the contributions of the drawn canaries. Their coordinates do not overlap, so the sum is a selection.

        Args:
            drawn: The numbers of the canaries that take part.
            units_P: The contributions of all canaries (`units`).
            plan: The plan of the round.
        """
        is_drawn = np.append(np.isin(np.arange(self.count), drawn), False)  # the last entry serves the owner -1
        selected_P = torch.where(torch.from_numpy(is_drawn[self.owner_P]), units_P, 0)
        contribution = plan.contribution
        return CohortSum(
            units_P=selected_P, grid=contribution.grid, weight=float(len(drawn)), l2_bound=contribution.l2_bound
        )

    def norms(self, units_P: Tensor) -> np.ndarray:
        """Return the norm of each canary's contribution in units of the grid, [M]."""
        return np.sqrt(self._sum_by_owner(units_P.double().numpy() ** 2))

    def projections(self, average_P: np.ndarray, units_P: Tensor, norm_M: np.ndarray) -> np.ndarray:
        """Return the component of an average along the direction of each canary, [M].

        Args:
            average_P: The released noisy average.
            units_P: The contributions of all canaries (`units`).
            norm_M: Their norms (`norms`).
        """
        return self._sum_by_owner(units_P.numpy() * average_P) / np.maximum(norm_M, 1e-300)

    def _sum_by_owner(self, value_P: np.ndarray) -> np.ndarray:
        owned_P = self.owner_P >= 0
        return np.bincount(self.owner_P[owned_P], weights=value_P[owned_P], minlength=self.count)


@dataclass
class BackgroundUsers:
    """The users of a store during an audit, and the model that they train.

    Creating the object registers the audit in the population's ledger as a run of its own.

    Attributes:
        run: The run that is audited.
        store: The token store of its users.
        engine: Computes the updates of a cohort.
        streams: Randomness of the audit.
        population: The ledger that every round is charged to.
        name: The name of the audited run; the ledger lists "an audit of <name>".
        state: The model and the server's state after the rounds so far.
    """

    run: Run
    store: TokenStore
    engine: Engine
    streams: Streams
    population: PopulationLedger
    name: str
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.state = first_state(self.run)
        self.id = new_run_id()
        facts = {
            "name": f"an audit of {self.name}",
            "delta": self.run.claimed_delta,
            "population": self.run.plan.population,
        }
        self.population.register(self.id, facts, held=0)

    def join(self, canaries: CohortSum, plan: RoundPlan, event: Event, round: int) -> CohortSum:
        """Charge one round, then draw a cohort and return the sum of its updates and those of the canaries.

        Args:
            canaries: The sum over the canaries drawn in this round.
            plan: The plan of this round.
            event: The privacy event of this round.
            round: The number of the round, from 0.
        """
        # DP: an audit among users is a run on them: charged before anybody is drawn.
        self.population.charge(self.id, round, event, round)
        # A stream of its own: the canaries' cohort is drawn from `streams.sampling`, and no generator may serve two
        # cohorts.
        rng = self.streams.batches(round)
        cohort = plan.sampling.draw(self.store.train.num_users, plan.population, rng)
        stored = StoredUsers(self.store.train, cohort, with_features=bool(self.run.model.user_features))
        users = self.engine.sum_updates(self.state.params_P, stored, plan, rng)
        return plan.contribution.sum([canaries, replace(users, units_P=users.units_P.cpu())], plan.layout.total)

    def learn(self, noisy: NoisyAverage) -> None:
        """Applies the server's step with the noisy average of the round."""
        self.state = step(self.run.server, self.run.model, self.state, noisy)
