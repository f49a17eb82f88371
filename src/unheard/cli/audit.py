"""`unheard audit`: what a run gave away, by planted secrets and by canary users."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unheard.cli.processes import Processes, lead

if TYPE_CHECKING:
    from unheard.audit.exposure import Exposure
    from unheard.audit.one_run import OneRunAudit
    from unheard.engines.distributed.process_group import Ranks
    from unheard.engines.engine import Engine
    from unheard.training.run import Run

EXAMPLES = """Examples:

  unheard audit runs/first

  unheard audit runs/first --canaries 2000 --rounds 200 --json

  unheard audit runs/first --skip-one-run    (only: was a planted secret learned by heart?)

  unheard audit runs/first --with-users --processes 8
"""


def audit(
    folder: Annotated[Path, typer.Argument(help="A run folder.", metavar="DIR")],
    out: Annotated[Path | None, typer.Option(help="Where audit.json and scores.svg go (DIR/audit).")] = None,
    corpus: Annotated[Path | None, typer.Option(help="Where the run's store lies now.")] = None,
    canaries: Annotated[
        int | None,
        typer.Option(
            help="Canary users of the one-run audit; default: 4000, or as many as the model can tell apart.", min=2
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of the one-run audit; default: the run's.", min=1)] = None,
    candidates: Annotated[int, typer.Option(help="Random phrases to rank planted secrets among.", min=100)] = 10_000,
    with_users: Annotated[
        bool,
        typer.Option("--with-users", help="Put the canary users among the store's people. They are charged for it."),
    ] = False,
    skip_one_run: Annotated[bool, typer.Option("--skip-one-run", help="Only rank planted secrets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    processes: Processes = 1,
) -> None:
    """Attack a run as an auditor would: are planted secrets learned by heart, and is a lower bound on epsilon above the claim?

    Exit status 2 if the claim is refuted."""

    def work(ranks: "Ranks | None") -> None:
        _audit(folder, out, corpus, canaries, rounds, candidates, with_users, skip_one_run, as_json, ranks)

    lead(work, processes)


def _audit(
    folder: Path,
    out: Path | None,
    corpus: Path | None,
    canaries: int | None,
    rounds: int | None,
    candidates: int,
    with_users: bool,
    skip_one_run: bool,
    as_json: bool,
    ranks: "Ranks | None",
) -> None:
    import json

    from unheard.audit.summary import as_data, score_plot
    from unheard.cli.display import notes, say
    from unheard.engines.choice import EngineChoice
    from unheard.run_folder import replace_file
    from unheard.training.released import Released
    from unheard.training.worker import build_engine

    released = Released.open(folder)
    store = Path(corpus or released.run.corpus)
    place = out or folder / "audit"
    place.mkdir(parents=True, exist_ok=True)  # before anybody is charged for a result that could not be written
    engine = build_engine(EngineChoice(), released.run.model, ranks)
    found = _exposures(released, store, candidates, engine)
    one = None if skip_one_run else _one_run(released.run, store, folder.name, canaries, rounds, with_users, engine)
    told = as_data(found, one)
    replace_file(place / "audit.json", json.dumps(told, indent=2, allow_nan=False).encode())
    if one is not None:
        replace_file(place / "scores.svg", score_plot(one, folder.name).encode())
    if as_json:
        print(json.dumps(told, allow_nan=False))
    else:
        for sentence in told["verdict"]:
            say(sentence)
        if found is None:
            is_part = (store / "part.json").is_file()  # who carries canaries is known with the whole store alone
            why = "is a part: --corpus takes the whole store" if is_part else "has none: `unheard canaries --help`"
            notes.print(f"No planted secrets were ranked. {store} {why}.", markup=False)
        say(f"Written to {place}")
    if not told["holds"]:
        raise typer.Exit(2)


def _exposures(released, store: Path, candidates: int, engine: "Engine") -> "list[Exposure] | None":
    from unheard.audit.exposure import exposures, read_canaries
    from unheard.randomness import secure_generator
    from unheard.training.worker import parallel_map_of

    if not (store / "canaries.json").is_file():
        return None
    planted = read_canaries(store, released.run.model.vocabulary_size)
    found = []
    with _bar("Ranking planted secrets", len(planted)) as advance:
        ranked = exposures(
            released.run.model,
            released.params_P,
            planted,
            secure_generator(),
            candidates=candidates,
            spread=parallel_map_of(engine),
        )
        for one in ranked:
            found.append(one)
            advance(len(found))
    return found


def _one_run(
    run: "Run",
    store: Path,
    name: str,
    canaries: int | None,
    rounds: int | None,
    with_users: bool,
    engine: "Engine",
) -> "OneRunAudit":
    from unheard.audit.canary_users import CanaryUsers
    from unheard.audit.one_run import OneRunAudit, one_run
    from unheard.randomness import SecureStreams

    streams = SecureStreams()
    count = canaries or CanaryUsers.enough(run.model.layout)
    company = None
    if with_users:
        from unheard.audit.background_users import Company
        from unheard.corpus.store import TokenStore
        from unheard.training.initialise import population_ledger_of
        from unheard.training.worker import check_all_users_reachable

        opened = TokenStore.open(store)
        check_all_users_reachable(engine, opened)
        company = Company(run, opened, engine, streams, population_ledger_of(run, opened), name)
    with _bar("One run with canary users", rounds or run.training.rounds) as advance:
        for step in one_run(run, streams, canaries=count, rounds=rounds, company=company):
            if isinstance(step, OneRunAudit):
                return step
            advance(step)
    raise AssertionError("an audit ends with its result")


def _bar(title: str, total: int):
    """A progress bar on stderr, as a function of how much is done."""
    from contextlib import contextmanager

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from unheard.cli.display import notes

    @contextmanager
    def showing():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=notes, refresh_per_second=4) as progress:
            task = progress.add_task(title, total=total)
            yield lambda done: progress.update(task, completed=done)

    return showing()
