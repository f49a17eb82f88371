"""Open a trained model for use from a run folder, an export or a personal model.

    model = open_model("runs/private")
    models = open_models(["runs/plain", "runs/private"])         # with distinct names

An export is opened without importing torch.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unheard.deployment.device import is_export, open_export
from unheard.deployment.model import PERSONAL_RECORD, LoadedModel
from unheard.run_folder import RunFolder


def open_model(path: str | Path) -> LoadedModel:
    """Open a model for prediction.

    Args:
        path: A run folder (its newest model), an export folder, a `.onnx` file of an export, or a personal model.

    Raises:
        RunFolderError: The path is none of these, or a personal model is damaged.
        ModelError: An export is damaged.
        LedgerError: The ledger of a run does not contain what its newest model cost.
    """
    path = Path(path)
    if is_export(path):
        return open_export(path)
    if is_personal(path):
        from unheard.deployment.personalize import open_personal

        return open_personal(path)
    from unheard.deployment.step import stepper_for
    from unheard.training.released import Released

    released = Released.open(path)
    return LoadedModel(
        name=path.resolve().name,
        kind="run",
        stepper=stepper_for(released.run.model, released.params_P, released.run.evaluation.unroll),
        vocabulary=released.vocabulary,
        tokenizer=released.tokens,
        statement=run_statement(RunFolder.open(path)),
    )


def open_models(paths: Sequence[str | Path]) -> list[LoadedModel]:
    """Open several models. If two have the same name, parent folders are added until the names differ."""
    models, folders = [open_model(path) for path in paths], [Path(path).resolve() for path in paths]
    names = [model.name for model in models]
    for depth in range(2, 12):
        if len(set(names)) == len(names):
            break
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
    return [replace(model, name=name) for model, name in zip(models, names, strict=True)]


def is_personal(path: Path) -> bool:
    """Whether `path` is the folder of a personal model."""
    return (path / PERSONAL_RECORD).is_file()


def run_statement(folder: RunFolder) -> dict[str, Any]:
    """Compute the privacy statement that accompanies a run's model to other machines.

    Raises:
        LedgerError: The ledger is damaged, or does not contain the rounds that the newest checkpoint was charged for.
    """
    from unheard.privacy.run_ledger import read_run_ledger
    from unheard.privacy.statement import compute_statement

    # DP: with a shortened ledger a model would be released with a smaller epsilon than it cost.
    ledger = read_run_ledger(folder)
    return compute_statement(ledger.facts, ledger.entries)
