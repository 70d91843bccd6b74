"""Drawings of more than one chart: several schedules on one time axis, and what each rank holds over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import palette
from .actions import Kind
from .footprint import Memory, held
from .plot import LABEL_SIZE, ROW, WIDTH, chart, dress, legend, new_axes, rank_names
from .timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class AxesColumn(list):
    """Axes of one figure, top to bottom."""


def compare(timelines: Sequence[Timeline], *, path: bool = False) -> AxesColumn:
    """Draw several timelines one above the other on one time axis."""
    import matplotlib.pyplot as plt

    heights = [t.schedule.num_ranks * ROW + 0.5 for t in timelines]
    figure, axes = plt.subplots(
        len(timelines),
        1,
        figsize=(WIDTH, sum(heights) + 0.4),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    until = max(max([t.makespan, *(span.end for span in t.others)]) for t in timelines)
    column = AxesColumn(axes[:, 0])
    for timeline, ax in zip(timelines, column, strict=True):
        chart(ax, timeline, until, path)
        if ax is not column[-1]:
            ax.set_xlabel("")
            ax.tick_params(labelbottom=False)
    legend(column[-1], timelines)
    return column


def memory_chart(
    timeline: Timeline, ax: Axes | None = None, *, of: Memory | None = None, until: float | None = None
) -> Axes:
    """Draw what each rank holds over time, a strip each, with its peak: forwards' activations, or what `of` says."""
    curves = held(timeline, of)
    if ax is None:
        ax = new_axes(len(curves))
    until = until or timeline.makespan
    peaks = timeline.schedule.peak_held(of or Memory())
    for rank, (times, amounts) in enumerate(curves):
        base = rank + 0.45
        heights = [base - 0.85 * amount / max(peaks) for amount in amounts]
        ax.fill_between(
            [*times, until], base, [*heights, heights[-1]], step="post", color=palette.FILL[Kind.F], lw=0, alpha=0.8
        )
        ax.text(until * 1.005, rank, f"peak {peaks[rank]:.4g}", va="center", fontsize=LABEL_SIZE)
    what = "forwards whose activations are held" if of is None else f"held{of.unit and f' ({of.unit})'}"
    dress(ax, rank_names(timeline), f"{timeline.schedule.name}: {what}", timeline.unit, until)
    ax.set_ylim(len(curves) - 0.5, -0.5)
    said = ", ".join(f"{peak:.4g}" for peak in peaks)
    what = "Activations" if of is None else "Memory"
    ax.set_label(f"{what} held over time under {timeline.schedule.name}; peaks per rank: {said}")
    return ax
