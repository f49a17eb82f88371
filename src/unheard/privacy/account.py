"""Two ledgers charged as one: the run's own, which its statement is made from, and that of the people it learns from.

In: a run's ledger and the population's. Out: an object that training charges and saves as it would the run's ledger alone.
The population is charged first. A crash between the two lines leaves the people charged for a round that never began: too
much, never too little.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unheard.errors import LedgerError
from unheard.privacy.events import Event, from_record
from unheard.privacy.ledger import Entry, Ledger
from unheard.privacy.population import FILE, Population

TOLD = ("population", "delta", "randomness", "drop_duplicates")
"""What of a run's public facts the population's ledger repeats."""


class Account:
    """A run's ledger that also charges the run's population."""

    def __init__(self, ledger: Ledger, population: Population) -> None:
        self._ledger = ledger
        self.population = population
        self.run = run_id(ledger)
        if self.run not in population.members:  # the store was copied without its ledger, or this is another one
            came = {"came_with": len(ledger)} if len(ledger) else {}
            population.register(self.run, {**told(ledger, ledger.path.parent.name), **came}, held=0)
        population.settle(self.run, ledger.entries)

    @classmethod
    def begin(cls, ledger: Ledger, population: Population, name: str, parent: Ledger | None = None) -> None:
        """Enter a new run, whose ledger holds what was spent before it: the vocabulary and the run that it begins from."""
        if parent is not None:
            # DP: the earlier run had the same people, unless declared otherwise; on this very store it is charged already.
            population.register(run_id(parent), told(parent, parent.path.parent.name), held=0)
            population.settle(run_id(parent), parent.entries)
        population.register(run_id(ledger), told(ledger, name), held=len(ledger))

    def charge(self, event: Event, round: int) -> None:
        """Charge both, each on disk when this returns. Over the population's budget, neither is."""
        # DP: the people first: whatever happens next, their ledger never holds less than the run's.
        self.population.charge(self.run, len(self._ledger), event, round)
        self._ledger.charge(event, round)

    @property
    def facts(self) -> dict[str, Any]:
        return self._ledger.facts

    @property
    def entries(self) -> list[Entry]:
        return self._ledger.entries

    @property
    def events(self) -> list[Event]:
        return self._ledger.events

    @property
    def head(self) -> str:
        return self._ledger.head

    @property
    def position(self) -> dict[str, Any]:
        """Where the population's ledger stands; checkpoints remember it."""
        return self.population.position

    def __len__(self) -> int:
        return len(self._ledger)

    def contains(self, length: int, head: str) -> bool:
        return self._ledger.contains(length, head)


def new_run_id(reproducible: str | None = None) -> str:
    """A name that no other run has; of a seeded run, one that follows from its configuration, as all else does."""
    return secrets.token_hex(16) if reproducible is None else f"reproducible-{reproducible[:16]}"


def run_id(ledger: Ledger) -> str:
    """Of a run that was begun before runs had names: the hash of its ledger's first line."""
    return str(ledger.facts.get("run_id") or f"unnamed-{ledger.hash_at(0)[:32]}")


def told(ledger: Ledger, name: str) -> dict[str, Any]:
    facts = ledger.facts
    return {"name": name, **{key: facts[key] for key in TOLD if key in facts}}


def open_population(
    store: str | os.PathLike[str],
    corpus: str,
    vocabulary_events: Sequence[Mapping[str, Any]],
    ledger: str | os.PathLike[str] | None = None,
) -> Population:
    """The ledger of a store's people, in the store's folder or where the run file says; their vocabulary is charged once."""
    # DP: a part of a store has no ledger of its own: what was charged there would be missing in the people's.
    if ledger is None and (Path(store) / "part.json").is_file():
        raise LedgerError(
            f"{store} is a part of a store, and its people's ledger lies with the whole one. Name it: [privacy] ledger = the whole "
            "store's ledger.jsonl; or give the whole store as corpus.path, and the parts as engine.corpus_part."
        )
    place = Path(ledger) if ledger is not None else Path(store) / FILE
    if place.is_dir():
        place = place / FILE
    if ledger is not None:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError as trouble:
            raise LedgerError(
                f"[privacy] ledger = {str(place)!r} cannot be made ({trouble.strerror}). Choose another folder."
            ) from None
    population = Population.open(place, {"corpus": corpus})
    name = f"vocabulary-{corpus[:16]}"
    if vocabulary_events:
        population.register(name, {"name": "the private vocabulary"}, held=0)
        # DP: a vocabulary found in the users' own text was paid for by the same people, once for all runs.
        population.settle(name, [from_record(record) for record in vocabulary_events])
    return population
