"""The run folder: the files that training writes and that every later command reads.

    run.toml            the configuration, complete          ledger.jsonl      the charge of each round, hash-chained
    metrics.jsonl       held-out evaluations by round        statement.json    the privacy statement of the last save
    model.safetensors   the newest released model            vocabulary.txt    its words
    tokens.json         how text was split into tokens       checkpoints/      states to resume from
    measures.json       the newest model's full measures     tensorboard/      the evaluations again, as event files
    federated.json      of a federated run: what its server sees
    noise/              keys and past noise of a run with correlated noise that is not complete: secret

`RunFolder` gives the paths and the operations that keep the folder consistent. All files are written through
`storage.py`: a whole file is replaced atomically, so a crash leaves the old or the new content.

    folder = RunFolder.begin("runs/first")      # a hidden folder next to its final path
    ...                                         # write run.toml, the ledger, the first checkpoint
    folder = folder.publish("runs/first")        # now the run exists
    with folder.locked():
        folder.append_metrics({"round": 20, "accuracy": 0.13})
"""

import contextlib
import hashlib
import json
import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.errors import CheckpointCorrupt, RunFolderError, RunFolderExists, RunFolderInUse, RunFolderMissing

MEASURES_FORMAT = 1
MAX_HEADER_BYTES = 100_000_000
"""The largest header that the safetensors format allows."""
LOCAL_KEYS = ("corpus.path", "privacy.ledger", "engine.corpus_part", "model.path", "training.init_from")
"""Keys of the run file that name paths of the machine."""
NOT_HASHED = (
    ("training", "rounds"),
    ("training", "checkpoint_every"),
    ("training", "keep_checkpoints"),
    ("engine",),
    ("corpus", "path"),
    ("model", "path"),  # of a Hugging Face folder, which base_sha256 names
    ("privacy", "ledger"),
)
"""Keys that may change between a run and its resumption: they change neither the model nor its cost."""
ADDED_KEYS: dict[tuple[str, str | None, str], Any] = {
    ("model", "tied_lstm", "keep_norm"): True,
    ("model", "tied_gru", "keep_norm"): True,
    ("model", "tied_lstm", "step_norm"): False,
    ("model", "tied_gru", "step_norm"): False,
    ("model", "module", "weights_are_public"): False,
    ("model", "hugging_face", "lora_freeze_a"): False,
    ("training", None, "shared_cohorts"): False,
}
"""Keys (table, kind, key) that older versions did not have, and the value that they used, whatever today's default is.
A run with that value has the hash that it had before the key existed, so that it can continue."""


class _Path:
    """A path in a run folder, as an attribute of `RunFolder`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", owner: type) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run, and the operations that keep them consistent.

    Args:
        path: The folder. `RunFolder.open(path)` also checks that it holds a run.
    """

    path: Path

    run_file = _Path("run.toml")
    """The configuration of the run, complete."""
    ledger = _Path("ledger.jsonl")
    """The ledger of the run: `privacy.ledger.Ledger`."""
    metrics = _Path("metrics.jsonl")
    """Held-out evaluations, one JSON line each."""
    statement = _Path("statement.json")
    """The privacy statement as of the last save."""
    model = _Path("model.safetensors")
    """The newest released model."""
    vocabulary = _Path("vocabulary.txt")
    """The words of the model."""
    tokens = _Path("tokens.json")
    """How text was split into tokens."""
    federated = _Path("federated.json")
    """What the server of a federated run sees. Other runs do not have this file."""
    checkpoints = _Path("checkpoints")
    """The folder of states to resume from."""
    measures = _Path("measures.json")
    """The full measures of the newest model."""
    noise = _Path("noise")
    """The folder of keys and history of correlated noise, while a run with such noise is not complete. Secret."""
    tensorboard = _Path("tensorboard")
    """The folder of TensorBoard event files."""

    @property
    def saved_round(self) -> int:
        """The round of the newest checkpoint; 0 if there is none. A checkpoint is named by its round."""
        names = sorted(path.stem for path in self.checkpoints.glob("round-*.safetensors"))
        return int(names[-1].removeprefix("round-")) if names else 0

    @classmethod
    def begin(cls, path: str | Path) -> "RunFolder":
        """Create a hidden folder next to `path`, to be filled and then moved to `path` by `publish`.

        A run whose creation was interrupted therefore never looks like a run.

        Raises:
            RunFolderExists: Something is at `path` already.
        """
        target = Path(path).resolve()
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise RunFolderExists(
                f"{path} already holds something. If it is a run, continue it with `unheard resume {path}`; else name another "
                "folder."
            )
        staged = storage.new_folder_beside(target)
        (staged / "checkpoints").mkdir()
        return cls(staged)

    def publish(self, path: str | Path) -> "RunFolder":
        """Move the filled folder to `path` in one step.

        Raises:
            RunFolderExists: Another run was created at `path` meanwhile. That run stays; this folder is deleted.
        """
        target = Path(path).resolve()
        try:
            storage.move_into_place(self.path, target)
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            raise RunFolderExists(f"{path} cannot be made here ({error.strerror}): choose another --out.") from None
        return RunFolder(Path(path))

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Open the folder of an existing run.

        Raises:
            RunFolderMissing: It has no run file, or it has lost its ledger.
        """
        folder = cls(Path(path))
        folder.check_files()
        if not folder.run_file.exists():
            raise RunFolderMissing(not_a_run_folder(path))
        if not folder.ledger.exists():
            raise RunFolderMissing(
                f"{path} has lost its ledger: put it back. Without it nobody can say what this run has cost its users."
            )
        return folder

    def check_files(self) -> None:
        """Raise `RunFolderError` if an entry of the folder is neither a file nor a folder, for example a pipe or a device."""
        if special := storage.special_file(self.path) or storage.special_file(self.checkpoints):
            raise RunFolderError(f"{special} is not a regular file. Put back the file that the run has written.")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the folder: one process trains in it at a time. The lock ends with its process.

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
        """Read the evaluations by round; for a round that was repeated, the latest.

        A last line without its end, which a crash has torn, is skipped.

        Args:
            check: Whether to call `check_metrics` first.

        Raises:
            RunFolderError: A whole line is not an evaluation, or as in `check_metrics`.
            CheckpointCorrupt: As in `check_metrics`.
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
        """Check that the evaluations which the newest checkpoint remembers are there. The file may have been deleted.

        Raises:
            RunFolderError: The file was changed, or is of another run.
            CheckpointCorrupt: The newest checkpoint is damaged.
        """
        known = self._remembered_metrics()  # before the evaluations, which a run that trains meanwhile only appends to
        # DP: evaluations of another run, or with other figures, would be shown beside this run's epsilon.
        if self.metrics.exists() and known is not None and self.metrics_digest(known["bytes"]) != known:
            raise RunFolderError(
                f"{self.metrics} does not have the evaluations that the newest checkpoint remembers: it was changed, or is of "
                "another run. Restore it from a copy, or delete it: neither the model nor the ledger needs it."
            )

    def _remembered_metrics(self) -> dict[str, Any] | None:
        """The digest of the evaluations in the newest checkpoint; None if there is none, as in older versions."""
        paths: list[Path] = []
        for _ in range(5):  # a trainer deletes its oldest checkpoint when it has saved a new one
            paths = sorted(self.checkpoints.glob("round-*.safetensors"))
            try:
                known = read_facts(paths[-1]).get("metrics") if paths else None
            except FileNotFoundError:
                continue
            return known if isinstance(known, dict) and set(known) == {"bytes", "sha256"} else None
        # DP: a checkpoint that is listed and cannot be found is not the same as none: evaluations would not be checked.
        raise CheckpointCorrupt(not_written_by_unheard(paths[-1]))

    def public_settings(self) -> dict[str, Any]:
        """Read the run file as one flat table, `table.key` to value, without the keys that name paths of this machine."""
        try:
            tables = tomllib.loads(self.run_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{self.run_file} cannot be read as a run file: {error}.") from None
        return {key: value for key, value in _flat(tables) if key not in LOCAL_KEYS}

    def model_digest(self) -> str:
        """Return the SHA-256 of the released model, which tells whether measures belong to it or to an older model."""
        try:
            return hashlib.sha256(self.model.read_bytes()).hexdigest()
        except OSError as error:
            raise RunFolderMissing(f"{self.model} cannot be read: {error.strerror}.") from None

    def read_measures(self) -> dict[str, Any] | None:
        """Read the full measures of the newest model.

        Returns:
            None if the newest model was not measured yet, or measures.json is damaged, so that it must be measured again.
        """
        try:
            content = json.loads(self.measures.read_text(encoding="utf-8"))
            is_current = content["model_sha256"] == self.model_digest() and content["format"] == MEASURES_FORMAT
            return content if is_current and are_measures(content) else None
        except (OSError, ValueError, TypeError, KeyError, RecursionError, RunFolderMissing):
            return None

    def drop_metrics_after(self, round: int) -> None:
        """Drop the evaluations of rounds after `round`, which will be done again, so that each round appears once."""
        kept = [row for row in self.read_metrics() if int(row["round"]) <= round]
        content = b"".join(json.dumps(row).encode() + b"\n" for row in kept)
        if self.metrics.exists() and content != self.metrics.read_bytes():
            replace_file(self.metrics, content)

    def metrics_digest(self, size: int | None = None) -> dict[str, Any]:
        """The size and the SHA-256 of the evaluations, by which a checkpoint knows them again.

        The file is only appended to, so the first bytes of a later file have the digest of an earlier one.

        Args:
            size: How many bytes from the beginning on; None for all.
        """
        content = self.metrics.read_bytes()[:size] if self.metrics.exists() else b""
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def nodes_digest(self) -> str | None:
        """The SHA-256 of federated.json; None for a run without nodes."""
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


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables and lists, named by their path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _flat(item, f"{prefix}.{i}")
    else:
        yield prefix, value


def configuration_hash(tables: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the complete tables of a run file, by which the ledger of a run names its configuration.

    Args:
        tables: The tables, as in the run file of a run folder.
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
    """Bring a value into one form before it is hashed: 20 in Python and 20.0 read back from TOML are the same number."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def read_facts(path: Path) -> dict[str, Any]:
    """Read the facts in the header of a checkpoint or a model (`training/checkpoint.py`), without its tensors.

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
    """The error message for a checkpoint or a model whose header cannot be read."""
    return (
        f"{path} cannot be read as a file that `unheard` wrote, so the ledger cannot be compared with it. Put back a "
        "whole copy. Delete it to resume from the checkpoint before (the rounds done again are charged again)."
    )


def not_a_run_folder(path: str | Path) -> str:
    """The error message for a path that holds no run."""
    if (Path(path) / "corpus.json").is_file():
        return (
            f"{path} is a token store, not a run folder. Name the folder that `unheard train --out` wrote. For the store: "
            f"`unheard corpus show {path}` checks its files, `unheard statement {path}` says what its users have spent."
        )
    return f"{path} is not a run folder: it has no run.toml. Name the folder that `unheard train --out` wrote."


def are_measures(content: Any) -> bool:
    """Whether a value has the form of the full measures that `evaluation/measures.py` computes."""
    try:
        return (
            isinstance(content["max_tokens"], int)
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
    """Whether a value has the figures by token, by user and by band of a model or of a baseline."""
    accuracies = ("accuracy_top1", "accuracy_top3", "accuracy_top5")
    figures = [content["tokens"][key] for key in (*accuracies, "accuracy_top1_words", "loss", "perplexity", "tokens")]
    figures += [content["users"][key][p] for key in (*accuracies, "perplexity") for p in ("mean", "p5", "p50", "p95")]
    figures += [band[key] for band in content["bands"] for key in ("share", "targets", *accuracies)]
    return all(map(_is_number, figures)) and all(isinstance(band["band"], str) for band in content["bands"])


def _evaluation(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl as a table of numbers (null for one that is not finite); None if it is something else."""
    try:
        row = json.loads(line)
        return row if all(map(_is_number, row.values())) and int(row["round"]) >= 0 else None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or null for a number that is not finite."""
    return isinstance(value, int | float | None) and not isinstance(value, bool)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file of a run folder atomically; raises `RunFolderError` if it cannot be written."""
    with _advice_on_failure(path):
        storage.replace_file(path, content)


@contextlib.contextmanager
def _advice_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"Cannot write {path}: {error.strerror}. What was there before is unchanged.") from None
