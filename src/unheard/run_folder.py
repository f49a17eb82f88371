"""The run folder: the files that training writes and that every later command reads.

    run.toml            the configuration, complete          ledger.jsonl      the charge of each round, hash-chained
    metrics.jsonl       held-out evaluations by round        statement.json    the privacy statement of the last save
    model.safetensors   the newest released model            vocabulary.txt    its words
    tokens.json         how text was split into tokens       checkpoints/      states to resume from
    measures.json       the newest model's full measures     tensorboard/      the evaluations again, as event files
    federated.json      what the server of a federated run sees (other runs do not have this file)
    noise/              secret keys and past noise, while a run with correlated noise is not complete

`RunFolder` has the paths of these files, and the operations that keep the folder consistent. All files are written by
`storage.py`, which replaces a whole file atomically: after a crash it has its old or its new content.

    folder = RunFolder.begin("runs/first")      # create a hidden folder next to runs/first
    ...                                         # write run.toml, the ledger, the first checkpoint
    folder = folder.publish("runs/first")       # rename it to runs/first: now the run exists
    with folder.locked():
        folder.append_metrics({"round": 20, "accuracy": 0.13})
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.config import parse_toml
from unheard.errors import CheckpointCorrupt, RunFolderError, RunFolderExists, RunFolderInUse, RunFolderMissing

MEASURES_FORMAT = 2
"""The format of measures.json. Format 1, of older versions, has no digest of its content."""
MAX_HEADER_BYTES = 100_000_000
"""The largest header that the safetensors format allows."""
LOCAL_KEYS = ("corpus.path", "privacy.ledger", "engine.corpus_part", "model.path", "training.init_from")
"""Keys of the run file whose values are paths on the machine that trained. `public_settings` leaves them out."""
SEED = "training.reproducible_seed"
NOT_HASHED = (
    ("training", "rounds"),
    ("training", "checkpoint_every"),
    ("training", "keep_checkpoints"),
    ("engine",),
    ("corpus", "path"),
    ("model", "path"),  # the folder of a Hugging Face model, whose content base_sha256 identifies
    ("privacy", "ledger"),
)
"""Keys that `configuration_hash` ignores, because they may change when a run is resumed. They change neither what a round
computes nor what it costs."""
ADDED_KEYS: dict[tuple[str, str | None, str], Any] = {
    ("model", "tied_lstm", "keep_norm"): True,
    ("model", "tied_gru", "keep_norm"): True,
    ("model", "tied_lstm", "step_norm"): False,
    ("model", "tied_gru", "step_norm"): False,
    ("model", "module", "weights_are_public"): False,
    ("model", "hugging_face", "lora_freeze_a"): False,
    ("training", None, "shared_cohorts"): False,
}
"""Keys that older versions did not have, as (table, kind, key), and the value that those versions used implicitly. Today's
default may be another one. `configuration_hash` leaves out a key that has this value, so the hash of an older run stays
the same and the run can be resumed."""


class _Path:
    """A descriptor: the path of one file or folder in a run folder, as an attribute of `RunFolder`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", owner: type) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run: the paths of its files, and the operations that keep the files consistent.

    Args:
        path: The folder. `RunFolder.open(path)` also checks that it holds a run.
    """

    path: Path

    run_file = _Path("run.toml")
    """The complete configuration of the run."""
    ledger = _Path("ledger.jsonl")
    """The ledger of the run, which `privacy.ledger.Ledger` reads and writes."""
    metrics = _Path("metrics.jsonl")
    """Held-out evaluations, one JSON line each."""
    statement = _Path("statement.json")
    """The privacy statement as of the last save."""
    model = _Path("model.safetensors")
    """The newest released model."""
    vocabulary = _Path("vocabulary.txt")
    """The vocabulary of the model."""
    tokens = _Path("tokens.json")
    """The rules by which text was split into tokens."""
    federated = _Path("federated.json")
    """What the server of a federated run sees. Other runs do not have this file."""
    checkpoints = _Path("checkpoints")
    """The folder of checkpoints, the states from which the run can be resumed."""
    measures = _Path("measures.json")
    """The full measures of the newest model."""
    noise = _Path("noise")
    """The folder of the keys and the history of correlated noise. Secret. It is deleted when the run is complete."""
    audit = _Path("audit")
    """The folder of the newest audit of the run, if `unheard audit` wrote one."""
    tensorboard = _Path("tensorboard")
    """The folder of TensorBoard event files."""

    @property
    def saved_round(self) -> int:
        """The round of the newest checkpoint, from its file name; 0 if there is no checkpoint.

        Raises:
            CheckpointCorrupt: The name has no number.
        """
        paths = checkpoint_files(self)
        number = paths[-1].stem.removeprefix("round-") if paths else "0"
        if not number.isdecimal():
            raise CheckpointCorrupt(not_written_by_unheard(paths[-1]))
        return int(number)

    @classmethod
    def begin(cls, path: str | Path) -> "RunFolder":
        """Create a hidden folder next to `path`. The caller fills it, and `publish` moves it to `path`.

        So if the creation of a run is interrupted, nothing is left at `path`.

        Raises:
            RunFolderExists: `path` is a file, or a folder that is not empty.
        """
        cls.check_free(path)
        staged = storage.new_folder_beside(Path(path).resolve())
        (staged / "checkpoints").mkdir()
        return cls(staged)

    @staticmethod
    def check_free(path: str | Path) -> None:
        """Raise `RunFolderExists` if `path` is a file, or a folder that is not empty; `RunFolderError` if it is not UTF-8."""
        target = Path(path).resolve()
        if not storage.is_utf8(target):
            raise RunFolderError(
                f"{str(path)!r} is not UTF-8, and the models of a run could not be read again from there. Name another folder."
            )
        if not storage.is_missing_or_empty(target):
            raise RunFolderExists(
                f"{path} exists and is not an empty folder. If it is a run, continue it with `unheard resume {path}`; else "
                "name another folder."
            )

    def publish(self, path: str | Path) -> "RunFolder":
        """Move the filled folder to `path` in one step.

        Raises:
            RunFolderExists: The folder cannot be moved, for example because another run was created at `path`
                meanwhile. That run is unchanged; this folder is deleted.
        """
        target = Path(path).resolve()
        try:
            storage.rename_folder(self.path, target)
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            raise RunFolderExists(f"{path} cannot be made here ({error.strerror}): choose another --out.") from None
        return RunFolder(Path(path))

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Return the folder of an existing run.

        Raises:
            RunFolderMissing: The folder has no run file or no ledger.
            RunFolderError: An entry of the folder is not a regular file (`check_files`).
        """
        folder = cls(Path(path))
        folder.check_files()
        if not folder.run_file.exists():
            raise RunFolderMissing(not_a_run_folder(path))
        if not folder.ledger.exists():
            raise RunFolderMissing(
                f"{path} has lost its ledger: put it back. Without it the privacy cost of this run is unknown."
            )
        return folder

    def check_files(self) -> None:
        """Raise `RunFolderError` if an entry of the folder or of its folders is a pipe, a device or a link to one."""
        for place in (self.path, self.checkpoints, self.noise, self.tensorboard, self.audit):
            if special := storage.special_file(place):
                raise RunFolderError(f"{special} is not a regular file. Put back the file that the run has written.")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder, so that only one process trains in it. The lock ends with the process.

        Raises:
            RunFolderInUse: Another process holds the lock.
        """
        # DP: two trainers on one folder would release models that the other's ledger position does not cover.
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(storage.locked(self.path / ".lock"))
            except storage.FileInUse:
                raise RunFolderInUse(
                    f"{self.path} is in use: another process is training in it. Wait for it, or name another folder."
                ) from None
            yield

    def read_metrics(self, *, check: bool = True) -> list[dict[str, Any]]:
        """Return the evaluations in the order of their rounds. Of a round that was repeated, the latest one is returned.

        An incomplete last line, which a crash can leave, is ignored.

        Args:
            check: Whether to call `check_metrics` first.

        Raises:
            RunFolderError: A complete line is not an evaluation, or `check_metrics` raises this error.
            CheckpointCorrupt: `check_metrics` raises this error.
        """
        if check:
            self.check_metrics()
        by_round: dict[int, dict[str, Any]] = {}
        lines = self.metrics.read_bytes().split(b"\n") if self.metrics.exists() else [b""]
        for number, line in enumerate(lines, start=1):
            row = _evaluation(line)
            if row is not None:
                by_round[int(row["round"])] = row
            elif number < len(lines):
                raise RunFolderError(
                    f"{self.metrics}, line {number} is not an evaluation: the file was damaged or changed. Restore it "
                    "from a copy, or delete it: neither the model nor the ledger needs it."
                )
        return [by_round[r] for r in sorted(by_round)]

    def check_metrics(self) -> None:
        """Check that metrics.jsonl begins with the evaluations whose digest the newest checkpoint has.

        A missing metrics.jsonl is accepted: the user may delete it.

        Raises:
            RunFolderError: The file was changed, or belongs to another run.
            CheckpointCorrupt: The newest checkpoint is damaged.
        """
        # Read the checkpoint before the evaluations: a process that trains meanwhile only appends evaluations.
        known = self._remembered_metrics()
        # DP: evaluations of another run, or with other figures, would be shown beside this run's epsilon.
        if self.metrics.exists() and known is not None and self.metrics_digest(known["bytes"]) != known:
            raise RunFolderError(
                f"{self.metrics} does not have the evaluations recorded in the newest checkpoint: it was changed, or "
                "belongs to another run. Restore it from a copy, or delete it: neither the model nor the ledger needs it."
            )

    def _remembered_metrics(self) -> dict[str, Any] | None:
        """Return the `metrics_digest` that the newest checkpoint has.

        Returns:
            None if there is no checkpoint, or if an older version wrote it without a digest.

        Raises:
            CheckpointCorrupt: The checkpoint or its digest is damaged, or its file was gone at each of five attempts.
        """
        paths: list[Path] = []
        for _ in range(5):  # a process that trains meanwhile may delete the file between the listing and the reading
            paths = checkpoint_files(self)
            try:
                known = read_facts(paths[-1]).get("metrics") if paths else None
            except FileNotFoundError:
                continue
            is_digest = isinstance(known, dict) and set(known) == {"bytes", "sha256"} and type(known["bytes"]) is int
            if known is None or is_digest:
                return known
            break
        # DP: a checkpoint that is listed and cannot be found, or a damaged digest, is not the same as none: evaluations
        # would not be checked.
        raise CheckpointCorrupt(not_written_by_unheard(paths[-1]))

    def read_tables(self) -> dict[str, Any]:
        """Return the tables of the run file.

        Raises:
            RunFolderError: The run file cannot be read.
        """
        try:
            return parse_toml(self.run_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{self.run_file} cannot be read as a run file: {error}.") from None

    def public_settings(self) -> dict[str, Any]:
        """Return the settings of the run file as one flat table from `table.key` to value, without `LOCAL_KEYS`.

        The value of the seed is hidden.

        Raises:
            RunFolderError: The run file cannot be read.
        """
        # DP: anyone who knows the seed can subtract the noise, and cards and trackers show the settings to others.
        hidden = {SEED: "set, and not shown"}
        return {key: hidden.get(key, value) for key, value in _flat(self.read_tables()) if key not in LOCAL_KEYS}

    def claim(self) -> str | None:
        """Return the claim of the privacy statement as of the last save; None if there is no statement."""
        if not self.statement.exists():
            return None
        return json.loads(self.statement.read_text(encoding="utf-8"))["claim"]

    def model_digest(self) -> str:
        """Return the SHA-256 of the released model. It tells whether measures belong to this model or to an older one.

        Raises:
            RunFolderMissing: The model cannot be read.
        """
        try:
            return hashlib.sha256(self.model.read_bytes()).hexdigest()
        except OSError as error:
            raise RunFolderMissing(f"{self.model} cannot be read: {error.strerror}.") from None

    def read_measures(self) -> dict[str, Any] | None:
        """Return the full measures of the newest model, from measures.json.

        Returns:
            None if the model must be measured: the file is missing or damaged, or it belongs to an older model.
        """
        try:
            content = json.loads(self.measures.read_text(encoding="utf-8"))
            return content if content["model_sha256"] == self.model_digest() and are_measures(content) else None
        except (OSError, ValueError, TypeError, KeyError, RecursionError, RunFolderMissing):
            return None

    def drop_metrics_after(self, round: int) -> None:
        """Delete the evaluations of rounds after `round`. These rounds will be repeated, and each round must appear once."""
        kept = [row for row in self.read_metrics() if int(row["round"]) <= round]
        content = b"".join(json.dumps(row).encode() + b"\n" for row in kept)
        if self.metrics.exists() and content != self.metrics.read_bytes():
            replace_file(self.metrics, content)

    def metrics_digest(self, size: int | None = None) -> dict[str, Any]:
        """Return the size and the SHA-256 of metrics.jsonl, or of its beginning.

        A checkpoint stores this digest. Training only appends to the file, so the file of a later round begins with the
        bytes that the digest describes.

        Args:
            size: How many bytes to read from the beginning; None for all.
        """
        content = self.metrics.read_bytes()[:size] if self.metrics.exists() else b""
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def nodes_digest(self) -> str | None:
        """Return the SHA-256 of federated.json, or None for a run that is not federated.

        Raises:
            RunFolderError: The file cannot be read.
        """
        if not os.path.lexists(self.federated):
            return None
        try:
            return hashlib.sha256(self.federated.read_bytes()).hexdigest()
        except OSError as error:
            raise RunFolderError(f"{self.federated} cannot be read: {error.strerror}. Put it back.") from None

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append the evaluation of one round to `metrics.jsonl`."""
        with _advice_on_failure(self.metrics):
            storage.append_line(self.metrics, json.dumps(row).encode())


def checkpoint_files(folder: RunFolder) -> list[Path]:
    """Return the paths of all checkpoints, oldest first."""
    return sorted(folder.checkpoints.glob("round-*.safetensors"))


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested tables and lists with its path, the keys joined by dots."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _flat(item, f"{prefix}.{i}")
    else:
        yield prefix, value


def configuration_hash(tables: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a run's configuration. The header of the run's ledger contains it.

    The keys in `NOT_HASHED` are left out. A key in `ADDED_KEYS` is left out if its value is the one that older versions
    used.

    Args:
        tables: The complete tables, as in the run file of a run folder.
    """
    kept = {name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()}
    for table, *key in NOT_HASHED:
        if not key:
            kept.pop(table, None)
        elif isinstance(part := kept.get(table), dict):
            part.pop(key[0], None)
    for (table, kind, key), before in ADDED_KEYS.items():
        part = kept.get(table)
        if isinstance(part, dict) and (part.get("kind"), part.get(key)) == (kind, before):
            del part[key]
    return hashlib.sha256(json.dumps(_plain(kept), sort_keys=True, default=str).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value in the form in which it is hashed: integers as floats, because 20 and 20.0 are the same setting."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts in the header of a checkpoint or a model (`training/checkpoint.py`), without reading the tensors.

    Raises:
        CheckpointCorrupt: The file is damaged.
        FileNotFoundError: There is no such file.
    """
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise ValueError("not a safetensors file")
            header = json.loads(file.read(size))
        facts = json.loads(header["__metadata__"]["unheard"])["facts"]
        if not isinstance(facts, dict):
            raise ValueError("no facts")
        return facts
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointCorrupt(not_written_by_unheard(path)) from None


def not_written_by_unheard(path: Path) -> str:
    """Return the error message for a checkpoint or a model whose header cannot be read."""
    return (
        f"{path} cannot be read as a file that `unheard` wrote, so the ledger cannot be compared with it. Put back an "
        "intact copy. Delete it to resume from the previous checkpoint (repeated rounds are charged again)."
    )


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the name of each folder, after as many of its parents as are needed to tell all folders apart.

    >>> distinct_names([Path("/sweep/1"), Path("/repeat/1")])
    ['sweep/1', 'repeat/1']
    """
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(set(folders)):
        depth += 1
    return ["/".join(folder.parts[-depth:]) for folder in folders]


def not_a_run_folder(path: str | Path) -> str:
    """Return the error message for a path that holds no run."""
    if (Path(path) / "corpus.json").is_file():
        return (
            f"{path} is a token store, not a run folder. Name the folder that `unheard train --out` wrote. For the store: "
            f"`unheard corpus show {path}` checks its files, `unheard statement {path}` says what its users have spent."
        )
    return f"{path} is not a run folder: it has no run.toml. Name the folder that `unheard train --out` wrote."


def record_digest(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object without its entry `sha256`, in which the file stores this digest."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def are_measures(content: Any) -> bool:
    """Whether a value has the form of the full measures that `evaluation/measures.py` computes, and their digest."""
    try:
        return (
            # DP: figures that were changed would be shown beside this run's epsilon.
            (content["format"] == 1 or (content["format"], content["sha256"]) == (2, record_digest(content)))
            and isinstance(content["max_tokens"], int)
            and isinstance(content["baselines_fitted_on"], str)
            and all(isinstance(n, int) for counts in content["head_words"].values() for n in counts)
            and all(map(_are_figures, [content, *content["baselines"].values()]))
            and all(isinstance(prompt["text"], str) for prompt in content["prompts"])
            and all(
                isinstance(choice["word"], str) and _is_number(choice["probability"])
                for prompt in content["prompts"]
                for choice in prompt["words"]
            )
        )
    except (KeyError, TypeError, AttributeError):
        return False


def _are_figures(content: Any) -> bool:
    """Whether the measures of a model or of a baseline have all figures per token, per user and per band of words.

    Raises:
        KeyError: A figure is missing.
        TypeError: A table has another form.
    """
    accuracies = ("accuracy_top1", "accuracy_top3", "accuracy_top5")
    figures = [content["tokens"][key] for key in (*accuracies, "accuracy_top1_words", "loss", "perplexity", "tokens")]
    figures += [content["users"][key][p] for key in (*accuracies, "perplexity") for p in ("mean", "p5", "p50", "p95")]
    figures += [band[key] for band in content["bands"] for key in ("share", "targets", *accuracies)]
    return all(map(_is_number, figures)) and all(isinstance(band["band"], str) for band in content["bands"])


def _evaluation(line: bytes) -> dict[str, Any] | None:
    """Return the evaluation in a line of metrics.jsonl: a table of numbers. Return None if the line is something else."""
    try:
        row = json.loads(line)
        return row if all(map(_is_number, row.values())) and int(row["round"]) >= 0 else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _is_number(value: Any) -> bool:
    """Whether a value from a JSON file is a number, or null, which stands for a number that is not finite."""
    return isinstance(value, int | float | None) and not isinstance(value, bool)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file of a run folder atomically. Raise `RunFolderError` if it cannot be written."""
    with _advice_on_failure(path):
        storage.replace_file(path, content)


@contextlib.contextmanager
def _advice_on_failure(path: Path) -> Iterator[None]:
    """Raise a `RunFolderError` that names `path` if the block raises `OSError`."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"Cannot write {path}: {error.strerror}. What was there before is unchanged. Free some space or correct the "
            "permissions, and try again."
        ) from None
