"""The plan: Algorithm 1's parameters in one place, checked together, resolved for any round, and what each round costs.

In: the parts. Out: RoundPlan objects, which hold everything a round needs and say which privacy event it is.
This is the meeting point of privacy: combinations without a proof are refused here, before anything runs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from unheard.config import table_from_part
from unheard.errors import InvalidValue, UnprovenCombination
from unheard.mechanism.aggregation import LARGEST_COHORT, UNNOISED_GRID, Contribution, noised_grid
from unheard.mechanism.clipping import AdaptiveClip, Clip, FlatClip, NoClip, PerLayerClip
from unheard.mechanism.estimators import ClippedDenominator, Estimator, FixedDenominator, TrueAverage
from unheard.mechanism.noise import GaussianNoise, Noise, NoNoise
from unheard.mechanism.sampling import FixedSizeSampling, PoissonSampling, Sampling
from unheard.mechanism.schedule import Change, in_order
from unheard.mechanism.values import BoundedAverage, CohortSum
from unheard.parameters import Layout
from unheard.privacy.events import Event, NonPrivate
from unheard.updates.fedavg import FedAvg
from unheard.updates.fedsgd import FedSGD
from unheard.updates.weighting import CappedWeights, EqualWeights

Weighting = EqualWeights | CappedWeights
Update = FedAvg | FedSGD

KINDS: dict[str, dict[str, type]] = {
    "sampling": {"poisson": PoissonSampling, "fixed_size": FixedSizeSampling},
    "weights": {"equal": EqualWeights, "capped": CappedWeights},
    "update": {"fedavg": FedAvg, "fedsgd": FedSGD},
    "clip": {"flat": FlatClip, "per_layer": PerLayerClip, "none": NoClip, "adaptive": AdaptiveClip},
    "estimator": {
        "fixed_denominator": FixedDenominator,
        "clipped_denominator": ClippedDenominator,
        "true_average": TrueAverage,
    },
    "noise": {"gaussian": GaussianNoise, "none": NoNoise},
}
"""The name of each part in a run file."""


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """What one round does, with every number resolved."""

    population: int
    sampling: Sampling
    weights: Weighting
    update: Update
    clip: Clip
    estimator: Estimator
    noise: Noise
    layout: Layout
    following: AdaptiveClip | None = None
    """Where S comes from, if it follows the users; `clip` is then the flat clip of this round."""

    @cached_property
    def expected_weight(self) -> float:
        """q W for the fixed denominator, q W_min for the clipped one."""
        return self.sampling.probability(self.population) * self.estimator.minimum_weight(
            self.weights.total(self.population)
        )

    @cached_property
    def contribution(self) -> Contribution:
        l2_bound = self.clip.l2_bound(self.layout)
        is_noised = isinstance(self.noise, GaussianNoise)
        return Contribution(
            balls=tuple(self.clip.balls(self.layout)),
            l2_bound=l2_bound,
            grid=noised_grid(l2_bound) if is_noised else UNNOISED_GRID,
            is_noised=is_noised,
        )

    @cached_property
    def sensitivity(self) -> float:
        return self.estimator.sensitivity(self.clip.l2_bound(self.layout), self.expected_weight, self.layout.total)

    def average(self, total: CohortSum) -> BoundedAverage:
        return self.estimator.average(total, self.expected_weight)

    def event(self) -> Event:
        """What this round costs: the sampler's own word for it, at the noise that is really added."""
        if isinstance(self.noise, NoNoise):
            return NonPrivate(reason="no noise is added")
        z = self.noise.multiplier(self.sensitivity)
        if self.following is not None:
            z = self.following.together(z, self.count_noise_std)
        return self.sampling.event(self.population, z)

    @cached_property
    def count_noise_std(self) -> float:
        """sigma_b of a clip that follows the users; a baseline counts without noise, as it does all else."""
        if self.following is None or isinstance(self.noise, NoNoise):
            return 0.0
        return self.following.noise_on_the_count(self.expected_users)

    @property
    def expected_users(self) -> float:
        return self.sampling.probability(self.population) * self.population

    def next_norm(self, total: CohortSum, rng: np.random.Generator) -> float | None:
        """S of the next round, if it follows the users."""
        if self.following is None:
            return None
        assert isinstance(self.clip, FlatClip)
        assert total.balance is not None, "an engine counts who was clipped when the clip follows the users"
        return self.following.next_norm(self.clip.norm, total.balance, self.expected_users, self.count_noise_std, rng)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parameters of Algorithm 1, and how they change over time."""

    population: int
    """K as declared: how many users there are, as you may say in public. q, W and delta come from it, never from the store."""
    sampling: Sampling
    weights: Weighting = EqualWeights()
    update: Update
    clip: Clip | AdaptiveClip
    estimator: Estimator = FixedDenominator()
    noise: Noise
    schedule: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        if self.population < 1:
            raise InvalidValue(f"population must be at least 1, not {self.population}.")
        if self.population > LARGEST_COHORT:
            raise InvalidValue("population must be at most 2^40, so that no cohort's integer sum can overflow.")
        in_order(self.schedule)
        self.sampling.probability(self.population)
        if isinstance(self.noise, GaussianNoise):
            self._refuse_what_has_no_proof()
        elif any(c.noise_std or c.noise_multiplier for c in self.schedule):
            raise InvalidValue(
                "The schedule sets noise, but [noise] is 'none'. Start with noise, or leave it out throughout."
            )
        if isinstance(self.clip, NoClip | AdaptiveClip) and any(c.clip_norm for c in self.schedule):
            self.clip.at_norm(1.0)

    def _refuse_what_has_no_proof(self) -> None:
        self.sampling.event(self.population, 1.0)
        if isinstance(self.clip, NoClip):
            raise UnprovenCombination(
                "Noise without a clip proves nothing: no noise is large enough. Set [clip] kind = 'flat'."
            )
        if isinstance(self.estimator, TrueAverage):
            raise UnprovenCombination(
                "Noise on the true average proves nothing: its denominator is the weight drawn, so its sensitivity has no bound. "
                "Set [estimator] kind = 'fixed_denominator', or 'clipped_denominator' with min_total_weight."
            )
        if isinstance(self.clip, AdaptiveClip):
            self._refuse_what_cannot_follow(self.clip)

    def _refuse_what_cannot_follow(self, clip: AdaptiveClip) -> None:
        given = [self.noise, *(change for change in self.schedule)]
        if any(one.noise_std is not None for one in given if not isinstance(one, NoNoise)):
            # DP: with sigma fixed, z would follow S and so the users; composition with a cost chosen by them has no proof here.
            raise UnprovenCombination(
                "Adaptive clipping needs noise that grows and shrinks with S: give noise_multiplier (z), not noise_std (sigma)."
            )
        expected = self.sampling.probability(self.population) * self.population
        for one in given:
            if not isinstance(one, NoNoise) and one.noise_multiplier is not None:
                clip.share_for_the_update(one.noise_multiplier, clip.noise_on_the_count(expected))

    def at(self, round: int, layout: Layout, clip_norm: float | None = None) -> RoundPlan:
        """The plan of one round: every change up to it, in order. `clip_norm` is where a clip that follows the users has got to."""
        clip, noise, update = self.clip, self.noise, self.update
        for change in self.schedule:
            if change.from_round > round:
                break
            clip = clip.at_norm(change.clip_norm) if change.clip_norm else clip
            update = update.at_learning_rate(change.learning_rate) if change.learning_rate else update
            if change.noise_std or change.noise_multiplier:
                noise = GaussianNoise(noise_std=change.noise_std, noise_multiplier=change.noise_multiplier)
        following = None
        if isinstance(clip, AdaptiveClip):
            following, clip = clip, FlatClip(norm=clip_norm or clip.initial_norm)
            if isinstance(noise, GaussianNoise) and noise.noise_multiplier is not None:
                expected = self.sampling.probability(self.population) * self.population
                sigma_b = following.noise_on_the_count(expected)
                noise = GaussianNoise(noise_multiplier=following.share_for_the_update(noise.noise_multiplier, sigma_b))
        return RoundPlan(
            population=self.population,
            sampling=self.sampling,
            weights=self.weights,
            update=update,
            clip=clip,
            estimator=self.estimator,
            noise=noise,
            layout=layout,
            following=following,
        )

    def phases(self, layout: Layout) -> Iterator[tuple[int, RoundPlan]]:
        """The rounds at which something changes, the first included."""
        for from_round in (0, *(change.from_round for change in self.schedule)):
            yield from_round, self.at(from_round, layout)

    def facts(self, layout: Layout) -> dict[str, Any]:
        """The public facts that a ledger's header keeps."""
        parts = {name: table_from_part(getattr(self, name), KINDS[name]) for name in KINDS}
        parts["sampling"]["sampling_prob"] = self.sampling.probability(self.population)
        parts["weights"]["total_weight"] = self.weights.total(self.population)
        return {
            "population": self.population,
            **{name: parts[name] for name in ("sampling", "weights", "estimator", "update")},
            "phases": [
                {
                    "from_round": from_round,
                    "clip": str(plan.clip),
                    "clip_norm": _or_none(plan.contribution.l2_bound),
                    "noise_multiplier": plan.noise.multiplier(plan.sensitivity),
                    "noise_std": plan.noise.std(plan.sensitivity),
                    "sensitivity": _or_none(plan.sensitivity),
                    "expected_weight": plan.expected_weight,
                    "grid": plan.contribution.grid,
                    "learning_rate": plan.update.learning_rate,
                    **_follows(plan),
                }
                for from_round, plan in self.phases(layout)
            ],
        }


def _follows(plan: RoundPlan) -> dict[str, Any]:
    """What a header says beside the first S where S follows the users; the multiplier above is then the update's share."""
    if plan.following is None:
        return {}
    return {"clip": str(plan.following), "quantile": plan.following.quantile, "count_noise_std": plan.count_noise_std}


def _or_none(bound: float) -> float | None:
    """JSON has no infinity: a bound that does not exist is null."""
    return bound if math.isfinite(bound) else None
