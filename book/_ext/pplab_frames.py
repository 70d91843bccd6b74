"""The page's explorer and game in a notebook. Each is a frame, with everything that it needs packed into its output.

In a trusted notebook the frame runs without a network. Elsewhere (on a code host, in a fresh clone) a viewer drops it,
and a replacement is left: the explorer's picture, which is an output of its own above the frame, or the question of a
level of the game. `pplab_course.notebook` has `explore` and `play` for cells. The page's own picture of an explorer,
for print, is `picture` here.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pplab_levels
from IPython.display import display

import pplab as pp
from pplab.lab.forms import SCRIPTS, STATIC, frame_of, page_of, read_static
from pplab_course import pictures
from pplab_course.notebook import explored

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAME = ("explorer/core.js", "play/play.js", "explorer/chart.js", "play/game.js", "play/play_view.js")
BOOK = Path(__file__).parents[1] / "_static"  # where those of play/ are


def explore(schedule: str, compare: str, controls: str, **settings: object) -> None:
    """Show the picture of an explorer, and the explorer, which replaces the picture."""
    from matplotlib import pyplot as plt

    shown = picture(schedule=schedule, compare=compare, **settings)
    said = {name.replace("_", "-"): text_of(value) for name, value in settings.items()}
    state = urlencode({"schedule": schedule, "compare": compare} | said)
    view = f'<div class="pplab-explorer" data-state="{html.escape(state)}" data-controls="{controls}"></div>'
    display(shown)
    plt.close(shown)  # or the notebook shows it once more
    show_frame(page_of(template("explorer") + view, *map(read_static, SCRIPTS)), "explorer", "Above is its picture.")


def picture(
    *,
    memory: bool = True,
    tickets: bool = False,
    time: float = 0,
    until: float = 0,
    path: bool = False,
    **settings: object,
) -> Figure:
    """What an explorer with these settings shows at first. A picture has nothing about held forwards (`memory`)."""
    shown = explored(**settings)
    if tickets:
        return pictures.tickets(shown[0], at=time, latency=settings.get("latency", 0)).figure
    if len(shown) > 1:
        return pp.compare(shown, path=path)[0].figure
    return pp.gantt(shown[0], until=max(until, shown[0].makespan), path=path).figure


def play(name: str) -> None:
    """Show a level of the game. Raises ValueError for an unknown one."""
    asked = [f"{level.title}. {level.task()}" for level in pplab_levels.LEVELS if level.id == name]
    if not asked:
        known = ", ".join(level.id for level in pplab_levels.LEVELS)
        raise ValueError(f"no level is named {name!r}: choose from {known}")
    places = (BOOK if file.startswith("play/") else STATIC.parent for file in GAME)
    scripts = [(place / file).read_text("utf-8") for place, file in zip(places, GAME, strict=True)]
    view = f'{template("play")}<div class="pplab-play" data-level="{name}"></div>'
    show_frame(page_of(view, pplab_levels.script(), *scripts), "game", asked[0])


def template(kind: str) -> str:
    """The markup of a view of that kind, which its script fills. `@` begins its ids."""
    place = STATIC if kind == "explorer" else BOOK / "play"
    return f'<template id="pplab-{kind}-live">{(place / f"{kind}.html").read_text("utf-8")}</template>'


def show_frame(page: str, what: str, instead: str) -> None:
    display({"text/html": frame_of(page, what, html.escape(instead))}, raw=True)


def text_of(value: object) -> str:
    """A setting as an address writes it: 3,4,2 for a tuple."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
