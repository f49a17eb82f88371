"""Bounds epsilon from below with one simulated run, in which a coin includes or excludes each canary user.

The audit runs the sampler, clip, estimator and noise of the run's plan, round by round as the run file says. By default
the canaries (`canary_users.py`) are the only users: no text is read, nothing is charged, and the test is harder, since
no other update hides a canary. With background users (`background_users.py`) the users of the store train as well and
are charged.

After each round every canary's score grows by the log likelihood ratio of "drawn with probability q" against "never
drawn", given the released average. At the end the scores are turned into guesses about who was included, and the
guesses into a lower bound on epsilon (`lower_bound.py`). A bound above the claimed epsilon refutes the claim.

    for step in audit_one_run(run, SecureStreams(), canaries=1000):
        if isinstance(step, OneRunResult):
            print(step.bound, "<=", step.claimed)

References: Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023; Andrew et al.,
"One-shot Empirical Privacy Estimation for Federated Learning", ICLR 2024.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from unheard.audit.background_users import BackgroundUsers
from unheard.audit.canary_users import CanaryUsers
from unheard.audit.lower_bound import CONFIDENCE, Guesses, best_guesses
from unheard.mechanism.noise import NoNoise
from unheard.mechanism.plan import RoundPlan
from unheard.mechanism.sampling import FixedSizeSampling
from unheard.mechanism.values import CohortSum
from unheard.privacy.accountants import best_epsilon, epsilon
from unheard.privacy.events import Event, Gaussian
from unheard.randomness import Streams
from unheard.training.run import Run

LARGEST_DELTA = 1e-3
"""Upper limit on the audit's delta times the number of canaries."""


@dataclass(frozen=True, kw_only=True)
class OneRunResult:
    """The result of a one-run audit. Scores belong to canaries, not to users of the store.

    Attributes:
        rounds: The number of rounds that were simulated. score_M: The score of each canary, higher where its inclusion
        is more likely. included_M: Which canaries were included. guesses: The guesses that give the highest lower
        bound. estimate: The epsilon of a Gaussian mechanism whose two output distributions are as far apart as the
        scores of included
            and excluded canaries. Not a bound, but close to the truth unless q is small.
        claimed: The epsilon that the accountants give for these rounds, at `delta`.
        delta: The delta of all three figures.
        confidence: The confidence of the lower bound.
    """

    rounds: int
    score_M: np.ndarray = field(repr=False)
    included_M: np.ndarray = field(repr=False)
    guesses: Guesses
    estimate: float
    claimed: float
    delta: float
    confidence: float = CONFIDENCE

    @property
    def bound(self) -> float:
        """The lower bound on epsilon."""
        return self.guesses.epsilon

    @property
    def holds(self) -> bool:
        """Whether the claim survived the audit."""
        return self.bound <= self.claimed


def audit_one_run(
    run: Run,
    streams: Streams,
    *,
    canaries: int = 1000,
    rounds: int | None = None,
    background: BackgroundUsers | None = None,
) -> Iterator[int | OneRunResult]:
    """Simulates one run with canary users.

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
    plan = run.plan.at(0, layout)
    units_P = users.units(plan)
    norm_M = users.norms(units_P)
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
        score_M += _log_likelihood_ratio(projection_M, norm_M * _unit(plan, cohort), noisy.noise_std, plan)
        yield round + 1
    yield _result(run, events, score_M, included_M)


def _draw(plan: RoundPlan, num_users: int, streams: Streams, round: int) -> np.ndarray:
    """Draws canaries as the plan does. Fixed-size sampling takes at most half of the included canaries."""
    sampling = plan.sampling
    if isinstance(sampling, FixedSizeSampling):
        sampling = FixedSizeSampling(users_per_round=max(1, min(sampling.users_per_round, num_users // 2)))
    return sampling.draw(num_users, plan.population, streams.sampling(round))


def _unit(plan: RoundPlan, cohort: CohortSum) -> float:
    """Returns what one unit of the sum adds to the average: by the fixed denominator, or by the one that was used."""
    average = plan.average(cohort)
    if average.unit == 0:
        return 0.0
    return cohort.grid / plan.expected_weight if math.isfinite(average.sensitivity) else average.unit


def _log_likelihood_ratio(
    projection_M: np.ndarray, norm_M: np.ndarray, noise_std: float, plan: RoundPlan
) -> np.ndarray:
    """Returns the evidence of one round that each canary is included: log((1 - q) + q N(norm, sigma) / N(0, sigma)).

    Without noise the ratio is infinite or zero, and the projection itself takes its part.
    """
    if noise_std == 0:
        return projection_M
    q = min(plan.sampling.probability(plan.population), 1.0)
    exponent_M = (projection_M * norm_M - norm_M**2 / 2) / noise_std**2
    return np.logaddexp(math.log1p(-q) if q < 1 else -math.inf, math.log(q) + exponent_M)


def _result(run: Run, events: list[Event], score_M: np.ndarray, included_M: np.ndarray) -> OneRunResult:
    # A mechanism that is private at one delta is private at every other, with another epsilon. The lower bound counts
    # delta once for each canary, so a large delta would hide everything. All figures are therefore given at this
    # smaller delta.
    delta = min(run.claimed_delta, LARGEST_DELTA / len(score_M))
    return OneRunResult(
        rounds=len(events),
        score_M=score_M,
        included_M=included_M,
        guesses=best_guesses(score_M, included_M, delta),
        estimate=_estimate(score_M[included_M], score_M[~included_M], delta, isinstance(run.plan.noise, NoNoise)),
        claimed=best_epsilon(events, delta).epsilon,
        delta=delta,
    )


def _estimate(included: np.ndarray, excluded: np.ndarray, delta: float, without_noise: bool) -> float:
    """Returns the epsilon of the Gaussian mechanism that separates the two groups of scores as far as they are
    apart."""
    if len(included) < 2 or len(excluded) < 2:
        return math.nan
    spread = float(np.sqrt((included.var(ddof=1) + excluded.var(ddof=1)) / 2))
    distance = float(included.mean() - excluded.mean())
    if without_noise and stats.mannwhitneyu(included, excluded).pvalue < 1e-3:
        return math.inf
    if spread == 0 or distance <= 0:
        return 0.0
    return epsilon([Gaussian(noise_multiplier=spread / distance)], delta, "pld")
