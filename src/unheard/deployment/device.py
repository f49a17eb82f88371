"""An exported model as a device runs it: onnxruntime, a word list, and no torch.

In: an export folder, or one of the .onnx files in it. Out: a LoadedModel model. Every file is checked against export.json first.

    export.json     what is here, with sizes, digests and how well it was found to agree      statement.json   what may be said
    model.onnx      one step in float32        model.int8.onnx   the same in int8              vocabulary.txt, tokens.json
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from unheard.corpus.tokenizers import tokenizer_from_table
from unheard.corpus.vocabulary import Vocabulary
from unheard.deployment.model import LoadedModel, check_rows
from unheard.errors import ModelError, UnheardError

RECORD, FORMAT = "export.json", 1
FLOAT32, INT8 = "model.onnx", "model.int8.onnx"
INSTALL = "Install it: pip install 'unheard[export]' (on a device, onnxruntime alone)."


class OnnxStepper:
    """One step in onnxruntime, for one text or for many at once. One thread: a step has too little work for two."""

    def __init__(self, graph: bytes) -> None:
        # The only import of onnxruntime in this package. onnxruntime starts a thread that contacts its vendor unless
        # ORT_DISABLE_TELEMETRY is set before the import; its function disable_telemetry_events() does not stop that thread.
        # unheard/__init__.py sets the variable and always runs before this line.
        try:
            import onnxruntime
        except ImportError:
            raise ModelError(f"An exported model needs onnxruntime, which is not here. {INSTALL}") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        try:
            self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as trouble:  # onnxruntime has a dozen exceptions, none of them public
            raise ModelError(f"onnxruntime cannot load the model: {trouble}. Export it again.") from None
        sizes = {one.name: one.shape[-1] for one in self._session.get_inputs()}
        self._states = [name for name in ("state", "cell") if name in sizes]
        self._hidden_size = sizes.get("state", 0)
        self._features = sizes.get("features", 0)
        self.rows = self._session.get_outputs()[0].shape[-1]

    def read(self, state: list[np.ndarray] | None, word: int) -> tuple[list[np.ndarray], np.ndarray]:
        states, logits_1V = self.read_many(state, np.array([word], dtype=np.int64))
        return states, logits_1V[0]

    def read_many(self, states: list[np.ndarray] | None, words_N: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """The same for N texts side by side."""
        N = len(words_N)
        before = states or [np.zeros((N, self._hidden_size), np.float32) for _ in self._states]
        given: dict[str, Any] = {"token": words_N.astype(np.int64), **dict(zip(self._states, before, strict=True))}
        if self._features:
            given["features"] = np.zeros((N, self._features), np.float32)
        logits_NV, *after = self._session.run(None, given)
        return [np.asarray(one) for one in after], np.asarray(logits_NV)


def is_export(path: Path) -> bool:
    return (path / RECORD).is_file() or (path.suffix == ".onnx" and (path.parent / RECORD).is_file())


def open_export(path: Path) -> LoadedModel:
    """The folder's float32 model, or the very file that was named."""
    folder, file = (path.parent, path.name) if path.suffix == ".onnx" else (path, FLOAT32)
    whole = {name: _checked(folder, name) for name in (file, "vocabulary.txt", "tokens.json", "statement.json")}
    steps = OnnxStepper(whole[file])
    vocabulary = Vocabulary.load(folder / "vocabulary.txt")
    check_rows(steps.rows, vocabulary, str(folder))
    return LoadedModel(
        name=folder.name if file == FLOAT32 else f"{folder.name}/{file}",
        kind="export",
        stepper=steps,
        vocabulary=vocabulary,
        tokens=tokenizer_from_table(json.loads(whole["tokens.json"])),
        statement=json.loads(whole["statement.json"]),
    )


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _checked(folder: Path, name: str) -> bytes:
    """A file's content, if it is what was exported."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ModelError(f"{folder} was exported in format {record['format']}; this version reads {FORMAT}.")
        content, right = (folder / name).read_bytes(), record["files"][name]["sha256"]
    except (OSError, ValueError, KeyError, TypeError, UnheardError) as trouble:
        if isinstance(trouble, UnheardError):
            raise
        raise ModelError(f"{folder} is not a whole export ({name}: {trouble}). Export the run again.") from None
    if digest(content) != right:
        raise ModelError(f"{folder / name} is not what was exported. Export the run again.")
    return content
