"""The training loop. It charges each round to the ledger before the round starts, and checkpoints regularly.

    for report in unheard.train(run, "runs/first"):      # creates the run folder; leaving the loop saves the state
        print(report.round, report.epsilon, report.metrics)
    for report in unheard.resume("runs/first"):          # continues from the newest checkpoint
        ...
    runs = [(run_a, "runs/a"), (run_b, "runs/b")]        # several runs of one model share one engine
    for index, report in unheard.train_together(runs):
        ...

Input: a `Run` (or several) and a folder. Output: an iterator of `RoundReport`, one per round; the folder's contents are
described in run_folder.py. The round itself is training/round.py; how a run folder is created and checked is
training/initialise.py.

Crash safety: the event of a round is on disk before the round reads a user's text, and each checkpoint records the
position of the ledger at which it was saved. After a crash, the rounds since the newest checkpoint run again and are
charged again. So a crash can only make the stated epsilon too large.
"""

import json
import logging
import math
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.corpus.store import UserTokens
from unheard.engines.choice import EngineChoice
from unheard.engines.distributed.process_group import ProcessGroup
from unheard.engines.engine import Engine
from unheard.errors import BudgetExceeded, InvalidValue, NoiseWarning
from unheard.evaluation.next_word import HeldOutText
from unheard.mechanism.correlated import CorrelatedNoise
from unheard.mechanism.noise import Normals
from unheard.privacy.accountants import RUNNING_ACCOUNTANT
from unheard.privacy.budget import RunningEpsilon
from unheard.privacy.ledger import Ledger
from unheard.privacy.run_ledger import JointLedger
from unheard.privacy.statement import compute_statement
from unheard.randomness import Streams
from unheard.run_folder import RunFolder, replace_file
from unheard.training.checkpoint import save_checkpoint
from unheard.training.initialise import (
    PreparedRun,
    build_engine,
    check_permission,
    create_run,
    noise_level,
    parallel_map_of,
    pinned,
    reopen_ledgers,
    reopen_run,
    restore_state,
    streams_of,
)
from unheard.training.noise_state import NoiseState, open_noise_state
from unheard.training.round import Round, State, run_rounds
from unheard.training.run import Run, read_saved_run
from unheard.updates.user_update import users_in_turn

# The log may hold the same values as a `RoundReport`, because both may be published: no cohort, no training loss, no
# time, which would depend on the users without noise.
logger = logging.getLogger("unheard.training")


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """The values that may be shown after a round. They depend on training users only through noisy values.

    Attributes:
        round: The number of completed rounds.
        rounds: The number of rounds that the run was configured for.
        epsilon: The privacy spent so far at `delta`, an upper bound computed by `accountant`. The statement claims the
            smaller of the bounds by PLD and by RDP.
        delta: The delta of the guarantee.
        metrics: The held-out evaluation after this round, as `unheard.evaluate` returns it; None if none was due.
        stopped: The reason why training ended before its last round; None if it did not.
        accountant: The accountant that computed `epsilon`: the budget's if the run has one, otherwise RDP.

    Example:
        >>> import unheard
        >>> report = list(unheard.train(run, "runs/reported"))[-1]
        >>> report.round, report.rounds, report.stopped
        (2, 2, None)
    """

    round: int
    rounds: int
    epsilon: float
    delta: float
    metrics: dict[str, float] | None = None
    stopped: str | None = None
    accountant: str = RUNNING_ACCOUNTANT


def train(
    run: Run,
    out: str | Path,
    *,
    engine: EngineChoice = EngineChoice(),
    ranks: ProcessGroup | None = None,
    on: Engine | None = None,
    again: bool = False,
    allow_no_privacy: bool = False,
) -> Generator[RoundReport, None, None]:
    """Train a run in a new folder.

    Everything that can be checked beforehand is checked before this function returns and before the folder appears. The
    rounds run while the caller iterates. Leaving the loop (`break`, an exception, Ctrl-C) saves the state; `resume`
    continues from it.

    >>> import unheard
    >>> for report in unheard.train(run, "runs/second"):
    ...     print("round", report.round, "of", report.rounds)
    round 1 of 2
    round 2 of 2
    >>> report.metrics["tokens"] > 0
    True

    Args:
        run: What to train.
        out: The run folder to create. It must not exist, or be empty.
        engine: Which engine computes the updates, and on which device. It does not change the result.
        ranks: The processes to train on (training/worker.py); None for this process alone.
        on: An existing engine to use, such as that of a federated run (federated/server.py); None builds one.
        again: Whether to continue the run if the folder exists, for example after processes that started it died.
        allow_no_privacy: Allow a run without noise. It makes the epsilon of the store's users infinite, permanently.
            Use it for public text, or for users who agreed.

    Returns:
        A generator of one report per round. Closing it saves the state.

    Warns:
        NoiseWarning: The noise of a round is so large that the model is expected to learn little or nothing.

    Raises:
        ConfigError: A value is not usable.
        UnprovenCombination: There is no privacy proof for this combination of parts.
        PrivacyError: The run adds no noise, and `allow_no_privacy` is False.
        ModelError: The model does not fit the corpus.
        CorpusError: The corpus cannot be used.
        RunFolderExists: `out` is not empty.
        BudgetExceeded: The first round would exceed the budget. Raised by the generator. If a later round would exceed
            it, nothing is raised: the last report has `stopped` set.
    """
    check_permission(run, allow_no_privacy)
    run = pinned(run)
    built = on or build_engine(engine, run.model, ranks)
    if again and RunFolder(Path(out)).run_file.exists():
        return _reports(_train_loop([reopen_run(run, RunFolder.open(out), built)], built))
    level = noise_level(run)
    if level is not None and (caution := level.caution()):
        warnings.warn(caution, NoiseWarning, stacklevel=2)
    return _reports(_train_loop([create_run(run, out, engine, built)], built))


def resume(
    out: str | Path,
    *,
    rounds: int | None = None,
    corpus: str | Path | None = None,
    engine: EngineChoice | None = None,
    ranks: ProcessGroup | None = None,
    on: Engine | None = None,
    allow_no_privacy: bool = False,
    new_noise: bool = False,
) -> Generator[RoundReport, None, None]:
    """Continue a run from its newest checkpoint, on this machine or another.

    >>> import unheard
    >>> [report.round for report in unheard.resume("runs/first", rounds=4)]
    [3, 4]

    Args:
        out: The run folder.
        rounds: The new total number of rounds; None for the number in the run file.
        corpus: The path of the same token store if it was moved; None for the path in the run file.
        engine: The engine to use from now on; None for the one in the run file.
        ranks: The processes to train on (training/worker.py); None for this process alone.
        on: An existing engine to use, such as that of a federated run (federated/server.py); None builds one.
        allow_no_privacy: Allow more rounds of a run without noise; as for `train`.
        new_noise: Begin a new mechanism of correlated noise, which is charged from its first round, because the keys
            and the past noise of the current one are lost. A complete run has deleted them.

    Returns:
        A generator of one report per round; it yields nothing if the run is complete.

    Raises:
        RunFolderMissing: `out` is not a run folder.
        LedgerError: The ledger, the run file and the checkpoint do not belong together.
        CheckpointCorrupt: The newest checkpoint cannot be read, or the past of correlated noise is missing or damaged.
        InvalidValue: `new_noise` is set for a run without correlated noise.
        PrivacyError: The run adds no noise, and `allow_no_privacy` is False.
        BudgetExceeded: The first round would exceed the budget. Raised by the generator.
    """
    folder = RunFolder.open(out)
    run, saved_engine = read_saved_run(folder.run_file)
    check_permission(run, allow_no_privacy)
    if new_noise and not isinstance(run.plan.noise, CorrelatedNoise):
        raise InvalidValue(
            f"--new-noise begins a new mechanism of correlated noise, but {out} does not use correlated noise. Remove "
            "--new-noise."
        )
    if rounds is not None:
        run = replace(run, training=replace(run.training, rounds=rounds))
    if corpus is not None:
        run = replace(run, corpus=Path(corpus))
    choice = engine or saved_engine
    if corpus is not None and ranks is None:
        choice = replace(choice, corpus_part=None)  # `corpus` names the whole store, so there are no parts
    # The model in a run folder was pinned when the run began.
    built = on or build_engine(choice, run.model, ranks)
    prepared = replace(reopen_run(run, folder, built), may_renew_noise=rounds is not None, has_new_noise=new_noise)
    return _reports(_train_loop([prepared], built))


def train_together(
    runs: Sequence[tuple[Run, str | Path]],
    *,
    engine: EngineChoice = EngineChoice(),
    ranks: ProcessGroup | None = None,
    allow_no_privacy: bool = False,
) -> Generator[tuple[int, RoundReport], None, None]:
    """Train several runs of one model at the same time on one engine, each in a folder of its own.

    The runs share the engine's chunks and nothing else: each gives the result that it would give alone. A run whose
    folder exists continues from its newest checkpoint. A run that ends or reaches its budget leaves the others running.
    After an error in one run all runs are saved, and the error is raised.

    >>> import unheard
    >>> runs = [(run, "runs/a"), (run, "runs/b")]
    >>> [(index, report.round) for index, report in unheard.train_together(runs)]
    [(0, 1), (1, 1), (0, 2), (1, 2)]

    Args:
        runs: Pairs of a run and its folder.
        engine: Which engine computes the updates, and on which device.
        ranks: The processes to train on (training/worker.py); None for this process alone.
        allow_no_privacy: Allow runs without noise among `runs`; as for `train`.

    Returns:
        A generator of (index in `runs`, report). It yields the reports of a round after all runs have completed that
        round, so a caller who leaves the loop interrupts no round.

    Raises:
        InvalidValue: There are no runs, they differ in their model, or two name the same folder. The errors of `train`
            and `resume` are raised too.
    """
    if not runs:
        raise InvalidValue("Give at least one run to train.")
    for run, _ in runs:
        check_permission(run, allow_no_privacy)
    runs = [(pinned(run), out) for run, out in runs]
    if any(run.model != runs[0][0].model for run, _ in runs):
        raise InvalidValue(
            "Runs that are trained together must have the same model: train those of another model separately."
        )
    if len({Path(out).resolve() for _, out in runs}) < len(runs):
        raise InvalidValue("Each run needs a folder of its own, and two of these have the same one.")
    built = build_engine(engine, runs[0][0].model, ranks)
    prepared = [
        reopen_run(run, RunFolder.open(out), built)
        if RunFolder(Path(out)).run_file.exists()
        else create_run(run, out, engine, built)
        for run, out in runs
    ]
    return _train_loop(prepared, built)


def _reports(indexed: Iterator[tuple[int, RoundReport]]) -> Generator[RoundReport, None, None]:
    """Yield the reports of a training loop of one run, without the index of the run."""
    for _, report in indexed:
        yield report


def _train_loop(prepared: Sequence[PreparedRun], engine: Engine) -> Generator[tuple[int, RoundReport], None, None]:
    """Run the training loop. Each iteration charges one round of every active run, then computes them in one call."""
    with ExitStack() as all_runs:
        active: dict[int, _ActiveRun] = {}
        closers: dict[int, ExitStack] = {}
        for index, one_run in enumerate(prepared):
            closers[index] = all_runs.enter_context(ExitStack())
            active[index] = closers[index].enter_context(_opened(one_run, engine))
        threads = all_runs.enter_context(ThreadPoolExecutor(max_workers=min(16, len(prepared))))
        while active:
            rounds: dict[int, Round] = {}
            reports: list[tuple[int, RoundReport]] = []
            for index, run in list(active.items()):
                if run.has_ended:
                    closers[index].close()
                    del active[index]
            for index, charged in _charge_rounds(active, threads).items():
                if isinstance(charged, BudgetExceeded):
                    reports.append((index, active[index].stop(charged)))
                else:
                    rounds[index] = charged
            states = run_rounds(list(rounds.values()), engine)
            for index, state in zip(rounds, states, strict=True):
                active[index].advance(state)
            reports += [(index, active[index].finish_round()) for index in rounds]
            yield from reports


def _charge_rounds(
    active: Mapping[int, "_ActiveRun"], threads: ThreadPoolExecutor
) -> dict[int, Round | BudgetExceeded]:
    """Charge the next round of every run, and start to draw the noise of the round after it.

    A charge mostly waits for the disk. Runs on different populations are therefore charged in parallel. Runs on one
    population share its ledger and are charged one after the other.

    Returns:
        For each run, by its index, the input of its round, or the error if the round would exceed a budget.
    """
    by_population: dict[Path, list[int]] = {}
    for index, run in active.items():
        by_population.setdefault(run.ledger.population.path, []).append(index)
    attempts = {index: len(run.ledger) for index, run in active.items()}

    def charge(indices: list[int]) -> dict[int, Round | BudgetExceeded]:
        """Charge one round of each of these runs, in order. A run whose budget would be exceeded gets the error."""
        charged: dict[int, Round | BudgetExceeded] = {}
        for index in indices:
            try:
                charged[index] = active[index].charge_round()
            except BudgetExceeded as error:
                charged[index] = error
        return charged

    def draw_ahead() -> None:
        """Start to draw the noise of the round after the one that is being charged, for each run."""
        for index, run in active.items():
            run.draw_ahead(attempts[index] + 1)

    if len(active) == 1:  # in this thread: handing the charge to another one takes longer than it saves
        draw_ahead()
        return charge(list(active))
    charging = [threads.submit(charge, indices) for indices in by_population.values()]
    draw_ahead()
    # Wait for all charges: each is on disk, or has raised an error, before a cohort is drawn.
    charged = {index: one for part in charging for index, one in part.result().items()}
    return {index: charged[index] for index in active}


@dataclass(kw_only=True)
class _ActiveRun:
    """A run that is being trained in this process: its state, its ledgers and its sources of randomness."""

    run: Run
    folder: RunFolder
    users: UserTokens
    engine: Engine
    ledger: JointLedger
    spent: RunningEpsilon
    state: State
    streams: Streams
    noise: NoiseState | None
    held_out: HeldOutText = field(repr=False)
    has_ended: bool = False
    evaluation: Callable[[], dict[str, float]] | None = None
    upcoming: dict[int, Normals] = field(default_factory=dict, repr=False)
    """The noise of later rounds that is drawn ahead, by attempt number."""

    def __post_init__(self) -> None:
        self.first_round = self.saved_round = self.state.round
        self.has_ended = self.state.round >= self.run.training.rounds

    def charge_round(self) -> Round:
        """Charge the next round to the ledgers and return its input.

        Raises:
            BudgetExceeded: The round would exceed the budget of the run or of its population. Nothing is charged.
        """
        plan = self.run.plan.at(self.state.round, self.run.model.layout, self.state.clip_norm)
        index = 0 if self.noise is None else self.noise.index
        event, attempt = plan.event(index), len(self.ledger)
        if self.run.budget:
            # DP: a budget is a stop; the round that would exceed it never starts.
            self.run.budget.check(self.spent, event, self.state.round)
        turn = None if self.noise is None else self.noise.begin_attempt()
        again, once = (None, None) if self.noise is None else (self.noise.repeats, self.noise.once)
        # DP: charge before release. The event is on disk, in the population's ledger and then in the run's, before a
        # user's text is read; a crash can only over-count.
        self.ledger.charge(event, self.state.round, again=again, once=once)
        self.spent.charge(event)
        drawn = self.upcoming.pop(attempt, None)
        return Round(
            state=self.state,
            plan=plan,
            model=self.run.model,
            server=self.run.server,
            users=self.users,
            streams=self.streams,
            attempt=attempt,
            turn=turn,
            normals=drawn if self.noise is None else self.noise.normals(),
        )

    def draw_ahead(self, attempt: int) -> None:
        """Start to draw the noise of an attempt in the background, while a charge waits for the disk.

        Does nothing if the noise is correlated, or if no round follows the one that is being charged.

        Args:
            attempt: The attempt number of the next round, after the one that is being charged.
        """
        if self.noise is None and self.state.round + 1 < self.run.training.rounds:
            layout = self.run.model.layout
            # An adaptive clip sets S after the previous round, so the scale of the noise is not known yet.
            is_known = self.run.plan.clip.adaptive is None
            scale = self.run.plan.at(self.state.round + 1, layout).noise_units if is_known else None
            noise = self.streams.noise(attempt)
            self.upcoming[attempt] = self.run.plan.noise.ahead(noise, layout.total, self.engine.device, scale)

    def advance(self, state: State) -> None:
        """Make `state` the current state, and start its evaluation if one is due."""
        self.state, self.has_ended = state, state.round == self.run.training.rounds
        if self._is_evaluation_due:
            self.evaluation = self.held_out.start(state.params_P, parallel_map_of(self.engine))

    def finish_round(self) -> RoundReport:
        """Record the evaluation and save a checkpoint, each if it is due, and return the report of the round."""
        metrics = None if self.evaluation is None else self._record(self.evaluation())
        self.evaluation = None
        if self.has_ended or self.state.round % self.run.training.checkpoint_every == 0:
            self.save()
        return self._report(metrics=metrics)

    def repeat_lost_evaluation(self) -> None:
        """Evaluate the model of the newest checkpoint if its evaluation is due and was not recorded.

        It is lost if the disk was full when it was to be written, or if the process was stopped while it was computed.
        """
        recorded = max((int(row["round"]) for row in self.folder.read_metrics()), default=0)
        # A file that somebody has deleted is not begun again: it would lack the evaluations before.
        is_deleted = not self.folder.metrics.exists() and self.state.round > self.run.evaluation.every
        if self._is_evaluation_due and recorded < self.state.round and not is_deleted:
            self._record(self.held_out.start(self.state.params_P, parallel_map_of(self.engine))())

    @property
    def _is_evaluation_due(self) -> bool:
        """Whether the model of the current round is evaluated."""
        round, run = self.state.round, self.run
        return round > 0 and (round == run.training.rounds or round % run.evaluation.every == 0)

    def _record(self, metrics: dict[str, float]) -> dict[str, float]:
        """Write the metrics of the current round to the run folder and the log, and return them."""
        # JSON has no infinity, so an infinite epsilon is written as null.
        epsilon = self.spent.epsilon if math.isfinite(self.spent.epsilon) else None
        self.folder.append_metrics({"round": self.state.round, "epsilon": epsilon, **metrics})
        logger.info(
            "%s: round %d of %d, AccuracyTop1 %.4f, perplexity %.4g, running epsilon %.4g by %s",
            *(self.folder.path.name, self.state.round, self.run.training.rounds, metrics["accuracy_top1"]),
            *(metrics["perplexity"], self.spent.epsilon, self.spent.accountant),
        )
        return metrics

    def stop(self, error: BudgetExceeded) -> RoundReport:
        """End the run before a round that would exceed a budget, and return its last report.

        Raises:
            BudgetExceeded: This process has run no round of the run, so there is nothing to report.
        """
        if self.state.round == self.first_round:
            raise error
        self.has_ended = True
        logger.info("%s: stopped. %s", self.folder.path.name, error)
        return self._report(stopped=str(error))

    def save(self) -> None:
        """Save a checkpoint of the state, unless this round is saved already."""
        if self.state.round > self.saved_round:
            save_checkpoint(self.folder, self.run.model, self.state, self.ledger, self.run.training.keep_checkpoints)
            self.saved_round = self.state.round
            logger.info("%s: saved after round %d", self.folder.path.name, self.state.round)
            if self.noise is not None and not self.has_ended:
                self.noise.save(is_last=False)

    def close(self) -> None:
        """Save the state when the training loop is left. Delete the keys and the earlier noise of a complete run."""
        self.save()
        # A run with more rounds than its run file says was extended (`resume --rounds`), and may be extended again.
        if self.state.round == self.run.training.rounds:
            # DP: past noise is as secret as the text: kept while it is needed, and no longer.
            storage.delete_folder(self.folder.noise)
        elif self.noise is not None:
            self.noise.save()

    def _report(self, metrics: dict[str, float] | None = None, stopped: str | None = None) -> RoundReport:
        """Return the report of the current round."""
        return RoundReport(
            round=self.state.round,
            rounds=self.run.training.rounds,
            epsilon=self.spent.epsilon,
            delta=self.run.claimed_delta,
            metrics=metrics,
            stopped=stopped,
            accountant=self.spent.accountant,
        )


@contextmanager
def _opened(prepared: PreparedRun, engine: Engine) -> Iterator[_ActiveRun]:
    """Lock the run folder and yield the run, ready for its next round. On exit, save the state and write the statement."""
    run, folder, store = prepared.run, prepared.folder, prepared.store
    with folder.locked():
        ledger = reopen_ledgers(run, folder, store)
        accountant = run.budget.accountant if run.budget else RUNNING_ACCOUNTANT
        streams = streams_of(run, ledger.facts, store.content_digest)
        state = restore_state(run, folder, engine.device)
        noise = None
        if isinstance(run.plan.noise, CorrelatedNoise) and state.round < run.training.rounds:
            may_renew, is_new = prepared.may_renew_noise, prepared.has_new_noise
            noise = open_noise_state(run, folder, ledger, streams, engine.device, may_renew=may_renew, is_new=is_new)
        active = _ActiveRun(
            run=run,
            folder=folder,
            users=prepared.users,
            engine=engine,
            ledger=ledger,
            spent=RunningEpsilon(run.claimed_delta, accountant, events=ledger.events),
            state=state,
            streams=streams,
            noise=noise,
            held_out=HeldOutText(
                run.model,
                run.evaluation.choose(users_in_turn(store.held_out, run.model)),
                unroll=run.evaluation.unroll,
                device=engine.device,
            ),
        )
        folder.drop_metrics_after(active.state.round)
        logger.info("%s: begins after round %d of %d", folder.path.name, active.state.round, run.training.rounds)
        # If this process is killed, an old statement would cover fewer rounds than the saved model.
        folder.statement.unlink(missing_ok=True)
        try:
            active.repeat_lost_evaluation()
            yield active
        finally:
            # Also when the caller leaves the loop early or presses Ctrl-C.
            active.close()
            write_statement(folder, ledger)


def write_statement(folder: RunFolder, ledger: Ledger | JointLedger) -> dict[str, Any]:
    """Compute the privacy statement from the ledger alone, write it to statement.json, and return it."""
    content = compute_statement(ledger.facts, ledger.entries)
    replace_file(folder.statement, json.dumps(content, indent=2).encode())
    return content
