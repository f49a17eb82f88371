"""Computes lower bounds on epsilon with one simulated run, in which a coin includes or excludes each canary user.

A canary user adds the same vector of maximal norm in every round in which it is drawn. `CanaryUsers` divides the
coordinates of the model among the canaries. The vector of a canary has random signs on its own coordinates and zeros
elsewhere, so canaries are orthogonal and do not hide each other. Gaussian noise is the same in every direction, so the
direction of a vector does not matter for the guarantee, and orthogonal vectors are the easiest to detect. The vectors
go through the same clip, grid and weights as the update of any user (`mechanism/aggregation.py`).

The audit runs the sampler, clip, estimator and noise of the run's plan, round by round as in the run. By default the
canaries are the only users. Then no text is read and nothing is charged, and the canaries are easiest to detect, since
no other update hides them. With background users (`BackgroundUsers`) the users of the store train as well, and are
charged.

After each round the audit adds to every canary's score the log likelihood ratio of "drawn with probability q" against
"never drawn", given the released average. With correlated noise the releases are first multiplied by C, which makes
their noise independent. A canary's score is then the log likelihood ratio of the rounds in which its group could take
part (`_correlated_scores`). At the end lower_bound.py computes three lower bounds on epsilon: two from guesses which
canaries were included (distribution-free, and by f-DP), and one from the scores, which assumes Gaussian noise of known
size (`parametric_bound`). A bound above the claimed epsilon is evidence against the claim.

    for step in audit_one_run(run, SecureStreams(), canaries=1000):
        if isinstance(step, OneRunResult):
            for bound in step.bounds:
                print(bound.name, bound.epsilon, "<=", step.claimed, bound.assumptions)

Shape letters: P parameters, M canaries, N coordinates of one canary, T rounds.

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
"""The default number of canary users, if the model is large enough."""
UNBOUNDED_NORM = 10.0
"""The norm of a canary's vector if the plan has no clip."""


@dataclass(frozen=True, kw_only=True)
class CanaryUsers:
    """A set of canary users, described by the coordinates that each of them owns.

    Attributes:
        count: The number of canaries.
        owner_P: The number of the canary that owns each coordinate; -1 for coordinates without an owner.
        sign_P: The sign of the owner's vector at each coordinate.
    """

    count: int
    owner_P: np.ndarray
    sign_P: np.ndarray

    @staticmethod
    def default_count(layout: Layout) -> int:
        """Return the default number of canaries: `DEFAULT_COUNT`, or fewer if the model is small.

        Each canary gets at least four coordinates of the largest layer, unless that layer has fewer than eight.
        """
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
            InvalidValue: There are fewer than 2 canaries, or more than the largest layer has coordinates.
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

        Each canary's vector passes through the plan's clip, weight and grid, restricted to the canary's own
        coordinates. The other coordinates are zero, so they change neither a norm nor the rounding.
        """
        units_P = torch.zeros(plan.layout.total, dtype=torch.int64)
        delta_P = torch.from_numpy(self._deltas(plan))
        own_MN = np.argsort(self.owner_P, kind="stable")[(self.owner_P < 0).sum() :].reshape(self.count, -1)
        balls, begin = [], 0
        # The balls of the clip, restricted to the coordinates of one canary.
        for ball in plan.contribution.balls:
            share = int((self.owner_P[ball.where] == 0).sum())
            balls.append(Ball(slice(begin, begin + share), ball.radius))
            begin += share
        contribution = replace(plan.contribution, balls=tuple(balls))
        for own_N in own_MN:
            units_P[own_N] = contribution.of_users(delta_P[own_N][None], np.array([ONE])).units_P
        return units_P

    def _deltas(self, plan: RoundPlan) -> np.ndarray:
        """Return the vectors of all canaries before the clip, in one array [P]. Each has the largest norm allowed."""
        balls = plan.contribution.balls
        delta_P = np.zeros(plan.layout.total)
        for where, radius in [(b.where, b.radius) for b in balls] or [(slice(0, len(delta_P)), UNBOUNDED_NORM)]:
            share = max(int((self.owner_P[where] == 0).sum()), 1)
            delta_P[where] = self.sign_P[where] * radius / math.sqrt(share)
        return np.where(self.owner_P >= 0, delta_P, 0.0)

    def cohort(self, drawn: np.ndarray, units_P: Tensor, plan: RoundPlan) -> CohortSum:
        """Return the sum of the contributions of the drawn canaries.

        The coordinates of canaries do not overlap, so the sum has the drawn canaries' values and zeros elsewhere.

        Args:
            drawn: The numbers of the canaries that take part.
            units_P: The contributions of all canaries (`units`).
            plan: The plan of the round.
        """
        # The last entry is for coordinates without an owner: index -1 reads it.
        is_drawn = np.append(np.isin(np.arange(self.count), drawn), False)
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
        """Return the sum of the values at the coordinates of each canary, [M]."""
        owned_P = self.owner_P >= 0
        return np.bincount(self.owner_P[owned_P], weights=value_P[owned_P], minlength=self.count)


@dataclass
class BackgroundUsers:
    """The users of a store who take part in an audit, and the model that they train.

    Creating the object registers the audit in the population's ledger as a run of its own.

    Attributes:
        run: The run that is audited.
        store: The store of its users.
        engine: The engine that computes the updates of a cohort.
        streams: The randomness of the audit.
        population: The ledger to which every round is charged.
        name: The name of the audited run; the ledger lists "an audit of <name>".
        state: The model and the server's state after the rounds so far.
        id: The id of the audit in the population's ledger.
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
        self.population.register(self.id, facts, num_charged=0)

    def join(self, canaries: CohortSum, plan: RoundPlan, event: Event, round: int) -> CohortSum:
        """Charge one round, draw a cohort, and return the sum of its updates and of the canaries' contributions.

        Args:
            canaries: The sum over the canaries drawn in this round.
            plan: The plan of this round.
            event: The privacy event of this round.
            round: The number of the round, from 0.
        """
        # DP: an audit in which users take part is a run on them, so it is charged before its cohort is drawn.
        self.population.charge(self.id, round, event, round)
        # The canaries are drawn from `streams.sampling`; two cohorts must not be drawn from the same stream.
        rng = self.streams.batches(round)
        cohort = plan.sampling.draw(self.store.train.num_users, plan.population, rng)
        stored = StoredUsers(self.store.train, cohort, with_features=bool(self.run.model.user_features))
        users = self.engine.sum_updates(self.state.params_P, stored, plan, rng)
        return plan.contribution.sum([canaries, replace(users, units_P=users.units_P.cpu())], plan.layout.total)

    def learn(self, noisy: NoisyAverage) -> None:
        """Apply the server's step with the noisy average of the round."""
        self.state = step(self.run.server, self.run.model, self.state, noisy)


LARGEST_DELTA = 1e-3
"""The largest product of the audit's delta and the number of canaries."""

REFUTATION_LEVELS = {"distribution-free": 1 - CONFIDENCE, "f-DP": 0.01, "parametric": 1e-4}
"""The probability with which each bound may refute the claim of a sound mechanism.

For a sound mechanism the signal of a canary is exactly what the parametric model expects. So its parametric bound with
95 % confidence exceeds the claim in one of 20 audits. The level of 1e-4 keeps this from counting as a refutation.
"""

ASSUMPTIONS = {
    "distribution-free": "none about the mechanism or the scores (Steinke, Nasr and Jagielski 2023)",
    "f-DP": "the trade-off curve is that of the run's rounds with their noise divided by one unknown factor (Mahloujifar, "
    "Melis and Chaudhuri 2024)",
    "parametric": "the noise is Gaussian with the known standard deviation, canaries are drawn with probability q, and every "
    "included canary adds the same signal, whose size is fitted",
}
"""The assumptions of each bound. All bounds also assume that independent fair coins include the canaries."""


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """One lower bound on epsilon.

    Attributes:
        name: A key of `ASSUMPTIONS`.
        epsilon: The bound; NaN if there is none.
        assumptions: What the bound assumes, or why there is no bound.
    """

    name: str
    epsilon: float
    assumptions: str


@dataclass(frozen=True, kw_only=True)
class OneRunResult:
    """The result of a one-run audit. It contains scores of canaries only, and no data of users of the store.

    Attributes:
        rounds: The number of rounds that were simulated.
        score_M: The score of each canary, higher where its inclusion is more likely.
        included_M: Which canaries were included.
        guesses: The guesses that give the highest distribution-free bound.
        events: The events of the simulated rounds.
        parametric: The parametric lower bound on epsilon.
        refuted_by: The names of the bounds that refute the claim.
        estimate: The epsilon of a Gaussian mechanism whose two output distributions are as far apart as the scores of
            included and excluded canaries. It is not a bound, but it is close to the true epsilon unless q is small.
        claimed: The epsilon of these rounds at `delta`, by the accountants.
        accountant: The accountant that gives `claimed`.
        delta: The delta of all figures.
        confidence: The confidence of each single lower bound.
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
        """The lower bound on epsilon by f-DP. It is computed at the first access, which takes some seconds."""
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
        """Whether no bound refutes the claim."""
        return not self.refuted_by


def audit_one_run(
    run: Run,
    streams: Streams,
    *,
    canaries: int = 1000,
    rounds: int | None = None,
    background: BackgroundUsers | None = None,
) -> Iterator[int | OneRunResult]:
    """Simulate one run with canary users, and compute lower bounds on its epsilon.

    Args:
        run: The run whose mechanism is audited.
        streams: The randomness for the coins, cohorts and noise.
        canaries: The number of canary users.
        rounds: The number of rounds; None for the rounds of the run.
        background: Users of the store who take part too; None for canaries alone. Every round is charged to them.

    Yields:
        After each round the number of rounds done; at the end the `OneRunResult`.

    Raises:
        InvalidValue: There are too few or too many canaries for the model.
        UnprovenCombination: `background` is not None in a run with correlated noise.
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
                "An audit of correlated noise uses canaries only: remove the option --with-users."
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
    """Simulate one run with correlated noise. Yields the same as `audit_one_run`.

    Args:
        run: The run whose mechanism is audited.
        noise: The noise of its plan.
        streams: The randomness for cohorts and noise.
        users: The canary users.
        included_M: Which canaries are included.
        rounds: The number of rounds.
    """
    plan = run.plan.at(0, run.model.layout)
    sampling, parameters = plan.sampling, plan.layout.total
    assert isinstance(sampling, GroupedSampling)
    matrix = noise.factorisation(sampling, plan.population)
    if noise.strategy == "blt":
        rounds = min(rounds, matrix.rounds)  # A BLT mechanism has a fixed number of rounds.
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
    """Return the log likelihood ratio of each canary, summed over its blocks of rounds, [M].

    C times the projected releases has independent noise of standard deviation sigma. A canary that takes part in round
    t adds its norm times the first column of C to the rows from t on. With the banded strategy each round of a canary's
    group is a block of its own. With BLT a canary takes part whenever its group does, so all its rounds are one block.

    Args:
        projected_TM: The component of each release along the direction of each canary.
        norm_M: The norm of each canary's contribution to the average.
        groups_M: The group of each canary.
        matrix: The factorisation of the noise.
        sigma: The standard deviation of the independent noise.
        q: The probability that a canary takes part when it is its group's turn.
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
    """Draw canaries with the plan's sampler, and return their positions among the included canaries.

    Fixed-size sampling draws at most half of the included canaries.
    """
    sampling = plan.sampling
    if isinstance(sampling, FixedSizeSampling):
        sampling = FixedSizeSampling(users_per_round=max(1, min(sampling.users_per_round, num_users // 2)))
    return sampling.draw(num_users, plan.population, streams.sampling(round))


def _unit(plan: RoundPlan, cohort: CohortSum) -> float:
    """Return how much one unit of the sum changes the average.

    This is the grid divided by the declared denominator; without a bound on the sensitivity, by the denominator used.
    """
    average = plan.average(cohort)
    if average.unit == 0:
        return 0.0
    return cohort.grid / plan.expected_weight if math.isfinite(average.sensitivity) else average.unit


def _log_likelihood_ratio(
    projection_M: np.ndarray, norm_M: np.ndarray, noise_std: float, plan: RoundPlan
) -> np.ndarray:
    """Return what one round adds to the score of each canary: log((1 - q) + q N(norm, sigma) / N(0, sigma)), [M].

    Without noise this ratio is infinite or zero; the projection itself is returned instead.

    Args:
        projection_M: The component of the released average along the direction of each canary.
        norm_M: The component that a drawn canary adds.
        noise_std: sigma, the standard deviation of the noise.
        plan: The plan of the round.
    """
    if noise_std == 0:
        return projection_M
    q = _probability(plan)
    exponent_M = (projection_M * norm_M - norm_M**2 / 2) / noise_std**2
    return np.logaddexp(math.log1p(-q) if q < 1 else -math.inf, math.log(q) + exponent_M)


def _probability(plan: RoundPlan) -> float:
    """Return q, the probability that a canary is drawn in a round, at most 1."""
    return min(plan.sampling.probability(plan.population), 1.0)


def _result(
    run: Run, events: list[Event], signals: Signals, score_M: np.ndarray, included_M: np.ndarray
) -> OneRunResult:
    """Compute all bounds and tests of an audit from its scores."""
    # The distribution-free bound counts delta once for each canary, so with a large delta it would always be 0. The
    # mechanism also has an epsilon at every smaller delta, so all figures are computed at this smaller delta.
    delta = min(run.claimed_delta, LARGEST_DELTA / len(score_M))
    bound, guesses = best_epsilon(events, delta), best_guesses(score_M, included_M, delta)
    claimed = bound.epsilon
    # If a round has no noise, the parametric model does not apply.
    signals = signals if signals.total() == len(events) else Counter()
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
    """Return the epsilon of a Gaussian mechanism whose two outcomes are as far apart as these two groups of scores.

    Args:
        included: The scores of included canaries.
        excluded: The scores of excluded canaries.
        delta: The delta of the epsilon.
        without_noise: Whether the run adds no noise. Then the result is infinite if the two groups clearly differ.

    Returns:
        The epsilon; NaN if a group has fewer than two scores.
    """
    if len(included) < 2 or len(excluded) < 2:
        return math.nan
    spread = float(np.sqrt((included.var(ddof=1) + excluded.var(ddof=1)) / 2))
    distance = float(included.mean() - excluded.mean())
    if without_noise and float(np.asarray(stats.mannwhitneyu(included, excluded))[1]) < 1e-3:  # [1] is the p-value.
        return math.inf
    if spread == 0 or distance <= 0:
        return 0.0
    return epsilon([Gaussian(noise_multiplier=spread / distance)], delta, "pld")
