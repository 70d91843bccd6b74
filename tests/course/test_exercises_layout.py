"""Checkers of the chapter on layouts refuse wrong answers and say what is wrong; its tables are what they are said
to be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from checkers import builds, table_tests
from torch import nn

import pplab as pp
from pplab import lab, runtime
from pplab.lab import Layout
from pplab_course import layout as exercise
from pplab_course.verdict import Wrong

TRUTH = {"A": "missing", "B": "runs", "C": "losses", "D": "deadlock"}
FOURTEEN = """0F0,0F1,0I0,0W0,0F2,0I1,0W1,0F3,0I2,0W2,0I3,0W3
1F0,1I0,1W0,1F1,1I1,1W1,1F2,1I2,1W2,1F3,1I3,1W3"""
OUT_OF_ORDER = """0F1,0F0,0I1,0W1,0F2,0I0,0W0,0F3,0I2,0W2,0I3,0W3
1F1,1I1,1W1,1F0,1I0,1W0,1F2,1I2,1W2,1F3,1I3,1W3"""
ZB_H1 = lab.to_csv(builds("ZB-H1")(2, 4))


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
    (exercise.launched, 4, "expected 4 numbers"),
    (exercise.launched, (16, 32, 4, 0.052), "replicas: 128 ranks over eight stages"),
    (exercise.launched, (4, 64, 4, 0.052), "microbatches: that is in sequences"),
    (exercise.launched, (4, 128, 4, 0.052), "microbatches: the replicas share the batch"),
    (exercise.launched, (4, 32, 8, 0.052), "stages per rank: that is how many layers a rank has"),
    (exercise.launched, (4, 32, 2, 0.052), "stages per rank: that is how many layers a stage has"),
    (exercise.launched, (4, 32, 4, 0.179), "bubble: that is 1F1B's"),
    (exercise.launched, (4, 32, 4, 0.0547), "bubble: that is a share of the work"),
    (exercise.launched, (4, 32, 4, 5.2), "bubble: that is in per cent"),
    (exercise.judge, "runs", "expected a dict with the keys A, B, C and D"),
    (exercise.judge, {**TRUTH, "A": "wrong"}, "A: expected one of runs, missing, deadlock, losses"),
    (exercise.judge, {**TRUTH, "A": "runs"}, "A: not 'runs'; count the forwards of rank 1"),
    (exercise.judge, {**TRUTH, "B": "losses", "C": "runs"}, "backwards may be in any"),
    (exercise.judge, {**TRUTH, "C": "deadlock"}, "in what order does the last stage run its forwards"),
    (exercise.run_csv, "0F0,0B0\n1F0", "1B0 is missing"),
    (exercise.run_csv, "0F0,0B0\n1F0,1B0", "expected 2 ranks, a stage on each, and 4 microbatches"),
    (exercise.run_csv, lab.to_csv(builds("1F1B")(2, 4)), "it takes 15 where F = I = W = 1, and 1F1B takes 15"),
    (exercise.run_csv, ZB_H1, "ranks hold (2, 2) at most, under 1F1B (2, 1)"),
    (exercise.run_csv, OUT_OF_ORDER, "would take one microbatch's loss for another's"),
    (exercise.choose, 8, "expected a pplab.lab.Layout"),
    (exercise.choose, {"tp": 2, "pp": 4}, "2 x 4 x 1 = 8 ranks, and there are 32"),
    (exercise.choose, {"tp": 2, "ep": 4}, "unexpected keyword argument 'ep'"),
    (exercise.choose, Layout(1, 32, 1), "48 layers don't divide into 32 stages"),
    (exercise.choose, Layout(1, 4, 8), "it needs 102.2 GB of a rank's 48"),
    (exercise.choose, Layout(8, 4, 1), "times the fastest; its largest loss is tp"),
    (exercise.choose, Layout(2, 8, 2, "pp-dp-tp"), "its largest loss is tp"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_right_answers_may_differ():
    assert exercise.volumes((83.9, 310, 8.05)) and exercise.volumes((83.886, 309.94, 8.0531))
    assert exercise.launched((4, 32, 4, 0.052)) and exercise.launched(4, 32, 4, 7 / 135) and exercise.judge(TRUTH)
    assert exercise.choose({"tp": 2, "pp": 8, "dp": 2}) and exercise.choose(Layout(2, 16, 1))


def test_the_exercises_machine_has_one_best_layout():
    found = sorted((p for p in exercise.plans() if p.memory_bytes <= 48e9), key=lambda p: p.step_s)
    assert found[0].layout == Layout(2, 8, 2)
    assert min(exercise.plans(), key=lambda p: p.step_s).layout.tp == 1


@pytest.fixture(scope="module")
def one_pool() -> Iterator[runtime.Pool]:
    """Two processes for all of a module's tests, the checkers' own runs included: to start them takes seconds."""
    with runtime.Pool(2, device="cpu") as pool, pytest.MonkeyPatch.context() as patch:

        def same(num_ranks: int, *, device: str) -> nullcontext:
            assert (num_ranks, device) == (2, "cpu")
            return nullcontext(pool)

        patch.setattr(runtime, "Pool", same)
        yield pool


@pytest.mark.slow
def test_the_tables_are_what_they_are_said_to_be(one_pool):
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    tables = exercise.tables()
    listed = get_schedule_ops("1F1B", pp_degree=2, num_microbatches=4)
    assert tables["A"].splitlines() == [",".join(str(a) for a in row if a and a.is_compute_op) for row in listed]
    for name in "AD":
        with pytest.raises(pp.ScheduleError, match={"A": "missing", "D": "deadlock"}[name]):
            pp.validate(lab.read_csv(tables[name]))
    for name in "BC":
        pp.validate(lab.read_csv(tables[name]))
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6)]
    assert exercise.by_torch(lab.read_csv(tables["B"]), stages) == "equal to one process"
    with pytest.raises(Wrong, match="would take one microbatch's loss for another's"):
        exercise.by_torch(lab.read_csv(tables["C"]), stages)


@pytest.mark.slow
def test_a_real_answer_is_run(one_pool):
    assert "14 instead of 15, by torch" in exercise.run_csv(FOURTEEN).says
