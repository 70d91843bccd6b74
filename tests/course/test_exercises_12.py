"""Chapter 12's checkers refuse wrong answers and say what is wrong; blocking sends meet or hang as they should."""

from __future__ import annotations

import pytest
from checkers import raises, table_tests

from pplab.course import communication as exercise
from pplab.lab.layout import Layout

ONE = "0F0 0F1 0B0 0F2 0B1 0B2|1F0 1B0 1F1 1B1 1F2 1B2"
TWO = "0F3 0F4 0B3 0F5 0B4 0B5|1F3 1B3 1F4 1B4 1F5 1B5"
NAIVE = "0F3 0B3 0F4 0B4 0F5 0B5|1F3 1B3 1F4 1B4 1F5 1B5"
GPIPE = "0F3 0F4 0F5 0B3 0B4 0B5|1F3 1F4 1F5 1B3 1B4 1B5"
CROSSED = "0F0 0F4 0B0 0F2 0B4 0B2|1F0 1B0 1F1 1B1 1F2 1B2|0F3 0F1 0B3 0F5 0B1 0B5|1F3 1B3 1F4 1B4 1F5 1B5"

THREE = "0F0 1F0 1B0 0B0|0F1 0B1 0F2 0B2 0F3 0B3 0F4 0B4|1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4|0F5 1F5 1B5 0B5"


def rows(text):
    return [row.split() for row in text.split("|")]


def neighbours(rank, num_ranks):
    return [other for other in (rank - 1, rank + 1) if 0 <= other < num_ranks]


def all_send_first(rank, num_ranks):
    return [(what, other) for what in ("send", "recv") for other in neighbours(rank, num_ranks)]


def one_after_the_other(rank, num_ranks):
    """Rank 0 starts: every rank serves the one below it first."""
    order = {-1: ("recv", "send"), 1: ("send", "recv")}
    return [(what, other) for other in neighbours(rank, num_ranks) for what in order[other - rank]]


def only_sends(rank, num_ranks):
    return [("send", other) for other in neighbours(rank, num_ranks)]


WRONG = [
    (exercise.volumes, (80, 310, 8.05), "one message: that is in MiB"),
    (exercise.volumes, (41.9, 310, 8.05), "each has two bytes"),
    (exercise.volumes, (21, 310, 8.05), "that is one sample"),
    (exercise.volumes, (168, 310, 8.05), "with four bytes a number, or both directions"),
    (exercise.volumes, (83886080, 310, 8.05), "that is in bytes"),
    (exercise.volumes, (0.0839, 310, 8.05), "that is in GB"),
    (exercise.volumes, (83.9, 325, 8.05), "gradients over a message: a message is 80 MiB, which is 83.9 MB"),
    (exercise.volumes, (83.9, 155, 8.05), "each gradient has two bytes, too"),
    (exercise.volumes, (83.9, 620, 8.05), "gradients have two bytes here"),
    (exercise.volumes, (83.9, 1 / 310, 8.05), "the other way round"),
    (exercise.volumes, (83.9, 310, 7.68), "all boundaries: a message is 80 MiB"),
    (exercise.volumes, (83.9, 310, 4.03), "one direction"),
    (exercise.volumes, (83.9, 310, 10.7), "4 stages have 3 boundaries"),
    (exercise.volumes, (83.9, 310, 2.68), "that is one boundary"),
    (exercise.volumes, (83.9, 310, 0.503), "that is one microbatch of 16"),
    (exercise.volumes, (83.9, 310, 7.5), "GB here is 10^9 bytes"),
    (exercise.volumes, (83.9, 310, 8.1), "8.1 is near: give 3 digits"),
    (exercise.volumes, 83.9, "expected 3 numbers"),
    (exercise.volumes, (83.9, "310 times", 8.05), "expected a number"),
    (exercise.pipeline_group, 13, "expected four ranks"),
    (exercise.pipeline_group, [397, 269, 141, 13], "first stage first"),
    (exercise.pipeline_group, range(5, 128, 8), "the same stage in all replicas"),
    (exercise.pipeline_group, range(8, 16), "the tensor group"),
    (exercise.pipeline_group, [12, 13, 14, 15], "here tp is nearest"),
    (exercise.pipeline_group, [13, 21, 29, 37], "a stride of 8 skips the tensor ranks only"),
    (exercise.pipeline_group, [0, 128, 256, 384], "rank 13 itself"),
    (exercise.pipeline_group, [13, 14, 141, 269], "rank 13's place along tp"),
    (exercise.tied_group, 3, "expected ranks"),
    (exercise.tied_group, {0, 3}, "the replicas would drift apart"),
    (exercise.tied_group, [0, 4], "the head is the same weight"),
    (exercise.tied_group, (0, 7), "every replica has a first and a last stage"),
    (exercise.tied_group, range(8), "the ranks of the first stage and of the last"),
    (exercise.replicated, rows(ONE), "expected 4 ranks, 2 stages and 6 microbatches, got 2, 2 and 3"),
    (exercise.replicated, rows(f"{ONE}|{ONE}"), "the replicas share microbatches"),
    (exercise.replicated, rows(f"{ONE}|{NAIVE}"), "it takes 18, and one pipeline with three microbatches takes 12"),
    (exercise.replicated, rows(f"{ONE}|{GPIPE}"), "it holds (2, 1, 3, 3) in flight, and 1F1B holds (2, 1, 2, 1)"),
    (exercise.replicated, rows(THREE), "the ranks make 3 replica(s)"),
    (exercise.replicated, rows(CROSSED), "the replicas share microbatches"),
    (exercise.safe_order, [("send", 1)], "expected a function of (rank, num_ranks)"),
    (exercise.safe_order, raises, "your function raised IndexError"),
    (exercise.safe_order, only_sends, "at 2 ranks, rank 0 must do"),
    (exercise.safe_order, all_send_first, "deadlock: rank 0 sends to 1; rank 1 sends to 0"),
    (exercise.safe_order, one_after_the_other, "at 4 ranks it takes 6 rounds: safe, but it grows"),
    (exercise.gathers, 3, "expected a function of (schedule, rank)"),
    (exercise.gathers, raises, "1F1B, rank 0: your function raised IndexError"),
    (exercise.gathers, lambda s, r: len(s.rows[r]), "a gather per action"),
    (exercise.gathers, lambda s, r: len(s.stages_of(r)), "Interleaved1F1B, rank 0: that is a gather per stage"),
    (exercise.gathers, lambda s, r: exercise.gathers_of(s, r) - 1, "that counts the changes"),
    (exercise.choose, 8, "expected a pplab.lab.layout.Layout"),
    (exercise.choose, {"tp": 2, "pp": 4}, "2 x 4 x 1 = 8 ranks, and there are 32"),
    (exercise.choose, {"tp": 2, "ep": 4}, "unexpected keyword argument 'ep'"),
    (exercise.choose, Layout(1, 32, 1), "48 layers don't divide into 32 stages"),
    (exercise.choose, Layout(1, 4, 8), "it needs 94.6 GB of a rank's 48"),
    (exercise.choose, Layout(8, 4, 1), "times the fastest; its largest loss is tp"),
    (exercise.choose, Layout(2, 4, 4, "pp-dp-tp"), "its largest loss is tp"),
    (exercise.choose, Layout(2, 16, 1), "its largest loss is bubble"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_answers_may_differ_where_several_are_right():
    assert exercise.volumes((83.9, 310, 8.05)) and exercise.volumes((83.886, 309.94, 8.0531))
    assert exercise.pipeline_group((13, 141, 269, 397))
    assert exercise.tied_group([7, 4, 3, 0])
    assert exercise.replicated(rows(f"{TWO}|{ONE}"))
    interleaved = "|".join(row for pair in zip(ONE.split("|"), TWO.split("|"), strict=True) for row in pair)
    assert exercise.replicated(rows(interleaved))
    assert exercise.choose({"tp": 2, "pp": 4, "dp": 4}) and exercise.choose(Layout(2, 8, 2))

    def odd_first(rank, num_ranks):
        first, second = [("recv", "send"), ("send", "recv")][rank % 2], [1, -1]
        second = second if rank % 2 == 0 else second[::-1]
        return [(what, rank + step) for step in second for what in first if 0 <= rank + step < num_ranks]

    assert exercise.safe_order(odd_first)


def test_sends_meet_their_receives():
    assert exercise.meet([[], []]) == 0
    assert exercise.meet([[("send", 1)], [("recv", 0)]]) == 1
    assert exercise.meet([[("send", 1)], [("recv", 0)], [("send", 3)], [("recv", 2)]]) == 1
    assert exercise.meet([[("send", 1)], [("recv", 0), ("send", 2)], [("recv", 1)]]) == 2
    with pytest.raises(ValueError, match="deadlock: rank 1 receives from 0"):
        exercise.meet([[("send", 1)], [("recv", 0), ("recv", 0)]])


def test_the_exercises_machine_has_one_best_layout():
    found = sorted((p for p in exercise.plans() if p.memory_bytes <= 48e9), key=lambda p: p.step_s)
    assert found[0].layout == Layout(2, 4, 4)
    assert min(exercise.plans(), key=lambda p: p.step_s).layout.tp == 1


@pytest.mark.slow
def test_ranks_that_both_send_first_hang():
    from pplab.runtime import Pool

    with Pool(2, device="cpu", transport="gloo", timeout_s=30) as pool:
        waited = pool.run(exercise.send_first, 8, 1)
    assert all(0.5 < seconds < 30 for seconds in waited)
