"""Chapter 8's checkers refuse wrong answers and say what is wrong; its tables are what they are said to be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pplab as pp
from conftest import assert_explained
from pplab.course import torch_pipelining

TRUTH = {"A": "missing", "B": "runs", "C": "losses", "D": "deadlock"}
RANK_0 = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
RANK_1 = "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
OUT_OF_ORDER = """0F0,0F1,0I1,0W1,0F2,0I0,0W0,0F3,0I2,0W2,0I3,0W3
1F1,1I1,1F0,1I0,1W1,1F2,1I2,1W0,1F3,1I3,1W2,1W3"""
ZB_H1 = pp.build("ZB-H1", num_ranks=2, num_microbatches=4).to_csv()


def repaired() -> tuple:
    rows = torch_pipelining.stalled()
    moves = ("4RECV_F0", 2), ("4RECV_F2", 2), ("4RECV_F1", 2), ("4RECV_F3", 2), ("4RECV_F0", 2), ("3RECV_B7", 4)
    for receive, places in moves:
        rows = torch_pipelining.later(rows, receive, places)
    return rows


WRONG = [
    (torch_pipelining.lowered, 4, "expected rows as CSV text or as actions"),
    (torch_pipelining.lowered, [RANK_0], "expected 2 rows, got 1"),
    (torch_pipelining.lowered, [RANK_0.replace("0B0 ", ""), RANK_1], "rank 0 should compute 0F0, 0F1, 0B0, 0B1"),
    (torch_pipelining.lowered, [RANK_0.replace("0SEND_F1 ", ""), RANK_1], "rank 0: 0SEND_F1 is missing"),
    (torch_pipelining.lowered, [RANK_0 + " 0SEND_F1", RANK_1], "rank 0: 0SEND_F1 stands more than once"),
    (torch_pipelining.lowered, [RANK_0 + " 0SEND_B0", RANK_1], "rank 0: nobody needs 0SEND_B0"),
    (
        torch_pipelining.lowered,
        [RANK_0.replace("0F1 0SEND_F1", "0SEND_F1 0F1"), RANK_1],
        "0SEND_F1 stands before 0F1, which makes it",
    ),
    (
        torch_pipelining.lowered,
        [RANK_0.replace("0RECV_B1 0B1", "0B1 0RECV_B1"), RANK_1],
        "0RECV_B1 stands after 0B1, which needs it",
    ),
    (
        torch_pipelining.lowered,
        [RANK_0, RANK_1.replace("1RECV_F1 1B0 1SEND_B0", "1B0 1SEND_B0 1RECV_F1")],
        "deadlock of messages: rank 0 waits at 0B0 with 0SEND_F1",
    ),
    (torch_pipelining.accumulated, 1.125, "in units of one step's gradient"),
    (torch_pipelining.accumulated, 0.5, "something of the first step is left"),
    (torch_pipelining.accumulated, 0.6, "the number is smaller"),
    (torch_pipelining.accumulated, 56.25, "in per cent: give it as a share of 1"),
    (torch_pipelining.judge, "runs", "expected a dict with the keys A, B, C and D"),
    (torch_pipelining.judge, {**TRUTH, "A": "wrong"}, "A: expected one of runs, missing, deadlock, losses"),
    (torch_pipelining.judge, {**TRUTH, "A": "runs"}, "A: not 'runs'; count the forwards of rank 1"),
    (torch_pipelining.judge, {**TRUTH, "B": "losses", "C": "runs"}, "backwards may be in any"),
    (torch_pipelining.judge, {**TRUTH, "C": "deadlock"}, "in what order does the last stage run its forwards"),
    (torch_pipelining.repaired, torch_pipelining.stalled(), "that takes as long as before"),
    (torch_pipelining.repaired, torch_pipelining.later(torch_pipelining.stalled(), "4RECV_F0", 2), "that takes 68"),
    (torch_pipelining.repaired, torch_pipelining.later(torch_pipelining.stalled(), "4RECV_F0", 6), "too far: deadlock"),
    (torch_pipelining.repaired, torch_pipelining.later(repaired(), "4RECV_F0", 20), "stands after 4F0"),
    (torch_pipelining.run_csv, "0F0,0B0\n1F0", "1B0 is missing"),
    (torch_pipelining.run_csv, "0F0,0B0\n1F0,1B0", "expected 2 ranks, a stage on each, and 4 microbatches"),
    (
        torch_pipelining.run_csv,
        pp.build("1F1B", num_ranks=2, num_microbatches=4).to_csv(),
        "it takes 15 where F = I = W = 1, and 1F1B takes 15",
    ),
    (torch_pipelining.run_csv, OUT_OF_ORDER, "would take one microbatch's loss for another's"),
    (torch_pipelining.stage_for_torch, 3, "expected a module"),
    (torch_pipelining.stage_for_torch, nn.LayerNorm(6), "its first layer should be the nn.Linear(6, 6)"),
    (torch_pipelining.stage_for_torch, nn.Linear(5, 6), "it fails on a tensor of (2, 3, 6): RuntimeError"),
    (torch_pipelining.stage_for_torch, nn.Linear(6, 5), "a tensor of the shape that it takes"),
    (torch_pipelining.stage_for_torch, nn.Linear(6, 6), "it still returns a view"),
    (torch_pipelining.stage_for_torch, nn.Sequential(nn.Linear(6, 6), nn.Identity()), "it still returns a view"),
]


@pytest.mark.parametrize(("check", "answer", "says"), WRONG)
def test_wrong_answers_are_explained(check, answer, says):
    assert_explained(check, answer, says)


@pytest.mark.parametrize("check", dict.fromkeys(check for check, _, _ in WRONG), ids=lambda check: check.__name__)
def test_dots_are_no_answer(check):
    assert check(...).right is None


def test_right_answers_may_differ():
    assert torch_pipelining.lowered([RANK_0, RANK_1]) and torch_pipelining.lowered(f"{RANK_0}\n{RANK_1}")
    assert torch_pipelining.lowered(f"{RANK_0.replace(' ', ',')}\n{RANK_1.replace(' ', ',')}\n")
    assert torch_pipelining.judge(TRUTH) and torch_pipelining.accumulated(0.5625)
    assert torch_pipelining.repaired(repaired())


def test_a_receive_that_isnt_there_cant_be_moved():
    with pytest.raises(ValueError, match="no row has 9RECV_F0"):
        torch_pipelining.later(torch_pipelining.stalled(), "9RECV_F0", 1)


def test_the_tables_are_what_they_are_said_to_be():
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    tables = torch_pipelining.tables()
    listed = get_schedule_ops("1F1B", pp_degree=2, num_microbatches=4)
    assert tables["A"].splitlines() == [",".join(str(a) for a in row if a and a.is_compute_op) for row in listed]
    for name in "AD":
        with pytest.raises(pp.ScheduleError, match={"A": "missing", "D": "deadlock"}[name]):
            pp.validate(pp.Schedule.from_csv(tables[name]))
    for name in "BC":
        pp.validate(pp.Schedule.from_csv(tables[name]))
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6)]
    assert torch_pipelining._by_torch(pp.Schedule.from_csv(tables["B"]), stages) == "equal to one process"
    said = torch_pipelining._by_torch(pp.Schedule.from_csv(tables["C"]), stages)
    assert_explained(lambda _: said, None, "would take one microbatch's loss for another's")


def test_a_linear_passes_torchs_gpipe_and_fails_its_split_backward():
    torch.manual_seed(0)
    gpipe, zbv = (pp.build(name, num_ranks=2, num_microbatches=4) for name in ("GPipe", "ZBVZeroBubble"))
    assert torch_pipelining._by_torch(gpipe, [nn.Linear(6, 6) for _ in range(2)]) == "equal to one process"
    said = torch_pipelining._by_torch(zbv, [nn.Linear(6, 6) for _ in range(4)])
    assert_explained(lambda _: said, None, "Failed to run stage backward input")


def test_real_answers_are_run():
    stage = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    assert "ZB-V by torch, gradients equal to one process" in torch_pipelining.stage_for_torch(stage).says
    assert "13 instead of 15, by torch" in torch_pipelining.run_csv(ZB_H1).says
