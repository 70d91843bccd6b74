"""Orders that a rank finds by itself, without a plan. They are for comparison and not in the
registry.
"""

from __future__ import annotations

from heapq import heappop, heappush

from ...actions import Action, B, F
from ...costs import Costs
from ...errors import positive_int
from ...schedule import Schedule


def depth_first(num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Run the oldest backward that is ready whenever a rank is free, or else the oldest forward
    that is ready.

    Nothing limits the forwards, so this is what 1F1B would be without its cap.
    """
    P, M = positive_int("num_ranks", num_ranks), positive_int("num_microbatches", num_microbatches)
    costs = costs or Costs()
    rows: list[list[Action]] = [[] for _ in range(P)]
    # ready to run, oldest first
    forwards = [list(range(M)) if rank == 0 else [] for rank in range(P)]
    backwards: list[list[int]] = [[] for _ in range(P)]
    free = [True] * P
    events: list[tuple[float, int, Action]] = []  # (end, order, what ends)

    def go_on(rank: int, now: float) -> None:
        if free[rank] and (backwards[rank] or forwards[rank]):
            kind, ready = (B, backwards[rank]) if backwards[rank] else (F, forwards[rank])
            action = Action(rank, kind, ready.pop(0))
            rows[rank].append(action)
            free[rank] = False
            heappush(events, (now + costs.of_item(action), len(rows[rank]), action))

    go_on(0, 0)
    while events:
        now = events[0][0]
        while events and events[0][0] == now:  # all that ends now ends before anything starts
            _, _, (rank, kind, m) = heappop(events)
            free[rank] = True
            if kind is F:
                (forwards[rank + 1] if rank < P - 1 else backwards[rank]).append(m)
            elif rank > 0:
                backwards[rank - 1].append(m)
        for rank in range(P):
            go_on(rank, now)
    return Schedule(rows, "depth first, uncapped")
