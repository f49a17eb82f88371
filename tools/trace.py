"""Count the files of the package that a command visits, as a measure of how many files a reader has to open.

Usage:

    python tools/trace.py train            # the counts for a run of two rounds on a synthetic corpus
    python tools/trace.py prepare --files  # also list the files, with the functions called in each
    python tools/trace.py train --path     # also print the calls from the command to the round
    python tools/trace.py train --checkout ../unheard-0.1.0      # the same for another checkout of Unheard

The script runs the command in this process on a small synthetic corpus in a temporary folder and records every Python
call with `sys.setprofile`. It reports

    files       files under src/unheard in which at least one function was called
    switches    distinct pairs (caller, callee) of functions that are in two different packages of src/unheard
    calls       for `train`: length of the chain of calls from the command to the round (`ROUNDS`)

Module bodies and calls during an import do not count, because a reader of the command does not follow them.
"""

import argparse
import json
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("train", "prepare")
ROUNDS = (("training/round.py", "run_rounds"), ("training/loop.py", "_rounds"))
"""File and name of the function that runs a round: in this version, and in version 0.1.0."""
IMPORT_MACHINERY = "<frozen importlib"
"""Beginning of the file name of frames that belong to Python's import system."""


class Trace:
    """A profile function for `sys.setprofile` that records which functions of the package are called, and from where.

    Args:
        source: The folder of the package, `src/unheard` of a checkout.

    Attributes:
        functions: The names of the called functions, by file.
        edges: Calls from one package to another: file and function of the caller, file and function of the callee.
        path: The chain of calls from the command to the first round; empty if no round was run.
    """

    def __init__(self, source: Path) -> None:
        self.source = f"{source}/"
        self.functions: dict[str, set[str]] = defaultdict(set)
        self.edges: set[tuple[str, str, str, str]] = set()
        self.path: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (name := self._package_file(frame)) is None or _is_importing(frame):
            return
        function = frame.f_code.co_qualname
        self.functions[name].add(function)
        stack = self._package_stack(frame.f_back)
        if stack and _package(stack[0][0]) != _package(name):
            self.edges.add((*stack[0], name, function))
        if (name, function) in ROUNDS and not self.path:
            self.path = [f"{file}: {caller}" for file, caller in reversed(stack)]

    def _package_file(self, frame: FrameType) -> str | None:
        """Return the path of a frame's file relative to the package; None for other code, and for module bodies."""
        path = frame.f_code.co_filename
        if not path.startswith(self.source) or not frame.f_code.co_flags & 0x2:  # CO_NEWLOCALS: a function
            return None
        return path[len(self.source) :]

    def _package_stack(self, frame: FrameType | None) -> list[tuple[str, str]]:
        """Return file and name of the package's functions on the stack, innermost first.

        Comprehensions, generator expressions and lambda functions are skipped.
        """
        stack = []
        while frame is not None:
            name = self._package_file(frame)
            if name is not None and not frame.f_code.co_name.startswith("<"):
                stack.append((name, frame.f_code.co_qualname))
            frame = frame.f_back
        return stack


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a frame runs while a module is imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORT_MACHINERY):
            return True
        frame = frame.f_back
    return False


def _package(name: str) -> str:
    """Return the package of a file, such as `training` for `training/round.py`; empty for a top-level module."""
    return name.split("/")[0] if "/" in name else ""


def _unheard(*words: str) -> Callable[[], None]:
    """Return a function that runs a command of `unheard` in this process."""

    def run() -> None:
        from unheard.cli.main import app

        app([*words], standalone_mode=False)

    return run


def _steps(command: str, folder: Path) -> tuple[list[Callable[[], None]], Callable[[], None]]:
    """Return the functions that must run before the command (not traced), and the function that runs the command.

    Args:
        command: One of `COMMANDS`.
        folder: A temporary folder, in which the text is written.
    """
    text, corpus, run_file = folder / "text.jsonl", folder / "corpus", folder / "run.toml"
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then", "it", "sleeps"]
    rows = [{"user": f"u{u}", "text": " ".join(words[(u + k) % 13] for k in range(30))} for u in range(80)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = ("--user-field", "user", "--text-field", "text", "--vocab-size", "50", "--held-out", "0.3")
    prepare = _unheard("prepare", str(text), "--out", str(corpus), *fields, "--workers", "1")
    if command == "prepare":
        return [], prepare
    init = _unheard("init", str(run_file), "--corpus", str(corpus), "--population", "60", "--users-per-round", "10")
    small = ["model.embedding_size=8", "model.hidden_size=8", "training.rounds=2"]
    train = _unheard("train", str(run_file), "--out", str(folder / "run"), *(w for s in small for w in ("--set", s)))
    return [prepare, init], train


def trace(command: str, checkout: Path = ROOT) -> Trace:
    """Run a command of a checkout on a small corpus and return the record of its calls.

    One process can trace only one checkout, because it imports `unheard` from there.

    Args:
        command: One of `COMMANDS`.
        checkout: The folder of the checkout.
    """
    sys.path.insert(0, str(checkout / "src"))
    recorded = Trace(checkout / "src" / "unheard")
    with tempfile.TemporaryDirectory() as folder:
        before, work = _steps(command, Path(folder))
        for step in before:
            step()
        threading.setprofile(recorded)
        sys.setprofile(recorded)
        try:
            work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return recorded


def main() -> None:
    """Trace the command that is given on the command line and print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--files", action="store_true", help="list the files and the functions called in each")
    parser.add_argument("--path", action="store_true", help="print the calls from the command to the round")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the checkout to trace (default: this one)")
    options = parser.parse_args()
    recorded = trace(options.command, options.checkout.resolve())
    print(f"{options.command}: files {len(recorded.functions)}, switches {len(recorded.edges)}", end="")
    print(f", calls {len(recorded.path) - 1}" if recorded.path else "")
    if options.files:
        for name, functions in sorted(recorded.functions.items()):
            print(f"  {name}: {', '.join(sorted(functions))}")
    if options.path:
        print("\n".join(f"  {call}" for call in recorded.path))


if __name__ == "__main__":
    main()
