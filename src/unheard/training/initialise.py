"""Before the first round: does everything fit, where does the model begin, what has this ledger to answer for already.

In: a Run and its store. Out: the first State, and the public facts and past events with which a ledger begins.
"""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from unheard.corpus.store import TokenStore
from unheard.errors import CheckpointCorrupt, InvalidValue, LedgerError, UnprovenCombination
from unheard.mechanism.noise import NoNoise
from unheard.privacy.accountants import versions
from unheard.privacy.events import from_record
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import JointLedger, PopulationLedger, new_run_id, open_population_ledger, run_id
from unheard.randomness import Streams
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import Checkpoint, load_model, newest_checkpoint
from unheard.training.run import Run
from unheard.training.run_file import run_hash
from unheard.training.server import State


def first_state(run: Run) -> State:
    """Round 0: the common initialisation, or an earlier model."""
    if run.training.init_from is None:
        return State(round=0, params_P=run.model.initial(run.training.init_seed))
    path = Path(run.training.init_from)
    is_folder = path.is_dir()
    if not (is_folder or path.is_file()):
        raise InvalidValue(f"training.init_from = {str(path)!r} is neither a run folder nor a model file.")
    is_private = not isinstance(run.plan.noise, NoNoise)
    if is_private and not is_folder and not run.training.init_is_public:
        # DP: a model of unknown origin may have seen these users without noise.
        raise UnprovenCombination(
            f"{path} is a model without a ledger: nobody can say what it cost these users. Give its run folder, or, if none of "
            "them had a part in it, set training.init_is_public = true."
        )
    return State(round=0, params_P=load_model(RunFolder(path).model if is_folder else path, run.model))


def charge_the_past(run: Run, store: TokenStore, ledger: Ledger) -> None:
    """What was spent on these users before the first round: their vocabulary, and the model that we begin from."""
    # DP: a vocabulary found in the users' own text is paid for in this ledger too.
    for record in store.vocabulary_events:
        ledger.charge(from_record(record), 0)
    spent = _parent(run)
    if spent is not None:
        # DP: the earlier run had the same users, unless declared otherwise; its cost is part of this model's.
        ledger.charge_all(spent.events, 0)


def population_ledger_of(run: Run, store: TokenStore) -> PopulationLedger:
    """The ledger of the store's people, to which every run on them is charged. Refused here if it cannot be written."""
    return open_population_ledger(store.path, corpus_name(store), store.vocabulary_events, run.ledger)


def check_public(run: Run, population: PopulationLedger) -> None:
    """What is declared public may not be known to be these people's."""
    start = run.training.init_from
    if start is None or not run.training.init_is_public or not (folder := RunFolder(Path(start))).ledger.is_file():
        return
    # DP: a run that these very people are charged for left no public model, whatever is declared.
    if run_id(Ledger.read(folder.ledger)) in population.members:
        raise UnprovenCombination(
            f"{start} was trained on these very people (their ledger, {population.path}, holds it): its model is not "
            "public for them. "
            "Leave out training.init_is_public: what that run cost is then part of this one's."
        )


def enter(run: Run, ledger: Ledger, population: PopulationLedger, name: str) -> None:
    """Tell the people's ledger that a run begins, and make sure that it holds the run that this one begins from."""
    JointLedger.begin(ledger, population, name, _parent(run))


def names(run: Run) -> dict[str, str]:
    """How a ledger's header names its run: what it means, and which of the runs with that meaning it is."""
    meaning = run_hash(run)
    return {"run_hash": meaning, "run_id": new_run_id(None if run.training.reproducible_seed is None else meaning)}


def check_checkpoint(run: Run, account: JointLedger, checkpoint: Checkpoint) -> None:
    """A checkpoint of another model, or people's ledger that has lost lines since it was saved, is not gone on with."""
    if checkpoint.state.params_P.shape != (run.model.layout.total,):
        raise CheckpointCorrupt(
            f"The newest checkpoint is not of this run's model, which has {run.model.layout.total} parameters. "
            "Delete it to resume from the one before."
        )
    # DP: a shortened ledger would make these people look less spent than they are.
    position = checkpoint.population_position
    if position is not None and account.population.contains(position) is False:
        raise LedgerError(
            f"{account.population.path} does not hold what was charged up to the newest checkpoint: it was shortened or replaced. "
            "Put the right one back; without it what these people have spent cannot be known."
        )


def _parent(run: Run) -> Ledger | None:
    """The ledger of the run that this one begins from, if its users are these, checked against its model."""
    if run.training.init_from is None or not Path(run.training.init_from).is_dir() or run.training.init_is_public:
        return None
    parent = RunFolder(Path(run.training.init_from))
    spent, reached = Ledger.read(parent.ledger), newest_checkpoint(parent)
    if not spent.contains(reached.ledger_length, reached.ledger_head):
        raise LedgerError(
            f"{parent.ledger} does not hold what its model cost: it was shortened or replaced. Put it back."
        )
    return spent


def public_facts(run: Run, store: TokenStore, streams: Streams) -> dict[str, Any]:
    """The ledger's header: declared numbers, resolved, and versions. No count of any private user."""
    vocabulary = {key: value for key, value in store.info.get("vocabulary", {}).items() if key != "events"}
    return {
        **run.plan.facts(run.model.layout),
        "delta": run.claimed_delta,
        "randomness": streams.describe(),
        "vocabulary": vocabulary,
        "drop_duplicates": bool(store.info.get("drop_duplicates")),
        "start": {**_start(run), **_base(run), "charges": len(store.vocabulary_events) + len(_parent(run) or ())},
        "parameters": run.model.layout.total,
        "corpus": corpus_name(store),
        "software": {"unheard": version("unheard"), "torch": str(torch.__version__), **versions()},
    }


def corpus_name(store: TokenStore) -> str:
    return store.name


def _base(run: Run) -> dict[str, Any]:
    """What a model from elsewhere was declared to be, under every start: its constants, or what the first run began from."""
    origin = run.model.origin()
    return {} if origin is None else {"base": origin}


def _start(run: Run) -> dict[str, Any]:
    """Where the first model came from, and whether what it cost rests on something that must be said."""
    if run.training.init_from is None:
        return {"from": f"seed {run.training.init_seed}" if run.model.origin() is None else "its base"}
    if run.training.init_is_public:
        return {"from": "a model declared public"}
    parent = Path(run.training.init_from)
    if not parent.is_dir():
        return {"from": "a model file of unknown cost"}
    return {"from": "an earlier run", **_inherited(Ledger.read(RunFolder(parent).ledger).facts)}


def _inherited(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What must be said of an earlier run, and of those that it began from in its turn: their noise is in this model."""
    before = facts.get("start") or {}
    runs = (before, facts)
    seeded = [one["randomness"] for one in runs if (one.get("randomness") or {}).get("mode") == "reproducible"]
    # DP: noise of a known seed hides nothing, however many runs ago it was added.
    kept = {"randomness": seeded[0] if seeded else facts.get("randomness")}
    kept["drop_duplicates"] = any(one.get("drop_duplicates") for one in runs)
    public = "a model declared public"
    return {**kept, "base": public} if public in (before.get("from"), before.get("base")) else kept
