"""`unheard benchmark`: time training on this machine, and compare the speed with the machine's limits.

The command measures two things on synthetic users: user updates alone, for each engine, precision and number of users
at a time; and whole rounds (sampling, reading, updates, noise, ledger), with long and short texts, for one run and for
several. `performance/benchmark.py` does the timing. `unheard plan --cost --speed-from` reads the output of `--json`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from unheard.cli.display import console, notes
from unheard.cli.options import AsJson, number, option
from unheard.cli.processes import let_unwind

if TYPE_CHECKING:
    from unheard.engines.choice import EngineChoice
    from unheard.models.model import LanguageModel

EXAMPLES = """Examples:

  unheard benchmark

  unheard benchmark --json > speed.json

  unheard benchmark --device cpu --users 4 --engine stacked --engine vectorised

  unheard benchmark --rounds 100 --rounds 1250 --short 5000 --runs 16

  unheard benchmark --short 1000 --noise none --rounds 0 --users 1
"""


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """What to measure; the values become a `performance.benchmark.Settings`."""

    engine: Annotated[
        list[str] | None,
        option(
            "An engine to time. May be repeated.",
            click_type=click.Choice(["stacked", "vectorised", "reference"]),
            otherwise="stacked, vectorised",
        ),
    ] = None
    precision: Annotated[
        list[str] | None,
        option(
            "A precision to time. May be repeated.",
            click_type=click.Choice(["float32", "bfloat16"]),
            otherwise="both on a GPU, float32 on a CPU",
        ),
    ] = None
    users: Annotated[
        list[int] | None,
        number(
            "The number of users that the engine gets at a time. May be repeated.",
            min=1,
            otherwise="100 and 1024 on a GPU, 4 on a CPU",
        ),
    ] = None
    rounds: Annotated[
        list[int] | None,
        number(
            "Also time whole rounds of N users; 0 for none. May be repeated.",
            min=0,
            otherwise="100 and 1250 on a GPU, 4 on a CPU",
        ),
    ] = None
    short: Annotated[
        list[int] | None,
        number(
            "Also time whole rounds of N users of 80 tokens (one local step); 0 for none. May be repeated.",
            min=0,
            otherwise="1000 and 5000 on a GPU, none on a CPU",
        ),
    ] = None
    runs: Annotated[
        int | None,
        number(
            "Also time N runs of 100 users per round side by side, with evaluations; 0 for none.",
            min=0,
            otherwise="16 on a GPU, none on a CPU",
        ),
    ] = None
    noise: Annotated[
        str,
        option("The noise of whole rounds, with z = 1.", click_type=click.Choice(["gaussian", "none"])),
    ] = "gaussian"


def benchmark(
    *,
    options: BenchmarkOptions,
    device: Annotated[str, option("auto, cpu, cuda, cuda:1, ...", metavar="DEVICE")] = "auto",
    model: Annotated[
        Path | None, option("A run file whose model to time.", metavar="RUN.toml", otherwise="the paper's model")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time user updates and whole rounds on this machine.

    Prints users and tokens per second, peak memory, and the fractions of the machine's memory and arithmetic limits.
    """
    from unheard.engines.choice import EngineChoice
    from unheard.models.recurrent import TiedLSTM
    from unheard.training.run import read_run_file

    let_unwind()  # so that an interrupt deletes the temporary folder with the synthetic store
    timed = read_run_file(model)[0].model if model else TiedLSTM()
    timed = timed.pinned(10_000)  # the size of the paper's vocabulary, if the run file does not set one
    result = _measure(timed, EngineChoice(device=device), options)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        _print_result(result)


def _measure(model: "LanguageModel", choice: "EngineChoice", options: BenchmarkOptions) -> dict[str, Any]:
    """Run the benchmark, print each speed on standard error as soon as it is known, and return all results."""
    from unheard.mechanism.noise import GaussianNoise, NoNoise
    from unheard.performance.benchmark import Settings, run_benchmark

    noises = {
        "gaussian": GaussianNoise(noise_multiplier=1.0),
        "none": NoNoise(),
    }
    settings = Settings(
        engines=options.engine or ("stacked", "vectorised"),
        precisions=options.precision,
        users=options.users,
        rounds=options.rounds,
        short=options.short,
        runs=options.runs,
        noise=noises[options.noise],
    )
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=notes) as bar:
        task = bar.add_task("", total=None)
        return run_benchmark(
            model,
            choice,
            settings,
            begin=lambda title: bar.update(task, description=title),
            report=lambda title, row: bar.console.print(
                f"{title}: {row['users_per_second']:,.1f} users/s", highlight=False
            ),
        )


def _print_result(result: dict[str, Any]) -> None:
    """Print the limits of the machine, a table of user updates, and a table of whole rounds if any were timed."""
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
