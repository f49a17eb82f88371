"""`unheard tune`: the paper's road-map, from a run file to the plan to run.
`unheard tune --select`: the best of a secret number of private runs, with the words that must stand beside it.
What a tuning found, in a terminal: all trials, the choice, the plan to run, and what the tuning has cost.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unheard.cli.display import console, say


def select_best(
    run_file: Path, overrides: Sequence[str], vary: list[str], out: Path, mean: float, drawn_from: str, as_json: bool
) -> None:
    """Nothing is shown while the trials run but that they do: their number and their scores are secret."""
    import signal
    import sys
    from json import loads

    import typer

    from unheard.cli.display import notes, say
    from unheard.cli.sweep import combinations
    from unheard.errors import InvalidValue
    from unheard.training.initialise import pinned
    from unheard.training.run_file import read_run_file, read_saved_run, run_hash
    from unheard.tuning.private_selection import TrialCount, select

    if not vary:
        raise InvalidValue("--select needs candidates: --vary clip.norm=8,15,20, for example. May be repeated.")
    changes = combinations(vary)
    read = [read_run_file(run_file, [*overrides, *some]) for some in changes]
    candidates = [run for run, _ in read]
    count = TrialCount(mean=mean, drawn_from=drawn_from)
    notes.print(
        f"{len(candidates)} candidates, {mean:g} trials on average ({drawn_from}). How many there will be is drawn by the machine "
        "and told to nobody: hence no bar. It may take several times the average.",
        highlight=False,
        soft_wrap=True,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # leave as by Ctrl-C: nothing of the trials may stay
    with notes.status("Training"):
        folder = select(candidates, out, count, engine=read[0][1])
    if folder is None:
        say("The number drawn was zero: there is no model. It was charged all the same.")
        return
    if as_json:
        typer.echo(folder.statement.read_text(encoding="utf-8"))
        return
    best = run_hash(read_saved_run(folder.run_file)[0])
    chosen = next(some for some, run in zip(changes, candidates, strict=True) if run_hash(pinned(run)) == best)
    say(f"The best: {', '.join(chosen)}. Run folder: {out}")
    say(f"What it and the choice of it cost: {loads(folder.statement.read_text(encoding='utf-8'))['claim']}.")
    say(
        "That holds while nothing else is told: not how many trials there were, how long it took or how the others did. They are "
        "deleted. It was chosen by exact accuracy on held-out users, who are not protected by this."
    )
    say(f"In full: unheard statement {out}")


if TYPE_CHECKING:
    from unheard.tuning.pipeline import Tuned
    from unheard.tuning.tuning_cost import Spending


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
    from unheard.errors import InvalidValue
    from unheard.training.initialise import pinned
    from unheard.training.run_file import read_run_file
    from unheard.tuning.output import record, write
    from unheard.tuning.pipeline import Allowance, users_per_second
    from unheard.tuning.projected_plan import check_can_be_private, outlook
    from unheard.tuning.trials import Grid
    from unheard.tuning.tuning_cost import spending

    overrides = [*(set_ or [])]
    overrides += [f"engine.kind={engine}"] if engine else []
    overrides += [f"engine.device={device}"] if device else []
    if select:
        _refuse_both(context, SWEEPING, "--select")
        select_best(run_file, overrides, vary or [], out, trials, trials_from, as_json)
        return
    _refuse_both(context, SELECTING, "a sweep (it is for --select)")
    run, choice = read_run_file(run_file, overrides)
    run = pinned(run)
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
    from unheard.tuning.trials import check_can_be_tuned, on_proxy
    from unheard.tuning.tuning_cost import check_other_population

    check_can_be_tuned(run)
    if (corpus is None) != (population is None):
        raise InvalidValue(
            "--corpus and --population go together: how many users the proxy has is declared, never counted."
        )
    if corpus is not None and population is not None:
        check_other_population(run, corpus)
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
    from unheard.tuning.pipeline import road_map

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
