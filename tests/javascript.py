"""Run the page's JavaScript from Python, in quickjs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pplab.lab.forms.explorer import STATIC
from pplab_course import frames, levels

BOOK = Path(__file__).parents[1] / "book"
NAMES = ("core.js", "rows.js", "settings.js")
PLAY = tuple(frames.OWN / "play" / name for name in ("play.js", "stamp.js"))
SCRIPTS = (*(STATIC / name for name in NAMES), *PLAY, Path(__file__).with_name("explorer_report.js"))

Evaluate = Callable[[str], object]  # a JavaScript expression -> its value, as JSON carries it


def loaded(run: Callable[[str], object]) -> Evaluate:
    """The page's scripts, in the engine that runs a program: expressions go in, and their values come out of JSON."""
    sys.path.append(str(BOOK / "_ext"))
    import pplab_blocks
    import pplab_schedules

    run(f"{pplab_schedules.script()}\n{levels.script()}\n{pplab_blocks.script()}\n;0")
    for path in SCRIPTS:
        run(f"{path.read_text()}\n;0")
    return lambda expression: json.loads(run(f"JSON.stringify({expression})"))


@pytest.fixture(scope="module")
def evaluate() -> Evaluate:
    quickjs = pytest.importorskip("quickjs", reason="no JavaScript engine: pip install quickjs-ng")
    return loaded(quickjs.Context().eval)
