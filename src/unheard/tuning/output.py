"""Computes the output of a tuning: the private run to train, the privacy cost, and the files that hold them.

`conclude` is called when all stages are trained. It computes the projected plan and the cost, writes tuning.json and
chosen.toml, and returns what the command line prints.

**The projected plan** is the private run with the chosen S and sigma. The trials measured the accuracy with few users
per round and noise sigma. A run with the same sigma has noise multiplier z if its expected weight per round is
qW = z S / sigma (section 3 of the paper, "Estimating the accuracy of private models for large datasets").
`project_plan` finds the smallest whole number of users per round with that property. The epsilon of the plan is
hypothetical, because the run has not been trained.

**The cost of the tuning itself** is the epsilon of all its trials together, computed from their ledgers. The baseline
and the sweep of S have no noise, so this epsilon is infinite for the users of the trials, even if only private runs
follow. `tuning_cost` computes the cost; the command line prints its `sentences` with every choice.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unheard.engines.choice import EngineChoice
from unheard.errors import InvalidValue
from unheard.formatting import accountant_title, small
from unheard.mechanism.correlated import CorrelatedNoise
from unheard.mechanism.noise import GaussianNoise
from unheard.mechanism.sampling import PoissonSampling
from unheard.privacy.accountants import CLAIMED, Bound, best_epsilon, epsilons, versions
from unheard.privacy.events import Event, NonPrivate
from unheard.privacy.run_ledger import read_run_ledger
from unheard.privacy.statement import plain
from unheard.run_folder import RunFolder, replace_file
from unheard.training.run import Run, run_toml
from unheard.tuning.pipeline import Allowance, TuningResult, users_per_second
from unheard.tuning.trials import Grid, Result, Trial, clip_at, private_estimator

ROUNDING = 1e-12
"""Relative tolerance when a number of users is rounded up, so that 15 / 0.003 gives 5,000 users and not 5,001."""


@dataclass(frozen=True, kw_only=True)
class ProjectedPlan:
    """A private run that is planned and not yet trained.

    Attributes:
        run: The run to train, which is written to `chosen.toml`.
        users_per_round: Its expected users per round.
        noise_multiplier: Its z, the noise in units of the sensitivity.
        noise_std: Its sigma. It is the chosen sigma or slightly less, because the number of users is rounded up.
        epsilon: Its hypothetical epsilon by each accountant.
    """

    run: Run
    users_per_round: int
    noise_multiplier: float
    noise_std: float
    epsilon: dict[str, float]

    @property
    def claimed(self) -> str:
        """The name of the accountant whose epsilon the run's statement would claim, which is the smallest."""
        return min(CLAIMED, key=lambda name: self.epsilon[name])

    @property
    def updates(self) -> int:
        """The expected number of user updates of the whole run, from which its duration is estimated."""
        return self.users_per_round * self.run.training.rounds

    def record(self, users_per_second: float | None) -> dict[str, Any]:
        """Return the plan as `tuning.json` holds it.

        Args:
            users_per_second: The measured speed, from which `seconds` is estimated; None if unknown.
        """
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
    """Return the private run with the fewest users per round such that its noise is at most the chosen sigma.

    Args:
        run: The run that was tuned, with its declared population.
        norm: The chosen S.
        noise_std: The chosen sigma.
        noise_multiplier: z of the private run.

    Raises:
        InvalidValue: The run would need more users per round than the declared population has.
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
    """Check that the population is large enough for the smallest S with the largest sigma, which need the fewest users.

    `unheard tune` calls this before it trains anything.

    Args:
        run: The run that is tuned.
        grid: The values of S and sigma to try.
        noise_multiplier: z of the planned run.

    Raises:
        InvalidValue: The population is too small for every choice from these grids, or the run has correlated noise.
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
    """Return the users per round for which qW = z S / sigma, rounded up so that the noise is at most sigma.

    The result may be larger than the population; the caller must check.

    Args:
        run: The run to plan; its weights and estimator determine W.
        norm: S, the largest L2 norm of a user's update.
        noise_std: sigma, the standard deviation of the noise on each parameter.
        noise_multiplier: z, the noise in units of the sensitivity.
    """
    everybody = private_run(run, norm, run.plan.population, noise_multiplier)
    sensitivity = everybody.plan.at(0, run.model.layout).sensitivity  # at q = 1; it is proportional to 1 / q
    needed = run.plan.population * noise_multiplier * sensitivity / noise_std
    users = max(1, math.ceil(needed * (1 - ROUNDING)))
    # The clipped denominator rounds averages to a grid whose step is a power of two, so its sensitivity is not exactly
    # proportional to 1 / q.
    while users <= run.plan.population and _noise_std(private_run(run, norm, users, noise_multiplier)) > noise_std * (
        1 + ROUNDING
    ):
        users += 1
    return users


def private_run(run: Run, norm: float, users_per_round: int, noise_multiplier: float) -> Run:
    """Return the run with this S, users per round and z, with Poisson sampling and a bounded estimator.

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


RECORD, CHOSEN = "tuning.json", "chosen.toml"
"""The names of the two files that a tuning writes."""


@dataclass(frozen=True, kw_only=True)
class TuningCost:
    """The privacy cost of all trials of a tuning together.

    Attributes:
        corpus: The name of the store whose users were charged.
        is_proxy: Whether that store is a proxy and not the run's own.
        runs: The number of trials.
        charges: The number of charges in the ledgers of all trials.
        without_noise: How many of these charges are for rounds without noise.
        delta: The delta of both bounds: the smallest delta of a trial.
        bound: The epsilon of all charges.
        noised: The epsilon of only those charges that have noise.
    """

    corpus: str
    is_proxy: bool
    runs: int
    charges: int
    without_noise: int
    delta: float
    bound: Bound
    noised: Bound

    def record(self) -> dict[str, Any]:
        """Return the cost as `tuning.json` holds it."""
        return {
            "corpus": self.corpus,
            "is_proxy": self.is_proxy,
            "runs": self.runs,
            "charges": self.charges,
            "charges_without_noise": self.without_noise,
            "delta": self.delta,
            "epsilon": self.bound.epsilon,
            "accountant": self.bound.accountant,
            "epsilon_of_the_noised": self.noised.epsilon,
        }

    @property
    def sentences(self) -> list[str]:
        """The cost in words, and what it means for the users of the corpus."""
        by = accountant_title(self.bound.accountant)
        epsilon = "infinity" if math.isinf(self.bound.epsilon) else f"{self.bound.epsilon:.4g} by {by}"
        spent = (
            f"The privacy cost of this tuning: ε = {epsilon} at δ = {small(self.delta)}, the composition of its {self.runs} runs "
            f"({self.charges} charges, {self.without_noise} of them without noise)."
        )
        if self.is_proxy:
            return [
                spent,
                "It was charged to the users of the proxy corpus, who have no guarantee. The users of the run's own corpus took "
                "part in no trial and paid nothing.",
            ]
        return [
            spent,
            "It was charged to the users that the plan is for. The plan's own statement will not include it; over all runs they "
            "have no guarantee (unheard statement --all-runs). Tune on public or proxy text: --corpus PROXY --population N.",
            "No smaller bound holds for a sweep. The best of several private runs has a smaller bound only if the number of "
            "trials is random and secret (unheard tune --select).",
        ]


def tuning_cost(trials: Sequence[Trial], out: Path, *, is_proxy: bool) -> TuningCost:
    """Compute the privacy cost of all trials from their ledgers.

    Args:
        trials: All trials of the grid. The run folder of each must exist.
        out: The folder of the tuning. Trials in it that are not in the grid, from an earlier command with another grid,
            are counted too.
        is_proxy: Whether the trials were trained on a proxy corpus.
    """
    # DP: a trial that is no longer in the grid was charged, and its results were seen.
    folders = dict.fromkeys(
        [trial.folder for trial in trials] + sorted(path.parent for path in out.glob("*/*/ledger.jsonl"))
    )
    ledgers = [read_run_ledger(RunFolder.open(folder)) for folder in folders]
    events: list[Event] = [event for ledger in ledgers for event in ledger.events]
    delta = min(ledger.facts["delta"] for ledger in ledgers)
    noised = [event for event in events if not isinstance(event, NonPrivate)]
    return TuningCost(
        corpus=Path(trials[0].run.corpus).name,
        is_proxy=is_proxy,
        runs=len(ledgers),
        charges=len(events),
        without_noise=len(events) - len(noised),
        delta=delta,
        bound=best_epsilon(events, delta),
        noised=best_epsilon(noised, delta),
    )


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """The outcome of a tuning, as `conclude` returns it.

    Attributes:
        record: The content of `tuning.json`.
        cost: The privacy cost of the tuning.
        refusal: The reason why no private run can be planned; None if there is a plan.
    """

    record: dict[str, Any]
    cost: TuningCost
    refusal: str | None


def conclude(
    run: Run,
    result: TuningResult,
    allowance: Allowance,
    noise_multiplier: float,
    out: Path,
    engine: EngineChoice,
    *,
    is_proxy: bool,
) -> Conclusion:
    """Compute the cost and the projected plan, and write `tuning.json` and `chosen.toml`.

    Args:
        run: The run that was tuned.
        result: The results of all trials.
        allowance: How much accuracy the choices were allowed to lose.
        noise_multiplier: z of the private run.
        out: The folder of the tuning.
        engine: The engine to write into `chosen.toml`.
        is_proxy: Whether the trials were trained on a proxy corpus.

    Returns:
        The conclusion. If no S or sigma was chosen, or the population is too small for the plan, `refusal` gives the
        reason. `tuning.json` is then written without a plan, and `chosen.toml` is not written.
    """
    cost, refusal, plan = tuning_cost(result.trials, out, is_proxy=is_proxy), result.refusal, None
    if result.noise is not None:
        chosen = result.noise.result
        try:
            plan = project_plan(run, chosen.norm, chosen.noise_std, noise_multiplier)
        except InvalidValue as error:
            refusal = str(error)
    record = _record(result, allowance, cost, plan, users_per_second(out))
    replace_file(out / RECORD, (json.dumps(record, indent=2, allow_nan=False) + "\n").encode())
    if plan is None:
        (out / CHOSEN).unlink(missing_ok=True)  # a file from an earlier tuning would not match this record
    else:
        replace_file(out / CHOSEN, (_preface(record, plan) + run_toml(plan.run, engine)).encode())
    return Conclusion(record=record, cost=cost, refusal=refusal)


def _record(
    result: TuningResult, allowance: Allowance, cost: TuningCost, plan: ProjectedPlan | None, speed: float | None
) -> dict[str, Any]:
    """Return the content of `tuning.json`, in which infinity is the word "infinity"."""
    return plain(
        {
            "trials": [_row(row, result) for row in result.results],
            "margin_points": result.margin.points,
            "margin_is_of_repeated_runs": result.margin.of_seeds,
            "allowed": {"clip_loss": allowance.clip_loss, "loss": allowance.loss},
            "chosen": {
                "norm": result.norm and result.norm.result.norm,
                "noise_std": result.noise and result.noise.result.noise_std,
                "loss_points": result.noise and result.noise.loss,
                "remarks": [remark for choice in (result.norm, result.noise) if choice for remark in choice.remarks],
            },
            "plan": None if plan is None else plan.record(speed),
            "tuning_cost": cost.record(),
            "versions": versions(),
        }
    )


def _row(setting: Result, result: TuningResult) -> dict[str, Any]:
    """Return the record of one setting for `tuning.json`: its accuracy, and its loss against the baseline."""
    loss = setting.loss_against(result.baseline)
    return {
        "stage": setting.stage,
        "norm": setting.norm,
        "noise_std": setting.noise_std,
        "seeds": len(setting.last),
        "evaluations": min(len(values) for values in setting.last),
        "accuracy_top1": setting.accuracy,
        "accuracy_top1_of_seeds": setting.of_seeds,
        "loss_points": loss,
        "within_noise": setting != result.baseline and result.margin.hides(loss),
        "chosen": any(choice is not None and choice.result == setting for choice in (result.norm, result.noise)),
    }


def _preface(record: dict[str, Any], planned: ProjectedPlan) -> str:
    """Return the comment at the top of `chosen.toml`."""
    plan = record["plan"]
    text = (
        "proxy text"
        if record["tuning_cost"]["is_proxy"]
        else "the text of the users that this run is for: over all runs they have no guarantee"
    )
    return (
        "# Chosen by `unheard tune`.\n"
        f"# Accuracy was estimated with fewer users per round and the same noise, on {text}.\n"
        f"# After {plan['rounds']:,} rounds this run would have epsilon {plan['claimed']['epsilon']:.4g} at delta "
        f"{plan['delta']:.3g} (accountant {plan['claimed']['accountant']}): hypothetical until it is trained.\n"
        f"# It computes about {plan['updates']:,} user updates, with noise sigma = {planned.noise_std:.6g}.\n\n"
    )
