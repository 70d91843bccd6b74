"""torch's interpreter with rows of ours, and what torch's step does."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.testing._internal.distributed.fake_pg import FakeStore

import lowered
import modules
import pplab as pp
from pplab import lab
from pplab.lab import lower_by_torch, take_steps
from pplab.lab.forms import CLASSES
from pplab.runtime import Job, Pool, RankContext, RankError, make_job
from pplab_course import spine

PAGE = Path(__file__).parents[3] / "book/torch.md"


@pytest.fixture(scope="module")
def pool():
    with Pool(2, device="cpu") as pool:
        yield pool


def stages(count: int):
    torch.manual_seed(0)
    return modules.workload(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count)))


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_torch_runs_the_rows_that_we_lower(pool, name):
    """Its interpreter takes our sends and receives as they stand, and gets one process's gradients."""
    s = pp.build(name, num_ranks=2, num_microbatches=4)
    run = pool.train(
        pp.Schedule(s.rows, "lowered by us"),
        stages(s.num_stages),
        lowered.LoweredByUs(pp.lower(s, ahead=1)),
        steps=1,
        check_gradients=True,
    )
    assert run.gradients.equal and run.job.engine_name == "torch" and run.machine.transport == "gloo"


def test_torch_can_be_paced(pool):
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    run = pool.train(s, stages(2), lab.TorchEngine(), lab.Pace(pp.Costs(4, 4, 4, unit="ms")), steps=1)
    assert run.job.how == "paced" and run.machine.transport == "gloo" and run.timeline.makespan >= 60
    assert all(x.end - x.start >= 3.99 * (2 if "B" in str(x.action) else 1) for x in run.timeline.spans)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_what_a_step_of_torch_returns(pool, name):
    first, last = pool.run(take_steps, stages(2), name, 4, 3)
    assert first["returned"] is None and last["returned"] == (8, 6)
    assert first["losses"] == [] and len(last["losses"]) == 4
    assert first["calls"] == last["calls"] == [5, 4, 4]  # the first step runs the module once more, for the shapes
    for seen in (first, last):  # each step divides by the microbatches what the steps before have left, too
        once, twice, thrice = seen["gradients"]
        assert np.allclose(twice, once * (1 + 1 / 4), rtol=1e-4)
        assert np.allclose(thrice, once * (1 + 1 / 4 + 1 / 16), rtol=1e-4)


def test_a_stage_without_a_weight_is_named():
    with Pool(2, device="cpu") as pool, pytest.raises(RankError, match="stage 1 has no weight that is trained"):
        pool.run(take_steps, modules.workload(nn.Linear(6, 6), nn.Tanh()), "1F1B", 4)


def test_ranks_on_gpus_are_refused():
    """torch's stage would send to the pool's group by gloo, which takes no tensors of GPUs."""
    context = RankContext(0, 2, torch.device("cuda:0"), "shared", timedelta(seconds=9))
    with pytest.raises(ValueError, match=r'ranks on the CPU, and this one is on cuda:0: Pool\(2, device="cpu"\)'):
        take_steps(context, stages(2), "1F1B", 4)


def test_gradients_accumulate_where_torch_doesnt_scale(pool):
    scaled, plain = (pool.run(take_steps, stages(2), "1F1B", 4, 2, scale)[0] for scale in (True, False))
    once, twice = plain["gradients"]
    assert np.allclose(once, 4 * scaled["gradients"][0], rtol=1e-4) and np.allclose(twice, 2 * once, rtol=1e-4)


def test_an_error_in_torchs_runtime_names_no_action_that_it_isnt_about():
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    layers = [nn.Linear(6, 6), modules.RaisesInForward()]
    with Pool(2, device="cpu") as pool, pytest.raises(RankError) as caught:
        pool.train(s, modules.workload(*layers), lab.TorchEngine())
    assert caught.value.action is None and "the third forward fails" in str(caught.value)
    assert caught.value.cause.startswith("rank 1 failed in a step of torch's runtime: ")


def test_an_order_that_torch_loses_track_of_is_refused(pool):
    s = pp.Schedule(["0F0 0F1 0B0 0B1".split(), "1F1 1F0 1B0 1B1".split()], "swapped")
    assert pool.train(s, stages(2), steps=1, check_gradients=True).gradients.equal
    with pytest.raises(ValueError, match="in the order 1, 0, and torch's runtime would take"):
        pool.train(s, stages(2), lab.TorchEngine())


def test_torch_is_given_no_pair_that_it_has_no_name_for(pool):
    s = pp.build("paired-1F1B", num_ranks=2, num_microbatches=4, split=True)
    with pytest.raises(ValueError, match=r"has \(0F3;0I0\)OVERLAP_F_I, and torch knows no overlap but a forward with"):
        lower_by_torch(s)
    with pytest.raises(ValueError, match="run it by pplab's engine"):
        pool.train(s, stages(2), lab.TorchEngine())


def test_torchs_lowering_takes_no_bidirectional_schedule():
    with pytest.raises(ValueError, match="bidirectional"):
        lower_by_torch(pp.build("DualPipe", num_ranks=4, num_microbatches=8))


def check_transport(job: Job, devices: list[str], transport: str) -> None:
    for extra in job.extras:
        extra.check_devices(job, devices, transport)


def test_what_the_ranks_devices_and_channels_rule_out_is_refused_before_anything_starts():
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    by_torch = make_job(s, stages(2), 2, [lab.TorchEngine()])
    check_transport(by_torch, ["cpu"] * 2, "gloo")
    check_transport(by_torch, ["cuda:0", "cuda:1"], "nccl")
    with pytest.raises(ValueError, match="can't send between ranks that share a GPU"):
        check_transport(by_torch, ["cuda:0"] * 2, "shared")
    delayed = make_job(s, stages(2), 2, [lab.Pace(pp.Costs(latency=1, unit="ms"))])
    check_transport(delayed, ["cpu"] * 2, "shared")
    with pytest.raises(
        ValueError, match='pace with latency or bandwidth needs transport="shared", and these ranks have gloo'
    ):
        check_transport(delayed, ["cpu"] * 2, "gloo")  # under torchrun, say


def test_torchs_classes_refuse_what_the_table_of_rules_says():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        for name, kind in CLASSES.items():
            last = 3 if name in ("ZBVZeroBubble", "DualPipeV") else 2
            own = [0] if name in ("GPipe", "1F1B") else [0, last]
            here = [pipelining.PipelineStage(nn.Linear(2, 2), s, 2 * len(own), torch.device("cpu")) for s in own]
            for M in range(1, 8):
                try:
                    getattr(pipelining, kind)(here if own[1:] else here[0], M, loss_fn=nn.functional.mse_loss)
                    refused = False
                except ValueError:
                    refused = True
                of_old = name == "GPipe" and M < 2 and torch.__version__ < "2.11"
                assert refused == (of_old or bool(lab.torch_refuses(name, 2, M))), (name, M)
    finally:
        dist.destroy_process_group()


def test_what_torchs_classes_name_in_a_trace(pool):
    """As chapter 14 says: rows' actions are named, GPipe has names of its own, 1F1B none. A span includes the wait."""
    rows, gpipe, one = (pool.run(modules.named_in_a_trace, name) for name in ("Interleaved1F1B", "GPipe", "1F1B"))
    assert one == [{}, {}]
    for spans in gpipe:
        assert set(spans) == {f"{way} {m}" for way in ("Forward", "Backward") for m in range(4)}
    for rank, spans in enumerate(rows):
        actions = {f"PP:{stage}{kind}{m}" for stage in (rank, rank + 2) for kind in "FB" for m in range(4)}
        assert actions <= set(spans)
    # rank 1 computes next to nothing, and waits for rank 0's forward
    for spans, name in ((gpipe[1], "Forward {}"), (rows[1], "PP:1F{}")):
        assert max(spans[name.format(m)] for m in range(4)) > 20


def test_the_program_with_which_the_page_on_pytorch_begins_trains(tmp_path):
    (tmp_path / "train.py").write_text(re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)[1])
    ran = spine.run(tmp_path / "train.py", 2, limit_s=60)
    assert ran.failure is None, ran
    losses = [*map(float, re.findall(r"loss (\S+)", "".join(report.printed for report in ran.reports)))]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
