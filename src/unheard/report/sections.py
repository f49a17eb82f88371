"""What the page says, part by part: the promise first, then how good the model is, then how it came about.

In: a Comparison. Out: sections of HTML. A part that there are no numbers for is left out, and the page says why.
"""

from html import escape

from unheard.numbers import epsilon_text, percent, small
from unheard.privacy.wording import render
from unheard.report import html, tables
from unheard.report.comparison import Comparison
from unheard.report.curves import accuracy_points, epsilon_points, final
from unheard.report.plots import Plot, plots
from unheard.report.record import RunRecord
from unheard.report.sections_of_models import Section, check, configuration, people, suggestions, words
from unheard.report.style import SERIES
from unheard.report.tables import Table
from unheard.report.words import in_words


def heading(compared: Comparison) -> str:
    if len(compared.records) == 1:
        return f"What {compared.records[0].name} learned, and what it cost"
    return "What was learned, and what privacy cost"


def lede(compared: Comparison) -> str:
    """The whole page in a sentence or two, as HTML."""
    said = []
    for record in compared.records:
        accuracy = final(record)
        guess = (
            "has not been evaluated yet" if accuracy is None else f"guesses {percent(accuracy, 1)} of next words right"
        )
        cost = f"ε = {epsilon_text(record.epsilon)} at δ = {small(record.delta)}" if record.is_private else "no privacy"
        said.append(f"<b>{escape(record.name)}</b> {escape(guess)}, with {escape(cost)}")
    return "; ".join(said) + ". Measured on people whose text was never trained on."


def all_of(compared: Comparison) -> list[Section]:
    drawn = {plot.name: plot for plot in plots(compared)}
    made = [
        _privacy(compared),
        _accuracy(compared, drawn),
        _cost(compared, drawn),
        words(compared, drawn),
        people(compared, drawn),
        suggestions(compared),
        configuration(compared),
        check(compared),
    ]
    return [section for section in made if section is not None]


def _privacy(compared: Comparison) -> Section:
    in_order = sorted(compared.records, key=lambda record: not record.is_private)
    cards = "".join(_promise(compared, record) for record in in_order)
    told = compared.records[0].told
    lists = (
        f'<div class="lists"><div><h3>What the guarantee covers</h3>{html.items(_sentences(told["released"]))}</div>'
        f"<div><h3>What it does not</h3>{html.items(_sentences(told['not_covered']))}</div></div>"
        if any(record.is_private for record in compared.records)
        else ""
    )
    return Section(
        anchor="privacy", title="What each person is promised", html=f'<div class="cards">{cards}</div>{lists}'
    )


def _promise(compared: Comparison, record: RunRecord) -> str:
    said = in_words(record)
    number = [r.name for r in compared.records].index(record.name) % SERIES + 1
    at = (
        f"at δ = {small(record.delta)}, for {record.population:,} declared users"
        if record.is_private
        else "no noise, no bound"
    )
    would = "".join(
        f'<p class="soft">{escape(one.words)}</p>' for one in compared.hypotheticals if one.run == record.name
    )
    warnings = html.paragraphs(said.warnings, "warning")
    whole = f"<details><summary>The whole statement</summary><pre>{escape(render(record.told))}</pre></details>"
    return (
        f'<article class="card promise" style="--of:var(--series-{number})"><div><p class="run"><span class="dot"></span>'
        f'{escape(record.name)}</p><p class="figure"><b>ε = {epsilon_text(record.epsilon)}</b><span>{escape(at)}</span></p></div>'
        f"<div><h3>{escape(said.headline)}</h3>{warnings}{html.paragraphs(said.paragraphs)}{would}{whole}</div></article>"
    )


def _accuracy(compared: Comparison, drawn: dict[str, Plot]) -> Section:
    parts = [html.table(tables.summary(compared))]
    if compared.cautions:
        parts.append(html.items(compared.cautions, "cautions"))
    if "accuracy-by-round" in drawn:
        rows = {r.name: {p["round"]: p["smoothed"] for p in accuracy_points(r)} for r in compared.records}
        numbers = _by_round("AccuracyTop1 by round, smoothed over 5 evaluations", rows, lambda v: percent(v))
        parts.append(html.figure(drawn["accuracy-by-round"], alternative=html.table(numbers)))
        parts.append(
            '<p class="note">Bold: the mean of five evaluations, as in the paper; thin: each evaluation. Point or tap to read '
            "values; zoom with the buttons, with + and − when the plot has the focus, or with Ctrl and the wheel; drag to move.</p>"
        )
    if compared.measured:
        parts.append(html.table(tables.accuracies(compared.measured)))
    return Section(anchor="accuracy", title="How well it predicts", html="".join(parts))


def _cost(compared: Comparison, drawn: dict[str, Plot]) -> Section:
    parts = []
    if "epsilon-by-round" in drawn:
        rows = {r.name: {p["round"]: p["epsilon"] for p in epsilon_points(r)} for r in compared.records if r.is_private}
        numbers = _by_round("ε by round, by RDP", rows, lambda v: epsilon_text(v))
        parts.append(html.figure(drawn["epsilon-by-round"], alternative=html.table(numbers)))
        others = [record.name for record in compared.records if not record.is_private]
        missing = f" Not drawn, since it is infinite: {', '.join(others)}." if others else ""
        parts.append(
            f'<p class="note">The line is what the run knew of itself while it trained (RDP, a valid bound). The ring is the '
            f"claim: the smaller of two valid bounds, worked out from the ledger.{escape(missing)}</p>"
        )
    else:
        parts.append("<p>No run here has a finite ε: there is no privacy whose cost could be drawn.</p>")
    if len(compared.records) > 1 and compared.reached:
        parts.append(html.table(tables.computation(compared)))
    return Section(anchor="cost", title="What it cost", html="".join(parts))


def _by_round(title: str, rows: dict[str, dict[int, float]], shown) -> Table:
    """At most about forty rounds, evenly, the last among them."""
    rounds = sorted({r for values in rows.values() for r in values})
    every = max(1, len(rounds) // 40)
    kept = [r for i, r in enumerate(rounds) if (len(rounds) - 1 - i) % every == 0]
    cells = [[f"{r:,}", *(shown(values[r]) if r in values else "—" for values in rows.values())] for r in kept]
    return Table(title=title, columns=["round", *rows], rows=cells)


def _sentences(texts: list[str]) -> list[str]:
    return [text[0].upper() + text[1:] + "." for text in texts]
