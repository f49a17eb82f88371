"""The `unheard` command: gathers the verbs, turns refusals into one message and exit status 2."""

import io
import sys
from importlib.metadata import version

import typer
from rich.console import Console

from unheard.errors import UnheardError

app = typer.Typer(
    name="unheard",
    help="Train language models on what people write, with a proof that no single person can be heard in the result.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"unheard {version('unheard')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
    ),
) -> None: ...


def _gather_verbs() -> None:
    """Each verb's module imports only Typer at its top, so that `unheard --help` stays quick."""
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

    app.command("demo", epilog=demo.EXAMPLES)(demo.demo)
    app.command("prepare", epilog=prepare.EXAMPLES)(prepare.prepare)
    app.add_typer(corpus.app, name="corpus")
    app.command("init", epilog=init.EXAMPLES)(init.init)
    app.command("train", epilog=train.EXAMPLES)(train.train)
    app.command("resume", epilog=train.RESUME_EXAMPLES)(train.resume)
    app.command("sweep", epilog=sweep.EXAMPLES)(sweep.sweep)
    app.command("tune", epilog=tune.EXAMPLES)(tune.tune)
    app.command("evaluate", epilog=evaluate.EXAMPLES)(evaluate.evaluate)
    app.command("watch", epilog=watch.EXAMPLES)(watch.watch)
    app.command("compare", epilog=compare.EXAMPLES)(compare.compare)
    app.command("report", epilog=report.EXAMPLES)(report.report)
    app.command("predict", epilog=predict.EXAMPLES)(predict.predict)
    app.command("keyboard", epilog=keyboard.EXAMPLES)(keyboard.keyboard)
    app.command("export", epilog=export.EXAMPLES)(export.export)
    app.command("personalize", epilog=personalize.EXAMPLES)(personalize.personalize)
    app.command("plan", epilog=plan.EXAMPLES)(plan.plan)
    app.command("statement", epilog=statement.EXAMPLES)(statement.statement)
    app.command("budget", epilog=budget.EXAMPLES)(budget.budget)
    app.command("verify", epilog=verify.EXAMPLES)(verify.verify)
    app.command("audit", epilog=audit.EXAMPLES)(audit.audit)
    app.command("canaries", epilog=canaries.EXAMPLES)(canaries.canaries)
    app.command("paper", hidden=True)(paper.paper)
    app.command("benchmark", epilog=benchmark.EXAMPLES)(benchmark.benchmark)


_gather_verbs()


def main() -> None:
    """Run the `unheard` command line."""
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Run a command line; an expected error prints its message on stderr and exits with status 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal or log that cannot encode epsilon must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except UnheardError as refusal:
        _refuse(str(refusal))
    except OSError as trouble:
        _refuse(
            f"{trouble.strerror or trouble}: {trouble.filename or '?'}. Check the path, its permissions and the disk."
        )
    except (MemoryError, RuntimeError) as trouble:
        if not isinstance(trouble, MemoryError) and "memory" not in str(trouble):
            raise
        _refuse(f"Not enough memory: {str(trouble)[:200]} Lower engine.users_at_once, the batch or the model.")


def _refuse(message: str) -> None:
    console = Console(stderr=True, soft_wrap=True)
    console.print("unheard: ", style="bold red", end="")
    console.print(message, markup=False, highlight=False)
    sys.exit(2)
