"""The first page: the directive `race`, and the course in figures.

    ```{race} 16
    :until: 1F1B

    naive
    1F1B
    ZB-V, cut 4+5+5+3+5+4+4+2
    ```

runs a step of sixteen sequences of the running case under each of these schedules, side by side, and ends when `until`
does. A schedule that fills a GPU stops there. The page shows the end, with everything that was drawn on the way, for
print and for readers without scripts. `_static/race.js` plays it, on the explorers' clock.

Write `{{ course_in_figures }}` on a page for the numbers of chapters, schedules and exercises.
"""

from __future__ import annotations

import json
from collections import defaultdict
from html import escape
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from pplab_live import ASKS
from sphinx.util.docutils import SphinxDirective

from pplab import actions, deps, lab, palette, plot
from pplab.builders import known

ROOT = Path(__file__).parents[2]
ROW, BAR = 18, 14  # pixels: from one rank to the next, and of a bar
APART = 8  # milliseconds between two bars
SLOWER = 5  # times as long as a message takes is its dot on the way: nobody would see it otherwise
DOWN, UP = palette.FILL[actions.F], palette.FILL[actions.B]  # a dot has the colour of what made it

PAGE = """<div class="pplab-race" role="group" aria-label="The race: {names}" data-race="{data}">
<svg width="0" height="0" aria-hidden="true">
<pattern id="pplab-race-idle" width="8" height="8" patternUnits="userSpaceOnUse">
<path d="M0 0H8V8H0z" fill="currentColor" fill-opacity="{ground}"/>
<path d="M-1 -1L9 9M-1 7L1 9M7 -1L9 1"
stroke="currentColor" stroke-width="1.3" stroke-opacity="{lines}"/></pattern></svg>
<div class="pplab-clock" role="group" aria-label="Playhead"></div>
{lanes}<p class="pplab-end">{end}</p>
<p class="pplab-legend">{legend}</p>
<noscript><p>With scripts, a browser plays this.</p></noscript></div>"""
LANE = """<section class="pplab-lane" style="--at:100%"><p><b>{name}</b> <span>{says}</span></p>
<div role="img" aria-label="{told}"><div class="pplab-held">{memory}</div><div class="pplab-track">
<svg class="pplab-run" aria-hidden="true">{idle}
<svg aria-hidden="true" viewBox="0 0 {width} {height}" preserveAspectRatio="none">{bars}</svg></svg>
<svg class="pplab-dots" aria-hidden="true"></svg></div></div></section>
"""
IDLE = '<svg class="pplab-box" aria-hidden="true"><rect width="100%" height="100%" fill="url(#pplab-race-idle)"/></svg>'


class race(nodes.raw):
    """The race, as HTML."""


class RaceDirective(SphinxDirective):
    """The race of the schedules in its lines, each with a step of so many microbatches."""

    required_arguments, has_content = 1, True
    option_spec = {"until": directives.unchanged_required}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        """Simulate and draw. A schedule that can't be built is a build error."""
        try:
            return [
                race(
                    "",
                    race_html(self.content, directives.positive_int(self.arguments[0]), self.options.get("until", "")),
                    format="html",
                )
            ]
        except ValueError as error:
            raise self.error(f"race: {error}") from error


def race_html(lines: list[str], num_microbatches: int, until: str) -> str:
    """The race of the schedules in `lines`, which ends when the one named `until` does."""
    case, rows = lab.Case(), {}
    for line in filter(None, lines):
        name, _, cut = line.partition(", cut ")
        rows[name] = case.row(name, num_microbatches, cut=[int(layers) for layers in cut.split("+")] if cut else None)
    if until not in rows:
        raise ValueError(f"until must be one of {', '.join(rows) or 'its schedules'}, got {until!r}")
    end = rows[until].step_s
    lanes = [Lane(name, row, end) for name, row in rows.items()]
    perfect = case.row("a perfect pipeline", num_microbatches).cells[-1].split()[0]
    data = {
        "end": end,
        "of": num_microbatches,
        "row": ROW,
        "colours": [UP, DOWN],
        "lanes": [lane.data() for lane in lanes],
    }
    ground, over = plot.IDLE_OPACITY
    return PAGE.format(
        names=escape(", ".join(rows)),
        data=escape(json.dumps(data, separators=(",", ":"))),
        ground=ground,
        lines=over,
        lanes="".join(lane.html() for lane in lanes),
        end=f"The price is for a billion tokens. A pipeline that never waits would cost {perfect}.",
        legend=legend(case),
    )


def legend(case: lab.Case) -> str:
    """The meaning of colours, dots and bars."""

    def box(fill: str, shape: str = "box") -> str:
        return f'<i class="pplab-{shape}" style="background:{fill}"></i>'

    says = [f"{box(fill)}{palette.NAME[kind]}" for kind, fill in palette.FILL.items()]
    says.append(f"{IDLE}paid for, and idle")
    says.append(
        f"{box(DOWN, 'dot')}activations and {box(UP, 'dot')}gradients on the way, {SLOWER} times slower than in reality"
    )
    says.append(f"left: each GPU’s memory, with a line at {case.room_gb:g} GB and a mark at the most so far")
    return "".join(f"<span>{each}</span>" for each in says)


class Lane:
    """A schedule in the race: its row of the case's ledger, and when its first GPU gets too full, if one does."""

    def __init__(self, name: str, row: lab.Entry, until: float):
        self.name, self.row, self.until = name, row, until
        self.room = row.case.room_gb
        self.held = [list(zip(*curve, strict=True)) for curve in lab.held_over_time(row.timeline, row.memory)]
        full = [(time, rank) for rank, curve in enumerate(self.held) for time, held in curve if held > self.room]
        self.ends, self.full_rank = min(full, default=(row.step_s, None))
        self.shown = min(self.ends, until)  # the time up to which it is drawn
        self.spans = [span for span in row.timeline.spans if span.start < self.shown]

    def data(self) -> dict:
        """What the script needs to play it: times in seconds, and what is held as a share of the room."""
        return {
            "end": round(self.ends, 4),
            "held": [
                [[round(time, 4), round(held / self.room, 3)] for time, held in curve if time <= self.shown]
                for curve in self.held
            ],
            "done": [round(time, 4) for time in self.done()],
            "sent": self.sent(),
        }

    def done(self) -> list[float]:
        """When each microbatch had gone all the way, which is at the end of its last action."""
        last: dict[int, float] = defaultdict(float)
        for span in self.row.timeline.spans:
            for action in actions.parts(span.action):
                last[action.microbatch] = max(span.end, last[action.microbatch])
        return sorted(time for time in last.values() if time <= self.shown)

    def sent(self) -> list[list[float]]:
        """For every message, when it leaves, when its dot arrives, the ranks that it leaves and reaches, and 1 for
        activations or 0."""
        schedule, found = self.row.timeline.schedule, []
        takes = self.row.case.message_ms / 1e3 * SLOWER
        for rank, item, _, end in self.spans:
            for action in actions.parts(item):
                message = deps.outgoing(action, schedule.num_stages)
                to = message and schedule.placement[message.receive.stage]
                if message and to != rank:
                    found.append([round(end, 4), round(end + takes, 4), rank, to, int(action.kind is actions.F)])
        return sorted(found)

    def says(self) -> str:
        """How it ends, in the ledger's own figures."""
        _, count, step, busy, _, _, bill = self.row.cells
        if self.full_rank is not None:
            return f"✕ GPU {self.full_rank} is full after {self.ends:.2f} s"
        price = bill.split(" in ")[0]
        if self.ends > self.until:
            return f"{len(self.done())} of {count} done; all take {step}: {price}"
        return f"✓ {step}, {busy} busy: {price}"

    def html(self) -> str:
        """Its lines in the page."""
        memory = ""
        for rank, curve in enumerate(self.held):
            held = [held / self.room for time, held in curve if time <= self.shown]
            over = " pplab-over" if held[-1] > 1 else ""
            style = f"--now:{held[-1]:.3f};--most:{max(held):.3f}"
            memory += f'<span class="pplab-gb{over}" style="{style}">GPU {rank}<i></i></span>'
        share = f"{100 * self.shown / self.until:.2f}%"
        ranks = range(len(self.held))
        idle = "".join(
            f'<rect y="{ROW * r}" width="{share}" height="{BAR}" fill="url(#pplab-race-idle)"/>' for r in ranks
        )
        cut = "+".join(map(str, self.row.cut or ()))
        return LANE.format(
            name=escape(self.name) + (f"<small>, cut {cut}</small>" if cut else ""),
            says=escape(self.says()),
            told=escape(f"{self.name}, {len(ranks)} GPUs over {self.until:.2f} seconds: {self.says().lstrip('✓✕ ')}"),
            memory=memory,
            idle=idle,
            width=round(1000 * self.until),
            height=ROW * len(ranks),
            bars=self.bars(),
        )

    def bars(self) -> str:
        """A path for each colour, in milliseconds and pixels; the actions of an overlap lie one above the other."""
        paths = defaultdict(str)
        for span in self.spans:
            left, right = round(1000 * span.start), round(1000 * min(span.end, self.shown))
            fills = plot.fill_of(self.row.timeline, span)
            width, height = max(right - left - APART, 1), BAR // len(fills)
            for i, fill in enumerate(fills):
                paths[fill] += f"M{left} {ROW * span.rank + i * height}h{width}v{height}h-{width}z"
        return "".join(f'<path fill="{fill}" d="{drawn}"/>' for fill, drawn in paths.items())


def course_in_figures(notebooks: Path) -> str:
    """The size of the course, counted in the chapters."""
    exercises = 0
    chapters = sorted(notebooks.glob("*.ipynb"))
    for chapter in chapters:
        cells = json.loads(chapter.read_text())["cells"]
        codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        exercises += sum(bool(ASKS.search(code)) for code in codes)
    return (
        f"{len(chapters)} chapters of about half an hour · {len(known())} schedules · "
        f"{exercises} exercises that say whether you are right"
    )


def substitute(app, config) -> None:
    """Put the figures into the first page."""
    config.myst_substitutions = {
        **config.myst_substitutions,
        "course_in_figures": course_in_figures(ROOT / "notebooks"),
    }


def load_script(app, pagename, templatename, context, doctree) -> None:
    """Give the page with the race its script."""
    if doctree and next(doctree.findall(race), None):
        for script in ("explorer/clock.js", "race.js"):
            app.add_js_file(script, loading_method="defer")


def setup(app) -> dict:
    app.connect("config-inited", substitute)
    app.connect("html-page-context", load_script)
    app.add_directive("race", RaceDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
