"""Measure how readable a Python package is: size, documentation, and how concepts are spread over files.

    python tools/code_stats.py                     # this checkout: src/unheard and reproduction
    python tools/code_stats.py ../other [...]      # other checkouts, or package folders, of any project
    python tools/code_stats.py --trace ../other    # also run `train` and `prepare` (a checkout of Unheard)

The script prints one column per package. Without `--trace` it needs only the standard library.

    code lines                 lines without blank lines, comments and docstrings
    single importer            modules that exactly one other module of the package imports
    private, used once         functions whose name begins with _ and occurs once outside their definition
    public functions           functions and methods without a leading _; functions inside functions do not count
    class names used twice     names that two or more public classes of the package have
    test functions             test functions in the folder tests/ of the checkout; a parametrised test counts once
    visits, calls              see tools/trace.py
"""

import argparse
import ast
import collections
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

LONG_LINE = 120
"""Longest line of the documents, in characters."""
TRACE = Path(__file__).with_name("trace.py")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def documentation_lines(source: str, tree: ast.Module) -> tuple[set[int], set[int]]:
    """Return the numbers of the lines of docstrings and of whole-line comments."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:  # a string after an attribute documents the attribute
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    }
    return docstrings, comments


def definitions(node: ast.AST) -> Iterator[ast.ClassDef | Function]:
    """Yield the classes and functions of a module and of its classes, without those inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield child
        elif isinstance(child, ast.ClassDef):
            yield child
            yield from definitions(child)
        else:
            yield from definitions(child)


def packages_of(folder: Path) -> list[Path]:
    """Return the packages to measure: `src/unheard` and `reproduction` of a checkout, or the package of a folder."""
    if (folder / "src" / "unheard").is_dir():
        return [folder / "src" / "unheard", *(p for p in [folder / "reproduction"] if p.is_dir())]
    inside = [folder / "src" / folder.name, folder / folder.name, folder / folder.name.replace("-", "_")]
    return [next((p for p in inside if p.is_dir()), folder)]


def measure(folder: Path) -> dict[str, str]:
    """Return the column of the table for one package: the text of each cell by the name of its row."""
    paths = sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)
    if not paths:
        raise SystemExit(f"{folder} holds no Python files.")
    sources = {path: path.read_text(encoding="utf-8", errors="replace") for path in paths}
    lines_of, body_sizes, imported_by = [], [], collections.Counter()
    total = code = docs = comments = 0
    public = undocumented = with_args = 0
    private: collections.Counter[str] = collections.Counter()
    classes: collections.Counter[str] = collections.Counter()
    words = collections.Counter(re.findall(r"\w+", "\n".join(sources.values())))
    stems = {path: ".".join(path.with_suffix("").relative_to(folder.parent).parts) for path in paths}
    modules = {name.removesuffix(".__init__") for name in stems.values()}
    for path, source in sources.items():
        tree = ast.parse(source)
        lines = source.splitlines()
        docstring_lines, comment_lines = documentation_lines(source, tree)
        blank = {number for number, line in enumerate(lines, 1) if not line.strip()}
        total += len(lines)
        docs += len(docstring_lines)
        comments += len(comment_lines)
        code += len(set(range(1, len(lines) + 1)) - docstring_lines - comment_lines - blank)
        lines_of.append(len(lines))
        targets = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    targets |= {full if full in modules else node.module} & modules
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names} & modules
            elif isinstance(node, Function):
                body_sizes.append((node.end_lineno or node.lineno) - node.body[0].lineno + 1)
                private[node.name] += node.name.startswith("_") and not node.name.startswith("__")
        imported_by.update(targets - {stems[path]})
        for node in definitions(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += not node.name.startswith("_")
            elif not node.name.startswith("_"):
                text = ast.get_docstring(node) or ""
                public += 1
                undocumented += not text
                with_args += "Args:" in text or "Parameters" in text
    once = sum(1 for name, defined in private.items() if defined and words[name] - defined == 1)
    return {
        "files": f"{len(paths):,}",
        "lines": f"{total:,}",
        "code lines": f"{code:,}",
        "docstrings, share of lines": f"{100 * docs / total:.1f} %",
        "docstrings and comments, share of lines": f"{100 * (docs + comments) / total:.1f} %",
        "lines per file, median": f"{statistics.median(lines_of):g}",
        "function body, median lines": f"{statistics.median(body_sizes or [0]):g}",
        "modules with a single importer": f"{sum(count == 1 for count in imported_by.values())} of {len(modules)}",
        "private functions used once": f"{once} of {sum(private.values())}",
        "public functions without docstring": f"{undocumented} of {public}",
        "public functions with Args": f"{with_args} of {public}",
        "class names used twice": f"{sum(count > 1 for count in classes.values())} of {len(+classes)}",
    }


def measure_checkout(checkout: Path, with_trace: bool) -> dict[str, str]:
    """Return the cells about a checkout of Unheard as a whole: its documents, its tests and, on request, its commands.

    Args:
        checkout: Folder of the checkout.
        with_trace: Whether to run `train` and `prepare` and count the files that they visit (`tools/trace.py`).
    """
    documents = [line for path in (checkout / "docs").rglob("*.md") for line in path.read_text().splitlines()]
    tests = [
        node.name.startswith("test_")
        for path in (checkout / "tests").rglob("test_*.py")
        for node in definitions(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, Function)
    ]
    rows = {
        f"lines of docs/ over {LONG_LINE} characters": f"{sum(len(s) > LONG_LINE and s[0] != '|' for s in documents):,}",
        "test functions": f"{sum(tests):,}",
    }
    if with_trace:
        for command in ("train", "prepare"):
            words = [sys.executable, str(TRACE), command, "--checkout", str(checkout)]
            output = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
            figures = dict(figure.rsplit(" ", 1) for figure in output[-1].partition(": ")[2].split(", "))
            rows[f"files that `{command}` visits"] = figures["files"]
            if command == "train":
                rows["calls from the command `train` to the round"] = figures["calls"]
    return rows


def main() -> None:
    """Print the table for the folders on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[Path()], help="checkouts or package folders")
    parser.add_argument("--trace", action="store_true", help="also count the files that `train` and `prepare` visit")
    options = parser.parse_args()
    columns: dict[str, dict[str, str]] = {}
    for folder in options.folders:
        packages = packages_of(folder.resolve())
        for package in packages:
            name = str(folder / package.relative_to(folder.resolve()))
            columns[name] = measure(package)
            if package.parts[-2:] == ("src", "unheard"):
                columns[name] |= measure_checkout(package.parents[1], options.trace)
    rows = list(dict.fromkeys(row for column in columns.values() for row in column))
    print("| | " + " | ".join(columns) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for row in rows:
        print(f"| {row} | " + " | ".join(column.get(row, "-") for column in columns.values()) + " |")


if __name__ == "__main__":
    main()
