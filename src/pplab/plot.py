"""Gantt charts with matplotlib, and helpers for pplab's other drawings.

Every drawing returns the Axes (or a list of them) and leaves matplotlib's settings alone. Without
`ax` it makes a figure that fits. The colour is the kind of action, the number is the microbatch,
and a lighter shade is a later stage of the rank.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from . import palette
from .actions import parts
from .errors import expect
from .optional import bring
from .timeline import Idle, Span, Timeline, critical_path, idle_intervals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW = 0.36  # inches per rank
WIDTH = 7.4  # inches
BAR = 0.84  # of a row
_HATCH = {
    "fill": ("\\\\", "idle: filling"),
    "inner": ("---", "idle: inside"),
    "drain": ("//", "idle: draining"),
}
IDLE_OPACITY = (0.2, 0.75)  # of idle time's ground and hatching: an empty place, but nothing pale
LABEL_SIZE = 8


def gantt(
    timeline: Timeline, ax: Axes | None = None, *, until: float | None = None, path: bool = False
) -> Axes:
    """Draw when each rank does what. Idle time is hatched, with falling lines while the pipeline
    fills, level lines inside, and rising lines while it drains.

    `until` sets the end of the time axis (by default the end of the last rank). `path=True`
    outlines one critical path. Labels that don't fit are left out.
    """
    until = until or end_of(timeline)
    ax = ax or new_axes(timeline.schedule.num_ranks)
    chart(ax, timeline, until, path)
    legend(ax, [timeline])
    return ax


def end_of(timeline: Timeline) -> float:
    """The end of the last rank. Raises ValueError for something that has no times to draw, such as
    a schedule.
    """
    expect(Timeline, timeline=timeline)
    return max([timeline.makespan, *(span.end for span in timeline.others)])


class AxesColumn(list):
    """Axes of one figure, top to bottom."""


def compare(timelines: Collection[Timeline], *, path: bool = False) -> AxesColumn:
    """Draw several timelines below each other on one time axis."""
    expect(Collection, timelines=timelines)
    until = max(map(end_of, timelines))
    heights = [t.schedule.num_ranks * ROW + 0.5 for t in timelines]
    _, axes = bring("matplotlib.pyplot").subplots(
        nrows=len(timelines),
        squeeze=False,
        figsize=(WIDTH, sum(heights) + 0.4),
        height_ratios=heights,
        layout="constrained",
    )
    column = AxesColumn(axes[:, 0])
    for timeline, ax in zip(timelines, column, strict=True):
        chart(ax, timeline, until, path)
        ax.label_outer()
    legend(column[-1], timelines)
    return column


def picture(timeline: Timeline) -> bytes:
    """A Gantt chart as a PNG file."""
    file, figure = io.BytesIO(), gantt(timeline).figure
    bring("matplotlib.pyplot").close(figure)  # or a notebook shows it once more
    figure.savefig(file, format="png", bbox_inches="tight")
    return file.getvalue()


def chart(ax: Axes, timeline: Timeline, until: float, path: bool) -> None:
    """A Gantt chart without its legend."""
    title = (
        f"{timeline.schedule.name}, {timeline.how}: makespan {timeline.makespan:.4g}"
        f"{timeline.unit and ' '}{timeline.unit}, bubble fraction {timeline.bubble_fraction:.4f}"
    )
    dress(ax, rank_names(timeline), title, timeline.unit, until)
    ax.set_ylim(timeline.schedule.num_ranks - 0.5, -0.5)
    _draw_idle(ax, timeline)
    _draw_spans(ax, timeline, until)
    for span in critical_path(timeline) if path else ():
        _bars(ax, span.rank, [span], facecolor="none", edgecolor="black", lw=1.8, zorder=3)
    ax.set_label(describe(timeline))


def dress(ax: Axes, rows: Sequence[str], title: str, unit: str, until: float) -> None:
    """Axes with a named strip per row, and time from 0 to `until`."""
    ax.set_title(title, fontsize=10, loc="left", parse_math=False)
    ax.set_xlim(0, until)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xlabel(f"time ({unit})" if unit else "time", parse_math=False)
    ax.tick_params(length=0, axis="y")
    ax.spines[["top", "right", "left"]].set_visible(False)


def rank_names(timeline: Timeline) -> list[str]:
    return [f"rank {rank}" for rank in range(timeline.schedule.num_ranks)]


def describe(timeline: Timeline) -> str:
    """A Gantt chart in one sentence, for readers who don't see it."""
    schedule, unit = timeline.schedule, timeline.unit and " " + timeline.unit
    return (
        f"{timeline.how.capitalize()} Gantt chart of {schedule.name} on {schedule.num_ranks} ranks "
        f"with {schedule.num_microbatches} microbatches: makespan {timeline.makespan:.4g}{unit}, "
        f"{timeline.bubble_fraction:.1%} of all rank-time idle"
    )


def new_axes(num_rows: int) -> Axes:
    return bring("matplotlib.pyplot").subplots(
        figsize=(WIDTH, num_rows * ROW + 0.9), layout="constrained"
    )[1]


def fill_of(timeline: Timeline, span: Span) -> list[str]:
    stages = timeline.schedule.stages_of(span.rank)
    return [
        shade(palette.FILL[a.kind], stages.index(a.stage), len(stages)) for a in parts(span.action)
    ]


def _draw_spans(ax: Axes, timeline: Timeline, until: float) -> None:
    """Draw the bars, one collection per colour. Of an overlap, the first action is in the upper
    half and the second in the lower.
    """
    pixels = ax.get_window_extent().width * 72 / ax.figure.dpi / until  # points per unit of time
    bars: dict[tuple, list] = defaultdict(list)
    for span in timeline.spans:
        halves, fills, length = parts(span.action), fill_of(timeline, span), span.end - span.start
        drawn, height = length - min(0.8 / pixels, length / 4), BAR / len(halves)
        for k, (action, fill) in enumerate(zip(halves, fills, strict=True)):
            bottom = span.rank - BAR / 2 + k * height
            bars[fill, bottom, height].append((span.start, drawn))
            label = str(action.microbatch)
            if drawn * pixels > len(label) * LABEL_SIZE * 0.62 and height * ROW * 72 > LABEL_SIZE:
                ax.text(
                    span.start + drawn / 2,
                    bottom + height / 2,
                    label,
                    color=ink(fill),
                    ha="center",
                    va="center_baseline",
                    fontsize=LABEL_SIZE,
                    clip_on=True,
                )
    for (fill, bottom, height), places in bars.items():
        ax.broken_barh(places, (bottom, height), facecolor=fill, lw=0)
    for span in timeline.others:
        if isinstance(span.action, str):
            _bars(ax, span.rank, [span], facecolor=palette.OTHER, lw=0)


def _draw_idle(ax: Axes, timeline: Timeline) -> None:
    places: dict[tuple, list] = defaultdict(list)
    for idle in idle_intervals(timeline):
        places[idle.phase, idle.rank].append(idle)
    for (phase, rank), spans in places.items():
        for style in idle_styles(phase):
            _bars(ax, rank, spans, **style)


def idle_styles(phase: str) -> list[dict]:
    """The styles of an idle stretch: a ground, then the lines on it. They are separate because SVG
    has one opacity for both. Black becomes the colour of the page's text.
    """
    ground, lines = (("black", opacity) for opacity in IDLE_OPACITY)
    plain = {"fc": ground, "lw": 0}
    return [plain, plain | {"fc": "none", "ec": lines, "hatch": _HATCH[phase][0]}]


def _bars(ax: Axes, rank: int, spans: Sequence[Span | Idle], **style: object) -> None:
    places = [(span.start, span.end - span.start) for span in spans]
    ax.broken_barh(places, (rank - BAR / 2, BAR), **style)


def legend(ax: Axes, timelines: Collection[Timeline]) -> None:
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    found = {kind for timeline in timelines for kind in timeline.schedule.columns.kinds}
    handles = {palette.NAME[k]: Patch(fc=fill) for k, fill in palette.FILL.items() if k in found}
    spans = (span for timeline in timelines for span in timeline.others)
    if labels := dict.fromkeys(span.action for span in spans if isinstance(span.action, str)):
        handles[", ".join(labels)] = Patch(facecolor=palette.OTHER)
    phases = {idle.phase for timeline in timelines for idle in idle_intervals(timeline)}
    handles |= {
        name: tuple(Patch(**s) for s in idle_styles(p))
        for p, (_, name) in _HATCH.items()
        if p in phases
    }
    # Under the axis' label, whatever the height:
    below = ax.transAxes + ScaledTranslation(0, -34 / 72, ax.figure.dpi_scale_trans)
    ax.legend(
        handles.values(),
        handles,
        ncols=min(len(handles), 5),
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=below,
        frameon=False,
        fontsize=LABEL_SIZE,
        borderaxespad=0,
        handlelength=1.2,
        columnspacing=1.2,
    )


def shade(colour: str, step: int, steps: int) -> str:
    """Mix `colour` with white for stage number `step` of the `steps` stages on a rank. The first
    keeps the full colour.
    """
    share = 0.33 * step / max(steps - 1, 1)
    channels = (round(c + (255 - c) * share) for c in bytes.fromhex(colour[1:]))
    return "#" + bytes(channels).hex()


def ink(fill: str) -> str:
    """Black or white, whichever has the higher contrast on `fill` (WCAG relative luminance)."""
    channels = (c / 255 for c in bytes.fromhex(fill[1:]))
    linear = [(c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4) for c in channels]
    luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#ffffff" if luminance < 0.179 else "#111111"
