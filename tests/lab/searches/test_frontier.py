"""Time against memory, as it is recorded: every order takes and holds what the file says, and no bound is above it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from frontier import best, describe, tidied, twice
from frontier_settings import SETTINGS

import pplab as pp
from pplab import lab
from pplab.lab import Frontier, Point

ROOT = Path(__file__).parents[3]
FRONTIERS = lab.frontiers(ROOT / "results")


@pytest.mark.parametrize("name", FRONTIERS)
def test_every_recorded_order_takes_and_holds_what_is_said(name):
    scale = 1 if SETTINGS[name].costs else 1e-9
    problems = {(problem.placement, problem.split): problem for problem, _ in SETTINGS[name].problems()}
    data = json.loads((ROOT / "results" / "frontier.json").read_text())
    (part,) = [part for part in data["parts"] if part["name"] == name]
    said = describe(SETTINGS[name])
    assert tidied(said) == tidied({key: part[key] for key in said})
    for point, timeline in FRONTIERS[name].timelines().items():
        assert timeline.makespan == pytest.approx(point.time, rel=1e-8)
    for point in FRONTIERS[name].found:
        problem = replace(problems[point.placement, point.split], limit=point.limit / scale)
        assert problem.fits(point.schedule)
        assert max(point.schedule.peak_held(problem.memory)) * scale == pytest.approx(point.held, rel=1e-8)
        assert lab.floor(problem).value <= point.bound * (1 + 1e-8) and point.bound <= point.time
        assert point.proved == (point.time <= point.bound * (1 + 1e-6))


def test_a_folder_without_a_recording_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no recording of `make frontier` in {tmp_path}"):
        lab.frontiers(tmp_path)


def test_more_memory_takes_no_longer():
    for frontier in FRONTIERS.values():
        for look in {(point.placement, point.split) for point in frontier.found}:
            times = [p.time for p in frontier.found if (p.placement, p.split) == look]
            assert times == sorted(times, reverse=True), (frontier.name, look)


def frontier_of(*points: Point) -> Frontier:
    return Frontier("some", "some times", 2, 4, "ms", "GB", points)


def test_who_is_beaten():
    one = Point("1F1B", "one stage per rank", held=4, time=33, split=False)
    same = Point("found", "one stage per rank", held=4, time=33, limit=4, bound=33, proved=True, split=False)
    split = Point("found", "one stage per rank", held=4, time=27, limit=4, bound=27, proved=True)
    larger = Point("found", "one stage per rank", held=5, time=30, limit=5, bound=30, proved=True, split=False)
    better = Point("found", "one stage per rank", held=3, time=32, limit=3, bound=30, split=False)
    assert frontier_of(one, same, split, larger).beaten() == ()
    assert frontier_of(one, same, split, larger, better).beaten() == ((one, better),)


def test_orders_for_growing_limits_end_where_memory_helps_no_more():
    found = best(lab.Problem(3, 4), [5, 4, 3, 2, 0.5], seconds=20)
    assert [row["limit"] for row in found] == [2, 3] and found[-1]["time"] == 3 * 4 + 2 and found[-1]["final"]
    assert found[0]["proved"] and found[0]["time"] > found[1]["time"]


V = lab.Problem(4, 8, placement="V", memory=pp.Memory(0.5))


def test_a_recording_goes_on_where_it_ended():
    """Without a second for the solver: proofs and bounds are kept, and one in more memory holds in less, too."""
    less, more = best(V, [2, 2.5], seconds=0)
    assert not less["proved"] and not more["proved"] and more["bound"] < 56 < more["time"]
    again = best(V, [2, 2.5], seconds=0, known={2: less, 2.5: more | {"bound": 56, "seconds": 7}})
    assert [row["bound"] for row in again] == [56, 56] and again[1]["time"] == more["time"]
    assert again[1]["seconds"] >= 7 and again[1]["progress"][-1] == [again[1]["seconds"], more["time"], 56]
    done = less | {"proved": True, "bound": less["time"]}
    assert best(V, [2], seconds=0, known={2: done.copy()}) == [done | {"name": "proved"}]


@pytest.mark.parametrize("placement", ["one stage per rank", "V", "bidirectional"])
def test_an_order_is_run_twice_in_a_row(placement):
    half, whole = (lab.Problem(4, M, placement=placement) for M in (6, 12))
    for timeline in half.published():
        order = half.known([timeline.schedule])[-1].schedule
        made = twice(order, whole)
        assert pp.validate(made) is None and len(made.columns.kinds) == 2 * len(order.columns.kinds)
        assert made.peak_in_flight == order.peak_in_flight
        assert made.home() == whole.one_at_a_time().home()
        assert pp.simulate(made).makespan <= 2 * pp.simulate(order).makespan


SEARCHED = [
    pytest.param(name, point, id=f"{name}-{point.placement}-{point.limit:g}")
    for name, frontier in FRONTIERS.items()
    for point in frontier.found
    if point.split and point.placement != "bidirectional" and not point.proved
]


def no_longer_than_the_search_finds(name: str, point: Point) -> None:
    of = (problem for problem, _ in SETTINGS[name].problems() if problem.split)
    problem = next(problem for problem in of if problem.placement == point.placement)
    asked = {each: getattr(problem, each) for each in ("placement", "costs", "memory")}
    limit = point.limit if SETTINGS[name].costs else point.limit * 1e9
    found = lab.search(problem.num_ranks, problem.num_microbatches, limit=limit, **asked)
    assert point.time <= found.timeline.makespan * (1 + 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "point"), SEARCHED[:: max(1, len(SEARCHED) // 4)])
def test_no_recorded_order_is_longer_than_one_that_the_search_finds(name, point):
    no_longer_than_the_search_finds(name, point)


@pytest.mark.slow
@pytest.mark.long  # all that is open, of which the test above takes some
@pytest.mark.parametrize(("name", "point"), SEARCHED)
def test_no_recorded_order_at_all_is_longer_than_one_that_the_search_finds(name, point):
    no_longer_than_the_search_finds(name, point)
