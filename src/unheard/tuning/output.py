"""Writes what a tuning leaves: `tuning.json` with every result, and `chosen.toml`, the private run to train.

`conclude` is called once all stages are trained. It computes the cost of the tuning and the projected plan, writes both
files, and returns everything for the command line to print.

**The cost of the tuning itself** is the composition of all its trials, read from their ledgers. A sweep without noise
has epsilon infinity for the users it was done on, whatever is trained afterwards. `tuning_cost` computes the figure,
and its `sentences` must accompany every choice.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unheard.engines.choice import EngineChoice
from unheard.errors import InvalidValue
from unheard.formatting import accountant_title, small
from unheard.privacy.accountants import Bound, best_epsilon, versions
from unheard.privacy.events import Event, NonPrivate
from unheard.privacy.run_ledger import read_run_ledger
from unheard.privacy.statement import plain
from unheard.run_folder import RunFolder, replace_file
from unheard.training.run import Run, run_toml
from unheard.tuning.pipeline import Allowance, TuningResult, users_per_second
from unheard.tuning.projected_plan import ProjectedPlan, project_plan
from unheard.tuning.trials import Result, Trial

RECORD, CHOSEN = "tuning.json", "chosen.toml"


@dataclass(frozen=True, kw_only=True)
class TuningCost:
    """The cost of all trials together.

    Attributes:
        corpus: The name of the corpus whose users were charged.
        is_proxy: Whether that is a proxy corpus and not the run's own.
        runs: The number of trials.
        charges: The number of rounds that were charged.
        without_noise: How many of these rounds had no noise.
        delta: The delta of both bounds.
        bound: Epsilon of all charges.
        noised: Epsilon of the charges with noise alone, as if the others had not happened.
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
        """Return the cost for `tuning.json`."""
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
            f"What this tuning cost: ε = {epsilon} at δ = {small(self.delta)}, the composition of its {self.runs} runs "
            f"({self.charges} charges, {self.without_noise} of them without noise)."
        )
        if self.is_proxy:
            return [
                spent,
                "It was charged to the users of the proxy corpus, who are not protected by it. The users of the run's own corpus "
                "took part in no trial and paid nothing.",
            ]
        return [
            spent,
            "It was charged to the same users that the plan is for. Whatever the plan's own statement will say, over all runs "
            "they have no guarantee (unheard statement --all-runs). Tune on public or proxy text: --corpus PROXY --population N.",
            "No smaller bound holds for a sweep: a bound for the best of several private runs needs a number of trials that the "
            "tool itself draws (unheard tune --select).",
        ]


def tuning_cost(trials: Sequence[Trial], *, is_proxy: bool) -> TuningCost:
    """Compute the cost of the trials from their ledgers.

    Args:
        trials: All trials; each has a run folder.
        is_proxy: Whether they were trained on a proxy corpus.
    """
    ledgers = [read_run_ledger(RunFolder.open(trial.folder)) for trial in trials]
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
    """The end of a tuning.

    Attributes:
        record: The content of `tuning.json`.
        cost: What the tuning cost.
        refusal: Why nothing could be chosen or planned; None if there is a plan.
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
        run: The run to plan.
        result: The results of all trials.
        allowance: What the choices were allowed to lose.
        noise_multiplier: z of the private run.
        out: The folder of the tuning.
        engine: The engine to write into `chosen.toml`.
        is_proxy: Whether the trials were trained on a proxy corpus.

    Returns:
        The conclusion. Where nothing could be chosen, or the population is too small for the plan, `refusal` says why;
        the results and the cost are recorded all the same.
    """
    cost, refusal, plan = tuning_cost(result.trials, is_proxy=is_proxy), result.refusal, None
    if result.noise is not None:
        chosen = result.noise.result
        try:
            plan = project_plan(run, chosen.norm, chosen.noise_std, noise_multiplier)
        except InvalidValue as error:
            refusal = str(error)
    record = _record(result, allowance, cost, plan, users_per_second(out))
    replace_file(out / RECORD, (json.dumps(record, indent=2, allow_nan=False) + "\n").encode())
    if plan is None:
        (out / CHOSEN).unlink(missing_ok=True)  # the choice of an earlier call does not belong to this record
    else:
        replace_file(out / CHOSEN, (_preface(record, plan) + run_toml(plan.run, engine)).encode())
    return Conclusion(record=record, cost=cost, refusal=refusal)


def _record(
    result: TuningResult, allowance: Allowance, cost: TuningCost, plan: ProjectedPlan | None, speed: float | None
) -> dict[str, Any]:
    """Return the content of `tuning.json`, as strict JSON."""
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
        else "the text of the same users that it is for: over all runs they have no guarantee"
    )
    return (
        "# Chosen by `unheard tune`.\n"
        f"# Accuracy was estimated with fewer users per round at the same noise, on {text}.\n"
        f"# Hypothetical until it is trained: epsilon {plan['claimed']['epsilon']:.4g} at delta {plan['delta']:.3g} by "
        f"{plan['claimed']['accountant']}, after {plan['rounds']:,} rounds;\n"
        f"# {plan['updates']:,} user updates; sigma = {planned.noise_std:.6g}.\n\n"
    )
