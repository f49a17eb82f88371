"""Bounds epsilon from below with one simulated run, in which a coin includes or excludes each canary user.

A canary user adds the same vector of maximal norm in every round in which it is drawn. `CanaryUsers` divides the
coordinates of the model among the canaries. The vector of a canary has random signs on its own coordinates and zeros
elsewhere, so canaries are orthogonal and do not mask each other. Gaussian noise is the same in every direction, so for
the guarantee any direction is as good as another; these are the easiest to detect. The vectors go through the same
clip, grid and weights as the update of any user (`mechanism/aggregation.py`).

The audit runs the sampler, clip, estimator and noise of the run's plan, round by round as the run file says. By default
the canaries are the only users: no text is read, nothing is charged, and the test is harder, since no other update
hides a canary. With background users (`BackgroundUsers`) the users of the store train as well and are charged.

After each round every canary's score grows by the log likelihood ratio of "drawn with probability q" against "never
drawn", given the released average. With correlated noise the releases are multiplied by C first, which makes their
noise independent again; a canary's score is then the log likelihood ratio of the rows that it could have moved, given
its group (`_correlated_scores`). At the end the scores are turned into guesses about who was included, and the
guesses into lower bounds on epsilon: one that assumes nothing about the scores, one by f-DP (both in `lower_bound.py`),
and one that assumes Gaussian noise of known size (`parametric_bound`). A bound above the claimed epsilon speaks
against the claim.

    for step in audit_one_run(run, SecureStreams(), canaries=1000):
        if isinstance(step, OneRunResult):
            for bound in step.bounds:
                print(bound.name, bound.epsilon, "<=", step.claimed, bound.assumptions)

The parameter axis is P, the canary axis M, the coordinates of one canary N.

References: Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023; Andrew et al.,
"One-shot Empirical Privacy Estimation for Federated Learning", ICLR 2024, https://arxiv.org/abs/2302.03098.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from scipy import stats
from scipy.signal import lfilter
from torch import Tensor

from unheard.audit.lower_bound import (
    CONFIDENCE,
    Guesses,
    ParametricBound,
    Signals,
    best_guesses,
    f_dp_bound,
    parametric_bound,
    refutes,
)
from unheard.corpus.store import TokenStore
from unheard.engines.engine import Engine
from unheard.errors import InvalidValue, UnprovenCombination
from unheard.mechanism.aggregation import CohortSum, NoisyAverage
from unheard.mechanism.clipping import Ball
from unheard.mechanism.correlated import CorrelatedNoise, CorrelatedNormals, NoiseHistory
from unheard.mechanism.noise import NoNoise
from unheard.mechanism.plan import RoundPlan
from unheard.mechanism.sampling import FixedSizeSampling, GroupedSampling, Turn, groups_of
from unheard.parameters import Layout
from unheard.privacy.accountants import best_epsilon, epsilon
from unheard.privacy.events import Event, Gaussian
from unheard.privacy.ledger import new_run_id
from unheard.privacy.matrix_factorization import Factorisation
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
        """Return the vectors of all canaries before the clip, each with the largest norm that the clip allows."""
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
        """Apply the server's step with the noisy average of the round."""
        self.state = step(self.run.server, self.run.model, self.state, noisy)


LARGEST_DELTA = 1e-3
"""Upper limit on the audit's delta times the number of canaries."""

REFUTATION_LEVELS = {"distribution-free": 1 - CONFIDENCE, "f-DP": 0.01, "parametric": 1e-4}
"""How often each bound may refute the claim of a sound mechanism. A sound mechanism lies at the limit of what the
parametric test allows, so that its 95 % bound exceeds the claim in one of 20 sound audits. That alone is no
refutation."""

ASSUMPTIONS = {
    "distribution-free": "none about the mechanism or the scores (Steinke, Nasr and Jagielski 2023)",
    "f-DP": "the trade-off curve is that of the run's rounds with their noise divided by one unknown factor (Mahloujifar, "
    "Melis and Chaudhuri 2024)",
    "parametric": "the noise is Gaussian with the known standard deviation, canaries are drawn with probability q, and every "
    "included canary adds the same signal, whose size is fitted",
}
"""What each bound assumes. The canaries are included by independent fair coins for all of them."""


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """One lower bound on epsilon.

    Attributes:
        name: A key of `ASSUMPTIONS`.
        epsilon: The bound; NaN if there is none.
        assumptions: What it assumes, or why there is none.
    """

    name: str
    epsilon: float
    assumptions: str


@dataclass(frozen=True, kw_only=True)
class OneRunResult:
    """The result of a one-run audit. Scores belong to canaries, not to users of the store.

    Attributes:
        rounds: The number of rounds that were simulated.
        score_M: The score of each canary, higher where its inclusion is more likely.
        included_M: Which canaries were included.
        guesses: The guesses that give the highest distribution-free bound.
        events: The events of the simulated rounds.
        parametric: The lower bound on epsilon by a fitted Gaussian.
        refuted_by: The names of the bounds that refute the claim.
        estimate: The epsilon of a Gaussian mechanism whose two output distributions are as far apart as the scores of
            included and excluded canaries. Not a bound, but close to the truth unless q is small.
        claimed: The epsilon that the accountants give for these rounds, at `delta`.
        accountant: The accountant of `claimed`.
        delta: The delta of all figures.
        confidence: The confidence of each lower bound by itself.
    """

    rounds: int
    score_M: np.ndarray = field(repr=False)
    included_M: np.ndarray = field(repr=False)
    guesses: Guesses
    events: Sequence[Event] = field(repr=False)
    parametric: ParametricBound
    refuted_by: tuple[str, ...]
    estimate: float
    claimed: float
    accountant: str
    delta: float
    confidence: float = CONFIDENCE

    @property
    def bound(self) -> float:
        """The distribution-free lower bound on epsilon."""
        return self.guesses.epsilon

    @cached_property
    def f_dp(self) -> float:
        """The lower bound on epsilon by f-DP; takes some seconds."""
        return f_dp_bound(self.score_M, self.included_M, self.events, self.delta, self.confidence)

    @property
    def bounds(self) -> list[LowerBound]:
        """All lower bounds with their assumptions, from the weakest assumptions to the strongest."""
        values = {"distribution-free": self.bound, "f-DP": self.f_dp, "parametric": self.parametric.epsilon}
        reasons = {"parametric": self.parametric.reason}
        return [
            LowerBound(
                name=name, epsilon=value, assumptions=f"no bound: {why}" if (why := reasons.get(name)) else words
            )
            for (name, value), words in zip(values.items(), ASSUMPTIONS.values(), strict=True)
        ]

    @property
    def holds(self) -> bool:
        """Whether the claim survived the audit."""
        return not self.refuted_by


def audit_one_run(
    run: Run,
    streams: Streams,
    *,
    canaries: int = 1000,
    rounds: int | None = None,
    background: BackgroundUsers | None = None,
) -> Iterator[int | OneRunResult]:
    """Simulate one run with canary users.

    Args:
        run: The run whose mechanism is audited.
        streams: Randomness for the coins, cohorts and noise.
        canaries: The number of canary users.
        rounds: The number of rounds; None for the rounds of the run.
        background: Users of the store who take part, or None for canaries alone.

    Yields:
        The number of rounds done, after each round; at last the `OneRunResult`.
    """
    layout = run.model.layout
    rng = streams.batches(-1)
    users = CanaryUsers.draw(canaries, layout, rng)
    included_M = rng.random(canaries) < 0.5
    score_M, events = np.zeros(canaries), []
    signals: Signals = Counter()
    plan = run.plan.at(0, layout)
    units_P = users.units(plan)
    norm_M = users.norms(units_P)
    if isinstance(run.plan.noise, CorrelatedNoise):
        if background is not None:
            raise UnprovenCombination(
                "An audit of correlated noise is made with canaries alone: leave out the users of the store (--with-users)."
            )
        yield from _audit_correlated(run, run.plan.noise, streams, users, included_M, rounds or run.training.rounds)
        return
    for round in range(rounds or run.training.rounds):
        if (current := run.plan.at(round, layout)) != plan:
            plan, units_P = current, users.units(current)
            norm_M = users.norms(units_P)
        events.append(plan.event())
        drawn = included_M.nonzero()[0][_draw(plan, int(included_M.sum()), streams, round)]
        cohort = users.cohort(drawn, units_P, plan)
        cohort = cohort if background is None else background.join(cohort, plan, events[-1], round)
        noisy = plan.noise.add(plan.average(cohort), streams.noise(round))
        if background is not None:
            background.learn(noisy)
        projection_M = users.projections(noisy.average_P.cpu().numpy(), units_P, norm_M)
        signal_M = norm_M * _unit(plan, cohort)
        score_M += _log_likelihood_ratio(projection_M, signal_M, noisy.noise_std, plan)
        if noisy.noise_std > 0:
            signals[_probability(plan), float(f"{signal_M.mean() / noisy.noise_std:.6g}")] += 1
        yield round + 1
    yield _result(run, events, signals, score_M, included_M)


def _audit_correlated(
    run: Run, noise: CorrelatedNoise, streams: Streams, users: CanaryUsers, included_M: np.ndarray, rounds: int
) -> Iterator[int | OneRunResult]:
    """Simulate one run with correlated noise; as `audit_one_run`."""
    plan = run.plan.at(0, run.model.layout)
    sampling, parameters = plan.sampling, plan.layout.total
    assert isinstance(sampling, GroupedSampling)
    matrix = noise.factorisation(sampling, plan.population)
    if noise.strategy == "blt":
        rounds = min(rounds, matrix.rounds)  # the mechanism ends there
    history, key = NoiseHistory(matrix, parameters, torch.device("cpu")), streams.groups_key(0)
    units_P = users.units(plan)
    norm_M = users.norms(units_P)
    events, projected, unit = [], [], 0.0
    for index in range(rounds):
        events.append(plan.event(index))
        turn = Turn(index=index, groups_key=key)
        drawn = sampling.draw(len(included_M), plan.population, streams.sampling(index), turn)
        cohort = users.cohort(drawn[included_M[drawn]], units_P, plan)
        unit = _unit(plan, cohort)
        normals = CorrelatedNormals(streams.noise_key(index), history, parameters, torch.device("cpu"))
        noisy = noise.add(plan.average(cohort), normals)
        projected.append(users.projections(noisy.average_P.cpu().numpy(), units_P, norm_M))
        yield index + 1
    groups_M = groups_of(len(included_M), matrix.separation, key)
    sigma = noise.std(plan.sensitivity) * matrix.sensitivity()
    q = sampling.turn_probability(plan.population)
    score_M = _correlated_scores(np.array(projected), norm_M * unit, groups_M, matrix, sigma, q)
    yield _result(run, events, Counter(), score_M, included_M)


def _correlated_scores(
    projected_TM: np.ndarray,
    norm_M: np.ndarray,
    groups_M: np.ndarray,
    matrix: Factorisation,
    sigma: float,
    q: float,
) -> np.ndarray:
    """Return the log likelihood ratio of each canary, summed over its blocks of rounds.

    C times the projected releases has independent noise sigma. A canary that takes part in round t adds c times its norm
    to the rows from t on. With BLT a canary takes part whenever it is its turn, and all its rounds are one block.
    """
    rounds = len(projected_TM)
    column = matrix.column(rounds)
    white_TM = np.asarray(lfilter(column, [1.0], projected_TM, axis=0))
    score_M = np.zeros(len(norm_M))
    for group in range(matrix.separation):
        mine = groups_M == group
        starts = range(group, rounds, matrix.separation)
        blocks = [[t] for t in starts] if matrix.strategy == "banded" else [list(starts)]
        for block in blocks:
            signal_T = np.zeros(rounds)
            for t in block:
                signal_T[t:] += column[: rounds - t]
            exponent = (signal_T @ white_TM[:, mine]) * norm_M[mine] - signal_T @ signal_T * norm_M[mine] ** 2 / 2
            taking_part = math.log(q) + exponent / sigma**2
            score_M[mine] += np.logaddexp(math.log1p(-q), taking_part) if q < 1 else taking_part
    return score_M


def _draw(plan: RoundPlan, num_users: int, streams: Streams, round: int) -> np.ndarray:
    """Draw canaries as the plan does. Fixed-size sampling takes at most half of the included canaries."""
    sampling = plan.sampling
    if isinstance(sampling, FixedSizeSampling):
        sampling = FixedSizeSampling(users_per_round=max(1, min(sampling.users_per_round, num_users // 2)))
    return sampling.draw(num_users, plan.population, streams.sampling(round))


def _unit(plan: RoundPlan, cohort: CohortSum) -> float:
    """Return by how much one unit of the sum changes the average: its grid over the declared or the used denominator."""
    average = plan.average(cohort)
    if average.unit == 0:
        return 0.0
    return cohort.grid / plan.expected_weight if math.isfinite(average.sensitivity) else average.unit


def _log_likelihood_ratio(
    projection_M: np.ndarray, norm_M: np.ndarray, noise_std: float, plan: RoundPlan
) -> np.ndarray:
    """Return the evidence of one round that each canary is included: log((1 - q) + q N(norm, sigma) / N(0, sigma)).

    Without noise the ratio is infinite or zero; the projection itself is returned instead.
    """
    if noise_std == 0:
        return projection_M
    q = _probability(plan)
    exponent_M = (projection_M * norm_M - norm_M**2 / 2) / noise_std**2
    return np.logaddexp(math.log1p(-q) if q < 1 else -math.inf, math.log(q) + exponent_M)


def _probability(plan: RoundPlan) -> float:
    return min(plan.sampling.probability(plan.population), 1.0)


def _result(
    run: Run, events: list[Event], signals: Signals, score_M: np.ndarray, included_M: np.ndarray
) -> OneRunResult:
    """Compute all bounds and tests of an audit from its scores."""
    # A mechanism that is private at one delta is private at every other, with another epsilon. The lower bound counts
    # delta once for each canary, so a large delta would hide everything. All figures are therefore given at this
    # smaller delta.
    delta = min(run.claimed_delta, LARGEST_DELTA / len(score_M))
    bound, guesses = best_epsilon(events, delta), best_guesses(score_M, included_M, delta)
    claimed = bound.epsilon
    signals = signals if signals.total() == len(events) else Counter()  # a round without noise reveals everything
    strict = parametric_bound(score_M, included_M, signals, delta, confidence=1 - REFUTATION_LEVELS["parametric"])
    refutations = {
        "distribution-free": guesses.epsilon > claimed,
        "f-DP": refutes(score_M, included_M, events, REFUTATION_LEVELS["f-DP"]),
        "parametric": strict.epsilon > claimed,
    }
    return OneRunResult(
        rounds=len(events),
        score_M=score_M,
        included_M=included_M,
        guesses=guesses,
        events=events,
        parametric=parametric_bound(score_M, included_M, signals, delta),
        refuted_by=tuple(name for name, is_refuted in refutations.items() if is_refuted),
        estimate=_estimate(score_M[included_M], score_M[~included_M], delta, isinstance(run.plan.noise, NoNoise)),
        claimed=claimed,
        accountant=bound.accountant,
        delta=delta,
    )


def _estimate(included: np.ndarray, excluded: np.ndarray, delta: float, without_noise: bool) -> float:
    """Return the epsilon of a Gaussian mechanism whose two outcomes are as far apart as these groups of scores."""
    if len(included) < 2 or len(excluded) < 2:
        return math.nan
    spread = float(np.sqrt((included.var(ddof=1) + excluded.var(ddof=1)) / 2))
    distance = float(included.mean() - excluded.mean())
    if without_noise and float(np.asarray(stats.mannwhitneyu(included, excluded))[1]) < 1e-3:  # the p-value
        return math.inf
    if spread == 0 or distance <= 0:
        return 0.0
    return epsilon([Gaussian(noise_multiplier=spread / distance)], delta, "pld")
