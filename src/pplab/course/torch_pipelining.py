"""Checkers of chapter 9, with the tables that its exercises are about. Two of them run torch on two processes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..actions import Action
from ..builders import build
from ..lab.queues import compute_of, parse_lowered, simulate_lowered
from ..lowering import LoweredRow, lower
from ..schedule import Schedule
from ..simulator import simulate
from ..text import parse
from .answers import drawn, is_module, rows_of, schedule_of, trained
from .verdict import (
    Verdict,
    Wrong,
    checker,
    checker_of_each,
    first_wrong,
    number,
    one_or_several,
    readers_code,
    right,
    told,
    wrong,
)

if TYPE_CHECKING:
    from torch import nn

_VERDICTS = ("runs", "missing", "deadlock", "losses")

_TABLES = {
    "A": ("0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F1,1B0,1F2,1B1,1F3,1B2,1F4,1B3\n", "missing"),
    "B": ("0F0,0F1,0F2,0F3,0B3,0B2,0B1,0B0\n1F0,1F1,1F2,1F3,1B3,1B2,1B1,1B0\n", "runs"),
    "C": ("0F1,0F0,0B1,0F3,0B0,0F2,0B3,0B2\n1F1,1B1,1F0,1B0,1F3,1B3,1F2,1B2\n", "losses"),
    "D": ("0F0,0B0,0F1,0F2,0B1,0F3,0B2,0B3\n1F0,1F1,1B0,1B1,1F2,1F3,1B2,1B3\n", "deadlock"),
}
_CLUES = {
    "A": "count the forwards of rank 1: `pp.validate` names the one that isn't there, and the one too many",
    "B": "nothing waits for ever, every action is there, and rank 1's forwards are in order: backwards may be in any",
    "C": "in what order does the last stage run its forwards, and where does torch look for their losses?",
    "D": "what does rank 0 wait for at 0B0? and rank 1, before 1B0?",
}

_STALLED = 70  # interleaved 1F1B on 4 ranks with 8 microbatches, torch's rows, one queue per rank
_REPAIRED = 60


@one_or_several
@checker()
def lowered(answer: object) -> Verdict:
    """Write both rows of 1F1B on two ranks with two microbatches, sends and receives included."""
    rows = _rows(answer, build("1F1B", num_ranks=2, num_microbatches=2))
    with told("", ValueError):
        simulate_lowered(rows)
    return right("every message has a send after what makes it and a receive before what needs it, in one order")


def accumulated(answer: object) -> Verdict:
    """Two steps, M = 8, default options, gradients not cleared in between: what share of the sum of both is left?"""
    traps = {
        1.125: "that is in units of one step's gradient; the sum of both is 2",
        1.0: "the second step divides again what the first one left",
        0.125: "the second step's own gradient is divided once",
        1 / 16: "the second step's own gradient is divided once, as it should be",
        0.5: "something of the first step is left: an eighth",
    }
    return number(answer, 9 / 16, "1 + 1/8 of one step's gradient, where 2 were wanted", traps=traps)


def tables() -> dict[str, str]:
    """Four schedules of two ranks and four microbatches as CSV text."""
    return {name: text for name, (text, _) in _TABLES.items()}


@checker_of_each("ABCD")
def judge(answer: object) -> Verdict:
    """What becomes of each table under torch: "runs", "missing", "deadlock" or "losses"."""
    if name := first_wrong(answer, {name: truth for name, (_, truth) in _TABLES.items()}, _VERDICTS):
        return wrong(f"{name}: not {answer[name]!r}; {_CLUES[name]}")
    return right("A is torch's own listing; C is legal, and only torch's bookkeeping of losses objects")


def stalled() -> tuple[LoweredRow, ...]:
    """torch's rows of interleaved 1F1B on 4 ranks with 8 microbatches."""
    from ..lab.torch_rows import lower_by_torch

    return lower_by_torch(build("Interleaved1F1B", num_ranks=4, num_microbatches=8))


def later(rows: Sequence[LoweredRow], receive: str, places: int) -> tuple[LoweredRow, ...]:
    """The rows with one receive moved `places` to the right in its row."""
    action = parse(receive)
    if not any(action in row for row in rows):
        raise ValueError(f"no row has {receive}: expected a receive such as 4RECV_F0")
    moved = []
    for row in rows:
        if action in row:
            at = row.index(action)
            row = (*row[:at], *row[at + 1 :])
            row = (*row[: at + places], action, *row[at + places :])
        moved.append(tuple(row))
    return tuple(moved)


@one_or_several
@checker()
def repaired(answer: object) -> Verdict:
    """Rows of the same computation that take at most 60 with one queue per rank."""
    rows = _rows(answer, build("Interleaved1F1B", num_ranks=4, num_microbatches=8))
    with told("too far: ", ValueError):
        takes = simulate_lowered(rows).makespan
    if takes > _REPAIRED:
        better = "as long as before" if takes == _STALLED else f"{takes:g}"
        return wrong(f"that takes {better}; look for a receive that stands at the head while sends wait behind it")
    return right(f"{takes:g} instead of {_STALLED}; without queues it is 57")


@one_or_several
@checker()
def run_csv(answer: object) -> Verdict:
    """A CSV of two ranks and four microbatches, shorter than 1F1B, that torch runs with one process's gradients."""
    schedule = schedule_of(answer, (2, 2, 4), "expected 2 ranks, a stage on each, and 4 microbatches")
    takes, of_1f1b = (simulate(s).makespan for s in (schedule, build("1F1B", num_ranks=2, num_microbatches=4)))
    if takes >= of_1f1b:
        return wrong(f"it takes {takes} where F = I = W = 1, and 1F1B takes {of_1f1b}: split the backwards")
    from torch import nn

    ran = by_torch(schedule, [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6)])
    return right(f"{takes} instead of {of_1f1b}, by torch, gradients {ran}")


@checker("a module", is_module)
def stage_for_torch(answer: object) -> Verdict:
    """A module from (B, T, 6) to (B, T, 6) that starts with a Linear and passes torch's split backward."""
    import torch
    from torch import nn

    if not isinstance(next((m for m in answer.modules() if not list(m.children())), None), nn.Linear):
        return wrong("its first layer should be the nn.Linear(6, 6) of the exercise")
    with readers_code("it fails on a tensor of (2, 3, 6):"):
        made = answer(torch.zeros(2, 3, 6))
    if not isinstance(made, torch.Tensor) or made.shape != (2, 3, 6):
        return wrong("it should return a tensor of the shape that it takes")
    if made._is_view():
        return wrong(
            "it still returns a view, as nn.Linear with a bias does: let a layer follow that makes a new tensor"
        )
    ran = by_torch(build("ZBVZeroBubble", num_ranks=2, num_microbatches=4), [copy.deepcopy(answer) for _ in range(4)])
    return right(f"ZB-V by torch, gradients {ran}")


def by_torch(schedule: Schedule, stages: Sequence[nn.Module]) -> str:
    """What a run by torch on two processes says of its gradients; `Wrong` where it fails, or they aren't right."""
    from ..lab import TorchEngine
    from ..runtime import RankError

    try:
        found = trained(schedule, stages, *drawn(1, (2, 8, 3, 6))[0], TorchEngine(), steps=1).gradients
    except (RankError, ValueError) as error:
        raise Wrong(" ".join(str(error).split("In rank")[0].split())) from None
    if not found.equal:
        raise Wrong(f"the gradients are {found}")
    return "equal to one process"


def _rows(answer: object, wanted: Schedule) -> tuple[LoweredRow, ...]:
    """The rows of an answer that compute what is wanted and send what that needs; `Wrong` for others."""
    with told("expected rows as CSV text or as actions: ", ValueError, TypeError, AttributeError):
        rows = parse_lowered(rows_of(answer))
    if len(rows) != wanted.num_ranks:
        raise Wrong(f"expected {wanted.num_ranks} rows, got {len(rows)}")
    for rank, (row, other) in enumerate(zip(compute_of(rows).rows, wanted.rows, strict=True)):
        if row != other:
            given, other = (", ".join(map(str, actions)) for actions in (row, other))
            raise Wrong(f"rank {rank} should compute {other}, and yours {given}")
    if fault := _messages_amiss(rows, wanted):
        raise Wrong(fault)
    return rows


def _messages_amiss(rows: Sequence[LoweredRow], wanted: Schedule) -> str | None:
    """A send or receive that is missing, too many, or on the wrong side of its action."""
    for rank, (row, other) in enumerate(zip(rows, lower(wanted), strict=True)):
        messages = [x for x in other if isinstance(x, Action) and "_" in x.kind.value]
        for message in messages:
            if row.count(message) != 1:
                times = {0: "is missing"}.get(row.count(message), "stands more than once")
                return f"rank {rank}: {message} {times}"
            way, letter = message.kind.value.split("_")
            user = next(x for x in row if x in _users(message, letter))
            if way == "SEND" and row.index(message) < row.index(user):
                return f"rank {rank}: {message} stands before {user}, which makes it"
            if way == "RECV" and row.index(message) > row.index(user):
                return f"rank {rank}: {message} stands after {user}, which needs it"
        extra = [x for x in row if isinstance(x, Action) and "_" in x.kind.value and x not in messages]
        if extra:
            return f"rank {rank}: nobody needs {extra[0]}"
    return None


def _users(message: Action, letter: str) -> tuple[Action, ...]:
    kinds = ("F",) if letter == "F" else ("B", "I")
    return tuple(parse(f"{message.stage}{kind}{message.microbatch}") for kind in kinds)
