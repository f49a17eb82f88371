"""Export the model of a run for devices: as an ONNX graph, in float32 and int8, with vocabulary and privacy statement.

    result = export("runs/private", "export")
    result.sizes                            # {'model.onnx': 5438123, 'model.int8.onnx': 1412345}
    result.agreement["model.onnx"].is_equal

Before the export is written, `ParityCheck` compares its graphs with PyTorch on 10,240 contexts. The contexts are
sampled from the model itself, so no user's text is read. The folder appears complete or not at all; `model.py` lists
its files. It contains no data of users (no ledger, no metrics, no checkpoint) and no path of this machine.

A graph computes one step of the model: its inputs are a word and a state, its outputs are scores and the next state. In
the int8 graph every matrix is stored as int8 with one scale per column, and computed in float32. A tied model stores
its word vectors once, for input and output.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unheard import storage
from unheard.corpus.tokenizers import tokenizer_to_table
from unheard.corpus.vocabulary import BOS, UNK
from unheard.deployment.model import (
    FLOAT32,
    FORMAT,
    INSTALL,
    INT8,
    RECORD,
    OnnxStepper,
    digest,
    run_statement,
)
from unheard.deployment.step import STATES, StepArrays, step_arrays
from unheard.errors import InvalidValue, ModelError
from unheard.models.model import LanguageModel, unknown_features
from unheard.randomness import reproducible_generator
from unheard.run_folder import RunFolder, replace_file
from unheard.training.released import Released

logger = logging.getLogger("unheard.deployment")

OPSET, IR_VERSION = 17, 8
"""The versions of the ONNX operators and file format. They are from 2022, so onnxruntime 1.12 and later reads them."""

TEXTS, LENGTH, AT_ONCE = 256, 40, 16
"""The comparison with PyTorch uses 256 texts of 40 words each, 16 texts at a time."""
CONTEXTS = TEXTS * LENGTH
"""The number of contexts that are compared: every prefix of every text."""
ROUNDING = 1e-4
"""The difference between two scores that counts as rounding in float32, relative to the largest score.

A recurrent model amplifies rounding errors from word to word. Therefore `ParityCheck` adds eight times the difference
between the model's own scores in float32 and in float64.
"""


def step_graph(arrays: StepArrays, *, int8: bool) -> bytes:
    """Build the ONNX graph of one step for N texts.

    The inputs are `token` [N], `state` [N, H], `cell` [N, H] for an LSTM, and `features` [N, F] for a model with user
    features. The outputs are `logits` [N, V], `next_state` [N, H], and `next_cell` [N, H] for an LSTM.

    Args:
        arrays: The parameters.
        int8: Whether to store the matrices as int8.

    Returns:
        The content of a `.onnx` file. The same parameters give the same bytes.
    """
    from onnx import TensorProto, checker, helper

    builder = _GraphBuilder(int8=int8)
    states = STATES[arrays.cell]
    words_DV = builder.matrix("words", arrays.words_DV)
    tied = arrays.output_DV is arrays.words_DV
    output_DV = words_DV if tied else builder.matrix("output_words", arrays.output_DV)
    input_NX = builder.columns(words_DV, "token")
    if arrays.user_features:
        input_NX = builder.add("Concat", input_NX, "features", axis=1)
    from_input_NG = builder.product(input_NX, builder.matrix("from_input", arrays.from_input_XG))
    from_input_NG = builder.add("Add", from_input_NG, builder.constant("bias", arrays.bias_G))
    from_state_NG = builder.product("state", builder.matrix("from_state", arrays.from_state_HG))
    (_lstm if arrays.cell == "lstm" else _gru)(builder, from_input_NG, from_state_NG)
    hidden_ND = builder.product("next_state", builder.matrix("projection", arrays.projection_HD))
    hidden_ND = builder.add("Add", hidden_ND, builder.constant("projection_bias", arrays.projection_bias_D))
    builder.product(hidden_ND, output_DV, out="logits")

    H, V, F = arrays.hidden_size, arrays.words_DV.shape[1], arrays.user_features
    info = helper.make_tensor_value_info
    inputs = [info("token", TensorProto.INT64, ["N"])] + [info(s, TensorProto.FLOAT, ["N", H]) for s in states]
    inputs += [info("features", TensorProto.FLOAT, ["N", F])] if F else []
    outputs = [info("logits", TensorProto.FLOAT, ["N", V])]
    outputs += [info(f"next_{s}", TensorProto.FLOAT, ["N", H]) for s in states]
    graph = helper.make_graph(builder.nodes, "next word", inputs, outputs, builder.tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="unheard")
    model.ir_version = IR_VERSION
    checker.check_model(model, full_check=True)
    return model.SerializeToString(deterministic=True)


def in_int8(matrix_RC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise a matrix to int8, with one scale per column.

    Returns:
        Integers from -127 to 127, and the scale of each column. Their product differs from the matrix by at most half
        the scale of the column.
    """
    scale_C = np.maximum(np.abs(matrix_RC).max(axis=0) / 127, np.float32(1e-12)).astype(np.float32)
    return np.rint(matrix_RC / scale_C).clip(-127, 127).astype(np.int8), scale_C


@dataclass(frozen=True)
class _GraphBuilder:
    """An ONNX graph under construction: its nodes in order, and the tensors that are stored in the file.

    The methods take and return names of nodes and tensors, since an ONNX graph refers to values by name.
    """

    int8: bool
    nodes: list[Any] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)

    def add(self, op: str, *inputs: str, out: str | tuple[str, ...] = "", **attributes: Any) -> str:
        """Add a node and return the name of its first output.

        Args:
            op: The ONNX operator.
            inputs: The names of the inputs.
            out: The names of the outputs. By default a new name for one output.
            attributes: The attributes of the operator.
        """
        from onnx import helper

        outs = [out] if isinstance(out, str) else list(out)
        outs[0] = outs[0] or f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, outs, **attributes))
        return outs[0]

    def constant(self, name: str, array: np.ndarray) -> str:
        """Store a tensor in the file and return its name."""
        from onnx import numpy_helper

        self.tensors.append(numpy_helper.from_array(array, name))
        return name

    def matrix(self, name: str, matrix_RC: np.ndarray) -> str:
        """Store a matrix in float32 or int8 and return its name, which `columns` and `product` accept."""
        if not self.int8:
            return self.constant(name, matrix_RC)
        whole_RC, scale_C = in_int8(matrix_RC)
        self.constant(f"{name}_scale", scale_C)
        return self.constant(name, whole_RC)

    def columns(self, matrix: str, numbers_N: str) -> str:
        """Add nodes that select columns of a stored matrix, and return the name of the result, of shape [N, R].

        Args:
            matrix: The name of a stored matrix, of shape [R, C].
            numbers_N: The name of the tensor with the numbers of the columns.
        """
        columns_RN = self.add("Gather", matrix, numbers_N, axis=1)
        if self.int8:
            scale_N = self.add("Gather", f"{matrix}_scale", numbers_N, axis=0)
            columns_RN = self.add("Mul", self.add("Cast", columns_RN, to=1), scale_N)
        return self.add("Transpose", columns_RN, perm=[1, 0])

    def product(self, rows_NR: str, matrix: str, out: str = "") -> str:
        """Add nodes that multiply rows by a stored matrix, and return the name of the product, of shape [N, C].

        The scale of a column is a common factor of all terms of a sum, so it is multiplied with the sums.

        Args:
            rows_NR: The name of the left factor.
            matrix: The name of a stored matrix, of shape [R, C].
            out: The name of the product. By default a new name.
        """
        if not self.int8:
            return self.add("MatMul", rows_NR, matrix, out=out)
        sums_NC = self.add("MatMul", rows_NR, self.add("Cast", matrix, to=1))
        return self.add("Mul", sums_NC, f"{matrix}_scale", out=out)


def _lstm(builder: _GraphBuilder, from_input_NG: str, from_state_NG: str) -> None:
    """Add the nodes of one LSTM step: from the gates' inputs and `cell` to `next_state` and `next_cell`."""
    gates = builder.add("Add", from_input_NG, from_state_NG)
    builder.add("Split", gates, out=("i", "f", "g", "o"), axis=1)
    remembered = builder.add("Mul", builder.add("Sigmoid", "f"), "cell")
    added = builder.add("Mul", builder.add("Sigmoid", "i"), builder.add("Tanh", "g"))
    builder.add("Add", remembered, added, out="next_cell")
    builder.add("Mul", builder.add("Sigmoid", "o"), builder.add("Tanh", "next_cell"), out="next_state")


def _gru(builder: _GraphBuilder, from_input_NG: str, from_state_NG: str) -> None:
    """Add the nodes of one GRU step: from the gates' inputs and `state` to `next_state`."""
    builder.add("Split", from_input_NG, out=("input_r", "input_z", "input_n"), axis=1)
    builder.add("Split", from_state_NG, out=("state_r", "state_z", "state_n"), axis=1)
    reset = builder.add("Sigmoid", builder.add("Add", "input_r", "state_r"))
    keep = builder.add("Sigmoid", builder.add("Add", "input_z", "state_z"))
    new = builder.add("Tanh", builder.add("Add", "input_n", builder.add("Mul", reset, "state_n")))
    # new + keep * (state - new) equals (1 - keep) * new + keep * state, with one multiplication less.
    moved = builder.add("Mul", keep, builder.add("Sub", "state", new))
    builder.add("Add", new, moved, out="next_state")


@dataclass
class Agreement:
    """Counts how often one exported graph agrees with the trained model."""

    contexts: int = 0
    """The number of contexts compared."""
    top1: int = 0
    """The number of contexts with the same best word, or with two best words whose scores are equal up to rounding."""
    top3: int = 0
    """The number of words that are among the three best of both models, summed over all contexts."""
    furthest: float = 0.0
    """The largest difference between the two scores of a word, over all words and contexts."""
    too_far: int = 0
    """The number of contexts in which a difference is larger than rounding can explain."""

    def add(self, torch_NV: np.ndarray, graph_NV: np.ndarray, allowed: float = ROUNDING) -> None:
        """Compare the scores of N contexts and add the result to the counts.

        Args:
            torch_NV: The scores of the trained model.
            graph_NV: The scores of the graph.
            allowed: The largest difference at which two scores count as equal.
        """
        rows_N = np.arange(len(torch_NV))
        torch_N3, graph_N3 = _best(torch_NV), _best(graph_NV)
        gap_N = torch_NV[rows_N, torch_N3[:, 0]] - torch_NV[rows_N, graph_N3[:, 0]]
        self.contexts += len(torch_NV)
        self.top1 += int((gap_N <= allowed).sum())
        self.top3 += int((torch_N3[:, :, None] == graph_N3[:, None, :]).sum())
        apart_N = np.nan_to_num(np.abs(torch_NV - graph_NV).max(axis=1), nan=np.inf)
        self.too_far += int((~(apart_N <= allowed)).sum())
        self.furthest = max(self.furthest, float(apart_N.max()))

    @property
    def is_equal(self) -> bool:
        """Whether the best word agrees in all contexts, and no score differs by more than rounding."""
        return self.top1 == self.contexts and not self.too_far

    def numbers(self) -> dict[str, Any]:
        """Return the figures for `export.json`: the number of contexts, two shares, and the largest difference."""
        return {
            "contexts": self.contexts,
            "same_first_choice": self.top1 / self.contexts,
            "same_suggestions_of_three": self.top3 / (3 * self.contexts),
            "furthest_scores_apart": self.furthest,
        }


@dataclass
class ParityCheck:
    """Compares exported graphs with the trained model."""

    model: LanguageModel
    params_P: Tensor
    """The parameters of the trained model."""
    graphs: dict[str, OnnxStepper]
    """The exported graphs by file name."""
    agreement: dict[str, Agreement] = field(default_factory=dict)
    """The result so far, by file name."""

    def run(self, progress: Callable[[int, int], None] = lambda done, of: None) -> dict[str, Agreement]:
        """Sample texts from the first graph, and compare the scores of all graphs with those of torch on these texts.

        Args:
            progress: Called with the number of texts compared so far and the total number of texts.

        Returns:
            The agreement of each graph, by file name.
        """
        self.agreement = {name: Agreement() for name in self.graphs}
        generator = reproducible_generator(0, "contexts of an export")
        for done in range(0, TEXTS, AT_ONCE):
            words_NT = draw_texts(next(iter(self.graphs.values())), AT_ONCE, LENGTH, generator)
            self.add(words_NT)
            progress(done + AT_ONCE, TEXTS)
        return self.agreement

    @torch.no_grad()
    def add(self, words_NT: np.ndarray) -> None:
        """Compare the scores after every word of N texts, and add the results to `agreement`.

        Args:
            words_NT: The word ids of the texts, BOS first.
        """
        features_F = unknown_features(self.model)
        torch_NTV = self._logits(self.params_P.float(), words_NT, features_F)
        exact_NTV = self._logits(self.params_P.double(), words_NT, None if features_F is None else features_F.double())
        rounding_T = np.abs(torch_NTV - exact_NTV).max(axis=(0, 2))
        allowed_T = ROUNDING * max(1.0, float(np.abs(torch_NTV).max())) + 8 * np.maximum.accumulate(rounding_T)
        for name, steps in self.graphs.items():
            agreement, states = self.agreement.setdefault(name, Agreement()), None
            for t in range(words_NT.shape[1]):
                states, graph_NV = steps.read_many(states, words_NT[:, t])
                agreement.add(torch_NTV[:, t], graph_NV, float(allowed_T[t]))

    def _logits(self, params_P: Tensor, words_NT: np.ndarray, features_F: Tensor | None) -> np.ndarray:
        """Return the scores of the trained model after every word, of shape [N, T, V]."""
        return self.model.logits(self.model.layout.split(params_P), torch.as_tensor(words_NT), features_F).numpy()


def draw_texts(steps: OnnxStepper, number: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """Sample texts from a model. Each text starts with BOS.

    Args:
        steps: Computes the model.
        number: N, the number of texts.
        length: T, the number of words in each text, BOS included.
        generator: The source of random numbers.

    Returns:
        The word ids, of shape [N, T].
    """
    words_NT = np.full((number, length), BOS, dtype=np.int64)
    states = None
    for t in range(length - 1):
        states, logits_NV = steps.read_many(states, words_NT[:, t])
        scores_NV = np.nan_to_num(logits_NV)
        sums_NV = np.cumsum(np.exp(scores_NV - scores_NV.max(axis=1, keepdims=True)), axis=1)
        drawn_N1 = generator.random((number, 1)) * sums_NV[:, -1:]
        words_NT[:, t + 1] = np.minimum((sums_NV < drawn_N1).sum(axis=1), sums_NV.shape[1] - 1)
    return words_NT


def _best(logits_NV: np.ndarray) -> np.ndarray:
    """Return the ids of the three best words of each row, best first. BOS and UNK are left out, as in `predict`."""
    shown_NV = logits_NV.copy()
    shown_NV[:, [BOS, UNK]] = -np.inf
    best_N3 = np.argpartition(-shown_NV, 2, axis=1)[:, :3]
    order_N3 = np.argsort(-np.take_along_axis(shown_NV, best_N3, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best_N3, order_N3, axis=1)


@dataclass(frozen=True, kw_only=True)
class Export:
    """The result of an export."""

    files: dict[str, bytes]
    """The content of each file, by file name."""
    agreement: dict[str, Agreement]
    """The agreement of each graph with PyTorch, by file name."""
    statement: dict[str, Any]
    """The privacy statement of the run."""
    parameters: int
    """The number of parameters of the model."""
    path: Path | None = None
    """The folder that was written; None if the files have not been written."""

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each graph in bytes, by file name."""
        return {name: len(self.files[name]) for name in (FLOAT32, INT8)}


def export(run: str | Path, out: str | Path, *, progress: Callable[[int, int], None] = lambda done, of: None) -> Export:
    """Export the newest model of a run.

    Args:
        run: The run folder.
        out: The folder to write. It must be missing or empty.
        progress: Called with the number of texts compared so far and the total number of texts.

    Raises:
        InvalidValue: `out` is a file, or a folder that is not empty.
        ModelError: The model is neither an LSTM nor a GRU, onnx or onnxruntime is not installed, or the float32 graph
            does not predict what PyTorch predicts. In the last case nothing is written.
        RunFolderError: `run` is not a run folder, is damaged, or has released no model yet.
        LedgerError: The ledger does not contain all charges of the model.
    """
    _need_onnx()
    target = free_target(out)
    exported = onnx_files(run, progress=progress)
    write_files(target, exported.files)
    logger.info("exported %s to %s", run, out)
    return replace(exported, path=Path(out))


def onnx_files(run: str | Path, *, progress: Callable[[int, int], None] = lambda done, of: None) -> Export:
    """Return the files of an export, after comparing the graphs with PyTorch. Nothing is written; see `export`.

    Args:
        run: The run folder.
        progress: Called with the number of texts compared so far and the total number of texts.

    Returns:
        The contents of the files, and the result of the comparison.

    Raises:
        ModelError, RunFolderError, LedgerError: As for `export`.
    """
    _need_onnx()
    released = Released.open(run)
    arrays = step_arrays(released.run.model, released.params_P)
    graphs = {FLOAT32: step_graph(arrays, int8=False), INT8: step_graph(arrays, int8=True)}
    steps = {name: OnnxStepper(graph) for name, graph in graphs.items()}
    agreement = ParityCheck(released.run.model, released.params_P, steps).run(progress)
    if not agreement[FLOAT32].is_equal:
        raise ModelError(
            f"The exported float32 model does not predict what {run} predicts: {agreement[FLOAT32].numbers()}. "
            "Nothing was written. Either the model has parameters that are not finite, or this is a bug in the export."
        )
    statement = run_statement(RunFolder.open(run))
    files = {
        **graphs,
        "vocabulary.txt": RunFolder(Path(run)).vocabulary.read_bytes(),
        "tokens.json": _json(tokenizer_to_table(released.tokenizer)),
        "statement.json": _json(statement),
    }
    return Export(
        files={**files, RECORD: _json(_record(arrays, files, agreement))},
        agreement=agreement,
        statement=statement,
        parameters=released.run.model.layout.total,
    )


def _record(arrays: StepArrays, files: dict[str, bytes], agreement: dict[str, Agreement]) -> dict[str, Any]:
    """Return the content of `export.json`. It says everything that a program needs to call the graphs."""
    return {
        "format": FORMAT,
        "what": "one step: the inputs are a word's id and the states (at first token 0, which is BOS, and zeros); the "
        "outputs are logits and the next states",
        "cell": arrays.cell,
        "vocabulary_size": arrays.words_DV.shape[1],
        "embedding_size": arrays.words_DV.shape[0],
        "hidden_size": arrays.hidden_size,
        "user_features": arrays.user_features,
        "agreement_with_pytorch": {name: result.numbers() for name, result in agreement.items()},
        "files": {name: {"bytes": len(content), "sha256": digest(content)} for name, content in files.items()},
        "software": {"unheard": version("unheard"), "onnx": version("onnx"), "onnxruntime": version("onnxruntime")},
    }


def free_target(out: str | Path) -> Path:
    """Return the absolute path of the folder for an export.

    Raises:
        InvalidValue: `out` is a file, or a folder that is not empty.
    """
    target = Path(out).resolve()
    if not storage.is_missing_or_empty(target):
        raise InvalidValue(f"{out} exists and is not an empty folder: choose another --out, or remove it first.")
    return target


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write files into a new folder that other accounts may open. The folder appears complete or not at all.

    Args:
        folder: The folder. It must be missing or empty.
        files: The content of each file, by file name.
    """
    with storage.staged_folder(folder) as staged:
        staged.chmod(0o755)
        for name, content in files.items():
            replace_file(staged / name, content)


def _need_onnx() -> None:
    """Raise `ModelError` if the package onnx is not installed."""
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise ModelError(f"Exporting needs the package onnx, which is not installed. {INSTALL}") from None


def _json(value: Any) -> bytes:
    """Return a value as JSON text. Raises `ValueError` for infinity and NaN."""
    return json.dumps(value, indent=2, allow_nan=False).encode()
