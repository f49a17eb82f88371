"""The browser itself: it starts, runs scripts, and reports the errors of a page."""

import pytest

pytestmark = pytest.mark.system


def test_an_error_on_a_page_is_detected(open_page, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><title>t</title><script>console.error('no'); missing()</script>")
    opened = open_page()
    assert opened.goto(page).title() == "t"
    assert opened.complaints[0] == "no"
    assert "missing is not defined" in opened.complaints[1]


def test_a_page_without_errors_passes_and_requests_nothing(open_page, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><title>t</title><p id=a></p><script>a.textContent = 1 + 1</script>")
    opened = open_page(width=375, touch=True, scheme="dark")
    assert opened.goto(page).inner_text("#a") == "2"
    assert opened.complaints == []
    assert opened.requests == [page.as_uri()]
