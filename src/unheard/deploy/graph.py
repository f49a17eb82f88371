"""One step of the model as an ONNX graph: a word and a state in, scores and the next state out.

In: the arrays of a step. Out: a ModelProto's bytes, in float32, or with every matrix in int8 and a scale for each of its columns
(weight-only: what is computed stays float32). The word vectors are stored once, as columns, and serve as input and as output.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unheard.deploy.stepping import STATES, StepArrays

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
