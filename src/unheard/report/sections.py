"""What the page says, part by part: the promise first, then how good the model is, then how it came about.

In: a Comparison. Out: sections of HTML. A part that there are no numbers for is left out, and the page says why.
The page's later parts: which words, which people, what is suggested, how it was trained, how to check it.

In: a Comparison and its plots. Out: sections of HTML; None where there are no numbers for one.
"""

from dataclasses import dataclass
from html import escape

from unheard.formatting import epsilon_text, percent, small
from unheard.privacy.statement_text import render
from unheard.report import html_parts as html
from unheard.report import tables
from unheard.report.comparison import Comparison
from unheard.report.plain_language import in_words
from unheard.report.plots import Plot, plots
from unheard.report.run_record import RunRecord, accuracy_points, epsilon_points, final_accuracy
from unheard.report.style import SERIES
from unheard.report.tables import Table


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page with its heading and its anchor."""

    anchor: str
    title: str
    html: str


def words(compared: Comparison, drawn: dict[str, Plot]) -> Section | None:
    if "accuracy-by-band" not in drawn:
        return None
    bands = html.figure(drawn["accuracy-by-band"], alternative=html.table(tables.bands(compared.measured)))
    heads = "".join(html.figure(drawn[f"head-words-{head}"], inside=True) for head in ("10", "50", "100"))
    legend = html.legend(drawn["head-words-10"])
    numbers = html.table(tables.head_words(compared.measured), classes="wide")
    return Section(
        anchor="words",
        title="Which words",
        html=(
            "<p>Noise could take the rare words first and leave a model that only says the common ones. Here is whether it "
            f"did.</p>{bands}<figure><div class='head'><h3>Head words among ten suggestions</h3></div>{legend}"
            f"<div class='three'>{heads}</div><details><summary>The same as a table</summary>{numbers}"
            '</details></figure><p class="note">The paper’s head-word histograms: of a model’s ten best suggestions at each '
            "place of the held-out text, how many are among the most frequent words. More mass to the right: more clichés.</p>"
        ),
    )


def people(compared: Comparison, drawn: dict[str, Plot]) -> Section | None:
    if "accuracy-by-user" not in drawn:
        return None
    numbers = html.table(tables.users(compared.measured))
    return Section(
        anchor="people",
        title="For whom it works",
        html=(
            "<p>An average hides whom a model serves badly. Every held-out person counts once here, however much they wrote."
            f"</p>{html.figure(drawn['accuracy-by-user'], alternative=numbers)}"
            '<p class="note">Line: 5th to 95th percentile of people. Bar: the middle half. Tick: the median.</p>'
        ),
    )


def suggestions(compared: Comparison) -> Section | None:
    measured = compared.measured
    if not any(m["prompts"] for m in measured.values()):
        return None
    plain = tables.predictions(measured)
    said = {name: {p["text"]: p["words"] for p in m["prompts"]} for name, m in measured.items()}
    names = [record.name for record in compared.records]
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in plain.columns)
    rows = ""
    for row in plain.rows:
        text = row[0].removesuffix(" …")
        cells = "".join(
            f'<td data-run="{escape(name)}" style="--of:var(--series-{names.index(name) % SERIES + 1})">'
            f"{html.suggestions(said[name].get(text, []))}</td>"
            for name in measured
        )
        rows += f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>'
    made = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Suggestions"><table class="data text says"><thead><tr>{head}'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    return Section(anchor="suggestions", title="What it suggests", html=made)


def configuration(compared: Comparison) -> Section:
    differ, same = tables.configuration(compared)
    note = '<p class="note">What each name means: docs/guide.md and docs/glossary.md.</p>'
    shared = html.table(same, classes="text")
    if differ.rows:
        shared = f"<details><summary>The same in all runs</summary>{shared}</details>"
        shared = html.table(differ, classes="text") + shared
    return Section(anchor="configuration", title="How it was trained", html=shared + note)


def check(compared: Comparison) -> Section:
    names = [record.name for record in compared.records]
    lines = [f"unheard statement {name}" for name in names] + [
        f"unheard evaluate {name} --full --json" for name in names
    ]
    said = (
        "<p>Every ε here was worked out from the run’s ledger, which is hash-chained and charged before each round; every "
        "accuracy from the released model and the held-out users. Both can be had again, with the run folders:</p>"
    )
    return Section(anchor="check", title="Check it yourself", html=f"{said}<pre>{escape(chr(10).join(lines))}</pre>")


def heading(compared: Comparison) -> str:
    if len(compared.records) == 1:
        return f"What {compared.records[0].name} learned, and what it cost"
    return "What was learned, and what privacy cost"


def lede(compared: Comparison) -> str:
    """The whole page in a sentence or two, as HTML."""
    said = []
    for record in compared.records:
        accuracy = final_accuracy(record)
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
    told = compared.records[0].statement
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
    whole = f"<details><summary>The whole statement</summary><pre>{escape(render(record.statement))}</pre></details>"
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
    if len(compared.records) > 1 and compared.compute_costs:
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
