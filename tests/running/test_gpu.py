"""The runtime on CUDA: the same numbers as one process, whether every rank has a GPU or they share one. `make gpu`.

PPLAB_TEST_DEVICE=cpu runs the same tests on the CPU. CI runs some of them there, in the trial of `make gpu`: those that
no other test is a double of on the CPU.
"""

from __future__ import annotations

import functools
import os
import signal
import statistics
import time

import pytest
import torch
from gpu_mps import Mps
from torch import nn

import modules
import pplab as pp
from conftest import built, traced
from pplab import lab
from pplab.lab import models
from pplab.runtime import Pool, RankError

DEVICE = os.environ.get("PPLAB_TEST_DEVICE", "cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# On the CPU, also where tests/fake_gpus plays GPUs on it, test_runtime.py has other numbers of microbatches, and a step
# takes what it computes.
ON_A_GPU = DEVICE == "cuda" and "FAKE_GPUS" not in os.environ
MICROBATCHES = (1, 4, 8) if ON_A_GPU else (4,)
WIDTH, CONTEXT = (64, 32) if ON_A_GPU else (32, 16)
POOLS = [(1, "turns"), (2, "turns"), (4, "turns"), (2, "mps"), (4, "mps")]
if ON_A_GPU and torch.cuda.device_count() > 4:
    POOLS.append((torch.cuda.device_count(), "turns"))


@pytest.fixture(scope="module", params=POOLS, ids=lambda pool: "-".join(map(str, pool)))
def pool(request):
    num_ranks, share = request.param
    try:
        pool = Pool(num_ranks, device=DEVICE, beside=Mps() if share == "mps" else None, timeout_s=120)
    except ValueError as error:
        pytest.skip(str(error))
    with pool:
        yield pool


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [builder.name for builder in pp.builders.known()])
def test_every_schedule_equals_one_process(pool, name, autocast):
    counts = (*MICROBATCHES, 2 * pool.num_ranks) if pool.num_ranks > 4 else MICROBATCHES
    schedules = [built(pp.builders.find(name), pool.num_ranks, num_microbatches) for num_microbatches in counts]
    if not any(schedules):
        pytest.skip(f"{name} isn't for {pool.num_ranks} ranks")
    size = {"batch_size": max(counts), "num_layers": max(8, 2 * pool.num_ranks), "width": WIDTH, "context": CONTEXT}
    gpt = models.gpt(num_heads=2, source="sample", **size)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    for s in filter(None, schedules):
        run = pool.train(s, gpt, lab.Meter(), steps=2, check_gradients=True, optimizer=optimizer, autocast=autocast)
        assert run.gradients.equal, run
        assert run.gradients.noticed == len(run.gradients.parameters), run
        assert run.held.peak_in_flight == s.peak_in_flight
        assert run.held.peak_bytes == run.predicted_peak_bytes
        assert_allocated(run)


def assert_allocated(run) -> None:
    """On a GPU the allocator had handed out at least the weights and what the forwards held, at the worst moment."""
    held = run.held
    if DEVICE == "cpu":
        assert held.allocated_bytes is None and held.resident_bytes is None
        return
    for peak, resident, kept in zip(held.allocated_bytes, held.resident_bytes, held.peak_bytes, strict=True):
        assert resident > 0 and peak - resident >= kept, run


def test_distilbert_equals_one_process(pool):
    workload = models.distilbert(batch_size=8, length=48, checkpoint="small", source="sample")
    s = pp.build("1F1B", num_ranks=pool.num_ranks, num_microbatches=4)
    assert pool.train(s, workload, steps=1, check_gradients=True).gradients.equal


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZBVZeroBubble"])
def test_both_halves_of_a_split_backward_make_the_whole(pool, name):
    """At a size where a multiprocessor has something to do, with every kind of stage, several steps long."""
    gpt = models.gpt(batch_size=8, num_layers=8, width=128, num_heads=4, context=64, source="sample")
    s = pp.build(name, num_ranks=pool.num_ranks, num_microbatches=4)
    adam = functools.partial(torch.optim.AdamW, lr=1e-3)
    run = pool.train(s, gpt, steps=4, check_gradients=True, optimizer=adam)
    assert run.gradients.equal, run
    whole = pool.train(pp.build("GPipe", num_ranks=pool.num_ranks, num_microbatches=4), gpt, steps=4, optimizer=adam)
    assert run.losses == pytest.approx(whole.losses, rel=1e-4)


def test_the_timeline_is_one_of_the_device(pool):
    gpt = models.gpt(batch_size=8, num_layers=4, width=256, num_heads=4, context=128, source="sample")
    s = pp.build("1F1B", num_ranks=pool.num_ranks, num_microbatches=4)
    t = pool.train(s, gpt, steps=2).timeline
    at = {span.action: span for span in t.spans}
    for span in t.spans:
        stage, kind, m = span.action
        assert span.end > span.start >= 0
        if kind == "F" and stage:
            assert span.end > at[pp.parse(f"{stage - 1}F{m}")].end


def test_a_paced_run_keeps_its_schedule(pool):
    """Work on the device, stretched: the order and the waits are the schedule's where processes take turns, and where
    a message makes the GPU wait and not the host."""
    gpt = models.gpt(batch_size=4, num_layers=4, width=16, num_heads=2, context=8, source="sample")
    if pool.num_ranks == 1:
        pytest.skip(f"{pool!r}: nobody waits")
    pace = pp.Costs(40, 40, 40, unit="ms")
    s = pp.build("1F1B", num_ranks=pool.num_ranks, num_microbatches=4)
    run = pool.train(s, gpt, lab.Pace(pace), steps=2, check_gradients=True)
    assert run.gradients.equal
    assert 1 <= run.timeline.makespan / pp.simulate(s, pace).makespan < 1.3


@pytest.mark.parametrize("engine", ["pplab", "torch"])
def test_a_profiles_step_is_the_runs(pool, tmp_path, engine):
    """The span of a step ends when the device is done, not when it has been given everything."""
    if engine == "torch" and DEVICE == "cuda" and pool.transport != "nccl":
        pytest.skip(f"{pool!r}: torch's runtime needs a GPU for each rank")
    gpt = models.gpt(batch_size=8, num_layers=4, width=256, num_heads=4, context=128, source="sample")
    s = pp.build("1F1B", num_ranks=pool.num_ranks, num_microbatches=4)
    by_torch = [lab.TorchEngine()] if engine == "torch" else []
    run = pool.train(s, gpt, *by_torch, lab.Profile(tmp_path), steps=3)
    first = 1 if ON_A_GPU else 0  # in which the recording of kernels starts
    steps = [statistics.mean(traced(trace, "ProfilerStep")[first:]) for trace in run.extras["profile"]]
    assert max(steps) == pytest.approx(statistics.mean(run.step_times_ms[first:]), rel=0.3)
    if engine == "pplab":
        assert all(0 < sum(traced(trace, "pplab:")) <= 3 * max(steps) for trace in run.extras["profile"])


def test_recomputing_clipping_and_going_on(pool, tmp_path):
    gpt = models.gpt(batch_size=8, num_layers=4, width=64, num_heads=2, context=32, source="sample")
    s = pp.build("1F1B", num_ranks=pool.num_ranks, num_microbatches=4)
    adam, path = functools.partial(torch.optim.AdamW, lr=1e-3), tmp_path / "run.safetensors"
    train = functools.partial(pool.train, s, gpt, lab.Clip(0.5), lab.Meter(), optimizer=adam)
    plain, whole = train(steps=4), train(lab.Recompute(), steps=4, check_gradients=True)
    first, rest = train(lab.Save(path), steps=2), train(lab.Resume(path), steps=2)
    assert whole.gradients.equal and rest.job.first_step == 2
    assert sum(whole.held.bytes_of) < sum(plain.held.bytes_of) and whole.held.peak_bytes == whole.predicted_peak_bytes
    for figures in (lambda run: run.losses, lambda run: run.extras["gradient_norms"]):
        expected = pytest.approx(figures(plain), rel=1e-4)
        assert figures(whole) == expected and figures(first) + figures(rest) == expected


def test_whether_gpus_are_shared_is_said(pool):
    if DEVICE == "cpu":
        assert pool.transport == "shared" and not any("GPU" in note for note in pool.notes)
        return
    shared = torch.cuda.device_count() < pool.num_ranks
    assert (pool.transport == "shared") == shared
    assert any("share" in note for note in pool.notes) == shared


def test_every_rank_is_a_client_of_mps(pool):
    if pool.beside is None:
        pytest.skip(f"{pool!r} takes no MPS")
    pool.run(modules.chatter)
    assert not any("as its clients" in note for note in pool.notes), pool.notes


def test_a_failure_ends_all_ranks():
    with Pool(2, device=DEVICE) as pool:
        started = time.monotonic()
        with pytest.raises(RankError, match="ArithmeticError: the third forward fails"):
            s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
            pool.train(s, modules.workload(nn.Linear(6, 6), modules.RaisesInForward()))
        assert time.monotonic() - started < 60 and pool.pids == ()


def test_memory_that_is_not_there_names_the_action():
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    with Pool(2, device=DEVICE) as pool:
        with pytest.raises(RankError, match="rank 1 failed at 1F0: .*allocate"):
            pool.train(s, modules.workload(nn.Linear(6, 6), modules.Hungry()))
        assert pool.pids == ()
        assert pool.train(s, modules.workload(nn.Linear(6, 6), nn.Linear(6, 6)), check_gradients=True).gradients.equal


def test_a_killed_rank_is_named_and_the_pool_starts_again(tmp_path):
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    with Pool(2, device=DEVICE) as pool:
        pool.run(modules.chatter)
        os.kill(pool.pids[1], signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 1 was killed \(SIGKILL\)"):
            pool.train(s, modules.workload(nn.Linear(6, 6), nn.Linear(6, 6)))
        assert pool.train(s, modules.workload(nn.Linear(6, 6), nn.Linear(6, 6)), check_gradients=True).gradients.equal
