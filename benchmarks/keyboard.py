"""Measure the time of a keystroke on the keyboard page in a browser, from the key's event to the new suggestions.

    unheard init ... && unheard train ... --out runs/paper         # the paper's model: V = 10,000, D = 96, H = 256
    python benchmarks/keyboard.py runs/paper                        # one model
    python benchmarks/keyboard.py runs/paper exports/paper          # two side by side

Playwright lets Chromium (Debian's package) type a key every 80 ms, like a fast typist. The page measures each key
(performance.measure). For comparison, the server alone is timed by a plain HTTP client on one connection.
"""

import http.client
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from urllib.parse import urlsplit

SENTENCES = (
    "Hello, how are you doing today? I was thinking about what you said last night and I really do not know what to say. "
    "Maybe we could go to the park on Sunday, if the weather is nice and nobody has to work. "
    "My sister says that she would come too, but only when her children are with their father that weekend. "
)
KEY_EVERY_MS = 80
"""Milliseconds between two keys."""


def main(folders: list[str]) -> None:
    """Start the server of the keyboard page for some models, and print the times of the server and of the page."""
    command = [shutil.which("unheard") or "unheard", "keyboard", *folders, "--no-open"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = re.findall(r"http://\S+", server.stdout.readline())[0]
        print(
            f"{len(folders)} model(s), {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before"
        )
        show("server alone", time_server(address))
        show("in the page", time_page(address))
        print(f"load {os.getloadavg()[0]:.1f} after")
    finally:
        server.terminate()
        server.wait()


def time_page(address: str) -> list[float]:
    """Return the milliseconds of each key as the page measures them."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=os.environ.get("UNHEARD_CHROMIUM") or shutil.which("chromium"),
            args=["--no-sandbox"] if os.geteuid() == 0 else [],
        )
        page = chromium.new_page()
        page.goto(address)
        page.wait_for_selector("[data-ready=yes]")
        page.locator("#text").press_sequentially("Warming up. ", delay=KEY_EVERY_MS)
        page.evaluate("performance.clearMeasures()")
        page.locator("#text").press_sequentially(SENTENCES, delay=KEY_EVERY_MS, timeout=300_000)
        page.wait_for_timeout(300)
        found = page.evaluate("performance.getEntriesByName('keystroke').map((one) => one.duration)")
        chromium.close()
    return found


def time_server(address: str) -> list[float]:
    """Return the milliseconds of each request as a client on this machine measures them."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc)
    found = []
    for i in range(1, len(SENTENCES)):
        body = json.dumps({"text": SENTENCES[:i]})
        began = time.perf_counter()
        connection.request("POST", "/suggest", body, {"Content-Type": "application/json"})
        connection.getresponse().read()
        found.append(1e3 * (time.perf_counter() - began))
    return found


def show(name: str, milliseconds: list[float]) -> None:
    """Print the median, the high percentiles and the largest of some times."""
    cuts = statistics.quantiles(milliseconds, n=100)
    print(
        f"{name:<14}{len(milliseconds):>5} keys   median {statistics.median(milliseconds):5.1f} ms   "
        f"95th percentile {cuts[94]:5.1f} ms   99th {cuts[98]:5.1f} ms   worst {max(milliseconds):5.1f} ms"
    )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
