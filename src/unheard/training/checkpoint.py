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
from unheard.runs import RunFolder, replace_file
from unheard.training.state import State


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A state, and what the ledger held when it was saved."""

    state: State
    ledger_length: int
    ledger_head: str


def save_checkpoint(folder: RunFolder, model: LanguageModel, state: State, ledger: Ledger, keep: int) -> Path:
    """Save the state and the released model; forget all but the newest `keep` checkpoints."""
    path = folder.checkpoints / f"round-{state.round:08d}.safetensors"
    tensors = {"params": state.params_P, **{f"server.{name}": t for name, t in state.server_memory.items()}}
    facts = {"round": state.round, "ledger_length": len(ledger), "ledger_head": ledger.head}
    _save(path, tensors, facts)
    save_model(folder.model, model, state.params_P, {"round": state.round})
    for old in sorted(folder.checkpoints.glob("round-*.safetensors"))[:-keep]:
        old.unlink(missing_ok=True)
    return path


def newest_checkpoint(folder: RunFolder) -> Checkpoint:
    """The newest state; every run has one from its beginning on."""
    paths = sorted(folder.checkpoints.glob("round-*.safetensors"))
    if not paths:
        raise CheckpointCorrupt(
            f"{folder.checkpoints} holds no checkpoint to go on from. Put one back, or begin a new run."
        )
    cure = "Delete it to resume from the one before (the rounds done again are charged again)."
    tensors, facts = _load(paths[-1], cure)
    try:
        state = State(
            round=int(facts["round"]),
            params_P=tensors.pop("params"),
            server_memory={name.removeprefix("server."): t for name, t in tensors.items()},
        )
        return Checkpoint(state=state, ledger_length=int(facts["ledger_length"]), ledger_head=facts["ledger_head"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointCorrupt(f"{paths[-1]} is not a checkpoint of this version. {cure}") from None


def save_model(path: Path, model: LanguageModel, params_P: Tensor, facts: dict[str, Any]) -> None:
    """A released model: one tensor for each layer, by name."""
    _save(path, model.layout.split(params_P), facts)


def load_model(path: Path, model: LanguageModel) -> Tensor:
    """params_P of a released model, checked against the model that it should fit."""
    tensors, _ = _load(path, "Give a model.safetensors that `unheard` wrote; resuming its run writes it again.")
    return model.layout.join(tensors)


def _save(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    # safetensors wants memory of its own for each tensor: layers are views of one vector.
    own = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    text = json.dumps(facts, sort_keys=True)
    replace_file(path, safetensors.torch.save(own, {"unheard": text, "sha256": _digest(own, text)}))


def _load(path: Path, cure: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:  # pyright: ignore[reportPrivateImportUsage]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            metadata = file.metadata() or {}
        text = metadata["unheard"]
        intact = metadata["sha256"] == _digest(tensors, text)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{path} is missing. {cure}") from None
    except (safetensors.SafetensorError, KeyError, OSError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read ({error}). {cure}") from None
    if not intact:
        raise CheckpointCorrupt(f"{path} does not read back as it was written. {cure}")
    return tensors, json.loads(text)


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
