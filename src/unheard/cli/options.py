"""Options and arguments that several commands share, each defined once with its help text.

A command uses a single option as an annotation. Options that belong together form an option group, a frozen dataclass
with one field for each option. A command that has a parameter of such a class has all options of the group:

    def train(run_file: RunFile, *, out: ..., engine: EngineOptions, processes: ProcessOptions, yes: Yes = False): ...

`main.as_typer_command` turns groups into options. A group of one command is defined in the module of the command.

Where the default is None, `show_default` says in words what the command does then. An option with a fixed set of words
is a `Literal`: Typer shows the words and rejects any other. Engines and accountants are also names in a registry
(`engines/choice.py`, `privacy/accountants.py`); a test compares both lists.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click
import typer

MACHINE = "Machine"
"""The help panel of options that decide where a command runs, and not what it computes."""

RunFile = Annotated[Path, typer.Argument(help="A run file; `unheard init` writes one.", metavar="RUN.toml")]
RunDir = Annotated[Path, typer.Argument(help="A run folder.", metavar="DIR")]
RunDirs = Annotated[list[Path], typer.Argument(help="Run folders.", metavar="DIR...")]
StoreDir = Annotated[Path, typer.Argument(help="A token store, made by `unheard prepare`.", metavar="DIR")]

SetKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Change one key of the run file: table.key=value. May be repeated.",
        show_default="as in the run file",
        metavar="KEY=VALUE",
    ),
]
Corpus = Annotated[
    Path | None, typer.Option(help="Where the run's store is now.", show_default="the path in the run file")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
StopAfter = Annotated[
    float | None,
    typer.Option(
        help="Stop after this many seconds, at the end of a round. Everything is saved. The number of rounds then follows "
        "from their duration, and so from the users' text, which the guarantee does not cover: for a model that is "
        "published, resume until the last round of the run file.",
        min=0,
        metavar="SECONDS",
        show_default="no limit",
    ),
]

Yes = Annotated[
    bool,
    typer.Option(
        "--yes",
        help="Allow a run without noise, which makes the epsilon of its users infinite permanently, without asking. Right for "
        "public text, or for users who agreed.",
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        click_type=click.Choice(["tensorboard", "mlflow", "wandb"]),
        help="Where to copy the evaluations to. May be repeated. wandb sends them to Weights & Biases when the command ends.",
        show_default="tensorboard",
        rich_help_panel=MACHINE,
    ),
]
LogFile = Annotated[
    Path | None,
    typer.Option(
        help="Append a log of what the command does to this file. It holds no times: they depend on the users' text.",
        metavar="FILE",
        show_default="no log",
        rich_help_panel=MACHINE,
    ),
]
TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        help="Allow the run file to name a module class in the working folder. Importing it executes its file: use "
        "this only for code that you trust.",
    ),
]

EngineName = Annotated[
    Literal["auto", "stacked", "vectorised", "reference"] | None,
    typer.Option(
        help="What computes the updates of a cohort. The result does not depend on it.",
        show_default="as in the run file",
        rich_help_panel=MACHINE,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="auto, cpu, cuda, cuda:1, ...",
        metavar="DEVICE",
        show_default="as in the run file",
        rich_help_panel=MACHINE,
    ),
]
Processes = Annotated[
    int,
    typer.Option(
        help="Processes on this machine that share the work. The result does not depend on it.",
        min=1,
        max=1024,
        metavar="N",
        rich_help_panel=MACHINE,
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        help="With --processes: how often to restart and continue after a process has died.",
        min=0,
        metavar="N",
        rich_help_panel=MACHINE,
    ),
]
RankTimeout = Annotated[
    float | None,
    typer.Option(
        help="With several processes: seconds to wait for each other before the late process is named.",
        min=0.001,
        metavar="SECONDS",
        show_default="600",
        rich_help_panel=MACHINE,
    ),
]
On = Annotated[
    Literal["here", "flower"],
    typer.Option(
        help="Where the updates are computed: here, or on the nodes of Flower's simulation on this machine, which divide "
        "the users of the store among them. The model is the same to the bit.",
        rich_help_panel=MACHINE,
    ),
]
Supernodes = Annotated[
    int,
    typer.Option(help="With --on flower: how many nodes.", min=1, max=100_000, metavar="N", rich_help_panel=MACHINE),
]
SecureAggregation = Annotated[
    bool,
    typer.Option(
        "--secure-aggregation",
        help="With --on flower: the nodes mask their updates, and the server sees only the sum "
        "(engine.secure_aggregation in the run file).",
        rich_help_panel=MACHINE,
    ),
]
Workers = Annotated[
    int,
    typer.Option(
        help="Processes that share the work; 0 for one on each core.", min=0, metavar="N", rich_help_panel=MACHINE
    ),
]

Baseline = Annotated[
    str | None,
    typer.Option(
        help="The run whose accuracy the others are compared with.", show_default="the first run without privacy"
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        help="Words to continue. May be repeated.",
        show_default="a few in English, none if the word list is of another language",
    ),
]
AsIfUsers = Annotated[
    int | None,
    typer.Option(
        help="Also show the hypothetical ε of the same run on a population of N users.",
        min=2,
        metavar="N",
        show_default="none",
    ),
]
AsIfUsersPerRound = Annotated[
    float | None,
    typer.Option(
        help="With --as-if-users: N users per round, with the same noise on the average.",
        min=1,
        metavar="N",
        show_default="as in the run",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what an earlier command wrote there.")]
License = Annotated[
    str | None,
    typer.Option(
        help="The licence of the model, as the Hugging Face hub names it.", metavar="NAME", show_default="not named"
    ),
]
MEASURES_SAVED = "Measures of runs that were finished are kept in the run folders."
"""Part of what a command prints that was interrupted while it measured runs."""
NoMeasure = Annotated[
    bool,
    typer.Option("--no-measure", help="Do not measure runs that have no full measures yet; show what there is."),
]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What computes the updates of a cohort. The result does not depend on it."""

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
