"""The keyboard page in a real browser: keys and taps, wide and narrow, light and dark, one model and two."""

import re
import threading
import time
from contextlib import contextmanager

import pytest

from tests.deployment.conftest import two_models  # noqa: F401 (a fixture)
from unheard.deployment.keyboard.server import KeyboardServer
from unheard.deployment.keyboard.suggestions import Suggester

pytestmark = pytest.mark.system

PHONE = dict(width=375, height=740, touch=True)
SMALL_PHONE = dict(width=320, height=568, touch=True)


@contextmanager
def serving(models):
    server = KeyboardServer([Suggester(model) for model in models])
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def server(two_models):  # noqa: F811
    with serving(two_models) as made:
        yield made


@pytest.fixture
def keyboard(server, open_page):
    """Open the page with both models. At the end of the test, check that the page reported no error."""
    opened = []

    def at(**size):
        one = open_page(**size)
        page = one.goto(server.address)
        page.wait_for_selector("[data-ready=yes]")
        until(page, "document.querySelector('.suggestion:not(:disabled)')")
        opened.append(one)
        return page

    yield at
    for one in opened:
        assert not one.complaints
        assert all(url.startswith(server.address) for url in one.requests)


def words(page, model: int = 0) -> list[str]:
    return [word for word in page.locator(f".strip.model-{model} .word").all_text_contents() if word]


def until(page, condition: str) -> None:
    """Poll until a condition holds. Playwright's own waiting evaluates strings in the page, which its policy forbids."""
    deadline = time.monotonic() + 10
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def settled(page) -> None:
    """Wait until the suggestions on the page are those for its text and no request is pending."""
    until(
        page,
        "document.getElementById('strips').dataset.after === String(document.getElementById('text').selectionStart)",
    )
    until(page, "performance.now() - performance.getEntriesByName('keystroke').at(-1).startTime > 150")


def test_a_typed_sentence_gets_suggestions_that_follow_each_key(keyboard):
    page = keyboard()
    page.locator("#text").press_sequentially("how are you do")
    until(page, "document.querySelector('.strip .word').textContent.startsWith('do')")
    settled(page)
    assert set(words(page)) == {"don't", "doing"}
    page.locator("#text").press_sequentially("i")
    until(page, "document.querySelectorAll('.strip.model-0 .suggestion:not(:disabled)').length === 1")
    assert words(page) == ["doing"]
    page.locator("#text").press_sequentially("ng ")
    until(page, "document.querySelectorAll('.strip.model-0 .suggestion:not(:disabled)').length === 3")
    assert len(set(words(page))) == 3


def test_a_prefetched_key_is_answered_without_a_request(keyboard):
    page = keyboard()
    page.locator("#text").press_sequentially("how")
    settled(page)
    page.route("**/suggest", lambda route: None)  # requests are never answered
    page.locator("#text").press_sequentially(" ")
    assert len(words(page)) == 3
    page.unroute("**/suggest")


def test_a_tap_puts_the_word_in_and_a_full_stop_sits_tight(keyboard):
    page = keyboard(**PHONE)
    page.locator("#text").press_sequentially("How are you doi")
    settled(page)
    page.get_by_role("button", name="doing").first.tap()
    assert page.locator("#text").input_value() == "How are you doing "
    page.get_by_role("button", name="Full stop").tap()
    assert page.locator("#text").input_value() == "How are you doing."
    page.get_by_role("button", name="Space").tap()
    settled(page)
    first = words(page)[0]
    assert first[0].isupper()  # a sentence begins
    page.locator(".strip.model-0 .suggestion").first.tap()
    assert page.locator("#text").input_value() == f"How are you doing. {first} "


def test_a_suggestion_of_the_second_model_can_be_taken_too(keyboard):
    page = keyboard()
    page.locator("#text").press_sequentially("tom")
    settled(page)  # a suggestion for "to" is not taken after "tom"
    page.locator(".strip.model-1 .suggestion:has-text('tomorrow')").click()
    assert page.locator("#text").input_value() == "tomorrow "
    assert page.evaluate("document.activeElement.id") == "text"  # typing continues


def test_the_cursor_can_go_back_and_suggestions_go_with_it(keyboard):
    page = keyboard()
    page.locator("#text").press_sequentially("tom you ")
    settled(page)
    page.evaluate("document.getElementById('text').setSelectionRange(3, 3)")
    until(page, "document.querySelector('.strip .word').textContent === 'tomorrow'")
    page.locator(".strip.model-0 .suggestion").first.click()
    assert page.locator("#text").input_value() == "tomorrow  you "


def test_a_suggestion_for_another_place_is_not_taken(keyboard):
    page = keyboard()
    page.locator("#text").press_sequentially("tomo")
    settled(page)
    page.route("**/suggest", lambda route: None)  # from here on requests are not answered
    page.locator("#text").press_sequentially("!?")
    page.locator(".strip.model-0 .suggestion").first.click()
    assert page.locator("#text").input_value() == "tomo!?"


def test_saved_keys_by_hand(keyboard):
    """The first model suggests "today" after "t" (1 key and a tap instead of 6 keys), the second after "tod"; none "you"."""
    page = keyboard()
    counts = page.evaluate("""async () => {
      const { tally } = await import('/typing.js');
      const offer = (a, b) => [a, b].map((row) => row.map((word) => ({ word })));
      const offers = new Map([['', offer(['i'], ['i'])], ['t', offer(['today'], ['to'])], ['to', offer(['today'], [])],
                              ['tod', offer(['today'], ['today'])], ['today ', offer(['is'], ['is'])], ['today y', offer([], [])]]);
      return [tally('Today you, pasted', offers, 2), tally('today you, pasted words ', offers, 2), tally('today', offers, 2)];
    }""")
    assert counts[1] == [
        {"saved": 4, "keys": 10},
        {"saved": 2, "keys": 10},
    ]  # "today " and "you,"; the pasted words do not count
    assert counts[2] == [{"saved": 0, "keys": 0}] * 2  # not finished yet
    assert counts[0][0]["saved"] == 0  # another text: there was no suggestion after "T"


def test_the_keys_on_the_screen_type(keyboard):
    page = keyboard(**PHONE)

    def tap(*names):
        for name in names:
            page.locator("#keys").get_by_role("button", name=name, exact=True).tap()

    tap("H", "i", "Space", "Shift", "Y", "o", "u", "Delete", "Numbers", "?", "Letters", "Return", "A")
    assert page.locator("#text").input_value() == "Hi Yo?\nA"


def test_two_models_show_their_names_and_their_guarantees(keyboard):
    page = keyboard()
    assert page.locator(".strip .who").all_text_contents() == ["private", "plain"]
    cards = page.locator(".card")
    assert cards.count() == 2
    assert "ε = 1.5" in cards.nth(0).inner_text()
    assert "4.49 times as likely" in cards.nth(0).inner_text()  # e^1.5 = 4.4817, rounded up
    assert "ε = ∞" in cards.nth(1).inner_text()
    assert "without protection" in cards.nth(1).inner_text()
    page.locator("#text").press_sequentially("the ")
    settled(page)
    assert len(words(page, 0)) == len(words(page, 1)) == 3
    only_one = set(words(page, 0)) ^ set(words(page, 1))
    assert set(page.locator(".suggestion.alone .word").all_text_contents()) == only_one


def test_keystrokes_saved_are_counted_for_each_model(keyboard):
    page = keyboard()
    page.locator("#text").press_sequentially("tomo", delay=80)
    settled(page)
    page.locator(".strip.model-0 .suggestion").first.click()  # "tomorrow": the only word that begins so
    for model in (0, 1):
        text = page.locator(f".card.model-{model} .saved").inner_text()
        saved, keys = map(int, re.findall(r"\d+", text)[:2])
        assert keys == len("tomorrow ")
        assert 4 <= saved <= 8  # suggested after "tomo" at the latest
    assert "5 taps for 9 characters" in page.locator("#taps").inner_text()
    page.get_by_role("button", name="Clear").click()
    assert page.locator("#text").input_value() == ""
    assert "No finished word yet" in page.locator(".card.model-0").inner_text()


def test_one_model_alone_has_one_row_and_no_comparison(two_models, open_page):  # noqa: F811
    with serving(two_models[:1]) as server:
        one = open_page()
        page = one.goto(server.address)
        page.wait_for_selector("[data-ready=yes]")
        assert page.locator(".strip").count() == 1
        assert not page.locator(".hint").count()
        assert not one.complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [dict(width=1280, height=900), PHONE, SMALL_PHONE])
def test_nothing_is_cut_off_at_any_width_or_theme(keyboard, size, scheme):
    page = keyboard(**size, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    for key in page.locator("#keys button").all():
        box = key.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size["width"]
        assert box["height"] >= 40
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 380) == (scheme == "dark")


@pytest.mark.parametrize("size", [PHONE, SMALL_PHONE])
def test_on_a_phone_the_keyboard_is_on_the_first_screen_and_the_systems_own_stays_away(keyboard, size):
    page = keyboard(**size)
    box = page.locator("#keys").bounding_box()
    assert box["y"] + box["height"] <= size["height"] + 1
    assert page.locator("#text").get_attribute("inputmode") == "none"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(keyboard, scheme):
    """The contrast is at least 4.5 to 1, as WCAG AA requires for small text."""
    page = keyboard(scheme=scheme)
    page.locator("#text").press_sequentially("the ")
    settled(page)
    found = page.evaluate("""() => {
      const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map((v) => { v /= 255;
          return v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
      const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
          if (!/, 0\\)|transparent/.test(c)) return c; } };
      return [...document.querySelectorAll('h1, h1 span, p, h2, h3, .who, .word, .key, .badge, summary, #clear, output, label')]
        .filter((e) => e.textContent.trim() && e.getClientRects().length && e.id !== 'spoken')
        .map((e) => { const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
                      return [(a + .05) / (b + .05), e.className || e.tagName]; });
    }""")
    assert len(found) > 40
    assert min(found)[0] >= 4.5, sorted(found)[:5]


def test_the_keyboard_page_works_without_a_mouse_and_with_a_screen_reader(keyboard):
    page = keyboard()
    for button in page.locator("button:not(:disabled)").all():
        assert button.get_attribute("aria-label") or button.inner_text().strip()
    page.locator("#text").press_sequentially("tomo")
    until(page, "document.getElementById('spoken').textContent.includes('private: tomorrow')")
    assert page.locator("#spoken").get_attribute("aria-live") == "polite"
    page.locator(".strip.model-0 .suggestion").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#text").input_value() == "tomorrow "
    page.locator("#keys button").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.locator("#text").input_value() == "tomorrow e"


def test_inline_script_and_other_sites_are_forbidden_by_the_page(server, open_page):
    """The browser enforces the policy that the server sends."""
    one = open_page()
    page = one.goto(server.address)
    page.wait_for_selector("[data-ready=yes]")
    page.evaluate("""() => { const made = document.createElement('img'); made.src = 'http://127.0.0.1:1/x.png';
                             document.body.append(made); }""")
    page.wait_for_timeout(200)
    assert any("Content Security Policy" in trouble for trouble in one.complaints)
    blocked = page.evaluate(
        """() => { try { document.body.innerHTML = '<b>x</b>'; return false; } catch { return true; } }"""
    )
    assert blocked


def test_when_the_server_is_gone_the_page_says_so(two_models, open_page):  # noqa: F811
    with serving(two_models) as server:
        page = open_page().goto(server.address)
        page.wait_for_selector("[data-ready=yes]")
    page.route("**/suggest", lambda route: route.abort())
    page.locator("#text").press_sequentially("h")
    page.wait_for_selector(".trouble")
    assert "still running" in page.locator(".trouble").inner_text()
