"""What each rank holds over time, and its drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import palette
from ...actions import Kind
from ...errors import expect
from ...footprint import Memory
from ...plot import LABEL_SIZE, dress, new_axes, rank_names
from ...timeline import Timeline
from .palette import LIMIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def held_over_time(
    timeline: Timeline, memory: Memory | None = None
) -> tuple[tuple[list[float], list[float]], ...]:
    """Per rank, what is held over time: times, and what is held from each time on, in the unit of
    `memory`.

    Without `memory` it is the activations of forwards, held from the start of F until the end of B,
    or of W when the backward is split.
    """
    expect(Timeline, timeline=timeline)
    schedule, memory = timeline.schedule, memory or Memory()
    memory.check(schedule.num_stages)
    curves = []
    for rank, row in enumerate(schedule.rows):
        times, amounts = [0], [memory.constant(schedule.stages_of(rank))]
        for (_, _, start, end), (during, after) in zip(
            timeline.spans_of(rank), memory.levels(row), strict=True
        ):
            for time, amount in ((start, during), (end, after)):
                if time == times[-1]:
                    amounts[-1] = amount
                elif amount != amounts[-1]:
                    times.append(time)
                    amounts.append(amount)
        curves.append((times, amounts))
    return tuple(curves)


def memory_chart(
    timeline: Timeline,
    ax: Axes | None = None,
    *,
    of: Memory | None = None,
    until: float | None = None,
    limit: float | None = None,
) -> Axes:
    """Draw what each rank holds over time, in a strip each, with its peak. By default it is the
    activations of forwards, and with `of` what that memory gives.

    With a `limit`, in the unit of `of`, each strip has a line there, and its state is grey.
    """
    curves = held_over_time(timeline, of)
    if ax is None:
        ax = new_axes(len(curves))
    until = until or timeline.makespan
    memory = of or Memory()
    peaks = timeline.schedule.peak_held(memory)
    scale = 0.85 / max(*peaks, limit or 0)
    for rank, (times, amounts) in enumerate(curves):
        base = rank + 0.45
        heights = [base - scale * amount for amount in amounts]
        ax.fill_between(
            [*times, until],
            base,
            [*heights, heights[-1]],
            step="post",
            color=palette.FILL[Kind.F],
            lw=0,
            alpha=0.8,
        )
        if limit is not None:
            state = memory.constant(timeline.schedule.stages_of(rank))
            ax.fill_between([0, until], base, base - scale * state, color=palette.IDLE, lw=0)
            ax.hlines(base - scale * limit, 0, until, color=LIMIT, lw=1.5)
        ax.text(until * 1.005, rank, f"peak {peaks[rank]:.4g}", va="center", fontsize=LABEL_SIZE)
    what = (
        "forwards whose activations are held"
        if of is None
        else f"held{of.unit and f' ({of.unit})'}"
    )
    what += f", line at {limit:g}" if limit is not None else ""
    dress(ax, rank_names(timeline), f"{timeline.schedule.name}: {what}", timeline.unit, until)
    ax.set_ylim(len(curves) - 0.5, -0.5)
    said = ", ".join(f"{peak:.4g}" for peak in peaks)
    what = "Activations" if of is None else "Memory"
    ax.set_label(f"{what} held over time under {timeline.schedule.name}; peaks per rank: {said}")
    return ax
