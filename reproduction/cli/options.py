"""Options that several commands of `python -m reproduction` share, as in `unheard/cli/options.py`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Results = Annotated[Path, typer.Option(help="The results of one corpus, or the folder above them.", metavar="DIR")]
ScaleName = Annotated[
    Literal["full", "smoke"], typer.Option(help="full: as in the paper. smoke: a tiny version of every run.")
]
MostRounds = Annotated[
    int | None,
    typer.Option(min=1, help="At most N rounds of every run.", metavar="N", show_default="as in the paper"),
]
ALL_RESULTS = Path("reproduction/results")
"""The results that are in the repository."""
