"""Actions and schedules as text: PyTorch's form of an action, and a grid of rows for people to
read.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from .actions import COMPUTE, Action, Item, Kind, Overlap
from .errors import expect, shown

_ACTION = re.compile(r"(\d{1,99})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d{1,99})")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_([FBIW])_([FBIW])")
_PAIRS = "(0F7;7B3)OVERLAP_F_B or (0W1;0I2)OVERLAP_W_I"


def parse(text: str) -> Item:
    """Read one action from its text form.

    Raises ValueError with what was expected when the text isn't an action.

    >>> parse("1F3"), parse("(0F7;7B3)OVERLAP_F_B")
    (1F3, (0F7;7B3)OVERLAP_F_B)
    """
    expect(str, text=text)
    text = text.strip()
    if match := _ACTION.fullmatch(text):
        stage, kind, microbatch = match.groups()
        return Action(int(stage), Kind(kind), int(microbatch))
    if match := _OVERLAP.fullmatch(text):
        pair = overlap(parse(match[1]), parse(match[2]))
        if (pair.first.kind, pair.second.kind) != match.groups()[2:]:
            raise ValueError(f"{shown(text)} is not an overlap: expected {pair}")
        return pair
    raise ValueError(
        f"{shown(text)} is not an action: expected stage, kind and microbatch such as 0F3, 2B0, "
        f"1I5, 1W5, or {_PAIRS}"
    )


def overlap(first: Any, second: Any) -> Overlap:
    """Pair two computations into an overlap. Raises ValueError where one of them waits for the
    other, as all that a stage does for a microbatch would.
    """
    both = first, second
    computes = all(type(a) is Action and type(a.kind) is Kind and a.kind in COMPUTE for a in both)
    if computes and (first.stage, first.microbatch) != (second.stage, second.microbatch):
        return Overlap(*both)
    raise ValueError(
        f"{shown(Overlap(*both) if computes else both)} is not an overlap: expected two "
        f"computations, of different stages or microbatches, as in {_PAIRS}"
    )


def checked(rows: Any) -> tuple[tuple[Item, ...], ...]:
    """Rows in which every item is an action or a legal overlap. Text is parsed, and anything else
    raises ValueError.
    """
    ranks = [*rows] if _is_several(rows) else [rows]
    if not all(map(_is_several, ranks)):
        raise ValueError(f"rows must be one sequence of actions per rank, got {shown(rows)}")
    return tuple(_checked_row(rank, tuple(row)) for rank, row in enumerate(ranks))


def _checked_row(rank: int, row: tuple) -> tuple[Item, ...]:
    if not (kinds := set(map(type, row))) <= {Action, Overlap}:
        row = tuple(parse(item) if isinstance(item, str) else item for item in row)
        if strange := [shown(item) for item in row if type(item) not in (Action, Overlap)]:
            raise ValueError(
                f"rank {rank}: {strange[0]} is not an action: "
                "expected pplab.Action or text such as 0F3"
            )
    for item in row if Overlap in kinds else ():  # made as objects: parsed ones have been checked
        if type(item) is Overlap:
            overlap(*item)
    return row


def _is_several(given: object) -> bool:
    is_number = getattr(given, "ndim", 1) == 0  # numpy's and torch's have `__iter__`, too
    return isinstance(given, Iterable) and not isinstance(given, str) and not is_number


def grid(rows: Sequence[Sequence[Item]]) -> list[str]:
    """A line per rank for people to read, with actions aligned by their place in the row."""
    cells = [[str(item) for item in row] for row in rows]
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    digits = len(str(len(cells) - 1))
    lines = []
    for rank, row in enumerate(cells):
        aligned = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        lines.append(f"rank {rank:>{digits}}  {' '.join(aligned).rstrip()}")
    return lines
