"""Write the HTML report on one or several runs as a single file that loads nothing from the network.

    compared = Comparison.read(["runs/plain", "runs/private"])
    write_page(compared, "page")            # writes page/index.html

This module prepares plain data (strings, tables, plots). The Jinja2 templates in `templates/` turn the data into HTML:

    base.html       the frame of every page: themes, header, contents, plot library
    macros.html     tables, figures, legends, lists
    report.html     the sections of this report

Templates are rendered with autoescape, so a run name, a word of the vocabulary or a setting cannot become markup.
`reproduction/page.py` renders its own page with the same `base.html`, through `environment`.

The first section says what each person is promised, in sentences that need no mathematics (`describe_promise`). Every
number in them comes from two privacy statements: that of the run, and that of all runs on the same users. Both are
computed from the ledgers. The factor on the odds and the success rate of a guess are rounded up, so that no sentence
promises too much.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import BaseLoader, ChoiceLoader, Environment, PackageLoader, StrictUndefined

from unheard.errors import InvalidValue, UnprovenCombination
from unheard.formatting import accountant_title, epsilon_text, odds_factor, percent, shown_word, small
from unheard.privacy.population_statement import charges_elsewhere
from unheard.privacy.statement import render_text, rounded_up
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
"""The headings of the report's sections, by anchor, in order. `render_page` leaves out sections without content."""


@dataclass(frozen=True, kw_only=True)
class PromiseCard:
    """The guarantee of one run, as the page shows it in a box of the first section."""

    name: str
    """The name of the run."""
    series: int
    """The number of the run's colour, from 1 to 6."""
    epsilon: str
    """The claimed epsilon of this run alone."""
    detail: str
    """The accountant, the delta and the population of the claim, or a note that there is no bound."""
    promise: "Promise"
    """The guarantee in words."""
    hypotheticals: list[str]
    """Sentences with the hypothetical epsilons of the run."""
    statement: str
    """The whole privacy statement as text."""


def write_page(compared: Comparison, out: str | Path, *, title: str | None = None, force: bool = False) -> Path:
    """Write the report on the compared runs to `index.html` in a folder.

    Args:
        compared: The runs.
        out: The folder. It must be missing or empty, unless `force` is set.
        title: The heading of the page. By default a heading that fits the number of runs.
        force: Whether the folder may contain files. Its `index.html` is replaced, its other files are kept.

    Returns:
        The path of the page.

    Raises:
        InvalidValue: `out` is a file, or the folder is not empty and `force` is not set.
    """
    check_page_folder(out, force=force)
    page = Path(out) / "index.html"
    content = render_page(compared, title=title).encode()
    page.parent.mkdir(parents=True, exist_ok=True)
    replace_file(page, content)
    return page


def check_page_folder(out: str | Path, *, force: bool) -> None:
    """Check that `write_page` may write to a folder. Commands call this before measurements that take minutes.

    Args:
        out: The folder for the page.
        force: Whether the folder may contain files, and its page may be replaced.

    Raises:
        InvalidValue: `out` is a file, or the folder is not empty and `force` is not set.
    """
    path = Path(out)
    if path.suffix in (".html", ".htm"):
        raise InvalidValue(f"{out} is the name of a file. Name a folder: the page is written to index.html in it.")
    if path.exists() and not path.is_dir():
        raise InvalidValue(f"{out} is a file, and the page needs a folder: choose another name.")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise InvalidValue(f"{out} is not empty. Choose another folder, or overwrite its page with --force.")


def render_page(compared: Comparison, *, title: str | None = None) -> str:
    """Return the report on the compared runs as HTML text.

    Args:
        compared: The runs.
        title: The heading. By default it contains the name of the run if there is only one, and no name otherwise.
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
    """Return a Jinja2 environment that finds the templates of this package and escapes every value.

    Args:
        loaders: Loaders of other templates, for pages that are defined elsewhere. They are searched first.
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
    """Render a template that extends `base.html`, and return the page as HTML text.

    Args:
        templates: The result of `environment`.
        name: The name of the template.
        content: The variables of the template. `base.html` needs `heading`, `mark` and `source`.
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
    """Return the JavaScript of Vega, Vega-Lite and vega-embed (BSD-3-Clause) as vl-convert bundles it, 0.9 MB."""
    import vl_convert

    # A script element ends at the first closing tag, even if the tag is inside a JavaScript string. In a string, "<\/"
    # means the same as "</" and does not end the element.
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGALITE)
    return bundle.replace("</script", "<\\/script")


def _summary_sentence(record: RunRecord) -> dict[str, str]:
    """Return the accuracy and the guarantee of one run as parts of the first sentence of the page.

    The accuracy is that of the last evaluation, with as many digits as in the summary table.
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
    """Return the box of the page that states the guarantee of one run."""
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
        statement=render_text(record.statement).replace("`", ""),  # backticks mark commands in the terminal only
    )


def _plot_tables(compared: Comparison) -> Mapping[str, tables.Table]:
    """Return the numbers of the plots as tables, by plot name, for readers who cannot see the plots."""
    numbers = {
        "accuracy-by-round": tables.accuracy_by_round(compared),
        "epsilon-by-round": tables.epsilon_by_round(compared),
    }
    if compared.measured:
        numbers["accuracy-by-band"] = tables.bands(compared.measured)
        numbers["accuracy-by-user"] = tables.users(compared.measured)
    return numbers


def _suggestions(compared: Comparison) -> list[dict[str, Any]]:
    """Return, for each prompt, the words that each run suggests and their probabilities."""
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
    """Return the colour number of a run, from 1 to `SERIES`. With more runs the colours repeat."""
    return (compared.colours[name] - 1) % SERIES + 1


def _sentences(texts: list[str]) -> list[str]:
    """Turn phrases of a privacy statement into sentences, with a capital letter and a full stop."""
    return [f"{_capitalised(text)}." for text in texts]


def _capitalised(text: str) -> str:
    """Return a text with a capital letter at its beginning."""
    return text[0].upper() + text[1:]


STRONG, WEAK = 1.0, 8.0
"""An epsilon up to STRONG is called strong, and an epsilon above WEAK is called weak. These limits are a convention of
this page, not theory, so the page always shows the epsilon too."""
HEADLINES = {
    "strong": "A strong guarantee for every single person",
    "moderate": "A guarantee for every single person",
    "weak": "A guarantee, but a weak one",
    "none": "An experiment: no guarantee against anyone who knows the seed",
    "all": "No guarantee over all runs on these users",
    "synthetic": "No guarantee for the people from whose text the synthetic text was made",
}
"""The headline of a guarantee, by its grade. `none` is for a private run whose noise comes from a seed; `all` is for a
private run on users for whom all runs together have no finite epsilon; `synthetic` is for a run that learned from
synthetic text."""


@dataclass(frozen=True, kw_only=True)
class Promise:
    """The guarantee of a run in words."""

    headline: str
    """The guarantee in one line."""
    grade: str
    """`none`, `synthetic`, `weak`, `moderate` or `strong`."""
    paragraphs: tuple[str, ...]
    """The explanation, one string per paragraph."""
    warnings: tuple[str, ...]
    """The warnings of the privacy statement, and those about all runs if the guarantee is that of all runs."""


def describe_promise(record: RunRecord) -> Promise:
    """Describe what each person is promised by a run, or say that there is no guarantee and why.

    If other runs used the same users, the guarantee is that of all these runs together. They are known only if the
    store's ledger is on this machine; if it is not, a paragraph says so.
    """
    alone = _describe_run(record)
    if not record.is_private:
        return alone
    if record.population_ledger is None:
        unknown = (
            "This is the guarantee of this run alone, because the ledger of its store is not on this machine. Every "
            "other run on the same users adds to the cost; `unheard statement STORE` computes the cost of all runs."
        )
        return replace(alone, paragraphs=(*alone.paragraphs, unknown))
    if not record.other_runs:
        return replace(alone, warnings=(*alone.warnings, *charges_elsewhere(record.population_ledger)))
    return _over_all_runs(record, alone)


def _over_all_runs(record: RunRecord, alone: Promise) -> Promise:
    """Return the guarantee of all runs on the same users together, followed by the guarantee of this run alone.

    Args:
        record: A private run on users that other runs have used too.
        alone: The guarantee of this run alone.
    """
    names = record.other_runs
    others = f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
    runs = f"The same users were also charged for {'another run' if len(names) == 1 else f'{len(names)} other runs'} ({others})."
    by_itself = (
        "If somebody sees this model and nothing of the other runs, and no choice about this run depended on the other "
        f"runs, the ε of this run alone holds: {epsilon_text(record.epsilon)} by "
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
        lost = f"{runs} Over all these runs ε is infinite ({why}): together they give nobody a guarantee."
        return replace(
            alone, headline=HEADLINES["all"], grade="none", paragraphs=(lost, by_itself + alone.paragraphs[-1])
        )
    warnings = tuple(_capitalised(warning) for warning in total["warnings"])
    # The seed of any of these runs reveals its noise, and the total does not hold without that noise.
    is_seeded = any("REPRODUCIBLE NOISE" in warning for warning in (*alone.warnings, *warnings))
    grade = "none" if is_seeded else _grade(epsilon)
    if _is_synthetic((*alone.warnings, *warnings)):
        grade = "synthetic"
    together = (
        f"{runs} Over all these runs ε = {epsilon_text(epsilon)} by {accountant_title(total['claimed']['accountant'])} at "
        f"δ = {small(delta)}, and this is what each person is promised."
    )
    return replace(
        alone,
        headline=HEADLINES[grade],
        grade=grade,
        paragraphs=(together, *_paragraphs(epsilon, delta), by_itself + alone.paragraphs[-1]),
        warnings=(*alone.warnings, *warnings),
    )


def _grade(epsilon: float) -> str:
    """Return the grade of a finite epsilon (see `STRONG`)."""
    return "strong" if epsilon <= STRONG else "moderate" if epsilon <= WEAK else "weak"


def _is_synthetic(warnings: Sequence[str]) -> bool:
    """Whether the warnings say that a run learned from synthetic text."""
    return any("SYNTHETIC TEXT" in warning for warning in warnings)


def _describe_run(record: RunRecord) -> Promise:
    """Return the guarantee of one run alone. Its last paragraph states it formally, or says why there is none."""
    statement = record.statement
    warnings = tuple(_capitalised(warning) for warning in statement["warnings"])
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
    # Anyone who knows the seed of a run can recompute its noise, so the grade is "none". The paragraphs hold against
    # everyone who does not know the seed.
    if any("REPRODUCIBLE NOISE" in warning for warning in warnings):
        grade = "none"
    if _is_synthetic(warnings):
        grade = "synthetic"
    pair = f"({rounded_up(epsilon)}, {small(float(rounded_up(delta, 2)))})"
    return Promise(
        headline=HEADLINES[grade],
        grade=grade,
        paragraphs=(
            *_paragraphs(epsilon, delta),
            f"Formally: {pair}-differential privacy at the level of users, to add or remove one "
            f"user, by {accountant_title(statement['claimed']['accountant'])} over {statement['rounds']['charged']:,} "
            f"charged rounds. By the paper's own accountant (moments) ε is {epsilon_text(float(statement['epsilon']['moments']))}.",
        ),
        warnings=warnings,
    )


def _paragraphs(epsilon: float, delta: float) -> tuple[str, ...]:
    """Explain (epsilon, delta) in two paragraphs: as a factor on the odds, and as a bet whether a person took part."""
    unit = "One person means everything they wrote, all of it at once."
    bet = "Somebody who tosses a coin on whether you took part is right 50 times in 100."
    knowing = "with this model, all models before it, unlimited computers and everybody else's text"
    if epsilon > WEAK:
        return (
            f"{unit} Each person's influence on this model was limited and noise was added, but the bound on the "
            "remaining influence is large: one person's presence may change the odds of an outcome by a factor of "
            f"{odds_factor(epsilon)}. By itself such a bound promises little.",
            f"{bet} This bound does not exclude that, {knowing}, they are right {_success_rate(epsilon, delta)}. More "
            "users, more noise or fewer rounds make ε smaller; `unheard plan` says by how much.",
        )
    return (
        f"{unit} Whether any one person took part changes the odds of everything that can be seen of this run, all its "
        "models included, by a bounded factor: one person's presence makes no outcome more than "
        f"{odds_factor(epsilon)} times as likely, or as unlikely (except for a remainder of δ = {small(delta)}).",
        f"As a bet: {bet[0].lower()}{bet[1:]} Even {knowing}, they are right at most {_success_rate(epsilon, delta)}.",
    )


def _success_rate(epsilon: float, delta: float) -> str:
    """Return in words how often the best guess whether a person took part can be right, rounded up.

    If taking part is as likely as not, (epsilon, delta)-differential privacy limits the probability of a right guess to
    (e^epsilon + delta) / (1 + e^epsilon).
    """
    wrong = (1.0 - delta) / (1.0 + math.exp(min(epsilon, 700.0)))
    digits = 1 if wrong > 0.005 else 3
    rate = math.ceil(10 ** (digits + 2) * (1 - wrong)) / 10**digits
    return f"{rate:g} times in 100" if rate < 100 else "nearly always"
