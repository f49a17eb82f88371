"""Write the results of the paper's tables and figures as HTML pages and picture files.

    write_pages(Path("reproduction/results"), Path("build/paper"))

The input is a folder of results (`results.py`), one subfolder per corpus. The output is `index.html` for the first
corpus, a folder with `index.html` for each other one, and for each of them `figures/` with every figure as SVG and PNG.

`templates/paper.html` lays the page out, in the frame of `unheard.report.page` and with autoescape.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import FileSystemLoader

from reproduction.comparison import comparison_tables
from reproduction.exhibit import NOT_RUN, Exhibit, Table
from reproduction.exhibits import EXHIBITS, exhibit
from reproduction.plots import plot_of
from reproduction.results import ResultSet, result_sets
from reproduction.verdict import UNCERTAIN, points
from unheard.report.images import write_png, write_svg
from unheard.report.page import environment, render
from unheard.run_folder import replace_file

TEMPLATES = FileSystemLoader(Path(__file__).parent / "templates")
Progress = Callable[[str, float], None]
"""Called with the name of a step and the share of it that is done."""


def write_pages(
    results: Path, out: Path, *, pictures: bool = True, progress: Progress = lambda step, part: None
) -> list[Path]:
    """Write a page for each corpus.

    Args:
        results: Folder with results, of one corpus or with a subfolder per corpus.
        out: Folder of the pages. The first corpus has its page here, each other one in a subfolder.
        pictures: Whether to write every figure as SVG and PNG as well.
        progress: Called after each table and figure.

    Returns:
        The paths of the pages, the main one first.
    """
    founds = result_sets(results)
    folders = [out, *(out / found.folder for found in founds[1:])]
    written = []
    for found, folder in zip(founds, folders, strict=True):
        others = [
            (other.title, _link(folder, target, out))
            for other, target in zip(founds, folders, strict=True)
            if other is not found
        ]
        shown = exhibits(found, progress)
        compared = () if found is founds[0] else comparison_tables(founds[0], found)
        written.append(write_page(shown, folder, others=others, compared=compared))
        if pictures:
            write_pictures(shown, folder / "figures", progress)
    return written


def exhibits(found: ResultSet, progress: Progress = lambda step, part: None) -> list[Exhibit]:
    """Every table and figure of the paper, in order, filled with the results of one corpus."""
    filled = []
    for i, name in enumerate(EXHIBITS, 1):
        filled.append(exhibit(name, found))
        progress(f"tables {found.folder}".strip(), i / len(EXHIBITS))
    return filled


def write_page(
    shown: Sequence[Exhibit],
    folder: Path,
    *,
    others: Sequence[tuple[str, str]] = (),
    compared: Sequence[Table] = (),
) -> Path:
    """Write `folder/index.html` (see `render_page`) and return its path. An existing page is replaced atomically."""
    page = folder / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    replace_file(page, render_page(shown, others=others, compared=compared).encode())
    return page


def render_page(
    shown: Sequence[Exhibit], *, others: Sequence[tuple[str, str]] = (), compared: Sequence[Table] = ()
) -> str:
    """Render the page of one corpus.

    Args:
        shown: The tables and figures.
        others: Names and links of the pages of other corpora.
        compared: Tables that compare these results with the main ones.

    Returns:
        The HTML text.
    """
    corpus = shown[0].corpus
    return render(
        environment(TEMPLATES),
        "paper.html",
        heading=f"The paper, run on {corpus}" if corpus else "The paper, not yet run",
        mark="the paper's tables and figures",
        source="results",
        where=f"on {corpus}" if corpus else "with no results yet",
        counts=count_outcomes(shown),
        margin=points(UNCERTAIN),
        others=others,
        compared=compared,
        exhibits=[_content(exhibit) for exhibit in shown],
    )


def write_pictures(shown: Sequence[Exhibit], folder: Path, progress: Progress = lambda step, part: None) -> list[Path]:
    """Write every figure as SVG and PNG and return the paths."""
    plots = [plot_of(figure) for exhibit in shown for figure in exhibit.figures]
    written = []
    for i, plot in enumerate(plots, 1):
        written += [write_svg(plot, folder), write_png(plot, folder)]
        progress("figures", i / len(plots))
    return written


def count_outcomes(shown: Sequence[Exhibit]) -> str:
    """How many of the paper's conclusions held, and how many of our own expectations, which are counted separately."""
    texts = []
    for whose, own in (("the paper's {} conclusions", False), ("our own {} expectations", True)):
        outcomes = [exhibit.verdict.outcome for exhibit in shown if exhibit.recipe.is_of_the_paper is not own]
        if outcomes:
            counts = Counter(outcomes)
            text = f"{counts['held']} of {whose.format(len(outcomes))} held"
            text += f", {counts['did not hold']} did not" if counts["did not hold"] else ""
            text += f", {counts['cannot tell']} cannot be decided" if counts["cannot tell"] else ""
            texts.append(text)
    return "; ".join(texts)


def _content(exhibit: Exhibit) -> dict[str, Any]:
    """One exhibit as variables of `templates/paper.html`."""
    recipe, verdict = exhibit.recipe, exhibit.verdict
    plots = [plot_of(figure) for figure in exhibit.figures]
    return {
        "name": recipe.name,
        "place": recipe.location,
        "title": _typeset(recipe.title),
        "claim": _typeset(recipe.claim),
        "claimed_by": recipe.claimed_by,
        "outcome": verdict.outcome,
        "outcome_class": verdict.outcome.replace(" ", "-"),
        "sentence": verdict.sentence,
        "rule": verdict.rule,
        # The section has the recipe's name as its anchor, so the plot needs another one.
        "plots": [replace(plot, name=f"plot-{plot.name}") for plot in plots],
        "tables": exhibit.tables,
        "notes": exhibit.notes,
        "runs": exhibit.runs,
        "runs_done": sum(row[1] != NOT_RUN for row in exhibit.runs.rows),
    }


def _typeset(text: str) -> str:
    """Recipes are written in ASCII so that any terminal shows them; the page has the Greek letters."""
    return text.replace("sigma", "σ").replace("epsilon", "ε").replace("10^6", "10⁶")


def _link(page_folder: Path, target: Path, out: Path) -> str:
    """The relative link from one page to another."""
    up = "" if page_folder == out else "../"
    return f"{up}index.html" if target == out else f"{up}{target.name}/index.html"
