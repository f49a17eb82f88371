"""What a table or figure shows, as plain data: tables of text, lines to draw, a verdict, notes.

In: figures that runs found. Out: Exhibit. Terminal, page and pictures are made from it elsewhere; nothing here knows how.
"""

from dataclasses import asdict, dataclass
from typing import Any

from reproduction.recipe import Recipe
from reproduction.verdict import Verdict
from unheard.curves import Points
from unheard.report.tables import Table

NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a figure. Lines of one tint share a colour: a mean and its seeds, flat and per layer."""

    name: str
    points: Points
    tint: str = ""
    """Its own name, unless it shares another's."""
    is_dashed: bool = False
    is_thin: bool = False
    """Drawn faintly behind the others: one seed of several."""
    is_level: bool = False
    """One value, whatever x is: drawn from edge to edge."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Lines over one axis. `name` is its file's name."""

    name: str
    title: str
    x: str
    """The axis: `round` is time; any other is a setting that was swept."""
    y: str = "AccuracyTop1"
    lines: tuple[Line, ...]
    is_log: bool = False
    upright: tuple[float, str] | None = None
    """A dashed upright line, and what it says."""
    is_scatter: bool = False
    """Points that no line joins, each with its name."""
    is_share: bool = True
    """y is a share, written in percent."""


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A table or figure, filled."""

    recipe: Recipe
    corpus: str
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    verdict: Verdict
    notes: tuple[str, ...] = ()
    runs: Table
    """Which runs it is made of: rounds, seed, epsilon, hardware, date, commit."""

    def as_json(self) -> dict[str, Any]:
        """Everything shown; the recipe by what it says."""
        content = asdict(self)
        content["recipe"] = {
            "name": self.recipe.name,
            "title": self.recipe.title,
            "place": self.recipe.place,
            "claim": self.recipe.claim,
            "runs": [run.name for run in self.recipe.runs],
        }
        return content
