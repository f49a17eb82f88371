"""Mutation tests: apply each mutant of mutants.toml to a copy of the code, and check that one of its tests fails.

    python -m tests.mutants.run                            # all mutants (`make mutants`): 5 to 15 minutes on two cores
    python -m tests.mutants.run noise                      # mutants whose name contains the word
    python -m tests.mutants.run --file privacy/ tuning/    # mutants of these files or folders of src/unheard
    python -m tests.mutants.run --set other.toml           # mutants of another file in the format of mutants.toml
    python -m tests.mutants.run --processes 8              # eight mutants at a time (default: one per core)

For each mutant only the tests that it names are run. One process imports PyTorch and the other libraries once and forks
for each mutant, so a mutant takes little longer than its tests. It is an error if the code does not contain a text that
a mutant replaces, because such a mutant would change nothing.
"""

import argparse
import importlib
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CI": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Environment variables of pytest: one thread per process; the same hypothesis examples in each run (`CI`), so that
results repeat; and no plugins except the one named in `OPTIONS`, which ends a test after its timeout."""
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "--no-header"]
KEPT = ("src", "tests", "docs", "benchmarks", "examples", "reproduction", "pyproject.toml", "README.md")
PRELOADED = ("torch", "dp_accounting", "scipy.stats", "duckdb", "randomgen", "safetensors.torch", "pytest")
PRELOADED += ("typer", "rich.table", "jinja2", "pandas", "pyarrow.parquet", "hypothesis", "mpmath", "filelock")


@dataclass(frozen=True)
class Mutant:
    """A deliberate error in one source file, and the tests that must fail because of it.

    Attributes:
        name: What is wrong with the changed code, in words.
        file: The file, relative to src/unheard.
        edits: Pairs of a text that occurs exactly once in the file, and its replacement.
        tests: Arguments for pytest.
    """

    name: str
    file: str
    edits: list[list[str]]
    tests: list[str]

    def broken(self, source: str) -> str:
        """Return the text of the file with all edits applied.

        Raises:
            LookupError: A text to replace does not occur exactly once.
            SyntaxError: The changed text is not valid Python.
        """
        for before, after in self.edits:
            if source.count(before) != 1:
                raise LookupError(f"'{self.name}': {self.file} has {source.count(before)} times, not once: {before!r}")
            source = source.replace(before, after)
        compile(source, self.file, "exec")
        return source


def mutants(path: Path = Path(__file__).parent / "mutants.toml") -> list[Mutant]:
    """Read the mutants of a TOML file."""
    return [Mutant(**table) for table in tomllib.loads(path.read_text())["mutant"]]


def copy_to(folder: Path) -> None:
    """Copy the code and its tests to a folder."""
    for name in KEPT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


def preload() -> None:
    """Import the libraries that most tests need, so that forked processes need not import them."""
    for name in PRELOADED:
        importlib.import_module(name)


def start(folder: Path, tests: list[str]) -> int:
    """Start pytest in a forked process, on the code in a folder and not on the installed code. Return the process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    try:
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # undo the redirection by the progress bar
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder / "src")
        own = {str(ROOT), str(ROOT / "src"), ""}
        sys.path[:] = [str(folder), str(folder / "src"), *(path for path in sys.path if path not in own)]
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "unheard")]:
            del sys.modules[name]
        import pytest

        status = int(pytest.main([*OPTIONS, *tests]))
        sys.stdout.flush()
    except BaseException as error:  # any error: a forked process must not return to the loop of its parent
        os.write(2, repr(error).encode())
        status = 3
    os._exit(status)


def verdict(folder: Path, status: int) -> str | None:
    """Return the name of the first test that failed in a folder, or None if all tests passed.

    Raises:
        RuntimeError: pytest itself failed, so the result says nothing about the mutant.
    """
    output = (folder / "output").read_text(errors="replace")
    if status not in (0, 1):
        raise RuntimeError(f"pytest ended with {status}:\n{output[-4000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) \S*?(\w+)(?:\[.*\])?(?: - .*)?$", output, re.MULTILINE)
    return None if status == 0 else failed.group(1) if failed else "a test that did not say its name"


def put(folder: Path, mutant: Mutant, source: str) -> None:
    """Write a text to the file that a mutant changes, and delete the bytecode of the previous text."""
    path = folder / "src" / "unheard" / mutant.file
    path.write_text(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def run_all(chosen: list[Mutant], folders: list[Path], tell: Callable[[Mutant, str | None], None]) -> None:
    """Run all mutants, one at a time in each folder, and call `tell` with each result."""
    waiting: Iterator[Mutant] = iter(chosen)
    free, running = list(folders), dict[int, tuple[Mutant, Path]]()
    while True:
        while free and (mutant := next(waiting, None)) is not None:
            folder = free.pop()
            put(folder, mutant, mutant.broken((ROOT / "src" / "unheard" / mutant.file).read_text()))
            running[start(folder, mutant.tests)] = (mutant, folder)
        if not running:
            return
        pid, status = os.wait()
        mutant, folder = running.pop(pid)
        put(folder, mutant, (ROOT / "src" / "unheard" / mutant.file).read_text())
        free.append(folder)
        tell(mutant, verdict(folder, os.waitstatus_to_exitcode(status)))


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="words that the name of a mutant must contain")
    parser.add_argument("--file", nargs="+", default=[""], help="prefixes of paths below src/unheard")
    parser.add_argument(
        "--set", type=Path, default=Path(__file__).parent / "mutants.toml", help="the TOML file with the mutants"
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="number of mutants that run at a time"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the chosen mutants and print for each the test that failed.

    Returns:
        The exit status: 0 if a test failed for each mutant, 1 if not, 2 if no mutant could be run.
    """
    asked, console = parsed(arguments), Console()
    chosen = [m for m in mutants(asked.set) if all(word in m.name for word in asked.words)]
    chosen = [m for m in chosen if m.file.startswith(tuple(asked.file))]
    if not chosen:
        console.print("No mutant fits.", markup=False)
        return 2
    for mutant in chosen:
        mutant.broken((ROOT / "src" / "unheard" / mutant.file).read_text())  # check all before any is run
    os.environ.update(ENVIRONMENT)
    preload()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    alive: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as name, Progress(*columns, console=console) as progress:
        folders = [Path(name) / str(i) for i in range(min(asked.processes, len(chosen)))]
        for folder in folders:
            copy_to(folder)
        task = progress.add_task("the code as it is", total=len(chosen) + 1)
        every_test = sorted({test for m in chosen for test in m.tests})
        _, status = os.waitpid(start(folders[0], every_test), 0)
        if failed := verdict(folders[0], os.waitstatus_to_exitcode(status)):
            console.print(f"{failed} fails on the code as it is, so mutants cannot be tested.", markup=False)
            return 2
        for folder in folders[1:]:  # copies include the bytecode
            shutil.rmtree(folder)
            shutil.copytree(folders[0], folder)
        progress.update(task, advance=1, description="mutants")

        def tell(mutant: Mutant, test: str | None) -> None:
            if test is None:
                alive.append(mutant.name)
            by = f" ({test})" if test else ""
            words = f"{'caught' if test else 'SURVIVED':<9} {mutant.name}{by}"
            console.print(words, markup=False, highlight=False, soft_wrap=True)
            progress.update(task, advance=1)

        run_all(chosen, folders, tell)
    caught = len(chosen) - len(alive)
    console.print(f"{caught} of {len(chosen)} mutants caught ({100 * caught / len(chosen):.0f} %).", highlight=False)
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
