"""The plan to run: users a round for z = 1, the epsilon that it would have, and how long it would take.

In: the run, the S and sigma that were chosen, z, and the speed of the sweep. Out: the run to train, and its outlook. Every epsilon
here is hypothetical. Where in the paper: section 3, "Estimating the accuracy of private models for large datasets": the accuracy
comes from few users a round at the same sigma, qW = z S / sigma makes that noise private.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from unheard.errors import InvalidValue
from unheard.mechanism.noise import GaussianNoise, NoNoise
from unheard.mechanism.sampling import PoissonSampling
from unheard.privacy.accountants import CLAIMED, epsilons
from unheard.training.run import Run
from unheard.tuning.trials import Grid, clip_at, private_estimator

ROUNDING = 1e-12
"""15 / 0.003 is 5,000 users, and not one more for a last digit."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """A run that has not happened."""

    run: Run
    users_per_round: int
    noise_multiplier: float
    noise_std: float
    """sigma as it comes out: the chosen one, or less by less than one part in users_per_round."""
    epsilon: dict[str, float]
    """Hypothetical, by each accountant."""

    @property
    def claimed(self) -> str:
        return min(CLAIMED, key=lambda name: self.epsilon[name])

    @property
    def updates(self) -> int:
        """User updates that the whole run takes: what it costs to compute."""
        return self.users_per_round * self.run.training.rounds

    def record(self, users_per_second: float | None) -> dict[str, Any]:
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


def outlook(run: Run, norm: float, noise_std: float, noise_multiplier: float) -> Outlook:
    """The smallest whole number of users a round at which z times the sensitivity is no more than the chosen sigma."""
    users = users_for(run, norm, noise_std, noise_multiplier)
    if users > run.plan.population:
        largest = noise_multiplier * run.plan.population / users
        raise InvalidValue(
            f"S = {norm:g} and sigma = {noise_std:g} need {users:,} users a round for z = {noise_multiplier:g}, and the declared "
            f"population is {run.plan.population:,}. With all of them in every round z would be {largest:.3g}. Allow more noise "
            "(--allow-loss, --noise-stds), a smaller S, a smaller --noise-multiplier, or wait for more users."
        )
    chosen = planned(run, norm, users, noise_multiplier)
    events = [(chosen.plan.at(0, chosen.model.layout).event(), chosen.training.rounds)]
    return Outlook(
        run=chosen,
        users_per_round=users,
        noise_multiplier=noise_multiplier,
        noise_std=_std(chosen),
        epsilon=epsilons(events, chosen.claimed_delta),
    )


def check_can_be_private(run: Run, grid: Grid, noise_multiplier: float) -> None:
    """Before anything is trained: at least the smallest S with the largest sigma must be possible with the declared population."""
    norm, std = min(grid.norms), max(grid.noise_stds)
    users = users_for(run, norm, std, noise_multiplier)
    if users > run.plan.population:
        raise InvalidValue(
            f"Even S = {norm:g} with sigma = {std:g}, the easiest of these grids, needs {users:,} users a round for z = "
            f"{noise_multiplier:g}, and the declared population is {run.plan.population:,}: nothing was trained. Try smaller "
            "--norms, larger --noise-stds or a smaller --noise-multiplier."
        )


def users_for(run: Run, norm: float, noise_std: float, noise_multiplier: float) -> int:
    """qW = z S / sigma, as users: whole, rounded up, so that the noise is never more than what was tried."""
    everybody = planned(run, norm, run.plan.population, noise_multiplier)
    sensitivity = everybody.plan.at(0, run.model.layout).sensitivity  # at q = 1; it goes with 1/q
    needed = run.plan.population * noise_multiplier * sensitivity / noise_std
    users = max(1, math.ceil(needed * (1 - ROUNDING)))
    while users <= run.plan.population and _std(planned(run, norm, users, noise_multiplier)) > noise_std * (
        1 + ROUNDING
    ):
        users += 1  # the clipped denominator's grid goes by powers of two, not quite with 1/q
    return users


def planned(run: Run, norm: float, users_per_round: int, noise_multiplier: float) -> Run:
    """The run at this S, q and z: what `chosen.toml` holds."""
    quiet = replace(run.plan, sampling=PoissonSampling(users_per_round=float(users_per_round)), noise=NoNoise())
    plan = replace(
        quiet,
        clip=clip_at(run.plan.clip, norm),
        estimator=private_estimator(run.plan.estimator),
        noise=GaussianNoise(noise_multiplier=noise_multiplier),
    )
    return replace(run, plan=plan)


def _std(run: Run) -> float:
    plan = run.plan.at(0, run.model.layout)
    return plan.noise.std(plan.sensitivity)
