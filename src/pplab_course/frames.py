"""The page's explorer and game in a notebook: each a frame, with all that it needs packed in its
output.

Where a notebook is trusted, the frame runs, without a network. Elsewhere (on a code host, in a
fresh clone) a viewer drops it, and what stands there instead is left: the explorer's picture, an
output of its own above the frame, and of a level of the game its question. The book's page takes
from here the timelines of an explorer, its picture for print, and the views' templates.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pplab as pp
from pplab import builders, lab
from pplab.builders import Builder
from pplab.costs import DURATIONS, Costs, PerStage
from pplab.lab.forms import SCRIPTS, STATIC, frame_of, page_of, read_static
from pplab.timeline import Timeline

from . import levels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAME = (
    "explorer/core.js",
    "play/play.js",
    "explorer/chart.js",
    "play/game.js",
    "play/play_view.js",
)
OWN = Path(__file__).parent / "static"  # where those of play/ are


@dataclass(frozen=True)
class Settings:
    """What an explorer's timelines are made of, as `explored` says."""

    rows: str = ""
    ranks: int = 4
    microbatches: int = 8
    stages_per_rank: int = 2
    slices: int = 2
    attention: float = 0
    forward: PerStage = 1
    backward_input: PerStage = 1
    backward_weight: PerStage = 1
    overhead: PerStage = 0
    latency: float = 0
    overlap: str = "sum"
    pair: float = 0
    more_in_flight: int = 0
    per: str = "rank"

    def timeline(self, name: str) -> Timeline:
        """The schedule of this name, simulated."""
        run, pieces = pp.simulate, self.microbatches
        if name == "own":
            built = lab.read_csv(csv_of(self.rows))
        else:
            builder = builders.find(name)
            if "slices" in builder.options:
                run = lab.Slices.even(self.slices, self.attention).simulate
                pieces = self.microbatches * self.slices
            built = builder(self.ranks, pieces, **self._options(builder))
        return run(built, self.costs(built.num_stages / built.num_ranks))

    def costs(self, stages: float) -> Costs:
        """The costs of one stage, where a rank has so many."""
        whole = Costs(
            self.forward,
            self.backward_input,
            self.backward_weight,
            self.latency,
            overhead=self.overhead,
            overlap=self.pair or self.overlap,
        )
        costs = whole.finer(self.microbatches if self.per == "batch" else 1)
        if self.per == "stage":
            return costs
        given = {name: getattr(costs, name) for name in DURATIONS}
        of_stages = {name: value for name, value in given.items() if isinstance(value, tuple)}
        return replace(costs.finer(stages), **of_stages)  # which aren't divided

    def _options(self, builder: Builder) -> dict[str, object]:
        """Those that this builder has."""
        options = {
            "stages_per_rank": self.stages_per_rank,
            "slices": self.slices,
            "costs": self.costs(2 if builder.placement == "V" else 1),
            "in_flight": [self.ranks - rank + self.more_in_flight for rank in range(self.ranks)],
        }
        return {name: value for name, value in options.items() if name in builder.options}


def explored(
    schedule: str = "1F1B", compare: str = "", **settings: PerStage | str
) -> list[Timeline]:
    """The timelines of the schedules named, simulated. `settings` are the fields of `Settings`.

    The durations are for a microbatch on a rank's whole share, on a "stage", or for the whole
    "batch" on a rank, as `per` says; one value per stage is for the stages, whatever their ranks.
    Every action takes `overhead` besides. A forward and a backward at once take `pair`, or what
    `overlap` says. A schedule of slices cuts each microbatch into so many of equal length; causal
    `attention` is that share of a forward. The schedule "own" has these `rows`: 0F0.0B0~1F0.1B0.
    1F1B's rank s has `more_in_flight` than P-s microbatches. ValueError says what can't be.
    """
    asked = Settings(**settings)
    return [asked.timeline(name) for name in (schedule, compare) if name]


def csv_of(rows: str) -> str:
    """An address's rows as a CSV file has them: (0F1-0B0) is an overlap, a dot ends an action, and
    ~ a rank.
    """
    named = re.sub(r"\((\d+(.)\d+)-(\d+(.)\d+)\)", r"(\1;\3)OVERLAP_\2_\4", rows)
    return named.replace(".", ",").replace("~", "\n")


def explore(
    schedule: str = "1F1B", compare: str = "", controls: str = "", **settings: PerStage | str
) -> None:
    """Show the explorer that the book's page has, with one schedule or two to compare, to play
    with.

    `settings` are those of `explored`, and `until`, `path`, `tickets`, `time` and `memory`, as the
    page has them; `controls`: those that aren't folded away. In a notebook that isn't trusted, and
    on paper, this is a picture.
    """
    from IPython.display import display
    from matplotlib import pyplot as plt

    shown = picture(schedule=schedule, compare=compare, **settings)
    said = {name.replace("_", "-"): text_of(value) for name, value in settings.items()}
    state = urlencode({"schedule": schedule, "compare": compare} | said)
    view = (
        f'<div class="pplab-explorer" data-state="{html.escape(state)}" '
        f'data-controls="{controls}"></div>'
    )
    display(shown)
    plt.close(shown)  # or the notebook shows it once more
    page = page_of(template("explorer") + view, *map(read_static, SCRIPTS))
    show_frame(page, "explorer", "Above is its picture.")


def picture(
    *,
    memory: bool = True,
    tickets: bool = False,
    time: float = 0,
    until: float = 0,
    path: bool = False,
    **settings: object,
) -> Figure:
    """What an explorer with these settings shows at first; of held forwards (`memory`) a picture
    has nothing.
    """
    from . import pictures

    shown = explored(**settings)
    if tickets:
        return pictures.tickets(shown[0], at=time, latency=settings.get("latency", 0)).figure
    if len(shown) > 1:
        return pp.compare(shown, path=path)[0].figure
    return pp.gantt(shown[0], until=max(until, shown[0].makespan), path=path).figure


def play(level: str) -> None:
    """Show a level of the book's game. Where a notebook isn't trusted, this is the level's
    question. ValueError for a level that there isn't.
    """
    asked = [f"{each.title}. {each.on_paper()}" for each in levels.LEVELS if each.id == level]
    if not asked:
        known = ", ".join(each.id for each in levels.LEVELS)
        raise ValueError(f"no level is named {level!r}: choose from {known}")
    places = (OWN if file.startswith("play/") else STATIC.parent for file in GAME)
    scripts = [(place / file).read_text("utf-8") for place, file in zip(places, GAME, strict=True)]
    view = f'{template("play")}<div class="pplab-play" data-level="{level}"></div>'
    show_frame(page_of(view, levels.script(), *scripts), "game", asked[0])


def template(kind: str) -> str:
    """What a view of that kind is made of, which its script fills; `@` begins its ids."""
    place = STATIC if kind == "explorer" else OWN / "play"
    view = (place / f"{kind}.html").read_text("utf-8")
    return f'<template id="pplab-{kind}-live">{view}</template>'


def show_frame(page: str, what: str, instead: str) -> None:
    """Show a page in a frame, with what is there `instead` where a viewer drops it."""
    from IPython.display import display

    display({"text/html": frame_of(page, what, html.escape(instead))}, raw=True)


def text_of(value: object) -> str:
    """A setting as an address has it: 3,4,2 for a tuple."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
