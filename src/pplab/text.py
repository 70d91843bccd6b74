"""Actions and schedules as text: PyTorch's form of an action and of a file, and a grid of rows for people.

The file is CSV without a header: row i is rank i, rows are ragged, blank cells are ignored and never written.
It is what `torch.distributed.pipelining` dumps and loads (`_PipelineScheduleRuntime._dump_csv`, `_load_csv`). A lowered
file also names communication and sharding; reading keeps the computation.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from .actions import Action, B, F, Kind, Overlap
from .errors import ScheduleError

_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_LOWERED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B)\d+|\d+(UNSHARD|RESHARD|REDUCE_GRAD)")


def parse(text: str) -> Action | Overlap:
    """Read one action from its text form.

    Raises ValueError with what was expected when the text isn't an action.

    >>> parse("1F3"), parse("(0F7;7B3)OVERLAP_F_B")
    (1F3, (0F7;7B3)OVERLAP_F_B)
    """
    text = text.strip()
    if match := _ACTION.fullmatch(text):
        stage, kind, microbatch = match.groups()
        return Action(int(stage), Kind(kind), int(microbatch))
    if match := _OVERLAP.fullmatch(text):
        return overlap(*(parse(half) for half in match.groups()))
    raise ValueError(
        f"{text!r} is not an action: expected stage, kind and microbatch such as 0F3, 2B0, 1I5, 1W5, "
        "or (0F7;7B3)OVERLAP_F_B"
    )


def overlap(forward: Action | Overlap, backward: Action | Overlap) -> Overlap:
    """Pair a forward with a full backward, checked."""
    pair = Overlap(forward, backward)
    legal = type(forward) is type(backward) is Action and forward.kind is F and backward.kind is B
    if not legal or (forward.stage, forward.microbatch) == (backward.stage, backward.microbatch):
        raise ValueError(
            f"{pair} is not an overlap: expected a forward, and a full backward of something else, as in (0F7;7B3)"
        )
    return pair


def read_csv(source: str | Path) -> list[list[Action | Overlap]]:
    """The rows of a CSV text, or of the file at a path (a `Path`, or a text that names an existing file).

    Raises FileNotFoundError for a missing file, ScheduleError for a cell that isn't an action or a file without any.
    """
    text = _text(source)
    rows: list[list[Action | Overlap]] = []
    for rank, cells in enumerate(csv.reader(io.StringIO(text))):
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
        return source.read_text()
    if not isinstance(source, str):
        raise ValueError(f"expected CSV text or a path, got {source!r}")
    one_cell = "\n" not in source and "," not in source
    return Path(source).read_text() if one_cell and (source.endswith(".csv") or Path(source).is_file()) else source
