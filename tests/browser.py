"""The browser that the page's checks use: Chromium, from the system or from Playwright.

`python tests/browser.py` installs one where there is none, and says what it did. It never fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = (
    "apt-get install libatomic1 chromium "
    "(on Ubuntu: apt-get install libatomic1, then python -m playwright install --with-deps chromium)"
)
# Popups of the address bar, which Chromium loads beside every tab: they take as long as a page of the book. The others
# are what playwright itself leaves out, which this replaces.
WITHOUT = ["WebUIOmniboxPopup", "WebUIOmniboxAimPopup", "HttpsUpgrades", "HttpsFirstBalancedModeAutoEnable"]
WITHOUT += ["DestroyProfileOnBrowserClose", "LensOverlay", "MediaRouter", "OptimizationHints", "PaintHolding"]
INSTALLERS = (
    [sys.executable, "-m", "playwright", "install", "chromium"],
    ["apt-get", "update", "--quiet"],
    ["apt-get", "install", "--yes", "--no-install-recommends", "chromium", "libatomic1"],
)


class NoBrowser(Exception):
    """Says what is missing, and how to install it."""


@cache
def find() -> str:
    """The path of a Chromium that starts, or NoBrowser."""
    if refusal := _refusal(sys.executable, "-m", "playwright"):
        raise NoBrowser(f"Playwright doesn't start ({refusal}): {HOW}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        names = (*NAMES, playwright.chromium.executable_path)
    for path in filter(None, map(shutil.which, names)):
        if not _refusal(path):
            return path
    raise NoBrowser(f"no Chromium starts: {HOW}")


def _refusal(*command: str) -> str:
    """Why a program doesn't start, which may be a distribution's stub, or lack a library. Nothing if it does."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    said = done.stderr.strip().rpartition("\n")[2].rpartition("/")[2]  # without the program's folder
    return said or f"exit status {done.returncode}" if done.returncode else ""


@contextmanager
def launched_or_skipped() -> Iterator[Browser]:
    """The browser that there is, headless; skips the test where there is none."""
    import pytest

    try:
        path = find()
    except NoBrowser as reason:
        pytest.skip(str(reason))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[f"--disable-features={','.join(WITHOUT)}"])
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
        tab.set_default_timeout(180_000)  # Python in a page takes its time on a busy machine
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
        try:
            find()
        except NoBrowser:
            if command[0] != "apt-get" or os.geteuid() == 0:
                print(f"no browser yet: {' '.join(command)}", flush=True)
                _run(command)
    try:
        print(f"the page's checks use {find()}")
    except NoBrowser as reason:
        print(f"the page's checks will be skipped: {reason}")


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, timeout=300, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as problem:
        print(problem)


if __name__ == "__main__":
    main()
