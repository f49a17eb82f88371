"""What a tuning found, in a terminal: all trials, the choice, the plan to run, and what the tuning has cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from unheard.cli.display import console, say

if TYPE_CHECKING:
    from unheard.tuning.road_map import Tuned
    from unheard.tuning.spending import Spending


def show_trials(found: dict[str, Any], tuned: "Tuned", price: "Spending") -> None:
    """Every setting that was tried, in the order of the road-map; then what follows from it and what it cost."""
    from rich.table import Table

    evaluations = min(row["evaluations"] for row in found["trials"])
    table = Table(title=f"Held-out AccuracyTop1, mean of the last {evaluations} evaluations", title_justify="left")
    for name in ("trial", "S", "σ", "runs", "top 1", "loss, points", ""):
        table.add_column(name, justify="left" if name in ("trial", "") else "right")
    for row in found["trials"]:
        marks = [word for word, is_so in (("chosen", row["chosen"]), ("within noise", row["within_noise"])) if is_so]
        table.add_row(
            row["stage"],
            "∞" if row["norm"] == "infinity" else f"{row['norm']:g}",
            f"{row['noise_std']:g}",
            str(row["seeds"]),
            f"{100 * row['accuracy_top1']:.2f} %",
            "-" if row["stage"] == "baseline" else f"{row['loss_points']:+.2f}",
            ", ".join(marks),
        )
    console.print(table)
    say(tuned.margin.sentence)
    if tuned.norm is not None:
        allowed = found["allowed"]
        say(
            f"Chosen: S = {tuned.norm.result.norm:g}, the smallest that costs less than {allowed['clip_loss']:g} points."
        )
        if tuned.noise is not None:
            std = tuned.noise.result.noise_std
            say(f"Chosen: σ = {std:g}, the largest that costs less than {allowed['loss']:g} points, the clip included.")
    for remark in found["chosen"]["remarks"]:
        say(f"Note: {remark}")
    say("")
    for sentence in price.sentences:
        say(sentence)


def show_plan(found: dict[str, Any], out: Path) -> None:
    """The run to train: users a round, hypothetical epsilon by each accountant, how long it takes."""
    plan = found["plan"]
    say("")
    say(
        f"The plan: {plan['users_per_round']:,} users a round of {plan['population']:,}, z = {plan['noise_multiplier']:g}, "
        f"σ = {plan['noise_std']:.4g}, {plan['rounds']:,} rounds."
    )
    by = ", ".join(f"{_figure(value)} by {name}" for name, value in plan["epsilon"].items())
    say(f"Hypothetical, for it has not happened: ε = {by}, at δ = {plan['delta']:.2e}.")
    say(f"To compute: {plan['updates']:,} user updates{_time(plan)}.")
    say("Its accuracy is an estimate from fewer users a round at the same σ. The plan, ready to train:")
    say(f"  unheard train {out / 'chosen.toml'} --out runs/private")


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _time(plan: dict[str, Any]) -> str:
    if plan["users_per_second"] is None:
        return ""
    hours = plan["seconds"] / 3600
    worded = f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.0f} minutes"
    return f", about {worded} at the {plan['users_per_second']:,.1f} a second of this sweep (evaluations included)"
