"""The `unheard` application: registers the commands, and turns expected errors into one line and exit status 2."""

import io
import sys
from importlib.metadata import version

import typer
from rich.console import Console

from unheard.cli import (
    audit,
    benchmark,
    budget,
    canaries,
    compare,
    corpus,
    demo,
    evaluate,
    export,
    init,
    keyboard,
    paper,
    personalize,
    plan,
    predict,
    prepare,
    report,
    statement,
    sweep,
    train,
    tune,
    verify,
    watch,
)
from unheard.errors import UnheardError

app = typer.Typer(
    name="unheard",
    help="Train language models on user-generated text with user-level differential privacy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"unheard {version('unheard')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
    ),
) -> None: ...


COMMANDS = {
    "Start": [(demo.demo, demo.EXAMPLES)],
    "Data": [(prepare.prepare, prepare.EXAMPLES)],
    "Training": [
        (init.init, init.EXAMPLES),
        (train.train, train.EXAMPLES),
        (train.resume, train.RESUME_EXAMPLES),
        (watch.watch, watch.EXAMPLES),
        (sweep.sweep, sweep.EXAMPLES),
        (tune.tune, tune.EXAMPLES),
        (benchmark.benchmark, benchmark.EXAMPLES),
    ],
    "Results": [
        (evaluate.evaluate, evaluate.EXAMPLES),
        (compare.compare, compare.EXAMPLES),
        (report.report, report.EXAMPLES),
    ],
    "Use": [
        (predict.predict, predict.EXAMPLES),
        (keyboard.keyboard, keyboard.EXAMPLES),
        (export.export, export.EXAMPLES),
        (personalize.personalize, personalize.EXAMPLES),
    ],
    "Privacy": [
        (plan.plan, plan.EXAMPLES),
        (statement.statement, statement.EXAMPLES),
        (budget.budget, budget.EXAMPLES),
        (verify.verify, verify.EXAMPLES),
        (audit.audit, audit.EXAMPLES),
        (canaries.canaries, canaries.EXAMPLES),
    ],
}
"""Every command with the examples that end its help, by the panel of `unheard --help` that lists it."""

for _panel, _commands in COMMANDS.items():
    for _function, _examples in _commands:
        app.command(epilog=_examples, rich_help_panel=_panel)(_function)
app.add_typer(corpus.app, name="corpus", rich_help_panel="Data")
app.command("paper", hidden=True)(paper.paper)


def main() -> None:
    """Runs the `unheard` command line."""
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Runs a command line. An expected error prints its message on standard error and exits with status 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal or log that cannot encode ε must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except UnheardError as error:
        _exit_with(str(error))
    except OSError as error:
        _exit_with(f"{error.strerror or error}: {error.filename or '?'}. Check the path, its permissions and the disk.")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        _exit_with(f"Not enough memory: {str(error)[:200]} Lower engine.users_at_once, the batch or the model.")


def _exit_with(message: str) -> None:
    console = Console(stderr=True, soft_wrap=True)
    console.print("unheard: ", style="bold red", end="")
    console.print(message, markup=False, highlight=False)
    sys.exit(2)
