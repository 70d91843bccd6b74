"""The Gantt chart of a schedule of slices, with microbatches and slices by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import positive_int
from ...plot import gantt
from ...timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def sliced_gantt(timeline: Timeline, slices: int, **options: object) -> Axes:
    """Draw a timeline like `pplab.gantt`, with its options, and with `3b` for the second slice of
    microbatch 3.
    """
    k = positive_int("slices", slices)
    ax = gantt(timeline, **options)
    for text in ax.texts:
        if text.get_text().isdigit():
            text.set_text(slice_name(int(text.get_text()), k))
    return ax


def slice_name(number: int, slices: int) -> str:
    """The name of a schedule's microbatch number `n` if each microbatch has k slices.

    >>> slice_name(7, 2), slice_name(27, 27), slice_name(53, 27)
    ('3b', '1a', '1aa')
    """
    m, j = divmod(number, slices)
    letters = ""
    while j >= 0:
        letters = chr(ord("a") + j % 26) + letters
        j = j // 26 - 1
    return f"{m}{letters}"
