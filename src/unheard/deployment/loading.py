"""Whatever holds a finished model, opened for use: a run folder, an export, or somebody's personal model.

In: a path. Out: a LoadedModel model. An export is opened without torch.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unheard.deployment.device import is_export, open_export
from unheard.deployment.model import PERSONAL_RECORD, LoadedModel
from unheard.errors import LedgerError
from unheard.run_folder import RunFolder


def open_model(path: str | Path) -> LoadedModel:
    place = Path(path)
    if is_export(place):
        return open_export(place)
    if is_personal(place):
        from unheard.deployment.personalize import open_personal

        return open_personal(place)
    from unheard.deployment.step import stepper_for
    from unheard.training.released import Released

    released = Released.open(place)
    return LoadedModel(
        name=place.resolve().name,
        kind="run",
        stepper=stepper_for(released.run.model, released.params_P, released.run.evaluation.unroll),
        vocabulary=released.vocabulary,
        tokens=released.tokens,
        statement=run_statement(RunFolder.open(place)),
    )


def open_models(paths: Sequence[str | Path]) -> list[LoadedModel]:
    """Several at once, each with a name of its own: as much of its path as tells it from the others."""
    models, places = [open_model(path) for path in paths], [Path(path).resolve() for path in paths]
    names = [model.name for model in models]
    for depth in range(2, 12):
        if len(set(names)) == len(names):
            break
        names = ["/".join(place.parts[-depth:]) for place in places]
    return [replace(model, name=name) for model, name in zip(models, names, strict=True)]


def run_statement(folder: RunFolder) -> dict[str, Any]:
    """What the ledger says now. It must hold what the newest checkpoint cost: the statement may leave this machine."""
    from unheard.privacy.ledger import Ledger
    from unheard.privacy.statement import statement
    from unheard.training.checkpoint import newest_checkpoint

    ledger = Ledger.read(folder.ledger)
    if any(folder.checkpoints.glob("round-*.safetensors")):  # a folder may be published without them
        reached = newest_checkpoint(folder)
        # DP: a shortened ledger would send a model out with a smaller epsilon than it cost.
        if not ledger.contains(reached.ledger_length, reached.ledger_head):
            raise LedgerError(
                f"{folder.ledger} does not hold what its model cost: it was shortened or replaced. Put it back."
            )
    return statement(ledger.facts, ledger.entries)


def is_personal(path: Path) -> bool:
    """Whether `path` is the folder of a personal model."""
    return (path / PERSONAL_RECORD).is_file()
