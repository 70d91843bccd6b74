"""Actions and schedules as text: PyTorch's form of an action and of a file, and a grid of rows for people.

The file is CSV without a header: row i is rank i, rows are ragged, blank cells are ignored and never written.
It is what `torch.distributed.pipelining` dumps and loads (`_PipelineScheduleRuntime._dump_csv`, `_load_csv`). A lowered
file also names communication and sharding; reading keeps the computation.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import eq, itemgetter
from pathlib import Path

from .actions import Action, B, F, Kind, Overlap
from .errors import ScheduleError, expect, shown

_ACTION = re.compile(r"(\d{1,99})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d{1,99})")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_LOWERED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B)\d+|\d+(UNSHARD|RESHARD|REDUCE_GRAD)")


def parse(text: str) -> Action | Overlap:
    """Read one action from its text form.

    Raises ValueError with what was expected when the text isn't an action.

    >>> parse("1F3"), parse("(0F7;7B3)OVERLAP_F_B")
    (1F3, (0F7;7B3)OVERLAP_F_B)
    """
    if type(text) is not str:
        expect(str, text=text)
    text = text.strip()
    if match := _ACTION.fullmatch(text):
        stage, kind, microbatch = match.groups()
        return Action(int(stage), Kind(kind), int(microbatch))
    if match := _OVERLAP.fullmatch(text):
        return overlap(*(parse(half) for half in match.groups()))
    raise ValueError(
        f"{shown(text)} is not an action: expected stage, kind and microbatch such as 0F3, 2B0, 1I5, 1W5, "
        "or (0F7;7B3)OVERLAP_F_B"
    )


def overlap(forward: Action | Overlap, backward: Action | Overlap) -> Overlap:
    """Pair a forward with a full backward, checked."""
    pair = Overlap(forward, backward)
    legal = type(forward) is type(backward) is Action and forward.kind is F and backward.kind is B
    if not legal or (forward.stage, forward.microbatch) == (backward.stage, backward.microbatch):
        expected = "a forward, and a full backward of something else, as in (0F7;7B3)"
        raise ValueError(f"{shown(pair)} is not an overlap: expected {expected}")
    return pair


def checked(rows: object) -> tuple[tuple[Action | Overlap, ...], ...]:
    """Rows in which every item is an action or a legal overlap; text is parsed. ValueError for anything else."""
    ranks = [*rows] if _is_several(rows) else [None]
    if not all(map(_is_several, ranks)):
        raise ValueError(f"rows must be one sequence of actions per rank, got {shown(rows)}")
    return tuple(_checked_row(rank, tuple(row)) for rank, row in enumerate(ranks))


def _checked_row(rank: int, row: tuple[Action | Overlap | str, ...]) -> tuple[Action | Overlap, ...]:
    if not (kinds := set(map(type, row))) <= {Action, Overlap}:
        row = tuple(parse(item) if isinstance(item, str) else item for item in row)
        if strange := [shown(item) for item in row if type(item) not in (Action, Overlap)]:
            raise ValueError(f"rank {rank}: {strange[0]} is not an action: expected pplab.Action or text such as 0F3")
    if Overlap in kinds:  # made as objects: parsed ones have been checked
        _check_overlaps([item for item in row if type(item) is Overlap])
    return row


def _check_overlaps(pairs: Sequence[Overlap]) -> None:
    """Raise ValueError for the first that isn't legal: looked at one by one only where some might not be."""
    forwards, backwards = zip(*pairs, strict=True)
    kind, m = itemgetter(1), itemgetter(2)
    sound = {*map(type, forwards + backwards)} == {Action}
    sound = sound and {*map(kind, forwards)} == {F} and {*map(kind, backwards)} == {B}
    if not sound or any(map(eq, map(m, forwards), map(m, backwards))):
        for pair in pairs:
            overlap(*pair)


def _is_several(given: object) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, str) and getattr(given, "ndim", 1) > 0


def read_csv(source: str | Path) -> list[list[Action | Overlap]]:
    """The rows of a CSV text, or of the file at a path (a `Path`, or a text that names an existing file).

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
    return rows


@contextmanager
def reading(what: str, expected: str) -> Iterator[None]:
    """Make one ValueError of whatever damaged data raises."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # no damage: there is no such file, or it can't be opened
            raise
        found = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"{what} is damaged, or something else: expected {expected}; found {found}") from None


def write_csv(rows: Iterable[Iterable[Action | Overlap]]) -> str:
    """CSV text of rows, of computation alone or lowered."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([str(item) for item in row] for row in rows)
    return out.getvalue()


def grid(rows: Sequence[Sequence[Action | Overlap]]) -> list[str]:
    """A line per rank for people to read, with actions aligned by their place in the row."""
    cells = [[str(item) for item in row] for row in rows]
    widths = [max(len(row[c]) for row in cells if c < len(row)) for c in range(max(map(len, cells)))]
    label = len(str(len(cells) - 1))
    return [
        f"rank {rank:>{label}}  " + " ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=False)).rstrip()
        for rank, row in enumerate(cells)
    ]


def _text(source: str | Path) -> str:
    if isinstance(source, Path):
        return source.read_text("utf-8-sig")
    if not isinstance(source, str):
        raise ValueError(f"expected CSV text or a path, got {shown(source)}")
    one_cell = "\n" not in source and "," not in source
    is_path = one_cell and (source.endswith(".csv") or os.path.isfile(source))  # Path.is_file raises for a long name
    return Path(source).read_text("utf-8-sig") if is_path else source
