"""PyTorch's CSV form of a schedule: no header, row i is rank i, ragged rows, blank cells ignored and never written.

It is what `torch.distributed.pipelining` dumps and loads (`_PipelineScheduleRuntime._dump_csv`, `_load_csv`). A lowered
file also names communication and sharding; reading keeps the computation.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path

from .actions import Action, Overlap, parse
from .errors import ScheduleError

_LOWERED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B)\d+|\d+(UNSHARD|RESHARD|REDUCE_GRAD)")


def read(source: str | Path) -> list[list[Action | Overlap]]:
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


def write(rows: Iterable[Iterable[Action | Overlap]]) -> str:
    """CSV text of rows, of computation alone or lowered."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([str(item) for item in row] for row in rows)
    return out.getvalue()


def _text(source: str | Path) -> str:
    if isinstance(source, Path):
        return source.read_text()
    if not isinstance(source, str):
        raise ValueError(f"expected CSV text or a path, got {source!r}")
    one_cell = "\n" not in source and "," not in source
    return Path(source).read_text() if one_cell and (source.endswith(".csv") or Path(source).is_file()) else source
