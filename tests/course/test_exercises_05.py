"""Chapter 5's checkers refuse wrong answers and say what is wrong; what is right, its solutions show."""

from __future__ import annotations

import pytest

import pplab as pp
from conftest import assert_explained
from pplab.course import interleaved


def default_rows(num_ranks, num_microbatches):
    return pp.build("Interleaved1F1B", num_ranks=num_ranks, num_microbatches=num_microbatches).rows


def rows_of_groups_of_p(num_ranks, num_microbatches):
    options = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "group_size": num_ranks}
    return pp.build("Interleaved1F1B", **options).rows


def breadth_rows(num_ranks, num_microbatches):
    return pp.build("LoopedBFS", num_ranks=num_ranks, num_microbatches=num_microbatches).rows


def thick_rows(num_ranks, num_microbatches):
    return pp.build("1F1B", num_ranks=num_ranks, num_microbatches=num_microbatches)


def v_rows(num_ranks, num_microbatches):
    return pp.build("ZBVZeroBubble", num_ranks=num_ranks, num_microbatches=num_microbatches)


def alternating_rows(num_ranks, num_microbatches):
    order = range(num_microbatches)
    return [
        [f"{s}F{m}" for m in order for s in (r, r + num_ranks)]
        + [f"{s}B{m}" for m in order for s in (r + num_ranks, r)]
        for r in range(num_ranks)
    ]


def small_groups_rows(num_ranks, num_microbatches):
    """Groups of two, which deadlock on four ranks."""
    groups = [range(m, min(m + 2, num_microbatches)) for m in range(0, num_microbatches, 2)]
    rows = []
    for r in range(num_ranks):
        down = [f"{s}F{m}" for g in groups for s in (r, r + num_ranks) for m in g]
        up = [f"{s}B{m}" for g in groups for s in (r + num_ranks, r) for m in g]
        warmup = 2 + 2 * (num_ranks - 1 - r)
        pairs = [a for pair in zip(down[warmup:], up, strict=False) for a in pair]
        rows.append(down[:warmup] + pairs + up[len(down) - warmup :])
    return rows


def broken_rows(num_ranks, num_microbatches):
    return [][num_ranks]


def slow_rows(num_ranks, num_microbatches):
    """All microbatches through each stage, but the backwards wait for one another."""
    rows = breadth_rows(num_ranks, num_microbatches)
    return [[a for a in row if a.kind.name == "F"] + _one_by_one(row) for row in rows]


def _one_by_one(row):
    return [a for m in range(1, -1, -1) for a in row if a.kind.name == "B" and a.microbatch % 2 == m]


def undoubled(group_size):
    from pplab.builders import looped_rows

    return looped_rows(3, 4, 2, group_size, 1)


def doubled(group_size):
    return pp.build("Interleaved1F1B", num_ranks=3, num_microbatches=4, group_size=group_size)


WRONG = [
    (interleaved.one_denominator, (7 / 55, 7 / 96, 96), "7/96 is the ratio, idle over ideal"),
    (interleaved.one_denominator, (0.127, 0.073, 96), "7/96 is the ratio, idle over ideal"),
    (interleaved.one_denominator, (0.127, 0.068, 96.4), "microbatches for GPipe: 96.4 isn't it"),
    (interleaved.one_denominator, (7 / 55, 7 / 103, 48), "microbatches for GPipe: 48 isn't it"),
    (interleaved.where_is, (8, 8, 11), "rank: 8 isn't it"),
    (interleaved.where_is, (8, 0, 12), "messages: 12 isn't it"),
    (interleaved.where_is, 8, "expected 3 numbers"),
    (interleaved.transfers, 3, "not V times"),
    (interleaved.transfers, 23, "1F1B has seven"),
    (interleaved.transfers, 2, "the number is larger"),
    (interleaved.transfers, "23/7", "write it without quotes"),
    (interleaved.transfers, 3.3, "3.3 is near: give 3 digits"),
    (interleaved.transfers, 3.28, "3.28 is near; the number is a little larger"),
    (interleaved.even_groups_builder, rows_of_groups_of_p, "at 4 ranks and 9 microbatches: it takes 74"),
    (interleaved.even_groups_builder, breadth_rows, "one rank holds 16 stages' activations; 11 are enough"),
    (interleaved.even_groups_builder, thick_rows, "yours: 4 ranks, 4 stages and 8 microbatches"),
    (interleaved.even_groups_builder, v_rows, "must lie on ranks 0, 1, 2, 3, 0, 1, 2, 3"),
    (interleaved.even_groups_builder, small_groups_rows, "at 4 ranks and 8 microbatches: deadlock"),
    (interleaved.even_groups_builder, broken_rows, "your function raised IndexError"),
    (interleaved.even_groups_builder, 28.5, "expected a function"),
    (interleaved.crossover, 0.5625, "only up to c = 0.5"),
    (interleaved.crossover, 0.140625, "overtake four"),
    (interleaved.crossover, 0.54, "0.54 is near: give 3 digits"),
    (interleaved.crossover, 1.375, "that is where 1F1B overtakes"),
    (interleaved.beat_24, doubled(3), "holds (8, 6, 4): at most 6"),
    (interleaved.beat_24, undoubled(4), "it takes 20 and holds (7, 6, 5): at most 6"),
    (interleaved.beat_24, pp.build("1F1B", num_ranks=3, num_microbatches=4), "3 stages and 4 microbatches"),
    (interleaved.beat_24, "0F0", "0B0 is missing"),
    (interleaved.looped_bfs_builder, default_rows, "goes from stage to stage"),
    (interleaved.looped_bfs_builder, alternating_rows, "goes from stage to stage 30 times"),
    (interleaved.looped_bfs_builder, slow_rows, "goes from stage to stage"),
    (interleaved.gathers, (18, 2), "the first stage's weights have to be gathered, too"),
    (interleaved.gathers, (19, 4), "looped BFS: 4 isn't it"),
]


@pytest.mark.parametrize(("check", "answer", "says"), WRONG, ids=lambda x: getattr(x, "__name__", ""))
def test_a_wrong_answer_is_explained(check, answer, says):
    assert_explained(check, answer, says)


@pytest.mark.parametrize("check", dict.fromkeys(check for check, _, _ in WRONG), ids=lambda check: check.__name__)
def test_dots_are_no_answer(check):
    assert check(...).right is None


def test_other_right_answers_are_accepted():
    assert interleaved.looped_bfs_builder(breadth_rows)
    assert interleaved.where_is([8, 0, 11]) and interleaved.crossover(0.5417) and interleaved.crossover(0.542)
    assert interleaved.one_denominator((0.127, 0.068, 96)) and interleaved.transfers(3.29)
    assert interleaved.beat_24(pp.Schedule(undoubled(3)))


def test_the_latencies_where_lines_cross_are_those_of_the_simulation():
    def takes(name, V, c, **options):
        s = pp.build(name, num_ranks=4, num_microbatches=8, **options)
        return pp.simulate(s, pp.Costs(latency=c).finer(V)).makespan

    def two(c):
        return takes("Interleaved1F1B", 2, c, stages_per_rank=2)

    assert two(13 / 24) == pytest.approx(takes("eager-1F1B", 1, 13 / 24))
    assert two(2.25 / 16) == pytest.approx(takes("Interleaved1F1B", 4, 2.25 / 16, stages_per_rank=4))
    assert two(1.375) == pytest.approx(takes("1F1B", 1, 1.375))
