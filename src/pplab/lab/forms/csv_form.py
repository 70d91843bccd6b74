"""Schedules as files in PyTorch's form.

A file is CSV without a header: row i is rank i, rows are ragged, and blank cells are ignored and
never written. `torch.distributed.pipelining` dumps and loads it
(`_PipelineScheduleRuntime._dump_csv`, `_load_csv`). A lowered file also names communication and
sharding, and reading keeps only the computation. Of pairs of actions torch knows only a forward
with a full backward, OVERLAP_F_B. Other pairs are written in the same way, OVERLAP_F_I and so on,
and only pplab reads them. Torch's runtime prints the same rows in its errors, as a table with a
column per rank or as lists, and these are read, too.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

from ...actions import Action, B, F, Overlap, parts
from ...errors import ScheduleError, expect, shown
from ...schedule import Schedule
from ...text import parse
from .safe_text import printable

_LOWERED = re.compile(r"\d+(SEND|RECV|WAIT_SEND)_[FB]\d+|\d+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD)")

_HINTS = (
    "write one action per cell, without headers, or leave the cell blank",
    "leave out the column that numbers the ranks: row i is rank i",
)

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
    """Read the schedule in a CSV text, or in the file at a path (a `Path`, or a text that names an
    existing file).

    What torch prints is read as well: the table in its errors ("Rank 0", "Step 0: 0F0"), also amid
    other text, and lists of actions. Cells may have spaces or semicolons between them if the text
    has no comma. Sends, receives and sharding of a lowered file are left out without a check,
    because `pplab.lower` derives them. To check those that a file has, use `simulate_lowered`.

    Blank rows at the end, as spreadsheets write them, are ignored like blank cells. Raises
    FileNotFoundError for a missing file, and ScheduleError for a cell that isn't an action, a table
    with a row per step, or a file without any action.
    """
    rows: list[list[Action | Overlap]] = []
    for rank, cells in enumerate(found := cells_of(_text(source))):
        row = []
        for column, cell in enumerate(cells):
            if not cell or _LOWERED.fullmatch(cell):
                continue
            try:
                row.append(parse(cell))
            except ValueError as error:
                hint = (
                    f"write {cell.upper()}"
                    if re.fullmatch(r"\d+[fbiw]\d+", cell)
                    else _HINTS[cell.isdigit()]
                )
                where = f"CSV row {rank + 1} (rank {rank}), column {column + 1}"
                raise ScheduleError(f"{where}: {error}", hint, rank, cell) from None
        rows.append(row)
    if not any(rows):
        raise ScheduleError(
            "the CSV holds no action", "give one row per rank, such as 0F0,0F1,0B0,0B1"
        )
    columns = (
        [x for x in column if x and not _LOWERED.fullmatch(x)] for column in zip_longest(*found)
    )
    if not _has_a_home(rows) and _has_a_home([[*map(parse, column)] for column in columns]):
        raise ScheduleError(
            "this table has a row for each step and a column for each rank",
            "turn it: write a row for each rank",
        )
    expect(str, name=name)
    return Schedule(rows, printable(name))  # it is a file's name, mostly


def cells_of(text: str) -> list[list[str]]:
    """A list of cells per rank, from a CSV text or from what torch prints. Raises ScheduleError for
    other texts.
    """
    if header := re.search(r"^(.*?)(Rank 0\b.*)$", text, re.MULTILINE):
        starts = [
            header.start(2) - header.start() + rank.start()
            for rank in re.finditer(r"Rank \d+", header[2])
        ]
        steps = re.findall(
            r"^.*?Step \d+: .*$", text[header.end() :].replace(" <-- ERROR HERE", ""), re.MULTILINE
        )
        return [
            [_plain(step[start:end]) for step in steps]
            for start, end in zip(starts, [*starts[1:], None], strict=True)
        ]
    if text.lstrip().startswith(("[", "{")):
        return [_split(row) for row in re.findall(r"\[([^\[\]]*)\]", text.replace("'", ""))]
    if "," not in text:
        return [*map(_split, text.strip().splitlines())]
    try:
        lines = [[*map(_plain, cells)] for cells in csv.reader(io.StringIO(text))]
    except csv.Error as error:
        raise ScheduleError(
            f"this is no CSV ({error})", "write one action per cell, such as 0F0,0B0"
        ) from None
    while lines and not "".join(lines[-1]):
        lines.pop()
    return lines


def lowered_cells(text: str) -> list[str]:
    """The cells of a text that name communication or sharding."""
    return [cell for row in cells_of(text) for cell in row if _LOWERED.fullmatch(cell)]


def _split(line: str) -> list[str]:
    return [*map(_plain, re.findall(r"\([^()]*\)\w*|[^,;\s]+", line))]


def _plain(cell: str) -> str:
    """A cell as torch writes it today: 0F1 for F1_s0, and nothing for None."""
    return re.sub(r"([FBIW])(\d+)_s(\d+)", r"\3\1\2", cell.strip().replace("None", ""))


def _has_a_home(rows: Iterable[Iterable[Action | Overlap]]) -> bool:
    """Whether each stage is in a single row."""
    stages = [{action.stage for item in row for action in parts(item)} for row in rows]
    return len(set().union(*stages)) == sum(map(len, stages))


def to_csv(
    rows: Schedule | Iterable[Iterable[Action | Overlap]], *, for_torch: bool = False
) -> str:
    """Write a schedule, or rows that have been lowered, as CSV text.

    A file has no durations, and it doesn't tell into how many slices a microbatch is cut. A slice
    is written as the microbatch as which its schedule counts it. torch runs it like that, without
    the keys and values that slices hand on.

    `for_torch` writes only what torch reads. ScheduleError then names what it can't read: two
    actions at once that aren't a forward and a full backward, or a schedule with a stage on two
    ranks.

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
    """Raise ScheduleError if torch would take one microbatch's loss for a different one's. It finds
    a loss by its place in a list that grows with the last stage's forwards.
    """
    last = schedule.num_stages - 1
    halves = (a for row in schedule.rows for item in row for a in parts(item))
    order = [a.microbatch for a in halves if a.stage == last and a.kind is F]
    if order != sorted(order):
        raise ValueError(
            f"{schedule.name} runs the forwards of its last stage in the order "
            f"{', '.join(map(str, order))}, and torch's runtime would take one microbatch's loss "
            "for another's: run them as 0, 1, 2, ..., or by pplab's engine"
        )


def _check_for_torch(rows: list[list[Action | Overlap]]) -> None:
    home: dict[int, int] = {}
    for rank, row in enumerate(rows):
        if strange := unknown_to_torch(row):
            known = (
                f"torch's CSV has no name for {strange}, only for a forward with a full backward, "
                "OVERLAP_F_B"
            )
            raise ScheduleError(
                known,
                "put the two one after the other, or run the schedule by pplab",
                rank,
                strange,
            )
        for action in (action for item in row for action in parts(item)):
            if home.setdefault(action.stage, rank) != rank:
                both = f"stage {action.stage} is on ranks {home[action.stage]} and {rank}"
                raise ScheduleError(
                    f"{both}, and torch's CSV has one rank for each",
                    "run the schedule by pplab",
                    rank,
                    action,
                )


def _text(source: str | Path) -> str:
    if isinstance(source, Path):
        return source.read_text("utf-8-sig")
    if not isinstance(source, str):
        raise ValueError(f"expected CSV text or a path, got {shown(source)}")
    one_cell = "\n" not in source and "," not in source
    # Path.is_file raises for a long name
    is_path = one_cell and (source.endswith(".csv") or os.path.isfile(source))
    return Path(source).read_text("utf-8-sig") if is_path else source
