"""`unheard benchmark`: how fast this machine trains the paper's model, and how close that is to what it allows."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

EXAMPLES = """Examples:

  unheard benchmark

  unheard benchmark --json > speed.json

  unheard benchmark --device cpu --users 4 --engine stacked --engine vectorised

  unheard benchmark --rounds 100 --rounds 1250 --runs 16
"""


def benchmark(
    engine: Annotated[
        list[str] | None, typer.Option(help="Engines to time: stacked, vectorised, reference. May be repeated.")
    ] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help="Precisions to time: float32, bfloat16. May be repeated.")
    ] = None,
    users: Annotated[
        list[int] | None, typer.Option(help="Users given to the engine at a time. May be repeated.", min=1)
    ] = None,
    rounds: Annotated[
        list[int] | None,
        typer.Option(help="Time whole rounds of so many users too; 0 for none. May be repeated.", min=0),
    ] = None,
    runs: Annotated[
        int, typer.Option(help="Time so many runs of 100 users a round side by side; 0 for none.", min=0)
    ] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    model: Annotated[
        Path | None, typer.Option(help="A run file whose model to time. Default: the paper's.", metavar="RUN.toml")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Time user updates and whole rounds on this machine: users and tokens a second, memory, and shares of the machine's limits."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from unheard.cli.display import notes
    from unheard.engines.choice import EngineChoice
    from unheard.performance import benchmark as speed

    timed = _model(model)
    choice = EngineChoice(device=device)
    place = choice.torch_device()
    on_gpu = place.type == "cuda"
    sizes = users or ([100, 1024] if on_gpu else [4])
    whole = [n for n in (rounds or ([100, 1250] if on_gpu else [4])) if n]
    found: dict[str, Any] = {}
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=notes) as bar:
        task = bar.add_task("the machine's own limits", total=None)
        limits = speed.machine(place)
        found |= {"machine": limits.__dict__, "parameters": timed.layout.total, "updates": [], "rounds": []}

        def measured(what: str, row: dict[str, Any]) -> dict[str, Any]:
            # said at once: a benchmark that is stopped has not been in vain
            bar.console.print(f"{what}: {row['users_per_second']:,.1f} users/s", highlight=False)
            return row

        for each in speed.choices(choice, engine or ["stacked", "vectorised"], precision or _precisions(on_gpu)):
            for size in sizes:
                what = f"{each.kind}, {each.precision}, {size} users at a time"
                bar.update(task, description=what)
                row = measured(what, speed.user_updates(timed, each, size))
                found["updates"].append(row | _shares(row, speed.limits(timed, limits, row["bytes_per_number"])))
        for size, side_by_side in [*((n, 1) for n in whole), *([(100, runs)] if runs else [])]:
            what = f"whole rounds of {size} users, {side_by_side} run(s)"
            bar.update(task, description=what)
            row = speed.whole_rounds(timed, choice, size, runs=side_by_side, rounds=_enough(size, on_gpu))
            found["rounds"].append(measured(what, row))
    if json_:
        typer.echo(json.dumps(found, indent=2))
    else:
        _show(found)


def _model(run_file: Path | None) -> Any:
    from unheard.models.recurrent import TiedLSTM
    from unheard.training.run_file import read_run_file

    model = read_run_file(run_file)[0].model if run_file else TiedLSTM()
    return model.pinned(10_000)  # the paper's vocabulary, if the run file leaves its size to a store


def _precisions(on_gpu: bool) -> list[str]:
    return ["bfloat16", "float32"] if on_gpu else ["float32"]


def _enough(size: int, on_gpu: bool) -> int:
    """Rounds to time: a few seconds' worth."""
    return max(4, 10_000 // size) if on_gpu else 4


def _shares(row: dict[str, Any], limits: dict[str, float]) -> dict[str, float]:
    return {f"share_of_{name}_limit": row["users_per_second"] / limit for name, limit in limits.items()}


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    from unheard.cli.display import console

    machine = found["machine"]
    console.print(
        f"{machine['device']}: {machine['bytes_per_second'] / 1e9:,.0f} GB/s through memory, "
        f"{machine['float32_per_second'] / 1e12:.2f} float32 and {machine['bfloat16_per_second'] / 1e12:.2f} bfloat16 TFLOP/s.",
        highlight=False,
    )
    updates = Table(title="User updates (1,600 tokens, 20 local steps, clipped after each)", title_justify="left")
    limits = ("of memory limit", "of arithmetic limit")
    for name in ("engine", "precision", "users at a time", "users/s", "tokens/s", *limits, "peak memory"):
        updates.add_column(name, justify="left" if name in ("engine", "precision") else "right")
    for row in found["updates"]:
        updates.add_row(
            row["engine"], row["precision"], f"{row['users']:,}", f"{row['users_per_second']:,.1f}",
            f"{row['tokens_per_second']:,.0f}", f"{row['share_of_memory_limit']:.0%}",
            f"{row['share_of_arithmetic_limit']:.0%}", f"{row['peak_memory_bytes'] / 2**30:.2f} GiB",
        )  # fmt: skip
    console.print(updates)
    if found["rounds"]:
        rounds = Table(title="Whole rounds: sampling, reading, updates, secure noise, ledger", title_justify="left")
        for name in ("users a round", "runs side by side", "users/s", "rounds/s"):
            rounds.add_column(name, justify="right")
        for row in found["rounds"]:
            speed = (f"{row['users_per_second']:,.1f}", f"{row['rounds_per_second']:.2f}")
            rounds.add_row(f"{row['users_per_round']:,}", str(row["runs_at_once"]), *speed)
        console.print(rounds)
