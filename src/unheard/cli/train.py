"""The commands that train: `init`, `train`, `resume` and `sweep`.

    init    write a commented run file, ready to edit (`training/new_run_file.py` composes it)
    train   train the run that a run file describes (`training/run.py`) into a new run folder (`run_folder.py`)
    resume  continue a run folder from its newest checkpoint, on the same or on another machine
    sweep   train variants of one run file side by side, one run folder for each combination of the `--vary` values

`init` has a default for every value but the population. The author of the run file must declare the population, because
a count from the store would be private.

The engine, the device and the number of processes change neither the model nor the ledger. Training stops cleanly at
the end of a round, after `--stop-after` seconds or at the budget, and on Ctrl-C or SIGTERM. The runs of a sweep are
computed in the same chunks and share nothing else: each has its own model, cohorts, noise and ledger. The same command
continues a sweep that was stopped.
"""

import contextlib
import itertools
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from unheard import storage
from unheard.cli.display import (
    confirm_no_noise,
    console,
    note,
    notes,
    run_stop_message,
    runs_stop_message,
    say,
    set_stop_message,
    show_noise,
    show_rounds,
    show_runs,
    warn_of_delta,
    warn_of_noise,
)
from unheard.cli.options import (
    Corpus,
    EngineOptions,
    Force,
    NewNoise,
    NodeOptions,
    ProcessOptions,
    RunDir,
    RunFile,
    SecureAggregation,
    SetKeys,
    StopAfter,
    Track,
    Yes,
    number,
    option,
)
from unheard.cli.processes import let_unwind, run_on_processes, was_restarted
from unheard.errors import InvalidValue
from unheard.formatting import accountant_title, epsilon_text, small
from unheard.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from unheard.engines.choice import EngineChoice
    from unheard.engines.distributed.process_group import ProcessGroup
    from unheard.federated.server import FederatedEngine
    from unheard.training.loop import RoundReport
    from unheard.training.run import Run

INIT_EXAMPLES = """Examples:

  unheard init --corpus corpora/chat --population 760000

  unheard init private.toml --corpus corpora/chat --population 760000 --users-per-round 5000 --rounds 5000

  unheard init --corpus corpora/chat --population 760000 --users-per-round 5000 --rounds 5000 --epsilon 2

  unheard init --corpus corpora/chat --population 760000 --users-per-round 1000 --rounds 1500 --noise auto --epsilon 2

  unheard init --base base --corpus corpora/posts --population 100000 --users-per-round 500 --rounds 300 --epsilon 4
"""


@dataclass(frozen=True, kw_only=True)
class NewRunOptions:
    """The settings that `unheard init` writes into the run file; all others get their default."""

    corpus: Annotated[Path, option("A token store, made by `unheard prepare`.")] = Path("corpora/chitchat")
    population: Annotated[int, number("The declared number of users, which may be published.", min=2, max=2**40)]
    users_per_round: Annotated[
        float | None, number("Expected users per round.", min=0, otherwise="100, or all users if there are fewer")
    ] = None
    rounds: Annotated[int, number("Rounds to train.", min=1)] = 1000
    noise: Annotated[
        Literal["gaussian", "auto"],
        option("gaussian: independent noise. auto: compare independent and correlated noise at --epsilon, and choose."),
    ] = "gaussian"
    epsilon: Annotated[
        float | None,
        option("The least noise that meets this epsilon after all rounds.", metavar="E", otherwise="none: z = 1"),
    ] = None
    base: Annotated[
        Path | None,
        option(
            "Fine-tune this language model with LoRA: a folder made by `unheard base`.",
            metavar="FOLDER",
            otherwise="the paper's LSTM",
        ),
    ] = None


def init(
    run_file: Annotated[Path, typer.Argument(help="The file to write.", metavar="[RUN.toml]")] = Path("run.toml"),
    *,
    run: NewRunOptions,
    force: Force = False,
) -> None:
    """Write a commented run file with the paper's settings, or for fine-tuning a language model."""
    from unheard.training.new_run_file import new_run_file

    if run_file.exists() and not force:
        raise InvalidValue(f"{run_file} exists. Choose another name, or overwrite it with --force.")
    with notes.status("solving for the noise ...") as status:
        new = new_run_file(
            run_file,
            corpus=run.corpus,
            population=run.population,
            users_per_round=run.users_per_round,
            rounds=run.rounds,
            epsilon=run.epsilon,
            compares_noise=run.noise == "auto",
            base=run.base,
            progress=lambda step: status.update(f"solving for the noise: {step}"),
        )
    try:
        storage.replace_file(run_file, new.text.encode())
    except OSError as error:
        raise InvalidValue(f"Cannot write {run_file}: {error.strerror}.") from None
    for sentence in new.sentences:
        say(sentence)
    if new.noise is not None:
        warn_of_noise(new.noise)
    say(f"Wrote {run_file}. Next: unheard train {run_file} --out runs/my-run")
    if new.has_store:
        warn_of_budget(run_file, run.corpus)
    else:
        say(f"There is no corpus at {run.corpus} yet: make it with `unheard prepare`.")


TRAIN_EXAMPLES = """Examples:

  unheard train run.toml --out runs/first

  unheard train run.toml --out runs/narrow --set clip.norm=10 --set training.rounds=2000

  unheard train run.toml --out runs/night --stop-after 28800    (then: unheard resume runs/night)

  unheard train run.toml --out runs/tracked --track mlflow --log-file train.log

  unheard train run.toml --out runs/wide --processes 8 --max-restarts 3

  unheard train run.toml --out runs/devices --on flower --supernodes 50 --secure-aggregation

  torchrun --nnodes 4 --nproc-per-node 8 --max-restarts 3 ... -m unheard train run.toml --out runs/cluster
"""

RESUME_EXAMPLES = """Examples:

  unheard resume runs/first

  unheard resume runs/first --rounds 5000    (train longer than the run file said)

  unheard resume runs/first --processes 8    (on more cores or GPUs than before: the result is the same)

  unheard resume runs/first --corpus /data/chat    (the run folder or the store was moved)
"""


def train(
    run_file: RunFile,
    *,
    out: Annotated[Path, option("The run folder to create.")],
    set_: SetKeys = None,
    engine: EngineOptions,
    stop_after: StopAfter = None,
    processes: ProcessOptions,
    track: Track = None,
    nodes: NodeOptions,
    secure_aggregation: SecureAggregation = False,
    yes: Yes = False,
) -> None:
    """Train a model with user-level differential privacy, from a run file into a run folder."""
    set_stop_message(lambda: run_stop_message(out))

    def work(ranks: "ProcessGroup | None") -> None:
        """Train the run and print its result; `ranks` are the processes that share the work, or None."""
        from unheard.mechanism.noise import NoNoise
        from unheard.report.tracking import Tracking
        from unheard.training.loop import train as train_run

        Tracking(path=out, kinds=track or ()).check()
        if not was_restarted():
            RunFolder.check_free(out)
        run, choice = read_run(run_file, set_, engine, processes)
        choice = replace(choice, secure_aggregation=True) if secure_aggregation else choice
        allowed = confirm_no_noise([run], yes, can_ask=ranks is None)
        if not isinstance(run.plan.noise, NoNoise):
            warn_of_delta(run.claimed_delta)
            show_noise(run)
        with nodes_of(nodes, run, choice, ranks, secure_aggregation) as on:
            reports = train_run(
                run, out, engine=choice, ranks=ranks, on=on, again=was_restarted(), allow_no_privacy=allowed
            )
            # The rounds run while `show_rounds` reads their reports.
            _print_result(out, show_rounds(reports, out.name, stop_after, folder=out, track=track))

    run_on_processes(work, processes.processes, processes.max_restarts)


def resume(
    folder: RunDir,
    *,
    rounds: Annotated[int | None, number("A new last round.", min=1, otherwise="as in the run file")] = None,
    corpus: Corpus = None,
    new_noise: NewNoise = False,
    engine: EngineOptions,
    stop_after: StopAfter = None,
    processes: ProcessOptions,
    track: Track = None,
    nodes: NodeOptions,
    yes: Yes = False,
) -> None:
    """Continue a run after a stop, a crash or a kill.

    Rounds after the newest checkpoint are computed again and charged again.
    """
    set_stop_message(lambda: run_stop_message(folder))

    def work(ranks: "ProcessGroup | None") -> None:
        """Continue the run and print its result; `ranks` are the processes that share the work, or None."""
        from unheard.report.tracking import Tracking
        from unheard.training.checkpoint import newest_checkpoint
        from unheard.training.loop import resume as resume_run
        from unheard.training.run import read_saved_run

        Tracking(path=folder, kinds=track or ()).check()
        run, choice = read_saved_run(RunFolder.open(folder).run_file)
        allowed = confirm_no_noise([run], yes, can_ask=ranks is None)
        choice = replace(choice, **engine_keys(engine, processes))
        run, last = (run if corpus is None else replace(run, corpus=corpus)), rounds or run.training.rounds
        if nodes.on == "flower" and newest_checkpoint(RunFolder.open(folder)).state.round >= last:
            return _print_result(folder, None)  # the run is complete: do not start the nodes
        confirm_longer(folder, last, yes, can_ask=ranks is None, new_noise=new_noise)
        with nodes_of(nodes, run, choice, ranks) as on:
            reports = resume_run(
                folder,
                rounds=rounds,
                corpus=corpus,
                engine=choice,
                ranks=ranks,
                on=on,
                allow_no_privacy=allowed,
                new_noise=new_noise,
            )
            _print_result(folder, show_rounds(reports, folder.name, stop_after, folder=folder, track=track))

    run_on_processes(work, processes.processes, processes.max_restarts)


def warn_of_budget(run_file: Path, corpus: Path) -> None:
    """Print a warning on standard error if the budget of the store's users ends a run before its last round."""
    from unheard.privacy.population_ledger import FILE, PopulationLedger

    if not (corpus / FILE).is_file() or PopulationLedger.read(corpus / FILE).budget is None:
        return
    from unheard.corpus.store import TokenStore
    from unheard.training.initialise import budget_cautions, pinned, population_ledger_of

    run, _ = read_run(run_file)
    store = TokenStore.open(run.corpus)
    for sentence in budget_cautions(pinned(run), store, population_ledger_of(run, store)):
        note(sentence, style="bold yellow")


def confirm_longer(folder: Path, rounds: int, yes: bool, *, can_ask: bool = True, new_noise: bool = False) -> None:
    """Print how the claim of a run grows if it is trained longer than declared, and ask whether to continue.

    Args:
        folder: The run folder.
        rounds: The number of rounds to train to. Nothing is printed unless it is larger than what the run declared.
        yes: The option `--yes`: print the new claim and do not ask.
        can_ask: False in a process that a launcher started. Without a terminal nothing is asked either.
        new_noise: The option `--new-noise`: correlated noise begins a new mechanism, which is charged too.

    Raises:
        typer.Exit: The answer was no.
    """
    from unheard.privacy.budget import WHY, claim_after, claim_of_run
    from unheard.privacy.ledger import Ledger

    ledger = Ledger.read(RunFolder.open(folder).ledger)
    facts = ledger.facts
    declared, delta = facts.get("declared"), facts.get("delta")
    if not isinstance(declared, dict) or not isinstance(delta, float) or type(declared.get("rounds")) is not int:
        return  # a ledger of an older version, or a damaged one, which `resume` refuses
    reached = max((entry.round + 1 for entry in ledger.entries), default=0)
    if "budget" in declared or rounds <= max(reached, declared["rounds"]):
        return
    with notes.status("computing the new claim ..."):
        now = claim_of_run(facts, ledger.entries, delta)
        then = claim_after(facts, ledger.entries, delta, rounds, new_noise=new_noise)
    if math.isinf(now.epsilon):
        return
    note(
        f"This run declared {declared['rounds']:,} rounds before it began, and claims ε = {epsilon_text(now.epsilon)} at "
        f"δ = {small(delta)}. After {rounds:,} rounds it will claim ε = {epsilon_text(then.epsilon)}, because "
        f"{WHY[then.basis]}.",
        style="bold yellow",
    )
    if can_ask and not yes and sys.stdin.isatty() and notes.is_terminal:
        typer.confirm("Train longer?", default=False, err=True, abort=True)


def read_run(
    run_file: Path,
    set_: "Iterable[str] | None" = None,
    engine: EngineOptions = EngineOptions(),
    processes: ProcessOptions = ProcessOptions(),
) -> "tuple[Run, EngineChoice]":
    """Read a run file and apply the changes of the command line.

    Args:
        run_file: The run file.
        set_: Changes of `--set` or `--vary`, as `table.key=value`.
        engine: `--engine` and `--device`, which replace keys of the table `[engine]`.
        processes: `--rank-timeout` of these options replaces a key of the table `[engine]` too.

    Returns:
        The run, and the choice of the engine that computes it.

    Raises:
        InvalidValue: The file or a change is not valid.
    """
    from unheard.training.run import read_run_file

    changes = [f"engine.{key}={value}" for key, value in engine_keys(engine, processes).items()]
    return read_run_file(run_file, [*(set_ or ()), *changes])


def parse_vary(vary: list[str]) -> list[tuple[str, ...]]:
    """Return every combination of the values of `--vary`. A combination is a tuple of changes to the run file.

    >>> parse_vary(["clip.norm=10,20", "training.rounds=5"])
    [('clip.norm=10', 'training.rounds=5'), ('clip.norm=20', 'training.rounds=5')]

    Raises:
        InvalidValue: An entry is not of the form table.key=value,value or repeats a value.
    """
    changes = []
    for varied in vary:
        key, equals, text = varied.partition("=")
        values = [value.strip() for value in text.split(",") if value.strip()]
        if not (equals and "." in key and values):
            raise InvalidValue(f"--vary {varied}: write table.key=value,value, for example --vary clip.norm=10,15,20.")
        if len(set(values)) < len(values):
            raise InvalidValue(f"--vary {varied} has a value twice; both would be the same run.")
        changes.append([f"{key.strip()}={value}" for value in values])
    return list(itertools.product(*changes))


@contextlib.contextmanager
def nodes_of(
    nodes: NodeOptions,
    run: "Run",
    choice: "EngineChoice",
    ranks: "ProcessGroup | None",
    secure_aggregation: bool = False,
) -> "Iterator[FederatedEngine | None]":
    """With `--on flower`, keep simulated Flower nodes running while the block runs.

    Args:
        nodes: Where the updates are computed, and on how many nodes.
        run: The run to train.
        choice: The engine of each node.
        ranks: The processes of `--processes`; must be None for `--on flower`.
        secure_aggregation: Whether `--secure-aggregation` was given.

    Yields:
        The engine that sends the work to the nodes; None for `--on here`.

    Raises:
        InvalidValue: Flower is not installed, `--processes` is given with `--on flower`, or `--secure-aggregation` is
            given without it.
    """
    if nodes.on == "here":
        if secure_aggregation:
            raise InvalidValue("--secure-aggregation masks what nodes send to a server: give --on flower as well.")
        yield None
        return
    if ranks is not None:
        raise InvalidValue("--on flower divides the work among its own processes: leave out --processes.")
    try:
        from unheard.federated.flower import simulated_nodes
    except ImportError as error:
        raise InvalidValue(f"--on flower needs Flower ({error}): pip install 'unheard[flower]'.") from None
    from unheard.corpus.store import TokenStore
    from unheard.federated.server import FederatedEngine
    from unheard.training.initialise import pinned

    store = TokenStore.open(run.corpus)
    note(f"Starting {nodes.supernodes} simulated nodes: Flower and Ray take some seconds.")
    let_unwind()  # so that an interrupt leaves the block below, which stops Ray's processes
    with simulated_nodes(store.path, nodes.supernodes) as network:
        yield FederatedEngine(network, pinned(run).model, choice, store)


def engine_keys(engine: EngineOptions, processes: ProcessOptions) -> dict[str, Any]:
    """Return the keys of the table `[engine]` that were given on the command line, with their values."""
    keys = {"kind": engine.engine, "device": engine.device, "rank_timeout": processes.rank_timeout}
    return {key: value for key, value in keys.items() if value}


def _print_result(folder: Path, last: "RoundReport | None") -> None:
    """Print the newest accuracy, the running and the claimed epsilon, and which command to use next.

    Args:
        folder: The run folder.
        last: The last report of this call; None if the run was complete before.
    """
    if last is None:
        say(
            f"{folder} is complete: nothing left to do. `unheard resume {folder} --rounds N` trains it longer. Rounds that "
            "were not declared before the run raise its claim; the command prints the new claim before it begins."
        )
        return
    if rows := RunFolder.open(folder).read_metrics():
        row = rows[-1]
        say(
            f"Held-out AccuracyTop1 {100 * row['accuracy_top1']:.2f} % (top 3: {100 * row['accuracy_top3']:.2f} %), "
            f"perplexity {row['perplexity']:.4g}, after round {row['round']}."
        )
    say(
        f"Running bound: ε = {epsilon_text(last.epsilon)} by {accountant_title(last.accountant)} at δ = {small(last.delta)}. "
        "It is fast to compute, so budgets are checked against it; the claim is usually smaller."
    )
    if claim := RunFolder.open(folder).claim():
        say(f"Claimed: {claim}.")
    if last.stopped:
        say(f"Stopped: {last.stopped}")
    elif last.round < last.rounds:
        say(f"Stopped after round {last.round} of {last.rounds}. Continue with: unheard resume {folder}")
    say(f"Run folder: {folder}. What it guarantees: unheard statement {folder}")


SWEEP_EXAMPLES = """Examples:

  unheard sweep run.toml --out runs/clips --vary clip.norm=10,15,20

  unheard sweep run.toml --out runs/seeds --vary training.reproducible_seed=1,2,3 --vary noise.noise_std=0.003,0.012

  unheard sweep run.toml --out runs/clips --vary clip.norm=10,15,20    (again: continues after a stop)
"""


def sweep(
    run_file: RunFile,
    *,
    out: Annotated[Path, option("The folder for the runs; each gets a folder of its own in it.")],
    vary: Annotated[
        list[str],
        option("table.key=value,value,...: every combination becomes a run. May be repeated.", metavar="KEY=VALUES"),
    ],
    set_: SetKeys = None,
    engine: EngineOptions,
    stop_after: StopAfter = None,
    processes: ProcessOptions,
    yes: Yes = False,
) -> None:
    """Train variants of a run side by side.

    Each variant gives the same result as if it were trained alone, and has its own run folder and ledger.
    Each is charged to the users: ten variants cost as much privacy as ten runs.
    """
    set_stop_message(lambda: runs_stop_message(out))

    def work(ranks: "ProcessGroup | None") -> None:
        """Train all variants and print their results; `ranks` are the processes that share the work, or None."""
        from unheard.training.loop import train_together

        names, runs, choice = [], [], None
        for changes in parse_vary(vary):
            run, choice = read_run(run_file, [*(set_ or ()), *changes], engine, processes)
            names.append(",".join(change.partition(".")[2] for change in changes))
            runs.append((run, out / names[-1]))
        assert choice is not None
        allowed = confirm_no_noise([run for run, _ in runs], yes, can_ask=ranks is None)
        reports = train_together(runs, engine=choice, ranks=ranks, allow_no_privacy=allowed)
        _print_results(names, show_runs(reports, names, stop_after), out)

    run_on_processes(work, processes.processes, processes.max_restarts)


def _print_results(names: list[str], last: dict[int, "RoundReport"], out: Path) -> None:
    """Print a table with the held-out accuracy and the epsilon of each run.

    Args:
        names: The name of each run, which is also the name of its folder in `out`.
        last: The last report of each run, by its index; a run that was complete before has none.
        out: The folder of the sweep.
    """
    table = Table(title="Held-out accuracy and cost, by run", title_justify="left")
    for name in ("run", "round", "top 1", "top 3", "ε so far, by", "stopped"):
        table.add_column(name, justify="left" if name in ("run", "stopped") else "right")
    for index, name in enumerate(names):
        rows = RunFolder.open(out / name).read_metrics()
        figures = [f"{100 * rows[-1][key]:.2f} %" if rows else "-" for key in ("accuracy_top1", "accuracy_top3")]
        report = last.get(index)
        if report is None:
            table.add_row(name, str(rows[-1]["round"]) if rows else "-", *figures, "-", "was complete")
        else:
            spent = f"{epsilon_text(report.epsilon)} {accountant_title(report.accountant)}"
            table.add_row(name, str(report.round), *figures, spent, report.stopped or "")
    console.print(table)
    if any(report.round < report.rounds and not report.stopped for report in last.values()):
        say("Stopped before the last round. What was done is saved: the same command continues.")
    say(f"Compare them: unheard compare {out}/*")
