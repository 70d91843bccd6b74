"""Three ways to send: who waits for a message that it sends, in which framework."""

from __future__ import annotations

from ...builders import build
from ...costs import Costs
from ...errors import unknown
from ...lowering import lower
from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import Timeline
from .queues import simulate_lowered

SENDS = ("nobody waits", "both wait", "forwards wait")
_WAITS = {  # whose schedules wait so, and when `simulate_lowered` makes them wait
    "both wait": {"1F1B": ("Megatron-LM, torch", "at once"), "GPipe": ("torch", "later")},
    "forwards wait": {"Interleaved1F1B": ("Megatron-LM from core 0.18 on", "forwards")},
}


def simulate_sends(schedule: Schedule, costs: Costs | None = None, sends: str = SENDS[0]) -> Timeline:
    """Predict the timeline of a schedule whose ranks wait for what they send, as their framework does. `sends`:

    - "nobody waits": as `simulate`, as pplab's executor and torch's interpreter of rows;
    - "both wait": 1F1B as Megatron-LM sends it, and GPipe as torch's ScheduleGPipe. A message travels once its receiver
      has asked for it, which a rank does when it needs it, and its sender stands still until it has arrived. Torch's
      Schedule1F1B takes as long with equal stages, and never longer;
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
    waits = waits_of(schedule, sends)
    return simulate_lowered(lower(schedule), costs, queue="channel", waits=waits, name=schedule.name)


def waits_of(schedule: Schedule, sends: str) -> str:
    """When these rows wait for their sends, in the words of `simulate_lowered`."""
    if sends not in SENDS:
        raise unknown("sends", sends, SENDS)
    stages_per_rank, rest = divmod(schedule.num_stages, schedule.num_ranks)
    sizes = {"num_ranks": schedule.num_ranks, "num_microbatches": schedule.num_microbatches}
    for name, (_, waits) in _WAITS.get(sends, {}).items():
        several = {"stages_per_rank": stages_per_rank} if sends == "forwards wait" else {}
        if not rest and (stages_per_rank > 1) == bool(several) and schedule == build(name, **sizes, **several):
            return waits
    theirs = " and ".join(f"{name}'s ({whose})" for name, (whose, _) in _WAITS[sends].items())
    raise ValueError(
        f"sends={sends!r} is for {theirs} own rows, and {schedule.name} has others: give sends='nobody waits'"
    )
