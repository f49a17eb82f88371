"""A released model for devices: one step as ONNX in float32 and int8, its words, and its statement, in a folder of their own.

In: a run folder. Out: an export folder (deployment/device.py lists it), checked against PyTorch before it appears. Nothing of the
users is in it: no ledger, no metrics, no checkpoint, no path of this machine. The privacy statement travels with it.
One step of the model as an ONNX graph: a word and a state in, scores and the next state out.

In: the arrays of a step. Out: a ModelProto's bytes, in float32, or with every matrix in int8 and a scale for each of its columns
(weight-only: what is computed stays float32). The word vectors are stored once, as columns, and serve as input and as output.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from unheard import storage
from unheard.corpus.tokenizers import tokenizer_to_table
from unheard.deployment.device import FLOAT32, FORMAT, INSTALL, INT8, RECORD, OnnxStepper, digest
from unheard.deployment.loading import run_statement
from unheard.deployment.model import check_rows
from unheard.deployment.parity import Agreement, ParityCheck
from unheard.deployment.step import STATES, StepArrays, step_arrays
from unheard.errors import InvalidValue, ModelError
from unheard.run_folder import RunFolder, replace_file
from unheard.training.released import Released

OPSET, IR_VERSION = 17, 8
"""Of 2022: every onnxruntime since 1.12 reads it, on phones too."""


def step_graph(arrays: StepArrays, *, int8: bool) -> bytes:
    """Inputs `token` [N], `state` [N, H] (and `cell`, `features` [N, F]); outputs `logits` [N, V], `next_state` (`next_cell`)."""
    from onnx import TensorProto, checker, helper

    draft = _Draft(int8=int8)
    states = STATES[arrays.cell]
    words_DV = draft.matrix("words", arrays.words_DV)
    tied = arrays.output_DV is arrays.words_DV
    output_DV = words_DV if tied else draft.matrix("output_words", arrays.output_DV)
    input_NX = draft.columns(words_DV, "token")
    if arrays.user_features:
        input_NX = draft.add("Concat", input_NX, "features", axis=1)
    from_input_NG = draft.product(input_NX, draft.matrix("from_input", arrays.from_input_XG))
    from_input_NG = draft.add("Add", from_input_NG, draft.constant("bias", arrays.bias_G))
    from_state_NG = draft.product("state", draft.matrix("from_state", arrays.from_state_HG))
    (_lstm if arrays.cell == "lstm" else _gru)(draft, from_input_NG, from_state_NG)
    hidden_ND = draft.product("next_state", draft.matrix("projection", arrays.projection_HD))
    hidden_ND = draft.add("Add", hidden_ND, draft.constant("projection_bias", arrays.projection_bias_D))
    draft.product(hidden_ND, output_DV, out="logits")

    H, V, F = arrays.hidden_size, arrays.words_DV.shape[1], arrays.user_features
    info = helper.make_tensor_value_info
    inputs = [info("token", TensorProto.INT64, ["N"])] + [info(s, TensorProto.FLOAT, ["N", H]) for s in states]
    inputs += [info("features", TensorProto.FLOAT, ["N", F])] if F else []
    outputs = [info("logits", TensorProto.FLOAT, ["N", V])]
    outputs += [info(f"next_{s}", TensorProto.FLOAT, ["N", H]) for s in states]
    graph = helper.make_graph(draft.nodes, "next word", inputs, outputs, draft.tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="unheard")
    model.ir_version = IR_VERSION
    checker.check_model(model, full_check=True)
    return model.SerializeToString(deterministic=True)


def in_int8(matrix_RC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers from -127 to 127, and for each column what one of them is worth: the rounding is at most half of that."""
    scale_C = np.maximum(np.abs(matrix_RC).max(axis=0) / 127, np.float32(1e-12)).astype(np.float32)
    return np.rint(matrix_RC / scale_C).clip(-127, 127).astype(np.int8), scale_C


@dataclass(frozen=True)
class _Draft:
    """A graph being written: nodes in order, stored tensors, and names for what is between them."""

    int8: bool
    nodes: list[Any] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)

    def add(self, op: str, *inputs: str, out: str | tuple[str, ...] = "", **attributes: Any) -> str:
        from onnx import helper

        outs = [out] if isinstance(out, str) else list(out)
        outs[0] = outs[0] or f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, outs, **attributes))
        return outs[0]

    def constant(self, name: str, array: np.ndarray) -> str:
        from onnx import numpy_helper

        self.tensors.append(numpy_helper.from_array(array, name))
        return name

    def matrix(self, name: str, matrix_RC: np.ndarray) -> str:
        """Store a matrix in the draft's precision; `columns` and `product` know how to read it."""
        if not self.int8:
            return self.constant(name, matrix_RC)
        whole_RC, scale_C = in_int8(matrix_RC)
        self.constant(f"{name}_scale", scale_C)
        return self.constant(name, whole_RC)

    def columns(self, matrix: str, numbers_N: str) -> str:
        """The columns with these numbers, as rows [N, R]."""
        found_RN = self.add("Gather", matrix, numbers_N, axis=1)
        if self.int8:
            scale_N = self.add("Gather", f"{matrix}_scale", numbers_N, axis=0)
            found_RN = self.add("Mul", self.add("Cast", found_RN, to=1), scale_N)
        return self.add("Transpose", found_RN, perm=[1, 0])

    def product(self, rows_NR: str, matrix: str, out: str = "") -> str:
        """rows @ matrix. A column's scale is one factor of its whole sum, so it is applied to the N sums, not to the R weights."""
        if not self.int8:
            return self.add("MatMul", rows_NR, matrix, out=out)
        sums_NC = self.add("MatMul", rows_NR, self.add("Cast", matrix, to=1))
        return self.add("Mul", sums_NC, f"{matrix}_scale", out=out)


def _lstm(draft: _Draft, from_input_NG: str, from_state_NG: str) -> None:
    gates = draft.add("Add", from_input_NG, from_state_NG)
    draft.add("Split", gates, out=("i", "f", "g", "o"), axis=1)
    remembered = draft.add("Mul", draft.add("Sigmoid", "f"), "cell")
    added = draft.add("Mul", draft.add("Sigmoid", "i"), draft.add("Tanh", "g"))
    draft.add("Add", remembered, added, out="next_cell")
    draft.add("Mul", draft.add("Sigmoid", "o"), draft.add("Tanh", "next_cell"), out="next_state")


def _gru(draft: _Draft, from_input_NG: str, from_state_NG: str) -> None:
    draft.add("Split", from_input_NG, out=("input_r", "input_z", "input_n"), axis=1)
    draft.add("Split", from_state_NG, out=("state_r", "state_z", "state_n"), axis=1)
    reset = draft.add("Sigmoid", draft.add("Add", "input_r", "state_r"))
    keep = draft.add("Sigmoid", draft.add("Add", "input_z", "state_z"))
    new = draft.add("Tanh", draft.add("Add", "input_n", draft.add("Mul", reset, "state_n")))
    # (1 - keep) * new + keep * state, in one product less
    moved = draft.add("Mul", keep, draft.add("Sub", "state", new))
    draft.add("Add", new, moved, out="next_state")


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
    steps = {name: OnnxStepper(graph) for name, graph in graphs.items()}
    agreement = ParityCheck(released.run.model, released.params_P, steps).run(progress)
    if not agreement[FLOAT32].is_equal:
        raise ModelError(
            f"The exported float32 model does not predict what {run} predicts: {agreement[FLOAT32].numbers()}. "
            "Nothing was written. Either the model holds numbers that are not finite, or this is a bug in the export."
        )
    statement = run_statement(RunFolder.open(run))
    files = {
        **graphs,
        "vocabulary.txt": RunFolder(Path(run)).vocabulary.read_bytes(),
        "tokens.json": _json(tokenizer_to_table(released.tokens)),
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
