"""What runs left behind, as lines of JSON: everything that tables and figures are made of.

In: finished or interrupted runs. Out: `results/<corpus>/runs.jsonl`, one line a run; of a name, the line that went furthest counts.
Figures only: nothing of anyone's text, no user, no cohort. Torch is not needed to read it.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from unheard import storage
from unheard.errors import InvalidValue, RunFolderError

FILE = "runs.jsonl"
WAIT_SECONDS = 60.0
"""How long to wait for another process that adds lines."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run, as far as it went."""

    name: str
    corpus: str
    """The name that the corpus goes by in print: `blogs`."""
    seed: int
    rounds: int
    """Rounds that were done."""
    planned: int
    """Rounds that the recipe asks for."""
    settings: dict[str, Any]
    """The complete run file, as tables, without paths."""
    evaluations: list[dict[str, Any]]
    """round, accuracy_top1, accuracy_top3, accuracy_top5, loss, perplexity: every 20 rounds. A loss that is not finite is None."""
    head_words: dict[str, list[int]] = field(default_factory=dict)
    """For n = 10, 50, 100: how many targets had 0, 1, ... 10 of the ten predictions among the n most frequent words."""
    accuracy_elsewhere: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The last model on held-out users of another corpus, by the role of that corpus: `main`."""
    parameters: int
    epsilon: dict[str, float | None]
    """By accountant, with `delta`: what this very run cost its population, as it is. None: infinite."""
    population: int
    store: str = ""
    """Names the token store by how it was prepared, as ledgers do; lines of before do not have it."""
    seconds: float
    """Wall time of its rounds, evaluation included; runs side by side share it by their updates. A group's first turn, which
    compiles, and rounds of a sitting that was killed, count at the pace of the others."""
    users_per_second: float
    """Of the whole group that it ran with, in its last sitting; 0 if that did no round."""
    device: str
    date: str
    commit: str


def append(folder: Path, results: Iterable[RunResult]) -> None:
    """A line each; of two processes one waits for the other."""
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with storage.locked(folder / f".{FILE}.lock", wait=WAIT_SECONDS):
            size, whole = path.stat().st_size if path.exists() else 0, len(_whole(path))
            if whole < size:  # a kill left the last line unfinished
                storage.truncate(path, whole, expected_size=size)
            for result in results:
                storage.append_line(path, json.dumps(asdict(result), allow_nan=False).encode())
    except OSError as trouble:
        raise RunFolderError(
            f"Cannot write {path}: {trouble.strerror}. The runs are kept: make room, or name another folder (--results)."
        ) from None


def read(folder: Path) -> dict[str, RunResult]:
    """By run name; of several lines with one name, the one that went furthest, and of those the newest."""
    known = {f.name for f in fields(RunResult)}
    found: dict[str, RunResult] = {}
    path = folder / FILE
    if not path.exists():
        return found
    for number, line in enumerate(_whole(path).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            result = RunResult(**{key: value for key, value in content.items() if key in known})
            rounds = int(result.rounds)
        except (ValueError, TypeError, AttributeError):
            raise InvalidValue(
                f"{path}, line {number}, is not a result. Remove the line; `python -m reproduction run` makes it again."
            ) from None
        before = found.get(result.name)
        if before is None or rounds >= before.rounds:
            found[result.name] = result
    return found


def _whole(path: Path) -> bytes:
    """What the file holds, less a last line that was being written when its process was killed."""
    if not path.exists():
        return b""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    try:
        json.loads(content[end:] or b"0")
    except ValueError:
        return content[:end]
    return content
