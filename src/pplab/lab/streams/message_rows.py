"""Drawings of what ranks compute with what they send and receive: actions above, the queue of messages below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ... import palette
from ...actions import COMPUTE, Action, Kind, parts
from ...optional import bring
from ...plot import LABEL_SIZE, ROW, WIDTH, AxesColumn, describe, dress, fill_of, ink, rank_names
from ...timeline import Span, Timeline
from ..forms import MESSAGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def message_chart(timelines: Sequence[Timeline]) -> AxesColumn:
    """Draw timelines one above the other on one time axis, with each rank's sends and receives in a strip of its own.

    They are the timelines' `others`, as `simulate_lowered` and a run with one queue have them; a timeline without any
    shows its actions alone. A bar lasts as long as its message stands at the head of its queue.
    """
    plt = bring("matplotlib.pyplot")
    heights = [t.schedule.num_ranks * 1.5 * ROW + 0.5 for t in timelines]
    size, options = (WIDTH, sum(heights) + 0.4), {"height_ratios": heights, "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(len(timelines), 1, figsize=size, **options)
    until = max(max([t.makespan, *(span.end for span in t.others)]) for t in timelines)
    column = AxesColumn(axes[:, 0])
    for timeline, ax in zip(timelines, column, strict=True):
        title = f"{timeline.schedule.name}, {timeline.how}: makespan {timeline.makespan:.4g} {timeline.unit}".rstrip()
        dress(ax, rank_names(timeline), title, timeline.unit, until)
        ax.set_ylim(timeline.schedule.num_ranks - 0.45, -0.5)
        _draw_with_messages(ax, timeline, until)
        sent = sum(1 for span in timeline.others if _is_send(span.action))
        waited = max((s.end - s.start for s in timeline.others if _is_message(s.action)), default=0)
        unit = timeline.unit and " " + timeline.unit
        said = f", {sent} messages, of which the longest stands for {waited:.4g}{unit}" if sent else ""
        ax.set_label(describe(timeline) + said)
        if ax is not column[-1]:
            ax.set_xlabel("")
            ax.tick_params(labelbottom=False)
    _message_legend(column[-1], timelines)
    return column


def _is_message(action: object) -> bool:
    return isinstance(action, Action) and action.kind not in COMPUTE


def _is_send(action: object) -> bool:
    return isinstance(action, Action) and action.kind in (Kind.SEND_F, Kind.SEND_B)


def _draw_with_messages(ax: Axes, timeline: Timeline, until: float) -> None:
    """Actions in the upper part of a rank's strip, its queue in the lower."""
    width = ax.get_window_extent().width * 72 / ax.figure.dpi / until  # points per unit of time
    for span in timeline.spans:
        halves = parts(span.action)
        height = 0.54 / len(halves)
        for k, (action, fill) in enumerate(zip(halves, fill_of(timeline, span), strict=True)):
            label = str(action.microbatch)
            _bar(ax, span, (span.rank - 0.45 + k * height, height), fill, label, width)
    for span in timeline.others:
        if _is_message(span.action):
            fill = MESSAGE["send" if _is_send(span.action) else "receive"]
            _bar(ax, span, (span.rank + 0.13, 0.26), fill, str(span.action.microbatch), width)


def _bar(ax: Axes, span: Span, place: tuple[float, float], fill: str, label: str, width: float) -> None:
    """One bar with its microbatch's number where it fits; a message that takes no time is a line."""
    length = span.end - span.start
    drawn = max(length - min(0.8 / width, length / 4), 0)
    edge = fill if drawn * width < 1 else "none"
    ax.broken_barh([(span.start, drawn)], place, facecolor=fill, edgecolor=edge, lw=0.8)
    if length * width > len(label) * LABEL_SIZE * 0.62:
        ax.text(
            span.start + drawn / 2,
            place[0] + place[1] / 2,
            label,
            ha="center",
            va="center_baseline",
            fontsize=LABEL_SIZE if place[1] > 0.3 else LABEL_SIZE - 2,
            color=ink(fill),
            clip_on=True,
        )


def _message_legend(ax: Axes, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    found = set().union(*(timeline.schedule.columns.kinds for timeline in timelines))
    handles = [Patch(facecolor=fill, label=palette.NAME[kind]) for kind, fill in palette.FILL.items() if kind in found]
    handles += [Patch(facecolor=fill, label=f"{name}, at the head") for name, fill in MESSAGE.items()]
    below = ScaledTranslation(0, -34 / 72, ax.figure.dpi_scale_trans)
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=ax.transAxes + below,
        ncols=len(handles),
        frameon=False,
        fontsize=LABEL_SIZE,
        borderaxespad=0,
        handlelength=1.2,
        columnspacing=1.2,
    )
