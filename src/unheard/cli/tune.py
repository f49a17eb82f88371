"""`unheard tune`: the paper's road-map, from a run file to the plan to run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from unheard.training.run import Run

EXAMPLES = """Examples:

  unheard tune run.toml --out tuning --corpus corpora/public --population 20000    (the private users pay nothing)

  unheard tune run.toml --out tuning --rounds 1000 --seeds 3 --norms 5,10,20 --noise-stds 0.006,0.012

  unheard tune run.toml --out tuning --corpus corpora/public --population 20000    (again: goes on where it was stopped)

  unheard tune run.toml --out runs/best --select --vary clip.norm=8,15 --vary update.learning_rate=3,6 --trials 5
"""

SWEEPING = ("corpus", "population", "norms", "noise_stds", "users_per_round", "rounds", "seeds", "allow_clip_loss")
SWEEPING += ("allow_loss", "noise_multiplier", "stop_after")
SELECTING = ("vary", "trials", "trials_from")
"""Options of the two ways to tune: neither is taken for the other."""


def tune(
    context: typer.Context,
    run_file: Annotated[Path, typer.Argument(help="The run to plan; `unheard init` writes one.", metavar="RUN.toml")],
    out: Annotated[Path, typer.Option(help="The folder for the trials and the plan.")],
    corpus: Annotated[
        Path | None,
        typer.Option(help="Tune on this proxy corpus instead of the run's own; the plan stays for the run's own."),
    ] = None,
    population: Annotated[
        int | None, typer.Option(help="The proxy's declared population; needed with --corpus.", min=2, max=2**40)
    ] = None,
    norms: Annotated[str, typer.Option(help="S to try, without noise.")] = "5,10,15,20,30",
    noise_stds: Annotated[str, typer.Option(help="sigma to try, at the chosen S.")] = "0.003,0.006,0.012,0.024",
    users_per_round: Annotated[int, typer.Option(help="Users a round while tuning: few.", min=1)] = 100,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of each trial; the run file's if left out.", min=1, show_default=False)
    ] = None,
    seeds: Annotated[int, typer.Option(help="How often each trial is run.", min=1)] = 1,
    allow_clip_loss: Annotated[float, typer.Option(help="Points of AccuracyTop1 that clipping alone may cost.")] = 0.25,
    allow_loss: Annotated[
        float, typer.Option(help="Points of AccuracyTop1 that clip and noise together may cost.")
    ] = 0.5,
    noise_multiplier: Annotated[float, typer.Option(help="z of the plan.", min=1e-6)] = 1.0,
    select: Annotated[
        bool, typer.Option("--select", help="Instead: train a secret number of private candidates, keep only the best.")
    ] = False,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="With --select: table.key=value,value,...; all combinations are candidates. May be repeated."
        ),
    ] = None,
    trials: Annotated[float, typer.Option(help="With --select: how many trials on average.", min=1, max=1000)] = 5,
    trials_from: Annotated[
        str, typer.Option(help="With --select: geometric (at least one model) or poisson (perhaps none).")
    ] = "geometric",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one key of the run file: table.key=value. May be repeated."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="auto, stacked, vectorised or reference.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = None,
    stop_after: Annotated[
        float | None, typer.Option(help="Seconds after which to stop cleanly, at the end of a round.", min=0)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; it is in OUT/tuning.json too.")
    ] = False,
) -> None:
    """Find S, sigma and users a round: baseline, sweep of S, sweep of sigma with few users, then the plan with its hypothetical ε
    and its cost. The sweeps are not private: do them on proxy text (--corpus)."""
    from dataclasses import replace
    from json import dumps

    from unheard.cli.display import warn_of_no_noise
    from unheard.cli.tuning_tables import show_plan, show_trials
    from unheard.errors import InvalidValue
    from unheard.training.run_file import read_run_file
    from unheard.tuning.outlook import check_can_be_private, outlook
    from unheard.tuning.road_map import Allowance, users_per_second
    from unheard.tuning.spending import spending
    from unheard.tuning.trials import Grid
    from unheard.tuning.written import record, write

    overrides = [*(set_ or [])]
    overrides += [f"engine.kind={engine}"] if engine else []
    overrides += [f"engine.device={device}"] if device else []
    if select:
        from unheard.cli.selecting import select_best

        _refuse_both(context, SWEEPING, "--select")
        select_best(run_file, overrides, vary or [], out, trials, trials_from, as_json)
        return
    _refuse_both(context, SELECTING, "a sweep (it is for --select)")
    run, choice = read_run_file(run_file, overrides)
    grid = Grid(
        norms=_numbers("--norms", norms),
        noise_stds=_numbers("--noise-stds", noise_stds),
        users_per_round=users_per_round,
        seeds=seeds,
    )
    allowance = Allowance(clip_loss=allow_clip_loss, loss=allow_loss)
    tried = _tried(run, corpus, population)
    check_can_be_private(run, grid, noise_multiplier)
    if corpus is None:
        warn_of_no_noise(run.corpus)
    if rounds is not None:
        tried = replace(tried, training=replace(tried.training, rounds=rounds))
    tuned = _walk(tried, grid, allowance, out, choice, stop_after)
    if tuned is None:
        typer.echo('{"stopped": true}' if as_json else "Stopped. The same command goes on where it was.")
        return
    price = spending(tuned.trials, is_proxy=corpus is not None)
    # Where nothing can be chosen or planned, what was found and what it cost is told all the same, and then why.
    refusal, ahead = tuned.refusal, None
    if tuned.noise is not None:
        try:
            ahead = outlook(run, tuned.noise.result.norm, tuned.noise.result.noise_std, noise_multiplier)
        except InvalidValue as too_few_users:
            refusal = str(too_few_users)
    found = record(tuned, allowance, price, ahead, users_per_second(out))
    write(out, found, ahead, choice)
    if as_json:
        typer.echo(dumps(found, allow_nan=False, indent=2))
    else:
        show_trials(found, tuned, price)
        if ahead is not None:
            show_plan(found, out)
    if refusal is not None:
        raise InvalidValue(refusal)


def _refuse_both(context: typer.Context, names: tuple[str, ...], mode: str) -> None:
    """An option of the other way of tuning would be silently without effect."""
    from unheard.errors import InvalidValue

    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InvalidValue(f"--{name.replace('_', '-')} has no meaning for {mode}. Leave it out.")


def _tried(run: "Run", corpus: Path | None, population: int | None) -> "Run":
    """The run that the trials are made of: on the proxy, if there is one."""
    from unheard.errors import InvalidValue
    from unheard.tuning.spending import check_other_people
    from unheard.tuning.trials import check_can_be_tuned, on_proxy

    check_can_be_tuned(run)
    if (corpus is None) != (population is None):
        raise InvalidValue(
            "--corpus and --population go together: how many users the proxy has is declared, never counted."
        )
    if corpus is not None and population is not None:
        check_other_people(run, corpus)
        return on_proxy(run, corpus, population)
    if run.budget is not None:
        raise InvalidValue(
            f"The run file has a budget of ε = {run.budget.epsilon:g}, and tuning on its own people spends infinity: its baseline "
            "and its sweep of S have no noise. Tune on proxy text (--corpus PROXY --population N), or take the budget out."
        )
    return run


def _walk(run: "Run", grid: Any, allowance: Any, out: Path, choice: Any, stop_after: float | None) -> Any:
    """Stage by stage, with a bar for each trial. None if the time was up."""
    import time

    from unheard.cli.display import notes, show_together
    from unheard.tuning.road_map import road_map

    began = time.monotonic()
    stages = road_map(run, grid, allowance, out, choice)
    while True:
        try:
            stage = next(stages)
        except StopIteration as end:
            return end.value
        left = None if stop_after is None else max(0.0, stop_after - (time.monotonic() - began))
        notes.print(f"\n[bold]{stage.title}[/]")
        names = [f"{trial.name} seed {trial.seed}" if grid.seeds > 1 else trial.name for trial in stage.left]
        show_together(stage.reports(), names, left)


def _numbers(option: str, text: str) -> tuple[float, ...]:
    from unheard.errors import InvalidValue

    try:
        return tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise InvalidValue(f"{option} {text}: write numbers with commas between them, for example 5,10,20.") from None
