"""Checkpoints and released models as safetensors files.

    save_checkpoint(folder, model, state, ledger, keep=2)     # also writes the released model
    checkpoint = newest_checkpoint(folder)                    # .state, .ledger_length, .ledger_head
    params_P = load_model(folder.model, model)                # a released model

A checkpoint holds the `State` after a round and the ledger position that the run had reached; the released model names
that position too. By the position a reader recognises a ledger that was shortened (`privacy/run_ledger.py`). A
checkpoint also holds the digest of the evaluations up to its round. Every file is replaced atomically and carries a
SHA-256 of its tensors and its facts, which is checked when it is read. Nothing is ever unpickled.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from unheard.errors import CheckpointCorrupt
from unheard.models.model import LanguageModel
from unheard.parameters import Layout
from unheard.privacy.ledger import Ledger
from unheard.privacy.run_ledger import JointLedger
from unheard.run_folder import RunFolder, replace_file
from unheard.training.round import State


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A state of training, and the positions of both ledgers when it was saved.

    A ledger that is shorter now, or has another history, is refused (`privacy/run_ledger.py`).
    """

    state: State
    ledger_length: int
    """Entries of the run's ledger."""
    ledger_head: str
    """The hash of its last line."""
    population_position: dict[str, Any] | None = None
    """The position of the population's ledger; None in a first checkpoint of version 0.1."""
    metrics: dict[str, Any] | None = None
    """The size and the SHA-256 of the evaluations (`RunFolder.metrics_digest`); None in checkpoints of older versions."""


def save_checkpoint(
    folder: RunFolder, model: LanguageModel, state: State, ledger: Ledger | JointLedger, keep: int
) -> Path:
    """Save the state and the model, delete all but the newest `keep` checkpoints, and return the new one's path.

    The digest of a model that was trained on the population is in the population's ledger before the model is on disk.

    Args:
        folder: The run folder.
        model: The model that the parameters belong to.
        state: What to save.
        ledger: The run's ledger, whose position is saved with the state.
        keep: How many checkpoints to keep.
    """
    path = folder.checkpoints / checkpoint_name(state.round)
    tensors = {"params": state.params_P, **{f"server.{name}": t for name, t in state.server_memory.items()}}
    released = {"round": state.round, "ledger_length": len(ledger), "ledger_head": ledger.head}
    facts: dict[str, Any] = {**released, "metrics": folder.metrics_digest(), "nodes": folder.nodes_digest()}
    if state.clip_norm is not None:
        facts["clip_norm"] = state.clip_norm
    if isinstance(ledger, JointLedger):
        # DP: recorded before it is written, so that no copy of the model can be taken for a public one.
        if state.round:
            ledger.record_release(parameters_digest(state.params_P))
        facts["people"] = ledger.position
        ledger.remember()
    _save(path, tensors, facts)
    # DP: the model names the ledger that it belongs to, also in a folder that is passed on without its checkpoints.
    save_model(folder.model, model, state.params_P, released)
    for old in checkpoint_files(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def restore_model(folder: RunFolder, model: LanguageModel, checkpoint: Checkpoint) -> None:
    """Write the released model again from the newest checkpoint, if it is missing or of an earlier round.

    A process that ends after it wrote a checkpoint and before it wrote the model leaves such a folder.
    """
    state = checkpoint.state
    if folder.model.exists() and released_model(folder.model, model)[1] >= state.round:
        return
    position = {"ledger_length": checkpoint.ledger_length, "ledger_head": checkpoint.ledger_head}
    save_model(folder.model, model, state.params_P, {"round": state.round, **position})


def newest_checkpoint(folder: RunFolder) -> Checkpoint:
    """The newest checkpoint. Every run folder has one from its creation on.

    Raises:
        CheckpointCorrupt: There is no checkpoint, or the newest one is damaged.
    """
    paths = checkpoint_files(folder)
    if not paths:
        raise CheckpointCorrupt(
            f"{folder.checkpoints} holds no checkpoint to resume from. Put one back, or begin a new run."
        )
    return read_checkpoint(paths[-1])


def checkpoint_files(folder: RunFolder) -> list[Path]:
    """The paths of all checkpoints, oldest first."""
    return sorted(folder.checkpoints.glob("round-*.safetensors"))


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint.

    Raises:
        CheckpointCorrupt: The file is missing, damaged, renamed or not a checkpoint.
    """
    remedy = "Delete it to resume from the one before (the rounds done again are charged again)."
    tensors, facts = _load(path, remedy)
    try:
        population_position, clip_norm, metrics = facts.get("people"), facts.get("clip_norm"), facts.get("metrics")
        if clip_norm is not None and not 0 < float(clip_norm) < float("inf"):
            raise ValueError
        state = State(
            round=int(facts["round"]),
            params_P=tensors.pop("params"),
            server_memory={name.removeprefix("server."): t for name, t in tensors.items()},
            clip_norm=None if clip_norm is None else float(clip_norm),
        )
        if (
            path.name != checkpoint_name(state.round)
            or state.params_P.ndim != 1
            or not (population_position is None or set(population_position) == {"ledger", "length", "head"})
            or not (metrics is None or (set(metrics) == {"bytes", "sha256"} and type(metrics["bytes"]) is int))
        ):
            raise ValueError
        return Checkpoint(
            state=state,
            ledger_length=int(facts["ledger_length"]),
            ledger_head=str(facts["ledger_head"]),
            population_position=population_position,
            metrics=metrics,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointCorrupt(
            f"{path} is not a checkpoint of this version, or has another's name. {remedy}"
        ) from None


def save_model(path: Path, model: LanguageModel, params_P: Tensor, facts: dict[str, Any]) -> None:
    """Write a model file: one tensor for each layer, by name."""
    _save(path, model.layout.split(params_P), {**facts, "names": list(model.layout.names)})


def load_model(path: Path, model: LanguageModel) -> Tensor:
    """The parameters of a model file as one vector.

    Args:
        path: A model.safetensors that Unheard wrote.
        model: The model whose layout the file must have.

    Raises:
        CheckpointCorrupt: The file is missing or damaged.
        ModelError: The file is of another model.
    """
    return released_model(path, model)[0]


def released_model(path: Path, model: LanguageModel) -> tuple[Tensor, int]:
    """The parameters of a released model, and the round after which it was released."""
    tensors, facts = _load(path, "Give a model.safetensors that `unheard` wrote; resuming its run writes it again.")
    return model.layout.join(tensors), int(facts.get("round", 0))


def recorded_layout(path: Path) -> Layout | None:
    """The layout of a model file, without its model; None for a file of a version before 0.2.0."""
    tensors, facts = _load(path, "Resuming its run writes it again.")
    names = facts.get("names")
    if not isinstance(names, list) or sorted(names) != sorted(tensors):
        return None
    return Layout.of({name: tensors[name] for name in names})


def parameters_digest(params_P: Tensor) -> str:
    """The SHA-256 of a model's parameters. It does not depend on the file that holds them."""
    return hashlib.sha256(params_P.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()


def checkpoint_name(round: int) -> str:
    """The file name of the checkpoint after a round."""
    return f"round-{round:08d}.safetensors"


def _save(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    # safetensors requires that tensors share no memory, and layers are views of one vector.
    own = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    # One metadata entry: safetensors writes several in a random order, and equal models should be equal files.
    metadata = json.dumps({"facts": facts, "sha256": _digest(own, facts)}, sort_keys=True)
    replace_file(path, safetensors.torch.save(own, {"unheard": metadata}))


def _load(path: Path, remedy: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and facts, and verify their digest."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:  # pyright: ignore[reportPrivateImportUsage]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = file.metadata() or {}
        written = json.loads(metadata["unheard"])
        facts = written["facts"]
        intact = written["sha256"] == _digest(tensors, facts)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{path} is missing. {remedy}") from None
    except (safetensors.SafetensorError, KeyError, OSError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read ({str(error)[:200]}). {remedy}") from None
    if not intact or not isinstance(facts, dict):
        raise CheckpointCorrupt(f"{path} does not read back as it was written. {remedy}")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise CheckpointCorrupt(f"{path}: '{name}' holds what is not a finite real number. {remedy}")
    return tensors, facts


def _digest(tensors: dict[str, Tensor], facts: dict[str, Any]) -> str:
    """Digest of the facts and of all tensors."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
