"""The paper on one page: every table and figure from results alone, and each figure as a file.

In: a folder of results. Out: index.html for the first of them (`corpora`), a folder for each other one, SVG and PNG files.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from unheard.paper.comparison import beside
from unheard.paper.exhibit import Exhibit, Table
from unheard.paper.exhibits import EXHIBITS, exhibit
from unheard.paper.found import Found, corpora
from unheard.report.document import document
from unheard.report.images import write_png, write_svg
from unheard.report.paper_sections import comparison, contents, lede, section
from unheard.report.plots_of_paper import plot_of
from unheard.runs import replace_file

Progress = Callable[[str, float], None]


def write_pages(
    results: Path, out: Path, *, pictures: bool = True, progress: Progress = lambda step, part: None
) -> list[Path]:
    """A page for each corpus under `results`; their paths come back, the main one first."""
    founds = corpora(results)
    folders = [out, *(out / found.folder for found in founds[1:])]
    written = []
    for found, folder in zip(founds, folders, strict=True):
        # A page links to the others by where they lie from it.
        others = [
            (other.title, _from(folder, there, out))
            for other, there in zip(founds, folders, strict=True)
            if other is not found
        ]
        shown = exhibits(found, progress)
        compared = () if found is founds[0] else beside(founds[0], found)
        written.append(write_page(shown, folder, others=others, compared=compared))
        if pictures:
            write_pictures(shown, folder / "figures", progress)
    return written


def exhibits(found: Found, progress: Progress = lambda step, part: None) -> list[Exhibit]:
    """All of them, in order."""
    made = []
    for i, name in enumerate(EXHIBITS, 1):
        made.append(exhibit(name, found))
        progress(f"tables {found.folder}".strip(), i / len(EXHIBITS))
    return made


def write_page(
    shown: Sequence[Exhibit],
    folder: Path,
    *,
    others: Sequence[tuple[str, str]] = (),
    compared: Sequence[Table] = (),
) -> Path:
    """`folder`/index.html, whole or not at all."""
    page = folder / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    replace_file(page, render_page(shown, others=others, compared=compared).encode())
    return page


def render_page(
    shown: Sequence[Exhibit], *, others: Sequence[tuple[str, str]] = (), compared: Sequence[Table] = ()
) -> str:
    """`compared`: tables of these results beside the main ones."""
    corpus = shown[0].corpus
    return document(
        heading=f"The paper, run on {corpus}" if corpus else "The paper, not yet run",
        mark="the paper's tables and figures",
        lede=lede(shown, others),
        contents=contents(shown),
        body=comparison(compared) + "".join(section(made) for made in shown),
        source="results",
        styles=("page.css", "paper.css"),
    )


def write_pictures(shown: Sequence[Exhibit], folder: Path, progress: Progress = lambda step, part: None) -> list[Path]:
    """Every figure as SVG and PNG."""
    plots = [plot_of(figure) for made in shown for figure in made.figures]
    written = []
    for i, plot in enumerate(plots, 1):
        written += [write_svg(plot, folder), write_png(plot, folder)]
        progress("figures", i / len(plots))
    return written


def _from(here: Path, there: Path, out: Path) -> str:
    up = "" if here == out else "../"
    return f"{up}index.html" if there == out else f"{up}{there.name}/index.html"
