"""What runs left behind, as lines of JSON: everything that tables and figures are made of.

In: finished or interrupted runs. Out: `results/<corpus>/runs.jsonl`, one line a run; of a name, the line that went furthest counts.
Figures only: nothing of anyone's text, no user, no cohort. Torch is not needed to read it.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from unheard.errors import InvalidValue

FILE = "runs.jsonl"


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
    seconds: float
    """Wall time of its rounds, evaluation included; runs side by side share it by their updates. A group's first turn, which
    compiles, and rounds of a sitting that was killed, count at the pace of the others."""
    users_per_second: float
    """Of the whole group that it ran with, in its last sitting; 0 if that did no round."""
    device: str
    date: str
    commit: str


def append(folder: Path, results: Iterable[RunResult]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a", encoding="utf-8") as file:
        for result in results:
            file.write(json.dumps(asdict(result), allow_nan=False) + "\n")


def read(folder: Path) -> dict[str, RunResult]:
    """By run name; of several lines with one name, the one that went furthest, and of those the newest."""
    known = {f.name for f in fields(RunResult)}
    found: dict[str, RunResult] = {}
    path = folder / FILE
    if not path.exists():
        return found
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            content = json.loads(line)
            result = RunResult(**{key: value for key, value in content.items() if key in known})
        except (ValueError, TypeError):
            raise InvalidValue(
                f"{path}, line {number}, is not a result. Remove the line, or run its recipe again."
            ) from None
        before = found.get(result.name)
        if before is None or result.rounds >= before.rounds:
            found[result.name] = result
    return found
