"""Open a run folder, an export or a personal model, and predict the next word.

    model = open_model("runs/private")
    model.predict("see you", top=3)                             # [('tomorrow', 0.21), ...]
    models = open_models(["runs/plain", "runs/private"])        # their names differ

A `LoadedModel` has a `Stepper`, which computes one step of the model. Its interface is the same for all kinds of
folders:

    state, scores_V = model.stepper.read(None, BOS)             # before the first word
    state, scores_V = model.stepper.read(state, word_id)        # after each further word

An export is a folder that `export.py` writes. onnxruntime computes its steps, as on a device. torch is imported only if
a run folder or a personal model is opened, so an export can be used without torch. The files of an export:

    export.json         the format, sizes, SHA-256 of each file, and the agreement with PyTorch
    model.onnx          one step of the model in float32
    model.int8.onnx     the same with int8 weights
    vocabulary.txt      the words, one per line
    tokens.json         the tokenizer
    statement.json      the privacy statement

    model = open_model("export")                                # the float32 model
    model = open_model("export/model.int8.onnx")                # the int8 model
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from unheard import storage
from unheard.config import parse_json
from unheard.corpus.tokenizers import Tokenizer, tokenizer_from_table
from unheard.corpus.vocabulary import BOS, UNK, Vocabulary
from unheard.errors import ModelError
from unheard.run_folder import RunFolder, distinct_names

PERSONAL_RECORD = "personal.json"
"""The file that marks the folder of a personal model; `personalize.py` writes it."""


class Stepper(Protocol):
    """Computes a model one word at a time. The caller passes the state that one step returns to the next step."""

    def read(self, state: Any, word: int) -> tuple[Any, np.ndarray]:
        """Read one more word of a text.

        Args:
            state: The state that the last call returned; None for the first word, which must be BOS.
            word: The id of the word.

        Returns:
            The state after the word, and the score of every word of the vocabulary as the next word, of shape [V].
        """
        ...


@runtime_checkable
class ReadsAtOnce(Protocol):
    """A stepper that can read a whole text in one step. For models without a state this is faster than word by word."""

    def read_all(self, words: Sequence[int]) -> np.ndarray:
        """Return the score of every word of the vocabulary as the next word after a text, of shape [V].

        Args:
            words: The ids of the words of the text, BOS first.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with its vocabulary, tokenizer and privacy statement, ready to predict.

    Example:

        model = open_model("runs/private")
        model.predict("see you", top=3)         # [('tomorrow', 0.21), ('later', 0.13), ('soon', 0.08)]
    """

    name: str
    """The name to show: usually the name of the folder."""
    kind: Literal["run", "export", "personal"]
    """The kind of folder from which the model was opened."""
    stepper: Stepper = field(repr=False)
    """Computes the model, one word at a time."""
    vocabulary: Vocabulary = field(repr=False)
    """The words by token id."""
    tokenizer: Tokenizer
    """How text is split into tokens."""
    statement: Mapping[str, Any] = field(repr=False)
    """The privacy statement. A personal model has the statement of the shared model from which it was trained."""

    def __post_init__(self) -> None:
        try:
            epsilon, delta = float(self.statement["claimed"]["epsilon"]), float(self.statement["delta"])
            words = [
                self.statement["claim"],
                self.statement["claimed"].get("accountant", ""),
                *self.statement["warnings"],
            ]
            is_whole = epsilon >= 0 and 0 < delta < 1 and all(isinstance(word, str) for word in words)
        except (KeyError, TypeError, ValueError, AttributeError):
            is_whole = False
        # DP: a claim that cannot be read must not be shown as none, nor left out.
        if not is_whole:
            raise ModelError(f"{self.name}: its privacy statement cannot be read. Export or personalize the run again.")

    def predict(self, text: str, top: int = 3) -> list[tuple[str, float]]:
        """Predict the word after a text.

        Args:
            text: The text so far.
            top: How many words to return.

        Returns:
            The most likely next words with their probabilities, without UNK and BOS.
        """
        words = self.vocabulary.encode_words(self.tokenizer.split(text)).tolist()
        probs_V = probabilities(scores_after(self.stepper, words))
        probs_V[[BOS, UNK]] = 0.0
        best = np.argsort(-probs_V, kind="stable")[: max(top, 0)]
        return [(self.vocabulary.word(i), float(probs_V[i])) for i in best.tolist()]


def scores_after(stepper: Stepper, words: Sequence[int]) -> np.ndarray:
    """Return the score of every word of the vocabulary as the next word after a text, of shape [V].

    Args:
        stepper: Computes the model.
        words: The ids of the words of the text, without BOS, which this function adds.
    """
    if isinstance(stepper, ReadsAtOnce):
        return stepper.read_all((BOS, *words))
    state, scores_V = stepper.read(None, BOS)
    for word in words:
        state, scores_V = stepper.read(state, word)
    return scores_V


def probabilities(scores_V: np.ndarray) -> np.ndarray:
    """Return the softmax of the scores, computed in float64.

    >>> probabilities(np.array([1.0, 1.0])).tolist()
    [0.5, 0.5]
    """
    shifted_V = np.exp(scores_V.astype(np.float64) - scores_V.max())
    return shifted_V / shifted_V.sum()


RECORD, FORMAT = "export.json", 1
"""The name and the format number of the file that describes an export."""
FLOAT32, INT8 = "model.onnx", "model.int8.onnx"
"""The names of the two graphs of an export."""
INSTALL = "Install it: pip install 'unheard[export]' (on a device, onnxruntime alone)."


def open_model(path: str | Path) -> LoadedModel:
    """Open a model for prediction.

    Args:
        path: A run folder, whose newest model is opened; an export folder, whose float32 model is opened; a `.onnx`
            file in an export folder; or the folder of a personal model.

    Raises:
        RunFolderError: The path is none of these, or the run folder or personal model is damaged.
        ModelError: The export is damaged, or onnxruntime is not installed.
        LedgerError: The ledger of the run does not contain all charges of its newest model.
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
        tokenizer=released.tokenizer,
        statement=run_statement(RunFolder.open(path)),
    )


def open_models(paths: Sequence[str | Path]) -> list[LoadedModel]:
    """Open several models (see `open_model`).

    If two models have the same name, parent folders are added to all names until they differ.
    """
    models, folders = [open_model(path) for path in paths], [Path(path).resolve() for path in paths]
    names = [model.name for model in models]
    names = names if len(set(names)) == len(names) else distinct_names(folders)
    return [replace(model, name=name) for model, name in zip(models, names, strict=True)]


def is_personal(path: Path) -> bool:
    """Whether `path` is the folder of a personal model."""
    return (path / PERSONAL_RECORD).is_file()


def run_statement(folder: RunFolder) -> dict[str, Any]:
    """Compute the privacy statement of a run's model from the ledger of the run.

    Raises:
        LedgerError: The ledger is damaged, or does not contain all charges of the checkpoints and of the model.
    """
    from unheard.privacy.run_ledger import read_run_ledger
    from unheard.privacy.statement import compute_statement

    # DP: with a shortened ledger a model would be released with a smaller epsilon than it cost.
    ledger = read_run_ledger(folder)
    return compute_statement(ledger.facts, ledger.entries)


class OnnxStepper:
    """Computes steps of an exported graph with onnxruntime. Uses one thread, because a step is too little work for two.

    If the model takes features about the user, they are set to zero.

    Args:
        graph: The content of a `.onnx` file.

    Raises:
        ModelError: onnxruntime is not installed or cannot load the graph.
    """

    def __init__(self, graph: bytes) -> None:
        # This is the only import of onnxruntime in this package. Unless ORT_DISABLE_TELEMETRY is set before the import,
        # onnxruntime starts a thread that contacts its vendor, and disable_telemetry_events() does not stop that
        # thread. unheard/__init__.py sets the variable and always runs before this line.
        try:
            import onnxruntime
        except ImportError:
            raise ModelError(f"An exported model needs onnxruntime, which is not installed. {INSTALL}") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        try:
            self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises many exceptions, none of which is public
            raise ModelError(f"onnxruntime cannot load the model: {error}. Export it again.") from None
        sizes = {value.name: value.shape[-1] for value in self._session.get_inputs()}
        self._states = [name for name in ("state", "cell") if name in sizes]
        self._hidden_size = sizes.get("state", 0)
        self._features = sizes.get("features", 0)
        self.rows = self._session.get_outputs()[0].shape[-1]
        """The number of words for which the model computes a score."""

    def read(self, state: list[np.ndarray] | None, word: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Read one more word (see `Stepper.read`)."""
        states, logits_1V = self.read_many(state, np.array([word], dtype=np.int64))
        return states, logits_1V[0]

    def read_many(self, states: list[np.ndarray] | None, words_N: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Read one more word of each of N texts.

        Args:
            states: The states that the last call returned, each of shape [N, H]; None for the first words.
            words_N: The id of the next word of each text.

        Returns:
            The states after the words, each of shape [N, H], and the scores of the next words, of shape [N, V].
        """
        N = len(words_N)
        before = states or [np.zeros((N, self._hidden_size), np.float32) for _ in self._states]
        inputs: dict[str, Any] = {"token": words_N.astype(np.int64), **dict(zip(self._states, before, strict=True))}
        if self._features:
            inputs["features"] = np.zeros((N, self._features), np.float32)
        logits_NV, *after = self._session.run(None, inputs)
        return [np.asarray(state) for state in after], np.asarray(logits_NV)


def is_export(path: Path) -> bool:
    """Whether `path` is an export folder or a `.onnx` file in one."""
    return (path / RECORD).is_file() or (path.suffix == ".onnx" and (path.parent / RECORD).is_file())


def open_export(path: Path) -> LoadedModel:
    """Open an export. Every file that is read is compared with its digest in `export.json`.

    Args:
        path: An export folder, whose float32 model is opened, or a `.onnx` file in it.

    Raises:
        ModelError: A file is missing or was changed, this version does not read the format of the export, or
            onnxruntime is not installed.
    """
    folder, file = (path.parent, path.name) if path.suffix == ".onnx" else (path, FLOAT32)
    if special := storage.special_file(folder):
        raise ModelError(f"{special} is not a regular file. Export the run again.")
    contents = {name: _read_checked(folder, name) for name in (file, "vocabulary.txt", "tokens.json", "statement.json")}
    stepper = OnnxStepper(contents[file])
    vocabulary = Vocabulary.load(folder / "vocabulary.txt")
    if stepper.rows != len(vocabulary):  # the scores would be shown with the wrong words
        raise ModelError(
            f"{folder}: the model scores {stepper.rows} words, and vocabulary.txt has {len(vocabulary)} words. Export "
            "the run again."
        )
    return LoadedModel(
        name=folder.name if file == FLOAT32 else f"{folder.name}/{file}",
        kind="export",
        stepper=stepper,
        vocabulary=vocabulary,
        tokenizer=tokenizer_from_table(parse_json(contents["tokens.json"])),
        statement=parse_json(contents["statement.json"]),
    )


def digest(content: bytes) -> str:
    """Return the SHA-256 of a file's content in hexadecimal digits, as `export.json` has it."""
    return hashlib.sha256(content).hexdigest()


def _read_checked(folder: Path, name: str) -> bytes:
    """Return the content of a file of an export, after comparing it with its digest in `export.json`.

    Raises:
        ModelError: The file or `export.json` is missing or damaged, or the file was changed.
    """
    try:
        record = parse_json((folder / RECORD).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise ModelError(
                f"{folder} was exported in format {record['format']}; this version reads format {FORMAT}. Export the "
                "run again with this version."
            )
        content, expected = (folder / name).read_bytes(), record["files"][name]["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder} is not a whole export ({name}: {error}). Export the run again.") from None
    if digest(content) != expected:
        raise ModelError(f"{folder / name} is not what was exported: it was changed. Export the run again.")
    return content
