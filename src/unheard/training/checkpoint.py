"""States on disk: safetensors, each written whole or not at all, with the ledger position that it had reached.

In: a State and the ledger. Out: files to resume from; on the way back every byte is checked. Nothing is ever unpickled.
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
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import JointLedger
from unheard.run_folder import RunFolder, replace_file
from unheard.training.server import State


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A state, and what the ledger held when it was saved."""

    state: State
    ledger_length: int
    ledger_head: str
    population_position: dict[str, Any] | None = None
    """Where the ledger of the store's people stood, for a run that is charged to one."""


def save_checkpoint(
    folder: RunFolder, model: LanguageModel, state: State, ledger: Ledger | JointLedger, keep: int
) -> Path:
    """Save the state and the released model; forget all but the newest `keep` checkpoints."""
    path = folder.checkpoints / _name(state.round)
    tensors = {"params": state.params_P, **{f"server.{name}": t for name, t in state.server_memory.items()}}
    facts: dict[str, Any] = {"round": state.round, "ledger_length": len(ledger), "ledger_head": ledger.head}
    if state.clip_norm is not None:
        facts["clip_norm"] = state.clip_norm
    if isinstance(ledger, JointLedger):
        facts["people"] = ledger.position
    _save(path, tensors, facts)
    save_model(folder.model, model, state.params_P, {"round": state.round})
    for old in checkpoint_files(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def newest_checkpoint(folder: RunFolder) -> Checkpoint:
    """The newest state; every run has one from its beginning on."""
    paths = checkpoint_files(folder)
    if not paths:
        raise CheckpointCorrupt(
            f"{folder.checkpoints} holds no checkpoint to go on from. Put one back, or begin a new run."
        )
    return read_checkpoint(paths[-1])


def checkpoint_files(folder: RunFolder) -> list[Path]:
    """Oldest first."""
    return sorted(folder.checkpoints.glob("round-*.safetensors"))


def read_checkpoint(path: Path) -> Checkpoint:
    """One checkpoint, every byte of it checked."""
    cure = "Delete it to resume from the one before (the rounds done again are charged again)."
    tensors, facts = _load(path, cure)
    try:
        population_position, clip_norm = facts.get("people"), facts.get("clip_norm")
        if clip_norm is not None and not 0 < float(clip_norm) < float("inf"):
            raise ValueError
        state = State(
            round=int(facts["round"]),
            params_P=tensors.pop("params"),
            server_memory={name.removeprefix("server."): t for name, t in tensors.items()},
            clip_norm=None if clip_norm is None else float(clip_norm),
        )
        if (
            path.name != _name(state.round)
            or state.params_P.ndim != 1
            or not (population_position is None or set(population_position) == {"ledger", "length", "head"})
        ):
            raise ValueError
        return Checkpoint(
            state=state,
            ledger_length=int(facts["ledger_length"]),
            ledger_head=str(facts["ledger_head"]),
            population_position=population_position,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointCorrupt(f"{path} is not a checkpoint of this version, or has another's name. {cure}") from None


def save_model(path: Path, model: LanguageModel, params_P: Tensor, facts: dict[str, Any]) -> None:
    """A released model: one tensor for each layer, by name."""
    _save(path, model.layout.split(params_P), facts)


def load_model(path: Path, model: LanguageModel) -> Tensor:
    """params_P of a released model, checked against the model that it should fit."""
    return released_model(path, model)[0]


def released_model(path: Path, model: LanguageModel) -> tuple[Tensor, int]:
    """params_P of a released model, and the round after which it was released."""
    tensors, facts = _load(path, "Give a model.safetensors that `unheard` wrote; resuming its run writes it again.")
    return model.layout.join(tensors), int(facts.get("round", 0))


def _name(round: int) -> str:
    return f"round-{round:08d}.safetensors"


def _save(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    # safetensors wants memory of its own for each tensor: layers are views of one vector.
    own = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    # One entry: safetensors writes several in an order of chance, and equal models should be equal files.
    told = json.dumps({"facts": facts, "sha256": _digest(own, facts)}, sort_keys=True)
    replace_file(path, safetensors.torch.save(own, {"unheard": told}))


def _load(path: Path, cure: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:  # pyright: ignore[reportPrivateImportUsage]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = file.metadata() or {}
        told = json.loads(metadata["unheard"])
        facts = told["facts"]
        intact = told["sha256"] == _digest(tensors, facts)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{path} is missing. {cure}") from None
    except (safetensors.SafetensorError, KeyError, OSError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read ({str(error)[:200]}). {cure}") from None
    if not intact or not isinstance(facts, dict):
        raise CheckpointCorrupt(f"{path} does not read back as it was written. {cure}")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise CheckpointCorrupt(f"{path}: '{name}' holds what is not a finite real number. {cure}")
    return tensors, facts


def _digest(tensors: dict[str, Tensor], facts: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
