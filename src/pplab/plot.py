"""Drawings with matplotlib: Gantt charts, what is held over time, comparisons on one time axis.

Every function returns the Axes (or a list of them) and leaves matplotlib's settings alone; without `ax` it makes a
figure of a fitting size. Colour is the kind of action, the number is the microbatch, a lighter shade is a later stage
of the rank. Text is black in the figure; `figure_html` writes it in the page's own colour, to read on light and dark.
"""

from __future__ import annotations

import html
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from . import palette
from .actions import Kind, parts
from .costs import Memory
from .metrics import critical_path, held, idle_intervals
from .timeline import Span, Timeline, total
from .where import IDLE_PARTS, Where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .layout import Plan

_ROW = 0.36  # inches per rank
_WIDTH = 7.4  # inches
_BAR = 0.84  # of a row
_HATCH = {"fill": "\\\\\\\\", "inner": "xxxx", "drain": "////"}
_LABEL_SIZE = 8
_AXES = {
    "tp": ("tensor", palette.CATEGORIES[0]),
    "pp": ("pipeline", palette.CATEGORIES[3]),
    "dp": ("data", palette.CATEGORIES[2]),
}


def gantt(timeline: Timeline, ax: Axes | None = None, *, until: float | None = None, path: bool = False) -> Axes:
    """Draw when each rank does what. Hatched: idle while the pipeline fills, inside, while it drains.

    `until` sets where the time axis ends (where the last rank does, by default); `path` outlines one critical path.
    Labels drop out where they don't fit.
    """
    if ax is None:
        ax = _new_axes(timeline.schedule.num_ranks)
    _chart(ax, timeline, until or max([timeline.makespan, *(span.end for span in timeline.others)]), path)
    _legend(ax, [timeline])
    return ax


def _chart(ax: Axes, timeline: Timeline, until: float, path: bool) -> None:
    """A Gantt chart without its legend."""
    _dress(ax, _ranks(timeline), _title(timeline), timeline.unit, until)
    ax.set_ylim(timeline.schedule.num_ranks - 0.5, -0.5)
    _draw_idle(ax, timeline)
    _draw_spans(ax, timeline, until)
    if path:
        _draw_path(ax, critical_path(timeline))
    ax.set_label(describe(timeline))


class AxesColumn(list):
    """Axes of one figure, top to bottom."""


def compare(timelines: Sequence[Timeline], *, path: bool = False) -> AxesColumn:
    """Draw several timelines one above the other on one time axis."""
    import matplotlib.pyplot as plt

    heights = [t.schedule.num_ranks * _ROW + 0.5 for t in timelines]
    figure, axes = plt.subplots(
        len(timelines),
        1,
        figsize=(_WIDTH, sum(heights) + 0.4),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    until = max(max([t.makespan, *(span.end for span in t.others)]) for t in timelines)
    column = AxesColumn(axes[:, 0])
    for timeline, ax in zip(timelines, column, strict=True):
        _chart(ax, timeline, until, path)
        if ax is not column[-1]:
            ax.set_xlabel("")
            ax.tick_params(labelbottom=False)
    _legend(column[-1], timelines)
    return column


def memory(timeline: Timeline, ax: Axes | None = None, *, of: Memory | None = None, until: float | None = None) -> Axes:
    """Draw what each rank holds over time, a strip each, with its peak: forwards' activations, or what `of` says."""
    curves = held(timeline, of or Memory())
    if ax is None:
        ax = _new_axes(len(curves))
    until = until or timeline.makespan
    peaks = timeline.schedule.peak_held(of or Memory())
    for rank, (times, amounts) in enumerate(curves):
        base = rank + 0.45
        heights = [base - 0.85 * amount / max(peaks) for amount in amounts]
        ax.fill_between(
            [*times, until], base, [*heights, heights[-1]], step="post", color=palette.FILL[Kind.F], lw=0, alpha=0.8
        )
        ax.text(until * 1.005, rank, f"peak {peaks[rank]:.4g}", va="center", fontsize=_LABEL_SIZE)
    what = "forwards whose activations are held" if of is None else f"held{of.unit and f' ({of.unit})'}"
    _dress(ax, _ranks(timeline), f"{timeline.schedule.name}: {what}", timeline.unit, until)
    ax.set_ylim(len(curves) - 0.5, -0.5)
    said = ", ".join(f"{peak:.4g}" for peak in peaks)
    what = "Activations" if of is None else "Memory"
    ax.set_label(f"{what} held over time under {timeline.schedule.name}; peaks per rank: {said}")
    return ax


def waterfall(found: Where, ax: Axes | None = None) -> Axes:
    """Draw how a step's mean parts add up, from work to what was measured: compute first, then what each part adds."""
    mean = found.mean
    work = {part: amount for part, amount in mean.items() if part not in IDLE_PARTS}
    steps = [("work", total(work.values())), *((part, mean[part]) for part in IDLE_PARTS), ("step", found.step_time)]
    if ax is None:
        ax = _new_axes(len(steps))
    end = 0.0
    for row, (name, amount) in enumerate(steps):
        start = 0 if name in ("work", "step") else end
        end = start + amount
        fill = {"work": palette.FILL[Kind.F], "step": palette.IDLE}.get(name, palette.FILL[Kind.B])
        ax.barh(row, amount, left=start, height=_BAR, color=fill)
        label = f" {amount:.4g} ({amount / found.step_time:.1%})"
        ax.text(max(start, end), row, label, va="center", fontsize=_LABEL_SIZE)
    _finish_parts(ax, found, [name for name, _ in steps], "where the step went (mean of ranks)", 1.2)
    return ax


def stacked(found: Where, ax: Axes | None = None) -> Axes:
    """Draw each rank's parts one after the other; what is negative on a rank is left out."""
    num_ranks = len(found.by_rank)
    if ax is None:
        ax = _new_axes(num_ranks)
    names = [part for part in found.mean if any(row.get(part) for row in found.by_rank)]
    ends = [0.0] * num_ranks
    for name in names:
        amounts = [max(row.get(name, 0), 0) for row in found.by_rank]
        ax.barh(range(num_ranks), amounts, left=ends, height=_BAR, color=palette.PART[name], label=name)
        ends = [end + amount for end, amount in zip(ends, amounts, strict=True)]
    _finish_parts(ax, found, _ranks(found.timeline), "where each rank's time went", max(ends) / found.step_time)
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.35), ncols=4, frameon=False, fontsize=_LABEL_SIZE)
    return ax


def ranks(plan: Plan, ranks_per_node: int, ax: Axes | None = None) -> Axes:
    """Draw a small layout's ranks in their nodes, with an edge for every two that communicate and, per axis, what the
    busiest rank sends in a step. Raises ValueError for more than 32 ranks, which nobody could read."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    layout = plan.layout
    if layout.num_ranks > 32:
        raise ValueError(f"at most 32 ranks can be drawn so that they can be read, got {layout.num_ranks}")
    places = [layout.place(rank) for rank in range(layout.num_ranks)]
    spots = [
        (p["pp"] * (layout.tp + 1.5) + p["tp"], -(p["dp"] * (0.35 * layout.tp + 0.9) - 0.35 * p["tp"])) for p in places
    ]
    if ax is None:
        height = max(y for _, y in spots) - min(y for _, y in spots)
        ax = plt.subplots(figsize=(_WIDTH, 0.85 * height + 1.6), layout="constrained")[1]
    said = []
    for axis, (name, colour) in _AXES.items():
        groups = [group for group in layout.groups(axis) if len(group) > 1]
        sent = plan.sent_bytes[axis] / 1e6
        label = f"{name}: {sent:.0f} MB" if sent < 1e3 else f"{name}: {sent / 1e3:.1f} GB"
        for number, group in enumerate(groups):
            xs, ys = zip(*(spots[rank] for rank in group), strict=True)
            ax.plot(xs, ys, color=colour, lw=2.2, zorder=1, label=label if number == 0 else None)
        if groups:
            said.append(label)
    for rank, (x, y) in enumerate(spots):
        ax.text(
            x,
            y,
            str(rank),
            ha="center",
            va="center_baseline",
            fontsize=_LABEL_SIZE,
            color="#111111",
            zorder=3,
            bbox={"boxstyle": "circle,pad=0.35", "facecolor": "#e3e6ea", "edgecolor": palette.IDLE},
        )
    for first in range(0, layout.num_ranks, ranks_per_node):
        xs, ys = zip(*spots[first : first + ranks_per_node], strict=True)
        corner = (min(xs) - 0.45, min(ys) - 0.35)
        size = (max(xs) - min(xs) + 0.9, max(ys) - min(ys) + 0.7)
        ax.add_patch(Rectangle(corner, *size, facecolor="none", edgecolor=palette.IDLE, ls="--", lw=1))
        ax.text(corner[0], corner[1] + size[1] + 0.05, f"node {first // ranks_per_node}", fontsize=_LABEL_SIZE)
    ax.margins(0.06, 0.12)
    ax.axis("off")
    ax.set_title("who sends to whom, and how much the busiest rank sends in a step", fontsize=10, loc="left")
    ax.legend(loc="upper left", bbox_to_anchor=(0, 0), ncols=3, frameon=False, fontsize=_LABEL_SIZE)
    ax.set_label(
        f"{layout.num_ranks} ranks on {-(-layout.num_ranks // ranks_per_node)} nodes as tensor x pipeline x data = "
        f"{layout.tp} x {layout.pp} x {layout.dp}. The busiest rank sends per step: {', '.join(said)}"
    )
    return ax


def _finish_parts(ax: Axes, found: Where, names: Sequence[str], what: str, reach: float) -> None:
    title = f"{found.timeline.schedule.name}, {found.timeline.how}: {what}"
    _dress(ax, names, title, found.timeline.unit, found.step_time * max(reach, 1))
    ax.invert_yaxis()
    said = ", ".join(f"{part} {amount / found.step_time:.1%}" for part, amount in found.mean.items())
    ax.set_label(f"Where the time of a step of {found.timeline.schedule.name} went, mean of ranks: {said}")


def _dress(ax: Axes, rows: Sequence[str], title: str, unit: str, until: float) -> None:
    """Axes with a named strip per row, and time from 0 to `until`."""
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xlim(0, until)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xlabel(f"time ({unit})" if unit else "time")
    ax.tick_params(length=0, axis="y")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _ranks(timeline: Timeline) -> list[str]:
    return [f"rank {rank}" for rank in range(timeline.schedule.num_ranks)]


def describe(timeline: Timeline) -> str:
    """A Gantt chart in one sentence, for readers who don't see it."""
    schedule = timeline.schedule
    unit = timeline.unit and " " + timeline.unit
    return (
        f"{timeline.how.capitalize()} Gantt chart of {schedule.name} on {schedule.num_ranks} ranks with "
        f"{schedule.num_microbatches} microbatches: makespan {timeline.makespan:.4g}{unit}, "
        f"{timeline.bubble_fraction:.1%} of all rank-time idle"
    )


def figure_html(figure: Figure) -> str:
    """The figure as inline SVG whose text takes the page's colour, with alternative text, wide figures scrolling."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "pplab", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = svg.replace("#000000", "currentColor")
    alt = html.escape(alternative_text(figure), quote=True)
    width, height = (float(x) for x in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    opening = (
        f'<svg role="img" aria-label="{alt}" viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink" fill="currentColor" '
        f'style="width:100%;min-width:{min(width, 480):.0f}px;max-width:{width * 4 / 3:.0f}px;height:auto">'
    )
    return f'<div class="pplab-figure" style="overflow-x:auto">{re.sub("<svg[^>]*>", opening, svg, count=1)}</div>'


def alternative_text(figure: Figure) -> str:
    """What the figure's axes say of themselves: their label where a drawing set one, else title and axis names."""
    said = []
    for ax in figure.axes:
        label = ax.get_label()
        if not label or label.startswith("<"):
            axes = " against ".join(filter(None, (ax.get_ylabel(), ax.get_xlabel())))
            label = ": ".join(filter(None, (ax.get_title() or ax.get_title(loc="left"), axes)))
        said.append(label)
    return ". ".join(filter(None, said))


def _new_axes(num_rows: int) -> Axes:
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(_WIDTH, num_rows * _ROW + 0.9), layout="constrained")[1]


def _title(timeline: Timeline) -> str:
    unit = timeline.unit and " " + timeline.unit
    return (
        f"{timeline.schedule.name}, {timeline.how}: makespan {timeline.makespan:.4g}{unit}, "
        f"bubble fraction {timeline.bubble_fraction:.4f}"
    )


def _fill_of(timeline: Timeline, span: Span) -> list[str]:
    stages = timeline.schedule.stages_of(span.rank)
    return [palette.shade(palette.FILL[a.kind], stages.index(a.stage), len(stages)) for a in parts(span.action)]


def _draw_spans(ax: Axes, timeline: Timeline, until: float) -> None:
    """One collection of bars per colour; an overlap shows its forward in the upper half, its backward in the lower."""
    pixels = ax.get_window_extent().width * 72 / ax.figure.dpi / until  # points per unit of time
    gap = 0.8 / pixels
    bars: dict[tuple[str, float, float], list[tuple[float, float]]] = defaultdict(list)
    for span in timeline.spans:
        halves = parts(span.action)
        fills = _fill_of(timeline, span)
        length = span.end - span.start
        drawn = max(length - min(gap, length / 4), 0)
        height = _BAR / len(halves)
        for k, (action, fill) in enumerate(zip(halves, fills, strict=True)):
            bottom = span.rank - _BAR / 2 + k * height
            bars[fill, bottom, height].append((span.start, drawn))
            label = str(action.microbatch)
            if drawn * pixels > len(label) * _LABEL_SIZE * 0.62 and height * _ROW * 72 > _LABEL_SIZE:
                ax.text(
                    span.start + drawn / 2,
                    bottom + height / 2,
                    label,
                    ha="center",
                    va="center_baseline",
                    fontsize=_LABEL_SIZE,
                    color=palette.ink(fill),
                    clip_on=True,
                )
    for (fill, bottom, height), places in bars.items():
        ax.broken_barh(places, (bottom, height), facecolor=fill, lw=0)
    others = defaultdict(list)
    for span in timeline.others:
        if isinstance(span.action, str):
            others[span.rank].append((span.start, span.end - span.start))
    for rank, places in others.items():
        ax.broken_barh(places, (rank - _BAR / 2, _BAR), facecolor=palette.OTHER, lw=0)


def _draw_idle(ax: Axes, timeline: Timeline) -> None:
    places: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for idle in idle_intervals(timeline):
        places[idle.phase, idle.rank].append((idle.start, idle.end - idle.start))
    for (phase, rank), spans in places.items():
        ax.broken_barh(
            spans,
            (rank - _BAR / 2, _BAR),
            facecolor="none",
            edgecolor=palette.IDLE,
            hatch=_HATCH[phase],
            lw=0,
            alpha=0.55,
        )


def _draw_path(ax: Axes, spans: Iterable[Span]) -> None:
    for span in spans:
        ax.broken_barh(
            [(span.start, span.end - span.start)],
            (span.rank - _BAR / 2, _BAR),
            facecolor="none",
            edgecolor="black",
            lw=1.8,
            zorder=3,
        )


def _legend(ax: Axes, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    found = set().union(*(timeline.schedule.columns.kinds for timeline in timelines))
    kinds = [kind for kind in palette.FILL if kind in found]
    handles = [Patch(facecolor=palette.FILL[kind], label=palette.NAME[kind]) for kind in kinds]
    spans = (span for timeline in timelines for span in timeline.others)
    if labels := dict.fromkeys(span.action for span in spans if isinstance(span.action, str)):
        handles.append(Patch(facecolor=palette.OTHER, label=", ".join(labels)))
    phases = {idle.phase for timeline in timelines for idle in idle_intervals(timeline)}
    names = {"fill": "idle: filling", "inner": "idle: inside", "drain": "idle: draining"}
    handles += [
        Patch(facecolor="none", edgecolor=palette.IDLE, hatch=_HATCH[phase], lw=0, label=names[phase])
        for phase in _HATCH
        if phase in phases
    ]
    below = ScaledTranslation(0, -34 / 72, ax.figure.dpi_scale_trans)  # under the axis' label, whatever the height
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=ax.transAxes + below,
        ncols=min(len(handles), 5),
        frameon=False,
        fontsize=_LABEL_SIZE,
        borderaxespad=0,
        handlelength=1.2,
        columnspacing=1.2,
    )


def bars(
    rows: Mapping[str, Sequence[tuple[str, float]]], ax: Axes | None = None, *, title: str, unit: str, mark: str = ""
) -> Axes:
    """Draw a bar per row from its parts, (kind, amount) each: a stage's layers, say, or what a rank holds.

    Kinds have one colour in all rows. `mark` names a line at the mean of the rows' sums; without it there is none.
    """
    if ax is None:
        ax = _new_axes(len(rows))
    sums = [total(amount for _, amount in row) for row in rows.values()]
    kinds = list(dict.fromkeys(kind for row in rows.values() for kind, _ in row))
    fills = dict(zip(kinds, palette.CATEGORIES, strict=False))
    for place, row in enumerate(rows.values()):
        start = 0.0
        for kind, amount in row:
            ax.barh(place, amount, left=start, height=_BAR, color=fills[kind], edgecolor="white", lw=0.6)
            start += amount
        ax.text(start, place, f"  {start:.3g}", va="center", fontsize=_LABEL_SIZE)
    mean = total(sums) / len(sums)
    if mark:
        ax.axvline(mean, color="black", lw=1, ls="--")
        ax.text(mean, -0.55, f"{mark} {mean:.3g}", ha="center", va="bottom", fontsize=_LABEL_SIZE)
    _dress(ax, list(rows), title, "", 1.1 * max(sums))
    ax.set_title(title, fontsize=10, loc="left", pad=14 if mark else 6)
    ax.set_xlabel(unit)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    if len(kinds) > 1:
        from matplotlib.patches import Patch

        handles = [Patch(facecolor=fills[kind], label=kind) for kind in kinds]
        beside = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False}
        ax.legend(handles=handles, fontsize=_LABEL_SIZE, **beside)
    said = ", ".join(f"{name} {amount:.3g}" for name, amount in zip(rows, sums, strict=True))
    ax.set_label(f"{title}: {said} {unit}{mark and f'; {mark} {mean:.3g}'}")
    return ax
