"""The test of the tests: break the code in one way after the other, in a copy, and see that the suite notices each.

    python -m tests.mutants.run            all of them (`make mutants`)
    python -m tests.mutants.run noise      only those whose name has the word

Each mutant runs only the tests named for it, two at a time. A text that is no longer in the code is an error: a mutant that
breaks nothing proves nothing.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).parents[2]
AT_ONCE = 2
HOW = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
"""One thread each; and hypothesis draws the same examples every time, so that whoever is caught once is caught again."""
KEPT = ("src", "tests", "docs", "examples", "reproduction", "pyproject.toml", "README.md")


@dataclass(frozen=True)
class Mutant:
    """Texts of one file and what stands in their place; and the tests that must fail for it."""

    name: str
    file: str
    edits: list[list[str]]
    tests: list[str]

    def broken(self, source: str) -> str:
        """The file's text with the mutant in it."""
        for before, after in self.edits:
            if source.count(before) != 1:
                raise LookupError(f"'{self.name}': {self.file} has {source.count(before)} times, not once: {before!r}")
            source = source.replace(before, after)
        compile(source, self.file, "exec")
        return source


def mutants() -> list[Mutant]:
    told = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())
    return [Mutant(**table) for table in told["mutant"]]


def copy_to(folder: Path) -> None:
    for name in KEPT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


def failing_test(folder: Path, tests: list[str]) -> str | None:
    """The first test that fails on the code in a folder (not on the installed one), or None if all pass."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests],
        cwd=folder,
        env={**os.environ, **HOW, "PYTHONPATH": str(folder / "src")},
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):  # 2 and above: pytest itself could not run, which says nothing about the mutant
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) \S*?(\w+)(?:\[.*\])?(?: - .*)?$", done.stdout, re.MULTILINE)
    return None if done.returncode == 0 else failed.group(1) if failed else "a test that did not say its name"


def caught_by(mutant: Mutant) -> str | None:
    """The test that notices the mutant; None if it survives."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        copy_to(folder)
        file = folder / "src" / "unheard" / mutant.file
        file.write_text(mutant.broken(file.read_text()))
        return failing_test(folder, mutant.tests)


def main(words: list[str]) -> int:
    console = Console()
    chosen = [m for m in mutants() if all(word in m.name for word in words)]
    if not chosen:
        console.print(f"No mutant's name has: {' '.join(words)}.\n{__doc__}", markup=False)
        return 2
    for mutant in chosen:
        mutant.broken((ROOT / "src" / "unheard" / mutant.file).read_text())  # all of them, before any is run
    every_test = sorted({test for m in chosen for test in m.tests})
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    alive: list[str] = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("the code as it is", total=len(chosen) + 1)
        with tempfile.TemporaryDirectory(prefix="mutant-") as name:
            copy_to(Path(name))
            if failed := failing_test(Path(name), every_test):
                console.print(f"{failed} fails on the code as it is: mutants would prove nothing.", markup=False)
                return 2
        progress.update(task, advance=1, description="mutants")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for mutant, test in zip(chosen, pool.map(caught_by, chosen), strict=True):
                if test is None:
                    alive.append(mutant.name)
                by = f" ({test})" if test else ""
                words = f"{'caught' if test else 'SURVIVED':<9} {mutant.name}{by}"
                console.print(words, markup=False, highlight=False, soft_wrap=True)
                progress.update(task, advance=1)
    caught = len(chosen) - len(alive)
    console.print(
        f"{caught} of {len(chosen)} mutants caught ({100 * caught / max(len(chosen), 1):.0f} %).", highlight=False
    )
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
