"""The page's later parts: which words, which people, what is suggested, how it was trained, how to check it.

In: a Comparison and its plots. Out: sections of HTML; None where there are no numbers for one.
"""

from dataclasses import dataclass
from html import escape

from unheard.report import html, tables
from unheard.report.comparison import Comparison
from unheard.report.plots import Plot
from unheard.report.style import SERIES


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
