"""Answers that are schedules or functions that build them, and answers that are torch modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING

from pplab.actions import Action, Overlap
from pplab.costs import Costs
from pplab.lab import read_csv
from pplab.schedule import Schedule, plural
from pplab.simulator import simulate, validate
from pplab.timeline import Timeline

from .verdict import Verdict, Wrong, checker, readers_code, right, told

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pplab.lab import Case, Entry
    from pplab.runtime import Extra, Run


def actions_of(row: object) -> list:
    """A row's actions: those in a text, whatever stands between and around them, or those in a
    sequence of such texts, of actions, or of such sequences. Raises TypeError for anything else.
    """
    if isinstance(row, str):
        return _plain(row).replace("[", " ").replace("]", " ").replace(",", " ").split()
    if isinstance(row, (Action, Overlap)):
        return [row]
    if not isinstance(row, Iterable):
        raise TypeError(f'expected a row of actions, such as ["0F0", "0B0"], got {row!r}')
    return [
        each
        for item in row
        for each in (actions_of(item) if isinstance(item, (str, list, tuple)) else [item])
    ]


def rows_of(rows: object) -> list[list]:
    """The actions of each row: of a schedule, of a text with a line, brackets or quotes for each
    rank, or of rows as `actions_of` takes them. Raises TypeError for anything else.
    """
    if isinstance(rows, str):
        rows = _quoted(rows)
    if isinstance(rows, str):
        text = _plain(rows)
        lines = re.findall(r"\[([^\[\]]*)\]", text) or text.splitlines()
        rows = [
            line
            for line in (re.sub(r"(?i)^\s*rank \d+:?", "", each) for each in lines)
            if line.strip()
        ]
    if not isinstance(rows, (Schedule, Iterable)):
        raise TypeError(
            f'expected a row of actions for each rank, such as [["0F0", "0B0"]], got {rows!r}'
        )
    return [actions_of(row) for row in (rows.rows if isinstance(rows, Schedule) else rows)]


def _quoted(text: str) -> object:
    """The list of texts (or lists of texts) in a text, or the text itself if it has none."""

    def of_texts(found: object) -> bool:
        return isinstance(found, str) or (
            isinstance(found, (list, tuple)) and all(map(of_texts, found))
        )

    if "'" in text or '"' in text:
        with suppress(ValueError, SyntaxError):
            found = ast.literal_eval(text.strip())
            return found if of_texts(found) else text
    return text


def _plain(text: str) -> str:
    """A text without quotes, whose brackets are all square, except for those of overlaps."""
    if "OVERLAP" not in text:
        text = text.translate(str.maketrans("(){}", "[][]"))
    return re.sub(r";\s+", ";", text.translate(str.maketrans("", "", "'\"")))


def whole(row: Iterable[object], rank: int | None = None) -> list[str]:
    """The texts of a row's actions, all forwards and whole backwards. Raises `Wrong` for others. If
    a rank has only its own stage, "F0" and "f0" are "2F0" on rank 2.
    """
    texts = []
    for action in row:
        given = str(action) if isinstance(action, (Action, Overlap)) else action
        text = str(given).strip().upper()
        text = f"{rank}{text}" if rank is not None and re.fullmatch(r"[FB]\d+", text) else text
        if not re.fullmatch(r"\d+[FB]\d+", text):
            known = re.fullmatch(r"\d+[IW]\d+|.*OVERLAP.*|\d*(SEND|RECV)_[FB]\d+", text)
            raise Wrong(
                f"{given!r} is not an action{' of this chapter' if known else ''}: expected a "
                "forward such as 0F3 or a backward such as 0B3"
            )
        texts.append(text)
    return texts


# How `schedule_of` reads the row of a rank: before the chapter that cuts backwards in half, by
# `whole`.
_READ: ContextVar[Callable[[list, int], list]] = ContextVar("read", default=lambda row, rank: row)


def in_whole_backwards(
    stage_per_rank: bool,
) -> Callable[[Callable[..., Verdict]], Callable[..., Verdict]]:
    """Decorate a checker of a chapter that comes before split backwards, overlaps, bidirectional
    schedules and replicas. Answers can't have any of them, and errors don't offer any.
    """

    def decorate(check: Callable[..., Verdict]) -> Callable[..., Verdict]:
        @wraps(check)
        def checked(*answer: object) -> Verdict:
            token = _READ.set(lambda row, rank: whole(row, rank if stage_per_rank else None))
            try:
                verdict = check(*answer)
            finally:
                _READ.reset(token)
            says = re.sub(r" \(or \d+I\d+ and \d+W\d+\)", "", verdict.says)
            says = re.sub(r", 2B0, 1I5, 1W5, or .*?OVERLAP_W_I", " or 2B0", says)
            return Verdict(
                verdict.right,
                re.sub(r"(a stage has one rank); only .*? hold it again", r"\1", says),
            )

        return checked

    return decorate


def is_file(rows: object) -> bool:
    """Whether an answer is the name of a CSV file."""
    return isinstance(rows, str) and rows.strip().endswith(".csv")


def schedule_of(
    rows: object, shape: tuple[int, int, int] | None = None, wanted: str = ""
) -> Schedule:
    """The legal schedule that rows make. Raises `Wrong`, which tells what is wrong with them.

    Takes what `rows_of` takes, and the name of a CSV file. If it must have a `shape` (ranks, stages
    and microbatches), `wanted` is that shape in words.
    """
    with told("", ValueError, TypeError, OSError):
        given = read_csv(rows.strip()) if is_file(rows) else rows
        read = [_READ.get()(row, rank) for rank, row in enumerate(rows_of(given))]
        if isinstance(given, str):
            schedule = read_csv("".join(",".join(row) + "\n" for row in read))
        else:
            schedule = given if isinstance(given, Schedule) else Schedule(read)
        validate(schedule)
    if shape is not None and shape_of(schedule) != shape:
        raise Wrong(f"{wanted}; your schedule has {sizes_of(schedule)}")
    return schedule


def schedule_from(function: Callable[..., object], *arguments: object) -> Schedule:
    """The legal schedule whose rows the reader's function returns. Raises `Wrong` if it doesn't
    return one.
    """
    with readers_code():
        rows = function(*arguments)
    if rows is None or rows is ...:
        raise Wrong(f"your function returned {rows!r}: it must return the rows")
    return schedule_of(rows)


def shape_of(schedule: Schedule) -> tuple[int, int, int]:
    """The numbers of ranks, stages and microbatches of a schedule."""
    return schedule.num_ranks, schedule.num_stages, schedule.num_microbatches


def sizes_of(schedule: Schedule) -> str:
    """A schedule's sizes in words, to tell a reader that they are wrong."""
    ranks, stages = plural(schedule.num_ranks, "rank"), plural(schedule.num_stages, "stage")
    on = ", ".join(map(str, schedule.placement))
    return f"{ranks}, {stages} (on rank {on}) and {plural(schedule.num_microbatches, 'microbatch')}"


@checker("a function of (num_ranks, num_microbatches)")
def builder(
    build: Callable[[int, int], object],
    judge: Callable[[Timeline, int, int], str | None],
    why: str,
    grid: Iterable[tuple[int, int]] = ((2, 4), (4, 8), (3, 5), (1, 3), (4, 2)),
    costs: Costs | None = None,
    misfit: Callable[[Schedule, int, int], str | None] | None = None,
) -> Verdict:
    """Check a function from (num_ranks, num_microbatches) to rows on several sizes.

    `misfit` looks at the schedule's sizes and placement, and `judge` at the simulated timeline.
    Each returns what is wrong, or None. By default a schedule must have one stage per rank.
    """
    misfit = misfit or _other_sizes
    for P, M in grid:
        with told(f"at {P} ranks and {M} microbatches: "):
            schedule = schedule_from(build, P, M)
            if fault := misfit(schedule, P, M) or judge(simulate(schedule, costs), P, M):
                raise Wrong(fault)
    return right(why)


def _other_sizes(schedule: Schedule, num_ranks: int, num_microbatches: int) -> str | None:
    if shape_of(schedule) != (num_ranks, num_ranks, num_microbatches):
        return (
            f"expected a stage on each of {num_ranks} ranks, and {num_microbatches} microbatches; "
            "your schedule has " + sizes_of(schedule)
        )
    return None


def is_module(answer: object) -> bool:
    """Whether an answer is a torch module."""
    from torch import nn

    return isinstance(answer, nn.Module)


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Normally distributed tensors, the same at every call."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def trained(
    schedule: Schedule,
    stages: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    *extras: Extra,
    **options: object,
) -> Run:
    """A run of stages from x (B, ...) to y on processes of their own, its gradients compared with
    one process's.
    """
    from torch import nn

    from pplab.lab.models import Modules
    from pplab.runtime import Batch, Pool

    workload = Modules(stages, Batch((x,), y), nn.functional.mse_loss)
    with Pool(schedule.num_ranks, device="cpu") as pool:
        return pool.train(schedule, workload, *extras, check_gradients=True, **options)


def row_of(case: Case, answer: Mapping[str, object], num_microbatches: int) -> Entry:
    """The row of the ledger that a dict for `Case.row` asks for, with so many microbatches unless
    it gives a different number.
    """
    if "schedule" not in answer:
        raise Wrong(
            "which schedule? Expected the key schedule among "
            f"{', '.join(map(str, answer)) or 'none'}"
        )
    with told("", ValueError, TypeError):
        row = case.row(**{"num_microbatches": num_microbatches, **answer})
    if row.timeline is None:
        raise Wrong(
            f"{row.what} is no schedule, but what schedules are measured against: name a schedule"
        )
    return row


def told_bill(row: Entry, best: float, near: float) -> Verdict:
    """Tell whether a row of the ledger fits, and is within `near` dollars of `best`."""
    bill = f"{row.step_s:.2f} s, ${row.dollars:.2f}"
    if not row.fits:
        full = max(range(len(row.held_gb)), key=row.held_gb.__getitem__)
        raise Wrong(
            f"{bill}, but it doesn't fit: rank {full} would hold {row.held_gb[full]:.1f} GB"
        )
    above = row.dollars - best
    if above > near:
        raise Wrong(f"it fits: {bill}, which is ${above:.2f} more than the best that we know")
    if above < -0.005:
        return right(f"{bill}, which is ${-above:.2f} less than the best that we knew: tell us")
    return right(f"{bill}, {f'${above:.2f} above ' if above > 0.005 else ''}the best that we know")
