"""Links that take time, and narrow ones, on which messages queue."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from math import inf

from .costs import Costs
from .schedule import Graph
from .simulator import Send


def sending(graph: Graph, costs: Costs) -> Send:
    """What tells the simulator's loop when an entry's message arrives that leaves now: at once on its own rank.

    Those of one narrow link pass one after the other, in the order of its source's row, so that no other clock decides.
    """
    columns, ranks, targets, link_of = graph.columns, graph.columns.ranks, graph.targets, cache(costs.link)
    lag_of = cache(lambda source, target: 0 if source == target else costs.link(source, target).latency)
    lags = [*map(lag_of, ranks, targets)]
    free: dict[tuple[int, int], float] = defaultdict(int)  # when a link has let everything pass so far

    def send(entry: int, now: float) -> float:
        source, target = ranks[entry], targets[entry]
        if source != target and (link := link_of(source, target)).bandwidth < inf:
            takes = costs.occupancy(columns.kinds[entry], columns.stages[entry], link.bandwidth)
            free[source, target] = now = max(now, free[source, target]) + takes
        return now + lags[entry]

    return send if costs.has_queues else lambda entry, now: now + lags[entry]
