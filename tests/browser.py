"""Reports in a real browser: headless Chromium through Playwright, with the network off.

Chromium is the system's (Debian: `apt-get install chromium`) or the one that $CHROMIUM names; Playwright's own download
is not used. Without one, tests that need it skip with that hint, or fail where $REQUIRE_CHROMIUM is set (`.ci/run`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "google-chrome-stable")
WIDTHS = {"desktop": 1280, "phone": 390}
HINT = "no Chromium: `apt-get install chromium` (Debian), or name its executable in $CHROMIUM"


@dataclass
class Opened:
    """What a page looked like.

    Attributes:
        text: that a reader sees, in the language shown.
        errors: messages of the console and exceptions of scripts.
        requests: addresses that the page asked for beside itself; a report asks for none.
        overflow: pixels by which the page is wider than its window; a report scrolls its wide tables inside.
        cut: texts of table cells, headings and paragraphs that stick out of their own parent without a scroll bar.
        png: screenshot of the whole page, when asked for.
    """

    text: str = ""
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    overflow: int = 0
    cut: list[str] = field(default_factory=list)
    png: bytes = b""


_CUT = """() => [...document.querySelectorAll("p, h1, h2, h3, .facts div, pre, .badge, button, figcaption")]
    .filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline")
    .map(e => e.innerText.slice(0, 60))"""


class Browser:
    """A running Chromium. Playwright has a thread to itself: its event loop would stop others in the test's own."""

    def __init__(self, browser: Any, thread: ThreadPoolExecutor) -> None:
        self._browser, self._thread = browser, thread

    def open(
        self, path: Path, *, width: int = WIDTHS["desktop"], language: str = "en", picture: bool = False
    ) -> Opened:
        """Open a file as a reader with that language does."""
        return self._thread.submit(self._open, path.resolve().as_uri(), width, language, picture).result()

    def _open(self, address: str, width: int, language: str, picture: bool) -> Opened:
        result = Opened()
        locale = {"en": "en-US", "zh": "zh-CN"}[language]
        with self._browser.new_context(
            viewport={"width": width, "height": 900}, locale=locale, offline=True
        ) as context:
            page = context.new_page()
            page.on("console", lambda message: result.errors.append(message.text))
            page.on("pageerror", lambda error: result.errors.append(str(error)))
            page.on("request", lambda request: result.requests.append(request.url))
            page.goto(address)
            result.requests = [url for url in result.requests if url != address]
            result.text = page.inner_text("body")
            result.overflow = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
            result.cut = page.evaluate(_CUT)
            if picture:
                result.png = page.screenshot(full_page=True)
        return result

    def switch(self, path: Path, to: str) -> str:
        """Text of an English page after a click on the language's button."""
        return self._thread.submit(self._switch, path.resolve().as_uri(), to).result()

    def _switch(self, address: str, to: str) -> str:
        with self._browser.new_context(locale="en-US") as context:
            page = context.new_page()
            page.goto(address)
            page.click(f'[data-to="{to}"]')
            text: str = page.inner_text("body")
            return text


def find_chromium() -> str | None:
    """The executable, or None."""
    named = os.environ.get("CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Start Chromium; skip the test, or fail it where a browser is required, when there is none."""
    executable = find_chromium()
    if executable is None:
        if os.environ.get("REQUIRE_CHROMIUM"):
            pytest.fail(HINT)
        pytest.skip(HINT)
    with ThreadPoolExecutor(max_workers=1) as thread:
        playwright, browser = thread.submit(_start, executable).result()
        try:
            yield Browser(browser, thread)
        finally:
            thread.submit(browser.close).result()
            thread.submit(playwright.stop).result()


def _start(executable: str) -> tuple[Any, Any]:
    from playwright.sync_api import sync_playwright

    playwright = sync_playwright().start()
    # Containers run the tests as root and without the kernel features that Chromium's sandbox needs.
    return playwright, playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])


def check_report(browser: Browser, path: Path, english: str, chinese: str) -> None:
    """What holds for every report, on a screen and on a phone, in both languages; the two texts stand in it."""
    for width, language in ((WIDTHS["desktop"], "en"), (WIDTHS["phone"], "zh"), (WIDTHS["phone"], "en")):
        wanted, other = (english, chinese) if language == "en" else (chinese, english)
        page = browser.open(path, width=width, language=language)
        assert page.errors == []
        assert page.requests == []
        assert wanted in page.text
        assert other not in page.text
        assert page.overflow <= 0, f"{page.overflow} px wider than {width}"
        assert page.cut == []
    assert chinese in browser.switch(path, "zh")
