"""Narrow links, on which messages queue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from math import inf

from .costs import Costs
from .schedule import Columns
from .simulator import Send


def queueing(columns: Columns, costs: Costs, latency: Sequence[Sequence[float]]) -> Send:
    """What tells the simulator's loop when a message arrives: those of one link pass one after the other.

    A link's messages leave in the order of its source's row, so that no other clock decides.
    """
    backwards = {i: backward for backward, i in enumerate(columns.overlaps, columns.bounds[-1])}
    link_of = cache(costs.link)
    free: dict[tuple[int, int], float] = defaultdict(int)  # when a link has let everything pass so far

    def send(source: int, target: int, i: int, more: bool, now: float) -> float:
        """When a message of item i arrives. There is `more` to come of an overlap when its forward's leaves."""
        if source != target and (link := link_of(source, target)).bandwidth < inf:
            entry = i if more else backwards.get(i, i)
            takes = costs.occupancy(columns.kinds[entry], columns.stages[entry], link.bandwidth)
            free[source, target] = now = max(now, free[source, target]) + takes
        return now + latency[source][target]

    return send
