"""The schedules' balance sheet, the messages that it counts, and tables that draw themselves in a
notebook.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator

from ...actions import parts
from ...deps import outgoing
from ...errors import expect
from ...schedule import Schedule
from ...timeline import Timeline


def num_messages(schedule: Schedule) -> int:
    """Number of messages between ranks in one step, both activations and gradients."""
    home = schedule.home()
    return sum(
        home[message.receive.stage, message.receive.microbatch] != rank
        for rank, row in enumerate(schedule.rows)
        for item in row
        for action in parts(item)
        if (message := outgoing(action, schedule.num_stages))
    )


_COLUMNS = (
    "schedule, makespan, bubble fraction, bubble ratio, span bubble, peak held, messages, "
    "parameters"
)


class Table(list):
    """Rows of cells under `columns`, which print as text and draw themselves in a notebook.

    `titles` are of groups of rows, by the number of a group's first row.
    """

    columns: tuple[str, ...] = tuple(_COLUMNS.split(", "))

    def __init__(self, rows: Iterable[tuple[str, ...]] = ()):
        super().__init__(rows)
        self.titles: dict[int, str] = {}

    def __str__(self) -> str:
        lines = [self.columns, *self]
        widths = [max(len(line[c]) for line in lines) for c in range(len(self.columns))]
        head, *rows = (
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )
        return "\n".join([head, *_grouped(rows, self.titles)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *body = (
            "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line)
            for tag, line in (("th", self.columns), *(("td", line) for line in self))
        )
        rows = (f"<tr>{cells}</tr>" for cells in body)
        across = f'<tr><td colspan="{len(self.columns)}"><b>'
        titles = {
            number: f"{across}{html.escape(title, quote=False)}</b></td></tr>"
            for number, title in self.titles.items()
        }
        return (
            '<div class="pplab-table" style="overflow-x:auto"><table class="table"><thead><tr>'
            f"{head}</tr></thead>"
            f"<tbody>{''.join(_grouped(rows, titles))}</tbody></table></div>"
        )


def _grouped(rows: Iterable[str], titles: dict[int, str]) -> Iterator[str]:
    """The rows, with each group's title before its first."""
    for number, row in enumerate(rows):
        if number in titles:
            yield titles[number]
        yield row


def table(timelines: Iterable[Timeline]) -> Table:
    """The schedules' balance sheet, with a row for each.

    Peaks are in units of a full stage, so a stage of a rank that holds two counts as half.
    Parameters are in copies of the model.
    """
    return Table(_balance(timeline) for timeline in timelines)


def _balance(timeline: Timeline) -> tuple[str, ...]:
    expect(Timeline, timeline=timeline)
    schedule = timeline.schedule
    per_replica = schedule.num_ranks // len(schedule.replicas)
    peaks = ", ".join(
        f"{peak * per_replica / schedule.num_stages:g}" for peak in timeline.peak_in_flight
    )
    return (
        schedule.name,
        f"{timeline.makespan:g}{timeline.unit and ' ' + timeline.unit}",
        f"{timeline.bubble_fraction:.4f}",
        f"{timeline.bubble_ratio:.4f}",
        f"{timeline.span_bubble_fraction:.4f}",
        peaks,
        str(num_messages(schedule)),
        str(schedule.copies),
    )
