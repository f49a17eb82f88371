"""Private hyperparameter selection: trains a secret random number of private candidates and releases only the best.

    folder = select(candidates, "runs/best", TrialCount(mean=5))

The candidates are private runs with equal costs (one q, z and number of rounds) that differ in other values, such as
the learning rate. `select` charges the whole selection, draws the number of trials from a geometric or Poisson
distribution, trains that many candidates drawn at random, and keeps the one with the best accuracy on held-out users.
The number of trials and the results of all other trials are secret: they are never shown, and the folders of the other
trials are deleted.

The selection costs about as much as two to three runs, even if there are more trials, by the bound of Papernot and
Steinke ("Hyperparameter Tuning with Renyi Differential Privacy", ICLR 2022, https://arxiv.org/abs/2110.03620; Liu and
Talwar 2019 for pure epsilon). The bound holds only if the number of trials is random and nobody sees it. It does not
protect held-out users, because the choice depends on their text.
"""

import glob
import logging
import secrets
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from unheard.config import require
from unheard.corpus.store import TokenStore
from unheard.engines.choice import EngineChoice
from unheard.engines.distributed.process_group import world_size
from unheard.errors import InvalidValue, RunFolderInUse, UnprovenCombination
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.events import PoissonGaussian, Selection
from unheard.privacy.ledger import Ledger, run_id
from unheard.privacy.population_ledger import PopulationLedger
from unheard.privacy.run_ledger import JointLedger
from unheard.randomness import secure_generator
from unheard.run_folder import RunFolder, replace_file
from unheard.training.checkpoint import newest_checkpoint, save_checkpoint
from unheard.training.initialise import (
    build_engine,
    charge_earlier_costs,
    check_public_start,
    check_run,
    first_state,
    ledger_header,
    parent_ledger,
    pinned,
    population_ledger_of,
    with_absolute_paths,
)
from unheard.training.loop import train_together, write_statement
from unheard.training.run import Run, run_toml
from unheard.tuning.trials import mean_of_last

TRIALS_SIDE_BY_SIDE = 8
"""How many trials are trained at the same time."""
SECRET = "trials"
"""The name of the folder of the trials. It lies in the unfinished output folder, which only its owner may enter."""


@dataclass(frozen=True, kw_only=True)
class TrialCount:
    """The distribution of the number of trials.

    Attributes:
        mean: The mean number of trials, from 1 to 1000.
        drawn_from: "geometric" (1 or more trials) or "poisson" (0 or more; with 0 trials there is no model).

    Raises:
        InvalidValue: The mean is out of range, or the distribution is unknown.
    """

    mean: float
    drawn_from: str = "geometric"

    def __post_init__(self) -> None:
        require(1 <= self.mean <= 1000, f"the mean number of trials must be from 1 to 1000, not {self.mean:g}.")
        require(
            self.drawn_from in ("geometric", "poisson"),
            f"trials can be drawn from 'geometric' or 'poisson', not {self.drawn_from!r}.",
        )

    def draw(self, rng: np.random.Generator) -> int:
        """Draw the number of trials.

        Args:
            rng: A secure generator. The bound does not hold against an adversary who can predict the number.
        """
        # DP: the mean and the distribution are those of the event below, which is charged.
        return int(rng.geometric(1 / self.mean) if self.drawn_from == "geometric" else rng.poisson(self.mean))

    def event(self, candidates: Sequence[Run]) -> Selection:
        """Return the privacy event of the whole selection, which covers all trials.

        Raises:
            UnprovenCombination: The candidates do not all have the same privacy cost, or one is not private.
        """
        event = _only_event(candidates[0])
        for run in candidates:
            # DP: the bound is about repeating one mechanism. A candidate with less noise or more rounds is a different
            # mechanism.
            if (_only_event(run), run.training.rounds) != (event, candidates[0].training.rounds):
                raise UnprovenCombination(
                    "The candidates of a selection must all cost the same: one q, one z and one number of rounds. Vary what does "
                    "not change them (clip.norm with noise_multiplier, update.learning_rate, server ...)."
                )
        return Selection(
            sampling_prob=event.sampling_prob,
            noise_multiplier=event.noise_multiplier,
            rounds=candidates[0].training.rounds,
            mean_trials=self.mean,
            drawn_from=self.drawn_from,
        )


def select(
    candidates: Sequence[Run],
    out: str | Path,
    count: TrialCount,
    *,
    engine: EngineChoice = EngineChoice(),
) -> RunFolder | None:
    """Charge a selection, train a random number of candidates, and keep the best.

    If the call is interrupted, the charge remains and all trials are deleted (after a kill, the next call with the same
    `out` deletes them). Another call is charged again.

    Args:
        candidates: Private runs with equal costs, which may differ in the update, the clip and the server.
        out: The run folder to create.
        count: The distribution of the number of trials.
        engine: The engine that trains them.

    Returns:
        The run folder of the best candidate, whose ledger holds the charge for all trials; None if the number drawn was
        0, which is charged all the same.

    Raises:
        UnprovenCombination: The bound does not hold for these candidates, or several processes were started.
        InvalidValue: There is no candidate, or the candidates differ in a value that they must share.
        BudgetExceeded: The selection would cost more than the budget of the run.
        RunFolderExists: `out` is a file, or a folder that is not empty.
    """
    _check_candidates(candidates)
    _check_single_process()
    candidates = [with_absolute_paths(pinned(run)) for run in candidates]
    event = count.event(candidates)
    first = candidates[0]
    store = TokenStore.open(first.corpus)
    for run in candidates:
        check_run(run, store)
    # Errors that a trial would raise are raised here, before the users are charged for all trials.
    build_engine(engine, first.model)
    state = first_state(first)
    population = population_ledger_of(first, store)
    check_public_start(first, population, state)
    delete_killed_selections(out)
    folder = RunFolder.begin(out)  # a hidden folder that only its owner may enter; `publish` moves it to `out`
    secret = folder.path / SECRET
    secret.mkdir()
    try:
        with RunFolder(secret).locked():
            charged = Ledger.create(secret / "charged.jsonl", ledger_header(first, store, state, population))
            charge_earlier_costs(first, store, charged)
            if first.budget:
                first.budget.check(first.budget.running(charged.events), event, 0)
            JointLedger.register(charged, population, Path(out).name, parent_ledger(first), store=store.content_digest)
            # DP: all trials are paid for here, in the population's ledger, before their number is drawn or any text is
            # read.
            JointLedger(charged, population).charge(event, 0)
            best = _best(candidates, count.draw(secure_generator()), secret, engine)
            if best is None:
                return None
            _release(*best, folder, charged, population, store, engine, count)
            # DP: nothing is left of the other trials, so that nobody can see or count them.
            shutil.rmtree(secret)
        return folder.publish(out)
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)  # has no effect after `publish`, which moved the folder


def delete_killed_selections(out: str | Path) -> None:
    """Delete the trials that killed selections for the same output folder left behind. Nobody may see or count them."""
    target = Path(out).resolve()
    for secret in target.parent.glob(f".{glob.escape(target.name[:50])}.*.new/{SECRET}"):
        with suppress(RunFolderInUse), RunFolder(secret).locked():  # a selection that still runs holds its lock
            # DP: the charge covers a trial that was not chosen only if nobody ever sees it.
            shutil.rmtree(secret.parent)


def _check_candidates(candidates: Sequence[Run]) -> None:
    """Check that the candidates differ only in the update, the clip or the server, and that none has a known seed.

    Raises:
        InvalidValue: There is no candidate, or the candidates differ in another value.
        UnprovenCombination: A candidate has a `reproducible_seed`.
    """
    if not candidates:
        raise InvalidValue("A selection needs at least one candidate, and none was given.")
    first = candidates[0]
    for run in candidates:
        if run.training.reproducible_seed is not None:
            raise UnprovenCombination(
                "A selection with a reproducible_seed has no guarantee: its trials could be predicted. Take the seed out."
            )
        same = ("corpus", "ledger", "model", "training", "evaluation", "budget", "claimed_delta")
        different = [name for name in same if getattr(run, name) != getattr(first, name)]
        if different or run.plan.population != first.plan.population:
            raise InvalidValue(
                f"All candidates of a selection must have the same {', '.join(different) or 'population'}, and these differ. "
                "Vary only the update, the clip or the server."
            )


def _check_single_process() -> None:
    """Raise `UnprovenCombination` if several processes were started, since each would make its own selection."""
    if world_size() > 1:
        # DP: the selection that ends first would be kept, and it tends to have the fewest trials. No bound covers that
        # choice.
        raise UnprovenCombination(
            "A selection (tune --select) is made by one process, and several were started here. Start it without torchrun."
        )


def _only_event(run: Run) -> PoissonGaussian:
    """Return the privacy event that all rounds of a run have in common.

    Raises:
        UnprovenCombination: The rounds have different events, or are not Poisson-sampled rounds with Gaussian noise.
    """
    events = {plan.event() for _, plan in run.plan.phases(run.model.layout)}
    event = events.pop()
    if events or type(event) is not PoissonGaussian:
        raise UnprovenCombination(
            "The candidates of a selection must be private runs whose rounds all cost the same. Use Poisson sampling, a clip, "
            "Gaussian noise, and no schedule that changes z."
        )
    return event


def _best(candidates: Sequence[Run], number: int, secret: Path, engine: EngineChoice) -> tuple[Run, RunFolder] | None:
    """Train `number` candidates, each drawn uniformly with replacement, and return the one with the best accuracy.

    If accuracies are equal, the first trial is kept. This equals a random choice among them, because all trials are
    drawn from the same distribution.

    Args:
        candidates: The runs to draw from.
        number: The number of trials. Secret.
        secret: The folder for the trials.
        engine: The engine that trains them.

    Returns:
        The chosen run and its folder in `secret`; None if `number` is 0. The folders of all other trials are deleted.
    """
    best: tuple[float, Run, RunFolder] | None = None
    for start in range(0, number, TRIALS_SIDE_BY_SIDE):
        # DP: which candidate a trial takes does not depend on the trials before it.
        chosen = [
            candidates[int(secure_generator().integers(len(candidates)))]
            for _ in range(start, min(number, start + TRIALS_SIDE_BY_SIDE))
        ]
        # Random names: an error message may contain the path, and a counter in it would reveal the number of trials.
        folders = [RunFolder(secret / secrets.token_hex(8)) for _ in chosen]
        # The population's ledger already holds the charge for the whole selection, so the trials are charged to a
        # temporary ledger.
        trials = [replace(run, ledger=secret / "people.jsonl", budget=None) for run in chosen]
        with _silence():
            paths = [folder.path for folder in folders]
            for _ in train_together(list(zip(trials, paths, strict=True)), engine=engine):
                pass
        for run, folder in zip(chosen, folders, strict=True):
            score = mean_of_last(folder.read_metrics())
            if best is None or score > best[0]:
                if best is not None:
                    shutil.rmtree(best[2].path)
                best = (score, run, folder)
            else:
                shutil.rmtree(folder.path)
    return None if best is None else best[1:]


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress log messages and warnings in the `with` block, since they would reveal the number of trials."""
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "unheard"]
    levels = {log: log.level for log in map(logging.getLogger, ("unheard", *names))}
    # DP: neither the number of trials nor the result of a single trial is written anywhere, not even to a log.
    for log in levels:
        log.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in levels.items():
            log.setLevel(level)


def _release(
    run: Run,
    trial: RunFolder,
    folder: RunFolder,
    charged: Ledger,
    population: PopulationLedger,
    store: TokenStore,
    engine: EngineChoice,
    count: TrialCount,
) -> None:
    """Write the best trial as an ordinary run folder whose ledger holds the charge for all trials.

    Args:
        run: The chosen run.
        trial: Its folder among the trials, from which vocabulary, metrics and the newest checkpoint are taken.
        folder: The run folder to fill.
        charged: The ledger with the charge for the selection.
        population: The ledger of the run's users.
        store: The store of the run.
        engine: The engine to write into the run file.
        count: The distribution of the number of trials, which the ledger records.
    """
    facts = ledger_header(run, store, first_state(run), population)
    facts["start"]["charges"] += 1  # the selection is charged before the first round that a resumed run would charge
    facts["selection"] = {"mean_trials": count.mean, "drawn_from": count.drawn_from}
    ledger = Ledger.create(folder.ledger, {**facts, "run_id": run_id(charged)})
    for entry in charged.entries:
        ledger.charge(entry.event, entry.round)
    replace_file(folder.run_file, run_toml(run, engine).encode())
    for path in (folder.vocabulary, folder.tokens):
        replace_file(path, (trial.path / path.name).read_bytes())
    # DP: every model of the chosen run is known only because it was chosen, so each evaluation gets the epsilon of the
    # whole selection.
    total = best_epsilon(ledger.events, run.claimed_delta).epsilon
    for row in trial.read_metrics():
        folder.append_metrics({**row, "epsilon": total})
    state = newest_checkpoint(trial).state
    save_checkpoint(folder, run.model, state, JointLedger(ledger, population), run.training.keep_checkpoints)
    write_statement(folder, ledger)
