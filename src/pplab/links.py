"""Links that take time, and narrow ones, on which messages queue: a link is a row of messages."""

from __future__ import annotations

from collections import defaultdict
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
    """The graph's `turns`, and behind the ranks a row for every link; and of every link, by ranks
    from and to, the entries that send on it. Its messages are in the order of their source's row.
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
