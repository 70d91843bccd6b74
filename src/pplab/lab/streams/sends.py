"""Three ways to send: who waits for a message that it sends, in which framework."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

from ...actions import COMPUTE, RECV_B, RECV_F, SEND_B, SEND_F, F
from ...builders import build
from ...costs import Costs
from ...errors import expect, unknown
from ...lowering import LoweredRow, lower
from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import Timeline
from .queues import Flow

SENDS = ("nobody waits", "both wait", "forwards wait")
_WHOSE = {  # schedules are sent so
    "both wait": {"1F1B": "Megatron-LM, torch", "GPipe": "torch"},
    "forwards wait": {"Interleaved1F1B": "Megatron-LM from core 0.18 on"},
}


def simulate_sends(
    schedule: Schedule, costs: Costs | None = None, sends: str = SENDS[0]
) -> Timeline:
    """Predict the timeline of a schedule whose ranks wait for their sends, as they do in your
    framework. `sends` is one of these:

    - "nobody waits": a rank goes on computing while its messages travel, as under `simulate`.
      pplab's executor works like this, and so does torch's interpreter over gloo. Over NCCL, a
      receive that the interpreter posts early can hold up a send. To predict that, call
      `simulate_lowered` on the rows of `lower_by_torch`, with one queue per pair.
    - "both wait": a rank asks for a message when it needs it. Then the message travels, and the
      sender stands still until it has arrived. Megatron-LM's 1F1B works like this. Torch's
      Schedule1F1B takes the same time if stages are equal and a message takes no longer than F and
      no longer than B. It never takes longer. Torch's ScheduleGPipe asks as late, but it waits for
      a send only where that costs no time.
    - "forwards wait": a rank asks for a message as soon as it has run the previous action of the
      same kind, and stands still until the message of each forward has arrived. In the cool-down it
      waits for the messages of backwards as well. Megatron-LM's interleaved 1F1B works like this
      since core 0.18, for 2P, 3P, ... microbatches.

    Raises ValueError if no framework sends this schedule in this way, and otherwise the same errors
    as `simulate`.

    >>> one_f_one_b = build("1F1B", num_ranks=4, num_microbatches=8)
    >>> [simulate_sends(one_f_one_b, Costs(latency=1), sends).makespan for sends in SENDS[:2]]
    [49, 52]
    """
    return simulator_of(schedule, sends)(costs)


def simulator_of(schedule: Schedule, sends: str) -> Callable[[Costs | None], Timeline]:
    """`simulate_sends` of one schedule for many costs. What doesn't depend on the costs is made
    once.
    """
    if sends == SENDS[0]:
        return partial(simulate, schedule)
    rows, waits = posted(schedule, sends)
    return Flow(rows, schedule, "channel", waits).timeline


def sends_in(framework: str, name: str, num_ranks: int, num_microbatches: int) -> str:
    """The one of SENDS that applies where "Megatron-LM" or "torch" runs the schedule of that name.
    Megatron-LM's interleaved schedule waits for forwards if microbatches are two or more whole
    rounds of the ranks.
    """
    for sends, whose in _WHOSE.items():
        if framework in whose.get(name, "") and (
            sends != "forwards wait" or _rounds(num_ranks, num_microbatches)
        ):
            return sends
    return SENDS[0]


def posted(schedule: Schedule, sends: str) -> tuple[list[LoweredRow], set[Any]]:
    """The rows as their framework posts messages, and the sends for which it waits. What is posted
    together with a send stands before it.
    """
    expect(Schedule, schedule=schedule)
    if sends not in SENDS:
        raise unknown("sends", sends, SENDS)
    ahead = sends == "forwards wait"
    sizes = {"num_ranks": schedule.num_ranks, "num_microbatches": schedule.num_microbatches}
    sizes |= {"stages_per_rank": schedule.num_stages // schedule.num_ranks} if ahead else {}
    names = [name for name in _WHOSE[sends] if schedule == build(name, **sizes)]
    if not names:
        theirs = " and ".join(f"{name}'s ({whose})" for name, whose in _WHOSE[sends].items())
        raise ValueError(
            f"sends={sends!r} is for {theirs} own rows, and {schedule.name} has others: give "
            "sends='nobody waits'"
        )
    P, M = schedule.num_ranks, schedule.num_microbatches
    if ahead and not _rounds(P, M):
        raise ValueError(
            f"sends={sends!r} needs microbatches in at least two whole rounds of {P}, one for each "
            f"rank, got {M}"
        )
    rows, waits = [], set()
    for row in lower(schedule):
        places = []  # behind which action, where, what
        # the last action of a receive's kind, and of any
        last, now, before = {RECV_F: -1}, -1, None
        for item in row:
            if item.kind in COMPUTE:
                now += 1
                last[RECV_F if item.kind is F else RECV_B] = now
                places.append((now, 0, item))
            elif item.kind in (SEND_F, SEND_B):
                places.append((now, 2, item))
                if names != ["GPipe"] and not (
                    ahead and item.kind is SEND_B and last[RECV_F] >= now - 1
                ):
                    waits.add(item)
            elif ahead:  # the first gradient's before the forward that it stands behind
                places.append((last.get(item.kind, now - 1), 1, item))
            else:  # with a send to the same neighbour
                places.append(
                    (
                        now,
                        3 if (before, item.kind) in ((SEND_F, RECV_F), (SEND_B, RECV_B)) else 1,
                        item,
                    )
                )
            before = item.kind
        rows.append(tuple(item for *_, item in sorted(places, key=itemgetter(0, 1))))
    return rows, waits


def _rounds(num_ranks: int, num_microbatches: int) -> bool:
    """Whether the microbatches are at least two whole rounds of the ranks."""
    return num_microbatches % num_ranks == 0 and num_microbatches >= 2 * num_ranks
