"""The report page in a real browser: every plot drawn, nothing fetched, wide and narrow, light and dark."""

import pytest

from tests.report.conftest import runs  # noqa: F401 (a fixture)
from unheard.report.comparison import Comparison
from unheard.report.page import write_page

pytestmark = pytest.mark.system

DESKTOP = dict(width=1280, height=900)
PHONE = dict(width=375, height=740, touch=True)
HEADS = {f"head-words-{head}" for head in (10, 50, 100)}
PLOTS = {"accuracy-by-round", "epsilon-by-round", "accuracy-by-band", "accuracy-by-user"} | HEADS


@pytest.fixture(scope="module")
def page_file(runs, tmp_path_factory):  # noqa: F811
    return write_page(Comparison.read(runs, as_if_users=1_000_000), tmp_path_factory.mktemp("page"))


@pytest.fixture
def show(open_page, page_file):
    """Open the page and wait until each plot is drawn. Returns the OpenPage and its page."""

    def shown(**how):
        opened = open_page(**how)
        page = opened.goto(page_file)
        for name in PLOTS:
            page.wait_for_selector(f"#{name}[data-drawn] svg", timeout=20_000)
        return opened, page

    return shown


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_plot_is_drawn_without_an_error_and_nothing_is_fetched(show, page_file, size, scheme):
    opened, page = show(**size, scheme=scheme)
    assert {plot.get_attribute("id") for plot in page.query_selector_all(".plot")} == PLOTS
    for name in PLOTS:
        marks = page.locator(
            f"#{name} svg g.mark-line path, #{name} svg g.mark-rect path, #{name} svg g.mark-rule line"
        )
        assert marks.count() >= 2, name
        box = page.locator(f"#{name} svg").bounding_box()
        assert box["width"] > 150
        assert box["height"] > 80
    assert opened.complaints == []
    assert [request for request in opened.requests if not request.startswith("data:")] == [page_file.as_uri()]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_page_fits_its_width_even_with_every_table_open(show, size):
    _, page = show(**size)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_light_and_dark_are_two_looks_of_one_page(show):
    colours = {}
    for scheme in ("light", "dark"):
        _, page = show(**DESKTOP, scheme=scheme)
        line = "getComputedStyle(document.querySelector('#accuracy-by-round g.mark-line path')).stroke"
        colours[scheme] = page.evaluate(f"[getComputedStyle(document.body).backgroundColor, {line}]")
    (light, _), (dark, _) = colours["light"], colours["dark"]
    assert brightness(light) > 230
    assert brightness(dark) < 50
    assert colours["light"][1] != colours["dark"][1]  # a plot follows the theme


def brightness(colour: str) -> float:
    return sum(float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) / 3


def test_pointing_at_a_curve_shows_the_figure_of_every_run(show):
    opened, page = show(**DESKTOP)
    plot = page.locator("#accuracy-by-round")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#vg-tooltip-element.visible")
    note = page.locator("#vg-tooltip-element").inner_text()
    for word in ("round", "plain", "private", "%"):
        assert word in note
    assert opened.complaints == []


def labels(page) -> list[float]:
    """Return the labels of the horizontal axis, which are rounds."""
    found = page.locator("#accuracy-by-round .role-axis-label text").all_text_contents()
    return [float(text) for text in found if not text.endswith("%") and text.strip()]


def test_a_curve_can_be_zoomed_by_button_by_key_and_set_back(show):
    opened, page = show(**DESKTOP)
    whole = labels(page)
    page.click('[data-for="accuracy-by-round"][data-does="in"]')
    page.wait_for_function("document.getElementById('accuracy-by-round').dataset.shown")
    page.wait_for_timeout(200)
    near = labels(page)
    assert max(near) - min(near) < max(whole) - min(whole)
    page.focus("#accuracy-by-round")
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(200)
    assert max(labels(page)) > max(near)
    page.keyboard.press("0")
    page.wait_for_timeout(200)
    assert sorted(labels(page)) == sorted(whole)
    assert opened.complaints == []


def test_the_wheel_scrolls_the_page_and_not_the_plot(show):
    _, page = show(**DESKTOP)
    page.locator("#accuracy-by-round").scroll_into_view_if_needed()
    box = page.locator("#accuracy-by-round").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    before, seen = page.evaluate("scrollY"), sorted(labels(page))
    page.mouse.wheel(0, 240)
    page.wait_for_function(f"scrollY > {before}")
    assert sorted(labels(page)) == seen


def test_the_report_works_with_a_keyboard_and_a_screen_reader(show):
    _, page = show(**DESKTOP)
    assert page.locator("h1").count() == 1
    assert page.locator("html").get_attribute("lang") == "en"
    for name in PLOTS:
        labelled = page.locator(f"#{name}").get_attribute("aria-labelledby")
        assert page.locator(f"#{labelled}").inner_text()
        assert (
            page.locator(f"#{name} svg").get_attribute("aria-label")
            or page.locator(f"#{name} svg [aria-label]").count()
        )
    for button in page.locator("button").all():
        assert button.get_attribute("aria-label")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the content"
    for table in page.locator("table.data").all():
        assert table.locator("th[scope=col]").count() >= 2
        assert table.locator("th[scope=row]").count() >= 1
    summary = page.locator("#accuracy summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("#accuracy details table").first.is_visible()


def test_on_paper_it_is_light_and_without_buttons(show):
    _, page = show(**DESKTOP, scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert brightness(page.evaluate("getComputedStyle(document.body).backgroundColor")) > 230
    assert not page.locator("button").first.is_visible()
    assert len(page.pdf()) > 20_000
