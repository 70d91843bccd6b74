"""Where the time of a step went: the parts add up, and name a cause that is known because it was put there."""

from __future__ import annotations

import json

import pytest
from torch import nn

import modules
import pplab as pp
from conftest import random_costs, random_schedule
from pplab import lab
from pplab.lab.measuring.attribution import IDLE_PARTS
from pplab.runtime import Pool


def test_the_parts_add_up_to_the_step(rng):
    for _ in range(40):
        s = random_schedule(rng, overlap_share=0.3, bidirectional=rng.random() < 0.3)
        t = pp.simulate(s, random_costs(rng, s.num_stages, s.num_ranks))
        found = lab.where(t)
        for rank, row in enumerate(found.by_rank):
            assert sum(row.values()) == pytest.approx(t.makespan)
            work = sum(amount for part, amount in row.items() if part not in IDLE_PARTS)
            assert work == pytest.approx(t.busy[rank])
        assert sum(found.mean.values()) == pytest.approx(t.makespan)
        assert json.loads(json.dumps(found.to_dict()))["step_time"] == t.makespan


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "DualPipe", "DualPipeV"])
def test_causes_that_were_put_there(name):
    s = pp.build(name, num_ranks=4, num_microbatches=8)
    ideal = pp.simulate(s)
    assert {p: a for p, a in lab.where(ideal).mean.items() if p in IDLE_PARTS and a} == {"bubble": ideal.idle[0]}
    late = pp.simulate(s, pp.Costs(latency=1))
    found = lab.where(late).mean
    assert found["bubble"] == ideal.idle[0] and found["imbalance"] == 0
    assert found["communication"] == late.makespan - ideal.makespan > 0
    assert found["overhead"] == found["jitter"] == 0
    factor = [2 if stage == 1 else 1 for stage in range(s.num_stages)]
    slow = lab.where(pp.simulate(s, pp.Costs(factor, factor, factor)))
    assert slow.mean["imbalance"] > 0
    holders = [rank for rank in range(4) if 1 in s.stages_of(rank)]
    others = [row["imbalance"] for rank, row in enumerate(slow.by_rank) if rank not in holders]
    assert max(slow.by_rank[rank]["imbalance"] for rank in holders) < min(others)
    assert slow.mean["communication"] == slow.mean["overhead"] == 0
    assert slow.mean["jitter"] == pytest.approx(0)


def test_lateness_is_overhead():
    """One rank, whose every action starts half a unit after it could."""
    s = pp.build("1F1B", num_ranks=1, num_microbatches=4)
    slower = pp.simulate(s, pp.Costs(1.5, 1.25, 1.25))
    found = lab.where(pp.Timeline(s, [start + 0.5 for start in slower.starts], slower.ends)).mean
    assert found["overhead"] == pytest.approx(8 * 0.5)
    assert found["jitter"] == pytest.approx(0) and found["communication"] == found["bubble"] == 0


def test_one_late_action_is_jitter_and_a_late_message_is_communication():
    s = pp.Schedule([["0F0", "0B0"], ["1F0", "1B0"]])
    ideal = pp.simulate(s)
    waited = (pp.Span(1, pp.parse("1RECV_F0"), 0, 2), pp.Span(0, pp.parse("0RECV_B0"), 1, 6.5))
    t = pp.Timeline(s, [0, 7, 2.5, 4], [1, 9, 3.5, 6], others=waited)
    found = lab.where(t).mean
    assert found["bubble"] == 3 and found["communication"] == pytest.approx(1 + 0.5)
    assert found["overhead"] + found["jitter"] == pytest.approx(9 - ideal.makespan - 1.5)


def test_calibrated_costs_predict_the_same_stages(rng):
    costs = pp.Costs([3, 4, 5, 6], [1, 2, 3, 2], [2, 2, 1, 1], links={(0, 1): pp.Link(2), (1, 0): pp.Link(2)})
    measured = pp.simulate(pp.build("ZB-H2", num_ranks=4, num_microbatches=8), costs)
    calibrated = lab.calibrate(measured)
    for name in ("1F1B", "GPipe", "eager-1F1B", "ZB-H1"):
        s = pp.build(name, num_ranks=4, num_microbatches=8)
        assert pp.simulate(s, calibrated).makespan == pytest.approx(pp.simulate(s, costs).makespan)


def test_lateness_is_the_calibrated_overhead():
    alone = pp.simulate(pp.build("1F1B", num_ranks=1, num_microbatches=8), pp.Costs(3, 4, 2))
    late = pp.Timeline(
        alone.schedule,
        [s + 0.25 * (i + 1) for i, s in enumerate(alone.starts)],
        [e + 0.25 * (i + 1) for i, e in enumerate(alone.ends)],
    )
    found = lab.calibrate(late)
    assert found.overhead == pytest.approx((0.25,)) and found.forward == (3,)
    assert pp.simulate(late.schedule, found).makespan == pytest.approx(late.makespan)


@pytest.mark.parametrize("name", ["ZB-H1", "ZB-H2", "ZB-V", "V-Half", "InterleavedZeroBubble", "DualPipe", "1F1B"])
def test_halves_and_wholes_are_calibrated_in_one_run(name):
    """Halves that together last longer than the whole."""
    s = pp.build(name, num_ranks=4, num_microbatches=8)
    both = lab.calibrating(s)
    pp.validate(both)
    if name == "1F1B":
        assert both == s
        return
    costs = pp.Costs(3, 2, 2, backward=3.5)
    kinds = {item.kind.value for row in both.rows for item in row if isinstance(item, pp.Action)}
    assert kinds == {"F", "B", "I", "W"}
    found = lab.calibrate(pp.simulate(both, costs))
    for kind in pp.actions.COMPUTE:
        for stage in range(s.num_stages):
            assert found.of(kind, stage) == costs.of(kind, stage)
    assert pp.simulate(s, found).makespan == pp.simulate(s, costs).makespan


@pytest.mark.parametrize("name", ["DualPipe", "DualPipeV"])
def test_calibrated_pairs_of_unequal_stages(name):
    s = pp.build(name, num_ranks=4, num_microbatches=8)
    factor = [1 + stage % 3 for stage in range(s.num_stages)]
    measured = pp.simulate(s, pp.Costs(factor, factor, factor, overlap="max"))
    assert pp.simulate(s, lab.calibrate(measured)).makespan == pytest.approx(measured.makespan)


def test_a_table_and_pictures():
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot as plt

    found = lab.where(pp.simulate(pp.build("1F1B", num_ranks=2, num_microbatches=4), pp.Costs(latency=1, unit="ms")))
    assert str(found).splitlines()[0] == "1F1B, simulated, per rank in ms"
    assert "communication" in str(found) and "jitter" not in str(found)
    assert "communication" in lab.waterfall(found).get_label()
    assert len(lab.stacked(found).get_legend().get_texts()) == 4
    plt.close("all")


@pytest.mark.timed
@pytest.mark.slow
def test_a_paced_run_keeps_its_latency(pools):
    s = pp.build("1F1B", num_ranks=4, num_microbatches=4)
    late = pp.Costs(40, 40, 40, latency=40, unit="ms")
    run = pools(4).train(s, modules.workload(*[nn.Linear(6, 6) for _ in range(4)]), lab.Pace(late), steps=1, warmup=0)
    assert 1 <= run.timeline.makespan / pp.simulate(s, late).makespan < 1.25


@pytest.mark.slow
def test_paces_that_cannot_be_kept_are_refused():
    s = pp.build("GPipe", num_ranks=2, num_microbatches=2)
    workload = modules.workload(nn.Linear(6, 6), nn.Linear(6, 6))
    with Pool(2, device="cpu", transport="gloo") as pool:
        for late in (pp.Costs(bandwidth=1, unit="ms"), pp.Costs(latency=1, unit="ms")):
            with pytest.raises(ValueError, match='needs transport="shared", and these ranks have gloo'):
                pool.train(s, workload, lab.Pace(late))


def test_other_work_is_not_idle_time():
    s = pp.build("1F1B", num_ranks=2, num_microbatches=2)
    t = pp.simulate(s)
    others = tuple(pp.Span(rank, "optimizer", t.makespan, t.makespan + 2) for rank in range(2))
    found = lab.where(pp.Timeline(s, t.starts, t.ends, "ms", "measured", others))
    assert [row["optimizer"] for row in found.by_rank] == [2, 2]
    assert [sum(row.values()) for row in found.by_rank] == [found.step_time] * 2
