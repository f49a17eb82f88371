"""`unheard tune`: choose the clip norm S, the noise sigma and the users per round of a private run.

Without --select the command sweeps S and sigma as in section 3 of the paper (`tuning/pipeline.py`). With --select it
trains a secret number of private candidates and keeps only the best (`tuning/private_selection.py`).
"""

import functools
import time
from dataclasses import dataclass, fields, replace
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from unheard.cli.display import (
    confirm_no_noise,
    console,
    echo,
    if_interrupted,
    note,
    notes,
    runs_stop_message,
    say,
    set_stop_message,
    show_runs,
)
from unheard.cli.options import AsJson, EngineOptions, RunFile, SetKeys, StopAfter, Yes, number, option
from unheard.cli.processes import let_unwind, signals_as_ctrl_c
from unheard.cli.train import parse_vary, read_run
from unheard.errors import InvalidValue, PrivacyError
from unheard.formatting import accountant_title, small

if TYPE_CHECKING:
    from unheard.engines.choice import EngineChoice
    from unheard.training.run import Run
    from unheard.tuning.output import Conclusion
    from unheard.tuning.pipeline import Allowance, TuningResult
    from unheard.tuning.trials import Grid

EXAMPLES = """Examples:

  unheard tune run.toml --out tuning --corpus corpora/public --population 20000    (the private users pay nothing)

  unheard tune run.toml --out tuning --rounds 1000 --seeds 3 --norms 5,10,20 --noise-stds 0.006,0.012

  unheard tune run.toml --out tuning --corpus corpora/public --population 20000    (again: continues after a stop)

  unheard tune run.toml --out runs/best --select --vary clip.norm=8,15 --vary update.learning_rate=3,6 --trials 5
"""

_sweep_option = functools.partial(option, panel="Sweep")
_sweep_number = functools.partial(number, panel="Sweep")
_select_option = functools.partial(option, panel="Private selection")


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The options of a sweep: which values to try, on which store, and how much accuracy the choices may cost."""

    corpus: Annotated[
        Path | None,
        _sweep_option("A proxy store to tune on; the plan is for the run's own store.", otherwise="the run's own"),
    ] = None
    population: Annotated[
        int | None,
        _sweep_number(
            "The declared population of the proxy; needed with --corpus.", min=2, max=2**40, otherwise="none"
        ),
    ] = None
    norms: Annotated[str, _sweep_option("Values of S to try, without noise.", metavar="S,S,...")] = "5,10,15,20,30"
    noise_stds: Annotated[str, _sweep_option("Values of sigma to try, at the chosen S.", metavar="SIGMA,...")] = (
        "0.003,0.006,0.012,0.024"
    )
    users_per_round: Annotated[int, _sweep_number("Users per round of each trial; few, to save time.", min=1)] = 100
    rounds: Annotated[int | None, _sweep_number("Rounds of each trial.", min=1, otherwise="as in the run file")] = None
    seeds: Annotated[int, _sweep_number("How often each trial is repeated.", min=1)] = 1
    allow_clip_loss: Annotated[
        float, _sweep_option("Points of AccuracyTop1 that clipping alone may cost.", metavar="POINTS")
    ] = 0.25
    allow_loss: Annotated[
        float, _sweep_option("Points of AccuracyTop1 that clip and noise together may cost.", metavar="POINTS")
    ] = 0.5
    noise_multiplier: Annotated[float, _sweep_option("z of the planned run.", min=1e-6, metavar="Z")] = 1.0
    stop_after: StopAfter = None
    yes: Yes = False


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """The options of private selection: the candidates, and how many trials to draw from them."""

    vary: Annotated[
        list[str] | None,
        _select_option(
            "With --select: table.key=value,value,...; all combinations are candidates. May be repeated.",
            metavar="KEY=VALUES",
            otherwise="none",
        ),
    ] = None
    trials: Annotated[
        float, _select_option("With --select: the mean number of trials.", min=1, max=1000, metavar="MEAN")
    ] = 5
    trials_from: Annotated[
        Literal["geometric", "poisson"],
        _select_option(
            "With --select: the distribution of the number of trials. geometric draws at least one; poisson may draw "
            "zero, and then there is no model."
        ),
    ] = "geometric"


def tune(
    context: typer.Context,
    run_file: RunFile,
    *,
    out: Annotated[Path, option("The folder for the trials and the plan; with --select the run folder.")],
    sweep: SweepOptions,
    select: Annotated[
        bool,
        _select_option(
            "Instead of a sweep: train a secret number of private candidates and keep only the best.", "--select"
        ),
    ] = False,
    selection: SelectionOptions,
    set_: SetKeys = None,
    engine: EngineOptions,
    as_json: AsJson = False,
) -> None:
    """Choose S, sigma and users per round of a private run.

    Trains a baseline, sweeps S, then sigma, with few users per round, and plans the private run with its hypothetical ε.
    The sweeps are not private: do them on proxy text (--corpus).
    """
    if select:
        _check_unused(context, sweep, "--select")
        _select(run_file, set_ or [], engine, selection, out, as_json)
        return
    _check_unused(context, selection, "a sweep (it is for --select)")
    set_stop_message(lambda: runs_stop_message(out))
    _sweep(*read_run(run_file, set_, engine), sweep, out, as_json)


def _check_unused(context: typer.Context, group: SweepOptions | SelectionOptions, mode: str) -> None:
    """Raise `InvalidValue` if an option of this group was given, because it would silently have no effect.

    Args:
        context: The context of the command, which knows the options on the command line.
        group: The options of the other mode of tuning.
        mode: The mode that was chosen, for the message.
    """
    for field in fields(group):
        source = context.get_parameter_source(field.name)
        if source is not None and source.name == "COMMANDLINE":
            raise InvalidValue(f"--{field.name.replace('_', '-')} has no meaning for {mode}. Leave it out.")


def _sweep(run: "Run", choice: "EngineChoice", options: SweepOptions, out: Path, as_json: bool) -> None:
    """Train the stages of a sweep; print and write the chosen values and the plan of the private run.

    Raises:
        InvalidValue: No private run can be planned from the results; the message says why.
        PrivacyError: The baseline without noise was not allowed, and there is no terminal to ask on.
    """
    from unheard.training.initialise import pinned
    from unheard.tuning.output import check_can_be_private, conclude
    from unheard.tuning.pipeline import Allowance, trial_run
    from unheard.tuning.trials import Grid, baseline_trials

    run, z = pinned(run), options.noise_multiplier
    grid = Grid(
        norms=_numbers("--norms", options.norms),
        noise_stds=_numbers("--noise-stds", options.noise_stds),
        users_per_round=options.users_per_round,
        seeds=options.seeds,
    )
    allowance = Allowance(clip_loss=options.allow_clip_loss, loss=options.allow_loss)
    tried = trial_run(run, options.corpus, options.population)
    check_can_be_private(run, grid, z)
    # The baseline of the sweep is trained without noise on the users of the store that the sweep uses.
    try:
        confirm_no_noise([trial.run for trial in baseline_trials(tried, grid, out)], options.yes)
    except PrivacyError:
        raise PrivacyError(
            "Tuning begins with a baseline without noise. Its first round makes epsilon infinite, permanently and over all "
            f"runs, for the users of {tried.corpus}. Tune on public text (--corpus STORE --population N) or with --select; "
            "or, if this text is public or its users agreed, add --yes."
        ) from None
    if options.rounds is not None:
        tried = replace(tried, training=replace(tried.training, rounds=options.rounds))
    result = _train_stages(tried, grid, allowance, out, choice, options.stop_after)
    if result is None:
        typer.echo('{"stopped": true}' if as_json else "Stopped. The same command continues.")
        return
    conclusion = conclude(run, result, allowance, z, out, choice, is_proxy=options.corpus is not None)
    if as_json:
        typer.echo(dumps(conclusion.record, allow_nan=False, indent=2))
    else:
        _print_trials(result, conclusion)
        if conclusion.record["plan"] is not None:
            _print_plan(conclusion.record["plan"], out)
    if conclusion.refusal is not None:
        raise InvalidValue(conclusion.refusal)


def _numbers(option: str, text: str) -> tuple[float, ...]:
    """Return the numbers in a text such as `5,10,20`. Raise `InvalidValue`, with the option's name, for other text."""
    try:
        return tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise InvalidValue(f"{option} {text}: write numbers with commas between them, for example 5,10,20.") from None


def _train_stages(
    run: "Run", grid: "Grid", allowance: "Allowance", out: Path, choice: "EngineChoice", stop_after: float | None
) -> "TuningResult | None":
    """Train stage by stage, with a progress bar for each trial.

    Returns:
        The result of the tuning; None if the limit of `stop_after` seconds ended it early.
    """
    from unheard.tuning.pipeline import run_stages

    start = time.monotonic()
    stages = run_stages(run, grid, allowance, out, choice)
    while True:
        try:
            stage = next(stages)
        except StopIteration as end:
            return end.value
        left = None if stop_after is None else max(0.0, stop_after - (time.monotonic() - start))
        notes.print(f"\n[bold]{stage.title}[/]")
        names = [f"{trial.name} seed {trial.seed}" if grid.seeds > 1 else trial.name for trial in stage.left]
        show_runs(stage.reports(), names, left)


def _print_trials(result: "TuningResult", conclusion: "Conclusion") -> None:
    """Print the accuracy of every setting, the chosen S and sigma, and the privacy cost of the tuning."""
    record = conclusion.record
    evaluations = min(row["evaluations"] for row in record["trials"])
    table = Table(title=f"Held-out AccuracyTop1, mean of the last {evaluations} evaluations", title_justify="left")
    for name in ("trial", "S", "σ", "runs", "top 1", "loss, points", ""):
        table.add_column(name, justify="left" if name in ("trial", "") else "right")
    for row in record["trials"]:
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
    say(result.margin.sentence)
    allowed, chosen = record["allowed"], record["chosen"]
    if chosen["norm"] is not None:
        say(f"Chosen: S = {chosen['norm']:g}, the smallest that costs less than {allowed['clip_loss']:g} points.")
    if chosen["noise_std"] is not None:
        say(
            f"Chosen: σ = {chosen['noise_std']:g}, the largest that costs less than {allowed['loss']:g} points, the clip included."
        )
    for remark in chosen["remarks"]:
        say(f"Note: {remark}")
    say("")
    for sentence in conclusion.cost.sentences:
        say(sentence)


def _print_plan(plan: dict[str, Any], out: Path) -> None:
    """Print the planned run: users per round, hypothetical epsilon by each accountant, and estimated duration."""
    say("")
    say(
        f"The plan: {plan['users_per_round']:,} users per round of {plan['population']:,}, z = {plan['noise_multiplier']:g}, "
        f"σ = {plan['noise_std']:.4g}, {plan['rounds']:,} rounds."
    )
    epsilons = (
        f"{f'{value:.4g}' if isinstance(value, float) else value} by {accountant_title(name)}"
        for name, value in plan["epsilon"].items()
    )
    say(f"Hypothetical, since it has not happened: ε = {', '.join(epsilons)}, at δ = {small(plan['delta'])}.")
    duration = ""
    if plan["users_per_second"] is not None:
        hours = plan["seconds"] / 3600
        duration = f", about {hours:,.1f} hours" if hours >= 1 else f", about {60 * hours:,.0f} minutes"
        duration += f" at the {plan['users_per_second']:,.1f} per second of this sweep (evaluations included)"
    say(f"To compute: {plan['updates']:,} user updates{duration}.")
    say("Its accuracy is an estimate from fewer users per round at the same σ. The plan, ready to train:")
    say(f"  unheard train {out / 'chosen.toml'} --out runs/private")


def _select(
    run_file: Path, set_: list[str], engine: EngineOptions, options: SelectionOptions, out: Path, as_json: bool
) -> None:
    """Train a secret number of candidates and print the best one.

    There is no progress bar, because the number of trials and their scores must stay secret.
    """
    from unheard.training.initialise import pinned
    from unheard.training.run import read_saved_run, run_hash
    from unheard.tuning.private_selection import TrialCount, select

    mean, drawn_from = options.trials, options.trials_from
    if not options.vary:
        raise InvalidValue("--select needs candidates: --vary clip.norm=8,15,20, for example. May be repeated.")
    combinations = parse_vary(options.vary)
    runs = [read_run(run_file, [*set_, *varied], engine) for varied in combinations]
    candidates = [run for run, _ in runs]
    note(
        f"{len(candidates)} candidates, {mean:g} trials on average ({drawn_from}). Their number is drawn at random and "
        "stays secret, so there is no progress bar. It may take several times the average."
    )
    let_unwind()
    kept = if_interrupted("The trials are deleted; what they were charged stays charged. Run the same command again.")
    with signals_as_ctrl_c(), kept, notes.status("Training"):  # an interruption deletes the trials
        folder = select(candidates, out, TrialCount(mean=mean, drawn_from=drawn_from), engine=runs[0][1])
    if folder is None:
        say("The number drawn was zero: there is no model. It was charged all the same.")
        return
    statement = folder.statement.read_text(encoding="utf-8")
    if as_json:
        echo(statement)
        return
    best = run_hash(read_saved_run(folder.run_file)[0])
    chosen = next(c for c, run in zip(combinations, candidates, strict=True) if run_hash(pinned(run)) == best)
    say(f"The best: {', '.join(chosen)}. Run folder: {out}")
    say(f"What it and the choice of it cost: {loads(statement)['claim']}.")
    say(
        "That holds as long as nothing else is published: neither the number of trials, nor their duration, nor the "
        "results of the others, which are deleted. The choice used exact accuracy on held-out users, who are not "
        "protected by it."
    )
    say(f"In full: unheard statement {out}")
