"""`unheard plan`: compute what a run would cost, before it is run: epsilon, and with --cost machine time.

Every epsilon here is hypothetical: it belongs to a run that has not happened. `privacy/planner.py` computes it and
solves for a missing value; `performance/estimate.py` computes the machine time from measured speeds.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from unheard.cli.options import AsJson

if TYPE_CHECKING:
    from unheard.performance.estimate import Cost
    from unheard.privacy.planner import CostEstimate, FeasiblePlan, NoiseLevel, SamplingComparison, Solution

EXAMPLES = """
Examples:

unheard plan --users 14000 --epsilon 8  [dim](what can I get with my users?)[/]

unheard plan --users 763430 --users-per-round 5000 --noise-multiplier 1 --rounds 5000 --delta 1e-9

unheard plan --users 1000000 --users-per-round 1000 --rounds 3000 --epsilon 2  [dim](finds the noise multiplier)[/]

unheard plan --users 750000 --users-per-round 1000 --rounds 1500 --epsilon 2 --compare-noise  [dim](correlated noise)[/]

unheard plan --users 763430 --users-per-round 5000 --noise-multiplier 1 --rounds 5000 --cost --gpus 8

unheard plan --users 100000 --users-per-round 500 --rounds 300 --noise-multiplier 1 --examples-per-user 8
"""

COST = "Machine time"


def plan(
    users: Annotated[
        int, typer.Option(help="How many users there are: the population that the run declares.", metavar="N")
    ],
    users_per_round: Annotated[
        float | None,
        typer.Option(help="Expected users per round.", metavar="N", show_default="solved for, with --epsilon"),
    ] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            help="z: the standard deviation of the noise divided by the sensitivity.",
            metavar="Z",
            show_default="solved for, with --epsilon",
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="The number of rounds.", metavar="N", show_default="solved for, with --epsilon")
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="A target. Leave out one of the three values above: it is chosen to meet the target.",
            show_default="none",
        ),
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Below 1/users.", show_default="users^-1.1")] = None,
    clip_norm: Annotated[
        float, typer.Option(help="S, from which sigma = z S / users per round follows.", min=1e-9, metavar="S")
    ] = 15.0,
    parameters: Annotated[
        int,
        typer.Option(
            help="Parameters of the model, the paper's by default: sigma is judged by them.", min=1, metavar="N"
        ),
    ] = 1_346_144,
    accountant: Annotated[
        Literal["best", "pld", "rdp", "moments"],
        typer.Option(help="The accountant whose epsilon must meet the target; best is the smaller of pld and rdp."),
    ] = "best",
    examples_per_user: Annotated[
        int | None,
        typer.Option(
            help="Also compute the noise of sampling examples instead of users, with at most so many of each user, for the "
            "same epsilon and compute.",
            min=1,
            max=4096,
            metavar="G",
            show_default="users only",
        ),
    ] = None,
    compare_noise: Annotated[
        bool,
        typer.Option(
            "--compare-noise",
            help="Compare independent noise with correlated noise (banded, BLT) for users per round, rounds and epsilon.",
        ),
    ] = False,
    cost: Annotated[
        bool, typer.Option("--cost", help="Also estimate the machine time, from measured speeds.", rich_help_panel=COST)
    ] = False,
    gpus: Annotated[
        int, typer.Option(min=1, help="With --cost: the number of GPUs.", metavar="N", rich_help_panel=COST)
    ] = 1,
    efficiency: Annotated[
        float,
        typer.Option(
            help="With --cost: the fraction of ideal speed that several GPUs reach; your assumption.",
            rich_help_panel=COST,
        ),
    ] = 1.0,
    gpu_hour_price: Annotated[
        float | None,
        typer.Option(help="With --cost: your price of one hour of one GPU.", show_default="none", rich_help_panel=COST),
    ] = None,
    speed_from: Annotated[
        Path | None,
        typer.Option(
            help="With --cost: speeds that `unheard benchmark --json` printed.",
            metavar="FILE",
            show_default="speeds that come with the package",
            rich_help_panel=COST,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute what a run would cost in privacy, and with --cost in machine time. Every epsilon is hypothetical."""
    from unheard.cli.display import notes, warn_of_delta, warn_of_noise
    from unheard.errors import InvalidValue
    from unheard.privacy.planner import CostEstimate, NoiseLevel, compare_sampling, default_delta, feasible_plans
    from unheard.privacy.planner import plan as plan_run

    if users < 1:
        raise InvalidValue(f"--users must be 1 or more, not {users}.")
    if not cost and (gpus, efficiency, gpu_hour_price, speed_from) != (1, 1.0, None, None):
        raise InvalidValue("--gpus, --efficiency, --gpu-hour-price and --speed-from go with --cost.")
    if compare_noise:
        if epsilon is None or users_per_round is None or rounds is None or noise_multiplier is not None or cost:
            raise InvalidValue("--compare-noise goes with --users-per-round, --rounds and --epsilon, and solves for z.")
        _compare_noise(users, users_per_round, rounds, epsilon, delta, accountant, parameters, as_json)
        return
    values: dict[str, Any] = {
        "users_per_round": users_per_round,
        "noise_multiplier": noise_multiplier,
        "rounds": rounds,
        "delta": default_delta(users) if delta is None else delta,
    }
    solution = None
    if epsilon is not None and users_per_round is noise_multiplier is rounds is None and not cost:
        warn_of_delta(values["delta"])
        with notes.status("solving ...") as status:
            plans = feasible_plans(
                population=users,
                epsilon=epsilon,
                delta=values["delta"],
                clip_norm=clip_norm,
                parameters=parameters,
                progress=lambda trial: status.update(f"solving: {trial}"),
            )
        (_print_feasible_json if as_json else _print_feasible)(plans, epsilon)
        return
    if epsilon is not None:
        with notes.status("solving ...") as status:
            solution = plan_run(
                users=users,
                epsilon=epsilon,
                accountant=accountant,
                progress=lambda trial: status.update(f"solving: {trial}"),
                **values,
            )
        estimate = solution.estimate
    elif missing := [f"--{name.replace('_', '-')}" for name, value in values.items() if value is None]:
        raise InvalidValue(f"Give {' and '.join(missing)} too; or leave out one, and give --epsilon to solve for it.")
    else:
        estimate = CostEstimate(population=users, **values)
    warn_of_delta(estimate.delta)
    noise = NoiseLevel(
        noise_std=estimate.noise_multiplier * clip_norm / estimate.users_per_round,
        clip_norm=clip_norm,
        parameters=parameters,
    )
    if noise.noise_std > 0:
        warn_of_noise(noise)
    costs = _costs(estimate, speed_from, gpus, efficiency, gpu_hour_price) if cost else None
    comparison = None
    if examples_per_user is not None:
        with notes.status("comparing with sampling of examples ...") as status:
            comparison = compare_sampling(estimate, examples_per_user, lambda trial: status.update(trial))
    if as_json:
        _print_json(estimate, accountant, solution, costs, efficiency, noise, comparison)
    else:
        _print_tables(estimate, solution, costs, efficiency)
        if comparison is not None:
            _print_comparison(comparison)


def _compare_noise(
    users: int,
    users_per_round: float,
    rounds: int,
    epsilon: float,
    delta: float | None,
    accountant: str,
    parameters: int,
    as_json: bool,
) -> None:
    """Prints independent, banded and BLT noise at one epsilon, with the error of the summed updates."""
    from json import dumps

    from rich.console import Console
    from rich.table import Table

    from unheard.cli.display import notes, warn_of_delta
    from unheard.privacy.noise_choice import best, compare_noise
    from unheard.privacy.planner import default_delta
    from unheard.privacy.statement import plain

    delta = default_delta(users) if delta is None else delta
    warn_of_delta(delta)
    with notes.status("comparing ...") as status:
        options = compare_noise(
            population=users,
            users_per_round=users_per_round,
            rounds=rounds,
            epsilon=epsilon,
            delta=delta,
            accountant=accountant,
            progress=lambda step: status.update(f"comparing: {step}"),
        )
    chosen, independent = best(options), options[0]
    rows = [
        {
            "noise": option.kind,
            "sampling": option.sampling,
            "separation": 1 if option.factorisation is None else option.factorisation.separation,
            "noise_multiplier": option.noise_multiplier,
            "epsilon": option.epsilon,
            "accountant": option.accountant,
            "rms_error": option.rms_error,
            "change": option.rms_error / independent.rms_error - 1,
            "history_bytes": option.vectors * parameters * 8,
            "is_best": option is chosen,
        }
        for option in options
    ]
    if as_json:
        record = {"hypothetical": True, "users": users, "users_per_round": users_per_round, "rounds": rounds}
        typer.echo(dumps(plain({**record, "delta": delta, "target": epsilon, "noise": rows}), allow_nan=False))
        return
    console = Console(highlight=False)
    console.print(
        f"[bold]Hypothetical[/]: {users:,} users, {users_per_round:,g} per round, {rounds:,} rounds, epsilon {epsilon:g} at "
        f"delta {delta:.3g}. None of these runs has happened."
    )
    # Without lines between the columns the table fits into 80 characters.
    table = Table("noise", "sampling", "b", "z", "error/S", "change", "history", "", box=None, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[2:7]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            row["noise"],
            row["sampling"],
            f"{row['separation']:,}",
            f"{row['noise_multiplier']:.4g}",
            f"{row['rms_error']:.4g}",
            f"{row['change']:+.0%}" if row["noise"] != "independent" else "",
            f"{row['history_bytes'] / 1e6:,.0f} MB" if row["history_bytes"] else "",
            "<- best" if row["is_best"] else "",
        )
    console.print(table)
    console.print(
        "error/S: the root mean square over the rounds of the noise in each coordinate of the summed updates, in units of S. b: "
        "two rounds of one user are at least so many apart. history: past noise that the run keeps, as secret as the text, for "
        f"{parameters:,} parameters. With min_separation the guarantee does not rest on sampling. `unheard init --noise auto "
        "--epsilon E` writes the best one into a run file.",
        soft_wrap=True,
    )


def _costs(
    estimate: "CostEstimate", speed_from: Path | None, gpus: int, efficiency: float, gpu_hour_price: float | None
) -> "list[Cost]":
    """Returns the machine time on each device and with each engine that was measured."""
    from unheard.performance.estimate import cost_of, measured_speeds, nearest_rounds, speeds_from

    speeds = speeds_from(speed_from) if speed_from is not None else measured_speeds()
    return [
        cost_of(
            speed,
            rounds=estimate.rounds,
            users_per_round=estimate.users_per_round,
            machines=gpus if speed.is_gpu else 1,
            efficiency=efficiency if speed.is_gpu else 1.0,
            hour_price=gpu_hour_price,
        )
        for speed in nearest_rounds(speeds, estimate.users_per_round)
    ]


def _print_json(
    estimate: "CostEstimate",
    accountant: str,
    solution: "Solution | None",
    costs: "list[Cost] | None",
    efficiency: float,
    noise: "NoiseLevel",
    comparison: "SamplingComparison | None",
) -> None:
    from json import dumps

    from unheard.privacy.accountants import CLAIMED, versions
    from unheard.privacy.statement import plain

    epsilons = estimate.epsilons()
    claimed = min(CLAIMED, key=lambda name: epsilons[name])
    record: dict[str, Any] = {
        "hypothetical": True,
        "users": estimate.population,
        "users_per_round": estimate.users_per_round,
        "sampling_prob": estimate.event.sampling_prob,
        "noise_multiplier": estimate.noise_multiplier,
        "rounds": estimate.rounds,
        "noise": _noise_record(noise),
        "delta": estimate.delta,
        "epsilon": epsilons,
        "claimed": {"epsilon": epsilons[claimed], "accountant": claimed},
        "unit": "user",
        "adjacency": "add or remove one user",
        "versions": versions(),
    }
    if solution is not None:
        record["solved_for"] = solution.solved_for
        record["target"] = {"epsilon": solution.target, "accountant": accountant}
        record["not_enough"] = getattr(solution.cheaper, solution.solved_for, None)
    if costs is not None:
        record["cost"] = _cost_record(estimate, costs, efficiency)
    if comparison is not None:
        record["sampling_of_examples"] = vars(comparison)
    typer.echo(dumps(plain(record), allow_nan=False))


def _print_comparison(comparison: "SamplingComparison") -> None:
    """Prints the noise of both ways to sample, and what the comparison leaves out."""
    from unheard.cli.display import say

    less = comparison.examples_std / comparison.users_std
    say(
        f"Sampling of examples, at most {comparison.examples_per_user} of each user, {comparison.examples_per_round:,g} per "
        f"round: epsilon {comparison.epsilon:.3g} needs z = {comparison.examples_noise:.3g} in units of one example's clip. "
        f"The noise of the average, for the same clip, is {less:.2g} times that of sampling users."
    )
    say(
        "It is for one clipped gradient per example ([sampling] kind = 'examples', [update] kind = 'fedsgd'). A user's update "
        "of several local steps moves further than one gradient: noise alone does not say which model is better."
    )


def _noise_record(noise: "NoiseLevel") -> dict[str, Any]:
    return {
        "noise_std": noise.noise_std,
        "clip_norm": noise.clip_norm,
        "parameters": noise.parameters,
        "ratio": noise.ratio,
        "verdict": noise.verdict,
    }


def _print_feasible_json(plans: "list[FeasiblePlan]", target: float) -> None:
    from json import dumps

    from unheard.privacy.accountants import versions
    from unheard.privacy.statement import plain

    record = {
        "hypothetical": True,
        "target": target,
        "plans": [
            {
                "users": plan.estimate.population,
                "users_per_round": plan.estimate.users_per_round,
                "rounds": plan.estimate.rounds,
                "noise_multiplier": plan.estimate.noise_multiplier,
                "delta": plan.estimate.delta,
                "claimed": {"epsilon": plan.bound.epsilon, "accountant": plan.bound.accountant},
                "noise": _noise_record(plan.noise),
            }
            for plan in plans
        ],
        "versions": versions(),
    }
    typer.echo(dumps(plain(record), allow_nan=False))


def _print_feasible(plans: "list[FeasiblePlan]", target: float) -> None:
    """Prints what a population allows: one row for each plan, with sigma and what to expect of it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from unheard.cli.display import safe_console
    from unheard.privacy.accountants import ACCOUNTANTS
    from unheard.privacy.planner import COSTLY_RATIO, DROWNING_RATIO, FREE_RATIO

    console = safe_console(highlight=False)
    first = plans[0]
    console.print(
        f"[bold]Hypothetical[/] plans for {first.estimate.population:,} users that meet epsilon {target:g} at delta "
        f"{first.estimate.delta:.3g}: none of these runs has happened."
    )
    names = ("users per\nround", "rounds", "z", "sigma", "noise/S", "epsilon", "updates", "expect")
    table = Table(*names, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    table.columns[-1].justify = "left"
    for plan in plans:
        estimate = plan.estimate
        table.add_row(
            f"{estimate.users_per_round:,g}",
            f"{estimate.rounds:,}",
            f"{estimate.noise_multiplier:.3g}",
            f"{plan.noise.noise_std:.3g}",
            f"{plan.noise.ratio:.2g}",
            f"{plan.bound.epsilon:.3g} {ACCOUNTANTS[plan.bound.accountant].title}",
            f"{estimate.rounds * estimate.users_per_round:,.0f}",
            plan.noise.verdict,
        )
    console.print(table)
    noise = first.noise
    console.print(
        f"sigma = z S / (users per round), at S = {noise.clip_norm:g} (--clip-norm). noise/S: the norm of the noise of "
        f"one round, sigma * sqrt({noise.parameters:,} parameters), divided by S (--parameters; the default is the paper's "
        f"model). In the paper and in our runs, noise up to {FREE_RATIO:g} was nearly free, up to {COSTLY_RATIO:g} it cost one to "
        f"six points of accuracy, and above {DROWNING_RATIO:g} models learned nothing.",
        soft_wrap=True,
    )
    if min(plan.noise.ratio for plan in plans) > COSTLY_RATIO:
        console.print(
            f"No plan here is below {COSTLY_RATIO:g} with this model. Cures: a smaller model or LoRA (fewer --parameters), a "
            "public start (training.init_from), correlated noise (--compare-noise), a larger epsilon, or more users.",
            soft_wrap=True,
        )
    console.print(
        "z was solved for by RDP. The epsilon shown is the claimed one, the smaller of PLD and RDP. To refine a row, give two of "
        "--users-per-round, --noise-multiplier and --rounds.",
        soft_wrap=True,
    )


def _cost_record(estimate: "CostEstimate", costs: "list[Cost]", efficiency: float) -> dict[str, Any]:
    return {
        "user_updates": estimate.rounds * estimate.users_per_round,
        "efficiency": efficiency,
        "machines": [
            {
                "device": cost.speed.device,
                "engine": cost.speed.engine,
                "model": cost.speed.model,
                "machines": cost.machines,
                "users_per_second": cost.speed.users_per_second,
                "measured": _what_was_measured(cost),
                "source": cost.speed.source,
                "machine_hours": cost.machine_hours,
                "hours": cost.hours,
                "price": cost.price,
            }
            for cost in costs
        ],
    }


def _print_tables(
    estimate: "CostEstimate", solution: "Solution | None", costs: "list[Cost] | None", efficiency: float
) -> None:
    """Prints epsilon after 1, 10, 100, ... rounds, as in Table 1 of the paper, and the machine time."""
    from rich.table import Table

    from unheard.cli.display import safe_console
    from unheard.privacy.accountants import ACCOUNTANTS

    console = safe_console(highlight=False)
    if solution is not None:
        console.print(_answer(solution))
    console.print(f"[bold]Hypothetical[/] epsilon at delta {estimate.delta:.3g}: this run has not happened.")
    console.print(
        f"{estimate.population:,} users, {estimate.users_per_round:,g} expected per round, "
        f"noise multiplier {estimate.noise_multiplier:g}; add or remove one user."
    )
    table = Table("rounds", *(accountant.title for accountant in ACCOUNTANTS.values()))
    for column in table.columns:
        column.justify = "right"
    powers = [10**i for i in range(len(str(estimate.rounds))) if 10**i < estimate.rounds]
    epsilons = {}
    for rounds in [*powers, estimate.rounds]:
        epsilons = estimate.epsilons(rounds)
        table.add_row(f"{rounds:,}", *(f"{epsilons[name]:.4g}" for name in ACCOUNTANTS))
    console.print(table)
    console.print("All are upper bounds. A run states the smaller of PLD and RDP.")
    if solution is not None and solution.solved_for == "noise_multiplier":
        console.print("Correlated noise may add less to the model at this epsilon: --compare-noise compares.")
    if math.isinf(epsilons["pld"]) and not math.isinf(epsilons["rdp"]):
        console.print("PLD's arithmetic cannot resolve so small a delta over so many rounds, hence its 'inf'.")
    if costs is not None:
        _print_costs(console, estimate, costs, efficiency)


def _answer(solution: "Solution") -> str:
    name, bound = solution.solved_for, solution.bound
    words = f"{name} = [bold]{getattr(solution.estimate, name):g}[/] meets epsilon {solution.target:g}: "
    words += f"{bound.epsilon:.4g} by {bound.accountant}."
    if solution.cheaper is None:
        return words + " The search ended there."
    return words + f" {getattr(solution.cheaper, name):g} does not."


def _print_costs(console: Any, estimate: "CostEstimate", costs: "list[Cost]", efficiency: float) -> None:
    from rich.table import Table

    updates = estimate.rounds * estimate.users_per_round
    console.print(
        f"\n[bold]Machine time[/] of {estimate.rounds:,} rounds of {estimate.users_per_round:,g} users: "
        f"{updates:,.0f} user updates."
    )
    table = Table("machine", "users/s, measured", "machine hours", "machines", "hours")
    if any(cost.price is not None for cost in costs):
        table.add_column("price")
    for column in table.columns[1:]:
        column.justify = "right"
    for cost in costs:
        figures = [f"{cost.speed.users_per_second:,g}", hours(cost.machine_hours), f"{cost.machines:,}"]
        figures += [hours(cost.hours), *([] if cost.price is None else [f"{cost.price:,.2f}"])]
        table.add_row(f"{cost.speed.device}: {cost.speed.engine}", *figures)
    console.print(table)
    for cost in costs:
        speed = cost.speed
        model = speed.model + (f", {speed.tokens_per_user:,} tokens per user" if speed.tokens_per_user else "")
        console.print(
            f"{speed.device}: {speed.engine}: {_what_was_measured(cost)}, {model} ({speed.source}).", soft_wrap=True
        )
    if any(cost.machines > 1 for cost in costs):
        console.print(f"Several machines at {efficiency:.0%} of ideal speed: that is --efficiency, not a measurement.")
    console.print("Evaluations and checkpoints are not included. For your model and machine: unheard benchmark --json.")


def _what_was_measured(cost: "Cost") -> str:
    return f"{cost.speed.of} of {cost.speed.users_per_round:,g} users"


def hours(value: float) -> str:
    """Returns hours with three digits."""
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
