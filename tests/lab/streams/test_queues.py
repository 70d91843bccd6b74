"""Lowered rows whose messages queue: where they deadlock, what an early receive costs."""

from __future__ import annotations

import pytest

import pplab as pp
from conftest import random_costs, random_schedule
from pplab import lab
from pplab.lab import lower_by_torch, parse_lowered
from pplab.lab.streams.queues import QUEUES, compute_of


def test_without_queues_it_is_the_simulator(rng):
    s = random_schedule(rng, overlap_share=0.3)
    costs = random_costs(rng, s.num_stages, s.num_ranks, queues=False)
    for ahead in (0, 1, 5):
        timeline = lab.simulate_lowered(pp.lower(s, ahead=ahead), costs, queue="none")
        assert timeline.spans == pp.simulate(s, costs).spans


def test_torchs_order_never_deadlocks_and_queues_only_cost(rng):
    """torch puts a send and its receive into both rows at one moment, so all queues agree on one order."""
    s = random_schedule(rng)
    costs = random_costs(rng, s.num_stages, s.num_ranks, queues=False)
    rows = lower_by_torch(s)
    assert compute_of(rows).rows == s.rows
    at_once, *between, apart = (lab.simulate_lowered(rows, costs, queue=queue).makespan for queue in QUEUES)
    direction, *finer = between
    assert [at_once, *finer, apart] == sorted([at_once, *finer, apart], reverse=True)
    assert at_once >= direction >= apart == pp.simulate(s, costs).makespan


@pytest.mark.parametrize(("P", "M"), [(3, 6), (4, 8), (5, 10), (8, 16)])
def test_a_front_loaded_receive_makes_the_warm_up_a_round_trip(P, M):
    rows = lower_by_torch(pp.build("Interleaved1F1B", num_ranks=P, num_microbatches=M))
    for f in (1, 3):
        timeline = lab.simulate_lowered(rows, pp.Costs(f, f, f))
        back = {str(x.action): x.end for x in timeline.others}
        assert [back[f"{P}RECV_F{m}"] for m in range(P)] == [(1 + (m + 1) * (P - 1)) * f for m in range(P)]


def test_what_it_costs():
    rows = lower_by_torch(pp.build("Interleaved1F1B", num_ranks=4, num_microbatches=8))
    assert [lab.simulate_lowered(rows, queue=queue).makespan for queue in QUEUES] == [70, 69, 57, 57, 57]
    slow = pp.Costs(latency=1)
    assert lab.simulate_lowered(rows, slow).makespan > pp.simulate(compute_of(rows), slow).makespan


def test_a_deadlock_of_messages_is_located():
    rows = parse_lowered(
        ["0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"]
    )
    lab.simulate_lowered(rows, queue="none")
    with pytest.raises(pp.ScheduleError, match="rank 0 waits at 0B0 with 0SEND_F1 at the head.*1SEND_B0 at the head"):
        lab.simulate_lowered(rows)
    crossed = parse_lowered("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1")
    with pytest.raises(pp.ScheduleError, match="with 1RECV_F1 at the head"):
        lab.simulate_lowered(crossed, queue="channel")


def test_a_rank_that_waits_stands_still_until_both_ends_are_posted():
    rows = parse_lowered(["0F0 0SEND_F0 0F1 0SEND_F1 0F2", "1RECV_F0 1F0 1RECV_F1 1F1"])
    costs = pp.Costs(forward=[1, 5], latency=2)

    def starts(*waits):
        timeline = lab.simulate_lowered(rows, costs, queue="channel", waits=[pp.parse(each) for each in waits])
        return {str(span.action): span.start for span in timeline.spans}

    assert starts() == {"0F0": 0, "0F1": 1, "0F2": 2, "1F0": 3, "1F1": 10}
    assert starts("0SEND_F0", "0SEND_F1") == {"0F0": 0, "0F1": 3, "0F2": 10, "1F0": 3, "1F1": 10}
    assert starts("0SEND_F0") == {"0F0": 0, "0F1": 3, "0F2": 4, "1F0": 3, "1F1": 10}


def test_who_waits_for_sends_may_wait_in_a_circle():
    rows = pp.lower(pp.build("1F1B", num_ranks=2, num_microbatches=4))
    waits = [pp.parse("0SEND_F1"), pp.parse("1SEND_B0")]
    with pytest.raises(pp.ScheduleError, match="rank 0 waits at 0RECV_B0 with 0SEND_F1 at the head"):
        lab.simulate_lowered(rows, queue="channel", waits=waits)


RIGHT = "0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0"


@pytest.mark.parametrize(("right", "wrong", "told"), [
    ("0SEND_F0", "0SEND_F0 0SEND_F0", "rank 0 has 0SEND_F0 twice; remove one of the two"),
    (" 0SEND_F0", "", "rank 1 waits for 1RECV_F0, and rank 0's row has no 0SEND_F0; add it behind 0F0"),
    ("1RECV_F0 1F0", "1F0 1RECV_F0", "rank 1 runs 1F0 before 1RECV_F0, which it needs; move 1RECV_F0 before 1F0"),
    ("0F0 0SEND_F0", "0SEND_F0 0F0", "rank 0 posts 0SEND_F0 before 0F0 makes it; move it behind 0F0"),
    (" 0RECV_B0", "", "rank 0 runs 0B0, and its row has no 0RECV_B0; add it before 0B0"),
    ("0B0", "0B0 0RECV_B1", "rank 0 posts 0RECV_B1, and no action needs that message; leave it out there"),
    ("1F0", "1F0 1SEND_F0", "rank 1 posts 1SEND_F0, and no action needs that message"),
    ("1F0", "1F0 0SEND_F0", "rank 1 posts 0SEND_F0, and 0F0 is on rank 0; leave it out there"),
    ("0F0 0SEND_F0", "0SEND_F0", "rank 1 runs 1F0, and no rank has what makes 0SEND_F0 for it"),
])  # fmt: skip
def test_what_lacks_or_is_late_is_told_with_what_to_do(right, wrong, told):
    assert lab.simulate_lowered(parse_lowered(RIGHT)).makespan == 6
    with pytest.raises(pp.ScheduleError, match=told):
        lab.simulate_lowered(parse_lowered(RIGHT.replace(right, wrong, 1)))


def test_rows_are_read_from_text():
    assert parse_lowered("0UNSHARD,0F0,,0SEND_F0,0WAIT_SEND_F0\n1RECV_F0,1F0,1REDUCE_GRAD\n") == parse_lowered(
        ["0F0 0SEND_F0", ["1RECV_F0", pp.parse("1F0")]]
    )
    with pytest.raises(ValueError, match="unknown queue 'stream'"):
        lab.simulate_lowered(parse_lowered("0F0,0B0"), queue="stream")
