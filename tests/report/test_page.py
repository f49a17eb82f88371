"""What the page and the tables say: the promise in words, infinity, hypothetical figures, nothing private, nothing fetched."""

import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from tests.report.making import ROUNDS
from unheard.errors import InvalidValue, LedgerError
from unheard.formatting import epsilon_text, in_points, small
from unheard.report import tables
from unheard.report.comparison import Comparison
from unheard.report.html_parts import data
from unheard.report.images import write_images
from unheard.report.page import render_page, write_page
from unheard.report.plain_language import in_words
from unheard.report.run_record import RunRecord, read_runs
from unheard.report.style import DARK, LIGHT


@pytest.fixture(scope="module")
def compared(runs) -> Comparison:
    return Comparison.read(runs, as_if_users=1_000_000)


@pytest.fixture(scope="module")
def page(compared) -> str:
    return render_page(compared)


def text_of(page: str) -> str:
    """What a reader sees: no tags, scripts or styles."""
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


def test_a_record_is_what_the_folder_holds(compared):
    plain, private = compared.records
    assert [plain.name, private.name] == ["plain", "private"]
    assert [plain.rounds, private.rounds] == [ROUNDS, ROUNDS]
    assert [plain.users_per_round, private.users_per_round] == [6, 12]
    assert math.isinf(plain.epsilon)
    assert 0 < private.epsilon < 1000
    assert compared.baseline is plain


def test_a_run_without_privacy_shows_infinity_in_every_form(compared, page):
    rows = {row[0]: row for row in tables.summary(compared).rows}
    assert rows["ε, claimed"][1] == "∞"
    assert "No privacy guarantee" in text_of(page)
    runs = json.loads(json.dumps(compared.as_json(), allow_nan=False))["runs"]
    assert runs[0]["epsilon"] == "infinity"
    assert runs[1]["epsilon"] == compared.records[1].epsilon


def test_a_hypothetical_epsilon_never_stands_alone(compared, page):
    (one,) = compared.hypotheticals
    assert one.run == "private"
    summary = tables.summary(compared)
    (row,) = [row for row in summary.rows if "hypothetical" in row[0]]
    assert row[1] == "—"
    assert "did not happen" in summary.note
    assert "did not happen" in text_of(page)
    assert compared.as_json()["hypothetical"][0]["note"].startswith("Hypothetical")


def test_the_promise_stands_before_everything_else(page):
    seen = text_of(page)
    places = [seen.index(words) for words in ("What each person is promised", "How well it predicts", "What it cost")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("epsilon", "grade", "said"),
    [
        (math.log(3), "moderate", "more than 3 times as likely"),
        (
            math.log(3),
            "moderate",
            "right at most 75.1 times in 100",
        ),  # 75 and a little for delta: rounded up, never down
        (math.log(2.001), "strong", "more than 2.01 times as likely"),
        (0.1, "strong", "right at most 52.6 times in 100"),
        (20.0, "weak", "promises little"),
    ],
)
def test_the_promise_in_words(compared, epsilon, grade, said):
    private = compared.records[1]
    told = {**private.statement, "claimed": {"epsilon": epsilon, "accountant": "pld"}, "delta": 1e-4}
    words = in_words(_with(private, told))
    assert words.grade == grade
    assert said in " ".join(words.paragraphs)


def _with(record: RunRecord, told: dict) -> RunRecord:
    fields = ("name", "tables", "facts", "entries", "metrics", "measures")
    copy = RunRecord(**{field: getattr(record, field) for field in fields})
    copy.__dict__["statement"] = told
    return copy


def test_warnings_of_the_statement_are_on_the_page(compared):
    private = compared.records[1]
    told = {**private.statement, "warnings": ["REPRODUCIBLE NOISE: the noise was drawn from a known seed."]}
    warned = Comparison(records=[_with(private, told)], baseline=private)
    seen = text_of(render_page(warned))
    assert "REPRODUCIBLE NOISE" in seen
    assert "no guarantee against whoever knows the seed" in seen


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
    fields = ("name", "facts", "entries", "metrics", "measures")
    record = RunRecord(**{field: getattr(private, field) for field in fields}, tables=seeded)
    page = render_page(Comparison(records=[record], baseline=record))
    assert "987654321" not in page.replace(",", "")
    assert "set, and not shown" in page


def test_every_plot_has_a_table_with_its_numbers(page):
    assert page.count('class="plot"') == 7
    assert page.count("The same as a table") == 5  # the three histograms share one


def test_a_run_with_a_hostile_name_stays_text(compared):
    record = compared.records[1]
    name = '</script><b onclick="x">&{{[a].b'
    hostile = RunRecord(
        **{f: getattr(record, f) for f in ("tables", "facts", "entries", "metrics", "measures")}, name=name
    )
    page = render_page(Comparison(records=[hostile, compared.records[0]], baseline=hostile), title=name)
    assert "<b onclick" not in page
    assert "</script><b" not in page
    assert name in text_of(page)
    assert json.loads(re.sub(r"^<script.*?>|</script>$", "", data("x", {"a": name}))) == {"a": name}


def test_runs_of_one_name_are_told_apart_and_no_run_is_shown_twice(runs, tmp_path):
    for parent in ("monday", "tuesday"):
        shutil.copytree(runs[1], tmp_path / parent / "run")
    names = [r.name for r in read_runs([tmp_path / "monday" / "run", tmp_path / "tuesday" / "run"])]
    assert names == ["monday/run", "tuesday/run"]
    with pytest.raises(InvalidValue, match="twice"):
        read_runs([runs[0], runs[0]])
    with pytest.raises(InvalidValue, match="at least one"):
        read_runs([])


def test_unlike_runs_are_compared_with_a_word_of_caution(runs, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(runs[1], other)
    lines = (other / "metrics.jsonl").read_text().splitlines()
    (other / "metrics.jsonl").write_text("\n".join(lines[:3]) + '\n{"round": 9')  # three evaluations, and a torn line
    (other / "measures.json").unlink()
    cautions = " ".join(Comparison.read([runs[0], other]).cautions)
    assert "different numbers of rounds" in cautions
    assert f"other is at round 6 of {ROUNDS}" in cautions
    assert "other has no full measures" in cautions
    assert Comparison.read(runs).cautions == []
    assert "other" in render_page(Comparison.read([other]))


def test_a_run_that_has_only_begun_has_a_page(runs, tmp_path):
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


def test_a_run_that_has_diverged_has_a_page(runs, tmp_path):
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


def test_plots_are_written_as_png_without_a_browser(compared, tmp_path):
    written = write_images(compared, tmp_path / "plots", scale=1)
    assert len(written) == 7
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_head_words_and_bands_hold_the_measures_own_numbers(compared):
    heads = tables.head_words(compared.measured)
    counts = compared.measured["private"]["head_words"]["50"]
    (row,) = [row for row in heads.rows if row[0] == "50 · private"]
    assert row[-1] == f"{sum(i * c for i, c in enumerate(counts)) / sum(counts):.2f}"
    bands = tables.bands(compared.measured)
    assert bands.rows[-1][0] == "not in the dictionary"
    assert bands.columns[2:] == ["plain", "private"]


@pytest.mark.parametrize(
    ("difference", "plain", "signed"),
    [(0.00134, "0.13", "+0.13"), (-0.0002, "−0.02", "−0.02"), (-0.00001, "0.00", "0.00"), (None, "—", "—")],
)
def test_a_difference_in_points_has_a_true_minus_and_nothing_has_no_side(difference, plain, signed):
    assert (in_points(difference), in_points(difference, signed=True)) == (plain, signed)


def test_small_numbers_are_written_as_people_do():
    assert [small(1e-9), small(2e-5), small(6.88e-4)] == ["10⁻⁹", "2 × 10⁻⁵", "6.9 × 10⁻⁴"]
    assert [epsilon_text(e) for e in (1.0, 39.28, 108.2, 4321.0, math.inf)] == ["1.00", "39.3", "108", "4,321", "∞"]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_can_be_told_from_the_paper(theme):
    """WCAG AA: 4.5 for text, 3 for lines and bars."""
    for name, least in {"ink": 7, "soft": 4.5, "floor": 3, **{f"series-{i}": 4.5 for i in range(1, 7)}}.items():
        for paper in ("paper", "card"):
            pair = sorted((luminance(theme[name]), luminance(theme[paper])))
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= least, (name, paper)


def test_a_page_is_written_without_torch(runs, tmp_path):
    code = (
        "import sys; from unheard.report.comparison import Comparison; from unheard.report.page import write_page;"
        f"write_page(Comparison.read([{str(runs[0])!r}]), {str(tmp_path)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert (tmp_path / "index.html").stat().st_size > 500_000
