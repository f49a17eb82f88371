"""The paper on one page: every table and figure from results alone, and each figure as a file.

In: a folder of results. Out: index.html for the first of them (`corpora`), a folder for each other one, SVG and PNG files.
An exhibit as a section of the paper's page: verdict, figures, the printed numbers beside ours, notes, the runs behind it.

In: an Exhibit. Out: HTML text. The same numbers stand in a plot and in a table.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from reproduction.comparison import beside
from reproduction.exhibit import Exhibit, Table
from reproduction.exhibits import EXHIBITS, exhibit
from reproduction.plots import plot_of
from reproduction.results_query import Found, corpora
from reproduction.verdict import UNCERTAIN, points
from unheard.report import html_parts as html
from unheard.report.images import write_png, write_svg
from unheard.report.page import document
from unheard.run_folder import replace_file

ANSWERS = {"held": "held", "did not hold": "did not", "cannot tell": "cannot be told"}


def section(made: Exhibit) -> str:
    """One table or figure."""
    recipe, verdict = made.recipe, made.verdict
    # A section has the recipe's name, so its plots need others.
    plots = (plot_of(figure) for figure in made.figures)
    figures = "".join(html.figure(replace(plot, name=f"plot-{plot.name}")) for plot in plots)
    tables = "".join(html.table(table, classes="wide" if len(table.columns) > 6 else "") for table in made.tables)
    kind = verdict.outcome.replace(" ", "-")
    return (
        f'<section id="{recipe.name}" aria-labelledby="{recipe.name}-h"><p class="place">{escape(recipe.place)}</p>'
        f'<h2 id="{recipe.name}-h">{_typeset(recipe.title)}</h2>'
        f'<div class="card verdict {kind}"><p class="answer {kind}">{verdict.outcome.capitalize()}</p>'
        f"<p>{escape(verdict.sentence)}</p>"
        f"<dl><dt>{recipe.claimed_by}</dt><dd>{_typeset(recipe.claim)}</dd>"
        f"<dt>The rule</dt><dd>{escape(verdict.rule)}</dd></dl></div>"
        f"{figures}{tables}{html.items(made.notes, 'lacks')}{_runs(made)}</section>"
    )


def comparison(tables: Sequence[Table]) -> str:
    """These results beside the main ones, if they are not the main ones themselves."""
    if not tables:
        return ""
    shown = "".join(html.table(table) for table in tables)
    heading = f"Beside {escape(tables[0].columns[1])}"
    return f'<section id="beside" aria-labelledby="beside-h"><h2 id="beside-h">{heading}</h2>{shown}</section>'


def contents(shown: Sequence[Exhibit]) -> str:
    """Everything on the page, with its answer."""
    lines = "".join(
        f'<li><span class="soft">{escape(made.recipe.place)}</span><a href="#{made.recipe.name}">{_typeset(made.recipe.title)}</a>'
        f'<span class="answer {made.verdict.outcome.replace(" ", "-")}">{made.verdict.outcome}</span></li>'
        for made in shown
    )
    return f'<ol class="contents">{lines}</ol>'


def lede(shown: Sequence[Exhibit], others: Sequence[tuple[str, str]] = ()) -> str:
    """What held, counted, the paper's conclusions apart from what we expected; links to the same page for other corpora."""
    theirs = [made for made in shown if made.recipe.is_of_the_paper]
    ours = [made for made in shown if not made.recipe.is_of_the_paper]
    said = f"of {len(theirs)} conclusions {_counted(theirs)}" + (
        f"; of {len(ours)} expectations of our own {_counted(ours)}" if ours else ""
    )
    corpus = shown[0].corpus if shown else ""
    where = f"on {escape(corpus)}" if corpus else "with no results yet"
    links = ", ".join(f'<a href="{escape(address)}">{escape(name)}</a>' for name, address in others)
    also = f" Other results: {links}." if links else ""
    return (
        "McMahan, Ramage, Talwar and Zhang, “Learning Differentially Private Recurrent Language Models” (ICLR 2018), "
        f"run again {where}: "
        f"{said}. Every number below comes from runs that happened, or says that it does not. Two runs differ "
        f"if they lie further apart than two seeds of one run do, and than {points(UNCERTAIN)}.{also}"
    )


def _counted(shown: Sequence[Exhibit]) -> str:
    counts = Counter(made.verdict.outcome for made in shown)
    return ", ".join(f"{counts[answer]} {words}" for answer, words in ANSWERS.items() if counts[answer])


def _typeset(text: str) -> str:
    """Recipes are written in ASCII, to be read in any terminal."""
    return escape(text).replace("sigma", "σ").replace("epsilon", "ε").replace("10^6", "10⁶")


def _runs(made: Exhibit) -> str:
    if not made.runs.rows:
        return ""
    done = sum(row[1] != "not run" for row in made.runs.rows)
    summary = f"{done} of {len(made.runs.rows)} runs: rounds, seeds, ε, hardware, date and commit"
    return f'<details class="runs"><summary>{summary}</summary>{html.table(made.runs, classes="wide")}</details>'


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
