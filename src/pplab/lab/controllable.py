"""V-Half and V-Min: two stages per rank in a V, in about a half and a third of 1F1B's memory.

A building block says in which units of F = I = W the first microbatch runs on a rank; repeated every six units, the
interval in which a rank does a microbatch's work, it is a plan for all of them. Of each of its two stages a rank holds
at most the lifespan of the activations divided by the interval, rounded up: a shorter block holds less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import accumulate

from ..actions import Action, F, I, W
from ..builders.registry import Rows, register
from ..costs import Costs
from ..deps import needs
from ..schedule import Schedule
from ..simulator import simulate

_SOURCE = "Qi et al. 2024, arXiv:2405.15362; github.com/sail-sg/zero-bubble-pipeline-parallelism"
_INTERVAL = 6  # units that a microbatch's F, I and W take on a rank with two stages

Plan = dict[int, Action]  # what a rank runs in which unit
Starts = tuple[int, int, int, int]  # the units in which a rank runs the first microbatch's F down, F up, I up, I down

# The blocks on four ranks: F I W of the stage on the way down, f i w of the one on the way up; W where it is free.
#
#     V-Half                                                           V-Min
#     rank 0  F . . . . . . . . . f . . . i w . . . . . . . . . I W    F . . . . . . f i w . . . . . I W
#     rank 1  . . F . . . . . . f . . . . . . i w . . . . . . I W      . F . . . . f . . i w . . . I W
#     rank 2  . . . . F . . . f . . . . . . . . . i w . . . I W        . . F . . f . . . . i w . I W
#     rank 3  . . . . . . F f . . . . . . . . . . . . i w I W          . . . F f . . . . . . i I w W
#
# From rank to rank each of the four chains has a fixed offset: 1 in V-Min, the least there is; in V-Half 2 away from
# rank 0 and 1 towards it. (The paper's section 3: the offsets make the lifespans.) The lifespans of a rank's two
# stages, F to I, add up to 4P + 2 gap in V-Min and to 6P - 1 + 2 gap in V-Half: the same on all ranks, and about 2P/3
# and P activations of half a rank's share, where 1F1B holds up to P of a whole one.
#
# Repeated, a block must not meet itself: modulo 6, a rank's four starts must differ. Without the gap, V-Min's r and
# 2P + r meet when 3 divides P, V-Half's 3P-2-r and 6P-2-r when P is even; both I's wait until nothing does. That is why
# V-Half's turn at the bottom takes a unit more, too.


@register(
    "V-Half",
    rules="any number of ranks and microbatches; no gap in the steady state where W + 2I >= 2F and W + 2F >= 2I",
    placement="V",
    source=_SOURCE,
)
def v_half(num_ranks: int, num_microbatches: int, *, costs: Costs | None = None) -> Rows:
    """About half of 1F1B's memory on every rank: the fastest for `costs` of a few orders made for F = I = W.

    `costs` are of a stage, half a rank's share; all ones when left out.
    """
    P, gap = num_ranks, 3 if num_ranks % 2 == 0 else 0
    block = [(2 * r, 3 * P - r - 2, 3 * P + gap + 2 * r - 1, 6 * P + gap - r - 2) for r in range(P)]
    return _fastest(block, num_microbatches, costs or Costs())


@register(
    "V-Min",
    rules="any number of ranks and microbatches; made for F = I = W, much slower when they differ",
    placement="V",
    source=_SOURCE,
)
def v_min(num_ranks: int, num_microbatches: int, *, costs: Costs | None = None) -> Rows:
    """About a third of 1F1B's memory, the least that a V allows without a bubble in every period of F = I = W: the
    fastest for `costs` of a few orders.
    """
    P, gap = num_ranks, 2 if num_ranks % 3 == 0 else 0
    block = [(r, 2 * P - r - 1, 2 * P + gap + r, 4 * P + gap - r - 1) for r in range(P)]
    return _fastest(block, num_microbatches, costs or Costs())


def _fastest(block: list[Starts], M: int, costs: Costs) -> Rows:
    costs.check(2 * len(block), len(block))
    return min(_candidates(block, M), key=lambda rows: simulate(Schedule(rows), costs).makespan)


def _candidates(block: list[Starts], M: int) -> Iterator[Rows]:
    """The repeated block as it is, and reordered around three steady states, the longer ones P and 2P units more."""
    P = len(block)
    plans = [repeated(rank, P, M, starts) for rank, starts in enumerate(block)]
    yield [list(plan.values()) for plan in plans]
    first, last = block[0][3], _INTERVAL * (M - 1)  # rank 0's first I and last F of its stage 0
    for more in (0, P, 2 * P):
        yield _reordered(plans, range(first - more, last + more + 1))


def repeated(rank: int, P: int, M: int, starts: Starts) -> Plan:
    """A rank's block repeated every six units for M microbatches, a weight gradient in every unit that is left free.

    >>> plan = repeated(rank=0, P=1, M=2, starts=(0, 1, 2, 3))
    >>> {unit: str(action) for unit, action in plan.items() if unit < 7}
    {0: '0F0', 1: '1F0', 2: '1I0', 3: '0I0', 4: '1W0', 5: '0W0', 6: '0F1'}
    """
    down, up = rank, 2 * P - 1 - rank
    places = zip(starts, ((down, F), (up, F), (up, I), (down, I)), strict=True)
    at = {start + _INTERVAL * m: Action(stage, kind, m) for start, (stage, kind) in places for m in range(M)}
    plan: Plan = {}
    waiting: deque[Action] = deque()
    for unit in range(max(at) + 2 * M + 1):
        if action := at.get(unit):
            plan[unit] = action
            if action.kind is I:
                waiting.append(action._replace(kind=W))
        elif waiting:
            plan[unit] = waiting.popleft()
    return plan


def _reordered(plans: list[Plan], steady: range) -> Rows:
    """The plans, squeezed and, outside of the units of the steady state, reordered in no more memory.

    Step by step, each rank runs what comes first in its plan and is ready; a W only when it could run nothing else, an
    F only if the rest of the plan, run as planned, then holds no more than the plans do. So what is first of all that
    is left, over all ranks, can always run. In the steady state a rank keeps to its plan.
    """
    most = max(_peak(plan.values()) for plan in plans)
    left = [_parts(plan, steady) for plan in plans]
    rows: list[list[Action]] = [[] for _ in plans]
    held, done = [0] * len(plans), set()

    def is_ready(action: Action) -> bool:
        return all(Action(n.stage, n.kinds[-1], n.microbatch) in done for n in needs(action, 2 * len(plans)))

    def chosen(rank: int) -> Action | None:
        ahead = peak = held[rank]  # when what is passed over runs as planned, and the most until here
        tried, weight = set(), None
        for action in left[rank][0] if left[rank] else ():
            stage, kind, _ = action
            if (stage, kind) not in tried:  # of these, later microbatches aren't ready earlier
                tried.add((stage, kind))
                if (kind is not F or peak < most) and is_ready(action):
                    if kind is not W:
                        return action
                    weight = weight or action
            ahead += _change(action)
            peak = max(peak, ahead)
        return weight

    while any(left):
        running = [(rank, action) for rank in range(len(plans)) if (action := chosen(rank))]
        for rank, action in running:
            rows[rank].append(action)
            done.add(action)
            held[rank] += _change(action)
            left[rank][0].remove(action)
            if not left[rank][0]:
                left[rank].popleft()
    return rows


def _parts(plan: Plan, steady: range) -> deque[list[Action]]:
    """A plan in parts that are run one after the other, each in any order."""
    if not steady:
        return deque([list(plan.values())])
    before = [action for unit, action in plan.items() if unit < steady[0]]
    after = [action for unit, action in plan.items() if unit > steady[-1]]
    between = [[action] for unit, action in plan.items() if unit in steady]
    return deque(part for part in (before, *between, after) if part)


def _change(action: Action) -> int:
    """By how much a rank holds more activations after an action. It holds them while the W runs, too."""
    return (action.kind is F) - (action.kind is W)


def _peak(row: Iterable[Action]) -> int:
    return max(accumulate(map(_change, row)))
