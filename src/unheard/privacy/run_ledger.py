"""Charge the ledger of a run together with that of its population, and check the two against each other.

    JointLedger.register(ledger, population, name="first")  # a new run
    JointLedger(ledger, population).charge(event, round=0)  # training charges both; the population first
    ledger = read_run_ledger("runs/first")                  # `Ledger.read` and all checks; raises `LedgerError`

A ledger that was cut at the end of a line, or replaced by the ledger of another run, has a valid hash chain. The
checkpoints and the released model of a run therefore store the position of the run's ledger (its length and the hash of
its last line), and the population's ledger stores the number of charges of the run. If these disagree, the statement of
the run could have a smaller epsilon than the model has cost. All readers of a run's ledger use this module:

    check_ledger(ledger, saved_positions(folder))           # against the positions in the checkpoints and the model
    check_population(population, run_id(ledger), len(ledger), saved_positions(folder))

Input: a run folder, and the ledger of the population if it is at the path in the run file. Output: the run's ledger.
The module reads only the headers of model files, and needs no torch.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unheard.config import parse_toml
from unheard.errors import CheckpointCorrupt, LedgerError
from unheard.privacy.budget import EARLIER_RUN, PUBLIC_START, UNKNOWN_START
from unheard.privacy.events import Event, Selection
from unheard.privacy.ledger import Entry, Ledger, corpus_name, run_id
from unheard.privacy.population_ledger import (
    PopulationLedger,
    known_position,
    ledger_path,
    read_corpus_record,
    read_population_ledger,
)
from unheard.run_folder import RunFolder, checkpoint_files, configuration_hash, not_written_by_unheard, read_facts

REPEATED_FACTS = ("population", "delta", "randomness", "drop_duplicates", "synthetic", "declared")
"""The public facts of a run that are copied to the population's ledger, with the origin of its first model."""


class JointLedger:
    """A run's ledger and the ledger of its population, charged together. It has the interface of the run's ledger.

    The population is charged first. After a crash between the two charges the population is charged for a round that
    never began, so it can be charged too much but never too little.

    Args:
        ledger: The run's own ledger, open for charging.
        population: The ledger of the store's population. Charges of the run's ledger that are missing in it are added
            at once.
    """

    def __init__(self, ledger: Ledger, population: PopulationLedger) -> None:
        self._ledger = ledger
        self.population = population
        self.run = run_id(ledger)
        if self.run not in population.runs:  # the run began on another store, or before stores had ledgers
            came = {"came_with": len(ledger)} if len(ledger) else {}
            population.register(self.run, {**_repeated_facts(ledger, ledger.path.parent.name), **came}, num_charged=0)
        population.settle(self.run, ledger.entries)

    @staticmethod
    def register(
        ledger: Ledger,
        population: PopulationLedger,
        name: str,
        parent: Ledger | None = None,
        *,
        store: str | None = None,
    ) -> None:
        """Register a new run with the population.

        Args:
            ledger: The new run's ledger. It already has the charges before the run: the vocabulary and the parent run.
            population: The ledger of the store's population.
            name: The name of the run in statements.
            parent: The ledger of the run whose model this run begins from; None if there is no such run.
            store: The digest of the users' text. A resumed run checks that the store still has this digest. It makes
                the population's ledger as secret as the store.
        """
        if parent is not None:
            # DP: the earlier run had the same users, unless declared otherwise, so its charges belong here too.
            population.register(run_id(parent), _repeated_facts(parent, parent.path.parent.name), num_charged=0)
            population.settle(run_id(parent), parent.entries)
        facts = _repeated_facts(ledger, name) | ({} if store is None else {"store": store})
        population.register(run_id(ledger), facts, num_charged=len(ledger), is_new=True)

    def charge(self, event: Event, round: int, *, again: str | None = None, once: str | None = None) -> None:
        """Charge one event to both ledgers. Both entries are synced to disk when this returns.

        Args:
            event: What the round will do to the users' data.
            round: The number of the round, from 0.
            again: For correlated noise: the text `once` of the population's charge for this attempt, if the process was
                killed before it charged the run.
            once: For correlated noise: the text that names the attempt's key; None for a random text.

        Raises:
            BudgetExceeded: The event would exceed the population's budget. Neither ledger is charged.
            LedgerError: An entry could not be written. The caller must not release anything of the round.
        """
        # DP: the population is charged first, so that after a crash its ledger never has fewer charges of the run than
        # the run's own.
        self.population.charge(self.run, len(self._ledger), event, round, again=again, once=once)
        self._ledger.charge(event, round)

    def record_release(self, sha256: str) -> None:
        """Record in the population's ledger the digest of a model that the run is about to write."""
        self.population.record_release(self.run, sha256)

    def remember(self) -> None:
        """Record the position of the population's ledger in the store, so that a later cut is detected."""
        self.population.remember()

    @property
    def facts(self) -> dict[str, Any]:
        """The public facts of the run."""
        return self._ledger.facts

    @property
    def entries(self) -> list[Entry]:
        """The entries of the run's ledger, in order."""
        return self._ledger.entries

    @property
    def events(self) -> list[Event]:
        """The events of the run's ledger, in order."""
        return self._ledger.events

    @property
    def head(self) -> str:
        """The hash of the last line of the run's ledger."""
        return self._ledger.head

    @property
    def position(self) -> dict[str, Any]:
        """The position of the population's ledger, which checkpoints store."""
        return self.population.position

    def __len__(self) -> int:
        return len(self._ledger)

    def contains(self, length: int, head: str) -> bool:
        """Whether entry number `length` of the run's ledger has the hash `head`; see `Ledger.contains`."""
        return self._ledger.contains(length, head)


@dataclass(frozen=True, kw_only=True)
class SavedPosition:
    """The state of the ledgers when a checkpoint or the released model was saved, as stored in that file.

    Attributes:
        source: The checkpoint or model file, for error messages.
        round: The number of rounds after which the file was saved.
        length: The number of entries in the run's ledger; None in a model file of version 0.1.
        head: The hash of the last of these entries; None in a model file of version 0.1.
        population_position: The position of the population's ledger; None if the file does not have it.
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
    """Read the ledger of a run folder, and check that no entry is missing.

    The ledger must contain the positions that the checkpoints and the released model have stored. If the population's
    ledger is at the path in the run file, the run's ledger must also have the charges that the population's ledger has
    for this run.

    Args:
        folder: A run folder. If it has no file except a ledger, only the hash chain is checked, and the statement has a
            warning about it (`is_alone`).

    Raises:
        LedgerError: The ledger is missing, damaged, shortened, rolled back or belongs to another run; or the run's
            store is on this machine and has lost the ledger to which the run was charged.
        CheckpointCorrupt: A checkpoint or the model cannot be read.
        RunFolderError: Something in the folder is not a regular file.
    """
    folder = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))
    folder.check_files()
    # The run may be training meanwhile. Each file must contain what the files that were read before it say. All of them
    # only grow, so this order gives no false alarm: checkpoints, population's ledger, run's ledger.
    sources = saved_positions(folder)
    population = population_of(folder)
    ledger = Ledger.read(folder.ledger)
    if not sources and not is_alone(folder):
        raise LedgerError(
            f"{folder.path} has neither a checkpoint nor a model that records the length of its ledger, so it is unknown "
            "whether the ledger is complete. Put back the folder `checkpoints` or model.safetensors."
        )
    check_ledger(ledger, sources)
    check_nodes(folder, sources)
    check_configuration(folder, ledger)
    store = store_of(folder)
    is_own = store is not None and _is_own_store(store, ledger)
    if population is not None:
        check_population(population, run_id(ledger), len(ledger), sources, is_known=is_own)
    # DP: the record in the store may have been reset to its first state; the checkpoints show that the store had a
    # ledger.
    elif is_own and any(source.population_position is not None for source in sources):
        raise LedgerError(
            f"{store} has lost the ledger in which this run was charged: what its users have spent was recorded there. Put "
            "it back."
        )
    return ledger


def saved_positions(folder: RunFolder) -> list[SavedPosition]:
    """Read the ledger positions in the checkpoints (oldest first) and in the released model of a folder.

    Raises:
        CheckpointCorrupt: One of the files cannot be read.
    """
    for _ in range(5):  # training may delete its oldest checkpoint between the listing and the reading
        paths = checkpoint_files(folder)
        paths += [folder.model] if os.path.lexists(folder.model) else []
        try:
            return [_saved_position(path) for path in paths]
        except FileNotFoundError:
            continue
    raise CheckpointCorrupt(f"{folder.checkpoints} changes while it is read. Try again.")


def check_ledger(ledger: Ledger, sources: Iterable[SavedPosition]) -> None:
    """Check that a run's ledger contains the positions in its checkpoints and model, and a charge for every round.

    Args:
        ledger: The ledger of the run.
        sources: The result of `saved_positions`: the oldest checkpoint first, the model last.

    Raises:
        LedgerError: The ledger was shortened, or belongs to another run.
    """
    is_held = False
    for source in sources:
        # DP: a ledger that was shortened or replaced would make released models look cheaper than they were.
        if source.length is not None and not ledger.contains(source.length, source.head or ""):
            if is_held:
                raise LedgerError(
                    f"{source.source} is the model of another run, not of the checkpoints and the ledger in its folder: its "
                    f"cost is not in {ledger.path}. Put this run's own model back, or delete it: resuming the run writes it "
                    "again."
                )
            raise LedgerError(
                f"{ledger.path} does not contain the charges up to round {source.round} that {source.source.name} records: "
                "the ledger was shortened or replaced, or that file belongs to another run. Put the right one back; "
                "without it the cost of this model cannot be known."
            )
        entries = ledger.entries[: source.length]
        charged = {entry.round for entry in entries}
        selected = [entry.event.rounds for entry in entries if isinstance(entry.event, Selection)]
        charged |= set(range(min(max(selected, default=0), source.round)))
        # DP: each round that is in a model must have been charged before the model was saved.
        if missing := sorted(set(range(source.round)) - charged):
            raise LedgerError(
                f"{source.source.name} was saved after {source.round} rounds, but round {missing[0]} was never charged: "
                f"{ledger.path} was shortened or replaced. Put the right one back."
            )
        is_held = True


def check_nodes(folder: RunFolder, sources: Iterable[SavedPosition]) -> None:
    """Check that federated.json is unchanged since the run began. It says whom the users of the run trust.

    Args:
        folder: The run folder.
        sources: The result of `saved_positions`.

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
    """Check that the run file of a folder has the configuration whose hash is in the ledger's header.

    Raises:
        LedgerError: The run file was changed or belongs to another run.
    """
    named = ledger.facts.get("run_hash")
    if is_alone(folder) or named is None:
        return
    # DP: with another run file, other settings would be shown with this run's epsilon, and another store's ledger
    # compared.
    if configuration_hash(_tables(folder)) != named:
        raise LedgerError(
            f"{folder.run_file} was changed after the run began, or belongs to another run: the ledger is for another "
            "configuration. Put back the run file that the run has written. Only rounds, checkpoints, the engine and the "
            "paths of the store, its ledger and the base model may change."
        )


def check_population(
    population: PopulationLedger, run: str, length: int, sources: Iterable[SavedPosition], *, is_known: bool = True
) -> None:
    """Compare a run with the ledger of its population, in both directions.

    Args:
        population: The population's ledger.
        run: The id of the run.
        length: The number of entries in the run's own ledger.
        sources: The positions in the run's checkpoints, from `saved_positions`.
        is_known: Whether `population` must be the ledger whose position the checkpoints have. False if another ledger
            may be at its path by now, for example because the store was prepared again; a position of another ledger is
            then no error.

    Raises:
        LedgerError: The population's ledger does not contain the position in a checkpoint, or it has more charges of
            this run than the run's own ledger.
    """
    for source in sources:
        held = None if source.population_position is None else population.contains(source.population_position)
        is_missing = held is None and source.population_position is not None and is_known
        # DP: a shortened, replaced or newly created ledger would hide charges to these users.
        if held is False or is_missing:
            raise LedgerError(
                f"{population.path} does not hold what was charged up to {source.source.name}: it was shortened or "
                "replaced. Put the right one back, or name it ([privacy] ledger); without it what these users have spent "
                "cannot be known."
            )
    charged_run = population.runs.get(run)
    # DP: the population is charged first, so a crash leaves it one charge ahead and never more. The statement of a
    # folder that was restored to an earlier state would omit rounds that were released since.
    if charged_run is not None and charged_run.num_charged > length + 1 and not charged_run.has_repeats:
        raise LedgerError(
            f"{population.path} holds {charged_run.num_charged} charges of this run, the run's own ledger {length}: the run "
            "folder was put back to an earlier state, or a copy of it was trained further. Put back the newest copy of the "
            "folder. If it is lost, begin a new run: these users stay charged for the lost rounds."
        )


def is_alone(folder: RunFolder) -> bool:
    """Whether a folder has a ledger and no other file of a run. A cut at its end cannot be detected then."""
    others = (folder.run_file, folder.model, folder.checkpoints, folder.metrics, folder.statement, folder.vocabulary)
    return not any(os.path.lexists(path) for path in others)


def population_of(folder: RunFolder) -> PopulationLedger | None:
    """Read the ledger of a run's population, from the path in the run file.

    Returns:
        The ledger. None if it is not on this machine, or if the folder has nothing but the run's ledger (`is_alone`).

    Raises:
        LedgerError: The run file is missing or damaged, or the store is here and has lost its ledger.
    """
    if is_alone(folder):
        return None
    store, path = _store_and_ledger(folder)
    if path.is_file():
        return read_population_ledger(store, path)
    # DP: a store that is here and has lost its ledger may have had more charges of this run.
    if store.is_dir() and known_position(store, path) is not None:
        raise LedgerError(f"{path} is missing: what the users of {store} have spent was recorded there. Put it back.")
    return None


def store_of(folder: RunFolder) -> Path | None:
    """Return the folder of the run's store, from the run file; None if the store is not on this machine."""
    if is_alone(folder):
        return None
    store, _ = _store_and_ledger(folder)
    return store if (store / "corpus.json").is_file() else None


def _is_own_store(store: Path, ledger: Ledger) -> bool:
    """Whether a store is the one that the run was trained on. Another store may be at its path by now."""
    return corpus_name(read_corpus_record(store)) == ledger.facts.get("corpus")


def _store_and_ledger(folder: RunFolder) -> tuple[Path, Path]:
    """Return the path of a run's store and the file of its population's ledger, from the run file."""
    try:
        tables = _tables(folder)
        store = Path(tables["corpus"]["path"])
        return store, ledger_path(store, tables.get("privacy", {}).get("ledger") or None)
    except (KeyError, TypeError, AttributeError):
        raise _no_run_file(folder) from None


def _tables(folder: RunFolder) -> dict[str, Any]:
    """Return the tables of the run file. Raises `LedgerError` if it is missing or damaged."""
    try:
        return parse_toml(folder.run_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # DP: without the run file nobody can find the population's ledger, which may hold more charges of this run.
        raise _no_run_file(folder) from None


def _no_run_file(folder: RunFolder) -> LedgerError:
    """Return the error for a folder whose run file is missing, damaged or names no store."""
    return LedgerError(
        f"{folder.run_file} is missing or damaged, so the ledger of the run's store cannot be compared with this one. "
        "Put back the run file that the run began with. For the statement of a ledger alone, copy ledger.jsonl to an "
        "empty folder."
    )


def _saved_position(path: Path) -> SavedPosition:
    """Read the ledger positions that are stored in one checkpoint or model file."""
    try:
        facts = read_facts(path)
        position = facts.get("people")  # the key of version 0.1 for the position of the population's ledger
        if position is not None and set(position) != {"ledger", "length", "head"}:
            raise ValueError("unknown position")
        length, head = facts.get("ledger_length"), facts.get("ledger_head")
        return SavedPosition(
            source=path,
            round=int(facts.get("round", 0)),
            length=None if length is None else int(length),
            head=None if head is None else str(head),
            population_position=position,
            nodes=facts.get("nodes", "unknown"),
        )
    except (ValueError, TypeError):
        raise CheckpointCorrupt(not_written_by_unheard(path)) from None


def earlier_models(facts: Mapping[str, Any]) -> list[str]:
    """Return the digests of the models from which a run and the runs before it began.

    The initial weights of a seed are not among them: many runs share them.

    Args:
        facts: The header of the run's ledger.
    """
    start = facts.get("start") or {}
    is_trained = start.get("from") in (EARLIER_RUN, PUBLIC_START, UNKNOWN_START)
    named = [start.get("sha256") if is_trained else None, start.get("base_sha256"), *start.get("earlier", [])]
    return [digest for digest in named if digest]


def _repeated_facts(ledger: Ledger, name: str) -> dict[str, Any]:
    facts = ledger.facts
    start = {key: value for key, value in facts.get("start", {}).items() if key in ("from", "base", "synthetic")}
    return {"name": name, **{key: facts[key] for key in REPEATED_FACTS if key in facts}, "start": start}
