"""The best of several private runs, and nothing else: how many there were, and how the others did, is told to nobody.

In: candidates of one cost. Out: one run folder, charged before the first trial for all of them together, or nothing where the
number drawn was 0. Chosen by accuracy on held-out users, who are not protected by any of this.
"""

import glob
import secrets
import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from unheard.corpus.store import TokenStore
from unheard.engines.engine import EngineChoice
from unheard.engines.meeting import world_size
from unheard.errors import RunFolderInUse, UnprovenCombination
from unheard.privacy.account import Account, run_id
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.ledger import Ledger
from unheard.privacy.population import Population
from unheard.randomness import SecureStreams, secure_generator
from unheard.runs import RunFolder, replace_file
from unheard.training.checkpoint import newest_checkpoint, save_checkpoint
from unheard.training.crew import build
from unheard.training.fitting import check_fits
from unheard.training.loop import pinned, train_together, write_statement
from unheard.training.run import Run
from unheard.training.run_file import run_toml
from unheard.training.start import charge_the_past, check_public, enter, first_state, names, people_of, public_facts
from unheard.tuning.results import mean_of_last
from unheard.tuning.trial_count import TrialCount, check_candidates

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
    event = count.event(candidates)
    candidates = [_resolved(run) for run in candidates]
    first = candidates[0]
    store = TokenStore.open(first.corpus)
    for run in candidates:
        check_fits(run, store)
    build(engine, first.model)  # what a trial would stumble over is refused now: nothing may be, once they are paid for
    first_state(first)
    people = people_of(first, store)
    check_public(first, people)
    clear_away(out)
    folder = RunFolder.begin(out)  # readable by nobody else until it is settled
    secret = folder.path / SECRET
    secret.mkdir()
    try:
        with RunFolder(secret).locked():
            charged = Ledger.create(
                secret / "charged.jsonl", {**public_facts(first, store, SecureStreams()), **names(first)}
            )
            charge_the_past(first, store, charged)
            if first.budget:
                first.budget.check(first.budget.running(charged.events), event, 0)
            enter(first, charged, people, Path(out).name)
            # DP: all trials are paid for here, in the people's ledger, before their number is drawn or anybody's text is read.
            Account(charged, people).charge(event, 0)
            best = _best(candidates, count.draw(secure_generator()), secret, engine)
            if best is None:
                return None
            _release(*best, folder, charged, people, store, engine, count)
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
    people: Population,
    store: TokenStore,
    engine: EngineChoice,
    count: TrialCount,
) -> None:
    """The best trial as a run folder like any other, whose ledger holds what was charged for all of them."""
    facts = public_facts(run, store, SecureStreams())
    facts["start"]["charges"] += 1  # the selection, before the first round that a resumed run would charge
    facts["selection"] = {"mean_trials": count.mean, "drawn_from": count.drawn_from}
    ledger = Ledger.create(folder.ledger, {**facts, **names(run), "run_id": run_id(charged)})
    for entry in charged.entries:
        ledger.charge(entry.event, entry.round)
    replace_file(folder.run_file, run_toml(run, engine).encode())
    for path in (folder.vocabulary, folder.tokens):
        replace_file(path, (trial.path / path.name).read_bytes())
    state = newest_checkpoint(trial).state
    save_checkpoint(folder, run.model, state, Account(ledger, people), run.training.keep_checkpoints)
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
