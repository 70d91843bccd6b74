"""Put the warm-up and cool-down of a plan in an order that runs as early as possible in the same
memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import accumulate

from ...actions import Action, B, F, I, W
from ...deps import needs

Plan = list[tuple[float, Action]]


def reordered(plans: list[Plan], num_stages: int, begin: float, end: float) -> list[list[Action]]:
    """The plans, squeezed, and reordered outside of the steady state from `begin` to `end`, in no
    more memory.

    Step by step, each rank runs what comes first in its plan and is ready. It runs a W only if
    nothing else can run. It runs an F only if the rest of the plan, run as planned, then holds no
    more than the plans do. So of all that is left on all ranks, the first can always run. In the
    steady state a rank keeps to its plan.
    """
    most = max(peak(action for _, action in plan) for plan in plans)
    left = [_parts(plan, begin, end) for plan in plans]
    rows: list[list[Action]] = [[] for _ in plans]
    held, done = [0] * len(plans), set()
    awaited = {
        action: [Action(n.stage, n.kinds[-1], n.microbatch) for n in needs(action, num_stages)]
        for plan in plans
        for _, action in plan
    }

    def chosen(rank: int) -> Action | None:
        # when what is passed over runs as planned, and the most until here
        ahead = highest = held[rank]
        tried, weight = set(), None
        part, different = left[rank][0] if left[rank] else ([], 0)
        for action in part:
            alike, kind = action[:2], action.kind
            if alike not in tried:  # of these, later microbatches aren't ready earlier
                tried.add(alike)
                if (kind is not F or highest < most) and done.issuperset(awaited[action]):
                    if kind is not W:
                        return action
                    weight = weight or action
                if len(tried) == different:
                    break
            ahead += change(action)
            highest = max(highest, ahead)
        return weight

    while any(left):
        running = [(rank, action) for rank in range(len(plans)) if (action := chosen(rank))]
        for rank, action in running:
            rows[rank].append(action)
            done.add(action._replace(kind=I) if action.kind is B else action)
            held[rank] += change(action)
            part, _ = left[rank][0]
            part.remove(action)
            if not part:
                left[rank].popleft()
    return rows


def _parts(plan: Plan, begin: float, end: float) -> deque[tuple[list[Action], int]]:
    """The parts of a plan, which are run one after the other, each in any order, and the number of
    their stages and kinds.
    """
    parts = [[action for _, action in plan]]
    if end >= begin:
        before = [action for start, action in plan if start < begin]
        between = [[action] for start, action in plan if begin <= start <= end]
        after = [action for start, action in plan if start > end]
        parts = [before, *between, after]
    return deque((part, len({action[:2] for action in part})) for part in parts if part)


def change(action: Action) -> int:
    """By how much a rank holds more activations after an action. It holds them while the W or B
    runs, too.
    """
    return (action.kind is F) - (action.kind is W or action.kind is B)


def peak(row: Iterable[Action]) -> int:
    """The most activations that a row holds."""
    return max(accumulate(map(change, row)))
