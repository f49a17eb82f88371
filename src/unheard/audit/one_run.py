"""How much one run of the mechanism gives away: canary users in or out by a coin, and a lower bound on epsilon.

In: a run. Out: each canary's score and whether it was in, the bound, an estimate, and the claim to hold them against. The plan's
own sampler, door, estimator and noise are run, round by round as the run file says, on canaries alone: no private user is
touched, nothing needs to be charged, and fewer voices make a harder test. With `users` the store's people learn and are
drowned in it as in training; that is a release like any other, and is charged to them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from unheard.audit.background_users import Company
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
"""The audit's delta is at most this, shared among the canaries."""


@dataclass(frozen=True, kw_only=True)
class OneRunAudit:
    """What was found. Scores are of canaries, not of people."""

    rounds: int
    score_M: np.ndarray = field(repr=False)
    was_in_M: np.ndarray = field(repr=False)
    guesses: Guesses
    estimate: float
    """Epsilon of a Gaussian mechanism with these two score distributions: no bound, but close to the truth when q is not small."""
    claimed: float
    delta: float
    confidence: float = CONFIDENCE

    @property
    def bound(self) -> float:
        return self.guesses.epsilon

    @property
    def holds(self) -> bool:
        return self.bound <= self.claimed


def one_run(
    run: Run, streams: Streams, *, canaries: int = 1000, rounds: int | None = None, company: Company | None = None
) -> Iterator[int | OneRunAudit]:
    """Yield the number of each round that is done, and at last the audit."""
    layout = run.model.layout
    rng = streams.batches(-1)
    shouting = CanaryUsers.draw(canaries, layout, rng)
    was_in_M = rng.random(canaries) < 0.5
    score_M, events = np.zeros(canaries), []
    plan = run.plan.at(0, layout)
    units_P = shouting.units(plan)
    loud_M = shouting.loudness(units_P)
    for round in range(rounds or run.training.rounds):
        if (now := run.plan.at(round, layout)) != plan:
            plan, units_P = now, shouting.units(now)
            loud_M = shouting.loudness(units_P)
        events.append(plan.event())
        drawn = was_in_M.nonzero()[0][_draw(plan, int(was_in_M.sum()), streams, round)]
        cohort = shouting.cohort(drawn, units_P, plan)
        cohort = cohort if company is None else company.join(cohort, plan, events[-1], round)
        noisy = plan.noise.add(plan.average(cohort), streams.noise(round))
        if company is not None:
            company.learn(noisy)
        heard_M = shouting.heard(noisy.average_P.cpu().numpy(), units_P, loud_M)
        score_M += _evidence(heard_M, loud_M * _unit(plan, cohort), noisy.noise_std, plan)
        yield round + 1
    yield _audit(run, events, score_M, was_in_M)


def _draw(plan: RoundPlan, num_users: int, streams: Streams, round: int) -> np.ndarray:
    """As the plan draws. Where it asks for a fixed number of users, no more than there are."""
    sampling = plan.sampling
    if isinstance(sampling, FixedSizeSampling):
        sampling = FixedSizeSampling(users_per_round=max(1, min(sampling.users_per_round, num_users // 2)))
    return sampling.draw(num_users, plan.population, streams.sampling(round))


def _unit(plan: RoundPlan, cohort: CohortSum) -> float:
    """What a unit of the sum is worth in the average: the fixed denominator, or the one that was used."""
    average = plan.average(cohort)
    if average.unit == 0:
        return 0.0
    return cohort.grid / plan.expected_weight if math.isfinite(average.sensitivity) else average.unit


def _evidence(heard_M: np.ndarray, loud_M: np.ndarray, noise_std: float, plan: RoundPlan) -> np.ndarray:
    """How much a round speaks for each canary having been in: the log of the likelihood ratio, or, without noise, the voice."""
    if noise_std == 0:
        return heard_M
    q = min(plan.sampling.probability(plan.population), 1.0)
    exponent_M = (heard_M * loud_M - loud_M**2 / 2) / noise_std**2
    return np.logaddexp(math.log1p(-q) if q < 1 else -math.inf, math.log(q) + exponent_M)


def _audit(run: Run, events: list[Event], score_M: np.ndarray, was_in_M: np.ndarray) -> OneRunAudit:
    # A guarantee at one delta is one at every other, with another epsilon. In the bound delta counts once for each canary, so a
    # large one would hide everything; both figures are for this one.
    delta = min(run.claimed_delta, LARGEST_DELTA / len(score_M))
    return OneRunAudit(
        rounds=len(events),
        score_M=score_M,
        was_in_M=was_in_M,
        guesses=best_guesses(score_M, was_in_M, delta),
        estimate=_estimate(score_M[was_in_M], score_M[~was_in_M], delta, isinstance(run.plan.noise, NoNoise)),
        claimed=best_epsilon(events, delta).epsilon,
        delta=delta,
    )


def _estimate(inside: np.ndarray, outside: np.ndarray, delta: float, free: bool) -> float:
    """Epsilon of the Gaussian mechanism whose two outputs are as far apart as the scores of those in and those out."""
    if len(inside) < 2 or len(outside) < 2:
        return math.nan
    spread = float(np.sqrt((inside.var(ddof=1) + outside.var(ddof=1)) / 2))
    apart = float(inside.mean() - outside.mean())
    if free and stats.mannwhitneyu(inside, outside).pvalue < 1e-3:
        return math.inf
    if spread == 0 or apart <= 0:
        return 0.0
    return epsilon([Gaussian(noise_multiplier=spread / apart)], delta, "pld")
