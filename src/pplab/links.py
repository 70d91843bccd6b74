"""Links that take time, and narrow ones, on which messages queue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

from .costs import Costs
from .schedule import Graph
from .simulator import Send


def lags_of(graph: Graph, costs: Costs) -> list[float]:
    """Of every entry: how long its message is under way, queues aside. It is there at once on its
    own rank.
    """
    lag_of = (
        cache(lambda source, target: costs.link(source, target).latency) if costs.links else None
    )
    ways = zip(graph.columns.ranks, graph.targets, strict=True)
    return [0 if a == b else lag_of(a, b) if lag_of else costs.latency for a, b in ways]


def queueing(graph: Graph, costs: Costs, lags: Sequence[float]) -> Send:
    """What tells the simulator's loop when an entry's message arrives that leaves now.

    Those of one link pass one after the other, in the order of its source's row, so that no other
    clock decides.
    """
    ranks, targets, link_of = graph.columns.ranks, graph.targets, cache(costs.link)
    free: dict[tuple[int, int], float] = defaultdict(
        int
    )  # when a link has let everything pass so far

    def send(entry: int, now: float) -> float:
        way = ranks[entry], targets[entry]
        if way[0] != way[1]:
            made = graph.action(entry)
            takes = costs.occupancy(made.kind, made.stage, link_of(*way).bandwidth, made.microbatch)
            free[way] = now = max(now, free[way]) + takes
        return now + lags[entry]

    return send
