"""`unheard plan`: what a run would cost, before it is run.
`unheard plan --cost`: the machine time of a plan, for each measured machine, as a table or as part of the JSON.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from unheard.performance.estimate import Cost


def costs(
    plan: Any, speed_from: Path | None, gpus: int, efficiency: float, gpu_hour_price: float | None
) -> "list[Cost]":
    """One for each device and engine that was measured."""
    from unheard.performance.estimate import cost_of, measured_speeds, nearest_rounds, speeds_from

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


def cost_record(plan: Any, found: "list[Cost]", efficiency: float) -> dict[str, Any]:
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


EXAMPLES = """
Examples:

unheard plan --users 763430 --users-per-round 5000 --noise-multiplier 1 --rounds 5000 --delta 1e-9

unheard plan --users 1000000 --users-per-round 1000 --rounds 3000 --epsilon 2  [dim](finds the noise multiplier)[/]

unheard plan --users 763430 --users-per-round 5000 --noise-multiplier 1 --rounds 5000 --cost --gpus 8
"""


def plan(
    users: Annotated[int, typer.Option(help="How many users there are: the population that the run will declare.")],
    users_per_round: Annotated[float | None, typer.Option(help="How many users are expected in a round.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="z: the noise, in units of the sensitivity.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="A target. Leave out one of the three above, and it is solved for.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Below 1/users; users^-1.1 if left out.", show_default=False)
    ] = None,
    accountant: Annotated[
        str,
        typer.Option(help="Which bound must meet the target: best (the smaller of pld and rdp), pld, rdp, moments."),
    ] = "best",
    cost: Annotated[bool, typer.Option("--cost", help="Also the machine time, from measured speeds.")] = False,
    gpus: Annotated[int, typer.Option(min=1, help="With --cost: on so many GPUs.")] = 1,
    efficiency: Annotated[
        float, typer.Option(help="With --cost: the part of ideal speed that several GPUs reach, your assumption.")
    ] = 1.0,
    gpu_hour_price: Annotated[
        float | None, typer.Option(help="With --cost: what an hour of one GPU costs you.", show_default=False)
    ] = None,
    speed_from: Annotated[
        Path | None, typer.Option(help="With --cost: speeds that `unheard benchmark --json` printed.", metavar="FILE")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a run would cost in privacy, and with --cost in machine time. Every epsilon is hypothetical: no run has happened."""
    from unheard.config import nearest
    from unheard.errors import InvalidValue
    from unheard.privacy.accountants import ACCOUNTANTS
    from unheard.privacy.planner import CostEstimate, default_delta

    if accountant not in (known := ("best", *ACCOUNTANTS)):
        raise InvalidValue(f"Unknown accountant '{accountant}'.{nearest(accountant, known)}")
    if users < 1:
        raise InvalidValue(f"--users must be 1 or more, not {users}.")
    values: dict[str, Any] = {
        "users_per_round": users_per_round,
        "noise_multiplier": noise_multiplier,
        "rounds": rounds,
        "delta": default_delta(users) if delta is None else delta,
    }
    if not cost and (gpus, efficiency, gpu_hour_price, speed_from) != (1, 1.0, None, None):
        raise InvalidValue("--gpus, --efficiency, --gpu-hour-price and --speed-from go with --cost.")
    machines = (speed_from, gpus, efficiency, gpu_hour_price) if cost else None
    if epsilon is not None:
        solution = _solve(users, epsilon, values, accountant)
        _show(solution.estimate, accountant, json, solution, machines)
        return
    missing = [f"--{name.replace('_', '-')}" for name, value in values.items() if value is None]
    if missing:
        raise InvalidValue(f"Give {' and '.join(missing)} too; or leave out one, and give --epsilon to solve for it.")
    _show(CostEstimate(population=users, **values), accountant, json, None, machines)


def _solve(users: int, epsilon: float, values: dict[str, Any], accountant: str) -> Any:
    """Search with a spinner on stderr, so that stdout holds the answer alone."""
    from rich.console import Console

    from unheard.privacy.planner import solve

    with Console(stderr=True).status("solving ...") as status:
        return solve(
            population=users,
            epsilon=epsilon,
            accountant=accountant,
            progress=lambda trial: status.update(f"solving: {trial}"),
            **values,
        )


def _show(plan: Any, accountant: str, json: bool, solution: Any, machines: tuple[Any, ...] | None) -> None:
    from unheard.cli.display import warn_of_delta

    warn_of_delta(plan.delta)
    found = costs(plan, *machines) if machines is not None else None
    efficiency = machines[2] if machines is not None else 1.0
    if json:
        _print_json(plan, accountant, solution, found, efficiency)
    else:
        _print_table(plan, solution, found, efficiency)


def _print_json(plan: Any, accountant: str, solution: Any, costs: Any, efficiency: float) -> None:
    from json import dumps

    from unheard.privacy.accountants import CLAIMED, versions
    from unheard.privacy.statement import plain

    found = plan.epsilons()
    claimed = min(CLAIMED, key=lambda name: found[name])
    record = {
        "hypothetical": True,
        "users": plan.population,
        "users_per_round": plan.users_per_round,
        "sampling_prob": plan.event.sampling_prob,
        "noise_multiplier": plan.noise_multiplier,
        "rounds": plan.rounds,
        "delta": plan.delta,
        "epsilon": found,
        "claimed": {"epsilon": found[claimed], "accountant": claimed},
        "unit": "user",
        "adjacency": "add or remove one user",
        "versions": versions(),
    }
    if solution is not None:
        record["solved_for"] = solution.solved_for
        record["target"] = {"epsilon": solution.target, "accountant": accountant}
        record["not_enough"] = getattr(solution.cheaper, solution.solved_for, None)
    if costs is not None:
        record["cost"] = cost_record(plan, costs, efficiency)
    typer.echo(dumps(plain(record), allow_nan=False))


def _print_table(plan: Any, solution: Any, costs: Any, efficiency: float) -> None:
    """Epsilon after 1, 10, ... rounds, as in the paper's Table 1."""
    from rich.console import Console
    from rich.table import Table

    from unheard.privacy.accountants import ACCOUNTANTS

    console = Console(highlight=False)
    if solution is not None:
        console.print(_answer(plan, solution))
    console.print(f"[bold]Hypothetical[/] epsilon at delta {plan.delta:.3g}: this run has not happened.")
    console.print(
        f"{plan.population:,} users, {plan.users_per_round:,g} expected a round, "
        f"noise multiplier {plan.noise_multiplier:g}; add or remove one user."
    )
    table = Table("rounds", *(accountant.title for accountant in ACCOUNTANTS.values()))
    for column in table.columns:
        column.justify = "right"
    powers = [10**i for i in range(len(str(plan.rounds))) if 10**i < plan.rounds]
    found = {}
    for rounds in [*powers, plan.rounds]:
        found = plan.epsilons(rounds)
        table.add_row(f"{rounds:,}", *(f"{found[name]:.4g}" for name in ACCOUNTANTS))
    console.print(table)
    console.print("All three are upper bounds. A run claims the smaller of PLD and RDP.")
    if math.isinf(found["pld"]) and not math.isinf(found["rdp"]):
        console.print("PLD's arithmetic cannot resolve so small a delta over so many rounds, hence its 'inf'.")
    if costs is not None:
        show(console, plan, costs, efficiency)


def _answer(plan: Any, solution: Any) -> str:
    name, bound = solution.solved_for, solution.bound
    words = f"{name} = [bold]{getattr(plan, name):g}[/] meets epsilon {solution.target:g}: "
    words += f"{bound.epsilon:.4g} by {bound.accountant}."
    if solution.cheaper is None:
        return words + " The search ended there."
    return words + f" {getattr(solution.cheaper, name):g} does not."
