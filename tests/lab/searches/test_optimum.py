"""Shortest orders and the bounds below them: against all orders there are, and against constants of others."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest

import pplab as pp
from pplab import lab
from pplab.lab import Problem, formulas
from pplab.lab.searches.problem import PLACEMENTS
from pplab.simulator import stuck_at

pytest.importorskip("ortools")
QUICK = {"workers": 2, "time_limit": 60}


def orders(chains: list[list[str]]) -> Iterator[list[str]]:
    """Every order of a rank's actions that keeps each microbatch's own."""
    if not any(chains):
        yield []
    for i, chain in enumerate(chains):
        if chain:
            rest = [*chains[:i], chain[1:], *chains[i + 1 :]]
            yield from ([chain[0], *order] for order in orders(rest))


def rows_of(problem: Problem) -> list[list[list[str]]]:
    """Of every rank: all of its orders, microbatches in any order, of which the solver only sees those in order."""
    P, M, S = problem.num_ranks, problem.num_microbatches, problem.num_stages
    places = {"V": lambda s, m: min(s, 2 * P - 1 - s), "bidirectional": lambda s, m: s if 2 * m < M else P - 1 - s}
    place = places.get(problem.placement, lambda s, m: s % P)
    found = []
    for rank in range(P):
        chains = []
        for m in range(M):
            own = [s for s in range(S) if place(s, m) == rank]
            back = [f"{s}{kind}{m}" for s in reversed(own) for kind in ("IW" if problem.split else "B")]
            chains.append([f"{s}F{m}" for s in own] + back)
        rows = (tuple(map(pp.parse, order)) for order in orders(chains))
        limit = problem.limit[rank] + 1e-9
        found.append([row for row in rows if max(held for held, _ in problem.memory.levels(row)) <= limit])
    return found


def shortest(problem: Problem) -> float:
    """The least makespan of all orders within the limit, each simulated."""
    least = float("inf")
    for rows in product(*rows_of(problem)):
        schedule = pp.Schedule(rows)
        if stuck_at(schedule):
            continue
        least = min(least, pp.simulate(schedule, problem.costs).makespan)
    return least


def drawn(seed: int, P: int, M: int, placement: str, split: bool) -> Problem:
    """Random times per stage, latency, a memory limit that binds, and perhaps sizes of which I frees a part."""
    rng = random.Random(seed)
    each = 2 if placement in ("loop", "V") else 1
    times = [[rng.randint(1, 5) for _ in range(P * each)] for _ in range(3)]
    costs = pp.Costs(*times, latency=rng.choice([0, 0.5, 2]), overhead=rng.choice([0, 0.5]))
    sizes = [rng.randint(2, 4) for _ in range(P * each)]
    memory = rng.choice([pp.Memory(), pp.Memory(sizes, [size - 1 for size in sizes], parameters=1)])
    free = Problem(P, M, placement, costs=costs, split=split, memory=memory)
    return replace(free, limit=[least + rng.randint(0, 2) for least in free.least_limit])


@pytest.mark.parametrize(
    ("P", "M", "placement", "split"),
    [(2, 2, "one stage per rank", True), (3, 2, "one stage per rank", False), (2, 2, "bidirectional", True)]
    + [(2, 2, "V", False), (2, 2, "loop", False)],
)
def test_no_order_of_all_is_shorter(P, M, placement, split):
    for seed in range(2):
        problem = drawn(seed, P, M, placement, split)
        least = shortest(problem)
        found = lab.optimum(problem, use_floor=False, **QUICK)
        assert found.floor.value <= found.bound + 1e-9 <= least + 2e-9, seed
        assert found.proved and found.value == pytest.approx(least), seed


@pytest.mark.parametrize(
    ("problem", "makespan"),
    [
        (Problem(4, 8, split=False), 33),  # (M + P - 1)(F + B), by GPipe and 1F1B
        (Problem(4, 8), 27),  # ZB-H1 and ZB-H2
        (Problem(3, 4, "V", limit=4), 29),  # of V: tests/all_orders.py
        (Problem(4, 5, "V", limit=4), 41),
        (Problem(4, 6, "V", limit=6), 41),
    ],
)
def test_what_others_have_proved(problem, makespan):
    found = lab.optimum(problem, **QUICK)
    assert (found.value, found.bound, found.proved, found.gap) == (makespan, makespan, True, 0)
    assert pp.simulate(found.schedule).makespan == makespan
    assert problem.fits(found.schedule)


def test_no_schedule_beats_the_floor_of_what_it_holds():
    """Of every placement, at random times and latency. Many meet it."""
    rng, met = random.Random(0), 0
    for k in range(16):
        placement, split, M = PLACEMENTS[k % 4], k % 3 > 0, rng.randint(2, 6)
        P = rng.choice([2, 4] if placement == "bidirectional" else [2, 3, 4])
        each = 2 if placement in ("loop", "V") else 1
        times = [[rng.randint(1, 5) for _ in range(P * each)] for _ in range(3)]
        costs = rng.choice([pp.Costs(), pp.Costs(3, 4, 2), pp.Costs(*times, latency=rng.randint(0, 3))])
        free = Problem(P, M, placement, costs=costs, split=split)
        for t in free.known():
            problem = replace(free, limit=t.peak_in_flight)
            least = lab.floor(problem).value
            assert least <= t.makespan, (problem, t)
            met += least == t.makespan
    assert met > 15


@pytest.mark.parametrize(("F", "I", "W"), [(1, 1, 1), (3, 4, 2), (5, 3, 2), (2, 4, 1)])
@pytest.mark.parametrize("P", [2, 4, 7])
def test_the_closed_form_proves_these_schedules_the_shortest_in_their_memory(P, F, I, W):  # noqa: E741
    """For any number of microbatches: 1F1B in any memory, ZB-H1 and ZB-H2 in their own, ZB-V in its own if I <= 2W."""
    costs = pp.Costs(F, I, W)
    for M in (2 * P, 2 * P + 5):
        work = M * (F + I + W)
        assert lab.floor(Problem(P, M, costs=costs, split=False)).value == formulas.floor_makespan(P, M, F, I + W)
        assert lab.floor(Problem(P, M, costs=costs, limit=P)).value == work + formulas.zb_h1_bubble(P, F, I, W)
        in_h2 = Problem(P, M, costs=costs, limit=2 * P - 1)
        assert lab.floor(in_h2).value == formulas.zb_h2_makespan(P, M, F, I, W)
        if F <= I <= 2 * W:
            in_v = Problem(P, M, "V", costs=costs, limit=2 * P)
            assert lab.floor(in_v).value == 2 * M * (F + I + W) + (P - 1) * max(I, 2 * (I - W))


def test_times_that_are_no_multiples_of_a_unit_are_rounded_and_it_says_so():
    third = pp.Costs(1 / 3, 1 / 7, 1 / 11, latency=0.01)
    found = lab.optimum(Problem(2, 3, limit=2, costs=third), use_floor=False, **QUICK)
    assert found.proved and not found.exact and found.bound < found.value < found.bound * (1 + 1e-6)
    assert lab.optimum(Problem(2, 3, costs=pp.Costs(0.1, 0.7, 18.522)), **QUICK).exact


HARD = Problem(4, 8, "V", limit=6, costs=pp.Costs(3, 4, 2))  # the floor, 164, isn't met: it is 169


def test_a_search_that_is_interrupted_has_its_best_so_far_and_no_more_is_claimed():
    told = []

    def interrupt(found: lab.BestSoFar) -> None:
        told.append(found)
        if len(told) == 1:  # the solver aborts the process at the third
            os.kill(os.getpid(), signal.SIGINT)

    found = lab.optimum(HARD, on_progress=interrupt, **QUICK)
    assert found.interrupted and not found.proved and told
    assert found.floor.value <= found.bound < found.value <= 173  # V-Half's
    assert found.gap == found.value / found.bound - 1 > 0
    assert "not below" in repr(found) and "proved" not in repr(found)
    assert HARD.fits(found.schedule) and pp.simulate(found.schedule, HARD.costs).makespan == found.value
    with pytest.raises(KeyboardInterrupt):  # the next one is Python's again
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)


def test_it_tells_every_better_order_and_every_better_bound():
    """Orders get shorter and bounds higher, the two end where the result does, and a bound may rise by itself."""
    told, problem = [], Problem(4, 8, limit=3, costs=pp.Costs(3, 4, 2))
    found = lab.optimum(problem, on_progress=told.append, use_floor=False, time_limit=60, workers=1)
    assert found.proved and told == sorted(told, key=lambda each: (each.seconds, -each.value, each.bound))
    assert all(later.value <= each.value and later.bound >= each.bound for each, later in pairwise(told))
    assert told[-1].value == found.value == 101 and told[-1].bound <= found.bound == 101
    assert any(later.value == each.value and later.bound > each.bound for each, later in pairwise(told))


def test_without_time_it_is_the_best_known_order_and_the_closed_form():
    found = lab.optimum(HARD, time_limit=0)
    assert not found.proved and not found.interrupted
    assert (found.value, found.bound) == (173, found.floor.value) and found.schedule.name == "V-Half"


def test_a_limit_that_nothing_meets_names_the_smallest_that_can_be_met():
    with pytest.raises(
        ValueError, match="rank 0 may hold 1, .* it holds 2. The smallest limit that an order meets is 2"
    ):
        Problem(4, 8, "V", limit=1)
    sizes = pp.Memory([3, 2], weight_input=1, while_input_gradient=1, parameters=10, unit="GB")
    problem = Problem(2, 2, memory=sizes, limit=[14, 13])  # an activation, and one more while I runs
    assert problem.least_limit == (14, 13) == problem.one_at_a_time().peak_held(sizes)
    with pytest.raises(ValueError, match="rank 1 may hold 12 GB.*The smallest .* is 14, 13 GB"):
        replace(problem, limit=[14, 12])


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"placement": "w"}, "placement must be one of"),
        ({"stages_per_rank": 2}, "only a loop can have more"),
        ({"placement": "bidirectional", "num_microbatches": 1}, "from either end"),
        ({"placement": "bidirectional", "num_ranks": 3}, "needs an even number of ranks, got 3"),
        ({"costs": pp.Costs(1, 1, 0)}, "W of stage 0 takes no time"),
        ({"costs": pp.Costs(bandwidth=0.5)}, "messages from rank 0 to rank 1 could queue"),
        ({"costs": pp.Costs([1, 2, 3])}, "forward has 3 values for 2 stages"),
        ({"limit": [4, 4, 4]}, "limit has 3 values for 2 ranks"),
    ],
)
def test_what_is_no_problem(asked, why):
    with pytest.raises(ValueError, match=why):
        Problem(**{"num_ranks": 2, "num_microbatches": 4, **asked})


def test_messages_that_never_queue_are_lags():
    """A link's width makes them later by what they take to pass, and the simulator agrees."""
    problem = Problem(2, 2, costs=pp.Costs(2, 3, 2, latency=0.5, bandwidth=2), limit=2)
    assert problem.lag(problem.streams[0], pp.Kind.F, 0) == 1
    found = lab.optimum(problem, use_floor=False, **QUICK)
    assert found.value == shortest(replace(problem, limit=[2, 2]))


def test_without_or_tools_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    assert lab.optimum(Problem(4, 8, limit=4)).proved  # by the closed form
    with pytest.raises(ImportError, match=r"pip install 'pplab\[prove\]'"):
        lab.optimum(HARD)
