"""A schedule: what each rank does, in which order. No times, no communication, no torch."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from . import palette, schedule_csv
from .actions import Action, Overlap, parse, parts
from .costs import Memory
from .deps import Columns, Graph, build_graph

_MOST_CELLS = 64  # of a row, in the HTML form


@dataclass(frozen=True, repr=False)
class Schedule:
    """Rows of actions: `rows[rank]` is what that rank runs, in order.

    `rows` takes actions or their text form. Where each stage lives, and how many ranks, stages and microbatches there
    are, follows from the rows. Only the form is checked here (ValueError); `pplab.validate` checks the meaning.

    >>> Schedule([["0F0", "0B0"], ["1F0", "1B0"]], name="two ranks")
    <Schedule two ranks: 2 ranks, 2 stages, 1 microbatch, 4 actions>
    """

    rows: tuple[tuple[Action | Overlap, ...], ...]
    name: str = field(default="custom", compare=False)
    columns: Columns = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.rows, str) or not isinstance(self.rows, Iterable):
            raise ValueError(f"rows must be one sequence of actions per rank, got {self.rows!r}")
        rows = tuple(_checked_row(rank, row) for rank, row in enumerate(self.rows))
        if not any(rows):
            raise ValueError("a schedule needs at least one action")
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "columns", Columns.of(rows))

    @cached_property
    def graph(self) -> Graph:
        """What every action waits for, in integers (computed once)."""
        return build_graph(self.columns)

    @property
    def copies(self) -> int:
        """Copies of the model's parameters: as many as ranks hold a stage. 2 when the schedule is bidirectional."""
        return max(len(place) if isinstance(place, tuple) else 1 for place in self.placement)

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every pipeline that shares no microbatch with another one: more than one under data parallelism.

        >>> Schedule([["0F0", "0B0"], ["0F1", "0B1"]]).replicas
        ((0,), (1,))
        """
        if self.copies == 1:
            return (tuple(range(self.num_ranks)),)
        found: list[tuple[list[int], set[int]]] = []  # ranks, and the microbatches that they work on
        for rank in range(self.num_ranks):
            first, end = self.columns.bounds[rank : rank + 2]
            ranks, microbatches = [rank], set(self.columns.microbatches[first:end])
            for other in [other for other in found if not other[1].isdisjoint(microbatches)]:
                found.remove(other)
                ranks, microbatches = other[0] + ranks, other[1] | microbatches
            found.append((ranks, microbatches))
        return tuple(sorted(tuple(sorted(ranks)) for ranks, _ in found))

    @property
    def num_ranks(self) -> int:
        """Processes in the pipeline (P)."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """Pieces of the model (S)."""
        return self.columns.num_stages

    @property
    def num_microbatches(self) -> int:
        """Slices of the batch (M)."""
        return self.columns.num_microbatches

    @cached_property
    def placement(self) -> tuple[int | tuple[int, ...], ...]:
        """Which rank holds each stage: `placement[stage]` is a rank.

        A bidirectional schedule keeps two copies of every stage, replicas one each: there it is all their ranks.
        """
        holders: dict[int, list[int]] = defaultdict(list)
        for rank in range(self.num_ranks):
            for stage in self.stages_of(rank):
                holders[stage].append(rank)
        places = (tuple(holders[stage]) for stage in range(self.num_stages))
        return tuple(place[0] if len(place) == 1 else place for place in places)

    def home(self) -> dict[tuple[int, int], int]:
        """The rank of every (stage, microbatch)."""
        columns = self.columns
        return dict(zip(zip(columns.stages, columns.microbatches, strict=True), columns.ranks(), strict=True))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, lowest first."""
        first, end = self.columns.bounds[rank : rank + 2]
        return tuple(sorted(set(self.columns.stages[first:end])))

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank, the most forwards whose activations are held at once.

        A forward's activations are held from F until B, or until W when the backward is split: that depends on the
        order alone, not on time. The unit is one stage's activations for one microbatch.
        """
        return self.peak_held(Memory())

    def peak_held(self, memory: Memory | Sequence[float]) -> tuple[float, ...]:
        """Per rank, the most that is held at once, in the unit of `memory`: sizes by stage, or a `pplab.Memory`."""
        if not isinstance(memory, Memory):
            memory = Memory(activation=tuple(memory))
        memory.check(self.num_stages)
        return tuple(max(held for held, _ in self.held(rank, memory)) for rank in range(self.num_ranks))

    def held(self, rank: int, memory: Memory) -> Iterator[tuple[float, float]]:
        """What a rank holds while each of its ids runs, and after it: (during, after). That depends on order alone."""
        changes = [memory.changes(stage) for stage in range(self.num_stages)]
        now = memory.constant(self.stages_of(rank))
        first, end = self.columns.bounds[rank : rank + 2]
        for kind, stage in zip(self.columns.kinds[first:end], self.columns.stages[first:end], strict=True):
            at_start, at_end = changes[stage][kind]
            during = now + at_start
            now = during + at_end
            yield during, now

    @classmethod
    def from_csv(cls, source: str | Path, name: str = "custom") -> Schedule:
        """Read PyTorch's CSV form, from text or from a file: row i is rank i, blank cells are ignored.

        What a lowered file adds (sends, receives, sharding) is left out: `pplab.lower` derives communication from the
        computation. Raises ScheduleError with row, column and what was expected for a cell that isn't an action.
        """
        return cls(schedule_csv.read(source), name)

    def to_csv(self) -> str:
        """PyTorch's CSV form, as text: no header, row i is rank i."""
        return schedule_csv.write(self.rows)

    def __repr__(self) -> str:
        counts = (
            (self.num_ranks, "rank"),
            (self.num_stages, "stage"),
            (self.num_microbatches, "microbatch"),
            (sum(map(len, self.rows)), "action"),
        )
        return f"<Schedule {self.name}: {', '.join(plural(n, noun) for n, noun in counts)}>"

    def __str__(self) -> str:
        """A text grid: one line per rank, actions in order, aligned by their place in the row."""
        cells = [[str(item) for item in row] for row in self.rows]
        columns = max(map(len, cells))
        widths = [max(len(row[c]) for row in cells if c < len(row)) for c in range(columns)]
        label = len(str(len(cells) - 1))
        lines = [
            f"rank {rank:>{label}}  " + " ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=False)).rstrip()
            for rank, row in enumerate(cells)
        ]
        return "\n".join([repr(self)[10:-1], *lines])

    def _repr_html_(self) -> str:
        """The grid as coloured cells. It shows order, not time: simulate the schedule to see when things happen."""
        lines = []
        for rank, row in enumerate(self.rows):
            stages = self.stages_of(rank)
            cells = "".join(_cell(item, stages) for item in row[:_MOST_CELLS])
            more = f"<td>… {len(row) - _MOST_CELLS} more</td>" if len(row) > _MOST_CELLS else ""
            lines.append(f'<tr><th scope="row" style="{_HEAD}">rank {rank}</th>{cells}{more}</tr>')
        return (
            f'<div class="pplab-table" style="overflow-x:auto"><table style="{_TABLE}"><caption style="{_CAPTION}">'
            f"{html.escape(repr(self)[10:-1])}</caption><tbody>{''.join(lines)}</tbody></table></div>"
        )


_TABLE = "border-collapse:separate;border-spacing:2px;margin:0;font:12px/1.7 sans-serif;width:auto"
_CAPTION = "text-align:left;caption-side:top;white-space:nowrap"
_HEAD = "text-align:right;padding:0 .6em 0 0;font-weight:normal;white-space:nowrap"
_CELL = "padding:0 .35em;text-align:center;border:0;border-radius:3px;white-space:nowrap"


def _cell(item: Action | Overlap, stages: Sequence[int]) -> str:
    """One table cell: colour is the kind, a lighter shade a later stage of the rank."""
    fills = [palette.shade(palette.FILL[a.kind], stages.index(a.stage), len(stages)) for a in parts(item)]
    fill = fills[0] if len(fills) == 1 else f"linear-gradient(135deg,{fills[0]} 50%,{fills[1]} 50%)"
    text = "&amp;".join(str(a) for a in parts(item))
    return f'<td style="{_CELL};background:{fill};color:{palette.ink(fills[0])}">{text}</td>'


def plural(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `2 microbatches`."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")


def _checked_row(rank: int, row: Sequence[Action | Overlap | str]) -> tuple[Action | Overlap, ...]:
    """The row with every item an action or an overlap; text is parsed."""
    row = tuple(row)
    types = set(map(type, row))
    if not types <= {Action, Overlap}:
        row = tuple(parse(item) if isinstance(item, str) else item for item in row)
        if strange := [item for item in row if type(item) not in (Action, Overlap)]:
            raise ValueError(f"rank {rank}: {strange[0]!r} is not an action: expected pplab.Action or text such as 0F3")
    return row
