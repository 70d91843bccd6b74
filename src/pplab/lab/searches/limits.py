"""Check whether a schedule stays within a memory limit, and name the first item at which it
doesn't.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ...costs import check_length, of_stage, per_stage
from ...errors import ScheduleError, expect
from ...footprint import Memory
from ...schedule import Schedule
from ...simulator import validate


def check_memory(
    schedule: Schedule, limit: float | Sequence[float], memory: Memory | None = None
) -> None:
    """Raise ScheduleError unless every rank can run its row to the end within a limit.

    `limit` is the most that a rank may hold, or one value per rank, in the unit of `memory`.
    Without `memory` it counts forwards whose activations are held, as `Schedule.peak_in_flight`
    does.

    The error describes the first fault, with its rank, its action, its cause and what to change.
    """
    validate(schedule)
    memory = Memory(unit="forwards' activations") if memory is None else memory
    expect(Memory, memory=memory)
    limits, unit = per_stage("limit", limit, inf), memory.unit and " " + memory.unit
    check_length("limit", limits, schedule.num_ranks, "rank")
    memory.check(schedule.num_stages)
    for rank, row in enumerate(schedule.rows):
        most, levels = of_stage(limits, rank), list(memory.levels(row))
        before = memory.constant(schedule.stages_of(rank))
        for item, (during, after) in zip(row, levels, strict=True):
            if during > most:
                cause = f"memory limit: rank {rank} holds {before:g}{unit} when it reaches {item}, "
                cause += f"which needs {during - before:g} more, and the limit is {most:g}"
                remedy = f"run a backward before {item}, or raise the limit to {max(levels)[0]:g}"
                raise ScheduleError(cause, remedy, rank, item)
            before = after
