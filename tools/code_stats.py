"""Measure how readable a Python package is: size, documentation, and how concepts are spread over files.

    python tools/code_stats.py [FOLDER ...]        (default: src/unheard reproduction)

Each FOLDER is a package in any checkout, for example the source folder of another project. The script prints one column per
folder. It needs only the standard library.

    lines                      all lines of all Python files
    code lines                 without blank lines, comments and docstrings
    documentation              share of lines that are docstrings or comments
    single importer            modules that exactly one other module of the package imports
    private, used once         functions whose name begins with _ and occurs once outside their definition
"""

import argparse
import ast
import collections
import io
import re
import statistics
import tokenize
from pathlib import Path

LONG_LINE = 120


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


def measure(folder: Path) -> dict[str, str]:
    """Return the table's column for one package, as text by row name."""
    paths = sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)
    if not paths:
        raise SystemExit(f"{folder} holds no Python files.")
    sources = {path: path.read_text(encoding="utf-8", errors="replace") for path in paths}
    lines_of, body_sizes, imported_by = [], [], collections.Counter()
    total = code = docs = comments = 0
    public = undocumented = with_args = 0
    private: collections.Counter[str] = collections.Counter()
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
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body_sizes.append((node.end_lineno or node.lineno) - node.body[0].lineno + 1)
                if node.name.startswith("_") and not node.name.startswith("__"):
                    private[node.name] += 1
                elif not node.name.startswith("_"):
                    public += 1
                    text = ast.get_docstring(node) or ""
                    undocumented += not text
                    with_args += "Args:" in text or "Parameters" in text
        imported_by.update(targets - {stems[path]})
    once = sum(1 for name, defined in private.items() if words[name] - defined == 1)
    documents = list((folder.parent.parent / "docs").rglob("*.md")) if folder.name == "unheard" else []
    long_lines = sum(
        len(line) > LONG_LINE and not line.startswith("|")
        for path in documents
        for line in path.read_text().splitlines()
    )
    share = f"{100 * (docs + comments) / total:.1f} % ({100 * docs / total:.1f} % docstrings)"
    return {
        "files": f"{len(paths):,}",
        "lines": f"{total:,}",
        "code lines": f"{code:,}",
        "documentation, share of lines": share,
        "lines per file, median": f"{statistics.median(lines_of):g}",
        "function body, median lines": f"{statistics.median(body_sizes or [0]):g}",
        "modules with a single importer": f"{sum(count == 1 for count in imported_by.values())} of {len(modules)}",
        "private functions used once": f"{once} of {sum(private.values())}",
        "public functions without docstring": f"{undocumented} of {public}",
        "public functions with Args": f"{with_args} of {public}",
        f"lines of docs/ over {LONG_LINE} characters": f"{long_lines}" if documents else "-",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[Path("src/unheard"), Path("reproduction")])
    columns = {str(folder): measure(folder.resolve()) for folder in parser.parse_args().folders}
    rows = list(dict.fromkeys(row for column in columns.values() for row in column))
    print("| | " + " | ".join(columns) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for row in rows:
        print(f"| {row} | " + " | ".join(column.get(row, "-") for column in columns.values()) + " |")


if __name__ == "__main__":
    main()
