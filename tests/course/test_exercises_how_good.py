"""Checkers of the chapter on how good an order can be refuse wrong answers and say what is wrong; the chapter's
solutions show what is right."""

from __future__ import annotations

import random
import re
from math import ceil

import pytest
from checkers import raises, table_tests

import pplab as pp
from pplab import lab
from pplab_course import figures, pictures
from pplab_course import how_good as exercise
from pplab_course.frontier_view import FrontierView, bound_of

LOOP = [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
RIGHT = {**exercise.BROKEN, "1B": 9, "0B": 13}
CUT = [4, 4, 4, 4, 5, 5, 4, 2]

WRONG = [
    (exercise.small_block, (2, 4), "rank 0: 12 units over 6 are 2, which is the average"),
    (exercise.small_block, (3, 2), "rank 1: a microbatch stays until its W"),
    (exercise.small_block, (3, 3), "rank 1: 18 units over 6 are 3: round up first"),
    (exercise.small_block, 3, "expected 2 numbers in a row (rank 0, rank 1), got 3"),
    (exercise.balanced_placement, LOOP, "rank 0 would hold the most"),
    (exercise.balanced_placement, [[0, 7], [1, 6], [2, 5], [3, 4]], "four ranks with four stages each"),
    (exercise.balanced_placement, [[0, 1, 2, 3]] * 4, "on exactly one rank"),
    (exercise.balanced_placement, 16, "expected a list of four lists"),
    (exercise.repair, exercise.BROKEN, "on rank 0, 0F (at 0) and 0B (at 11) meet in unit 0"),
    (exercise.repair, {**RIGHT, "0B": 10}, "0B starts at 10, and what 1B makes arrives at 12"),
    (exercise.repair, {**RIGHT, "0B": 16}, "the ranks hold up to (6, 3, 1), and (5, 3, 1) are enough"),
    (exercise.repair, {"0F": 0}, "expected the starts of 0F, 1F, 2F, 2B, 1B, 0B, got 0F"),
    (exercise.repair, {**RIGHT, "0B": "late"}, "the start of 0B"),
    (exercise.repair, 3, "expected a dict of starts"),
    (
        exercise.causes,
        {**exercise.TEAMS, "A": "two copies"},
        "A: not 'two copies'; what has been shown of orders that nobody has tried?",
    ),
    (exercise.causes, {**exercise.TEAMS, "D": "luck"}, "D: expected one of unequal times, both ends"),
    (exercise.causes, {"A": "no proof"}, "expected a dict with the keys A, B, C and D"),
    (exercise.design, lab.v_half_block(4), "it takes 86.5 and holds 6; V-Half takes 86.5"),
    (exercise.design, lab.zb_v_block(4), "holds 8 activations of a stage: 6 are allowed"),
    (exercise.design, pp.build("ZB-H1", num_ranks=4, num_microbatches=8), "expected 4 ranks, 8 stages"),
    (exercise.design, pp.build("InterleavedZeroBubble", num_ranks=4, num_microbatches=8), "expected a V, with stages"),
    (exercise.design, 3, "expected a lab.Block, a schedule or rows"),
    (exercise.design, raises, "expected a row of actions for each rank"),
    (exercise.design, lab.v_half_block(5), "yours has 5 ranks, 10 stages"),
    (exercise.smaller_cards, "V-Half", "expected a dict of what lab.Case.row takes"),
    (exercise.smaller_cards, {"cut": CUT}, "which schedule? Expected the key schedule among cut"),
    (exercise.smaller_cards, {"schedule": "ZB-V", "cut": CUT}, "it doesn't fit: rank"),
    (exercise.smaller_cards, {"schedule": "1F1B", "recompute": True}, "more than the best that we know"),
    (exercise.smaller_cards, {"schedule": "V-Half", "num_microbatches": 8}, "a step has 16 sequences, and yours has 8"),
    (exercise.smaller_cards, {"schedule": "V-Half", "cut": [32]}, "for each of 8 stages how many of 32 layers"),
    (exercise.smaller_cards, {"schedule": "a perfect pipeline"}, "is no schedule"),
]

test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_any_right_answer_is_accepted():
    block = lab.v_block(4, (3, 1, 3, 1), (0, 0, 0))
    for answer in (block, block.reorder(8, exercise.UNEVEN), block.reorder(8, exercise.UNEVEN).schedule.rows):
        assert exercise.design(answer), answer
    assert exercise.repair({key: start + 1 for key, start in RIGHT.items()})  # a unit later, all of it
    near = exercise.smaller_cards({"schedule": "ZB-V"} | SMALL)
    assert near and "above the best that we know" in near.says


ASKED = {"placement": "V", "costs": exercise.UNEVEN, "limit": exercise.IN}


@pytest.mark.slow
def test_a_search_finds_the_shortest_design():
    assert "takes less than 84.5: yours is 0.0% above" in exercise.design(lab.search(4, 8, **ASKED).schedule).says


@pytest.mark.slow
@pytest.mark.long  # the search above finds it, which the proof bounds
def test_no_design_is_shorter_than_it_says():
    known = lab.search(4, 8, **ASKED)
    found = lab.optimum(lab.Problem(4, 8, **ASKED), time_limit=300, workers=1, start=[known.schedule])
    assert found.proved and found.value == exercise.SHORTEST


def test_the_answers_by_hand_are_the_blocks():
    block = lab.Block(exercise.SMALL, (0, 1, 1, 0), 6)
    assert block.bound == (3, 4) and block.peak == (2, 4) and block.lifespans == (9, 10, 8, 3)
    assert lab.Block(RIGHT, (0, 1, 2), 3, exercise.LATE).bound == exercise.LEAST


def test_less_than_five_three_and_one_cant_be_held():
    """No block of the starts near those that messages force holds less on any rank."""
    found = []
    for seed in range(2000):
        rng, now, starts = random.Random(seed), 0, {}
        for key in exercise.BROKEN:
            starts[key] = now + rng.choice((0, 0, 1, 2))
            now = starts[key] + (1 if key[1] == "F" else 2) + (key not in ("2F", "0B"))
        try:
            found.append(lab.Block(starts, (0, 1, 2), 3, exercise.LATE).bound)
        except ValueError:
            continue
    assert len(found) > 20 and tuple(map(min, zip(*found, strict=True))) == exercise.LEAST


@pytest.mark.parametrize("setting", ["equal-8", "3-4-2-8", "profile-8", "case-16"])
def test_a_frontier_is_pointed_at(setting):
    """Every point has its chart, which takes as long as was recorded, and no order is below its bound."""
    view = FrontierView(lab.frontiers()[setting])
    page = view._page()
    places = set(re.findall(r'class="pplab-point" data-point="(\d+)"', page))
    assert sorted(map(int, places)) == [*range(len(view.shown))] and len(places) > 10 and 'id="point-' not in page
    assert page.count('type="radio"') == page.count("<label") == len(view.shown)
    assert len(re.findall(r'-\d+" checked>', page)) == 1
    for each in view.shown:
        assert each.timeline.makespan == pytest.approx(each.point.time, rel=1e-6)
        assert each.point.time >= each.bound * (1 - 1e-6)
        assert each.name in repr(view) and each.name in page
    data, _ = view._repr_mimebundle_()
    assert set(data) == {figures.PAGE, "image/png", "text/plain"}
    assert f"{len(view.frontier.published)} published schedules" in data["text/plain"]


def test_a_bound_is_that_of_the_next_limit():
    frontier = lab.frontiers()["equal-8"]
    of = {point.name: bound_of(frontier, point) for point in frontier.published}
    assert (of["V-Half"], of["V-Min"], of["ZB-H1"], of["1F1B"]) == (26.5, 29.5, 27, 33)
    assert of["DualPipeV"] == 25.5  # in more memory than the last limit, which is final
    assert of["GPipe"] == 33 and of["Interleaved1F1B"] == 28.5  # whole backwards, of which only split ones are recorded


@pytest.mark.parametrize("seed", range(6))
def test_lives_are_as_many_as_the_picture_says(seed):
    rng = random.Random(seed)
    lifespan, interval, M = rng.randint(1, 40), rng.randint(1, 9), rng.randint(2, 9)
    ax = pictures.lives(lifespan, interval, M)
    held = int(re.search(r"it holds (\d+) of them", ax.get_label())[1])
    assert held == min(ceil(lifespan / interval), M - 1) and f"at most {ceil(lifespan / interval)}" in ax.get_label()
    with pytest.raises(ValueError, match="lifespan"):
        pictures.lives("long", 6)


SMALL = {"cut": [4, 4, 3, 3, 5, 5, 5, 3], "recompute": [3, 2, 1, 0, 2, 1, 0, 0]}


def test_what_is_known_is_found_again():
    def found(setting, limit):
        return next(p for p in lab.frontiers()[setting].found if (p.placement, p.limit) == ("V", limit))

    on_v, case = found("3-4-2-8", 3), exercise.SMALLER
    small, limit = case.plan("ZB-V", 16, **SMALL), case.room_gb * 1e9
    best = lab.search(4, 16, placement="V", costs=small.costs, memory=small.memory, limit=limit, tries=3000).schedule
    assert on_v.time == exercise.SHORTEST
    row = case.row(best, 16, **SMALL)
    assert row.fits and row.dollars == pytest.approx(exercise.BEST_KNOWN, abs=1e-3)
    says = exercise.smaller_cards({"schedule": best} | SMALL).says
    assert says.endswith(", the best that we know")
