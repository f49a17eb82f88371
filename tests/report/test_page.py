"""The HTML page: its content, and that nothing on it is private, fetched or unescaped."""

import html
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from tests.report.builders import with_statement
from unheard.errors import LedgerError
from unheard.formatting import percent
from unheard.privacy.ledger import Ledger
from unheard.report import tables
from unheard.report.comparison import Comparison
from unheard.report.page import environment, render_page, write_page
from unheard.report.run_record import RunRecord, latest
from unheard.run_folder import LOCAL_KEYS, RunFolder


@pytest.fixture(scope="module")
def page(compared) -> str:
    return render_page(compared)


def text_of(page: str) -> str:
    """Return the visible text of a page, without tags, scripts and styles."""
    kept: list[str] = []

    class Reader(HTMLParser):
        hidden = 0

        def handle_starttag(self, tag, attrs):
            self.hidden += tag in ("script", "style")

        def handle_endtag(self, tag):
            self.hidden -= tag in ("script", "style")

        def handle_data(self, data):
            if not self.hidden:
                kept.append(data)

    Reader().feed(page)
    return re.sub(r"\s+", " ", " ".join(kept))


def test_a_run_without_privacy_shows_infinity_in_every_form(compared, page):
    rows = {row[0]: row for row in tables.summary(compared).rows}
    assert rows["ε, claimed"][1] == "∞"
    assert "No privacy guarantee" in text_of(page)
    assert "Not drawn, because ε is infinite: plain." in text_of(page)
    runs = json.loads(json.dumps(compared.as_json(), allow_nan=False))["runs"]
    assert runs[0]["epsilon"] == "infinity"
    assert runs[1]["epsilon"] == compared.records[1].epsilon


def test_a_page_with_one_private_run_says_what_is_covered_and_what_is_not(compared, page):
    statement = compared.records[0].statement
    assert statement["released"]
    assert statement["not_covered"]
    for sentence in [*statement["released"], *statement["not_covered"]]:
        assert sentence.replace("`", "") in text_of(page)
    assert "What it does not cover" in text_of(page)
    plain = Comparison(records=compared.records[:1], baseline=compared.baseline)
    assert "What it does not cover" not in text_of(render_page(plain))


def test_a_hypothetical_epsilon_never_stands_alone(compared, page):
    (one,) = compared.hypotheticals
    assert one.run == "private"
    summary = tables.summary(compared)
    (row,) = [row for row in summary.rows if "hypothetical" in row[0]]
    assert row[1] == "—"
    assert "did not happen" in summary.note
    assert "did not happen" in text_of(page)
    assert compared.as_json()["hypothetical"][0]["note"].startswith("Hypothetical")


def test_the_guarantee_is_the_first_part_of_the_page(page):
    seen = text_of(page)
    places = [seen.index(words) for words in ("What each person is promised", "How well it predicts", "What it cost")]
    assert places == sorted(places)


def test_warnings_of_the_statement_are_on_the_page(compared):
    private = replace(compared.records[1], population_ledger=None)
    statement = {**private.statement, "warnings": ["REPRODUCIBLE NOISE: the noise was drawn from a known seed."]}
    warned = Comparison(records=[with_statement(private, statement)], baseline=private)
    seen = text_of(render_page(warned))
    assert "REPRODUCIBLE NOISE" in seen
    assert "no guarantee against anyone who knows the seed" in seen


def test_the_page_loads_nothing_and_sends_nothing(page):
    without_data = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", without_data)
    assert "@import" not in page
    assert "url(" not in without_data
    assert len(page) < 1_300_000


def test_nothing_private_and_no_place_is_on_the_page(page, store, runs):
    seen = text_of(page) + "".join(re.findall(r'<script type="application/json".*?</script>', page, flags=re.DOTALL))
    assert str(store.path) not in seen
    assert str(runs[0].parent) not in seen
    for word in ("num_users", "cohort_size", "training_loss", "update_norm"):
        assert word not in seen


def test_a_seed_is_never_on_a_page(compared):
    private = compared.records[1]
    seeded = {**private.tables, "training": {**private.tables["training"], "reproducible_seed": 987_654_321}}
    for key in LOCAL_KEYS:  # paths of the machine that trained: their last part is enough
        table, name = key.split(".")
        seeded[table] = {**seeded.get(table, {}), name: "/private-place/last"}
    fields = ("name", "facts", "entries", "metrics", "measures")
    record = RunRecord(**{field: getattr(private, field) for field in fields}, tables=seeded)
    page = render_page(Comparison(records=[record], baseline=record))
    assert "987654321" not in page.replace(",", "")
    assert "private-place" not in page
    assert "set, and not shown" in page


def test_every_plot_has_a_table_with_its_numbers(page):
    assert page.count('class="plot"') == 7
    assert page.count("The same as a table") == 5  # the three histograms share one


def test_a_run_that_has_only_begun_has_a_page(runs, tmp_path, monkeypatch):
    # The folder is cut back to an earlier state, which its checkpoints contradict.
    monkeypatch.setattr("unheard.report.run_record.read_run_ledger", lambda folder: Ledger.read(folder.ledger))
    begun = tmp_path / "begun"
    shutil.copytree(runs[1], begun)
    for name in ("metrics.jsonl", "measures.json", "statement.json"):
        (begun / name).unlink()
    header, *_ = (begun / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (begun / "ledger.jsonl").write_bytes(header)
    compared = Comparison.read([begun, runs[0]])
    page = render_page(compared)
    assert "has not been evaluated yet" in text_of(page)
    assert tables.summary(compared).rows[0][1] == "—"


def test_a_run_that_has_diverged_has_a_page(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "check_metrics", lambda folder: None)  # its checkpoints record other figures
    lost = tmp_path / "lost"
    shutil.copytree(runs[1], lost)
    text = (lost / "metrics.jsonl").read_text()
    (lost / "metrics.jsonl").write_text(re.sub(r'"(loss|perplexity)": [\d.]+', r'"\1": NaN', text))
    measures = json.loads((lost / "measures.json").read_text())
    measures["tokens"]["perplexity"] = measures["users"]["perplexity"]["mean"] = None
    measures["prompts"] = [{"text": "w1", "words": []}]
    (lost / "measures.json").write_text(json.dumps(measures))
    compared = Comparison.read([lost])
    assert "NaN" not in re.sub(r"<script>.*?</script>", "", render_page(compared), flags=re.DOTALL)
    json.dumps(compared.as_json(), allow_nan=False)


def test_an_edited_ledger_makes_no_page(runs, tmp_path):
    edited = tmp_path / "edited"
    shutil.copytree(runs[1], edited)
    ledger = edited / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"noise_multiplier":0.5', b'"noise_multiplier":9.5', 1))
    with pytest.raises(LedgerError):
        write_page(Comparison.read([edited]), tmp_path / "page")
    assert not (tmp_path / "page" / "index.html").exists()


@pytest.mark.system
def test_a_page_is_written_without_torch(runs, tmp_path):
    code = (
        "import sys; from unheard.report.comparison import Comparison; from unheard.report.page import write_page;"
        f"write_page(Comparison.read([{str(runs[0])!r}]), {str(tmp_path)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert (tmp_path / "index.html").stat().st_size > 500_000


def json_of(page: str) -> list:
    """Return the plot specifications in a page."""
    return [json.loads(text) for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page)]


HOSTILE = "</script><script>alert(1)</script><b onclick='x'>&{{[a].b}}"


def test_every_text_of_a_run_is_escaped(compared):
    """A script in the run name, the prompts, the words, the settings, the measures and the statement stays text."""
    record = compared.records[1]
    measures = json.loads(json.dumps(record.measures))
    measures["prompts"] = [{"text": HOSTILE, "words": [{"word": HOSTILE, "probability": 0.5}]}]
    measures["baselines"] = {HOSTILE: next(iter(measures["baselines"].values()))}
    measures["baselines_fitted_on"] = HOSTILE
    measures["bands"][0]["band"] = HOSTILE
    settings = {**record.tables, "update": {HOSTILE: HOSTILE}, "corpus": {"path": HOSTILE}}
    statement = {
        **record.statement,
        "warnings": [HOSTILE],
        "released": [HOSTILE],
        "not_covered": [f"see `{HOSTILE}`"],
        "claim": HOSTILE,
    }
    hostile = with_statement(replace(record, name=HOSTILE, tables=settings, measures=measures), statement)
    page = render_page(Comparison(records=[hostile, compared.records[0]], baseline=hostile), title=HOSTILE)
    assert "<script>alert" not in page
    assert "<b onclick" not in page
    assert html.escape(HOSTILE)[:40] in page
    assert text_of(page).count(HOSTILE) > 20
    assert HOSTILE in json.dumps(json_of(page), ensure_ascii=False).replace('\\"', '"')


def test_no_template_switches_escaping_off_for_text_of_a_run():
    """`safe` marks only the bundled plot library, and autoescape is never switched off."""
    sources = {path.name: path.read_text() for path in (files("unheard.report") / "templates").iterdir()}
    assert {"base.html", "macros.html", "report.html", "page.css", "page.js"} <= set(sources)
    safe = [line for text in sources.values() for line in text.splitlines() if re.search(r"\|\s*safe", line)]
    assert safe == ["<script>{{ plot_library() | safe }}</script>"]
    assert not any("autoescape" in re.sub(r"\{#.*?#\}", "", text, flags=re.DOTALL) for text in sources.values())
    assert environment().autoescape is True


def test_the_headline_shows_the_accuracy_of_the_table(compared, page):
    """The accuracy is not smoothed, because the page is about the newest model."""
    for record, cell in zip(compared.records, tables.summary(compared).rows[0][1:], strict=True):
        assert cell == percent(latest(record, "accuracy_top1"))
        assert f"{record.name} predicts {cell} of next words correctly" in text_of(page).replace("  ", " ")


def test_backticks_become_code(page):
    assert "`" not in text_of(page)
    assert "<code>unheard statement --all-runs</code>" in page


def test_the_commands_of_the_page_work_in_the_folder_of_the_runs(compared, runs, page):
    (block,) = re.findall(r"<pre>(unheard statement.*?)</pre>", page, flags=re.DOTALL)
    for line in html.unescape(block).splitlines():
        program, command, name, *_ = shlex.split(line)
        assert (program, command) in {("unheard", "statement"), ("unheard", "evaluate")}
        assert (runs[0].parent / name / "run.toml").is_file()
    assert "in the folder that contains the run folders" in text_of(page)
