"""Data parallelism over pipelines, and weights kept in several places: the same numbers as one process."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn

import modules
import pplab as pp
from conftest import built, names_of_schedules, random_schedule, slow_simulate
from pplab import lab
from pplab.actions import parts
from pplab.lab import models
from pplab.runtime import Pool, RankError, RankReport, Whole
from pplab.runtime.reference import report_gradients

SGD = functools.partial(torch.optim.SGD, lr=0.05)


def test_replicas_are_the_schedule_several_times(rng):
    for _ in range(50):
        s = random_schedule(rng, overlap_share=0.3, bidirectional=rng.random() < 0.3)
        replicas = rng.randint(1, 4)
        r = lab.replicate(s, replicas)
        pp.validate(r)
        assert r.num_ranks == replicas * s.num_ranks and r.num_stages == s.num_stages
        assert r.num_microbatches == replicas * s.num_microbatches
        assert r.copies == replicas * s.copies and len(r.replicas) == replicas
        assert r.peak_in_flight == s.peak_in_flight * replicas
        assert lab.num_messages(r) == replicas * lab.num_messages(s)
        one, all_ = pp.simulate(s, pp.Costs(2, 1, 3, latency=1)), pp.simulate(r, pp.Costs(2, 1, 3, latency=1))
        assert all_.makespan == one.makespan and all_.busy == one.busy * replicas
        assert lab.read_csv(lab.to_csv(r)) == r


def test_one_replica_on_slow_links_is_later_than_the_others():
    r = lab.replicate(pp.build("1F1B", num_ranks=2, num_microbatches=3), 2)
    costs = pp.Costs(links={(2, 3): pp.Link(latency=4), (3, 2): pp.Link(latency=4)})
    timeline, slow = pp.simulate(r, costs), slow_simulate(r, costs)
    assert timeline.ends[5] == 12 and timeline.makespan == max(end for _, end in slow.values()) > 12
    assert r.replicas == ((0, 1), (2, 3))


def test_the_balance_sheet_counts_a_replicas_stages():
    s = pp.build("Interleaved1F1B", num_ranks=4, num_microbatches=8)
    (one,), (two,) = lab.table([pp.simulate(s)]), lab.table([pp.simulate(lab.replicate(s, 2))])
    assert one[5] == "5.5, 4.5, 3.5, 2.5" and two[5] == f"{one[5]}, {one[5]}" and (one[-1], two[-1]) == ("1", "2")


@pytest.mark.parametrize("replicas", [0, -1, 1.5, True])
def test_a_bad_number_of_replicas_is_refused(replicas):
    with pytest.raises(ValueError, match="replicas must be"):
        lab.replicate(pp.build("1F1B", num_ranks=2, num_microbatches=3), replicas)


def test_a_replica_that_lacks_a_stage_is_refused():
    with pytest.raises(pp.ScheduleError, match="1F1 is missing"):
        pp.validate(pp.Schedule([["0F0", "0B0"], ["1F0", "1B0"], ["0F1", "0B1"]]))
    with pytest.raises(pp.ScheduleError, match="stage 1 lives on rank 2"):
        pp.validate(pp.Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0"], ["1F1", "1B1"]]))


def test_of_copies_the_one_that_differs_most_counts():
    one = np.ones(2, np.float32)

    def report(*gradient: float) -> RankReport:
        of_a = {"a": np.array(gradient, np.float32)}
        return RankReport([], [], 0.5, of_a, frozenset(), (), "gloo")

    for reports in ([report(1, 3), report(1, 1)], [report(1, 1), report(1, 3)]):
        found = report_gradients(reports, Whole(1.0, {"a": one}, 1e-5, {}, 0.0))
        assert not found.equal and found.parameters["a"].difference == 2 and found.loss_difference == 0


@pytest.fixture(scope="module")
def four():
    with Pool(4, device="cpu", timeout_s=60) as pool:
        yield pool


def tiny(**options):
    sizes = {"num_layers": 4, "width": 32, "num_heads": 2, "context": 16, "source": "sample"}
    return models.gpt(**{"batch_size": 8, **sizes, **options})


@pytest.mark.slow
@pytest.mark.parametrize("name", names_of_schedules())
def test_two_pipelines_of_two_ranks_equal_one_process(four, name):
    for num_microbatches, workload in ((1, tiny()), (4, tiny(tied=True))):
        s = built(pp.builders.find(name), 2, num_microbatches)
        if s is not None:
            r = lab.replicate(s, 2)
            run = four.train(r, workload, lab.Meter(), steps=1, check_gradients=True)
            assert run.gradients.equal and run.gradients.loss_difference < 1e-5, run
            assert run.gradients.noticed == len(run.gradients.parameters), run
            assert run.schedule is r and len(run.timeline.busy) == 4
            assert run.held.peak_in_flight == s.peak_in_flight * 2 and run.held.peak_bytes == run.predicted_peak_bytes
            added = [span for span in run.timeline.others if span.action == "gradients of all copies"]
            assert [span.rank for span in added] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("name", names_of_schedules())
def test_tied_weights_equal_one_process(four, name):
    s = built(pp.builders.find(name), 4, 8)
    run = four.train(s, tiny(tied=True, num_layers=8), steps=1, check_gradients=True)
    assert run.gradients.equal and run.gradients.loss_difference < 1e-5, run
    assert run.gradients.noticed == len(run.gradients.parameters) == 100, run
    assert "head.scores.weight" not in run.gradients.parameters


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts open files by /proc")
def test_runs_leave_no_process_groups_behind(four):
    found = []
    for _ in range(3):
        four.train(pp.build("DualPipe", num_ranks=4, num_microbatches=8), tiny(num_layers=4), steps=1, warmup=0)
        found.append(four.run(modules.open_files))
    assert found[1] == found[0] and found[2] == found[0]


@pytest.mark.slow
def test_four_replicas_of_one_rank_are_plain_data_parallelism(four):
    for name in ("1F1B", "ZB-H1"):
        s = lab.replicate(pp.build(name, num_ranks=1, num_microbatches=2), 4)
        run = four.train(s, tiny(tied=True), check_gradients=True)
        assert run.gradients.equal and run.schedule.num_microbatches == 8


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_several_steps_keep_the_copies_equal(four, tied):
    workload = tiny(tied=tied)
    losses = modules.losses_of_one_process(workload, 4, SGD)
    s = lab.replicate(pp.build("Interleaved1F1B", num_ranks=2, num_microbatches=2), 2)
    run = four.train(s, workload, steps=4, optimizer=SGD)
    assert run.losses == pytest.approx(losses, abs=1e-5) and len(set(losses)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_means_and_sums(four, reduction):
    loss = functools.partial(nn.functional.mse_loss, reduction=reduction)
    workload = modules.Modules([nn.Linear(6, 6), nn.Linear(6, 6)], modules.batch(), loss, reduction)
    s = lab.replicate(pp.build("GPipe", num_ranks=2, num_microbatches=2), 2)
    run = four.train(s, workload, check_gradients=True)
    assert run.gradients.equal and run.gradients.loss_difference < 1e-4


@pytest.mark.slow
def test_gloo_carries_the_same():
    with Pool(4, device="cpu", transport="gloo", timeout_s=60) as pool:
        s = lab.replicate(pp.build("ZBVZeroBubble", num_ranks=2, num_microbatches=4), 2)
        run = pool.train(s, tiny(tied=True), check_gradients=True)
    assert run.gradients.equal and run.machine.transport == "gloo"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "microbatches", "replicas", "extras", "options", "message"),
    [
        (4, 4, 2, (), {}, "1F1B, 2 replicas is for 8 ranks and there are 4: .* or build the schedule for 4"),
        (2, 3, 2, (), {}, "a batch of 8 doesn't divide into 6 equal microbatches"),
        (2, 4, 2, [lab.TorchEngine()], {}, "replicas needs pplab's engine: .*, reduce gradients yourself"),
        (4, 4, 1, [lab.TorchEngine()], {}, "a model with tied weights needs pplab's engine"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(
    ranks, microbatches, replicas, extras, options, message
):
    s = lab.replicate(pp.build("1F1B", num_ranks=ranks, num_microbatches=microbatches), replicas)
    with Pool(4, device="cpu") as pool:
        with pytest.raises(ValueError, match=message):
            pool.train(s, tiny(tied=True), *extras, **options)
        assert pool.pids == ()


@pytest.mark.slow
def test_a_rank_that_fails_in_one_replica_ends_all():
    stages = [nn.Linear(6, 6), modules.RaisesInForward()]
    with Pool(4, device="cpu", timeout_s=60) as pool:
        started = time.monotonic()
        with pytest.raises(RankError) as caught:
            s = lab.replicate(pp.build("1F1B", num_ranks=2, num_microbatches=4), 2)
            pool.train(s, modules.workload(*stages))
        assert time.monotonic() - started < 20 and pool.pids == ()
    error = caught.value
    assert error.rank in (1, 3) and error.action == pp.parse({1: "1F2", 3: "1F6"}[error.rank])
    assert "ArithmeticError: the third forward fails" in error.cause


@pytest.mark.slow
def test_replicas_from_the_shell(tmp_path, capsys):
    from pplab.__main__ import main

    common = "train --schedule 1F1B --ranks 1 --microbatches 2 --steps 1 --device cpu --source sample --batch-size 4"
    assert main([*common.split(), "--replicas", "2", "--check-gradients"]) == 0
    printed = capsys.readouterr().out
    assert "1F1B, 2 replicas" in printed and "equal to one process" in printed


def test_a_tied_head_is_the_embedding():
    workload = tiny(tied=True)
    model = workload.build_whole()
    assert model.head.scores.weight is model.embedding.token.weight and "tied" in workload.name
    assert workload.tied(1) == {} and tiny().tied(2) == {}
    (places,) = workload.tied(4).values()
    found = [dict(workload.build_stage(stage, 4).named_parameters())[name] for stage, name in places]
    assert [stage for stage, _ in places] == [0, 3] and torch.equal(*found)
    assert dataclasses.replace(workload.config, tied=False) != workload.config
    loss = workload.loss(model(*workload.batch(0).inputs), workload.batch(0).target)
    assert 4 < loss.item() < 8  # near ln 256 = 5.5: the scores are of about 1


def test_the_microbatches_of_replicas_are_their_own():
    r = lab.replicate(pp.build("DualPipe", num_ranks=2, num_microbatches=4), 2)
    work = [{a.microbatch for item in row for a in parts(item)} for row in r.rows]
    assert work == [{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5, 6, 7}, {4, 5, 6, 7}]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_pipelines_of_two_ranks_on_cuda_equal_one_process():
    with Pool(4, device="cuda", timeout_s=120) as pool:
        for name in ("1F1B", "ZBVZeroBubble", "DualPipe"):
            s = lab.replicate(pp.build(name, num_ranks=2, num_microbatches=4), 2)
            for tied in (False, True):
                run = pool.train(s, tiny(tied=tied), check_gradients=True)
                assert run.gradients.equal, run
