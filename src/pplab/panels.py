"""What is seen across charts: several schedules on one time axis, and a longest chain of actions."""

from __future__ import annotations

from collections.abc import Sequence

from .plot import ROW, WIDTH, chart, end_of, legend
from .timeline import Span, Timeline


class AxesColumn(list):
    """Axes of one figure, top to bottom."""


def compare(timelines: Sequence[Timeline], *, path: bool = False) -> AxesColumn:
    """Draw several timelines one above the other on one time axis."""
    import matplotlib.pyplot as plt

    until = max(map(end_of, timelines))
    heights = [t.schedule.num_ranks * ROW + 0.5 for t in timelines]
    figure, axes = plt.subplots(
        len(timelines),
        1,
        figsize=(WIDTH, sum(heights) + 0.4),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    column = AxesColumn(axes[:, 0])
    for timeline, ax in zip(timelines, column, strict=True):
        chart(ax, timeline, until, path)
        if ax is not column[-1]:
            ax.set_xlabel("")
            ax.tick_params(labelbottom=False)
    legend(column[-1], timelines)
    return column


def critical_path(timeline: Timeline) -> tuple[Span, ...]:
    """One longest chain of actions, each of which starts late because of the one before it. First to last."""
    graph, spans, ends = timeline.schedule.graph, timeline.spans, timeline.ends
    firsts = set(graph.columns.bounds)
    i = max(range(len(ends)), key=ends.__getitem__)
    path = []
    while i >= 0:
        path.append(spans[i])
        last = max((graph.id_of(maker) for _, maker in graph.awaited(i)), key=ends.__getitem__, default=-1)
        before = -1 if i in firsts else i - 1
        i = last if last >= 0 and (before < 0 or path[-1].start > ends[before]) else before
    return tuple(reversed(path))
