"""Training in slices of sequences: gradients of one process, and bytes that are predicted to the last."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as functional

import pplab as pp
from pplab import Memory, lab
from pplab.lab import models
from pplab.lab.models._sliced import Carried, Place
from pplab.runtime import Pool, RankError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gpt():
    return models.gpt(batch_size=8, num_layers=4, width=16, num_heads=2, context=16, source="sample")


def seq(P: int, k: int, **options: object) -> pp.Schedule:
    return pp.build("Seq1F1B", num_ranks=P, num_microbatches=4 * k, slices=k, **options)


def heads(length: int) -> torch.Tensor:
    return torch.randn(2, 3, length, 4, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("lengths", [(7,), (4, 3), (1, 1, 5), (3, 2, 1, 1)])
def test_slices_attend_as_the_whole_does(lengths):
    """In double precision, two microbatches in turn."""
    torch.manual_seed(0)
    whole = [[heads(7) for _ in range(3)] for _ in range(2)]
    wanted = [torch.randn(2, 3, 7, 4, dtype=torch.float64) for _ in whole]
    carried, made, leaves = Carried(), {}, {}
    firsts = [sum(lengths[:j]) for j in range(len(lengths))]
    for m, tensors in enumerate(whole):
        functional.scaled_dot_product_attention(*tensors, is_causal=True).backward(wanted[m])
        for j, cut in enumerate(zip(*(x.split(lengths, 2) for x in tensors), strict=True)):
            leaves[m, j] = [x.detach().requires_grad_() for x in cut]
            carried.at = Place(m, j, firsts[j])
            made[m, j] = carried(*leaves[m, j])
        there = torch.cat([made[m, j] for j in range(len(lengths))], 2)
        assert torch.allclose(there, functional.scaled_dot_product_attention(*tensors, is_causal=True), atol=1e-12)
    for j in reversed(range(len(lengths))):
        for m in (1, 0):
            made[m, j].backward(wanted[m].split(lengths, 2)[j])
    for m, tensors in enumerate(whole):
        for i, x in enumerate(tensors):
            found = torch.cat([leaves[m, j][i].grad for j in range(len(lengths))], 2)
            assert torch.allclose(found, x.grad, atol=1e-12)
    assert not carried.kept and not carried.due, "nothing stays behind"


def test_slices_in_the_wrong_order_are_refused():
    carried = Carried()
    carried.at = Place(5, 1, 2)
    with pytest.raises(ValueError, match="slice 1 of microbatch 5 runs forward before slice 0"):
        carried(heads(2), heads(2), heads(2))
    made = []
    for carried.at in (Place(5, 0, 0), Place(5, 1, 2)):
        made.append(carried(heads(2), heads(2), heads(2)).sum())
    with pytest.raises(ValueError, match="slice 0 of microbatch 5 runs backward before slice 1"):
        made[0].backward()


def carried_bytes(workload, num_stages, samples):
    """Per stage: what the gradients of its keys and values take, of whole sequences of a microbatch."""
    config = workload.model.config
    each = 2 * samples * config.context * config.width * torch.get_default_dtype().itemsize
    return tuple(each * len(layers) for layers in models.layer_ranges(workload.num_layers, num_stages, workload.cut))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradients_and_bytes_on_any_number_of_ranks(num_ranks, gpt, pool):
    """A slice's bytes are measured, the gradients of keys and values follow from the model, the peaks from the rows."""
    with nullcontext(pool) if num_ranks == 2 else Pool(num_ranks, device="cpu", timeout_s=60) as pool:
        fullest = []
        for k in (1, 2, 4):
            s, workload = seq(num_ranks, k), models.sliced(gpt, k)
            run = pool.train(s, workload, lab.Meter(), steps=1, check_gradients=True)
            assert run.gradients.equal and run.gradients.loss_difference < 1e-5, run
            memory = Memory([k * each for each in run.held.bytes_of], unit="bytes")
            predicted = lab.Slices.even(k).memory(memory, carried=carried_bytes(workload, num_ranks, samples=2))
            assert run.held.peak_bytes == s.peak_held(predicted)
            assert run.held.peak_in_flight == s.peak_in_flight
            fullest.append(run.held.peak_bytes[0])
        assert num_ranks == 1 or fullest == sorted(fullest, reverse=True)


@pytest.mark.parametrize(
    ("k", "options"), [(4, {"stages_per_rank": 2}), (2, {"split": True, "warmup_per_rank": 2}), (None, {})]
)
def test_other_schedules_and_lengths(k, options, gpt, pool):
    workload = models.sliced(gpt, k or (8, 5, 3))
    run = pool.train(seq(2, len(workload.lengths), **options), workload, steps=1, check_gradients=True)
    assert run.gradients.equal and run.gradients.loss_difference < 1e-5, run


def test_all_forwards_first_and_what_else_a_run_can_do(gpt, pool):
    """TeraPipe with recomputation (keys and values stay), tied weights, experts, and trained: losses are as without."""
    s = pp.build("TeraPipe", num_ranks=2, num_microbatches=8, slices=2)
    sliced = models.sliced(gpt, 2)
    again = pool.train(s, sliced, lab.Meter(), lab.Recompute(), steps=1, check_gradients=True)
    assert again.gradients.equal, again
    tied = models.gpt(batch_size=4, num_layers=2, width=16, num_heads=2, context=16, source="sample", tied=True)
    experts = models.mixture(batch_size=4, num_layers=2, width=16, num_heads=2, context=16, source="sample")
    for model in (tied, experts):
        run = pool.train(s, models.sliced(model, 2), steps=1, check_gradients=True)
        assert run.gradients.equal, run
    options = {"steps": 3, "optimizer": _sgd}
    plain = pool.train(pp.build("1F1B", num_ranks=2, num_microbatches=4), gpt, **options)
    assert pool.train(s, sliced, **options).losses == pytest.approx(plain.losses, rel=1e-4)
    assert plain.losses[2] < plain.losses[0]


def _sgd(named):
    return torch.optim.SGD([p for _, p in named], lr=0.3)


def test_paced_slices_last_as_long_as_they_are_told_to(gpt, pool):
    """Unequal ones under causal attention, over a narrow link: no action, and no step, is shorter than simulated."""
    slices, s = lab.Slices((8, 5, 3), attention=0.4), seq(2, 3)
    costs = pp.Costs(12, 12, 12, bandwidth=1, message=6, unit="ms")
    run = pool.train(s, models.sliced(gpt, slices.lengths), lab.Pace(slices.costs(s, costs)), steps=1)
    told, took = slices.simulate(s, costs), run.timeline
    assert all(b.end - b.start >= a.end - a.start - 1e-3 for a, b in zip(told.spans, took.spans, strict=True))
    assert run.step_time_ms >= told.makespan and run.job.how == "paced"
    by_torch = lab.Pace(slices.costs(s, pp.Costs(12, unit="ms")))
    with pytest.raises(ValueError, match="pace by microbatch needs pplab's engine"):
        pool.train(s, models.sliced(gpt, slices.lengths), lab.TorchEngine(), by_torch)
    with pytest.raises(ValueError, match="forward of stage 0 has 12 values for 4 microbatches"):
        pool.train(pp.build("1F1B", num_ranks=2, num_microbatches=4), gpt, lab.Pace(slices.costs(s, costs)))


def test_a_schedule_of_whole_microbatches_is_refused(gpt, pool):
    with pytest.raises(RankError, match="1 slices don't make microbatches of 2 slices each: take a schedule of slices"):
        pool.train(pp.build("1F1B", num_ranks=2, num_microbatches=1), models.sliced(gpt, 2))
    with pytest.raises(RankError, match=r"before slice .*: take a schedule of slices"):
        pool.train(pp.build("1F1B", num_ranks=2, num_microbatches=8), models.sliced(gpt, 2))


def test_slices_that_make_no_sequence_are_refused(gpt):
    with pytest.raises(ValueError, match="16 tokens doesn't divide into 3 equal slices"):
        models.sliced(gpt, 3)
    with pytest.raises(ValueError, match=r"slices of \(8, 4\) tokens make 12, and a sequence has 16"):
        models.sliced(gpt, (8, 4))
    with pytest.raises(ValueError, match="slices must be an integer of at least 1"):
        models.sliced(gpt, 0)
    with pytest.raises(ValueError, match="model must be a LanguageModel"):
        models.sliced(None, 2)
    assert "in slices of 8+8" in models.sliced(gpt, 2).name
