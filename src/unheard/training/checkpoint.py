"""Writes and reads checkpoints and released models, as safetensors files, and reads the words of a run folder.

    save_checkpoint(folder, model, state, ledger, keep=2)     # also writes the released model
    checkpoint = newest_checkpoint(folder)                    # .state, .ledger_length, .ledger_head
    params_P = load_model(folder.model, model)                # a released model
    vocabulary, tokens = read_words(folder, run, facts)       # compared with the ledger's header

A checkpoint holds the `State` after a round and the position of the ledger at that moment (its length and the hash of
its last line). The released model holds that position too. A reader compares it with the ledger and so detects a ledger
that was shortened (`privacy/run_ledger.py`). A checkpoint also holds the digest of the evaluations up to its round.
Every file is replaced atomically and carries a SHA-256 of its tensors and its facts, which is checked when the file is
read. Nothing is ever unpickled.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from unheard.config import read_json
from unheard.corpus.store import tokens_digest
from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import CheckpointCorrupt, CorpusError, InvalidValue, RunFolderError
from unheard.models.model import LanguageModel
from unheard.parameters import Layout
from unheard.privacy.ledger import Ledger
from unheard.privacy.run_ledger import JointLedger, earlier_models
from unheard.run_folder import RunFolder, checkpoint_files, replace_file
from unheard.training.round import State
from unheard.training.run import Run


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A state of training, and the positions of the run's and the population's ledger when it was saved.

    A run whose ledger is shorter now, or has a different history, cannot be resumed (`privacy/run_ledger.py`).
    """

    state: State
    ledger_length: int
    """The number of entries in the run's ledger."""
    ledger_head: str
    """The hash of the last line of the run's ledger."""
    population_position: dict[str, Any] | None = None
    """The position of the population's ledger; None if the checkpoint does not record it (early versions)."""
    metrics: dict[str, Any] | None = None
    """The size and the SHA-256 of the evaluations (`RunFolder.metrics_digest`); None in checkpoints of older versions."""


def save_checkpoint(
    folder: RunFolder, model: LanguageModel, state: State, ledger: Ledger | JointLedger, keep: int
) -> Path:
    """Save the state and the released model, and delete all checkpoints except the newest `keep`.

    The model's digest is written to the population's ledger before the model is written to disk.

    Args:
        folder: The run folder.
        model: The model that the parameters belong to.
        state: The state to save.
        ledger: The run's ledger, whose position is saved with the state.
        keep: How many checkpoints to keep.

    Returns:
        The path of the new checkpoint.
    """
    path = folder.checkpoints / checkpoint_name(state.round)
    tensors = {"params": state.params_P, **{f"server.{name}": t for name, t in state.server_memory.items()}}
    released = _released_facts(folder, ledger.facts, state.round, len(ledger), ledger.head)
    facts: dict[str, Any] = {**released, "metrics": folder.metrics_digest()}
    if state.clip_norm is not None:
        facts["clip_norm"] = state.clip_norm
    if isinstance(ledger, JointLedger):
        # DP: recorded before it is written, so that no copy of the model can be taken for a public one.
        if state.round:
            ledger.record_release(parameters_digest(state.params_P))
        facts["people"] = ledger.position  # the key of version 0.1 for the position of the population's ledger
        ledger.remember()
    _save(path, tensors, facts)
    # DP: the model names the ledger that it belongs to, also in a folder that is passed on without its checkpoints.
    save_model(folder.model, model, state.params_P, released)
    for old in checkpoint_files(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def restore_model(folder: RunFolder, model: LanguageModel, checkpoint: Checkpoint) -> None:
    """Write the released model again from a checkpoint, if the model is missing or belongs to an earlier round.

    This happens if a process was killed after it wrote the checkpoint and before it wrote the model.

    Args:
        folder: The run folder.
        model: The model of the run.
        checkpoint: The newest checkpoint of the folder.
    """
    state = checkpoint.state
    if folder.model.exists() and released_model(folder.model, model)[1] >= state.round:
        return
    position = (state.round, checkpoint.ledger_length, checkpoint.ledger_head)
    facts = _released_facts(folder, Ledger.read(folder.ledger).facts, *position)
    save_model(folder.model, model, state.params_P, facts)


def _released_facts(folder: RunFolder, header: Mapping[str, Any], round: int, length: int, head: str) -> dict[str, Any]:
    """Return what a released model states: its round, the position of the ledger, its nodes, and the models before it.

    Args:
        folder: The run folder.
        header: The header of the run's ledger.
        round: The number of rounds that the model was trained for.
        length: The number of entries in the run's ledger.
        head: The hash of the last line of the run's ledger.
    """
    position = {"round": round, "ledger_length": length, "ledger_head": head}
    # DP: the model is recognised by the models that it began from, also where its file lies alone; and another
    # federated.json in its folder would name another trust model.
    earlier = {"earlier": models} if (models := earlier_models(header)) else {}
    return {**position, "nodes": folder.nodes_digest(), **earlier}


def newest_checkpoint(folder: RunFolder) -> Checkpoint:
    """Read and verify the newest checkpoint. A run folder is created with a checkpoint of round 0.

    Raises:
        CheckpointCorrupt: There is no checkpoint, or the newest one is damaged.
    """
    paths = checkpoint_files(folder)
    if not paths:
        raise CheckpointCorrupt(
            f"{folder.checkpoints} holds no checkpoint to resume from. Put one back, or begin a new run."
        )
    return read_checkpoint(paths[-1])


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
        raise CheckpointCorrupt(f"{path} is not a checkpoint of this version, or was renamed. {remedy}") from None


def save_model(path: Path, model: LanguageModel, params_P: Tensor, facts: dict[str, Any]) -> None:
    """Write a model file.

    Args:
        path: The file to replace.
        model: The model, whose layout divides the parameters into one named tensor per layer.
        params_P: The parameters as one vector.
        facts: What the file states about the model: its round and the position of the ledger. Must be JSON.
    """
    _save(path, model.layout.split(params_P), {**facts, "names": list(model.layout.names)})


def load_model(path: Path, model: LanguageModel) -> Tensor:
    """Read a model file and return its parameters as one vector.

    Args:
        path: A model.safetensors that Unheard wrote.
        model: The model whose layout the file must have.

    Raises:
        CheckpointCorrupt: The file is missing or damaged.
        ModelError: The tensors in the file do not have the layout of `model`.
    """
    return released_model(path, model)[0]


def released_model(path: Path, model: LanguageModel) -> tuple[Tensor, int]:
    """Read a released model. Return its parameters as one vector, and the number of rounds that it was trained for.

    Raises:
        CheckpointCorrupt: The file is missing or damaged.
        ModelError: The tensors in the file do not have the layout of `model`.
    """
    tensors, facts = _load(path, "Give a model.safetensors that `unheard` wrote; resuming its run writes it again.")
    return model.layout.join(tensors), int(facts.get("round", 0))


def read_words(folder: RunFolder, run: Run, facts: Mapping[str, Any]) -> tuple[Vocabulary, dict[str, Any]]:
    """Read vocabulary.txt and tokens.json of a run folder, and compare them with the digests in the ledger's header.

    Args:
        folder: The run folder.
        run: The run, from its run file.
        facts: The header of the run's ledger.

    Returns:
        The vocabulary, and the record of the tokenizer for `tokenizer_from_table`. The record is empty if the folder has no
        tokens.json.

    Raises:
        RunFolderError: A file is missing, damaged or not the one that the run began with.
    """
    table = read_json(folder.tokens) if folder.tokens.exists() else {}
    if not isinstance(table, dict):
        raise RunFolderError(f"{folder.tokens} is damaged: copy it from the corpus.")
    try:
        vocabulary = Vocabulary.load(folder.vocabulary)
    except CorpusError as error:  # not an error of a store that may be on another machine
        raise RunFolderError(f"{error} Copy vocabulary.txt from the corpus.") from None
    except (OSError, InvalidValue) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RunFolderError(f"{folder.vocabulary} is damaged ({why}): copy it from the corpus.") from None
    named = {
        "vocabulary.txt": (facts.get("vocabulary") or {}).get("sha256"),
        "tokens.json": facts.get("tokens_sha256"),
    }
    read = {"vocabulary.txt": vocabulary.digest, "tokens.json": tokens_digest(table)}
    for name, digest in named.items():
        if digest not in (None, read[name]):  # None: an older version did not record this digest
            raise RunFolderError(
                f"{folder.path / name} is not the one that the run began with: copy it from the corpus."
            )
    if len(vocabulary) != run.model.vocabulary_size:
        raise RunFolderError(
            f"{folder.vocabulary} has {len(vocabulary)} words, the model {run.model.vocabulary_size} rows: "
            "copy it from the corpus."
        )
    return vocabulary, table


def recorded_layout(path: Path) -> Layout | None:
    """Return the layout that a model file records, or None if the file was written before version 0.2.0.

    Raises:
        CheckpointCorrupt: The file is missing or damaged.
    """
    tensors, facts = _load(path, "Resuming its run writes it again.")
    names = facts.get("names")
    if not isinstance(names, list) or sorted(names) != sorted(tensors):
        return None
    return Layout.of({name: tensors[name] for name in names})


def parameters_digest(params_P: Tensor) -> str:
    """Return the SHA-256 of a model's parameters as float32. It is the same for every file that holds them."""
    return hashlib.sha256(params_P.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()


def checkpoint_name(round: int) -> str:
    """Return the file name of the checkpoint after `round` rounds."""
    return f"round-{round:08d}.safetensors"


def _save(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    # Layers are views of one vector, and safetensors rejects tensors that share memory.
    own = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    # All metadata is one entry, because safetensors writes several entries in random order and the files of equal
    # models should be equal.
    metadata = json.dumps({"facts": facts, "sha256": _digest(own, facts)}, sort_keys=True)
    replace_file(path, safetensors.torch.save(own, {"unheard": metadata}))


def _load(path: Path, remedy: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and the facts of a file, and verify its digest.

    Args:
        path: The file.
        remedy: A sentence that says what to do about a file that cannot be used; every error message ends with it.

    Raises:
        CheckpointCorrupt: The file is missing or damaged, or a tensor has a value that is not a finite real number.
    """
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
            raise CheckpointCorrupt(f"{path}: '{name}' holds a value that is not a finite real number. {remedy}")
    return tensors, facts


def _digest(tensors: dict[str, Tensor], facts: dict[str, Any]) -> str:
    """Return the SHA-256 of the facts and of all tensors, independent of the order of the tensors."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
