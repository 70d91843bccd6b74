"""Show schedules and timelines in the page's explorer, either in one HTML file that needs no other,
or at an address.
"""

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import product
from pathlib import Path
from zlib import compress

from ...actions import COMPUTE
from ...builders import known
from ...costs import Costs
from ...errors import expect, shown
from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import Timeline

STATIC = Path(__file__).parents[2] / "static" / "explorer"  # the book's page loads the same files
SCRIPTS = ("core.js", "rows.js", "chart.js", "clock.js", "tickets.js", "settings.js", "explorer.js")
# what the page knows of a builder
TOLD = ("name", "aliases", "rules", "source", "options", "placement")
LONGEST = 8000  # characters of an address that are passed on everywhere


@dataclass(frozen=True)
class Exploration:
    """An explorer with something in it, which a notebook shows. `page` is its HTML, and `path` is
    its file, if it has one.
    """

    path: str | Path | None
    fragment: str = field(repr=False)  # what an address says to show the same; "" where none can
    _things: Sequence[Schedule | Timeline] = field(repr=False)
    _costs: Costs = field(repr=False)
    _state: str = field(repr=False)

    @property
    def page(self) -> str:
        given = in_script([record(each, self._costs.unit) for each in self._things])
        view = (
            f'<template id="pplab-explorer-live">{read_static("explorer.html")}</template>'
            '<div class="pplab-explorer" id="explorer" data-page data-state="'
            f'{escape(self._state)}">'
            f'<script type="application/json" class="pplab-given">{given}</script></div>'
        )
        return page_of(view, *map(read_static, SCRIPTS))

    def link(self, explorer: str) -> str:
        """The address that shows this in the book's explorer, which is at `explorer`. Raises
        ValueError if no address can.
        """
        if 0 < len(self.fragment) <= LONGEST:
            return f"{explorer}#{self.fragment}"
        long = f"it takes {len(self.fragment)} characters, and {LONGEST} are passed on everywhere"
        why = (
            long
            if self.fragment
            else "one holds a single schedule, and costs that the page has fields for"
        )
        raise ValueError(
            f'no address shows this: {why}; send the file that lab.explore(..., "explorer.html") '
            "writes"
        )

    def _repr_html_(self) -> str:
        return frame_of(self.page)


def read_static(name: str, **parts: str) -> str:
    """A file of the explorer with these parts at their places, all put in at once, because a name
    may look like a place.
    """
    return re.sub(
        r"/\*(\w+)\*/",
        lambda place: parts.get(place[1], place[0]),
        (STATIC / name).read_text("utf-8"),
    )


def page_of(view: str, *scripts: str) -> str:
    """A page that needs no other file: one of the book's views, by its root element, and its
    scripts in their order.
    """
    told = in_script([{name: getattr(builder, name) for name in TOLD} for builder in known()])
    scripts = "\n".join([f"var pplabSchedules = {told};", *scripts])
    return read_static("page.html", style=read_static("explorer.css"), view=view, scripts=scripts)


def frame_of(page: str, what: str = "explorer", instead: str = "") -> str:
    """A frame for a notebook with a packed page. Readers who can't see it find a sentence there,
    which `instead` follows.
    """
    packed = b64encode(compress(page.encode(), 9)).decode()
    return read_static("frame.html", packed=packed, what=what, instead=instead)


def explore(
    thing: object, path: str | Path | None = None, *, costs: Costs | None = None
) -> Exploration:
    """Open a schedule, a timeline, a run (its median step), or a list of these on one time axis, in
    the explorer.

    Schedules take `costs` (all ones when left out), which you can change there, and timelines stay
    as they are. With a `path`, the page becomes that file. The result shows itself in a notebook,
    and its `link(explorer)` is an address for the book's page. Raises ValueError for what can't be
    shown, and OSError for a path that can't be written.
    """
    costs = Costs() if costs is None else costs
    expect(Costs, costs=costs)
    things = [
        getattr(each, "timeline", each)
        for each in (thing if isinstance(thing, list | tuple) else [thing])
    ]
    if not things or {*map(type, things)} - {Schedule, Timeline}:
        raise ValueError(
            f"explore takes a Schedule, a Timeline, a Run or a list of them, got {shown(thing)}"
        )
    schedules = [each for each in things if isinstance(each, Schedule)]
    for schedule in schedules:
        costs.check(schedule.num_stages, schedule.num_ranks, schedule.num_microbatches)
    fields = _fields(costs, max((schedule.num_stages for schedule in schedules), default=0))
    things = [
        each if fields or isinstance(each, Timeline) else simulate(each, costs) for each in things
    ]
    # in characters without escapes, for rows.js:
    rows = schedules[0].rows if schedules == [thing] and fields else ()
    rows = "~".join(".".join(str(x).partition("OVERLAP")[0] for x in row) for row in rows).replace(
        ";", "-"
    )
    state = f"schedule=own{fields}"
    made = Exploration(path, rows and f"{state}&rows={rows}", things, costs, state)
    if path is not None:
        Path(path).write_text(made.page, "utf-8")
    return made


def in_script(value: object) -> str:
    """JSON that may stand in a `<script>` of a page, whatever its texts are. It has no `<`, which
    alone could end the element or begin a comment in it. Half a character becomes a question mark.
    """
    text = (
        json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        .encode("utf-8", "replace")
        .decode("utf-8")
    )
    return text.replace("<", r"\u003c")


def record(thing: Schedule | Timeline, unit: str = "") -> dict:
    """A schedule, or a timeline with its spans, in the form that the explorer and
    `lab.timeline_from_dict` read.
    """
    schedule = getattr(thing, "schedule", thing)
    plain = {
        "schedule": schedule.name,
        "rows": [list(map(str, row)) for row in schedule.rows],
        "unit": unit,
    }
    if thing is schedule:
        return plain
    spans, others = (
        [[s.rank, str(s.action), s.start, s.end] for s in each]
        for each in (thing.spans, thing.others)
    )
    return plain | {"unit": thing.unit, "how": thing.how, "spans": spans, "others": others}


def _fields(costs: Costs, num_stages: int) -> str:
    """The contents of the page's fields for these costs, or "" if they can't show them."""
    if costs.by_microbatch:
        return ""
    names = ("forward", "backward_input", "backward_weight", "overhead", "latency")
    times = {name: getattr(costs, name) for name in names}
    # what the fields mean, with what has no field: of all but durations it must be the same
    told = Costs(**times, overlap=costs.overlap, message=costs.message, unit=costs.unit)
    if replace(costs, backward=None, recompute=0) != told or isinstance(costs.overlap, Mapping):
        return ""
    for kind, stage in product(COMPUTE, range(num_stages)):
        if told.of(kind, stage) != costs.of(kind, stage):
            return ""
    times["overlap" if isinstance(costs.overlap, str) else "pair"] = costs.overlap
    said = "".join(f"&{name}={str(x).strip('(),').replace(' ', '')}" for name, x in times.items())
    return "&per=stage" + said.replace("_", "-")
