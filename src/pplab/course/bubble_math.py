"""Checkers of chapter 1."""

from __future__ import annotations

import random
from collections.abc import Callable
from numbers import Real

from ..builders import build
from ..costs import Costs
from ..deps import needs
from ..lab.formulas import floor_makespan
from ..simulator import simulate
from ..text import parse
from .answers import actions_of, schedule_of
from .verdict import Verdict, checker, number, numbers, readers_code, right, told, wrong

BROKEN_CHART = """0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3
1F0,1F1,1F2,1F3,1B0,1B1,1B3
2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3
"""


def idle_cells(answer: object) -> Verdict:
    """How many cells of one time unit are idle in the chart of 1F1B with 4 ranks and 8 microbatches?"""
    traps = {
        9: "that is one rank's; the question is about all four",
        96: "those are the busy cells",
        132: "those are all cells",
        24: "that is how long one rank works",
    }
    return number(answer, 36, "132 cells, 96 of them busy", traps=traps)


def as_fraction(answer: object) -> Verdict:
    """A paper reports a bubble ratio (idle over ideal) of 0.25. What is the bubble fraction (idle over total)?"""
    traps = {
        0.25: "that is the ratio itself: total time is ideal time plus idle time",
        1 / 3: "that goes the other way, from a fraction of 0.25 to a ratio",
    }
    return number(answer, 0.2, "for 1 of work there is 0.25 of idling, and 0.25 / 1.25 = 0.2", traps=traps)


def least_microbatches(answer: object) -> Verdict:
    """The least M for which 8 ranks waste at most 5 % of all rank-time."""
    traps = {
        140: "that keeps the ratio (P-1)/M at 5 %; the share of all rank-time is (P-1)/(M+P-1)",
        132: "7/139 is a little more than 5 %",
        134: "there is a smaller one",
    }
    return number(answer, 133, "7 / (133 + 7) is 5 % exactly", traps=traps, tolerance=1e-9)


@checker()
def path_of_78(answer: object) -> Verdict:
    """Actions of 1F1B (P=8, M=32, F=B=1) that must run one after the other and take 78 in all, as a list of texts.

    Each must wait for the one before it: because it needs its result, or because it stands behind it in a rank's row.
    """
    schedule = build("1F1B", num_ranks=8, num_microbatches=32)
    place = {a: (rank, i) for rank, row in enumerate(schedule.rows) for i, a in enumerate(row)}
    with told("", TypeError, ValueError):
        path = [parse(str(text)) for text in actions_of(answer)]
    for action in path:
        if action not in place:
            return wrong(f"{action} isn't an action of this schedule")
    for before, after in zip(path, path[1:], strict=False):
        needed = any(before == type(after)(n.stage, k, n.microbatch) for n in needs(after, 8) for k in n.kinds)
        same_row = place[before][0] == place[after][0] and place[before][1] < place[after][1]
        if not (needed or same_row):
            return wrong(f"{after} doesn't have to wait for {before}: it isn't made from it, nor behind it in a row")
    if len(path) < 78:
        return wrong(f"this path is legal and takes {len(path)}: look for a longer one")
    return right("nobody can finish before 78, so a count of 71 let some action start before what it needs")


@checker()
def best_microbatches(answer: object) -> Verdict:
    """A batch of 32 samples, 4 ranks, 8 units of forward and 16 of backward per rank in all, and 0.3 of overhead for
    every action: which of M = 1, 2, 4, 8, 16, 32 is fastest?"""
    times = {m: (m + 3) * (24 / m + 0.6) for m in (1, 2, 4, 8, 16, 32)}
    if not isinstance(answer, int) or answer not in times:
        return wrong(f"choose one of {', '.join(map(str, times))}, got {answer!r}")
    if answer == min(times, key=times.get):
        return right("39.6; more microbatches shrink the ramps but pay the overhead more often")
    side = "more" if answer < 8 else "fewer"
    return wrong(f"M = {answer} takes {times[answer]:.4g}; try {side}")


@checker()
def repair(answer: object) -> Verdict:
    """Three ranks, four microbatches, with faults in rank 1's row: give CSV text or rows that run in 18 units."""
    sizes = "3 ranks, 3 stages and 4 microbatches"
    schedule = schedule_of(answer, (3, 3, 4), f"the repaired chart must keep {sizes}")
    makespan = simulate(schedule).makespan
    if makespan > floor_makespan(3, 4, 1, 2):
        return wrong(f"it runs, in {makespan}; a legal order that takes 18 exists")
    return right("legal, and no order can be faster than 18")


@checker("a function of (P, M, F, B)")
def makespan(answer: Callable[[int, int, float, float], float] | object) -> Verdict:
    """Write `makespan(P, M, F, B)`: how long GPipe takes without latency."""
    rng = random.Random(0)
    for P, M in [(1, 1), (1, 5), (4, 1), (4, 8), *((rng.randint(1, 9), rng.randint(1, 40)) for _ in range(20))]:
        F, B = rng.randint(1, 9), rng.randint(1, 9)
        expected = simulate(build("GPipe", num_ranks=P, num_microbatches=M), Costs(F, B, 0)).makespan
        with readers_code(f"makespan({P}, {M}, {F}, {B}) raised"):
            given = answer(P, M, F, B)
        if not isinstance(given, Real) or not abs(given - expected) <= 1e-9 * expected:  # NaN is no answer
            return wrong(f"makespan({P}, {M}, {F}, {B}) gives {given}; the simulation takes {expected}")
    return right("equal to the simulation at 24 sizes")


def tokens_per_second(answer: object) -> Verdict:
    """P=8, M=64, 10 and 20 ms, 4 sequences of 2,048 tokens each: the step in s, the efficiency, tokens per second."""
    step = 71 * 0.030
    names = ("step", "efficiency", "tokens per second")
    traps = ({1000 * step: "that is in ms; the question asks for s"}, {}, {})
    why = "71 slots of 30 ms, 64 of them work"
    return numbers(answer, (step, 64 / 71, 64 * 4 * 2048 / step), why, names, traps=traps)
