"""An exhibit as a section of the paper's page: verdict, figures, the printed numbers beside ours, notes, the runs behind it.

In: an Exhibit. Out: HTML text. The same numbers stand in a plot and in a table.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from unheard.paper.exhibit import Exhibit, Table
from unheard.paper.verdict import UNCERTAIN, points
from unheard.report import html
from unheard.report.plots_of_paper import plot_of

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
