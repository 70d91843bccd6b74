"""ZB-1P and ZB-2P: an order found for given durations and a memory limit, in place of one that is always the same.

The paper's authors search too, with a heuristic and an integer program. Here rows grow by running them: whenever a rank
is free it takes the forward, input gradient or weight gradient that its policy prefers and the memory allows. A few
hundred policies are tried, and the rows with the least span bubble are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import product
from math import inf
from typing import NamedTuple

from ..actions import Action, F, I, Kind, W
from ..builders._zero_bubble import zb_h1, zb_h2
from ..builders.registry import Rows, register
from ..costs import Costs, of_stage
from ..errors import positive_int
from ..footprint import Memory
from ..schedule import Schedule
from ..simulator import simulate

_SOURCE = "Qi et al. 2023, arXiv:2401.10241, section 3"
_RULES = "any number of ranks and microbatches; one stage per rank; seconds for some thousand actions"

Counts = dict[Kind, int]


@register("ZB-1P", rules=_RULES, source=_SOURCE)
def zb_1p(
    P: int, M: int, *, costs: Costs | None = None, memory: Memory | None = None, limit: int | None = None
) -> Rows:
    """The best order that a search finds for `costs` (all ones by default) in 1F1B's memory.

    `limit`: what a rank may hold at once, in activations of one forward of its stage; P by default. `memory` says what
    an input gradient frees: by default nothing, all is held until the weight gradient.
    """
    return _best(P, M, costs, memory, P if limit is None else limit)


@register("ZB-2P", rules=_RULES, source=_SOURCE)
def zb_2p(
    P: int, M: int, *, costs: Costs | None = None, memory: Memory | None = None, limit: int | None = None
) -> Rows:
    """The best order that a search finds for `costs` in twice 1F1B's memory: ZB-1P with a `limit` of 2P."""
    return _best(P, M, costs, memory, 2 * P if limit is None else limit)


def _best(P: int, M: int, costs: Costs | None, memory: Memory | None, limit: int) -> Rows:
    costs, memory, limit = costs or Costs(), memory or Memory(), positive_int("limit", limit)
    costs.check(P, P)
    memory.check(P)
    best, least = [], (inf, inf)
    for rows in _candidates(P, M, costs, memory, limit):
        timeline = simulate(Schedule(rows), costs)
        found = (timeline.span_bubble_fraction, timeline.makespan)
        if found < least:
            best, least = rows, found
    return best


def _candidates(P: int, M: int, costs: Costs, memory: Memory, limit: int) -> Iterator[Rows]:
    """ZB-H1 and ZB-H2 where they fit, so that the search never loses to them, and what grows from 288 policies.

    The warm-ups are ZB-H1's, ZB-H2's and one forward more. A W waits for `delay` further I's per rank above, one in
    ZB-H1 and two in ZB-H2; with M it always waits for a gap.
    """
    if limit >= P:
        yield zb_h1.rows(P, M)
    if limit >= 2 * P - 1:
        yield zb_h2.rows(P, M)
    growth = _Growth(P, M, costs, memory, limit)
    warmups = ([P - r for r in range(P)], [2 * (P - r) - 1 for r in range(P)], [2 * (P - r) for r in range(P)])
    for warmup, delay, *rest in product(warmups, (0, 1, 2, 3, 4, M), (False, True), (0, 0.25, 0.5, 1), (False, True)):
        yield growth.rows([Policy(warmup[r], delay * r, *rest) for r in range(P)])


class Policy(NamedTuple):
    """What a rank prefers while its row grows."""

    warmup: int  # forwards before the first input gradient, at most
    delay: int  # weight gradients that wait before one is run after an input gradient, gap or no gap
    alternate: bool  # when both could run: a forward after an input gradient; else always the input gradient
    least_gap: float  # the shortest gap that a weight gradient fills, as a share of its duration
    eager: bool  # whether it fills a gap whose end isn't known yet


class _Growth:
    """Rows that ranks make in the order of time, each by its policy."""

    def __init__(self, P: int, M: int, costs: Costs, memory: Memory, limit: int):
        self.M, self.limit = M, limit
        self.durations = [{kind: costs.of(kind, rank) for kind in (F, I, W)} for rank in range(P)]
        whole = [of_stage(memory.activation, rank) for rank in range(P)]
        self.kept = [  # of a forward's activations after its I, as a share
            1 if memory.weight_input is None or not all_ else of_stage(memory.weight_input, rank) / all_
            for rank, all_ in enumerate(whole)
        ]
        self.lag = {(a, b): costs.link(a, b).latency for a in range(P) for b in (a - 1, a + 1)}

    def rows(self, policies: list[Policy]) -> Rows:
        """The rows that `policies`, one per rank, lead to."""
        P, M = len(policies), self.M
        rows: list[list[Action]] = [[] for _ in range(P)]
        count = [dict.fromkeys((F, I, W), 0) for _ in range(P)]
        last = [W] * P  # the latest F or I of each rank
        inputs: list[list[float]] = [[0] * M, *([] for _ in range(P - 1))]  # when a forward's input is there
        gradients: list[list[float]] = [[] for _ in range(P)]  # when an input gradient's is
        free: list[float] = [0] * P
        events: list[tuple[float, int]] = [(0, rank) for rank in range(P)]  # when to look at a rank again
        while events:
            now, rank = heappop(events)
            if now < free[rank]:
                continue
            done = count[rank]
            forward, backward = _next(inputs[rank], done[F]), _next(gradients[rank], done[I])
            full = done[F] - done[I] + self.kept[rank] * (done[I] - done[W]) + 1 > self.limit + 1e-9
            if full or (done[I] == 0 and done[F] >= policies[rank].warmup):
                forward = inf
            waits = forward - now, backward - now
            kind = self._choose(policies[rank], rank, waits, full, done, last[rank], rows[rank])
            if kind is None:
                if min(forward, backward) < inf:
                    heappush(events, (min(forward, backward), rank))
                continue
            rows[rank].append(Action(rank, kind, done[kind]))
            done[kind] += 1
            free[rank] = end = now + self.durations[rank][kind]
            heappush(events, (end, rank))
            if kind is W:
                continue
            last[rank] = kind
            to, arrivals = (rank + 1, inputs) if kind is F else (rank - 1, gradients)
            if to == P:
                gradients[rank].append(end)
            elif to >= 0:
                arrivals[to].append(end + self.lag[rank, to])
                heappush(events, (max(arrivals[to][-1], free[to]), to))
        return rows

    def _choose(
        self,
        policy: Policy,
        rank: int,
        waits: tuple[float, float],
        full: bool,
        done: Counts,
        last: Kind,
        row: list[Action],
    ) -> Kind | None:
        """What the rank runs now; None to wait. `waits`: until it could run a forward, and a backward."""
        forward, backward = waits
        due = done[I] - done[W]
        kind = F if forward <= 0 else None
        if backward <= 0 and not (kind and policy.alternate and last is I):
            kind = I
        if kind:
            return W if due > policy.delay and row and row[-1].kind is I else kind
        if not due:
            return None
        wait = min(waits)
        if wait == inf:
            return W if policy.eager or full or done[I] == self.M else None
        return W if wait >= policy.least_gap * self.durations[rank][W] else None


def _next(arrivals: list[float], count: int) -> float:
    return arrivals[count] if count < len(arrivals) else inf
