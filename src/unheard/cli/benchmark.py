"""`unheard benchmark`: time training on this machine, and compare with the machine's limits.

Measures user updates alone (each engine, precision and number of users at a time) and whole rounds (sampling, reading,
updates, noise, ledger; of long and of short texts, of one run and of several), on synthetic users.
`performance/benchmark.py` does the timing. `unheard plan --cost --speed-from` reads the output of `--json`.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from unheard.cli.options import AsJson

EXAMPLES = """Examples:

  unheard benchmark

  unheard benchmark --json > speed.json

  unheard benchmark --device cpu --users 4 --engine stacked --engine vectorised

  unheard benchmark --rounds 100 --rounds 1250 --short 5000 --runs 16

  unheard benchmark --short 1000 --noise exact_gaussian --rounds 0 --users 1
"""

USERS_OF_RUNS = 100
"""Users per round where several runs are timed side by side."""
SHORT_TEXT = 80
"""Tokens of a user with a short text: one local step."""


def benchmark(
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="An engine to time. May be repeated.",
            click_type=click.Choice(["stacked", "vectorised", "reference"]),
            show_default="stacked, vectorised",
        ),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="A precision to time. May be repeated.",
            click_type=click.Choice(["float32", "bfloat16"]),
            show_default="both on a GPU, float32 on a CPU",
        ),
    ] = None,
    users: Annotated[
        list[int] | None,
        typer.Option(
            help="The number of users that the engine gets at a time. May be repeated.",
            min=1,
            metavar="N",
            show_default="100 and 1024 on a GPU, 4 on a CPU",
        ),
    ] = None,
    rounds: Annotated[
        list[int] | None,
        typer.Option(
            help="Also time whole rounds of so many users; 0 for none. May be repeated.",
            min=0,
            metavar="N",
            show_default="100 and 1250 on a GPU, 4 on a CPU",
        ),
    ] = None,
    short: Annotated[
        list[int] | None,
        typer.Option(
            help="Also time whole rounds of so many users of 80 tokens (one local step); 0 for none. May be repeated.",
            min=0,
            metavar="N",
            show_default="1000 and 5000 on a GPU, none on a CPU",
        ),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(
            help="Also time so many runs of 100 users per round side by side, with evaluations; 0 for none.",
            min=0,
            metavar="N",
            show_default="16 on a GPU, none on a CPU",
        ),
    ] = None,
    noise: Annotated[
        str,
        typer.Option(
            help="The noise of whole rounds, with z = 1.",
            click_type=click.Choice(["gaussian", "exact_gaussian", "none"]),
        ),
    ] = "gaussian",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...", metavar="DEVICE")] = "auto",
    model: Annotated[
        Path | None,
        typer.Option(help="A run file whose model to time.", metavar="RUN.toml", show_default="the paper's model"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time user updates and whole rounds on this machine.

    Reports users and tokens per second, memory, and the shares of the limits of the machine.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from unheard.cli.display import notes
    from unheard.cli.processes import let_unwind
    from unheard.engines.choice import EngineChoice
    from unheard.mechanism.noise import ExactGaussianNoise, GaussianNoise, NoNoise
    from unheard.models.recurrent import TiedLSTM
    from unheard.performance import benchmark as speed
    from unheard.training.run_file import read_run_file

    noises = {
        "gaussian": GaussianNoise(noise_multiplier=1.0),
        "exact_gaussian": ExactGaussianNoise(noise_multiplier=1.0),
        "none": NoNoise(),
    }
    let_unwind()  # its store is a temporary folder, to be deleted
    timed = read_run_file(model)[0].model if model else TiedLSTM()
    timed = timed.pinned(10_000)  # the paper's vocabulary, if the run file leaves its size to a store
    choice = EngineChoice(device=device)
    torch_device = choice.torch_device()
    on_gpu = torch_device.type == "cuda"
    precisions = precision or (["bfloat16", "float32"] if on_gpu else ["float32"])
    sizes = users or ([100, 1024] if on_gpu else [4])
    runs = (16 if on_gpu else 0) if runs is None else runs
    # users per round, tokens per user, runs at the same time
    settings = [(n, 1600, 1) for n in rounds or ([100, 1250] if on_gpu else [4]) if n]
    settings += [(n, SHORT_TEXT, 1) for n in short or ([1000, 5000] if on_gpu else []) if n]
    settings += [(USERS_OF_RUNS, 1600, runs)] if runs else []
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=notes) as bar:
        task = bar.add_task("the machine's own limits", total=None)
        limits = speed.machine(torch_device)
        result: dict[str, Any] = {"machine": limits.__dict__, "parameters": timed.layout.total}
        result |= {"updates": [], "rounds": []}

        def show(what: str, row: dict[str, Any]) -> None:
            # Printed at once, so that a benchmark that is stopped still has shown something.
            bar.console.print(f"{what}: {row['users_per_second']:,.1f} users/s", highlight=False)

        for each in speed.choices(choice, engine or ["stacked", "vectorised"], precisions):
            for size in sizes:
                what = f"{each.kind}, {each.precision}, {size} users at a time"
                bar.update(task, description=what)
                row = speed.user_updates(timed, each, size)
                show(what, row)
                for name, limit in speed.limits(timed, limits, row["bytes_per_number"]).items():
                    row[f"share_of_{name}_limit"] = row["users_per_second"] / limit
                result["updates"].append(row)
        for size, tokens, side_by_side in settings:
            what = f"whole rounds of {size} users of {tokens} tokens, {side_by_side} run(s)"
            bar.update(task, description=what)
            few_seconds = (20 if side_by_side > 1 else max(4, 16_000_000 // tokens // size)) if on_gpu else 4
            row = speed.whole_rounds(
                timed, choice, size, tokens=tokens, runs=side_by_side, rounds=few_seconds, noise=noises[noise],
                is_evaluated=side_by_side > 1,
            )  # fmt: skip
            result["rounds"].append(row)
            show(what, row)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        _print_result(result)


def _print_result(result: dict[str, Any]) -> None:
    from rich.table import Table

    from unheard.cli.display import console

    machine = result["machine"]
    console.print(
        f"{machine['device']}: {machine['bytes_per_second'] / 1e9:,.0f} GB/s through memory, "
        f"{machine['float32_per_second'] / 1e12:.2f} float32 and {machine['bfloat16_per_second'] / 1e12:.2f} bfloat16 TFLOP/s.",
        highlight=False,
    )
    updates = Table(title="User updates (1,600 tokens, 20 local steps, clipped after each)", title_justify="left")
    limits = ("of memory limit", "of arithmetic limit")
    for name in ("engine", "precision", "users at a time", "users/s", "tokens/s", *limits, "peak memory"):
        updates.add_column(name, justify="left" if name in ("engine", "precision") else "right")
    for row in result["updates"]:
        updates.add_row(
            row["engine"], row["precision"], f"{row['users']:,}", f"{row['users_per_second']:,.1f}",
            f"{row['tokens_per_second']:,.0f}", f"{row['share_of_memory_limit']:.0%}",
            f"{row['share_of_arithmetic_limit']:.0%}", f"{row['peak_memory_bytes'] / 2**30:.2f} GiB",
        )  # fmt: skip
    console.print(updates)
    if result["rounds"]:
        rounds = Table(
            title="Whole rounds: sampling, reading, updates, secure noise, ledger; evaluations with several runs",
            title_justify="left",
        )
        for name in ("users per round", "tokens per user", "runs side by side", "users/s", "rounds/s"):
            rounds.add_column(name, justify="right")
        for row in result["rounds"]:
            speeds = (f"{row['users_per_second']:,.1f}", f"{row['rounds_per_second']:.2f}")
            rounds.add_row(
                f"{row['users_per_round']:,}", f"{row['tokens_per_user']:,}", str(row["runs_at_once"]), *speeds
            )
        console.print(rounds)
