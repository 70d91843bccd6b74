"""A search through all orders of small schedules, which owes nothing to those of pplab."""

from __future__ import annotations

from itertools import product


def is_possible(P: int, M: int, most: int, units: int) -> bool:
    """Whether any order of F = I = W = 1 on a V takes so few units and holds no more: all of them are tried.

    A state is how many F down, F up, I up, I down and W each rank has run; which microbatch it was doesn't matter. A
    rank that has an I or a W to run loses nothing by not idling; one that has more to run than units are left is lost.
    """

    def moves(state: tuple, r: int, left: int) -> list[tuple]:
        down, up, back_up, back_down, weights = state[r]
        waits = {
            0: M if r == 0 else state[r - 1][0],
            1: down if r == P - 1 else state[r + 1][1],
            2: up if r == 0 else min(up, state[r - 1][2]),
            3: min(down, back_up if r == P - 1 else state[r + 1][3]),
            4: back_up + back_down,
        }
        able = [i for i, count in waits.items() if state[r][i] < count and (i > 1 or down + up - weights < most)]
        made = [tuple(n + (i == j) for j, n in enumerate(state[r])) for i in able]
        return [s for s in made + [state[r]] * (max(able, default=0) < 2) if 6 * M - sum(s) <= left]

    states = {((0,) * 5,) * P}
    for left in reversed(range(units)):
        states = {s for state in states for s in product(*(moves(state, r, left) for r in range(P)))}
    return bool(states)
