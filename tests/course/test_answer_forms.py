"""An answer of rows, actions or numbers gets the same verdict in whatever form it is written."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from checkers import LATER
from test_notebooks import EXERCISES

import pplab as pp
from pplab.course import (
    balance,
    bubble_math,
    communication,
    gpipe,
    gpu_box,
    how_good,
    interleaved,
    messages,
    naive,
    one_f_one_b,
    today,
    torch_pipelining,
    zero_bubble,
)

PAIR = ("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1")
CHART = pp.build("1F1B", num_ranks=3, num_microbatches=3).rows
TICKETS = 4, 3, 2, 1
GPIPE_8 = pp.build("GPipe", num_ranks=8, num_microbatches=32).rows[7]
CHAIN = [f"{rank}F0" for rank in range(7)] + [*map(str, GPIPE_8)] + [f"{rank}B31" for rank in range(6, -1, -1)]


def rows(name: str, num_ranks: int, num_microbatches: int) -> list[list[str]]:
    schedule = pp.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return [list(map(str, row)) for row in schedule.rows]


LINES = [  # an answer of one line
    (bubble_math.slow_middle, (18, 30)),
    (bubble_math.two_offers, (88.7, 90.5)),
    (bubble_math.tokens_per_second, (2.13, 0.901, 246000)),
    (bubble_math.repair, "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3".split()),
    (bubble_math.repair, "F0 F1 B0 F2 B1 F3 B2 B3".split()),
    (bubble_math.too_early, ("0B0", "1B0")),
    (bubble_math.chain_of_78, CHAIN),
    (bubble_math.six_hours, (5, 5, 5, 5, 5, 5, 2)),
    (naive.row_between, "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0".split()),
    (naive.row_between, "recv_f0 f0 send_f0 recv_b0 b0 send_b0".split()),
    (gpipe.one_rank_recomputes, (26, 28)),
    (gpipe.larger_cards, (11, 2.87)),
    (gpipe.overhead_from_a_sweep, (40, 1)),
    (one_f_one_b.twice_the_ranks, (36.5, 58.9, 26.9)),
    (one_f_one_b.too_early, ("1B4",)),
    (messages.least_tickets, (10, 7, 4, 1)),
    (interleaved.where_is, (8, 0, 11)),
    (interleaved.gathers, (19, 3)),
    (interleaved.gathers, (18, 2)),
    (interleaved.one_denominator, (0.127, 0.068, 96)),
    (zero_bubble.place_weights, rows("ZB-H1", 4, 8)[3]),
    (balance.capped, (1, 2, 3, 4)),
    (balance.head_in_a_v, (3, 5, 5, 5, 4, 4, 4, 2)),
    (balance.textbook, (40, 0.4, 1)),
    (communication.volumes, (83.9, 310, 8.05)),
    (communication.pipeline_group, (13, 141, 269, 397)),
    (communication.tied_group, (0, 3, 4, 7)),
    (gpu_box.hangs, ("0F1", "1F1")),
    (gpu_box.order, (0, 2, 1, 3)),
    (how_good.small_block, (3, 4)),
]
CHARTS = [  # an answer with a line per rank
    (bubble_math.chart_at_the_floor, rows("1F1B", 3, 3)),
    (bubble_math.repair, rows("1F1B", 3, 4)),
    (gpipe.sixteen_sequences, [[16], [7, 7, 7, 4], [8, 9, 9, 6]]),
    (one_f_one_b.by_hand, rows("1F1B", 3, 4)),
    (one_f_one_b.unstick, ["0F0 0F1 0F2 0B0 0B1 0B2".split()] + [r.split(",") for r in one_f_one_b.STUCK_ROWS.split()[1:]]),
    (interleaved.beat_24, rows("Interleaved1F1B", 3, 4)),
    (torch_pipelining.lowered, [line.split() for line in PAIR]),
    (torch_pipelining.repaired, [list(map(str, row)) for row in pp.lower(pp.build("Interleaved1F1B", num_ranks=4, num_microbatches=8))]),
    (torch_pipelining.run_csv, rows("1F1B", 2, 4)),
    (communication.replicated, rows("1F1B", 2, 3) + [[f"{a[:2]}{int(a[2:]) + 3}" for a in row] for row in rows("1F1B", 2, 3)]),
    (how_good.balanced_placement, [[r, 7 - r, 8 + r, 15 - r] for r in range(4)]),
    (how_good.design, rows("ZBVZeroBubble", 4, 8)),
    (today.repair, ["0F0 0F1 0F2 0B2 0B1 0B0".split(), "1F0 1F1 1F2 1B2 1B1 1B0".split()]),
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


def name_of(each: object) -> str:
    return f"{each.__module__.rsplit('.', 1)[-1]}.{each.__name__}" if callable(each) else ""


@pytest.mark.parametrize(
    ("check", "forms"),
    [(check, line_forms(given)) for check, given in LINES] + [(check, chart_forms(given)) for check, given in CHARTS],
    ids=name_of,
)
def test_every_form_gets_the_same_verdict(check: Callable, forms: Iterator[tuple[object, ...]]):
    expected = repr(check(*next(forms)))
    for arguments in forms:
        assert repr(check(*arguments)) == expected, arguments
