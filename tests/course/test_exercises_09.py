"""Chapter 9's checkers refuse wrong answers and say what is wrong; its tables are what they are said to be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from checkers import builds, table_tests
from torch import nn

import pplab as pp
from pplab import lab, runtime
from pplab.course import torch_pipelining as exercise
from pplab.course.verdict import Wrong

TRUTH = {"A": "missing", "B": "runs", "C": "losses", "D": "deadlock"}
RANK_0 = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
RANK_1 = "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
OUT_OF_ORDER = """0F0,0F1,0I1,0W1,0F2,0I0,0W0,0F3,0I2,0W2,0I3,0W3
1F1,1I1,1F0,1I0,1W1,1F2,1I2,1W0,1F3,1I3,1W2,1W3"""
ZB_H1 = lab.to_csv(builds("ZB-H1")(2, 4))


def repaired() -> tuple:
    rows = exercise.stalled()
    moves = ("4RECV_F0", 2), ("4RECV_F2", 2), ("4RECV_F1", 2), ("4RECV_F3", 2), ("4RECV_F0", 2), ("3RECV_B7", 4)
    for receive, places in moves:
        rows = exercise.later(rows, receive, places)
    return rows


WRONG = [
    (exercise.lowered, 4, "expected rows as CSV text or as actions"),
    (exercise.lowered, [RANK_0], "expected 2 rows, got 1"),
    (exercise.lowered, [RANK_0.replace("0B0 ", ""), RANK_1], "rank 0 should compute 0F0, 0F1, 0B0, 0B1"),
    (exercise.lowered, [RANK_0.replace("0SEND_F1 ", ""), RANK_1], "rank 0: 0SEND_F1 is missing"),
    (exercise.lowered, [RANK_0 + " 0SEND_F1", RANK_1], "rank 0: 0SEND_F1 stands more than once"),
    (exercise.lowered, [RANK_0 + " 0SEND_B0", RANK_1], "rank 0: nobody needs 0SEND_B0"),
    (
        exercise.lowered,
        [RANK_0.replace("0F1 0SEND_F1", "0SEND_F1 0F1"), RANK_1],
        "0SEND_F1 stands before 0F1, which makes it",
    ),
    (
        exercise.lowered,
        [RANK_0.replace("0RECV_B1 0B1", "0B1 0RECV_B1"), RANK_1],
        "0RECV_B1 stands after 0B1, which needs it",
    ),
    (
        exercise.lowered,
        [RANK_0, RANK_1.replace("1RECV_F1 1B0 1SEND_B0", "1B0 1SEND_B0 1RECV_F1")],
        "deadlock of messages: rank 0 waits at 0B0 with 0SEND_F1",
    ),
    (exercise.accumulated, 1.125, "in units of one step's gradient"),
    (exercise.accumulated, 0.5, "something of the first step is left"),
    (exercise.accumulated, 0.6, "the number is smaller"),
    (exercise.accumulated, 56.25, "in per cent: give it as a share of 1"),
    (exercise.judge, "runs", "expected a dict with the keys A, B, C and D"),
    (exercise.judge, {**TRUTH, "A": "wrong"}, "A: expected one of runs, missing, deadlock, losses"),
    (exercise.judge, {**TRUTH, "A": "runs"}, "A: not 'runs'; count the forwards of rank 1"),
    (exercise.judge, {**TRUTH, "B": "losses", "C": "runs"}, "backwards may be in any"),
    (exercise.judge, {**TRUTH, "C": "deadlock"}, "in what order does the last stage run its forwards"),
    (exercise.repaired, exercise.stalled(), "that takes as long as before"),
    (exercise.repaired, exercise.later(exercise.stalled(), "4RECV_F0", 2), "that takes 68"),
    (exercise.repaired, exercise.later(exercise.stalled(), "4RECV_F0", 6), "too far: deadlock"),
    (exercise.repaired, exercise.later(repaired(), "4RECV_F0", 20), "stands after 4F0"),
    (exercise.run_csv, "0F0,0B0\n1F0", "1B0 is missing"),
    (exercise.run_csv, "0F0,0B0\n1F0,1B0", "expected 2 ranks, a stage on each, and 4 microbatches"),
    (exercise.run_csv, lab.to_csv(builds("1F1B")(2, 4)), "it takes 15 where F = I = W = 1, and 1F1B takes 15"),
    (exercise.run_csv, OUT_OF_ORDER, "would take one microbatch's loss for another's"),
    (exercise.stage_for_torch, 3, "expected a module"),
    (exercise.stage_for_torch, nn.LayerNorm(6), "its first layer should be the nn.Linear(6, 6)"),
    (exercise.stage_for_torch, nn.Linear(5, 6), "it fails on a tensor of (2, 3, 6): RuntimeError"),
    (exercise.stage_for_torch, nn.Linear(6, 5), "a tensor of the shape that it takes"),
    (exercise.stage_for_torch, nn.Linear(6, 6), "it still returns a view"),
    (exercise.stage_for_torch, nn.Sequential(nn.Linear(6, 6), nn.Identity()), "it still returns a view"),
]


test_a_wrong_answer_is_explained, test_dots_are_no_answer = table_tests(WRONG)


def test_right_answers_may_differ():
    assert exercise.lowered([RANK_0, RANK_1]) and exercise.lowered(f"{RANK_0}\n{RANK_1}")
    assert exercise.lowered(f"{RANK_0.replace(' ', ',')}\n{RANK_1.replace(' ', ',')}\n")
    assert exercise.judge(TRUTH) and exercise.accumulated(0.5625)
    assert exercise.repaired(repaired())


def test_a_receive_that_isnt_there_cant_be_moved():
    with pytest.raises(ValueError, match="no row has 9RECV_F0"):
        exercise.later(exercise.stalled(), "9RECV_F0", 1)


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
def test_real_answers_are_run(one_pool):
    stage = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    assert "ZB-V by torch, gradients equal to one process" in exercise.stage_for_torch(stage).says
    assert "13 instead of 15, by torch" in exercise.run_csv(ZB_H1).says


@pytest.mark.slow
def test_a_linear_passes_torchs_gpipe_and_fails_its_split_backward(one_pool):
    """The last test: a run that fails ends the processes."""
    torch.manual_seed(0)
    gpipe, zbv = (builds(name)(2, 4) for name in ("GPipe", "ZBVZeroBubble"))
    assert exercise.by_torch(gpipe, [nn.Linear(6, 6) for _ in range(2)]) == "equal to one process"
    with pytest.raises(Wrong, match="Failed to run stage backward input"):
        exercise.by_torch(zbv, [nn.Linear(6, 6) for _ in range(4)])
