"""Three ways to send: who waits for a message that it sends, in which framework."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

from ...actions import COMPUTE, RECV_B, RECV_F, SEND_B, SEND_F, F
from ...builders import build
from ...costs import Costs
from ...errors import unknown
from ...lowering import LoweredRow, lower
from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import Timeline
from .queues import simulate_lowered

SENDS = ("nobody waits", "both wait", "forwards wait")
_WHOSE = {  # schedules are sent so
    "both wait": {"1F1B": "Megatron-LM, torch", "GPipe": "torch"},
    "forwards wait": {"Interleaved1F1B": "Megatron-LM from core 0.18 on"},
}


def simulate_sends(schedule: Schedule, costs: Costs | None = None, sends: str = SENDS[0]) -> Timeline:
    """Predict the timeline of a schedule whose ranks wait for what they send, as their framework does. `sends`:

    - "nobody waits": as `simulate`, as pplab's executor and torch's interpreter of rows;
    - "both wait": 1F1B as Megatron-LM sends it. A message travels once its receiver has asked for it, which a rank does
      when it needs it, and its sender stands still until it has arrived. Torch's Schedule1F1B takes as long with equal
      stages, and never longer. Torch's ScheduleGPipe asks as late, and waits for its sends where that costs no time;
    - "forwards wait": interleaved 1F1B as Megatron-LM sends it since core 0.18, for at least 2P microbatches. A rank
      asks for a message behind its last action of that kind, and stands still until what a forward sends has arrived;
      in the cool-down for what backwards send, too.

    Raises ValueError for rows that no framework sends so, and otherwise as `simulate`.

    >>> one_f_one_b = build("1F1B", num_ranks=4, num_microbatches=8)
    >>> [simulate_sends(one_f_one_b, Costs(latency=1), sends).makespan for sends in SENDS[:2]]
    [49, 52]
    """
    if sends == SENDS[0]:
        return simulate(schedule, costs)
    rows, waits = posted(schedule, sends)
    return simulate_lowered(rows, costs, queue="channel", waits=waits, name=schedule.name)


def posted(schedule: Schedule, sends: str) -> tuple[Sequence[LoweredRow], set[Any]]:
    """The rows as their framework posts messages, and the sends for which it waits there. What is posted with a send
    stands before it."""
    if sends not in SENDS:
        raise unknown("sends", sends, SENDS)
    sizes = {"num_ranks": schedule.num_ranks, "num_microbatches": schedule.num_microbatches}
    several = {"stages_per_rank": schedule.num_stages // schedule.num_ranks} if sends == "forwards wait" else {}
    if schedule not in [build(name, **sizes, **several) for name in _WHOSE[sends]]:
        theirs = " and ".join(f"{name}'s ({whose})" for name, whose in _WHOSE[sends].items())
        raise ValueError(
            f"sends={sends!r} is for {theirs} own rows, and {schedule.name} has others: give sends='nobody waits'"
        )
    rows = lower(schedule)
    if several:
        pairs = [_ahead(row) for row in rows]
        return [row for row, _ in pairs], {send for _, waits in pairs for send in waits}
    if schedule == build("GPipe", **sizes):
        return rows, set()
    return [_together(row) for row in rows], {item for row in rows for item in row if item.kind in (SEND_F, SEND_B)}


def _together(row: LoweredRow) -> LoweredRow:
    """A send and the receive after it, where both are a neighbour's."""
    found = list(row)
    for at, (one, other) in enumerate(pairwise(row)):
        if (one.kind, other.kind) in ((SEND_F, RECV_B), (SEND_B, RECV_F)):
            found[at : at + 2] = other, one
    return tuple(found)


def _ahead(row: LoweredRow) -> tuple[LoweredRow, list[Any]]:
    """Receives behind the last action of their kind, the first gradient's before the forward that it stands behind; and
    what is waited for: what forwards send, and what a backward sends behind another one."""
    found: list[tuple[list, list]] = [([], [])]  # an action with what is asked for behind it, and what it sends
    behind, kinds, waits = {RECV_F: found[0][0]}, [F], []
    for item in row:
        if item.kind in COMPUTE:
            found.append(([item], []))
            kinds.append(item.kind)
            behind[RECV_F if item.kind is F else RECV_B] = found[-1][0]
        elif item.kind in (RECV_F, RECV_B):
            behind.get(item.kind, found[-2:][0][0]).append(item)
        else:
            found[-1][1].append(item)
            if item.kind is SEND_F or F not in kinds[-2:]:
                waits.append(item)
    return tuple(chain(*chain(*found))), waits
