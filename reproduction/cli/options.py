"""Options that several commands of `python -m reproduction` share, defined as in `unheard/cli/options.py`."""

from pathlib import Path
from typing import Annotated, Literal

from unheard.cli.options import number, option

Results = Annotated[Path, option("The results of one corpus, or the folder above them.", metavar="DIR")]
ScaleName = Annotated[Literal["full", "smoke"], option("full: as in the paper. smoke: a tiny version of every run.")]
MostRounds = Annotated[int | None, number("At most N rounds of every run.", min=1, otherwise="as in the paper")]
ALL_RESULTS = Path("reproduction/results")
"""Folder of the results that are in the repository."""
