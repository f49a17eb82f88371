"""The page of the paper's results in a real browser: every figure is drawn, nothing is fetched, the width fits the window."""

import pytest
from reproduction.page import exhibits, write_page

from tests.reproduction.conftest import everything, quick  # noqa: F401 (fixtures)

pytestmark = pytest.mark.system

DESKTOP = dict(width=1280, height=900)
PHONE = dict(width=375, height=740, touch=True)
DRAWN = "document.querySelectorAll('.plot').length === document.querySelectorAll('.plot[data-drawn]').length"


@pytest.fixture
def page_file(quick, everything, tmp_path):  # noqa: F811
    return write_page(exhibits(everything), tmp_path)


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_every_figure_is_drawn_without_an_error_and_the_page_fits(open_page, page_file, size, scheme):
    opened = open_page(**size, scheme=scheme)
    page = opened.goto(page_file)
    page.wait_for_function(DRAWN, timeout=60_000)
    assert page.locator(".plot").count() > 20
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    assert opened.complaints == []
    assert [request for request in opened.requests if not request.startswith("data:")] == [page_file.as_uri()]
