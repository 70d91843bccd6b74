"""An answer of rows, actions or numbers gets the same verdict in whatever form it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
from checkers import LATER

import pplab as pp
from pplab.builders import phases
from pplab_course import (
    balance,
    bubble_math,
    gpipe,
    how_good,
    interleaved,
    layout,
    messages,
    naive,
    one_f_one_b,
    zero_bubble,
)

STUCK = [line.split(",") for line in one_f_one_b.STUCK_ROWS.split()]
ROOM_FOR_THREE = """3F0 3I0 3F1 3I1 3F2 3I2 3W0 3F3 3I3 3W1 3F4 3I4 3W2 3F5 3I5 3W3 3F6 3I6 3W4 3F7 3I7 3W5 3W6 3W7"""
CHART = pp.build("1F1B", num_ranks=3, num_microbatches=3).rows


def rows(name: str, num_ranks: int, num_microbatches: int) -> list[list[str]]:
    schedule = pp.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return [list(map(str, row)) for row in schedule.rows]


def beats_24() -> list[list[str]]:
    made = []
    for rank in range(3):
        stages, groups = (rank, rank + 3), (range(3), range(3, 4))
        down = [f"{s}F{m}" for g in groups for s in stages for m in g]
        up = [f"{s}B{m}" for g in groups for s in stages[::-1] for m in g]
        made.append(list(phases(down, up, 3 + (2 - rank))))
    return made


LINES = [  # an answer of one line
    (bubble_math.slow_middle, (18, 30)),
    (bubble_math.tokens_per_second, (2.13, 0.901, 246000)),
    (bubble_math.repair, "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3".split()),
    (bubble_math.repair, "F0 F1 B0 F2 B1 F3 B2 B3".split()),
    (bubble_math.too_early, ("0B0", "1B0")),
    (bubble_math.six_hours, (5, 5, 5, 5, 5, 5, 2)),
    (naive.moved_layers, (0, 5.07)),
    (gpipe.one_rank_recomputes, (26, 28)),
    (gpipe.larger_cards, (10, 2.65)),
    (gpipe.overhead_from_a_sweep, (40, 1)),
    (one_f_one_b.twice_the_ranks, (36.5, 61.7, 29.7)),
    (one_f_one_b.too_early, ("1B4",)),
    (messages.least_tickets, (10, 7, 4, 1)),
    (interleaved.gathers, (19, 47)),
    (zero_bubble.place_weights, ROOM_FOR_THREE.split()),
    (balance.capped, (1, 2, 4, 3)),
    (layout.volumes, (83.9, 310, 8.05)),
    (layout.launched, (4, 32, 4, 0.0519)),
    (how_good.small_block, (3, 4)),
]
CHARTS = [  # an answer with a line per rank
    (bubble_math.chart_at_the_floor, rows("1F1B", 3, 3)),
    (bubble_math.repair, rows("1F1B", 3, 4)),
    (gpipe.sixteen_sequences, [[8, 8, 6, 4], [9, 9, 8, 6]]),
    (one_f_one_b.by_hand, rows("1F1B", 5, 3)),
    (one_f_one_b.unstick, ["0F0 0F1 0F2 0B0 0B1 0B2".split(), *STUCK[1:]]),
    (interleaved.beat_24, beats_24()),
    (how_good.balanced_placement, [[r, 7 - r, 8 + r, 15 - r] for r in range(4)]),
    (interleaved.repair_slices, ["0F0 0F1 0F2 0B2 0B1 0B0".split(), "1F0 1F1 1F2 1B2 1B1 1B0".split()]),
]  # fmt: skip


def line_forms(given: Iterable[object]) -> Iterator[tuple[object, ...]]:
    """The arguments by which a line is answered."""
    items, texts = list(given), [str(each) for each in given]
    yield from ((items,), (tuple(items),), tuple(items), (texts,), tuple(texts), ([" ".join(texts)],), ([items],))
    for joint in (",", ", ", " ", "  "):
        yield from ((joint.join(texts),), (f"[{joint.join(texts)}]",), (f"({joint.join(texts)})",))
    yield from ((str(items),), (str(tuple(items)),), (str(texts),), (str([", ".join(texts)]),), (str([items]),))


def chart_forms(given: Iterable[Iterable[object]]) -> Iterator[tuple[object, ...]]:
    """The arguments by which rows are answered."""
    lists, texts = [list(row) for row in given], [[str(each) for each in row] for row in given]
    whole = tuple(map(tuple, lists))
    yield from ((lists,), (whole,), (texts,), tuple(lists), whole)
    for joint in (",", ", ", " "):
        lines = [joint.join(row) for row in texts]
        for each in (lines, [f"[{line}]" for line in lines]):
            yield from ((each,), tuple(each), ("\n".join(each),), (str(each),), (str(tuple(each)),))
        yield (f"[{', '.join(f'[{line}]' for line in lines)}]",)
    yield from ((str(lists),), (str(texts),), (str(whole),))


MISSED = [  # a wrong one, where the right one takes long
    (bubble_math.slow_middle, (30, 18), line_forms),
    (interleaved.gathers, (18, 46), line_forms),
    (zero_bubble.place_weights, zero_bubble.LAST_ROW.split(), line_forms),
    (layout.run_csv, rows("1F1B", 2, 4), chart_forms),
    (how_good.design, rows("ZBVZeroBubble", 4, 8), chart_forms),
]  # fmt: skip


def name_of(each: object) -> str:
    return f"{each.__module__.rsplit('.', 1)[-1]}.{each.__name__}" if callable(each) else ""


ALL = [
    *((check, given, line_forms, True) for check, given in LINES),
    *((check, given, chart_forms, True) for check, given in CHARTS),
    *((check, given, forms, False) for check, given, forms in MISSED),
]


@pytest.mark.parametrize(("check", "given", "forms", "is_right"), ALL, ids=name_of)
def test_every_form_gets_the_same_verdict(check: Callable, given: list, forms: Callable, is_right: bool):
    expected = check(given)
    assert expected.right is is_right, expected
    for arguments in forms(given):
        assert repr(check(*arguments)) == repr(expected), arguments


NO_ANSWERS = ((), ([],), ("",), ([[]],), (["0F0"],), ("0F0",), ("0F0", 3), (5,), (1, 2, 3), (None,), ([None],), ({},))


@pytest.mark.parametrize("check", dict.fromkeys(check for check, *_ in ALL), ids=name_of)
def test_what_is_no_answer_gets_a_verdict(check: Callable):
    for arguments in NO_ANSWERS:
        assert check(*arguments).right is False, arguments
    assert check(...).right is None


@pytest.mark.parametrize(
    "check",
    [bubble_math.chart_at_the_floor, bubble_math.repair, one_f_one_b.by_hand, one_f_one_b.unstick, interleaved.beat_24]
    + [bubble_math.too_early],
    ids=name_of,
)
def test_before_chapter_7_halves_and_overlaps_are_no_actions(check: Callable):
    no_action = "{!r} is not an action of this chapter: expected a forward such as 0F3 or a backward such as 0B3"
    for given, named in (
        ([["0F0", "0W0", "0B0"], ["1F0"], ["2F0"]], "0W0"),
        ("0F0,0I0\n1F0\n2F0", "0I0"),
        (pp.Schedule([["0F0", "0I0", "0W0"], ["1F0"], ["2F0"]]).rows, "0I0"),
        ("0F0,(0F1;1B0)OVERLAP_F_B\n1F0\n2F0", "(0F1;1B0)OVERLAP_F_B"),
    ):
        assert check(given).says == no_action.format(named)
    says = check("0F0,X0\n1F0\n2F0").says
    assert says == "'X0' is not an action: expected a forward such as 0F3 or a backward such as 0B3"
    assert not LATER.search(check([["0F0"], ["1F0"], ["2F0"]]).says)


@pytest.mark.parametrize(
    ("check", "sizes"),
    [(gpipe.flushing_builder, 3), (interleaved.even_groups_builder, 2)],
    ids=name_of,
)
def test_before_chapter_7_functions_are_judged_in_its_words_too(check: Callable, sizes: int):
    def giving(rows: object) -> Callable:
        return (lambda P, M, most: rows) if sizes == 3 else (lambda P, M: rows)

    assert "'0I0' is not an action of this chapter" in check(giving([["0F0", "0I0", "0W0"]])).says
    for answer in ([["0F0"]], [["0F0", "X0"]], [["0F0", "0B0", "0F1", "0B1"], ["0F0"]]):
        says = check(giving(answer)).says
        assert not LATER.search(says), says


def test_the_stage_may_be_left_out_where_it_follows_from_the_row():
    short = [[str(action)[1:].lower() for action in row] for row in CHART]
    assert bubble_math.chart_at_the_floor(short) and bubble_math.chart_at_the_floor("\n".join(map(" ".join, short)))
    assert one_f_one_b.unstick("F0,F1,F2,B0,B1,B2\n" + one_f_one_b.STUCK_ROWS.split("\n", 1)[1])
    assert bubble_math.too_early("0b0", "1b0")
    assert gpipe.flushing_builder(
        lambda P, M, most: [
            [f"{kind}{m}" for at in range(0, M, most) for kind in "fb" for m in range(at, min(at + most, M))]
            for _ in range(P)
        ]
    )


def test_a_number_may_be_a_text():
    assert naive.faster_network("324") and interleaved.crossover(" 0.542 ")


def test_a_pair_may_be_several_arguments():
    assert naive.cheapest(("small", 4), ("large", 15), ("large", 13))
    assert balance.pictures_cut("GPipe").says.startswith("expected a pair")
    assert repr(balance.pictures_cut("GPipe", (9, 9))) == repr(balance.pictures_cut(("GPipe", (9, 9))))
