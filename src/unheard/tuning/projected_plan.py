"""Projects the private run with the chosen S and sigma: users per round, hypothetical epsilon, and user updates.

The accuracy was measured with few users per round and noise sigma. The same sigma is private, with noise multiplier z,
once the expected weight per round is qW = z S / sigma (section 3 of the paper, "Estimating the accuracy of private
models for large datasets"). `project_plan` finds the smallest whole number of users per round with that property.

Every epsilon here is hypothetical: it belongs to a run that has not happened.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from unheard.errors import InvalidValue
from unheard.mechanism.correlated import CorrelatedNoise
from unheard.mechanism.noise import GaussianNoise
from unheard.mechanism.sampling import PoissonSampling
from unheard.privacy.accountants import CLAIMED, epsilons
from unheard.training.run import Run
from unheard.tuning.trials import Grid, clip_at, private_estimator

ROUNDING = 1e-12
"""Relative slack before rounding up: 15 / 0.003 must give 5,000 users and not 5,001."""


@dataclass(frozen=True, kw_only=True)
class ProjectedPlan:
    """A private run that has not happened.

    Attributes:
        run: The run to train; `chosen.toml` holds it.
        users_per_round: Its expected users per round.
        noise_multiplier: Its z, the noise in units of the sensitivity.
        noise_std: Its sigma: the chosen one, or less by less than one part in `users_per_round`.
        epsilon: Its hypothetical epsilon by each accountant.
    """

    run: Run
    users_per_round: int
    noise_multiplier: float
    noise_std: float
    epsilon: dict[str, float]

    @property
    def claimed(self) -> str:
        """The accountant whose epsilon a statement would claim."""
        return min(CLAIMED, key=lambda name: self.epsilon[name])

    @property
    def updates(self) -> int:
        """The number of user updates of the whole run, which decides its computing time."""
        return self.users_per_round * self.run.training.rounds

    def record(self, users_per_second: float | None) -> dict[str, Any]:
        """Return the plan for `tuning.json`, with its duration if a speed is known."""
        return {
            "hypothetical": True,
            "population": self.run.plan.population,
            "users_per_round": self.users_per_round,
            "sampling_prob": self.run.plan.sampling.probability(self.run.plan.population),
            "noise_multiplier": self.noise_multiplier,
            "noise_std": self.noise_std,
            "rounds": self.run.training.rounds,
            "delta": self.run.claimed_delta,
            "epsilon": self.epsilon,
            "claimed": {"epsilon": self.epsilon[self.claimed], "accountant": self.claimed},
            "updates": self.updates,
            "users_per_second": users_per_second,
            "seconds": None if users_per_second is None else self.updates / users_per_second,
        }


def project_plan(run: Run, norm: float, noise_std: float, noise_multiplier: float) -> ProjectedPlan:
    """Return the private run with the fewest users per round whose noise is no more than the chosen sigma.

    Args:
        run: The run to plan for, with its declared population.
        norm: The chosen S.
        noise_std: The chosen sigma.
        noise_multiplier: z of the private run.

    Raises:
        InvalidValue: The declared population is too small.
    """
    users = users_for(run, norm, noise_std, noise_multiplier)
    if users > run.plan.population:
        largest = noise_multiplier * run.plan.population / users
        raise InvalidValue(
            f"S = {norm:g} and sigma = {noise_std:g} need {users:,} users per round for z = {noise_multiplier:g}, and the declared "
            f"population is {run.plan.population:,}. With all of them in every round z would be {largest:.3g}. Allow more noise "
            "(--allow-loss, --noise-stds), a smaller S, a smaller --noise-multiplier, or wait for more users."
        )
    chosen = private_run(run, norm, users, noise_multiplier)
    events = [(chosen.plan.at(0, chosen.model.layout).event(), chosen.training.rounds)]
    return ProjectedPlan(
        run=chosen,
        users_per_round=users,
        noise_multiplier=noise_multiplier,
        noise_std=_noise_std(chosen),
        epsilon=epsilons(events, chosen.claimed_delta),
    )


def check_can_be_private(run: Run, grid: Grid, noise_multiplier: float) -> None:
    """Check, before anything is trained, that the population suffices at least for the smallest S and the largest sigma.

    Args:
        run: The run to plan.
        grid: The values of S and sigma to try.
        noise_multiplier: z of the planned run.

    Raises:
        InvalidValue: It does not, so no choice from these grids could be trained privately.
    """
    if isinstance(run.plan.noise, CorrelatedNoise):
        raise InvalidValue(
            "`unheard tune` chooses S and sigma for independent noise. Set [noise] kind = 'gaussian' and [sampling] kind = "
            "'poisson', tune, and then let `unheard init --noise auto` or `unheard plan --compare-noise` choose the noise."
        )
    norm, std = min(grid.norms), max(grid.noise_stds)
    users = users_for(run, norm, std, noise_multiplier)
    if users > run.plan.population:
        raise InvalidValue(
            f"Even S = {norm:g} with sigma = {std:g}, the easiest of these grids, needs {users:,} users per round for z = "
            f"{noise_multiplier:g}, and the declared population is {run.plan.population:,}: nothing was trained. Try smaller "
            "--norms, larger --noise-stds or a smaller --noise-multiplier."
        )


def users_for(run: Run, norm: float, noise_std: float, noise_multiplier: float) -> int:
    """Return the users per round for qW = z S / sigma, rounded up, so that the noise is never more than what was tried.

    Args:
        run: The run to plan; its weights and estimator determine W.
        norm: S, the largest L2 norm of a user's update.
        noise_std: sigma, the standard deviation of the noise on each parameter.
        noise_multiplier: z, the noise in units of the sensitivity.
    """
    everybody = private_run(run, norm, run.plan.population, noise_multiplier)
    sensitivity = everybody.plan.at(0, run.model.layout).sensitivity  # at q = 1; in proportion to 1 / q
    needed = run.plan.population * noise_multiplier * sensitivity / noise_std
    users = max(1, math.ceil(needed * (1 - ROUNDING)))
    # The grid of the clipped denominator goes by powers of two, so its sensitivity is not quite in proportion to 1 / q.
    while users <= run.plan.population and _noise_std(private_run(run, norm, users, noise_multiplier)) > noise_std * (
        1 + ROUNDING
    ):
        users += 1
    return users


def private_run(run: Run, norm: float, users_per_round: int, noise_multiplier: float) -> Run:
    """Return the run with this S, users per round and z.

    Args:
        run: The run to plan.
        norm: S, the largest L2 norm of a user's update.
        users_per_round: The expected users per round.
        noise_multiplier: z, the noise in units of the sensitivity.
    """
    plan = replace(
        run.plan,
        sampling=PoissonSampling(users_per_round=float(users_per_round)),
        clip=clip_at(run.plan.clip, norm),
        estimator=private_estimator(run.plan.estimator),
        noise=GaussianNoise(noise_multiplier=noise_multiplier),
    )
    return replace(run, plan=plan)


def _noise_std(run: Run) -> float:
    plan = run.plan.at(0, run.model.layout)
    return plan.noise.std(plan.sensitivity)
