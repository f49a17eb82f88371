"""Run the notebooks of `examples/notebooks` from the first cell to the last, in a temporary folder.

    python tools/run_notebooks.py [NOTEBOOK ...]

The script prints the seconds that each notebook took. If a cell raises an error, it prints the traceback and its exit
status is 1. The files in the repository are not changed, because notebooks are committed without output.
"""

import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"
SECONDS_PER_CELL = 300
"""Time limit of one cell."""


def run(path: Path) -> bool:
    """Run one notebook and return whether every cell succeeded."""
    notebook = nbformat.read(path, as_version=4)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="unheard-notebook-") as folder:
        client = NotebookClient(
            notebook, timeout=SECONDS_PER_CELL, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        try:
            client.execute()
        except CellExecutionError as error:
            print(f"{path.name}: failed\n{error}", file=sys.stderr)
            return False
    print(f"{path.name}: {time.monotonic() - began:.0f} s")
    return True


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:]] or sorted(NOTEBOOKS.glob("*.ipynb"))
    results = [run(path) for path in paths]
    sys.exit(0 if results and all(results) else 1)
