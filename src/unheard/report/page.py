"""Write the HTML report on one or several runs as a single file that loads nothing from the network.

    compared = Comparison.read(["runs/plain", "runs/private"])
    write_page(compared, "page")            # writes page/index.html

This module prepares plain data (strings, tables, plots); the Jinja2 templates in `templates/` lay it out:

    base.html       the frame of every page: themes, header, contents, plot library
    macros.html     tables, figures, legends, lists
    report.html     the sections of this report

Templates are rendered with autoescape, so a run name, a word of the vocabulary or a setting can never become markup.
`reproduction/page.py` renders its own page from the same frame through `environment`.

The first section says what each person is promised, in sentences that need no mathematics (`describe_promise`). Every
number in them comes from the privacy statement of the run and of all runs on the same users, which are computed from
the ledgers. Bounds are rounded up, never down.
"""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import BaseLoader, ChoiceLoader, Environment, PackageLoader, StrictUndefined

from unheard.errors import InvalidValue, UnprovenCombination
from unheard.formatting import accountant_title, epsilon_text, odds_factor, percent, shown_word, small
from unheard.privacy.statement import render as statement_text
from unheard.report import tables
from unheard.report.comparison import Comparison
from unheard.report.plots import plots
from unheard.report.run_record import RunRecord, latest
from unheard.report.style import DARK, LIGHT, SERIES, VEGALITE
from unheard.run_folder import replace_file

TITLES = {
    "privacy": "What each person is promised",
    "accuracy": "How well it predicts",
    "cost": "What it cost",
    "words": "Which words",
    "users": "For whom it works",
    "suggestions": "What it suggests",
    "configuration": "How it was trained",
    "check": "Check it yourself",
}
"""The sections of the report in order, by anchor. `render_page` leaves out those that have no content."""


@dataclass(frozen=True, kw_only=True)
class PromiseCard:
    """The guarantee of one run as a card of the page."""

    name: str
    series: int
    """Number of the run's colour, from 1."""
    epsilon: str
    detail: str
    promise: "Promise"
    hypotheticals: list[str]
    statement: str
    """The whole privacy statement as text."""


def write_page(compared: Comparison, out: str | Path, *, title: str | None = None, force: bool = False) -> Path:
    """Write the report on the compared runs to `index.html` in a folder.

    Args:
        compared: The runs.
        out: The folder: missing or empty, unless `force` is set.
        title: The heading of the page. By default a heading that fits the number of runs.
        force: Whether to replace the page in a folder that holds something. Its other files are kept.

    Returns:
        The path of the page.

    Raises:
        InvalidValue: The folder holds something, and `force` is not set.
    """
    check_page_folder(out, force=force)
    page = Path(out) / "index.html"
    content = render_page(compared, title=title).encode()
    page.parent.mkdir(parents=True, exist_ok=True)
    replace_file(page, content)
    return page


def check_page_folder(out: str | Path, *, force: bool) -> None:
    """Raise `InvalidValue` unless `write_page` may write here: a command checks it before it measures for minutes.

    Args:
        out: The folder for the page.
        force: Whether a page that is there may be overwritten.
    """
    path = Path(out)
    if path.exists() and not path.is_dir():
        raise InvalidValue(f"{out} is a file, and the page needs a folder: choose another name.")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise InvalidValue(f"{out} already holds something. Choose another folder, or overwrite its page with --force.")


def render_page(compared: Comparison, *, title: str | None = None) -> str:
    """Return the report on the compared runs as HTML text.

    Args:
        compared: The runs.
        title: The heading; None for the names of the runs.
    """
    records, measured = compared.records, compared.measured
    names = [record.name for record in records]
    differ, same = tables.configuration(compared)
    statement = records[0].statement
    is_private = any(record.is_private for record in records)
    suggested = _suggestions(compared)
    absent = {"words": not measured, "users": not measured, "suggestions": not suggested}
    if title is None:
        title = (
            f"What {names[0]} learned, and what it cost"
            if len(names) == 1
            else "What was learned, and what privacy cost"
        )
    return render(
        environment(),
        "report.html",
        heading=title,
        mark="accuracy and privacy report",
        source="run folders",
        sections={anchor: text for anchor, text in TITLES.items() if not absent.get(anchor)},
        runs=[_summary_sentence(record) for record in records],
        promises=[_promise_card(compared, r) for r in sorted(records, key=lambda record: not record.is_private)],
        covered=_sentences(statement["released"]) if is_private else [],
        not_covered=_sentences(statement["not_covered"]) if is_private else [],
        plots={plot.name: plot for plot in plots(compared)},
        numbers=_plot_tables(compared),
        summary=tables.summary(compared),
        cautions=compared.cautions,
        accuracies=tables.accuracies(measured) if measured else None,
        not_private=[record.name for record in records if not record.is_private],
        computation=tables.computation(compared) if len(records) > 1 and compared.compute_costs else None,
        head_words=tables.head_words(measured) if measured else None,
        measured=list(measured),
        suggestions=suggested,
        differ=differ,
        same=same,
        commands=[
            *(f"unheard statement {shlex.quote(name)}" for name in names),
            *(f"unheard evaluate {shlex.quote(name)} --full --json" for name in names),
        ],
    )


def environment(*loaders: BaseLoader) -> Environment:
    """Return a Jinja2 environment with the templates of this package.

    Args:
        loaders: Loaders that are searched before the templates of this package, for pages defined elsewhere.
    """
    templates = Environment(
        loader=ChoiceLoader([*loaders, PackageLoader("unheard.report", "templates")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return templates


def render(templates: Environment, name: str, **content: Any) -> str:
    """Render a template that extends `base.html`.

    Args:
        templates: The result of `environment`.
        name: The template.
        content: Variables of the template. `base.html` needs `heading`, `mark` and `source`.
    """
    return templates.get_template(name).render(
        version=version("unheard"),
        today=date.today().isoformat(),
        light=LIGHT,
        dark=DARK,
        plot_library=_plot_library,
        **content,
    )


@cache
def _plot_library() -> str:
    """Vega, Vega-Lite and vega-embed (BSD-3-Clause) as bundled by vl-convert, 0.9 MB."""
    import vl_convert

    # A script element ends at the first closing tag, even inside a string; there the slash can be escaped.
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGALITE)
    return bundle.replace("</script", "<\\/script")


def _summary_sentence(record: RunRecord) -> dict[str, str]:
    """The accuracy and the guarantee of one run in the first sentence of the page.

    The accuracy is that of the newest model, with the digits of the summary table.
    """
    accuracy = latest(record, "accuracy_top1")
    return {
        "name": record.name,
        "accuracy": "has not been evaluated yet"
        if accuracy is None
        else f"predicts {percent(accuracy)} of next words correctly",
        "privacy": f"ε = {epsilon_text(record.epsilon)} by {tables.claimed_by(record)} at δ = {small(record.delta)}"
        f"{' for this run alone' if record.other_runs else ''}"
        if record.is_private
        else "no privacy",
    }


def _promise_card(compared: Comparison, record: RunRecord) -> PromiseCard:
    """Fill the card that states what a run promises."""
    alone = "this run alone, " if record.other_runs else ""
    detail = (
        f"{alone}by {tables.claimed_by(record)} at δ = {small(record.delta)}, for {record.population:,} declared users"
    )
    return PromiseCard(
        name=record.name,
        series=_series(compared, record.name),
        epsilon=epsilon_text(record.epsilon),
        detail=detail if record.is_private else "no noise, no bound",
        promise=describe_promise(record),
        hypotheticals=[other.words for other in compared.hypotheticals if other.run == record.name],
        statement=statement_text(record.statement).replace("`", ""),  # marks of commands in a terminal
    )


def _plot_tables(compared: Comparison) -> Mapping[str, tables.Table]:
    """The numbers of each plot as a table, for readers who cannot see the plot."""
    numbers = {
        "accuracy-by-round": tables.accuracy_by_round(compared),
        "epsilon-by-round": tables.epsilon_by_round(compared),
    }
    if compared.measured:
        numbers["accuracy-by-band"] = tables.bands(compared.measured)
        numbers["accuracy-by-user"] = tables.users(compared.measured)
    return numbers


def _suggestions(compared: Comparison) -> list[dict[str, Any]]:
    """For each prompt the words that each run suggests, with their probabilities."""
    by_text: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for name, measures in compared.measured.items():
        for prompt in measures["prompts"]:
            words = [(shown_word(word["word"]), f"{100 * word['probability']:.0f} %") for word in prompt["words"]]
            by_text.setdefault(prompt["text"], {})[name] = words
    return [
        {
            "text": text,
            "runs": [
                {"name": name, "series": _series(compared, name), "words": words.get(name, [])}
                for name in compared.measured
            ],
        }
        for text, words in by_text.items()
    ]


def _series(compared: Comparison, name: str) -> int:
    return (compared.colours[name] - 1) % SERIES + 1


def _sentences(texts: list[str]) -> list[str]:
    return [text[0].upper() + text[1:] + "." for text in texts]


STRONG, WEAK = 1.0, 8.0
"""Up to STRONG an epsilon is called strong, above WEAK weak. A convention, not theory: the number is always shown as
well."""
HEADLINES = {
    "strong": "A strong guarantee for every single person",
    "moderate": "A guarantee for every single person",
    "weak": "A guarantee, but a weak one",
    "none": "An experiment: no guarantee against whoever knows the seed",
    "all": "No guarantee over all runs on these users",
}


@dataclass(frozen=True, kw_only=True)
class Promise:
    """The guarantee of a run in words."""

    headline: str
    grade: str
    """`none`, `weak`, `moderate` or `strong`."""
    paragraphs: tuple[str, ...]
    warnings: tuple[str, ...]
    """The warnings of the privacy statement."""


def describe_promise(record: RunRecord) -> Promise:
    """Describe what each person is promised, or say that there is no guarantee and why.

    Other runs on the same users count: the guarantee is about all of them together, if the store's ledger is here.
    """
    alone = _describe_run(record)
    if not record.is_private:
        return alone
    if record.population_ledger is None:
        unknown = (
            "This is about this run alone: the ledger of its store is not on this machine. Every other run on the same "
            "users adds to what they have spent; `unheard statement STORE` composes them."
        )
        return replace(alone, paragraphs=(*alone.paragraphs, unknown))
    if not record.other_runs:
        return alone
    return _over_all_runs(record, alone)


def _over_all_runs(record: RunRecord, alone: Promise) -> Promise:
    """Return the guarantee over all runs on the same users, followed by what holds for this run by itself."""
    names = record.other_runs
    others = f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
    runs = f"The same users were also charged for {'another run' if len(names) == 1 else f'{len(names)} other runs'} ({others})."
    by_itself = (
        "For somebody who sees this model and nothing of the other runs, and if nothing of this run was chosen in the "
        f"light of them, the ε of this run alone holds: {epsilon_text(record.epsilon)} by "
        f"{accountant_title(record.statement['claimed']['accountant'])} at δ = {small(record.delta)}. "
    )
    try:
        total = record.all_runs
    except UnprovenCombination as error:
        return replace(
            alone,
            headline=HEADLINES["all"],
            grade="none",
            paragraphs=(f"{runs} {error}", by_itself + alone.paragraphs[-1]),
        )
    assert total is not None
    epsilon, delta = float(total["claimed"]["epsilon"]), float(total["delta"])
    if math.isinf(epsilon):
        why = total["claim"].split("(", 1)[-1].rstrip(")")
        lost = f"{runs} Over all these runs ε is infinite ({why}): together they promise nobody anything."
        return replace(
            alone, headline=HEADLINES["all"], grade="none", paragraphs=(lost, by_itself + alone.paragraphs[-1])
        )
    grade = "none" if alone.grade == "none" else _grade(epsilon)
    together = (
        f"{runs} Over all these runs ε = {epsilon_text(epsilon)} by {accountant_title(total['claimed']['accountant'])} at "
        f"δ = {small(delta)}, and this is what each person is promised."
    )
    return replace(
        alone,
        headline=HEADLINES[grade],
        grade=grade,
        paragraphs=(together, *_paragraphs(epsilon, delta), by_itself + alone.paragraphs[-1]),
    )


def _grade(epsilon: float) -> str:
    return "strong" if epsilon <= STRONG else "moderate" if epsilon <= WEAK else "weak"


def _describe_run(record: RunRecord) -> Promise:
    """The guarantee of one run by itself."""
    statement = record.statement
    warnings = tuple(warning[0].upper() + warning[1:] for warning in statement["warnings"])
    if not record.is_private:
        return Promise(
            headline="No privacy guarantee",
            grade="none",
            paragraphs=(
                "This model was trained without privacy protection. What one person wrote may be read out of it, in "
                "whole or in part. It is shown for comparison, and should not be given to anyone who may not read the text "
                "itself.",
                f"Why: {statement['claim'].split('(', 1)[-1].rstrip(')')}.",
            ),
            warnings=tuple(warning for warning in warnings if "infinite" not in warning),
        )
    epsilon, delta = record.epsilon, record.delta
    grade = _grade(epsilon)
    # The noise of a seeded run can be recomputed by whoever knows the seed. The paragraphs hold against everybody else.
    if any("REPRODUCIBLE NOISE" in warning for warning in warnings):
        grade = "none"
    return Promise(
        headline=HEADLINES[grade],
        grade=grade,
        paragraphs=(
            *_paragraphs(epsilon, delta),
            f"Formally: ({epsilon:.4g}, {small(delta)})-differential privacy at the level of users, to add or remove one "
            f"user, by {accountant_title(statement['claimed']['accountant'])} over {statement['rounds']['charged']:,} "
            f"charged rounds. By the paper's own accountant (moments) ε is {epsilon_text(float(statement['epsilon']['moments']))}.",
        ),
        warnings=warnings,
    )


def _paragraphs(epsilon: float, delta: float) -> tuple[str, ...]:
    """The bound as a factor on the odds, and as a bet on whether a person took part."""
    unit = "One person means everything they wrote, all of it at once."
    bet = "Somebody who tosses a coin on whether you took part is right 50 times in 100."
    knowing = "with this model, all models before it, unlimited computers and everybody else's text"
    if epsilon > WEAK:
        return (
            f"{unit} Each person's part in this model was limited and covered with noise, but the number that measures what is "
            f"left is large: one person's presence may change the odds of an outcome by a factor of {odds_factor(epsilon)}. By "
            "itself such a bound promises little.",
            f"{bet} The bound leaves open that, {knowing}, they are right {_success_rate(epsilon, delta)}. More users, more "
            "noise or fewer rounds make it smaller; `unheard plan` says by how much.",
        )
    return (
        f"{unit} Whether any one of them took part changes the odds of anything that can be seen of this run, all its models "
        f"included, by a bounded factor: no outcome becomes more than {odds_factor(epsilon)} times as likely, or as unlikely, by "
        f"one person's presence (except for a remainder of δ = {small(delta)}).",
        f"As a bet: {bet[0].lower()}{bet[1:]} Even {knowing}, they are right at most {_success_rate(epsilon, delta)}.",
    )


def _success_rate(epsilon: float, delta: float) -> str:
    """The best success rate of a guess at even odds under (epsilon, delta): (e^epsilon + delta) / (1 + e^epsilon)."""
    wrong = (1.0 - delta) / (1.0 + math.exp(min(epsilon, 700.0)))
    if wrong > 0.005:
        return f"{math.ceil(1000 * (1 - wrong)) / 10:g} times in 100"
    return "nearly always"
