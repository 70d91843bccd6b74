"""Recomputation: the same numbers, fewer bytes, and predictions that know of both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import BertConfig

import modules
import pplab as pp
from conftest import built, in_turn, names_of_schedules, random_schedule
from pplab import lab
from pplab.lab import models
from pplab.lab.extras.recompute import Recomputing
from pplab.runtime import Batch, Pool, Stage

pytestmark = pytest.mark.slow

METER = lab.Meter()


@pytest.fixture(scope="module")
def gpt():
    return models.gpt(batch_size=8, num_layers=8, width=32, num_heads=2, context=16, source="sample")


@pytest.mark.parametrize("name", names_of_schedules())
def test_every_schedule_equals_one_process_and_holds_what_is_predicted(pool, gpt, name):
    s = built(pp.builders.find(name), 2, 8)
    plain = pool.train(s, gpt, METER, steps=1, warmup=0)
    some = ([0], range(1, s.num_stages)) if name in ("1F1B", "ZB-H1", "ZBVZeroBubble", "DualPipe", "DualPipeV") else ()
    for stages in (None, *some):
        run = pool.train(s, gpt, METER, lab.Recompute(stages), steps=1, warmup=0, check_gradients=True)
        assert run.gradients.equal and run.gradients.loss_difference < 1e-5, run
        assert run.held.peak_bytes == run.predicted_peak_bytes
        assert run.held.peak_in_flight == s.peak_in_flight
        again = set(range(s.num_stages) if stages is None else stages)
        for stage in range(s.num_stages):
            if stage in again:
                assert run.held.bytes_of[stage] < plain.held.bytes_of[stage] / 5
                assert run.held.bytes_of[stage] + run.held.recomputed_of[stage] == plain.held.bytes_of[stage]
                assert run.recompute_ms[stage] > 0
            else:
                assert (run.held.bytes_of[stage], run.held.recomputed_of[stage]) == (plain.held.bytes_of[stage], 0)
                assert run.recompute_ms[stage] == 0


def test_any_legal_order_on_any_placement_equals_one_process(pool, rng):
    s = random_schedule(rng, num_ranks=2, overlap_share=0.3)
    size = s.num_microbatches * 2
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(s.num_stages)]
    again = [stage for stage in range(s.num_stages) if rng.random() < 0.7]
    workload = modules.workload(*stages, size=size)
    run = pool.train(s, workload, METER, lab.Recompute(again), steps=1, check_gradients=True)
    assert run.gradients.equal, (s.rows, run)
    assert run.held.peak_in_flight == in_turn(s).peak_in_flight


def test_stages_that_exchange_several_tensors(pool):
    s = pp.build("Interleaved1F1B", num_ranks=2, num_microbatches=4)
    stages = [modules.Two(), modules.Three(), modules.Sum(), nn.Linear(6, 6)]
    run = pool.train(s, modules.workload(*stages), lab.Recompute(), steps=1, check_gradients=True)
    assert run.gradients.equal, run


@pytest.mark.timed
def test_a_replay_of_its_own_costs_takes_as_long_as_the_actions_did(pool, gpt):
    s = pp.build("1F1B", num_ranks=2, num_microbatches=8)
    run = pool.train(s, gpt, lab.Recompute([0]), steps=3)
    assert run.costs.recompute == (run.recompute_ms[0], 0)
    found = [span for t in run.timelines for span in t.spans if str(span.action).startswith("0B")]
    lasted = sorted(span.end - span.start for span in found)
    assert run.costs.of(pp.Kind.B, 0) == pytest.approx(lasted[len(lasted) // 2], rel=0.2)
    assert "run again in the backward: stages 0" in str(run)
    assert "recompute" not in str(pool.train(s, gpt, steps=1))


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_mixed_precision_is_the_same_with_and_without(pool, gpt, name):
    s = pp.build(name, num_ranks=2, num_microbatches=4)
    options = {"steps": 1, "check_gradients": True, "autocast": torch.bfloat16}
    plain, again = (pool.train(s, gpt, METER, lab.Recompute(r), **options) for r in ((), None))
    assert again.gradients.equal and again.first_loss == plain.first_loss
    assert again.held.peak_bytes == again.predicted_peak_bytes
    assert again.gradients.parameters == plain.gradients.parameters


class Noisy(nn.Module):
    """Dropout and batch normalisation: random numbers and buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 6) to (B, 6)."""
        return self.layers(x)


@pytest.mark.parametrize("split", [False, True])
def test_random_numbers_are_those_of_the_first_time_and_buffers_change_once(split):
    def gradients(recompute: bool):
        stage = Stage(Noisy(), 0, 2, nn.functional.mse_loss, [1.0], split)
        stage = Recomputing(stage) if recompute else stage
        torch.manual_seed(7)
        batches = [Batch((torch.full((4, 6), m + 1.0).cumsum(0),), torch.zeros(4, 6)) for m in range(3)]
        made = [stage.forward(m, (), batch) for m, batch in enumerate(batches)]
        for m in (1, 0, 2):
            if split:
                stage.backward_input(m, (torch.ones(4, 6),))
                stage.backward_weight(m)
            else:
                stage.backward(m, (torch.ones(4, 6),))
        found = [p.grad for p in stage.module.parameters()] + [b.clone() for b in stage.module.buffers()]
        return [*found, *(x for out in made for x in out), torch.rand(3)]

    for a, b in zip(gradients(False), gradients(True), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_only_a_forward_that_draws_keeps_where_the_random_numbers_stood():
    for module, draws in ((nn.Linear(6, 6), False), (nn.Dropout(0.5), True)):
        stage = Recomputing(Stage(module, 1, 3, nn.functional.mse_loss, [1.0]))
        stage.forward(0, (torch.ones(4, 6),), Batch((), torch.zeros(4, 6)))
        _, random = stage.again[0]
        assert bool(random) == draws


@pytest.mark.parametrize("model", ["gpt", "bert"])
def test_a_profile_of_layers_predicts_the_bytes_of_every_cut(pool, gpt, model):
    workload, cuts = gpt, [((5, 5), ()), ((8, 2), (0,)), ((1, 9), (1,)), (None, (0, 1))]
    if model == "bert":
        cuts = cuts[-1:]
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}
        workload = models.from_transformers(BertConfig(**sizes), batch_size=8, length=16, source="sample")
    found = lab.measure_layers(workload, 4, steps=1, device="cpu")
    assert found.names[0] == "embedding" and found.names[-1] == "head" and len(found.names) == 10
    assert all(ms > 0 for ms in found.times_ms) and str(found).count("\n") == 10
    whole = sum(p.numel() * p.element_size() for p in workload.build_whole().parameters())
    assert sum(found.parameters) == whole
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    for counts, again in cuts:
        counts = counts or lab.partition(found.times_ms, 2)
        cut = replace(workload, cut=found.layers(counts))
        run = pool.train(s, cut, METER, lab.Recompute(again), steps=1, check_gradients=True)
        assert run.gradients.equal, run
        assert run.held.peak_bytes == s.peak_held(found.memory(counts, again))
    assert found.costs((5, 5), [1]).recompute == (0, sum(found.forward_ms[5:]))


def test_what_cannot_be_profiled_is_said(gpt):
    with pytest.raises(ValueError, match="needs a workload with num_layers, .* this Modules has none"):
        lab.measure_layers(modules.workload(nn.Linear(6, 6)))
    found = lab.MeasuredLayers(("embedding", "layer 0", "head"), *[(1, 2, 3)] * 5)
    assert found.layers((2, 1)) == (1, 0) and found.layers((3,)) == (1,)
    with pytest.raises(ValueError, match="at least one layer per stage and 3 in all, .* got \\(2, 2\\)"):
        found.layers((2, 2))


@pytest.mark.parametrize(
    ("extras", "stages", "says"),
    [
        ((), [2], "Recompute takes some of the stages 0 to 1, such as [0], or nothing for all of them, got (2,)"),
        ((), 1, "or nothing for all of them, got 1"),
        ((), [0.0], "got (0.0,)"),
        ([lab.TorchEngine()], None, "Recompute needs pplab's engine"),
    ],
)
def test_what_cannot_be_recomputed_is_said(extras, stages, says):
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    with pytest.raises(ValueError) as error:
        workload = modules.workload(nn.Linear(6, 6), nn.Linear(6, 6))
        Pool(2).train(s, workload, *extras, lab.Recompute(stages))
    assert says in str(error.value)
