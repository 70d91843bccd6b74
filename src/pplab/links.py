"""Links that take time. On a narrow link messages queue, so it is simulated as a row of
messages.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache

from .costs import Costs
from .schedule import Graph, Needs, Rows


def lags_of(graph: Graph, costs: Costs) -> list[float]:
    """For every entry, how long the message that it waits for takes without a queue. A message
    between stages of one rank takes no time.
    """
    lag_of = cache(lambda source, rank: costs.link(source, rank).latency) if costs.links else None
    ways = zip(graph.sources, graph.columns.ranks, strict=True)
    return [0 if a == b else lag_of(a, b) if lag_of else costs.latency for a, b in ways]


def with_links(
    graph: Graph, costs: Costs, durations: list[float]
) -> tuple[Rows, Needs, list[float], list[float]]:
    """What `simulator.run` takes where messages take time. Each narrow link gets a row of its own.

    The messages of one link pass one after the other, in the order of its source's row, so the
    order doesn't depend on times.
    """
    columns, lags = graph.columns, lags_of(graph, costs)
    if not costs.has_queues:
        return *graph.turns, durations, lags
    rows, needs, senders_of = _link(graph)
    durations, occupancy = durations[:], cache(costs.occupancy)
    whose = columns.microbatches if costs.by_microbatch else [None] * len(lags)
    for way, senders in senders_of.items():
        bandwidth = costs.link(*way).bandwidth
        durations += [
            occupancy(columns.kinds[i], columns.stages[i], bandwidth, whose[i]) for i in senders
        ]
    return rows, needs, durations, lags + [0] * (len(needs) - len(lags))


def _link(graph: Graph) -> tuple[Rows, Needs, dict[tuple[int, int], list[int]]]:
    """The graph's `turns` with a row for every link behind the ranks' rows, and for every link, by
    its two ranks, the entries that send on it. They are in the order of the source's row.
    """
    rows, needs = graph.turns
    rows, needs, ids = [*rows], [*needs], graph.columns.ids
    senders_of: dict[tuple[int, int], list] = defaultdict(list)
    for source, rank, maker in zip(graph.sources, graph.columns.ranks, graph.makers, strict=True):
        if source != rank:
            senders_of[source, rank].append(maker)
    brings = ids[:]  # of every entry: the item after which its message goes on
    for senders in senders_of.values():
        senders.sort()  # of an overlap, the first half's message leaves first
        senders.sort(key=ids.__getitem__)
        messages = range(len(needs), len(needs) + len(senders))
        rows.append(messages)
        needs += [ids[sender] for sender in senders]
        for sender, message in zip(senders, messages, strict=True):
            brings[sender] = message
    needs[: len(ids)] = [None if maker is None else brings[maker] for maker in graph.makers]
    return rows, needs, senders_of
