"""The best of several private runs, and nothing else: how many there were, and how the others did, is told to nobody.

In: candidates of one cost. Out: one run folder, charged before the first trial for all of them together, or nothing where the
number drawn was 0. Chosen by accuracy on held-out users, who are not protected by any of this.
How many trials a selection makes: drawn by the tool itself, secretly, by the object that says what that is worth.

In: a mean and a distribution. Out: a number for the tool alone, and the event that is charged. The bound (Papernot and Steinke
2022, "Hyperparameter Tuning with Renyi Differential Privacy"; Liu and Talwar 2019 for pure epsilon) is for a number that nobody
chose and nobody sees.
"""

import glob
import secrets
import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
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
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import JointLedger, PopulationLedger, run_id
from unheard.randomness import SecureStreams, secure_generator
from unheard.run_folder import RunFolder, replace_file
from unheard.training.checkpoint import newest_checkpoint, save_checkpoint
from unheard.training.initialise import (
    charge_earlier_costs,
    check_public_start,
    first_state,
    ledger_header,
    parent_ledger,
    pinned,
    population_ledger_of,
)
from unheard.training.loop import train_together, write_statement
from unheard.training.run import Run
from unheard.training.run_file import run_toml
from unheard.training.validate import check_run
from unheard.training.worker import build_engine
from unheard.tuning.results import mean_of_last


@dataclass(frozen=True, kw_only=True)
class TrialCount:
    """A random number of trials: geometric (1, 2, ...; at least one model) or Poisson (0, 1, ...; perhaps none)."""

    mean: float
    drawn_from: str = "geometric"

    def __post_init__(self) -> None:
        require(1 <= self.mean <= 1000, f"the mean number of trials must be from 1 to 1000, not {self.mean:g}.")
        require(
            self.drawn_from in ("geometric", "poisson"),
            f"trials can be drawn from 'geometric' or 'poisson', not {self.drawn_from!r}.",
        )

    def draw(self, rng: np.random.Generator) -> int:
        """Only a secure generator may be given here: whoever could foresee the number would know what the bound hides."""
        # DP: the mean and the distribution are those of the event below.
        return int(rng.geometric(1 / self.mean) if self.drawn_from == "geometric" else rng.poisson(self.mean))

    def event(self, candidates: Sequence[Run]) -> Selection:
        """What the whole selection costs: all candidates must have one privacy curve, for any of them may be drawn."""
        one = _only_event(candidates[0])
        for run in candidates:
            # DP: the bound is about repeating one mechanism. A candidate with less noise or more rounds is another one.
            if (_only_event(run), run.training.rounds) != (one, candidates[0].training.rounds):
                raise UnprovenCombination(
                    "The candidates of a selection must all cost the same: one q, one z and one number of rounds. Vary what does "
                    "not change them (clip.norm with noise_multiplier, update.learning_rate, server ...)."
                )
        return Selection(
            sampling_prob=one.sampling_prob,
            noise_multiplier=one.noise_multiplier,
            rounds=candidates[0].training.rounds,
            mean_trials=self.mean,
            drawn_from=self.drawn_from,
        )


def check_candidates(candidates: Sequence[Run]) -> None:
    """Candidates differ in what one user's update or the server does with it; in nothing that the account is about."""
    if not candidates:
        raise InvalidValue("There are no candidates to select from.")
    first = candidates[0]
    for run in candidates:
        if run.training.reproducible_seed is not None:
            raise UnprovenCombination(
                "A selection with a reproducible_seed proves nothing: its trials could be foreseen. Take the seed out."
            )
        alike = ("corpus", "ledger", "model", "training", "evaluation", "budget", "claimed_delta")
        odd = [name for name in alike if getattr(run, name) != getattr(first, name)]
        if odd or run.plan.population != first.plan.population:
            raise InvalidValue(
                f"All candidates of a selection have the same {', '.join(odd) or 'population'}: vary the update, the clip or the "
                "server."
            )


def _only_event(run: Run) -> PoissonGaussian:
    events = {plan.event() for _, plan in run.plan.phases(run.model.layout)}
    event = events.pop()
    if events or not isinstance(event, PoissonGaussian):
        raise UnprovenCombination(
            "A selection is among private runs whose rounds all cost the same: Poisson sampling, a clip, Gaussian noise, and no "
            "schedule that changes z."
        )
    return event


AT_ONCE = 8
"""Trials that are trained side by side."""
SECRET = "trials"


def select(
    candidates: Sequence[Run],
    out: str | Path,
    count: TrialCount,
    *,
    engine: EngineChoice = EngineChoice(),
) -> RunFolder | None:
    """Charge, draw a number, train so many of the candidates, keep the best."""
    check_candidates(candidates)
    _check_alone()
    candidates = [_resolved(run) for run in candidates]
    event = count.event(candidates)
    first = candidates[0]
    store = TokenStore.open(first.corpus)
    for run in candidates:
        check_run(run, store)
    # What would make a trial fail is checked now: no trial may fail once all are paid for.
    build_engine(engine, first.model)
    first_state(first)
    population = population_ledger_of(first, store)
    check_public_start(first, population)
    clear_away(out)
    folder = RunFolder.begin(out)  # readable by nobody else until it is settled
    secret = folder.path / SECRET
    secret.mkdir()
    try:
        with RunFolder(secret).locked():
            charged = Ledger.create(secret / "charged.jsonl", ledger_header(first, store, SecureStreams()))
            charge_earlier_costs(first, store, charged)
            if first.budget:
                first.budget.check(first.budget.running(charged.events), event, 0)
            JointLedger.begin(charged, population, Path(out).name, parent_ledger(first))
            # DP: all trials are paid for here, in the people's ledger, before their number is drawn or anybody's text is read.
            JointLedger(charged, population).charge(event, 0)
            best = _best(candidates, count.draw(secure_generator()), secret, engine)
            if best is None:
                return None
            _release(*best, folder, charged, population, store, engine, count)
            # DP: of the other trials nothing is left.
            shutil.rmtree(secret)
        return folder.settle(out)
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)  # settled, it is no longer there


def clear_away(out: str | Path) -> None:
    """Delete what a selection into this folder left when it was killed outright: trials, which nobody may see or count."""
    place = Path(out).resolve()
    for secret in place.parent.glob(f".{glob.escape(place.name[:50])}.*.new/{SECRET}"):
        with suppress(RunFolderInUse), RunFolder(secret).locked():  # another that is still going on keeps its own
            # DP: a trial that was not chosen was paid for only as long as it is never seen.
            shutil.rmtree(secret.parent)


def _best(candidates: Sequence[Run], number: int, secret: Path, engine: EngineChoice) -> tuple[Run, RunFolder] | None:
    """Train `number` candidates, each drawn uniformly, with replacement; the one with the best score stays, the first of equals
    (trials are alike before they are trained, so that is no different from drawing among equals)."""
    best: tuple[float, Run, RunFolder] | None = None
    for start in range(0, number, AT_ONCE):
        # DP: which candidate a trial takes does not depend on the trials before it.
        chosen = [
            candidates[int(secure_generator().integers(len(candidates)))]
            for _ in range(start, min(number, start + AT_ONCE))
        ]
        places = [secret / secrets.token_hex(8) for _ in chosen]  # no number: an error may name a file
        # The people's own ledger holds the whole selection; the trials keep their accounts in a place that is thrown away.
        trials = [replace(run, ledger=secret / "people.jsonl", budget=None) for run in chosen]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whatever is said once for each group of trials would count them
            for _ in train_together(list(zip(trials, places, strict=True)), engine=engine):
                pass
        for run, place in zip(chosen, places, strict=True):
            score = mean_of_last(RunFolder(place).read_metrics())
            if best is None or score > best[0]:
                if best is not None:
                    shutil.rmtree(best[2].path)
                best = (score, run, RunFolder(place))
            else:
                shutil.rmtree(place)
    return None if best is None else best[1:]


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
    """The best trial as a run folder like any other, whose ledger holds what was charged for all of them."""
    facts = ledger_header(run, store, SecureStreams())
    facts["start"]["charges"] += 1  # the selection, before the first round that a resumed run would charge
    facts["selection"] = {"mean_trials": count.mean, "drawn_from": count.drawn_from}
    ledger = Ledger.create(folder.ledger, {**facts, "run_id": run_id(charged)})
    for entry in charged.entries:
        ledger.charge(entry.event, entry.round)
    replace_file(folder.run_file, run_toml(run, engine).encode())
    for path in (folder.vocabulary, folder.tokens):
        replace_file(path, (trial.path / path.name).read_bytes())
    state = newest_checkpoint(trial).state
    save_checkpoint(folder, run.model, state, JointLedger(ledger, population), run.training.keep_checkpoints)
    # DP: every model of the chosen run is known only because it was chosen: each costs the whole selection.
    total = best_epsilon(ledger.events, run.claimed_delta).epsilon
    for row in trial.read_metrics():
        folder.append_metrics({**row, "epsilon": total})
    write_statement(folder, ledger)


def _check_alone() -> None:
    """Processes of one command would each make a selection of their own, into one place."""
    if world_size() > 1:
        # DP: the one that ends first would be kept, and that is the one with the fewest trials: no bound is for that choice.
        raise UnprovenCombination(
            "A selection (tune --select) is made by one process, and several were started here. Start it without torchrun."
        )


def _resolved(run: Run) -> Run:
    run = pinned(run)
    return replace(run, corpus=Path(run.corpus).resolve(), ledger=run.ledger and Path(run.ledger).resolve())
