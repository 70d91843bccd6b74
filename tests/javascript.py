"""Run the explorer's JavaScript from Python: in quickjs, and where that isn't installed in Chromium."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

import browser
from pplab.lab.forms.explorer import STATIC

BOOK = Path(__file__).parents[1] / "book"
NAMES = ("core.js", "rows.js", "settings.js")
PLAY = tuple(BOOK / "_static/play" / name for name in ("play.js", "stamp.js"))
SCRIPTS = (*(STATIC / name for name in NAMES), *PLAY, Path(__file__).with_name("explorer_report.js"))

HAS_QUICKJS = find_spec("quickjs") is not None  # it has no wheel for Python 3.13
Evaluate = Callable[[str], object]  # a JavaScript expression -> its value, as JSON carries it


@contextmanager
def quickjs_engine() -> Iterator[Evaluate]:
    import quickjs

    yield quickjs.Context().eval


@contextmanager
def chromium_engine() -> Iterator[Evaluate]:
    with browser.launched_or_skipped() as chromium:
        page = chromium.new_page()
        # Indirect eval, so that a script's functions become globals.
        yield lambda code: page.evaluate("code => (0, eval)(code)", code)


@contextmanager
def opened(engine: Callable) -> Iterator[Evaluate]:
    """The page's scripts in an engine: expressions go in, and their values come out of JSON."""
    sys.path.append(str(BOOK / "_ext"))
    import pplab_blocks
    import pplab_levels
    import pplab_schedules

    with engine() as run:
        run(f"{pplab_schedules.script()}\n{pplab_levels.script()}\n{pplab_blocks.script()}\n;0")
        for path in SCRIPTS:
            run(f"{path.read_text()}\n;0")
        yield lambda expression: json.loads(run(f"JSON.stringify({expression})"))


@pytest.fixture(scope="module")  # Playwright, when it runs this, can be started only once at a time
def evaluate() -> Iterator[Evaluate]:
    with opened(quickjs_engine if HAS_QUICKJS else chromium_engine) as evaluate:
        yield evaluate
