"""The plan: the parameters of Algorithm 1, checked together, and the privacy event of each round.

`Plan` has the parts that a run file declares. `Plan.at(round, layout)` returns the `RoundPlan` of one round, with every
number that the round needs, and its privacy event. A combination without a proof raises an error when the plan is
constructed, before training starts. `Change` is one entry of the schedule: S, sigma, z or eta may change during
training (paper: section 3, "Adjusting noise and clipping as training progresses"). A schedule that depends on private
results would need a proof of its own. This schedule is declared in the run file, so it cannot depend on them.

    >>> from unheard.parameters import Layout
    >>> plan = Plan(
    ...     population=10_000,
    ...     sampling=PoissonSampling(users_per_round=100),
    ...     update=FedAvg(),
    ...     clip=FlatClip(norm=15.0),
    ...     noise=GaussianNoise(noise_multiplier=1.0),
    ... )
    >>> now = plan.at(0, Layout((("weight", (3, 4)),)))
    >>> now.sensitivity  # S / (q W)
    0.15
    >>> now.event()
    PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0)

`KINDS` is the registry: the name of each part in a run file. To add a part, write a class in the module of its kind,
and add a line to `KINDS` and a line to `unheard/__init__.pyi` (docs/extending.md)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from unheard.config import require, require_positive, table_from_part
from unheard.errors import InvalidValue, UnprovenCombination
from unheard.mechanism.aggregation import (
    LARGEST_COHORT,
    UNNOISED_GRID,
    BoundedAverage,
    ClippedDenominator,
    CohortSum,
    Contribution,
    Estimator,
    FixedDenominator,
    TrueAverage,
    noised_grid,
)
from unheard.mechanism.clipping import AdaptiveClip, Clip, FlatClip, NoClip, PerLayerClip
from unheard.mechanism.correlated import CorrelatedNoise
from unheard.mechanism.noise import (
    DistributedGaussianNoise,
    ExactGaussianNoise,
    GaussianNoise,
    Noise,
    NoNoise,
    in_units,
)
from unheard.mechanism.sampling import (
    CyclicPoissonSampling,
    ExampleSampling,
    FixedSizeSampling,
    MinSeparationSampling,
    PoissonSampling,
    Sampling,
)
from unheard.parameters import Layout
from unheard.privacy.events import DistributedGaussian, Event, NonPrivate, PoissonGaussian
from unheard.updates.user_update import CappedWeights, EqualWeights, FedAvg, FedSGD

Weighting = EqualWeights | CappedWeights
Update = FedAvg | FedSGD

KINDS: dict[str, dict[str, type]] = {
    "sampling": {
        "poisson": PoissonSampling,
        "cyclic_poisson": CyclicPoissonSampling,
        "min_separation": MinSeparationSampling,
        "examples": ExampleSampling,
        "fixed_size": FixedSizeSampling,
    },
    "weights": {"equal": EqualWeights, "capped": CappedWeights},
    "update": {"fedavg": FedAvg, "fedsgd": FedSGD},
    "clip": {"flat": FlatClip, "per_layer": PerLayerClip, "none": NoClip, "adaptive": AdaptiveClip},
    "estimator": {
        "fixed_denominator": FixedDenominator,
        "clipped_denominator": ClippedDenominator,
        "true_average": TrueAverage,
    },
    "noise": {
        "gaussian": GaussianNoise,
        "correlated": CorrelatedNoise,
        "exact_gaussian": ExactGaussianNoise,
        "distributed_gaussian": DistributedGaussianNoise,
        "none": NoNoise,
    },
}
"""The class of each part, by section and `kind` of a run file."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One entry of the schedule: new values from a round on. A value that is left out does not change.

    >>> Change(from_round=100, clip_norm=10.0).clip_norm
    10.0

    Args:
        from_round: The first round with the new values; the first round of training is 0.
        clip_norm: S, the largest L2 norm of a user's update.
        noise_std: sigma, the standard deviation of the noise on each parameter.
        noise_multiplier: z, instead of `noise_std`.
        learning_rate: eta of the user's local steps.

    Raises:
        InvalidValue: Nothing changes, both `noise_std` and `noise_multiplier` are given, or a number is out of range.
    """

    from_round: int
    clip_norm: float | None = None
    noise_std: float | None = None
    noise_multiplier: float | None = None
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        require(
            self.from_round >= 1,
            "from_round must be at least 1; what holds from round 0 is set in the parts themselves.",
        )
        require(
            self.noise_std is None or self.noise_multiplier is None, "give noise_std or noise_multiplier, not both."
        )
        given = (self.clip_norm, self.noise_std, self.noise_multiplier, self.learning_rate)
        require(any(v is not None for v in given), "a change must change something.")
        for value in given:
            require_positive(**{"every value": value})


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """The parts and numbers of one round, after the schedule. `Plan.at` constructs it; engines and rounds use it."""

    population: int
    sampling: Sampling
    weights: Weighting
    update: Update
    clip: Clip
    estimator: Estimator
    noise: Noise
    layout: Layout
    adaptive_clip: AdaptiveClip | None = None
    """The adaptive clip of the plan; `clip` is then the flat clip with the S of this round. None for a fixed clip."""

    @cached_property
    def expected_weight(self) -> float:
        """The declared expected weight of a round, the denominator of the estimator.

        It is q W for a fixed denominator and q W_min for a clipped one. If examples are drawn, it is the number of
        examples per round.
        """
        if isinstance(self.sampling, ExampleSampling):
            # DP: the number of examples per round is declared, and every example has weight 1.
            return self.sampling.examples_per_round
        return self.sampling.probability(self.population) * self.estimator.minimum_weight(
            self.weights.total(self.population)
        )

    @cached_property
    def contribution(self) -> Contribution:
        """The bound and the grid of what one user may add to the sum."""
        l2_bound = self.clip.l2_bound(self.layout)
        is_noised = not isinstance(self.noise, NoNoise)
        return Contribution(
            balls=tuple(self.clip.balls(self.layout)),
            l2_bound=l2_bound,
            grid=noised_grid(l2_bound) if is_noised else UNNOISED_GRID,
            is_noised=is_noised,
        )

    @cached_property
    def sensitivity(self) -> float:
        """The sensitivity of the round's average: how far one user can move it. It depends on declared numbers only."""
        return self.estimator.sensitivity(self.clip.l2_bound(self.layout), self.expected_weight, self.layout.total)

    @cached_property
    def noise_units(self) -> float | None:
        """sigma in units of the grid of the round's average. With it, the noise can be drawn before the sum is known.

        None if the plan adds no noise, or if the estimator's unit is not known before the sum is computed.
        """
        if isinstance(self.noise, NoNoise):
            return None
        unit = self.estimator.unit(self.contribution.l2_bound, self.contribution.grid, self.expected_weight)
        return None if unit is None else in_units(self.noise.std(self.sensitivity), unit)

    def average(self, total: CohortSum) -> BoundedAverage:
        """Compute the average of a cohort from its sum. The result is private and carries its sensitivity."""
        return self.estimator.average(total, self.expected_weight)

    def event(self, index: int = 0) -> Event:
        """Return the privacy event of this round: how users are drawn, and the noise multiplier that is really used.

        Args:
            index: For correlated noise: the number of the attempt in its mechanism.
        """
        if isinstance(self.noise, NoNoise):
            return NonPrivate(reason="no noise is added")
        if isinstance(self.noise, CorrelatedNoise):
            assert isinstance(self.sampling, CyclicPoissonSampling | MinSeparationSampling)
            return self.noise.event(self.sampling, self.population, index)
        z = self.noise.multiplier(self.sensitivity)
        if self.adaptive_clip is not None:
            z = self.adaptive_clip.joint_multiplier(z, self.count_noise_std)
        event = self.sampling.event(self.population, z)
        if isinstance(self.noise, DistributedGaussianNoise) and isinstance(event, PoissonGaussian):
            return DistributedGaussian(
                sampling_prob=event.sampling_prob, noise_multiplier=z, min_parties=self.noise.min_parties
            )
        return event

    @cached_property
    def count_noise_std(self) -> float:
        """sigma_b, the noise on the count of an adaptive clip. 0 for a fixed clip, and for a baseline without noise."""
        if self.adaptive_clip is None or isinstance(self.noise, NoNoise):
            return 0.0
        return self.adaptive_clip.count_noise(self.expected_users)

    @property
    def expected_users(self) -> float:
        """The expected number of users per round, q K, computed from declared numbers only."""
        return self.sampling.probability(self.population) * self.population

    def next_norm(self, total: CohortSum, rng: np.random.Generator) -> float:
        """Compute the S of the next round. The clip must be adaptive.

        Args:
            total: The sum of this round, with the balance of unclipped and clipped users.
            rng: The stream for the noise on the count.
        """
        assert self.adaptive_clip is not None
        assert isinstance(self.clip, FlatClip)
        assert total.balance is not None, "an engine counts the clipped users when the clip is adaptive"
        norm, users = self.clip.norm, self.expected_users
        return self.adaptive_clip.next_norm(norm, total.balance, users, self.count_noise_std, rng)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parameters of Algorithm 1, and how they change over time.

    Args:
        population: K, the declared number of users, which may be published. q, W and delta are computed from it, never
            from the number of users in the store.
        sampling: Which users take part in a round.
        weights: The weight of a user in the average.
        update: What a user computes: FedAvg or FedSGD.
        clip: The bound on a user's update.
        estimator: How the sum becomes an average.
        noise: The noise that is added to the average.
        schedule: Changes of S, sigma, z or eta, in increasing order of their rounds.

    Raises:
        InvalidValue: A number is out of range, or two numbers contradict each other.
        UnprovenCombination: No proof of privacy covers the noise in combination with the other parts.

    Example:
        >>> plan = Plan(
        ...     population=1_000_000,
        ...     sampling=PoissonSampling(users_per_round=5000),
        ...     update=FedAvg(),
        ...     clip=FlatClip(norm=15.0),
        ...     noise=GaussianNoise(noise_multiplier=1.0),
        ... )
        >>> plan.sampling.probability(plan.population)
        0.005
    """

    population: int
    sampling: Sampling
    weights: Weighting = EqualWeights()
    update: Update
    clip: Clip
    estimator: Estimator = FixedDenominator()
    noise: Noise
    schedule: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        if self.population < 1:
            raise InvalidValue(f"population must be at least 1, not {self.population}.")
        if self.population > LARGEST_COHORT:
            raise InvalidValue("population must be at most 2^40, so that no cohort's integer sum can overflow.")
        check_order(self.schedule)
        self.sampling.probability(self.population)
        if isinstance(self.sampling, ExampleSampling):
            self._check_examples()
        if isinstance(self.noise, CorrelatedNoise):
            self._check_correlated(self.noise)
            self.clip.check_private([self.noise], self._expected_users)
            return
        if isinstance(self.sampling, CyclicPoissonSampling | MinSeparationSampling):
            self.sampling.event(self.population, 1.0)  # raises an error, because these samplers need correlated noise
        noises = [self.noise]
        for change in self.schedule:
            if change.clip_norm:
                self.clip.at_norm(change.clip_norm)
            if change.noise_std or change.noise_multiplier:
                noises.append(self.noise.changed(change.noise_multiplier, change.noise_std))
        if not isinstance(self.noise, NoNoise):
            # Each part raises an error if no proof covers it; the sampler does so in `event`.
            self.sampling.event(self.population, 1.0)
            self.estimator.check_private()
            self.clip.check_private(noises, self._expected_users)
        if isinstance(self.noise, DistributedGaussianNoise):
            self._check_distributed()

    @property
    def _expected_users(self) -> float:
        return self.sampling.probability(self.population) * self.population

    def _check_examples(self) -> None:
        """Raise `UnprovenCombination` if the proof for sampling of examples does not cover the other parts."""
        # DP: one clipped gradient for each example. Several local steps of a user would tie the examples together.
        if not isinstance(self.update, FedSGD) or self.update.batch_size is not None:
            raise UnprovenCombination(
                "[sampling] kind = 'examples' adds one clipped gradient for each example: use [update] kind = 'fedsgd' without "
                "batch_size. FedAvg takes several steps on all examples of a user, for which its event has no proof."
            )
        if not isinstance(self.weights, EqualWeights) or not isinstance(self.estimator, FixedDenominator):
            raise UnprovenCombination(
                "[sampling] kind = 'examples' divides by the declared examples_per_round, and every example counts 1: use "
                "[weights] kind = 'equal' and [estimator] kind = 'fixed_denominator'."
            )
        if self.clip.adaptive is not None:
            raise UnprovenCombination(
                "An adaptive clip counts users, and [sampling] kind = 'examples' draws examples: use [clip] kind = 'flat'."
            )

    def _check_correlated(self, noise: CorrelatedNoise) -> None:
        """Raise `UnprovenCombination` if the proof for correlated noise does not cover the other parts."""
        # DP: only these two samplers keep the rounds of one user apart, which the sensitivity of C requires.
        if not isinstance(self.sampling, CyclicPoissonSampling | MinSeparationSampling):
            raise UnprovenCombination(
                "Correlated noise needs [sampling] kind = 'cyclic_poisson' or 'min_separation': its proof needs the "
                "rounds of each user to be apart."
            )
        # DP: the sensitivity of BLT noise counts all rounds of a user; sampling within a group has no proof here.
        if noise.strategy == "blt" and not isinstance(self.sampling, MinSeparationSampling):
            raise UnprovenCombination("[noise] strategy = 'blt' needs [sampling] kind = 'min_separation'.")
        # DP: the proof requires that one user changes a row of X by at most S / (q W), whoever else is drawn.
        if type(self.estimator) is not FixedDenominator:
            raise UnprovenCombination(
                "Correlated noise is proved for [estimator] kind = 'fixed_denominator' only. Use it, or [noise] kind = "
                "'gaussian'."
            )
        if self.clip.adaptive is not None:
            raise UnprovenCombination(
                "Correlated noise with an adaptive clip has no proof: the sensitivity would change from round to round. "
                "Use [clip] kind = 'flat' or 'per_layer', or [noise] kind = 'gaussian'."
            )
        # DP: all rounds must share one sensitivity and one sigma, because the noise of one round cancels that of
        # others.
        if any(change.clip_norm or change.noise_std or change.noise_multiplier for change in self.schedule):
            raise UnprovenCombination(
                "A [[schedule]] may not change clip_norm or the noise of a run with correlated noise, only learning_rate."
            )

    def _check_distributed(self) -> None:
        """Raise `UnprovenCombination` if the estimator or the clip needs more than the sum with the nodes' noise."""
        # DP: another estimator needs the exact weight drawn, and an adaptive clip an exact count, both without noise.
        if not isinstance(self.estimator, FixedDenominator) or self.clip.adaptive is not None:
            raise UnprovenCombination(
                "Distributed noise covers the sum of the updates and nothing else. Set [estimator] kind = "
                "'fixed_denominator' and [clip] kind = 'flat' or 'per_layer'."
            )

    def at(self, round: int, layout: Layout, clip_norm: float | None = None) -> RoundPlan:
        """Return the plan of one round, with all changes of the schedule up to that round.

        Args:
            round: The number of the round, from 0.
            layout: The layout of the model.
            clip_norm: The present S of an adaptive clip. None: its initial norm.
        """
        clip, noise, update = self.clip, self.noise, self.update
        for change in self.schedule:
            if change.from_round > round:
                break
            clip = clip.at_norm(change.clip_norm) if change.clip_norm else clip
            update = replace(update, learning_rate=change.learning_rate) if change.learning_rate else update
            if change.noise_std or change.noise_multiplier:
                noise = noise.changed(change.noise_multiplier, change.noise_std)
        adaptive = clip.adaptive
        if adaptive is not None:
            clip = adaptive.at_round(clip_norm)
            if noise.noise_multiplier is not None:
                sigma_b = adaptive.count_noise(self._expected_users)
                noise = noise.changed(adaptive.update_multiplier(noise.noise_multiplier, sigma_b), None)
        return RoundPlan(
            population=self.population,
            sampling=self.sampling,
            weights=self.weights,
            update=update,
            clip=clip,
            estimator=self.estimator,
            noise=noise,
            layout=layout,
            adaptive_clip=adaptive,
        )

    def phases(self, layout: Layout) -> Iterator[tuple[int, RoundPlan]]:
        """Yield the first round of each phase of the schedule, from round 0 on, with the plan of that phase."""
        for from_round in (0, *(change.from_round for change in self.schedule)):
            yield from_round, self.at(from_round, layout)

    def correlated_facts(self) -> dict[str, Any] | None:
        """Return the facts about correlated noise for the header of a ledger; None for other noise."""
        if not isinstance(self.noise, CorrelatedNoise):
            return None
        assert isinstance(self.sampling, CyclicPoissonSampling | MinSeparationSampling)
        return self.noise.facts(self.sampling, self.population)

    def facts(self, layout: Layout) -> dict[str, Any]:
        """Return the public facts for the header of a ledger: the declared parts, and the numbers of each phase."""
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
                    **_adaptive_facts(plan),
                }
                for from_round, plan in self.phases(layout)
            ],
        }


def check_order(changes: Sequence[Change]) -> None:
    """Raise `InvalidValue` if the rounds of the changes are not strictly increasing."""
    for before, after in pairwise(changes):
        if after.from_round <= before.from_round:
            raise InvalidValue(
                f"[[schedule]] from_round = {after.from_round} stands after {before.from_round}: list changes by increasing round."
            )


def _adaptive_facts(plan: RoundPlan) -> dict[str, Any]:
    """Return the facts about an adaptive clip for the ledger's header; empty for other clips.

    With an adaptive clip, the noise multiplier in the header is that of the update alone, without the count.
    """
    if plan.adaptive_clip is None:
        return {}
    rule = plan.adaptive_clip
    return {"clip": str(rule), "quantile": rule.quantile, "count_noise_std": plan.count_noise_std}


def _or_none(bound: float) -> float | None:
    """Return the bound, or None if it is infinite, because JSON has no infinity."""
    return bound if math.isfinite(bound) else None
