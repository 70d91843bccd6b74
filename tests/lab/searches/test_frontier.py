"""Time against memory, as it is recorded: every order takes and holds what the file says, and no bound is above it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from frontier import optima, plainly
from frontier_settings import SETTINGS

from pplab import lab
from pplab.lab import Frontier, Point

ROOT = Path(__file__).parents[3]
FRONTIERS = lab.frontiers(ROOT / "results")


@pytest.mark.parametrize("name", FRONTIERS)
def test_every_recorded_order_takes_and_holds_what_is_said(name):
    scale = 1 if SETTINGS[name].costs else 1e-9
    problems = {(problem.placement, problem.split): problem for problem, _ in SETTINGS[name].problems()}
    data = json.loads((ROOT / "results" / "frontier.json").read_text())
    (costs,) = [part["costs"] for part in data["parts"] if part["name"] == name]
    assert costs == {p.placement: json.loads(json.dumps(plainly(p.costs))) for p in problems.values()}
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
    found = list(optima(lab.Problem(3, 4), [5, 4, 3, 2, 0.5], time_limit=20, workers=2))
    assert [each.problem.limit for each in found] == [2, 3] and found[-1].value == 3 * 4 + 2 and found[-1].proved
    assert found[0].proved and found[0].value > found[1].value


@pytest.mark.parametrize("name", [name for name in FRONTIERS if name.endswith("-8")][:1])
def test_the_chart_says_what_it_shows(name):
    frontier = FRONTIERS[name]
    ax = lab.frontier_chart(frontier)
    texts = " ".join(text.get_text() for text in ax.texts)
    assert {"ZB-H1", "1F1B", "V-Half"} <= set(re.split(r"[, ]+", texts))
    assert frontier.title == ax.get_title(loc="left") and frontier.held_in in ax.get_xlabel()
    assert f"{len(frontier.published)} published schedules" in ax.get_label()
