"""Hostile links to the explorer: no script of theirs runs, nothing outside is asked for, and the page answers."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import pytest

import browser as chromium

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WITHIN_S = 10.0
CONF = f"""
import sys
sys.path.insert(0, {str(ROOT / "book" / "_ext")!r})
extensions = ["myst_parser", "pplab_book"]
html_static_path = [{str(ROOT / "book" / "_static")!r}]
html_theme = "basic"
"""
SCRIPTS = [
    "<script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    '"><svg onload=window.hit=1>',
    "javascript:window.hit=1",
    "${window.hit=1}",
    "<a href=//outside.test>x</a>",
]
NAMES = ["__proto__", "constructor", "toString", "hasOwnProperty"]
KEYS = ["schedule", "compare", "overlap", "per", "ranks", "pair", "zoom", "path", "level", "microbatches", "forward"]
NUMBERS = [
    "1e5",
    "1e7",
    "1e9",
    "1e308",
    "-1",
    "0",
    "0.5",
    "NaN",
    "Infinity",
    "-Infinity",
    "1e-320",
    "9" * 40,
    "%00",
    "",
]


def links(tries: int, seed: int) -> dict[str, list[str]]:
    """So many of each kind of link, drawn at random."""
    draw = random.Random(seed)
    kinds = {
        "a script in a link": [f"{key}={quote(text)}" for key in KEYS for text in SCRIPTS],
        "a name of JavaScript's own in a link": [f"{key}={name}" for key in KEYS for name in NAMES]
        + [f"{name}=1&schedule=1F1B" for name in NAMES],
        "a number in a link that is too large, or none": [
            f"schedule={name}&{key}={number}"
            for name in ("1F1B", "Interleaved1F1B", "ZB-V")
            for key in ("zoom", "until", "ranks", "microbatches", "forward", "latency", "stages-per-rank")
            for number in NUMBERS
        ],
    }
    return {what: draw.sample(each, min(tries, len(each))) for what, each in kinds.items()}


def attack(tries: int, seed: int, page: str | None = None) -> list[dict]:
    """Open so many links of each kind, to that page or one of its own; rows as the other attacks on what comes from
    outside give them."""
    with tempfile.TemporaryDirectory() as place, chromium.launched_or_skipped() as started:
        page = page or _page(Path(place))
        rows = []
        for what, each in links(tries, seed).items():
            found = [_opened(started, page, link) for link in each]
            wrong = [f"{link}: {seen}" for link, (seen, _) in zip(each, found, strict=True) if seen]
            seconds = round(max(seconds for _, seconds in found), 2)
            seen = wrong[0] if wrong else "the page, without it"
            rows.append({"what": what, "tried": len(each), "wrong": len(wrong), "seen": seen, "seconds": seconds})
        return rows


def _page(folder: Path) -> str:
    """Build the explorer's page by itself."""
    (folder / "conf.py").write_text(CONF)
    (folder / "index.md").write_text("# Explorer\n\n```{explorer}\n:page:\n```\n")
    command = [sys.executable, "-m", "sphinx", "-q", str(folder), str(folder / "html")]
    subprocess.run(command, check=True, capture_output=True)
    return (folder / "html" / "index.html").as_uri()


def _opened(started, page: str, link: str) -> tuple[str, float]:
    """What is wrong with a page that was opened by a link, and how long it took to show it."""
    tab = started.new_page()
    tab.set_default_timeout(1000 * WITHIN_S)
    outside, errors = [], []
    tab.on(
        "request", lambda request: request.url.startswith(("file:", "data:", "blob:")) or outside.append(request.url)
    )
    tab.on("pageerror", lambda error: errors.append(str(error)))
    began = time.monotonic()
    try:
        tab.goto(f"{page}#{link}")
        tab.wait_for_selector(".pplab-explorer[data-ready]")
        seconds = time.monotonic() - began
        hit = ["its script ran"] if tab.evaluate("window.hit") else []
    except Exception as error:
        seconds, hit = time.monotonic() - began, [str(error).splitlines()[0]]
    tab.close()
    outside = [f"it asks for {url}" for url in outside if not url.startswith(("file:", "data:", "blob:"))]
    return "; ".join([*hit, *outside, *errors]), seconds


def test_hostile_links_do_nothing(book):
    for each in attack(tries=2, seed=1, page=(book / "book" / "explorer.html").as_uri()):
        assert each["wrong"] == 0, each
