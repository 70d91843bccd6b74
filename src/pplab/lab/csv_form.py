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

from ..actions import Action, Overlap
from ..errors import ScheduleError, shown
from ..schedule import Schedule
from ..text import parse

_LOWERED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B)\d+|\d+(UNSHARD|RESHARD|REDUCE_GRAD)")


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
    return Schedule(rows, name)


def to_csv(rows: Schedule | Iterable[Iterable[Action | Overlap]]) -> str:
    """CSV text of a schedule, or of rows that have been lowered."""
    rows = rows.rows if isinstance(rows, Schedule) else rows
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([str(item) for item in row] for row in rows)
    return out.getvalue()


def _text(source: str | Path) -> str:
    if isinstance(source, Path):
        return source.read_text("utf-8-sig")
    if not isinstance(source, str):
        raise ValueError(f"expected CSV text or a path, got {shown(source)}")
    one_cell = "\n" not in source and "," not in source
    is_path = one_cell and (source.endswith(".csv") or os.path.isfile(source))  # Path.is_file raises for a long name
    return Path(source).read_text("utf-8-sig") if is_path else source
