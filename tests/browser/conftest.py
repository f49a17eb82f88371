"""Chromium for the tests of pages, controlled by Playwright. If one of the two is missing, the tests are skipped.

make test CI=true      installs both (as root, on Debian); in CI a missing browser is a failure, not a skip
UNHEARD_CHROMIUM=...   another Chromium or Chrome than the one on the path
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def _missing(what: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"CI must run the browser tests, and there is no {what}. .ci/run installs it.", pytrace=False)
    pytest.skip(f"no {what}")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A `playwright.sync_api.Browser`, one for the whole session."""
    path = os.environ.get("UNHEARD_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        _missing("Chromium (apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("Playwright (pip install 'unheard[browser]')")
        raise
    # Chromium cannot use its sandbox when root starts it, as in a container. The pages are trusted.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=[*flags, "--disable-dev-shm-usage"])
        yield chromium
        chromium.close()


class OpenPage:
    """A page with its requests and its console errors and warnings (`complaints`)."""

    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def goto(self, address: str | Path) -> Any:
        self.page.goto(address.resolve().as_uri() if isinstance(address, Path) else address)
        return self.page


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Return a function that opens a page: `open_page(width=..., height=..., scheme="dark", touch=True)`."""
    contexts = []

    def opened(*, width: int = 1280, height: int = 900, scheme: str = "light", touch: bool = False) -> OpenPage:
        size = {"width": width, "height": height}
        context = browser.new_context(
            viewport=size, color_scheme=scheme, has_touch=touch, is_mobile=touch, device_scale_factor=2 if touch else 1
        )
        contexts.append(context)
        return OpenPage(context)

    yield opened
    for context in contexts:
        context.close()
