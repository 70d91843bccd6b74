"""Checkers of chapter 4."""

from __future__ import annotations

from operator import index

from ..builders import build
from ..costs import Costs
from ..lab.formulas import floor_makespan, one_f_one_b_peak_in_flight
from ..simulator import simulate
from ..timeline import Timeline
from .answers import builder, schedule_of
from .verdict import Verdict, checker, number, numbers, right, told, wrong

STUCK_ROWS = """0F0,0F1,0B0,0F2,0B1,0B2
1F0,1F1,1F2,1B0,1B1,1B2
2F0,2B0,2F1,2B1,2F2,2B2
"""


def phases(answer: object) -> Verdict:
    """1F1B, P=6, M=10: how many warm-up forwards, steady pairs and cool-down backwards does rank 2 have?"""
    names = ("warm-up forwards", "steady pairs", "cool-down backwards")
    return numbers(answer, (3, 7, 3), "P-1-s = 3 forwards first, as many backwards last, 10-3 pairs between", names)


def peaks(answer: object) -> Verdict:
    """1F1B, P=6, M=3: the peak in flight of every rank, rank 0 first."""
    names = [f"rank {r}" for r in range(6)]
    return numbers(answer, one_f_one_b_peak_in_flight(6, 3), "P-s, but never more than there are microbatches", names)


def one_f_one_b_builder(answer: object) -> Verdict:
    """Write `rows(num_ranks, num_microbatches)` for 1F1B. It must also work with fewer microbatches than ranks."""

    def judge(timeline: Timeline, P: int, M: int) -> str | None:
        if timeline.makespan != floor_makespan(P, M, 1, 2):
            return f"the makespan is {timeline.makespan}; 1F1B takes {floor_makespan(P, M, 1, 2)}"
        if timeline.peak_in_flight != one_f_one_b_peak_in_flight(P, M):
            return f"the peaks are {timeline.peak_in_flight}; 1F1B holds {one_f_one_b_peak_in_flight(P, M)}"
        return None

    sizes = ((4, 8), (2, 4), (3, 5), (1, 3), (4, 2), (6, 6))
    return builder(answer, judge, "legal at six sizes, with 1F1B's time and memory", sizes)


@checker("a number for each of four ranks, such as (4, 3, 2, 1)", lambda answer: not isinstance(answer, str))
def least_memory_at_latency_1(answer: object) -> Verdict:
    """P=4, M=8, latency 1: the `in_flight` with the smallest sum that still reaches a makespan of 39."""
    with told("", TypeError, ValueError):
        caps = [index(cap) for cap in answer]
        timeline = simulate(build("1F1B", num_ranks=4, num_microbatches=8, in_flight=caps), Costs(latency=1))
    if timeline.makespan > 39:
        return wrong(f"{tuple(caps)} takes {timeline.makespan}")
    if sum(caps) > 15:
        return wrong(f"{tuple(caps)} takes 39 and holds {sum(caps)} in all; less is enough")
    return right("39 like eager 1F1B, which holds one more")


@checker()
def unstick(answer: object) -> Verdict:
    """Give `STUCK_ROWS` with one row reordered so that it runs at the floor: CSV text or rows."""
    schedule = schedule_of(answer, (3, 3, 3), "keep 3 ranks, 3 stages and 3 microbatches")
    stuck = [line.split(",") for line in STUCK_ROWS.split()]
    changed = [rank for rank, row in enumerate(schedule.rows) if [str(a) for a in row] != stuck[rank]]
    if len(changed) > 1:
        return wrong(f"rows {' and '.join(map(str, changed))} differ from the exercise's: reorder one row only")
    if (makespan := simulate(schedule).makespan) > floor_makespan(3, 3, 1, 2):
        alone = "no order of this row alone does better than 18; another row"
        better = "another order of it" if changed[0] == 0 else alone
        return wrong(f"with row {changed[0]} reordered it runs, in {makespan}: {better} takes 15")
    return right("the circle is broken, and the time is the floor")


def slow_rank(answer: object) -> Verdict:
    """P=4, M=16, one rank takes twice as long for everything: 1F1B's makespan if that is rank 1?"""
    slow = [[2 if r == 1 else 1 for r in range(4)] for _ in range(3)]
    expected = simulate(build("1F1B", num_ranks=4, num_microbatches=16), Costs(*slow)).makespan
    traps = {
        2 * 57: "only one rank is slow, and the others' ramps stay short",
        simulate(build("GPipe", num_ranks=4, num_microbatches=16), Costs(*slow)).makespan: "that is GPipe's",
    }
    return number(answer, expected, "the slow rank works 16 x 6; what stands around it is ramps", traps=traps)


def megabytes(answer: object) -> Verdict:
    """P=4, M=16, 32 MB a microbatch and stage: rank 0's peak under GPipe, under 1F1B, and all ranks' under 1F1B."""
    names = ("rank 0 under GPipe", "rank 0 under 1F1B", "all ranks under 1F1B")
    peaks = one_f_one_b_peak_in_flight(4, 16)
    why = "GPipe holds all M, 1F1B P-s on rank s: 4 + 3 + 2 + 1 = 10 together, where GPipe holds 64"
    return numbers(answer, (16 * 32, peaks[0] * 32, sum(peaks) * 32), why, names)
