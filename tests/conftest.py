"""What the tests share: random legal schedules, and a simulator that owes nothing to pplab's."""

from __future__ import annotations

import random

import pytest

from pplab import Action, Kind, Schedule

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741


def random_schedule(rng: random.Random, num_ranks: int | None = None, split_share: float = 0.5) -> Schedule:
    """A legal schedule: random ranks, stages, placement, microbatches, full and split backwards, and order.

    Grown by running it: at every step a random rank appends a random action whose needs are met.
    """
    num_ranks = num_ranks or rng.randint(1, 5)
    num_stages = num_ranks + rng.randint(0, 4)
    num_microbatches = rng.randint(1, 6)
    home = [*range(num_ranks), *(rng.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
    rng.shuffle(home)
    split = {(s, m): rng.random() < split_share for s in range(num_stages) for m in range(num_microbatches)}
    todo = {(s, k, m) for (s, m), two in split.items() for k in ("FIW" if two else "FB")}
    done: set[tuple[int, str, int]] = set()
    rows: list[list[str]] = [[] for _ in range(num_ranks)]
    while todo:
        ready = sorted(a for a in todo if is_ready(a, done, num_stages))
        action = rng.choice(ready)
        stage, kind, m = action
        rows[home[stage]].append(f"{stage}{kind}{m}")
        todo.remove(action)
        done.add(action)
    return Schedule(rows)


def is_ready(action: tuple[int, str, int], done: set, num_stages: int) -> bool:
    """The dependencies, written down a second time."""
    stage, kind, m = action
    if kind == "F":
        return stage == 0 or (stage - 1, "F", m) in done
    if kind == "W":
        return (stage, "I", m) in done
    after = stage == num_stages - 1 or (stage + 1, "B", m) in done or (stage + 1, "I", m) in done
    return (stage, "F", m) in done and after


def slow_simulate(schedule: Schedule, duration, latency: float) -> dict[Action, tuple[float, float]]:
    """Start and end of every action, by asking again and again which rank can go on. Quadratic, and independent."""
    times: dict[tuple[int, str, int], tuple[float, float, int]] = {}
    position, clock = [0] * schedule.num_ranks, [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            if position[rank] == len(row):
                continue
            stage, kind, m = (x if i != 1 else str(x) for i, x in enumerate(row[position[rank]]))
            if not is_ready((stage, kind, m), set(times), schedule.num_stages):
                continue
            if kind == "F":
                before = [(stage - 1, "F", m)]
            elif kind == "W":
                before = [(stage, "I", m)]
            else:
                before = [(stage, "F", m), (stage + 1, "B", m), (stage + 1, "I", m)]
            ends = [times[b][1] + (latency if times[b][2] != rank else 0) for b in before if b in times]
            start = max([clock[rank], *ends])
            end = start + duration(kind, stage)
            times[stage, kind, m] = (start, end, rank)
            clock[rank], position[rank] = end, position[rank] + 1
            moved = True
    return {Action(s, Kind(k), m): (start, end) for (s, k, m), (start, end, _) in times.items()}


@pytest.fixture(params=range(8))
def rng(request) -> random.Random:
    """A seeded source of randomness; every test that takes it runs with several seeds."""
    return random.Random(request.param)
