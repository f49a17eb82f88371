"""The ledger of a run together with that of its population: charging both, and checking one against the other.

    JointLedger.begin(ledger, population, name="first")     # a new run is registered with its population
    JointLedger(ledger, population).charge(event, round=0)  # training charges both; the population first
    ledger = read_run_ledger("runs/first")                  # `Ledger.read` and all checks; raises `LedgerError`

A ledger that was cut at the end of a line, or replaced by the ledger of another run, has a valid hash chain. The
checkpoints and the released model of a run therefore remember the position of the run's ledger (its length and the hash
of its last line), and the population's ledger remembers how many charges it holds for the run. A folder in which these
disagree would be stated with a smaller epsilon than its model has cost. All readers of a run's ledger use this module:

    check_ledger(ledger, remembered(folder))           # what checkpoints and model remember
    check_population(population, run_id(ledger), len(ledger), remembered(folder))

In: a run folder, and the ledger of the population if it is where the run file says. Out: the run's ledger. Reads the
headers of model files only, without torch and without their tensors.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unheard.config import parse_toml
from unheard.errors import CheckpointCorrupt, LedgerError
from unheard.privacy.events import Event, Selection
from unheard.privacy.ledger import Entry, Ledger, corpus_name, run_id
from unheard.privacy.population_ledger import (
    FILE,
    PopulationLedger,
    known_position,
    read_corpus_record,
    read_population_ledger,
)
from unheard.run_folder import RunFolder, configuration_hash, not_written_by_unheard, read_facts

REPEATED_FACTS = ("population", "delta", "randomness", "drop_duplicates", "declared")
"""The public facts of a run that the population's ledger repeats."""


class JointLedger:
    """A run's ledger that also charges the run's population. Training charges it as it would the run's ledger alone.

    The population is charged first. A crash between the two lines leaves the population charged for a round that never
    began, so the population can only be charged too much.

    Args:
        ledger: The run's own ledger, open for charging.
        population: The ledger of the store's population. Charges of the run's ledger that are missing here are added
            at once.
    """

    def __init__(self, ledger: Ledger, population: PopulationLedger) -> None:
        self._ledger = ledger
        self.population = population
        self.run = run_id(ledger)
        if self.run not in population.members:  # this is another store, or a run of a version before stores had ledgers
            came = {"came_with": len(ledger)} if len(ledger) else {}
            population.register(self.run, {**_repeated_facts(ledger, ledger.path.parent.name), **came}, held=0)
        population.settle(self.run, ledger.entries)

    @classmethod
    def begin(
        cls,
        ledger: Ledger,
        population: PopulationLedger,
        name: str,
        parent: Ledger | None = None,
        *,
        store: str | None = None,
    ) -> None:
        """Register a new run with the population.

        Args:
            ledger: The new run's ledger. It holds what was spent before the run: the vocabulary and the parent run.
            population: The ledger of the store's population.
            name: The name of the run in statements.
            parent: The ledger of the run that this run begins from.
            store: The digest of the users' text, which the run must find again when it is resumed. This ledger is as
                secret as the store.
        """
        if parent is not None:
            # DP: the earlier run had the same users, unless declared otherwise; on this store it is charged already.
            population.register(run_id(parent), _repeated_facts(parent, parent.path.parent.name), held=0)
            population.settle(run_id(parent), parent.entries)
        facts = _repeated_facts(ledger, name) | ({} if store is None else {"store": store})
        population.register(run_id(ledger), facts, held=len(ledger), is_new=True)

    def charge(self, event: Event, round: int, *, again: bool = False) -> None:
        """Charge both ledgers; both events are on disk when this returns. `again`: as in `PopulationLedger.charge`.

        Args:
            event: What the round will do to the users' data.
            round: The number of the round, from 0.
            again: With correlated noise, whether a kill left this attempt charged to the population and not to the run.

        Raises:
            BudgetExceeded: The event would exceed the population's budget. Neither ledger is charged.
            LedgerError: An event could not be written. Nothing of the round may be released.
        """
        # DP: the population first: whatever happens next, its ledger never holds less than the run's.
        self.population.charge(self.run, len(self._ledger), event, round, again=again)
        self._ledger.charge(event, round)

    def record_release(self, sha256: str) -> None:
        """Record in the population's ledger the digest of a model that the run is about to write."""
        self.population.record_release(self.run, sha256)

    def remember(self) -> None:
        """Let the store record how far the population's ledger has grown."""
        self.population.remember()

    @property
    def facts(self) -> dict[str, Any]:
        """The public facts of the run."""
        return self._ledger.facts

    @property
    def entries(self) -> list[Entry]:
        """The charges of the run."""
        return self._ledger.entries

    @property
    def events(self) -> list[Event]:
        """The events of the run."""
        return self._ledger.events

    @property
    def head(self) -> str:
        """The hash of the last line of the run's ledger."""
        return self._ledger.head

    @property
    def position(self) -> dict[str, Any]:
        """Where the population's ledger stands; checkpoints remember it."""
        return self.population.position

    def __len__(self) -> int:
        return len(self._ledger)

    def contains(self, length: int, head: str) -> bool:
        """Whether the run's ledger has grown out of that length and hash; see `Ledger.contains`."""
        return self._ledger.contains(length, head)


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """What one checkpoint, or the released model, remembers of the ledgers.

    Attributes:
        source: The file, for error messages.
        round: The round after which the file was saved.
        length: The number of entries that the run's ledger had; None in a model file of version 0.1.
        head: The hash of the last of these entries; None in a model file of version 0.1.
        population_position: The position of the population's ledger; None if it is not remembered.
        nodes: The SHA-256 of federated.json; None for a run without nodes; "unknown" in models and in checkpoints of
            older versions.
    """

    source: Path
    round: int
    length: int | None
    head: str | None
    population_position: Mapping[str, Any] | None = None
    nodes: str | None = "unknown"


def read_run_ledger(folder: RunFolder | str | os.PathLike[str]) -> Ledger:
    """Read the ledger of a run folder, and check that nothing of it is missing.

    The ledger must hold what the checkpoints and the released model remember. If the population's ledger is where the
    run file says, the run's ledger must also hold what the population was charged for this run.

    Args:
        folder: A run folder. Of a folder that holds nothing but a ledger, the hash chain alone is checked, and the
            statement says so (`is_alone`).

    Raises:
        LedgerError: The ledger is missing, damaged, shortened, rolled back or of another run; or the run's store is here
            and has lost the ledger in which the run was charged.
        CheckpointCorrupt: A checkpoint or the model cannot be read.
        RunFolderError: Something in the folder is not a regular file.
    """
    folder = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))
    folder.check_files()
    # In this order a run that trains meanwhile is read without contradictions: each file only grows after the one that
    # is read before it.
    sources = remembered(folder)
    population = population_of(folder)
    ledger = Ledger.read(folder.ledger)
    if not sources and not is_alone(folder):
        raise LedgerError(
            f"{folder.path} has neither a checkpoint nor a model that remembers its ledger, so nobody can say whether the "
            "ledger is whole. Put back the folder `checkpoints` or model.safetensors."
        )
    check_ledger(ledger, sources)
    check_nodes(folder, sources)
    check_configuration(folder, ledger)
    store = store_of(folder)
    is_own = store is not None and _is_own_store(store, ledger)
    if population is not None:
        check_population(population, run_id(ledger), len(ledger), sources, is_known=is_own)
    # DP: the store's own record may have been put back to its first state; the checkpoints remember that it had a ledger.
    elif is_own and any(source.population_position is not None for source in sources):
        raise LedgerError(
            f"{store} has lost the ledger in which this run was charged: what its users have spent was recorded there. Put "
            "it back."
        )
    return ledger


def remembered(folder: RunFolder) -> list[Remembered]:
    """Read what the checkpoints (oldest first) and the released model of a folder remember of the ledgers.

    Raises:
        CheckpointCorrupt: One of the files cannot be read.
    """
    for _ in range(5):  # a trainer deletes its oldest checkpoint when it has saved a new one
        paths = sorted(folder.checkpoints.glob("round-*.safetensors"))
        paths += [folder.model] if os.path.lexists(folder.model) else []
        try:
            return [_remembered(path) for path in paths]
        except FileNotFoundError:
            continue
    raise CheckpointCorrupt(f"{folder.checkpoints} changes while it is read. Try again.")


def check_ledger(ledger: Ledger, sources: Iterable[Remembered]) -> None:
    """Check that a run's ledger holds what checkpoints and models remember of it.

    Args:
        ledger: The ledger of the run.
        sources: What `remembered` has read, oldest checkpoint first, the model last.

    Raises:
        LedgerError: The ledger was shortened, or is the ledger of another run.
    """
    is_held = False
    for source in sources:
        # DP: a ledger that was shortened or replaced would make released models look cheaper than they were.
        if source.length is not None and not ledger.contains(source.length, source.head or ""):
            if is_held:
                raise LedgerError(
                    f"{source.source} is of another run than the checkpoints and the ledger beside it: its cost is not in "
                    f"{ledger.path}. Put this run's own model back, or delete it: resuming the run writes it again."
                )
            raise LedgerError(
                f"{ledger.path} does not hold what was charged up to round {source.round}, as {source.source.name} remembers "
                "it: the ledger was shortened or replaced, or the file is of another run. Put the right one back; without it "
                "the cost of this model cannot be known."
            )
        entries = ledger.entries[: source.length]
        charged = {entry.round for entry in entries}
        charged |= {r for entry in entries if isinstance(entry.event, Selection) for r in range(entry.event.rounds)}
        # DP: each round that is in a model must have been charged before the model was saved.
        if missing := sorted(set(range(source.round)) - charged):
            raise LedgerError(
                f"{source.source.name} is of round {source.round}, but round {missing[0]} was never charged before it: "
                f"{ledger.path} was shortened or replaced. Put the right one back."
            )
        is_held = True


def check_nodes(folder: RunFolder, sources: Iterable[Remembered]) -> None:
    """Check that federated.json, which says whom the users of a run trust, is the one that the run began with.

    Raises:
        LedgerError: The file was changed, deleted or added.
    """
    known = {source.nodes for source in sources} - {"unknown"}
    # DP: with another file the statement would name another trust model than the run had.
    if known - {folder.nodes_digest()}:
        raise LedgerError(
            f"{folder.federated} is not as it was when the run began: the statement would be about other nodes and another "
            "server. Put back the file that the run has written; a run without nodes has none."
        )


def check_configuration(folder: RunFolder, ledger: Ledger) -> None:
    """Check that the run file of a folder has the configuration that the ledger names.

    Raises:
        LedgerError: The run file was changed or is of another run.
    """
    named = ledger.facts.get("run_hash")
    if is_alone(folder) or named is None:
        return
    # DP: another run's settings would be shown with this run's epsilon, and another store's ledger compared with it.
    if configuration_hash(_tables(folder)) != named:
        raise LedgerError(
            f"{folder.run_file} was changed after the run began, or is of another run: its ledger is for another "
            "configuration. Put back the run file that the run has written. Only rounds, checkpoints, the engine and the "
            "paths of the store, its ledger and the base model may change."
        )


def check_population(
    population: PopulationLedger, run: str, length: int, sources: Iterable[Remembered], *, is_known: bool = True
) -> None:
    """Compare a run with the ledger of its population, in both directions.

    Args:
        population: The population's ledger.
        run: The id of the run.
        length: The number of entries in the run's own ledger.
        sources: What the run's checkpoints remember.
        is_known: Whether `population` must be the ledger that the checkpoints remember. False where another ledger may
            be at its path by now, for example of a store that was prepared again; then it is compared if it lists the
            run.

    Raises:
        LedgerError: The population's ledger lacks charges that a checkpoint remembers, or it holds more charges of this
            run than the run's own ledger.
    """
    for source in sources:
        held = None if source.population_position is None else population.contains(source.population_position)
        is_missing = held is None and source.population_position is not None and is_known
        # DP: a shortened, replaced or newly begun ledger would make these users look less spent than they are.
        if held is False or is_missing:
            raise LedgerError(
                f"{population.path} does not hold what was charged up to {source.source.name}: it was shortened or "
                "replaced. Put the right one back, or name it ([privacy] ledger); without it what these users have spent "
                "cannot be known."
            )
    member = population.members.get(run)
    # DP: the population is charged first, so a crash leaves it one charge ahead and never more. A folder that was put
    # back to an earlier state would state an epsilon without the rounds that it has released meanwhile.
    if member is not None and member.held > length + 1 and not member.has_repeats:
        raise LedgerError(
            f"{population.path} holds {member.held} charges of this run, the run's own ledger {length}: the run folder was "
            "put back to an earlier state, or a copy of it was trained further. Put back the newest copy of the folder. If "
            "it is lost, begin a new run: these users stay charged for the lost rounds."
        )


def is_alone(folder: RunFolder) -> bool:
    """Whether a folder holds a ledger and no other file of a run, so that nothing can tell whether the ledger is whole."""
    others = (folder.run_file, folder.model, folder.checkpoints, folder.metrics, folder.statement, folder.vocabulary)
    return not any(os.path.lexists(path) for path in others)


def population_of(folder: RunFolder) -> PopulationLedger | None:
    """Open the ledger of the population in which a run is charged, as its run file names it.

    Returns:
        The ledger. None if the store is not on this machine, or if the folder holds a ledger and no run (`is_alone`).

    Raises:
        LedgerError: The run file is missing or damaged, or the store lacks a ledger in which it was charged.
    """
    if is_alone(folder):
        return None
    store, path = _store_and_ledger(folder)
    if path.is_file():
        return read_population_ledger(store, path)
    # DP: a store that is here and has lost its ledger may have been charged for more rounds of this run.
    if store.is_dir() and known_position(store, path) is not None:
        raise LedgerError(f"{path} is missing: what the users of {store} have spent was recorded there. Put it back.")
    return None


def store_of(folder: RunFolder) -> Path | None:
    """The folder of the run's store, as its run file names it; None if it is not on this machine."""
    if is_alone(folder):
        return None
    store, _ = _store_and_ledger(folder)
    return store if (store / "corpus.json").is_file() else None


def _is_own_store(store: Path, ledger: Ledger) -> bool:
    """Whether a store was prepared as the run's: at its path there may be another one by now, with other users."""
    return corpus_name(read_corpus_record(store)) == ledger.facts.get("corpus")


def _store_and_ledger(folder: RunFolder) -> tuple[Path, Path]:
    """The store of a run and the file of its population's ledger, as the run file names them."""
    try:
        tables = _tables(folder)
        store = Path(tables["corpus"]["path"])
        path = Path(tables.get("privacy", {}).get("ledger") or store / FILE)
        return store, path / FILE if path.is_dir() else path
    except (KeyError, TypeError, AttributeError):
        raise _no_run_file(folder) from None


def _tables(folder: RunFolder) -> dict[str, Any]:
    """The tables of the run file."""
    try:
        return parse_toml(folder.run_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # DP: without the run file nobody can find the population's ledger, which may hold more charges of this run.
        raise _no_run_file(folder) from None


def _no_run_file(folder: RunFolder) -> LedgerError:
    """The error of a folder whose run file does not name a store."""
    return LedgerError(
        f"{folder.run_file} is missing or damaged, so the ledger of the run's store cannot be compared with this one. "
        "Put back the run file that the run began with. For the statement of a ledger alone, copy ledger.jsonl to an "
        "empty folder."
    )


def _remembered(path: Path) -> Remembered:
    """Read what a file of the run remembers of the ledgers."""
    try:
        facts = read_facts(path)
        position = facts.get("people")
        if position is not None and set(position) != {"ledger", "length", "head"}:
            raise ValueError("unknown position")
        length, head = facts.get("ledger_length"), facts.get("ledger_head")
        return Remembered(
            source=path,
            round=int(facts.get("round", 0)),
            length=None if length is None else int(length),
            head=None if head is None else str(head),
            population_position=position,
            nodes=facts.get("nodes", "unknown"),
        )
    except (ValueError, TypeError):
        raise CheckpointCorrupt(not_written_by_unheard(path)) from None


def _repeated_facts(ledger: Ledger, name: str) -> dict[str, Any]:
    facts = ledger.facts
    return {"name": name, **{key: facts[key] for key in REPEATED_FACTS if key in facts}}
