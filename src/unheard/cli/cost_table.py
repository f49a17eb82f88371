"""`unheard plan --cost`: the machine time of a plan, for each measured machine, as a table or as part of the JSON."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unheard.training.cost import Cost


def costs(
    plan: Any, speed_from: Path | None, gpus: int, efficiency: float, gpu_hour_price: float | None
) -> "list[Cost]":
    """One for each device and engine that was measured."""
    from unheard.training.cost import cost_of, measured_speeds, nearest_rounds, speeds_from

    speeds = speeds_from(speed_from) if speed_from is not None else measured_speeds()
    return [
        cost_of(
            speed,
            rounds=plan.rounds,
            users_per_round=plan.users_per_round,
            machines=gpus if speed.is_gpu else 1,
            efficiency=efficiency if speed.is_gpu else 1.0,
            hour_price=gpu_hour_price,
        )
        for speed in nearest_rounds(speeds, plan.users_per_round)
    ]


def record(plan: Any, found: "list[Cost]", efficiency: float) -> dict[str, Any]:
    return {
        "user_updates": plan.rounds * plan.users_per_round,
        "efficiency": efficiency,
        "machines": [
            {
                "device": cost.speed.device,
                "engine": cost.speed.engine,
                "model": cost.speed.model,
                "machines": cost.machines,
                "users_per_second": cost.speed.users_per_second,
                "measured": measured(cost),
                "source": cost.speed.source,
                "machine_hours": cost.machine_hours,
                "hours": cost.hours,
                "price": cost.price,
            }
            for cost in found
        ],
    }


def show(console: Any, plan: Any, found: "list[Cost]", efficiency: float) -> None:
    from rich.table import Table

    updates = plan.rounds * plan.users_per_round
    console.print(
        f"\n[bold]Machine time[/] of {plan.rounds:,} rounds of {plan.users_per_round:,g} users: {updates:,.0f} user updates."
    )
    table = Table("machine", "users/s, measured", "machine hours", "machines", "hours")
    if any(cost.price is not None for cost in found):
        table.add_column("price")
    for column in table.columns[1:]:
        column.justify = "right"
    for cost in found:
        figures = [
            f"{cost.speed.users_per_second:,g}",
            hours(cost.machine_hours),
            f"{cost.machines:,}",
            hours(cost.hours),
        ]
        table.add_row(named(cost), *figures, *([] if cost.price is None else [f"{cost.price:,.2f}"]))
    console.print(table)
    for cost in found:
        tokens = f", {cost.speed.tokens_per_user:,} tokens a user" if cost.speed.tokens_per_user else ""
        model = f"{cost.speed.model}{tokens}"
        console.print(f"{named(cost)}: {measured(cost)}, {model} ({cost.speed.source}).", soft_wrap=True)
    if any(cost.machines > 1 for cost in found):
        console.print(f"Several machines at {efficiency:.0%} of ideal speed: that is --efficiency, not a measurement.")
    console.print("Evaluations and checkpoints are not in it. For your model and machine: unheard benchmark --json.")


def named(cost: "Cost") -> str:
    return f"{cost.speed.device}: {cost.speed.engine}"


def measured(cost: "Cost") -> str:
    return f"{cost.speed.of} of {cost.speed.users_per_round:,g} users"


def hours(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
