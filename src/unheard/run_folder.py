"""What a run folder holds: the contract between training and everything after it.

    run.toml            the configuration, complete          ledger.jsonl      what each round cost, hash-chained
    metrics.jsonl       held-out evaluations by round        statement.json    the privacy statement, as of the last save
    model.safetensors   the newest released model            vocabulary.txt    its words
    tokens.json         how text was split into tokens       checkpoints/      states to resume from
    measures.json       the newest model's full measures     tensorboard/      the evaluations again, as event files

Every whole file is replaced in one step (write beside, fsync, rename), so a crash leaves the old one or the new one.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.errors import RunFolderError, RunFolderExists, RunFolderInUse, RunFolderMissing

MEASURES_FORMAT = 1


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run, and the few operations that keep them whole."""

    path: Path

    @property
    def run_file(self) -> Path:
        return self.path / "run.toml"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def statement(self) -> Path:
        return self.path / "statement.json"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def vocabulary(self) -> Path:
        return self.path / "vocabulary.txt"

    @property
    def tokens(self) -> Path:
        return self.path / "tokens.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def saved_round(self) -> int:
        """How far its newest checkpoint is; a checkpoint is named by its round."""
        names = sorted(path.stem for path in self.checkpoints.glob("round-*.safetensors"))
        return int(names[-1].removeprefix("round-")) if names else 0

    @property
    def measures(self) -> Path:
        return self.path / "measures.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @classmethod
    def begin(cls, path: str | Path) -> "RunFolder":
        """A new folder beside its place, to be filled and then moved there by `settle`: a half-made run is never a run."""
        place = Path(path).resolve()
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise RunFolderExists(
                f"{path} already holds something. If it is a run, go on with `unheard resume {path}`; else name another folder."
            )
        beside = storage.new_folder_beside(place)
        (beside / "checkpoints").mkdir()
        return cls(beside)

    def settle(self, path: str | Path) -> "RunFolder":
        """Move a filled folder to its place, in one step; another run that got there first stays."""
        place = Path(path).resolve()
        try:
            storage.move_into_place(self.path, place)
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            raise RunFolderExists(f"{path} cannot be made here ({error.strerror}): choose another --out.") from None
        return RunFolder(Path(path))

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        folder = cls(Path(path))
        if not folder.run_file.exists():
            raise RunFolderMissing(f"{path} is not a run folder: it has no run.toml. Make one with `unheard train`.")
        if not folder.ledger.exists():
            raise RunFolderMissing(
                f"{path} has lost its ledger: put it back. Without it nobody can say what this run has cost its users."
            )
        return folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process trains in a folder at a time. The lock is the operating system's: it dies with its process."""
        # DP: two trainers on one folder would release models that the other's ledger position does not cover.
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(storage.locked(self.path / ".lock"))
            except storage.FileInUse:
                raise RunFolderInUse(
                    f"{self.path} is in use: another process is training in it. Wait for it, or name another folder."
                ) from None
            yield

    def read_metrics(self) -> list[dict[str, Any]]:
        """Evaluations by round; of a round that was done again, the latest."""
        by_round: dict[int, dict[str, Any]] = {}
        if self.metrics.exists():
            for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(
                    ValueError, TypeError, KeyError, OverflowError, RecursionError
                ):  # a line may be torn
                    row = json.loads(line)
                    by_round[int(row["round"])] = row
        return [by_round[r] for r in sorted(by_round)]

    def model_digest(self) -> str:
        """Names the released model, so that what was measured of an older one is not shown for a newer."""
        try:
            return hashlib.sha256(self.model.read_bytes()).hexdigest()
        except OSError as error:
            raise RunFolderMissing(f"{self.model} cannot be read: {error.strerror}.") from None

    def read_measures(self) -> dict[str, Any] | None:
        """The full measures of the newest model; None if it was not measured yet."""
        try:
            content = json.loads(self.measures.read_text(encoding="utf-8"))
            is_current = content["model_sha256"] == self.model_digest() and content["format"] == MEASURES_FORMAT
            return content if is_current else None
        except (OSError, ValueError, TypeError, KeyError, RunFolderMissing):
            return None

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append the evaluation of one round to `metrics.jsonl`."""
        with _advice_on_failure(self.metrics):
            storage.append_line(self.metrics, json.dumps(row).encode())


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
