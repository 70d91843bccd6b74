"""Schedules as files of PyTorch's form.

A file is CSV without a header: row i is rank i, rows are ragged, blank cells are ignored and never written.
It is what `torch.distributed.pipelining` dumps and loads (`_PipelineScheduleRuntime._dump_csv`, `_load_csv`). A lowered
file also names communication and sharding; reading keeps the computation. Of two actions at once torch knows a forward
and a full backward, OVERLAP_F_B; others are written in the same way, OVERLAP_F_I and so on, and only pplab reads them.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable
from pathlib import Path

from ...actions import Action, B, F, Overlap, parts
from ...errors import ScheduleError, expect, shown
from ...schedule import Schedule
from ...text import parse
from .safe_text import printable

_LOWERED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B)\d+|\d+(UNSHARD|RESHARD|REDUCE_GRAD)")

CLASSES = {  # of torch, by the schedule
    "GPipe": "ScheduleGPipe",
    "1F1B": "Schedule1F1B",
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "LoopedBFS": "ScheduleLoopedBFS",
    "InterleavedZeroBubble": "ScheduleInterleavedZeroBubble",
    "ZBVZeroBubble": "ScheduleZBVZeroBubble",
    "DualPipeV": "ScheduleDualPipeV",
}


def read_csv(source: str | Path, name: str = "custom") -> Schedule:
    """The schedule in a CSV text, or in the file at a path (a `Path`, or a text that names an existing file).

    Sends, receives and sharding of a lowered file are left out: `pplab.lower` derives them.

    Blank rows at the end, as spreadsheets write them, are ignored like blank cells. Raises FileNotFoundError for a
    missing file, ScheduleError for a cell that isn't an action or a file without any.
    """
    try:
        lines = list(csv.reader(io.StringIO(_text(source))))
    except csv.Error as error:
        raise ScheduleError(f"this is no CSV ({error})", "write one action per cell, such as 0F0,0B0") from None
    while lines and not "".join(lines[-1]).strip():
        lines.pop()
    rows: list[list[Action | Overlap]] = []
    for rank, cells in enumerate(lines):
        row = []
        for column, cell in enumerate(cells):
            cell = cell.strip()
            if not cell or _LOWERED.fullmatch(cell):
                continue
            try:
                row.append(parse(cell))
            except ValueError as error:
                raise ScheduleError(
                    f"CSV row {rank + 1} (rank {rank}), column {column + 1}: {error}",
                    "write one action per cell, or leave the cell blank",
                    rank,
                    cell,
                ) from None
        rows.append(row)
    if not any(rows):
        raise ScheduleError("the CSV holds no action", "give one row per rank, such as 0F0,0F1,0B0,0B1")
    expect(str, name=name)
    return Schedule(rows, printable(name))  # it is a file's name, mostly


def to_csv(rows: Schedule | Iterable[Iterable[Action | Overlap]], *, for_torch: bool = False) -> str:
    """CSV text of a schedule, or of rows that have been lowered.

    A file has no durations, and doesn't say into how many slices a microbatch is cut. A slice is written as the
    microbatch as which its schedule counts it; torch runs it so, without the keys and values that slices hand on.

    `for_torch`: only what torch reads. ScheduleError then names what it doesn't: two actions at once that aren't a
    forward and a full backward, or a schedule of which a stage is on two ranks.

    >>> print(to_csv(Schedule([["0F0", "0F1", "0B0", "0B1"]]), for_torch=True), end="")
    0F0,0F1,0B0,0B1
    """
    listed = [[*row] for row in (rows.rows if isinstance(rows, Schedule) else rows)]
    if for_torch:
        _check_for_torch(listed)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([str(item) for item in row] for row in listed)
    return out.getvalue()


def unknown_to_torch(row: Iterable[Action | Overlap]) -> Overlap | None:
    """The first item of a row for which torch's form has no name."""
    pairs = (item for item in row if isinstance(item, Overlap))
    return next((pair for pair in pairs if (pair.first.kind, pair.second.kind) != (F, B)), None)


def check_order_of_losses(schedule: Schedule) -> None:
    """torch finds a microbatch's loss by its place in a list that grows with the last stage's forwards."""
    last = schedule.num_stages - 1
    halves = (a for row in schedule.rows for item in row for a in parts(item))
    order = [a.microbatch for a in halves if a.stage == last and a.kind is F]
    if order != sorted(order):
        raise ValueError(
            f"{schedule.name} runs the forwards of its last stage in the order {', '.join(map(str, order))}, and "
            "torch's runtime would take one microbatch's loss for another's: run them as 0, 1, 2, ..., or by pplab's "
            "engine"
        )


def _check_for_torch(rows: list[list[Action | Overlap]]) -> None:
    home: dict[int, int] = {}
    for rank, row in enumerate(rows):
        if strange := unknown_to_torch(row):
            known = f"torch's CSV has no name for {strange}, only for a forward with a full backward, OVERLAP_F_B"
            raise ScheduleError(known, "put the two one after the other, or run the schedule by pplab", rank, strange)
        for action in (action for item in row for action in parts(item)):
            if home.setdefault(action.stage, rank) != rank:
                both = f"stage {action.stage} is on ranks {home[action.stage]} and {rank}"
                raise ScheduleError(
                    f"{both}, and torch's CSV has one rank for each", "run the schedule by pplab", rank, action
                )


def _text(source: str | Path) -> str:
    if isinstance(source, Path):
        return source.read_text("utf-8-sig")
    if not isinstance(source, str):
        raise ValueError(f"expected CSV text or a path, got {shown(source)}")
    one_cell = "\n" not in source and "," not in source
    is_path = one_cell and (source.endswith(".csv") or os.path.isfile(source))  # Path.is_file raises for a long name
    return Path(source).read_text("utf-8-sig") if is_path else source
