"""Write the results of the paper's tables and figures as HTML pages and picture files.

    write_pages(Path("reproduction/results"), Path("build/paper"))

The input is a folder of results (`results.py`), one subfolder per corpus. The output is `index.html` for the first
corpus and a subfolder with `index.html` for each other corpus. Next to each page, `figures/` has every figure as SVG
and PNG.

The layout of the page is `templates/paper.html`, which extends the base template of `unheard.report.page`. Values are
escaped automatically.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import FileSystemLoader

from reproduction.comparison import comparison_tables
from reproduction.exhibit import Exhibit, Table
from reproduction.exhibits import EXHIBITS, exhibit
from reproduction.plots import plot_of
from reproduction.private_picture import specification
from reproduction.private_report import section
from reproduction.results import UNCERTAIN, ResultSet, result_sets
from reproduction.verdict import points
from unheard.report.page import environment, render
from unheard.report.plots import Plot, spec_for_file, write_png
from unheard.report.style import VEGALITE
from unheard.run_folder import replace_file

TEMPLATES = FileSystemLoader(Path(__file__).parent / "templates")
Progress = Callable[[str, float], None]
"""A function that is called with the name of a step and the fraction of it that is done."""


def write_pages(
    results: Path, out: Path, *, pictures: bool = True, progress: Progress = lambda step, part: None
) -> list[Path]:
    """Write a page for each corpus.

    Args:
        results: Folder with results, of one corpus or with a subfolder per corpus.
        out: Folder of the pages. The first corpus has its page here, each other one in a subfolder.
        pictures: Whether to write every figure as SVG and PNG as well.
        progress: Function that is called after each table and figure.

    Returns:
        The paths of the pages, the main one first.
    """
    founds = result_sets(results)
    folders = [out, *(out / found.folder for found in founds[1:])]
    written = []
    for found, folder in zip(founds, folders, strict=True):
        targets = zip(founds, folders, strict=True)
        others = [(o.title, os.path.relpath(t / "index.html", folder)) for o, t in targets if o is not found]
        shown = exhibits(found, progress)
        compared = () if found is founds[0] else comparison_tables(founds[0], found)
        private = private_run(results) if found is founds[0] else None
        readings = _readings(founds) if private else ()
        written.append(write_page(shown, folder, others=others, compared=compared, private=private, readings=readings))
        if pictures:
            write_pictures(shown, folder / "figures", progress)
    return written


def exhibits(found: ResultSet, progress: Progress = lambda step, part: None) -> list[Exhibit]:
    """Return every table and figure of the paper, in order, filled with the results of one corpus."""
    filled = []
    for i, name in enumerate(EXHIBITS, 1):
        filled.append(exhibit(name, found))
        progress(f"tables {found.folder}".strip(), i / len(EXHIBITS))
    return filled


def write_page(shown: Sequence[Exhibit], folder: Path, **more: Any) -> Path:
    """Write `folder/index.html` and return its path. An existing page is replaced atomically.

    Args:
        shown: The tables and figures.
        folder: The folder of the page.
        more: Other arguments of `render_page`.
    """
    page = folder / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    replace_file(page, render_page(shown, **more).encode())
    return page


def private_run(results: Path) -> dict[str, Any] | None:
    """Return the values that the template needs for the section on the private run, including its plots.

    Args:
        results: The folder of all results, with the private run in `reviews_81`.

    Returns:
        The values by name; None if there are no results of the private run.
    """
    root = results / "reviews_81"
    content = section(root)
    if content is None:
        return None
    picture = specification(root)
    title = str(picture.pop("title")["text"])
    plot = Plot(name="plot-private-run", title=title, spec=picture | {"width": "container"})
    return content | {"plot": plot, "plots": [plot_of(figure) for figure in content["figures"]]}


def render_page(
    shown: Sequence[Exhibit],
    *,
    others: Sequence[tuple[str, str]] = (),
    compared: Sequence[Table] = (),
    private: dict[str, Any] | None = None,
    readings: Sequence[tuple[str, str]] = (),
) -> str:
    """Render the page of one corpus.

    Args:
        shown: The tables and figures.
        others: Names and links of the pages of other corpora.
        compared: Tables that compare these results with the main ones.
        private: Values of the section on the private run, which comes first on the page; None for no such section.
        readings: Pairs of a reading of the paper's sentence on word vectors (`READINGS`) and the counts of outcomes.

    Returns:
        The HTML text.
    """
    corpus = shown[0].corpus
    heading = f"The paper, run on {corpus}" if corpus else "The paper, not yet run"
    templates = environment(TEMPLATES)
    templates.filters["typeset"] = _typeset
    return render(
        templates,
        "paper.html",
        heading="The paper, run again" if private else heading,
        mark="the paper's tables and figures",
        source="results",
        where=f"on {corpus}" if corpus else "with no results yet",
        counts=count_outcomes(shown),
        margin=points(UNCERTAIN),
        others=others,
        compared=compared,
        private=private,
        readings=readings,
        exhibits=shown,
        # The HTML id of an exhibit's section is the recipe's name, so its plots need other ids.
        plots={
            exhibit.recipe.name: [replace(plot, name=f"plot-{plot.name}") for plot in map(plot_of, exhibit.figures)]
            for exhibit in shown
        },
    )


READINGS = {
    "": "word vectors grow (second reading)",
    "model.keep_norm=true": "projected to norm 1 after every round (first reading)",
    "model.step_norm=true": "projected to norm 1 after every local step (third reading)",
}
"""Our readings of the paper's "a fixed L2 norm of 1.0", by what the name of the results folder adds to the corpus."""


def _readings(founds: Sequence[ResultSet]) -> list[tuple[str, str]]:
    """Return the counts of outcomes for each reading of `READINGS` that has results on the first corpus."""
    first = founds[0].folder
    named = [(found, found.folder.removeprefix(first).removeprefix("-")) for found in founds]
    return [(READINGS[change], count_outcomes(exhibits(found))) for found, change in named if change in READINGS]


def write_pictures(shown: Sequence[Exhibit], folder: Path, progress: Progress = lambda step, part: None) -> list[Path]:
    """Write every figure as SVG and PNG and return the paths."""
    plots, written = [plot_of(figure) for exhibit in shown for figure in exhibit.figures], []
    for i, plot in enumerate(plots, 1):
        written += [write_svg(plot, folder), write_png(plot, folder)]
        progress("figures", i / len(plots))
    return written


def write_svg(plot: Plot, folder: Path) -> Path:
    """Write one plot as `folder/NAME.svg`, where NAME is the plot's name, and return the path."""
    import vl_convert

    path = folder / f"{plot.name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, vl_convert.vegalite_to_svg(spec_for_file(plot), vl_version=VEGALITE).encode())
    return path


def count_outcomes(shown: Sequence[Exhibit]) -> str:
    """Return a text that counts how many of the paper's conclusions held, and separately our own expectations."""
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


def _typeset(text: str) -> str:
    """Return a text with Greek letters instead of their names. Recipes are in ASCII, which any terminal shows."""
    return text.replace("sigma", "σ").replace("epsilon", "ε").replace("10^6", "10⁶")
