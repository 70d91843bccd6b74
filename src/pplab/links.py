"""Links that take time, and narrow ones, on which messages queue: a link is a row of messages."""

from __future__ import annotations

from functools import cache

from .costs import Costs
from .schedule import Graph, Needs, Rows


def lags_of(graph: Graph, costs: Costs) -> list[float]:
    """Of every entry: how long the message that it waits for is under way, queues aside. It is
    there at once on its own rank.
    """
    lag_of = cache(lambda source, rank: costs.link(source, rank).latency) if costs.links else None
    ways = zip(graph.sources, graph.columns.ranks, strict=True)
    return [0 if a == b else lag_of(a, b) if lag_of else costs.latency for a, b in ways]


def with_links(
    graph: Graph, costs: Costs, durations: list[float]
) -> tuple[Rows, Needs, list[float], list[float]]:
    """What `simulator.run` takes where messages take time; where links are narrow, each is a row.

    Messages of one link pass one after the other, in the order of its source's row, so that no
    other clock decides.
    """
    columns, lags = graph.columns, lags_of(graph, costs)
    if not costs.has_queues:
        return *graph.turns, durations, lags
    rows, needs, senders_of = graph.linked
    durations, occupancy = durations[:], cache(costs.occupancy)
    whose = columns.microbatches if costs.by_microbatch else [None] * len(lags)
    for way, senders in senders_of.items():
        bandwidth = costs.link(*way).bandwidth
        durations += [
            occupancy(columns.kinds[i], columns.stages[i], bandwidth, whose[i]) for i in senders
        ]
    return rows, needs, durations, lags + [0] * (len(needs) - len(lags))
