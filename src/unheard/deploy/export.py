"""A released model for devices: one step as ONNX in float32 and int8, its words, and its statement, in a folder of their own.

In: a run folder. Out: an export folder (deploy/device.py lists it), checked against PyTorch before it appears. Nothing of the
users is in it: no ledger, no metrics, no checkpoint, no path of this machine. The privacy statement travels with it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.corpus.tokens import tokens_to_table
from unheard.deploy.checking import Agreement, Comparison
from unheard.deploy.device import FLOAT32, FORMAT, INSTALL, INT8, RECORD, OnnxSteps, digest
from unheard.deploy.finished import check_rows
from unheard.deploy.graph import step_graph
from unheard.deploy.opening import run_statement
from unheard.deploy.stepping import StepArrays, step_arrays
from unheard.errors import InvalidValue, ModelError
from unheard.runs import RunFolder, replace_file
from unheard.training.released import Released


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was made, and how well it agrees with what was trained."""

    path: Path
    sizes: dict[str, int]
    agreement: dict[str, Agreement]
    statement: dict[str, Any]
    parameters: int


def export(run: str | Path, out: str | Path, *, progress: Callable[[int, int], None] = lambda done, of: None) -> Export:
    """Write the export of a run's newest model. A float32 graph that does not predict what PyTorch predicts is never written."""
    _need_onnx()
    place = Path(out).resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise InvalidValue(f"{out} already holds something: choose another --out, or remove it first.")
    released = Released.open(run)
    check_rows(released.run.model.vocabulary_size, released.vocabulary, str(run))
    arrays = step_arrays(released.run.model, released.params_P)
    graphs = {FLOAT32: step_graph(arrays, int8=False), INT8: step_graph(arrays, int8=True)}
    steps = {name: OnnxSteps(graph) for name, graph in graphs.items()}
    agreement = Comparison(released.run.model, released.params_P, steps).run(progress)
    if not agreement[FLOAT32].is_equal:
        raise ModelError(
            f"The exported float32 model does not predict what {run} predicts: {agreement[FLOAT32].numbers()}. "
            "Nothing was written. Either the model holds numbers that are not finite, or this is a bug in the export."
        )
    statement = run_statement(RunFolder.open(run))
    files = {
        **graphs,
        "vocabulary.txt": RunFolder(Path(run)).vocabulary.read_bytes(),
        "tokens.json": _json(tokens_to_table(released.tokens)),
        "statement.json": _json(statement),
    }
    _write(place, {**files, RECORD: _json(_record(arrays, files, agreement))})
    return Export(
        path=Path(out),
        sizes={name: len(graph) for name, graph in graphs.items()},
        agreement=agreement,
        statement=statement,
        parameters=released.run.model.layout.total,
    )


def _record(arrays: StepArrays, files: dict[str, bytes], agreement: dict[str, Agreement]) -> dict[str, Any]:
    """export.json: enough to call the graph without reading our code."""
    return {
        "format": FORMAT,
        "what": "one step: feed a word's id and the states (zeros at first, with token 0, BOS); take logits and the next states",
        "cell": arrays.cell,
        "vocabulary_size": arrays.words_DV.shape[1],
        "embedding_size": arrays.words_DV.shape[0],
        "hidden_size": arrays.hidden_size,
        "user_features": arrays.user_features,
        "agreement_with_pytorch": {name: one.numbers() for name, one in agreement.items()},
        "files": {name: {"bytes": len(content), "sha256": digest(content)} for name, content in files.items()},
        "software": {"unheard": version("unheard"), "onnx": version("onnx"), "onnxruntime": version("onnxruntime")},
    }


def _write(place: Path, files: dict[str, bytes]) -> None:
    """Write all files or none."""
    with storage.staged_folder(place) as folder:
        folder.chmod(0o755)
        for name, content in files.items():
            replace_file(folder / name, content)


def _need_onnx() -> None:
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise ModelError(f"Exporting needs the package onnx, which is not here. {INSTALL}") from None


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, allow_nan=False).encode()
