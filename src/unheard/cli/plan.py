"""`unheard plan`: compute what a run would cost before it is trained: epsilon, and with --cost machine time.

Every epsilon here is hypothetical: it belongs to a run that has not happened. The options decide which of three
questions the command answers:

    what would this run cost?           `CostEstimate`; `planner.plan` solves for a missing value (`privacy/planner.py`)
    what does my population allow?      `feasible_plans`, if only --users and --epsilon are given
    which noise has the least error?    `compare_noise` (`privacy/noise_choice.py`), with --compare-noise

`performance/estimate.py` computes the machine time from measured speeds.
"""

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from unheard.cli.display import note, notes, safe_console, say, warn_of_delta
from unheard.cli.options import AsJson, number, option
from unheard.errors import InvalidValue

if TYPE_CHECKING:
    from unheard.performance.estimate import Cost
    from unheard.privacy.planner import CostEstimate, FeasiblePlan, SamplingComparison, Solution

EXAMPLES = """
Examples:

unheard plan --users 14000 --epsilon 8  [dim](what can I get with my users?)[/]

unheard plan --users 763430 --users-per-round 5000 --noise-multiplier 1 --rounds 5000 --delta 1e-9

unheard plan --users 1000000 --users-per-round 1000 --rounds 3000 --epsilon 2  [dim](finds the noise multiplier)[/]

unheard plan --users 750000 --users-per-round 1000 --rounds 1500 --epsilon 2 --compare-noise  [dim](correlated noise)[/]

unheard plan --users 763430 --users-per-round 5000 --noise-multiplier 1 --rounds 5000 --cost --gpus 8

unheard plan --users 100000 --users-per-round 500 --rounds 300 --noise-multiplier 1 --examples-per-user 8
"""

_cost = functools.partial(option, panel="Machine time")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The run to plan.

    With --epsilon, one of users per round, noise multiplier and rounds may be left out and is solved for. If all three
    are left out, the command lists feasible plans.
    """

    users: Annotated[int, number("How many users there are: the population that the run declares.")]
    users_per_round: Annotated[
        float | None, number("Expected users per round.", otherwise="solved for, with --epsilon")
    ] = None
    noise_multiplier: Annotated[
        float | None,
        option(
            "z: the standard deviation of the noise divided by the sensitivity.",
            metavar="Z",
            otherwise="solved for, with --epsilon",
        ),
    ] = None
    rounds: Annotated[int | None, number("The number of rounds.", otherwise="solved for, with --epsilon")] = None
    epsilon: Annotated[
        float | None,
        option("A target epsilon. Leave out one of the three values above: it is solved for.", otherwise="none"),
    ] = None
    delta: Annotated[float | None, option("Below 1/users.", otherwise="users^-1.1")] = None
    clip_norm: Annotated[
        float, option("S, from which sigma = z S / users per round follows.", min=1e-9, metavar="S")
    ] = 15.0
    parameters: Annotated[
        int, number("Parameters of the model; they determine the norm of the noise. Default: the paper's.", min=1)
    ] = 1_346_144
    accountant: Annotated[
        Literal["best", "pld", "rdp", "moments"],
        option("The accountant whose epsilon must meet the target; best is the smaller of pld and rdp."),
    ] = "best"

    @property
    def values(self) -> dict[str, Any]:
        """The arguments of a `CostEstimate` except the population; None for an option that is left out."""
        from unheard.privacy.budget import default_delta

        return {
            "users_per_round": self.users_per_round,
            "noise_multiplier": self.noise_multiplier,
            "rounds": self.rounds,
            "delta": default_delta(self.users) if self.delta is None else self.delta,
        }

    @property
    def is_only_a_target(self) -> bool:
        """Whether --epsilon is given, and users per round, noise multiplier and rounds are all left out."""
        return self.epsilon is not None and self.users_per_round is self.noise_multiplier is self.rounds is None


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """Whether and how to estimate the machine time."""

    cost: Annotated[bool, _cost("Also estimate the machine time, from measured speeds.", "--cost")] = False
    gpus: Annotated[int, _cost("With --cost: the number of GPUs.", min=1, metavar="N")] = 1
    efficiency: Annotated[
        float, _cost("With --cost: the fraction of ideal speed that several GPUs reach; your assumption.")
    ] = 1.0
    gpu_hour_price: Annotated[
        float | None, _cost("With --cost: your price of one hour of one GPU.", otherwise="none")
    ] = None
    speed_from: Annotated[
        Path | None,
        _cost(
            "With --cost: speeds that `unheard benchmark --json` printed.",
            metavar="FILE",
            otherwise="speeds that come with the package",
        ),
    ] = None

    def costs_of(self, estimate: "CostEstimate") -> "list[Cost] | None":
        """Return the machine time of a run on each machine whose speed was measured; None without --cost."""
        from unheard.performance.estimate import costs_on_measured_machines, measured_speeds, speeds_from

        if not self.cost:
            return None
        return costs_on_measured_machines(
            speeds_from(self.speed_from) if self.speed_from is not None else measured_speeds(),
            rounds=estimate.rounds,
            users_per_round=estimate.users_per_round,
            gpus=self.gpus,
            efficiency=self.efficiency,
            gpu_hour_price=self.gpu_hour_price,
        )


ExamplesPerUser = Annotated[
    int | None,
    option(
        "Also compute the noise if examples are sampled instead of users, at most G per user, for the same epsilon "
        "and the same computation.",
        min=1,
        max=4096,
        metavar="G",
        otherwise="users only",
    ),
]
CompareNoise = Annotated[
    bool,
    option(
        "Compare independent noise with correlated noise (banded, BLT) for users per round, rounds and epsilon.",
        "--compare-noise",
    ),
]


def plan(
    *,
    run: RunOptions,
    examples_per_user: ExamplesPerUser = None,
    compare_noise: CompareNoise = False,
    cost: CostOptions,
    as_json: AsJson = False,
) -> None:
    """Compute what a run would cost: epsilon, and with --cost machine time. Every epsilon is hypothetical."""
    from unheard.privacy.planner import compare_sampling

    _check(run, cost, compare_noise)
    if compare_noise:
        return _compare_noise(run, as_json)
    if run.is_only_a_target and not cost.cost:
        return _show_feasible(run, as_json)
    estimate, solution = _estimate(run)
    warn_of_delta(estimate.delta)
    noise = estimate.noise_level(run.clip_norm, run.parameters)
    if sentence := noise.caution():
        note(sentence, style="bold yellow")
    costs, comparison = cost.costs_of(estimate), None
    if examples_per_user is not None:
        with notes.status("comparing with sampling of examples ...") as status:
            comparison = compare_sampling(estimate, examples_per_user, status.update)
    if as_json:
        record = {**estimate.record(), "noise": noise.record()}
        if costs is not None:
            machines = [machine.record() for machine in costs]
            record["cost"] = {"user_updates": estimate.updates, "efficiency": cost.efficiency, "machines": machines}
        if comparison is not None:
            record["sampling_of_examples"] = vars(comparison)
        return _print_json(record if solution is None else record | solution.record(run.accountant))
    _print_estimate(estimate, solution)
    if noise.noise_std > 0 and not noise.is_dominant:
        say(str(noise))
    if costs is not None:
        _print_costs(estimate, costs, cost.efficiency)
    if comparison is not None:
        _print_comparison(comparison)


def _check(run: RunOptions, cost: CostOptions, compare_noise: bool) -> None:
    """Raise `InvalidValue` for options that contradict each other or would have no effect."""
    if run.users < 1:
        raise InvalidValue(f"--users must be 1 or more, not {run.users}.")
    if not cost.cost and cost != CostOptions():
        raise InvalidValue("--gpus, --efficiency, --gpu-hour-price and --speed-from go with --cost.")
    has_all = run.epsilon is not None and run.users_per_round is not None and run.rounds is not None
    if compare_noise and (not has_all or run.noise_multiplier is not None or cost.cost):
        raise InvalidValue("--compare-noise goes with --users-per-round, --rounds and --epsilon, and solves for z.")


def _estimate(run: RunOptions) -> "tuple[CostEstimate, Solution | None]":
    """Return the estimate of a run; with --epsilon, solve for the value that is left out and return the solution too.

    Raises:
        InvalidValue: A value is missing and there is no --epsilon to solve for it.
    """
    from unheard.privacy.planner import CostEstimate
    from unheard.privacy.planner import plan as solve

    if run.epsilon is None:
        if missing := [f"--{name.replace('_', '-')}" for name, value in run.values.items() if value is None]:
            raise InvalidValue(
                f"Give {' and '.join(missing)} too; or leave out one, and give --epsilon to solve for it."
            )
        return CostEstimate(population=run.users, **run.values), None
    with notes.status("solving ...") as status:
        solution = solve(
            users=run.users,
            epsilon=run.epsilon,
            accountant=run.accountant,
            progress=lambda trial: status.update(f"solving: {trial}"),
            **run.values,
        )
    return solution.estimate, solution


def _print_json(record: dict[str, Any]) -> None:
    """Print a record as one line of strict JSON; infinity becomes the string "infinity"."""
    from unheard.privacy.statement import plain

    typer.echo(json.dumps(plain(record), allow_nan=False))


def _compare_noise(run: RunOptions, as_json: bool) -> None:
    """Print independent, banded and BLT noise at the target epsilon, each with the error of the summed updates."""
    from unheard.privacy.noise_choice import best, compare_noise

    assert run.users_per_round is not None  # `_check` has checked all three
    assert run.rounds is not None
    assert run.epsilon is not None
    delta = run.values["delta"]
    warn_of_delta(delta)
    with notes.status("comparing ...") as status:
        options = compare_noise(
            population=run.users,
            users_per_round=run.users_per_round,
            rounds=run.rounds,
            epsilon=run.epsilon,
            delta=delta,
            accountant=run.accountant,
            progress=lambda step: status.update(f"comparing: {step}"),
        )
    chosen, independent = best(options), options[0]
    rows = [{**option.record(independent, run.parameters), "is_best": option is chosen} for option in options]
    if as_json:
        record = {"users": run.users, "users_per_round": run.users_per_round, "rounds": run.rounds}
        _print_json({"hypothetical": True, **record, "delta": delta, "target": run.epsilon, "noise": rows})
    else:
        _print_noise_options(run, rows)


def _print_noise_options(run: RunOptions, rows: list[dict[str, Any]]) -> None:
    """Print a table with one row for each kind of noise, and a legend of the columns."""
    console = safe_console(highlight=False)
    console.print(
        f"[bold]Hypothetical[/]: {run.users:,} users, {run.users_per_round:,g} per round, {run.rounds:,} rounds, epsilon "
        f"{run.epsilon:g} at delta {run.values['delta']:.3g}. None of these runs has happened."
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
        "error/S: the root mean square over the rounds of the noise in each coordinate of the summed updates, in units "
        "of S. b: two rounds of one user are at least this many rounds apart. history: the size of the past noise that "
        f"the run keeps for {run.parameters:,} parameters; keep it as secret as the text. With min_separation the "
        "guarantee does not rest on sampling. `unheard init --noise auto --epsilon E` writes the best one into a run "
        "file.",
        soft_wrap=True,
    )


def _show_feasible(run: RunOptions, as_json: bool) -> None:
    """Print the plans that the population allows at the target epsilon, as a table or as JSON."""
    from unheard.privacy.accountants import versions
    from unheard.privacy.planner import feasible_plans

    assert run.epsilon is not None
    warn_of_delta(run.values["delta"])
    with notes.status("solving ...") as status:
        plans = feasible_plans(
            population=run.users,
            epsilon=run.epsilon,
            delta=run.values["delta"],
            clip_norm=run.clip_norm,
            parameters=run.parameters,
            progress=lambda trial: status.update(f"solving: {trial}"),
        )
    if as_json:
        records = [plan.record() for plan in plans]
        _print_json({"hypothetical": True, "target": run.epsilon, "plans": records, "versions": versions()})
    else:
        _print_feasible(plans, run.epsilon)


def _print_feasible(plans: "list[FeasiblePlan]", target: float) -> None:
    """Print a table with one row for each plan: its size, sigma, epsilon, and the expected effect of the noise."""
    from unheard.privacy.accountants import ACCOUNTANTS
    from unheard.privacy.events import COSTLY_RATIO, DOMINANT_RATIO, FREE_RATIO

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
        f"model). Noise of up to {FREE_RATIO:g} cost 0.1 points of accuracy in the paper and 0.4 to 1.4 in our runs; up to "
        f"{COSTLY_RATIO:g} it cost 1.3 and 5 to 8; above {DOMINANT_RATIO:g} models learned nothing.",
        soft_wrap=True,
    )
    if min(plan.noise.ratio for plan in plans) > COSTLY_RATIO:
        console.print(
            f"No plan here is below {COSTLY_RATIO:g} with this model. Cures: a smaller model or LoRA (fewer --parameters), a "
            "public start (training.init_from), correlated noise (--compare-noise), a larger epsilon, or more users.",
            soft_wrap=True,
        )
    console.print(
        "z is chosen so that epsilon by RDP meets the target. The epsilon shown is the one that a run would claim: the "
        "smaller of PLD and RDP. To refine a row, give two of --users-per-round, --noise-multiplier and --rounds.",
        soft_wrap=True,
    )


def _print_estimate(estimate: "CostEstimate", solution: "Solution | None") -> None:
    """Print the value that was solved for, and a table of epsilon after 1, 10, 100, ... rounds by each accountant."""
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
        console.print(
            "Correlated noise may add less noise to the model at this epsilon: add --compare-noise to see how much."
        )
    if math.isinf(epsilons["pld"]) and not math.isinf(epsilons["rdp"]):
        console.print("PLD's arithmetic cannot resolve so small a delta over so many rounds, hence its 'inf'.")


def _answer(solution: "Solution") -> str:
    """Return a sentence with the value that was solved for and its epsilon."""
    name, bound = solution.solved_for, solution.bound
    words = f"{name} = [bold]{getattr(solution.estimate, name):g}[/] meets epsilon {solution.target:g}: "
    words += f"{bound.epsilon:.4g} by {bound.accountant}."
    if solution.cheaper is None:
        return words + " The search ended there."
    return words + f" {getattr(solution.cheaper, name):g} does not."


def _print_costs(estimate: "CostEstimate", costs: "list[Cost]", efficiency: float) -> None:
    """Print the machine time on each measured machine, and how its speed was measured."""
    console = safe_console(highlight=False)
    console.print(
        f"\n[bold]Machine time[/] of {estimate.rounds:,} rounds of {estimate.users_per_round:,g} users: "
        f"{estimate.updates:,.0f} user updates."
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
        console.print(f"{speed.device}: {speed.engine}: {cost.measured}, {model} ({speed.source}).", soft_wrap=True)
    if any(cost.machines > 1 for cost in costs):
        console.print(f"Several machines at {efficiency:.0%} of ideal speed: that is --efficiency, not a measurement.")
    console.print("Evaluations and checkpoints are not included. For your model and machine: unheard benchmark --json.")


def _print_comparison(comparison: "SamplingComparison") -> None:
    """Compare the noise of sampling examples with that of sampling users, and print what the comparison ignores."""
    less = comparison.examples_std / comparison.users_std
    z = math.ceil(1e3 * comparison.examples_noise) / 1e3  # rounded up: a run with the printed z stays within epsilon
    say(
        f"Sampling of examples, at most {comparison.examples_per_user} of each user, {comparison.examples_per_round:,g} per "
        f"round: epsilon {comparison.epsilon:.3g} needs z = {z:g} in units of one example's clip. "
        f"The noise of the average, for the same clip, is {less:.2g} times that of sampling users."
    )
    say(
        "This is for one clipped gradient per example ([sampling] kind = 'examples', [update] kind = 'fedsgd'). A "
        "user's update of several local steps moves further than one gradient, so the noise alone does not decide "
        "which model is better."
    )


def hours(value: float) -> str:
    """Return a number of hours as text: three significant digits below 1000, whole hours above."""
    return f"{value:,.3g}" if value < 999.5 else f"{value:,.0f}"
