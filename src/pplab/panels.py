"""Drawings of more than one chart: several schedules on one time axis, and what each rank holds over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .plot import ROW, WIDTH, chart, legend
from .timeline import Timeline

if TYPE_CHECKING:
    pass


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
