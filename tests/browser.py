"""The browser that the page's checks use: Chromium, from the system or from playwright.

`python tests/browser.py` installs one where there is none, and says what it did; it never fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = "no Chromium found: install one with `python -m playwright install chromium` or `apt-get install chromium`"
# Popups of the address bar, which Chromium loads beside every tab: they take as long as a page of the book. The others
# are what playwright itself leaves out, which this replaces.
WITHOUT = ["WebUIOmniboxPopup", "WebUIOmniboxAimPopup", "HttpsUpgrades", "HttpsFirstBalancedModeAutoEnable"]
WITHOUT += ["DestroyProfileOnBrowserClose", "LensOverlay", "MediaRouter", "OptimizationHints", "PaintHolding"]
INSTALLERS = (
    [sys.executable, "-m", "playwright", "install", "chromium"],
    ["apt-get", "install", "--yes", "--no-install-recommends", "chromium"],
)


def find() -> str | None:
    """The path of a Chromium that starts, or None."""
    candidates = [path for name in NAMES if (path := shutil.which(name))]
    try:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            candidates.append(playwright.chromium.executable_path)
    except ImportError:
        return None
    return next((path for path in candidates if Path(path).exists() and _starts(path)), None)


def _starts(path: str) -> bool:
    """Whether it is more than a file of that name: a stub of the distribution's, or a browser without its libraries."""
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@contextmanager
def launched_or_skipped() -> Iterator[Browser]:
    """The browser that there is, headless; skips the test where there is none."""
    import pytest

    if (path := find()) is None:
        pytest.skip(HOW)
    from playwright.sync_api import sync_playwright

    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # which root can't have
    with sync_playwright() as playwright:
        arguments = [*sandbox, f"--disable-features={','.join(WITHOUT)}"]
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@contextmanager
def watched_tabs(browser: Browser, *known: str) -> Iterator[Callable[..., Page]]:
    """Makes tabs without a network. In the end no page may have logged an error, or asked for anything but files, and
    what begins with an address that is `known`: the test answers it."""
    contexts, wrong, known = [], [], ("file:", "data:", "blob:", *known)

    def opened(width: int = 1280, **options: object) -> Page:
        context = browser.new_context(offline=True, viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        tab.on("request", lambda r: None if r.url.startswith(known) else wrong.append(r.url))
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


def main() -> None:
    """Install Chromium where it is missing."""
    for command in INSTALLERS:
        if found := find():
            print(f"the page's checks use {found}")
            return
        print(f"no Chromium yet: {' '.join(command)}", flush=True)
        if command[0] == "apt-get":
            if os.geteuid() or not shutil.which("apt-get"):
                continue
            _run(["apt-get", "update", "--quiet"])
        _run(command)
    print(f"the page's checks use {path}" if (path := find()) else f"the page's checks will be skipped: {HOW}")


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, timeout=300, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as problem:
        print(problem)


if __name__ == "__main__":
    main()
