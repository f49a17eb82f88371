"""Options and arguments that several commands share, each defined once with its help text.

A command uses a single option as an annotation. Options that belong together form an option group, a frozen dataclass
with one field for each option. A command that has a parameter of such a class has all options of the group:

    def train(run_file: RunFile, *, out: ..., engine: EngineOptions, processes: ProcessOptions, yes: Yes = False): ...

`main.as_typer_command` turns groups into options. A group of one command is defined in the module of the command.

For an option whose default is None, `otherwise` says in words what the command does without the option. An option with
a fixed set of words is a `Literal`: Typer shows the words and rejects all others. The names of engines and accountants
are also in registries (`engines/choice.py`, `privacy/accountants.py`); a test checks that the lists agree.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import typer

MACHINE = "Machine"
"""The help panel for options that say where and how fast a command runs. They do not change the result."""


def option(help: str, *names: str, otherwise: str | None = None, panel: str | None = None, **settings: Any) -> Any:
    """Return a Typer option.

    Args:
        help: What the option does, in a sentence.
        names: The names of the option; by default Typer derives the name from the parameter.
        otherwise: What the command does without the option, in words; for options whose default is None.
        panel: The panel of the help page that lists the option.
        settings: Further arguments of `typer.Option`.
    """
    if otherwise is not None:
        settings["show_default"] = otherwise
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


number = functools.partial(option, metavar="N")
"""Return a Typer option that takes a number: `option` with the metavar N."""
_machine = functools.partial(option, panel=MACHINE)

RunFile = Annotated[Path, typer.Argument(help="A run file; `unheard init` writes one.", metavar="RUN.toml")]
RunDir = Annotated[Path, typer.Argument(help="A run folder.", metavar="DIR")]
RunDirs = Annotated[list[Path], typer.Argument(help="Run folders.", metavar="DIR...")]
StoreDir = Annotated[Path, typer.Argument(help="A token store, made by `unheard prepare`.", metavar="DIR")]

SetKeys = Annotated[
    list[str] | None,
    option(
        "Change one key of the run file: table.key=value. May be repeated.",
        "--set",
        otherwise="as in the run file",
        metavar="KEY=VALUE",
    ),
]
Corpus = Annotated[Path | None, option("The present path of the run's store.", otherwise="the path in the run file")]
AsJson = Annotated[bool, option("Print one JSON object on standard output.", "--json")]
StopAfter = Annotated[
    float | None,
    option(
        "Stop after this many seconds, at the end of a round. Everything is saved. The number of rounds then depends "
        "on their duration, and so on the users' text, which the guarantee does not cover: before you publish the "
        "model, resume until the last round of the run file.",
        min=0,
        metavar="SECONDS",
        otherwise="no limit",
    ),
]

NewNoise = Annotated[
    bool,
    option("Correlated noise whose keys are lost: begin a new mechanism, charged from its first round.", "--new-noise"),
]
Yes = Annotated[
    bool,
    option(
        "Do not ask before a run without noise, which makes the epsilon of its users infinite permanently. Use this "
        "for public text, or for users who agreed.",
        "--yes",
    ),
]
Track = Annotated[
    list[str] | None,
    _machine(
        "A tracker that gets the evaluations. May be repeated. wandb sends them to Weights & Biases when the command "
        "ends.",
        click_type=click.Choice(["tensorboard", "mlflow", "wandb"]),
        otherwise="tensorboard",
    ),
]
LogFile = Annotated[
    Path | None,
    _machine(
        "Append a log of what the command does to this file. It holds no times: they depend on the users' text.",
        metavar="FILE",
        otherwise="no log",
    ),
]
TrustCode = Annotated[
    bool,
    option(
        "Allow the run file to name a module class in the working folder. Importing it executes its file: use "
        "this only for code that you trust.",
        "--trust-code",
    ),
]

EngineName = Annotated[
    Literal["auto", "stacked", "vectorised", "reference"] | None,
    _machine(
        "The engine that computes the updates. It does not change the guarantee; results agree up to rounding.",
        otherwise="as in the run file",
    ),
]
Device = Annotated[
    str | None, _machine("auto, cpu, cuda, cuda:1, ...", metavar="DEVICE", otherwise="as in the run file")
]
Processes = Annotated[
    int,
    _machine(
        "Processes on this machine that share the work. They do not change the result.", min=1, max=1024, metavar="N"
    ),
]
MaxRestarts = Annotated[
    int, _machine("With --processes: how often to restart and continue after a process has died.", min=0, metavar="N")
]
RankTimeout = Annotated[
    float | None,
    _machine(
        "With several processes: seconds that one waits for another before the command ends with an error.",
        min=0.001,
        metavar="SECONDS",
        otherwise="600",
    ),
]
On = Annotated[
    Literal["here", "flower"],
    _machine(
        "Where the updates are computed: in this process, or on simulated Flower nodes on this machine, which divide "
        "the users of the store among themselves. With the same reproducible_seed the model is the same to the bit."
    ),
]
Supernodes = Annotated[int, _machine("With --on flower: how many nodes.", min=1, max=100_000, metavar="N")]
SecureAggregation = Annotated[
    bool,
    _machine(
        "With --on flower: the nodes mask their updates, and the server sees only the sum "
        "(engine.secure_aggregation in the run file).",
        "--secure-aggregation",
    ),
]
Workers = Annotated[int, _machine("Processes that share the work; 0 for one on each core.", min=0, metavar="N")]

Baseline = Annotated[
    str | None,
    option("The run whose accuracy the others are compared with.", otherwise="the first run without privacy"),
]
Prompts = Annotated[
    list[str] | None,
    option(
        "Words to continue. May be repeated.",
        "--prompt",
        otherwise="a few in English; none for another language",
    ),
]
AsIfUsers = Annotated[
    int | None,
    number("Also show the hypothetical ε of the same run on a population of N users.", min=2, otherwise="none"),
]
AsIfUsersPerRound = Annotated[
    float | None,
    number(
        "With --as-if-users: N users per round, with the same noise on the average.", min=1, otherwise="as in the run"
    ),
]
Force = Annotated[bool, option("Overwrite what an earlier command wrote there.", "--force")]
License = Annotated[
    str | None,
    option("The licence of the model, as the Hugging Face hub names it.", metavar="NAME", otherwise="not named"),
]
MEASURES_SAVED = "Measures of runs that were finished are kept in the run folders."
"""A sentence for the message of a command that is interrupted while it measures runs."""
NoMeasure = Annotated[
    bool, option("Do not measure runs that have no full measures yet; show what there is.", "--no-measure")
]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine and the device that compute the updates of a cohort. They do not change the result."""

    engine: EngineName = None
    device: Device = None


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """The processes that share the work of a command (`processes.run_on_processes`)."""

    processes: Processes = 1
    max_restarts: MaxRestarts = 0
    rank_timeout: RankTimeout = None


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Whether the updates are computed in this process or on nodes of Flower's simulation."""

    on: On = "here"
    supernodes: Supernodes = 10


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """How `report` and `compare` show runs."""

    baseline: Baseline = None
    prompt: Prompts = None
    as_if_users: AsIfUsers = None
    as_if_users_per_round: AsIfUsersPerRound = None
    no_measure: NoMeasure = False
    force: Force = False
