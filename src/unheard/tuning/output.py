"""What a tuning leaves behind: `tuning.json`, everything that was found, and `chosen.toml`, the run to train.

In: a Tuned, its outlook and its price. Out: plain tables and two files, each replaced whole.
"""

import json
from pathlib import Path
from typing import Any

from unheard.engines.choice import EngineChoice
from unheard.privacy.accountants import versions
from unheard.privacy.statement import plain
from unheard.run_folder import replace_file
from unheard.training.run_file import run_toml
from unheard.tuning.pipeline import Allowance, Tuned
from unheard.tuning.projected_plan import Outlook
from unheard.tuning.results import Result
from unheard.tuning.tuning_cost import Spending

RECORD, CHOSEN = "tuning.json", "chosen.toml"


def record(
    tuned: Tuned, allowance: Allowance, price: Spending, ahead: Outlook | None, speed: float | None
) -> dict[str, Any]:
    """Everything, as strict JSON. `ahead` is None where the declared population cannot carry the plan."""
    return plain(
        {
            "trials": [_row(result, tuned) for result in tuned.results],
            "margin_points": tuned.margin.points,
            "margin_is_of_repeated_runs": tuned.margin.of_seeds,
            "allowed": {"clip_loss": allowance.clip_loss, "loss": allowance.loss},
            "chosen": {
                "norm": tuned.norm and tuned.norm.result.norm,
                "noise_std": tuned.noise and tuned.noise.result.noise_std,
                "loss_points": tuned.noise and tuned.noise.loss,
                "remarks": [remark for choice in (tuned.norm, tuned.noise) if choice for remark in choice.remarks],
            },
            "plan": None if ahead is None else ahead.record(speed),
            "tuning_cost": price.record(),
            "versions": versions(),
        }
    )


def write(out: Path, found: dict[str, Any], ahead: Outlook | None, engine: EngineChoice) -> None:
    replace_file(out / RECORD, (json.dumps(found, indent=2, allow_nan=False) + "\n").encode())
    if ahead is None:
        (out / CHOSEN).unlink(missing_ok=True)  # an earlier choice is not this one's
    else:
        replace_file(out / CHOSEN, (_preface(found, ahead) + run_toml(ahead.run, engine)).encode())


def _row(result: Result, tuned: Tuned) -> dict[str, Any]:
    loss = result.loss_against(tuned.baseline)
    return {
        "stage": result.stage,
        "norm": result.norm,
        "noise_std": result.noise_std,
        "seeds": len(result.last),
        "evaluations": min(len(values) for values in result.last),
        "accuracy_top1": result.accuracy,
        "accuracy_top1_of_seeds": result.of_seeds,
        "loss_points": loss,
        "within_noise": result != tuned.baseline and tuned.margin.hides(loss),
        "chosen": any(choice is not None and choice.result == result for choice in (tuned.norm, tuned.noise)),
    }


def _preface(found: dict[str, Any], ahead: Outlook) -> str:
    """What the file's reader must know before training it."""
    plan = found["plan"]
    whom = (
        "proxy text"
        if found["tuning_cost"]["is_proxy"]
        else "the very people it is for: over all runs they have no guarantee"
    )
    return (
        "# Chosen by `unheard tune`.\n"
        f"# Accuracy was estimated with fewer users a round at the same noise, on {whom}.\n"
        f"# Hypothetical until it is trained: epsilon {plan['claimed']['epsilon']:.4g} at delta {plan['delta']:.3g} by "
        f"{plan['claimed']['accountant']}, after {plan['rounds']:,} rounds;\n"
        f"# {plan['updates']:,} user updates; sigma = {ahead.noise_std:.6g}.\n\n"
    )
