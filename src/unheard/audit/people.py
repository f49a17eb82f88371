"""Do the people's own ledger and a run's agree: everything that the run was charged is charged to them too.

In: a run, its ledger, its checkpoints, and where the store lies. Out: a sentence, or what does not fit.
"""

from collections.abc import Sequence
from pathlib import Path

from unheard.audit.findings import Trouble, Unknown
from unheard.errors import UnheardError
from unheard.privacy.account import run_id
from unheard.privacy.ledger import Ledger
from unheard.privacy.population import FILE, Population
from unheard.training.checkpoint import Checkpoint
from unheard.training.run import Run


def check_people(run: Run, ledger: Ledger, checkpoints: Sequence[Checkpoint], corpus: str | Path | None = None) -> str:
    """The store may well be elsewhere: then this could not be checked, and says so."""
    place = Path(run.ledger) if run.ledger is not None else Path(corpus or run.corpus) / FILE
    place = place / FILE if place.is_dir() else place
    if not place.is_file():
        raise Unknown(f"not checked: the store's ledger is not at {place} (name the store with --corpus)")
    try:
        people = Population.read(place)
    except UnheardError as refusal:
        raise Trouble(f"the store's ledger cannot be believed: {refusal}") from None
    member = people.members.get(run_id(ledger))
    if member is None:
        raise Trouble(f"{people.path} knows nothing of this run: the store's people were not charged for it there.")
    if member.held < len(ledger):
        raise Trouble(
            f"{people.path} holds {member.held} of this run's {len(ledger)} charges: it was shortened or replaced."
        )
    for checkpoint in checkpoints:
        if checkpoint.people is not None and people.contains(checkpoint.people) is False:
            raise Trouble(
                f"{people.path} does not hold what it held at the checkpoint of round {checkpoint.state.round}: it was shortened."
            )
    return f"all charges of this run are in the store's ledger too, among those of {len(people.members)} runs"
