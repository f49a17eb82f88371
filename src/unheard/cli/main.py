"""The `unheard` application: registers the commands, and turns expected errors into one line and exit status 2.

`as_typer_command` turns the option groups of a command into options, and adds two options: `--log-file` to every
command, and `--trust-code` to the commands that may import the class of a model. The log file gets the sentences that
the command prints and the records of the Python logger `unheard`.
"""

import contextlib
import dataclasses
import functools
import inspect
import io
import logging
import math
import os
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import typer
from typer.core import TyperCommand

from unheard.cli import (
    audit,
    benchmark,
    corpus,
    demo,
    deployment,
    evaluate,
    plan,
    prepare,
    report,
    statement,
    train,
    tune,
)
from unheard.cli.options import LogFile, TrustCode
from unheard.cli.processes import delete_staged_folders, ignore_signals, wait_if_stopping
from unheard.config import LARGEST_NUMBER
from unheard.errors import InvalidValue, NoiseWarning, UnheardError

logger = logging.getLogger("unheard.cli")

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


PAPER_MOVED = """The reproduction of the paper is not in the installed package since 0.2.0. Clone the repository and
run, from its root:

  python -m reproduction list

  python -m reproduction run all --corpus corpora/paper --name blogs

  make paper
"""


def _paper() -> None:
    """Print that the former command `unheard paper` is now `python -m reproduction`, and exit with status 2."""
    typer.echo(PAPER_MOVED)
    raise typer.Exit(2)


@app.callback()
def _options(
    show_version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
    ),
) -> None: ...


COMMANDS = {
    "Start": [(demo.demo, demo.EXAMPLES)],
    "Data": [(prepare.base, prepare.BASE_EXAMPLES), (prepare.prepare, prepare.PREPARE_EXAMPLES)],
    "Training": [
        (train.init, train.INIT_EXAMPLES),
        (train.train, train.TRAIN_EXAMPLES),
        (train.resume, train.RESUME_EXAMPLES),
        (report.watch, report.WATCH_EXAMPLES),
        (train.sweep, train.SWEEP_EXAMPLES),
        (tune.tune, tune.EXAMPLES),
        (benchmark.benchmark, benchmark.EXAMPLES),
    ],
    "Results": [
        (evaluate.evaluate, evaluate.EXAMPLES),
        (report.compare, report.COMPARE_EXAMPLES),
        (report.report, report.REPORT_EXAMPLES),
        (deployment.card, deployment.CARD_EXAMPLES),
    ],
    "Use": [
        (deployment.predict, deployment.PREDICT_EXAMPLES),
        (deployment.keyboard, deployment.KEYBOARD_EXAMPLES),
        (deployment.export, deployment.EXPORT_EXAMPLES),
        (deployment.personalize, deployment.PERSONALIZE_EXAMPLES),
    ],
    "Privacy": [
        (plan.plan, plan.EXAMPLES),
        (statement.statement, statement.STATEMENT_EXAMPLES),
        (statement.budget, statement.BUDGET_EXAMPLES),
        (statement.verify, statement.VERIFY_EXAMPLES),
        (audit.audit, audit.AUDIT_EXAMPLES),
        (audit.canaries, audit.CANARIES_EXAMPLES),
    ],
}
"""Every command with the examples that end its help, by the panel of `unheard --help` that lists it."""

USES_MODELS = {
    *("train", "resume", "sweep", "tune", "benchmark", "evaluate", "compare", "report"),
    *("predict", "keyboard", "export", "personalize", "audit"),
}
"""The commands that may import the class of a model. `verify` never does."""


class CheckedCommand(TyperCommand):
    """A command that refuses arguments that are not UTF-8, and numbers that are not finite or above `LARGEST_NUMBER`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line.

        Raises:
            InvalidValue: An argument is not UTF-8 text, so it could be neither encoded nor written to a file.
            click.BadParameter: A number is not finite or too large.
        """
        for text in args:
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise InvalidValue(f"The argument {text!r} is not UTF-8 text. Type it in UTF-8, or rename that file.")
        rest = super().parse_args(ctx, args)
        for param in self.params:
            value = ctx.params.get(param.name or "")
            for number in value if isinstance(value, list | tuple) else [value]:
                if isinstance(number, float | int) and not (math.isfinite(number) and abs(number) <= LARGEST_NUMBER):
                    raise click.BadParameter(f"{number} is not a number up to {LARGEST_NUMBER:g}.", ctx, param)
        return rest


@contextlib.contextmanager
def log_to(path: Path | None) -> Iterator[None]:
    """While the block runs, append the records of all `unheard` loggers and Python's warnings to a file.

    Args:
        path: The file; None for no log.

    Raises:
        InvalidValue: The file cannot be written.
    """
    if path is None or int(os.environ.get("RANK") or 0) > 0:  # the leader writes the log of all ranks
        yield
        return
    try:
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise InvalidValue(f"Cannot write --log-file {path}: {error.strerror}. Make its folder first.") from None
    # DP: no times. The duration of a round depends on how much text its users have.
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger("unheard"), logging.getLogger("py.warnings")]
    levels = [log.level for log in loggers]
    logging.captureWarnings(True)
    for log in loggers:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        logger.info("unheard %s: %s", version("unheard"), " ".join(sys.argv[1:]))
        yield
        logger.info("done")
    except BaseException as error:
        logger.error("ended by %s: %s", type(error).__name__, error)
        raise
    finally:
        logging.captureWarnings(False)
        for log, level in zip(loggers, levels, strict=True):
            log.removeHandler(handler)
            log.setLevel(level)
        handler.close()


class ShowWarnings(logging.Handler):
    """Prints the warnings of the logger `unheard` on standard error.

    Records of its child loggers (`unheard.training` and others) are not printed, because the commands print the same
    facts in their own words.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.addFilter(lambda record: record.name == "unheard")

    def emit(self, record: logging.LogRecord) -> None:
        """Print one warning. Only the leader prints; other ranks would repeat it."""
        if int(os.environ.get("RANK") or 0) == 0:
            from unheard.cli.display import notes

            notes.print(record.getMessage(), style="bold yellow", markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def show_warnings() -> Iterator[None]:
    """Print the library's warnings on standard error while the block runs."""
    handler = ShowWarnings()
    logging.getLogger("unheard").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("unheard").removeHandler(handler)


def as_typer_command(function: Callable[..., None], *, uses_models: bool = False) -> Callable[..., None]:
    """Return a function whose signature Typer can read, and which calls the command.

    An option group is a dataclass of `cli/options.py` or of the command's module. Each parameter that is a group
    becomes one option per field; when the command runs, it receives the group again. The new function also has the
    option `--log-file`.

    Args:
        function: The command.
        uses_models: Whether the command may import the class of a model; if so, `--trust-code` is added.
    """
    groups: dict[str, Any] = {}
    annotations: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if not dataclasses.is_dataclass(parameter.annotation):
            annotations[name], defaults[name] = parameter.annotation, parameter.default
            continue
        groups[name] = parameter.annotation
        annotations |= typing.get_type_hints(groups[name], include_extras=True)
        for field in dataclasses.fields(groups[name]):
            is_required = field.default is dataclasses.MISSING
            defaults[field.name] = inspect.Parameter.empty if is_required else field.default
    annotations["log_file"], defaults["log_file"] = LogFile, None
    if uses_models:
        annotations["trust_code"], defaults["trust_code"] = TrustCode, False

    @functools.wraps(function)
    def command(*, log_file: Path | None = None, trust_code: bool = False, **values: Any) -> None:
        """Build the option groups, open the log file, and run the command."""
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        with show_warnings(), log_to(log_file), _trusting(trust_code), warnings.catch_warnings():
            warnings.simplefilter("ignore", NoiseWarning)  # commands print sigma and this warning themselves
            function(**values)

    command.__annotations__ = annotations
    command.__signature__ = inspect.Signature(  # pyright: ignore[reportAttributeAccessIssue]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
            for name, annotation in annotations.items()
        ]
    )
    return command


@contextlib.contextmanager
def _trusting(trust_code: bool) -> Iterator[None]:
    """While the block runs, allow run files to name a module class in the working folder, if `trust_code` is True."""
    if not trust_code:
        yield
        return
    from unheard.models.module import trusted_code

    with trusted_code():
        yield


for _panel, _commands in COMMANDS.items():
    for _function, _examples in _commands:
        _command = as_typer_command(_function, uses_models=_function.__name__ in USES_MODELS)
        app.command(epilog=_examples, rich_help_panel=_panel)(_command)
for _info in corpus.app.registered_commands:
    assert _info.callback is not None
    _info.callback = as_typer_command(_info.callback)
app.add_typer(corpus.app, name="corpus", rich_help_panel="Data")
app.command("paper", hidden=True)(_paper)
for _info in (*app.registered_commands, *corpus.app.registered_commands):
    _info.cls = CheckedCommand


def main() -> None:
    """Run the `unheard` command line."""
    # Commands print warnings themselves. If another library configures the root logger, it would print them again.
    logging.getLogger("unheard").propagate = False
    try:
        run_app(app)
    finally:
        logging.getLogger("unheard").propagate = True


def run_app(app: typer.Typer) -> None:
    """Run a command line. Expected errors print their message on standard error and exit with status 2.

    Expected are `UnheardError`, errors of the operating system, and a lack of memory. Other errors are bugs and keep
    their traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # otherwise a terminal that cannot encode ε would end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            wait_if_stopping()
            ignore_signals()
            delete_staged_folders()  # a full disk, for example, leaves the hidden folder of a run that does not exist yet
    except UnheardError as error:
        _exit_with(str(error))
    except OSError as error:
        _exit_with(f"{error.strerror or error}: {error.filename or '?'}. Check the path, its permissions and the disk.")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        _exit_with(f"Not enough memory: {str(error)[:200]} Lower engine.users_at_once, the batch or the model.")


def _exit_with(message: str) -> None:
    """Print an error and exit with status 2."""
    from unheard.cli.display import safe_console

    console = safe_console(stderr=True, soft_wrap=True)
    console.print("unheard: ", style="bold red", end="")
    console.print(message, markup=False, highlight=False)
    sys.exit(2)
