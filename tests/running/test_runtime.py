"""Schedules run by real processes: the same numbers as one process, and a measurement that means what it says."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, T5Config

import adding
import modules
import pplab as pp
from conftest import built, in_turn, names_of_schedules, random_schedule
from pplab import builders, lab
from pplab.lab import models
from pplab.lab.models import Modules
from pplab.runtime import (
    Executor,
    GradientReport,
    Listeners,
    Pool,
    RankContext,
    RankError,
    RankReport,
    Whole,
    make_job,
    make_run,
    train_whole,
)
from pplab.runtime.context import pack, unpack
from pplab.runtime.listener import StepTrace
from pplab.runtime.reference import report_gradients, train_twice

pytestmark = pytest.mark.slow

SGD = functools.partial(torch.optim.SGD, lr=0.05)
METER = lab.Meter()


@pytest.fixture(scope="module")
def gpt():
    return models.gpt(batch_size=8, num_layers=8, width=32, num_heads=2, context=16, source="sample")


@pytest.fixture(scope="module")
def distilbert():
    """A small one, with some padding in each microbatch."""
    tokens = torch.randint(256, (8, 56), generator=torch.Generator().manual_seed(0))
    filled = (torch.arange(56) < torch.arange(20, 52, 4)[:, None]).long()
    data = {"input_ids": tokens, "attention_mask": filled, "labels": torch.arange(8) % 2}
    config = transformers.DistilBertConfig(vocab_size=256, dim=128, hidden_dim=512, n_heads=4, n_layers=8)
    return models.from_transformers(config, data, batch_size=8)


# Microbatches by ranks: nobody to send to; too few to fill the pipeline, and one alone; as many as ranks' multiples.
SIZES = {1: (2,), 2: (1, 4), 4: (2, 8)}


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("name", [builder.name for builder in pp.builders.known()])
def test_every_schedule_equals_one_process(pools, gpt, name, num_ranks):
    schedules = [built(pp.builders.find(name), num_ranks, num_microbatches) for num_microbatches in SIZES[num_ranks]]
    assert any(schedules) or num_ranks == 1
    for s in filter(None, schedules):
        run = pools(num_ranks).train(s, gpt, METER, steps=1, warmup=0, check_gradients=True)
        assert run.gradients.equal, run
        assert run.gradients.noticed == len(run.gradients.parameters) == 101, run
        assert run.gradients.loss_difference < 1e-5
        assert run.held.peak_in_flight == s.peak_in_flight
        assert run.held.peak_bytes == run.predicted_peak_bytes


def test_an_order_that_beats_every_published_one_equals_one_process(pools, gpt):
    """With messages as long as an action, in ZB-H1's memory: 39 are proved to be least, where ZB-H1 takes 41."""
    frontier = lab.frontiers()["latency-8"]
    published, found = next(pair for pair in frontier.beaten() if pair[0].name == "ZB-H1")
    assert (published.time, found.time, found.proved) == (41, 39, True)
    assert pp.simulate(found.schedule, pp.Costs(latency=1)).makespan == 39
    run = pools(4).train(found.schedule, gpt, METER, steps=1, warmup=0, check_gradients=True)
    assert run.gradients.equal, run
    assert max(run.held.peak_in_flight) == 4 and run.held.peak_in_flight == found.schedule.peak_in_flight


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_distilbert_equals_one_process(pools, distilbert, name):
    """The reference is transformers' own model on the whole batch, with reviews of different lengths."""
    assert distilbert.batch(0).context["attention_mask"].sum(1).unique().numel() > 1
    run = pools(2).train(pp.build(name, num_ranks=2, num_microbatches=4), distilbert, METER, check_gradients=True)
    assert run.gradients.equal and run.gradients.loss_difference < 1e-5, run
    assert run.held.peak_bytes == run.predicted_peak_bytes


def of_transformers(kind):
    if kind == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=256, **sizes, tie_word_embeddings=True)
    else:
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 3}
        config = T5Config(vocab_size=256, **sizes)
    return models.from_transformers(config, batch_size=8, length=24, source="sample")


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZB-H1"])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_models_of_transformers_equal_one_process(pools, kind, name):
    """With weights that stages share: a head that is the embedding, and in T5 position biases. The encoder's output
    travels behind the decoder's hidden states."""
    s = pp.build(name, num_ranks=2, num_microbatches=4)
    run = pools(2).train(s, of_transformers(kind), steps=1, check_gradients=True)
    assert run.gradients.equal and run.gradients.loss_difference < 1e-5, run


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_transformers_reads_what_ranks_have_trained(pools, kind, tmp_path):
    workload, saved = of_transformers(kind), tmp_path / "trained.safetensors"
    s = pp.build("Interleaved1F1B", num_ranks=2, num_microbatches=4)
    pools(2).train(s, workload, lab.Save(saved), steps=2, optimizer=SGD)
    model = workload.build_whole()
    optimizer = SGD(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        batch = workload.batch(step)
        workload.loss(model(*batch.inputs, **batch.context), batch.target).backward()
        optimizer.step()
    workload.export(saved, tmp_path / "exported")
    exported = type(model).from_pretrained(tmp_path / "exported").state_dict()
    torch.testing.assert_close(exported, model.state_dict(), rtol=1e-4, atol=1e-6)
    first = lab.Checkpoint.open(saved).load(workload.build_stage(0, 3)).state_dict()
    assert all(torch.equal(t, exported[name]) for name, t in first.items())


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZB-H1", "ZBVZeroBubble", "DualPipe", "DualPipeV"])
def test_distilbert_with_ragged_masks_equals_one_process_however_stages_are_placed_and_backwards_split(
    pools, distilbert, name
):
    """What else a schedule does, GPT's stages show above: masks travel with every microbatch, in whatever order."""
    s = pp.build(name, num_ranks=2, num_microbatches=4)
    run = pools(2).train(s, distilbert, METER, steps=1, check_gradients=True)
    assert run.gradients.equal and run.gradients.loss_difference < 1e-5, run
    assert run.held.peak_bytes == run.predicted_peak_bytes


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_any_legal_order_on_any_placement_equals_one_process(pools, rng, num_ranks):
    s = random_schedule(rng, num_ranks, overlap_share=0.4)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(s.num_stages)]
    workload = modules.workload(*stages, size=2 * s.num_microbatches)
    run = pools(num_ranks).train(s, workload, METER, steps=1, check_gradients=True)
    assert run.gradients.equal, (s, run)
    assert run.held.peak_in_flight == in_turn(s).peak_in_flight
    assert pp.simulate(s, run.costs).makespan > 0


def test_any_bidirectional_order_equals_one_process(pools, rng):
    s = random_schedule(rng, overlap_share=0.4, bidirectional=True)
    if s.num_ranks > 4:
        return
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(s.num_stages)]
    workload = modules.workload(*stages, size=2 * s.num_microbatches)
    run = pools(s.num_ranks).train(s, workload, steps=3, check_gradients=True, optimizer=SGD)
    assert run.gradients.equal, (s, run)
    assert run.losses == pytest.approx(modules.losses_of_one_process(workload, 3, SGD), abs=1e-5)


@pytest.mark.parametrize("name", ["1F1B", "DualPipeV"])
def test_mixed_precision_computes_in_it(pools, gpt, name):
    """That every schedule does, and holds what is predicted, is tested in test_gpu.py, which CI runs on the CPU too."""
    s = pp.build(name, num_ranks=2, num_microbatches=4)
    exact, mixed, half = (
        pools(2).train(s, gpt, METER, steps=1, check_gradients=True, autocast=dtype)
        for dtype in (None, torch.bfloat16, torch.float16)
    )
    sent = exact.held.message_bytes
    assert max(sent) > 0 and mixed.held.message_bytes == tuple(count // 2 for count in sent)
    assert half.held.message_bytes == sent and half.gradients.equal  # float16 would lose small gradients
    assert mixed.gradients.equal and mixed.gradients.tolerance == 2**-8, mixed
    assert exact.gradients.noticed == mixed.gradients.noticed == half.gradients.noticed == 101, (mixed, half)
    assert mixed.held.peak_bytes == mixed.predicted_peak_bytes and max(mixed.held.bytes_of) < max(exact.held.bytes_of)
    assert lab.run_to_dict(mixed)["precision"] == "bfloat16" and "mixed precision in bfloat16" in str(mixed)
    assert mixed.gradients.relative > exact.gradients.relative
    assert mixed.gradients.loss_difference < 0.02


@pytest.mark.parametrize("name", ["GPipe", "ZB-H2", "DualPipe"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_accumulate_right_for_means_and_sums(pools, name, reduction):
    loss = functools.partial(nn.functional.mse_loss, reduction=reduction)
    workload = Modules([nn.Linear(6, 6), nn.Linear(6, 6)], modules.batch(), loss, reduction)
    for M in (4, 8):
        s = pp.build(name, num_ranks=2, num_microbatches=M)
        for engine in ((), (lab.TorchEngine(),))[: 1 if s.copies > 1 else 2]:
            run = pools(2).train(s, workload, *engine, check_gradients=True)
            assert run.gradients.equal and run.gradients.loss_difference < 1e-4, (run, engine)
    with pytest.raises(ValueError, match='reduction must be "mean" or "sum"'):
        Modules([nn.Linear(6, 6)], modules.batch(), loss, "max")


ONE_WAY = [each for each in names_of_schedules() if builders.find(*each.values).placement != "bidirectional"]


@pytest.mark.parametrize("name", ONE_WAY)
def test_torchs_runtime_runs_the_same_stages_and_never_holds_less(pools, gpt, name):
    s = pp.build(name, num_ranks=2, num_microbatches=4)
    theirs = pools(2).train(s, gpt, lab.TorchEngine(), METER, steps=2, check_gradients=True)
    assert theirs.gradients.equal and theirs.gradients.loss_difference < 1e-5, theirs
    assert str(theirs).startswith(f"{name} by torch, measured") and theirs.job.engine_name == "torch"
    assert {span.action for span in theirs.timeline.spans} == {item for row in s.rows for item in row}
    ours = pools(2).train(s, gpt, METER, steps=2)
    assert max(ours.held.peak_bytes) <= max(theirs.held.peak_bytes)
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_the_transports_carry_the_same(transport):
    stages = [modules.View(), modules.Two(), modules.Three(), modules.Sum()]
    with Pool(2, device="cpu", transport=transport, timeout_s=60) as pool:
        assert pool.transport == transport
        for name in ("Interleaved1F1B", "LoopedBFS"):
            s = pp.build(name, num_ranks=2, num_microbatches=4)
            assert pool.train(s, modules.workload(*stages), check_gradients=True).gradients.equal


def test_a_long_schedule_needs_no_more_slots_than_are_free(pools):
    """As many messages may be under way as a schedule likes: looped BFS sends all of them before one is taken up."""
    stages = [nn.Linear(6, 6) for _ in range(4)]
    s = pp.build("LoopedBFS", num_ranks=2, num_microbatches=256)
    assert pools(2).train(s, modules.workload(*stages, size=256), steps=1, check_gradients=True).gradients.equal


def test_a_run_measures_each_kind_of_pair(pools):
    """An input gradient beside a forward and beside a weight gradient: what never ran alone counts as its pairs do."""
    s = pp.build("paired-1F1B", num_ranks=2, num_microbatches=4, split=True)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
    workload = Modules(stages, modules.batch(), nn.functional.mse_loss, overlap=modules.backward_first)
    run = pools(2).train(s, workload, check_gradients=True)
    assert run.gradients.equal, run
    assert set(run.costs.overlap) == {("0F", "0I"), ("1F", "1I"), ("0I", "0W"), ("1I", "1W")}
    alone = {(rank, item.kind) for rank, row in enumerate(s.rows) for item in row if isinstance(item, pp.Action)}
    pairs = [run.costs.overlap["1F", "1I"], run.costs.overlap["1I", "1W"]]
    assert (1, "I") not in alone and min(pairs) <= run.costs.of("I", 1) <= max(pairs)
    assert pp.simulate(s, run.costs).makespan > 0


def test_a_model_can_run_the_halves_of_an_overlap_itself(pools):
    stages = [nn.Linear(6, 6) for _ in range(4)]
    s = pp.build("DualPipeV", num_ranks=2, num_microbatches=4)
    workload = Modules(stages, modules.batch(), nn.functional.mse_loss, overlap=modules.backward_first)
    run = pools(2).train(s, workload, check_gradients=True)
    assert run.gradients.equal and run.losses
    broken = Modules(stages, modules.batch(), nn.functional.mse_loss, overlap=modules.forward_only)
    with Pool(2, device="cpu") as pool, pytest.raises(RankError, match="OVERLAP_F_B"):
        pool.train(s, broken)


def test_what_a_split_backward_cannot_put_off_is_said(pools, gpt, distilbert):
    for workload, names in ((gpt, "Embedding, LayerNorm"), (distilbert, "Embedding, LayerNorm")):
        run = pools(2).train(pp.build("ZB-H1", num_ranks=2, num_microbatches=4), workload, steps=1)
        assert f"gradients of weights in {names} are computed with the input's, not put off" in run.notes
        run = pools(2).train(pp.build("1F1B", num_ranks=2, num_microbatches=4), workload, steps=1)
        assert not any("not put off" in note for note in run.notes)


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "ZBVZeroBubble", "DualPipe", "DualPipeV"])
def test_several_optimizer_steps_equal_one_process(pools, gpt, name):
    run = pools(2).train(pp.build(name, num_ranks=2, num_microbatches=4), gpt, steps=4, optimizer=SGD)
    losses = modules.losses_of_one_process(gpt, 4, SGD)
    assert run.losses == pytest.approx(losses, abs=1e-5)
    assert run.first_loss == pytest.approx(losses[0], abs=1e-5)
    assert len(set(losses)) == 4


def test_stages_may_exchange_several_tensors_views_and_whole_numbers(pools):
    stages = [modules.View(), modules.Two(), modules.Three(), modules.Sum()]
    for num_ranks in (2, 4):
        home = [0, 0, 1, 1] if num_ranks == 2 else [0, 1, 2, 3]
        rows = [[] for _ in range(num_ranks)]
        for m in range(4):
            for stage in range(4):
                rows[home[stage]].append(f"{stage}F{m}")
            for stage in reversed(range(4)):
                rows[home[stage]].append(f"{stage}B{m}")
        run = pools(num_ranks).train(pp.Schedule(rows), modules.workload(*stages), check_gradients=True)
        assert run.gradients.equal, run
        assert set(run.gradients.parameters) == {
            f"{p}.{kind}" for p in ("0.linear", "1.linear", "2.linear") for kind in ("weight", "bias")
        } | {"2.embedding.weight"}


def test_the_measured_timeline_is_a_timeline(pools, gpt):
    s = pp.build("1F1B", num_ranks=2, num_microbatches=8)
    run = pools(2).train(s, gpt, steps=3, optimizer=SGD)
    assert len(run.timelines) == len(run.step_times_ms) == len(run.losses) == 3
    assert run.step_time_ms == sorted(run.step_times_ms)[1]
    for t, step_ms in zip(run.timelines, run.step_times_ms, strict=True):
        assert t.schedule is s and t.how == "measured" and t.unit == "ms"
        assert 0 < t.makespan <= step_ms
        at = {span.action: span for span in t.spans}
        assert len(at) == 32
        for span in t.spans:
            assert 0 <= span.start < span.end
            stage, kind, m = span.action
            if (stage, kind) == (1, "F"):  # processes share a clock: nothing arrives before it was made
                assert span.start > at[pp.parse(f"0F{m}")].end
            if (stage, kind) == (0, "B"):
                assert span.start > at[pp.parse(f"1B{m}")].end
        for rank in range(2):
            row = [span for span in t.spans if span.rank == rank]
            assert all(a.end <= b.start for a, b in zip(row, row[1:], strict=False))
        waits = [span for span in t.others if span.action != "optimizer"]
        assert len(waits) == 16 and {span.action for span in t.others if isinstance(span.action, str)} == {"optimizer"}
        assert sum(t.idle) / (2 * t.makespan) == pytest.approx(t.bubble_fraction)
    assert (
        lab.timeline_from_dict(json.loads(json.dumps(lab.run_to_dict(run)))["timelines"][0]).spans
        == run.timelines[0].spans
    )
    assert str(run).startswith("1F1B, measured: 2 ranks on cpu (shared memory), 8 microbatches\nGPT with 8 layers")


@pytest.mark.timed
@pytest.mark.parametrize("name", ["naive", "GPipe", "1F1B"])
def test_a_paced_run_keeps_its_schedule_in_real_time(pools, name):
    """Four ranks on however few cores: every action lasts as long as it was told to, and the order does the rest."""
    pace = pp.Costs(forward=40, backward_input=40, backward_weight=40, unit="ms")
    s = pp.build(name, num_ranks=4, num_microbatches=4)
    workload = modules.workload(*[nn.Linear(6, 6) for _ in range(4)])
    run = pools(4).train(s, workload, lab.Pace(pace), steps=1, warmup=0)
    predicted = pp.simulate(s, pace)
    assert run.job.how == run.timeline.how == "paced"
    assert 1 <= run.timeline.makespan / predicted.makespan < 1.25
    assert run.timeline.bubble_fraction == pytest.approx(predicted.bubble_fraction, abs=0.1)


@pytest.mark.timed
def test_the_one_forward_short_warm_up_is_the_naive_pipeline_on_two_ranks(pools):
    pace = pp.Costs(forward=30, backward_input=30, backward_weight=30, unit="ms")
    workload = modules.workload(nn.Linear(6, 6), nn.Linear(6, 6))
    times = {}
    for name, options in (("naive", {}), ("1F1B", {"in_flight": (1, 1)}), ("1F1B", {})):
        s = pp.build(name, num_ranks=2, num_microbatches=8, **options)
        run = pools(2).train(s, workload, lab.Pace(pace), steps=1, warmup=0)
        times[name, bool(options)] = run.timeline.makespan
    assert times["1F1B", True] / times["naive", False] == pytest.approx(1, abs=0.1)
    assert times["1F1B", True] / times["1F1B", False] == pytest.approx(48 / 27, rel=0.1)


def test_what_ranks_print_comes_with_their_numbers(pools, capfd):
    """At once, line by line. What libraries write stays with them, and comes with an error."""
    assert pools(2).run(modules.chatter) == [0, 1]
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["rank 0: a rank prints this", "rank 1: a rank prints this"] and err == ""


def test_equal_weights_that_nobody_ties_are_said_before_any_weight_changes(pools, capfd):
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    net = nn.Sequential(layer := nn.Linear(6, 6), nn.Tanh(), layer)
    given = net, modules.batch(), nn.functional.mse_loss
    with Pool(2, device="cpu") as pool, pytest.raises(RankError, match="the optimizer fails"):
        pool.train(s, modules.Loose(*given), optimizer=modules.raising_optimizer)
    said = "equal weights that tied() doesn't name: 0.weight of stage 0 and 2.weight of stage 1. "
    assert f"rank 0: note: {said}" in capfd.readouterr().out
    assert pools(2).train(s, modules.Loose(*given)).notes[-1].startswith(said) and capfd.readouterr()
    assert "equal weights" not in str(pools(2).train(s, Modules(*given))) and capfd.readouterr().out == ""


def test_every_way_to_run_drops_the_same(pools):
    """In three uses in each of four layers, three steps, and four microbatches; and so does one process."""
    torch_too, again, numbers, losses = (lab.TorchEngine(),), (lab.Recompute(),), [], []
    ways = [("naive", 1, ()), ("1F1B", 4, again), ("ZBVZeroBubble", 2, ())]
    if torch.__version__ >= "2.13":  # before, torch's split backward loses gradients of a layer that is called twice
        ways.append(("ZBVZeroBubble", 2, torch_too))
    ways += [("Interleaved1F1B", 2, torch_too), ("DualPipeV", 2, ()), ("DualPipe", 2, again), ("replicas", 4, ())]
    torch.manual_seed(0)
    given = nn.Sequential(*(modules.Drops() for _ in range(4))), adding.batch, nn.functional.mse_loss
    at_once = Modules(*given, overlap=adding.in_two_threads)
    for name, ranks, extras in ways:
        s = lab.replicate(pp.build("1F1B", num_ranks=2, num_microbatches=2), 2)
        s = s if name == "replicas" else built(builders.find(name), ranks, 4)
        made, asked = Modules(*given) if extras else at_once, (lab.SeededDropout(5), lab.Numbers())
        run = pools(ranks).train(s, made, *asked, *extras, optimizer=SGD, check_gradients=True)
        assert run.gradients.equal and "from seed 5" in "".join(run.notes), (name, run)
        numbers.append([(step["kept"], step["its square"]) for step in run.extras["numbers"]])
        losses.append(run.losses)
        assert losses[-1] == pytest.approx(losses[0], rel=1e-5)
        assert torch.allclose(torch.tensor(numbers[-1]), torch.tensor(numbers[0]), rtol=1e-5)
    kept, square = torch.tensor(numbers[0]).unbind(1)
    assert kept.unique().numel() == 3 * 4 * 3  # no layer, use or step drops as another one
    assert (square > kept**2 * 1.00001).all()  # nor does every microbatch
    for other in ((), (lab.SeededDropout(6),)):
        run = pools(2).train(built(builders.find("1F1B"), 2, 4), Modules(*given), *other, check_gradients=True)
        assert run.gradients.equal is bool(other) and abs(run.losses[0] / losses[0][0] - 1) > 1e-3
    with pytest.raises(ValueError, match="can't go together where the workload's overlap runs both halves"):
        pools(2).train(built(builders.find("DualPipeV"), 2, 4), at_once, lab.SeededDropout(), *again)


def test_a_pool_stays_up_and_can_be_closed_twice():
    with Pool(2, device="cpu") as pool:
        assert repr(pool).endswith("down>") and pool.pids == ()
        pool.run(modules.chatter)
        pids = pool.pids
        pool.run(modules.chatter)
        assert pool.pids == pids and len(set(pids)) == 2 and repr(pool).endswith("up>")
        pool.close()
        assert pool.pids == ()
        assert pool.run(modules.chatter) == [0, 1]
    pool.close()


def test_more_ranks_than_cores_is_said():
    pool = Pool(64, device="cpu")
    assert "64 ranks share" in pool.notes[0] and "the bubble are not the schedule's" in pool.notes[0]
    assert Pool(1, device="cpu").notes == ()


def test_one_process_as_a_reference(pools, gpt):
    reference = lab.reference(pools(2), gpt, 4, steps=2)
    assert len(reference.step_times_ms) == 2 and reference.step_time_ms > 0
    batch = gpt.batch(0)
    model = gpt.build_whole()
    loss = gpt.loss(model(*batch.inputs), batch.target)
    assert reference.loss == pytest.approx(loss.item(), abs=1e-6)


BAD_POOLS = [
    ({"num_ranks": 0}, "num_ranks must be an integer of at least 1, got 0"),
    ({"num_ranks": 2.5}, "num_ranks must be an integer"),
    ({"num_ranks": 2, "threads": 0}, "threads must be an integer of at least 1"),
    ({"num_ranks": 2, "timeout_s": 0}, "timeout_s must be more than 0"),
    ({"num_ranks": 2, "device": "gpu"}, "unknown device 'gpu'"),
    ({"num_ranks": 2, "transport": "mpi"}, "unknown transport 'mpi'"),
    ({"num_ranks": 999, "transport": "nccl"}, "needs a GPU for each of 999 ranks and found"),
]


@pytest.mark.parametrize(("options", "message"), BAD_POOLS)
def test_a_bad_pool_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Pool(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_said():
    with pytest.raises(ValueError, match="this machine has no CUDA device"):
        Pool(2, device="cuda")


TWO, BY_TORCH = ["0F0 0B0", "1F0 1B0"], lab.TorchEngine()


@pytest.mark.parametrize(
    ("rows", "extras", "options", "message"),
    [
        (["0F0 0B0"], (), {}, "custom is for 1 ranks and there are 2"),
        (["0F0 0B0", "1F0"], (), {}, "1B0 is missing"),
        (TWO, (), {"step": 2}, "unknown option of a run 'step'"),
        (["0F0 1F1 1B1 0B0", "1F0 0F1 1B0 0B1"], [BY_TORCH], {}, "bidirectional, which torch's runtime doesn't know"),
        (TWO, [BY_TORCH, lab.Pace(pp.Costs(latency=1, unit="ms"))], {}, "can't be delayed"),
        (TWO, (), {"autocast": "bf16"}, "autocast must be torch.bfloat16"),
        (["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"], (), {}, "a batch of 8 doesn't divide into 3"),
        (["0F0 2F0 2B0 0B0", "1F0 1B0"], (), {}, "the schedule has 3 stages, and 2 modules were given"),
        (TWO, (), {"steps": 0}, "steps must be an integer of at least 1, got 0"),
        (TWO, (), {"warmup": -1}, "warmup must be an integer of at least 0"),
        (TWO, (), {"pace": pp.Costs()}, r"'pace'.* is an extra, such as lab.Pace\(costs\)"),
        (TWO, [lab.Pace(pp.Costs())], {}, "pace needs costs in a unit of time"),
        (TWO, [lab.Pace(pp.Costs([1, 2, 3], unit="ms"))], {}, "3 values for 2 stages"),
    ],
)
def test_a_bad_run_is_refused_before_anything_starts(rows, extras, options, message):
    with Pool(2, device="cpu") as pool:
        workload = modules.workload(nn.Linear(6, 6), nn.Linear(6, 6))
        with pytest.raises(ValueError, match=message):
            pool.train(pp.Schedule([row.split() for row in rows]), workload, *extras, **options)
        assert pool.pids == ()


def report_of(loss: float = 1.0, **gradients: object) -> RankReport:
    found = {name: np.asarray(gradient, np.float32) for name, gradient in gradients.items()}
    return RankReport([], [], loss, found, frozenset(), (), "gloo")


def whole_of(tolerance: float = 1e-5, rounding: dict | None = None, loss: float = 1.0, **gradients: object) -> Whole:
    return Whole(loss, report_of(**gradients).gradients, tolerance, rounding or {}, 0.0)


def compared(whole: Whole, loss: float = 1.0, **gradients: object) -> GradientReport:
    return report_gradients([report_of(loss, **gradients)], whole)


def test_gradients_that_differ_are_told():
    one = whole_of(a=[1, 1, 1], b=[2, 2])
    report = compared(one, a=[1, 1, 1], b=[2, 2.001])
    assert not report.equal and report.worst == "b" and str(report) == repr(report)
    assert str(report) == "NOT equal to one process (2 parameters, up to 3.5e-04 apart in b, the loss 0.0e+00)"
    assert report.relative == pytest.approx(0.001 / 8**0.5, rel=1e-2)
    for wrong in (np.nan, np.inf):
        assert not compared(one, a=[1, 1, 1], b=[2, wrong]).equal
        assert not compared(whole_of(a=[1, 1, 1], b=[2, wrong]), a=[1, 1, 1], b=[2, wrong]).equal
        assert not compared(one, loss=wrong, a=[1, 1, 1], b=[2, 2]).equal
    same = compared(one, a=[1, 1, 1], b=[2, 2])
    assert same.equal and str(same).startswith("equal to one process (2 parameters, none apart, the loss 0.0e+00)\n")


def test_a_small_gradient_is_compared_with_itself():
    """Of a model whose largest gradient is 1: one of 1e-9 may be no other one, and nothing is no gradient either."""
    one = whole_of(large=np.ones(9), small=np.full(9, 1e-9))
    for wrong in (0, -1e-9, 1.1e-9, 1.0001e-9):
        report = compared(one, large=np.ones(9), small=np.full(9, wrong))
        assert not report.equal and report.worst == "small", wrong
    assert compared(one, large=np.ones(9), small=np.full(9, 1.000001e-9)).equal
    assert not (lost := compared(one, large=np.ones(9))).equal and lost.relative == 1 and lost.worst == "small"
    assert not (more := compared(one, large=np.ones(9), small=one.gradients["small"], new=[1])).equal
    assert more.worst == "new" and more.relative == 1
    assert compared(one, large=np.ones(9), small=one.gradients["small"], new=[0]).equal


def test_the_loss_is_compared_too():
    assert compared(whole_of(a=[1]), a=[1], loss=1.000001).equal
    report = compared(whole_of(a=[1]), a=[1], loss=6)
    assert not report.equal and report.loss_difference == 5 and "the loss 5.0e+00)" in str(report)


def test_noise_is_allowed_and_named():
    """`noisy` is rounding alone: twice the same differs by its own size."""
    gradients = {"large": np.ones(100), "noisy": np.full(4, 1e-8), "other": np.full(4, 1e-3)}
    rounding = {"large": (1e-6, 1.0), "noisy": (6e-8, 1e-8), "other": (1e-7, 1e-3)}
    one = whole_of(rounding=rounding, **gradients)
    report = compared(one, **{**gradients, "noisy": np.full(4, -1e-8)})
    assert report.equal and report.noise == ["noisy"] and report.noticed == 2 and report.worst != "noisy"
    assert str(report).splitlines()[1:] == [
        "  a gradient zeroed, times 1.1 or short of a microbatch would be noticed in 2 of 3",
        "  without a gradient worth comparing: 1, such as noisy",
    ]
    assert not compared(one, **{**gradients, "noisy": np.full(4, 1e-6)}).equal


def test_what_microbatches_change_is_no_noise():
    """A norm by the batch's statistics: the second run of one process is another one for that, and it doesn't count."""
    s, model = pp.build("1F1B", num_ranks=2, num_microbatches=4), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    context = RankContext(0, 1, torch.device("cpu"), "shared", timedelta(seconds=9))
    whole = train_twice(context, make_job(s, Modules(model, modules.batch(), nn.functional.mse_loss), 2))
    sizes = {name: np.linalg.norm(gradient) for name, gradient in whole.gradients.items()}
    assert sum(whole.rounding[name][0] < 1e-4 * size for name, size in sizes.items()) >= 3, (whole.rounding, sizes)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_it_says_would_be_noticed_is(gpt, dtype):
    """Every fault is planted in every weight, and the comparison is made."""
    job = make_job(pp.build("1F1B", num_ranks=2, num_microbatches=4), gpt, 2, autocast=dtype)
    context = RankContext(0, 1, torch.device("cpu"), "shared", timedelta(seconds=9))
    whole = train_twice(context, job)
    right = RankReport([], [], whole.loss, whole.gradients, frozenset(), (), "gloo")
    assert report_gradients([right], whole).noticed == 101
    model, parts = gpt.build_whole(), gpt.batch(0).microbatches(4)
    lost = [train_whole(context, gpt, dtype, model, part, 0.25)[1] for part in parts]
    for name, gradient in whole.gradients.items():
        for planted in (0 * gradient, 1.1 * gradient, *(gradient - each[name] for each in lost)):
            wrong = dataclasses.replace(right, gradients={**whole.gradients, name: planted})
            report = report_gradients([wrong], whole)
            assert not report.equal and report.worst == name, report


def test_a_whole_model_that_is_not_made_anew_keeps_its_weights():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    workload = Modules(model, modules.batch(), nn.functional.mse_loss)
    workload.build_whole = lambda: model
    kept = [p.detach().clone() for p in model.parameters()]
    job = make_job(pp.build("1F1B", num_ranks=2, num_microbatches=4), workload, 2, autocast=torch.bfloat16)
    whole = train_twice(RankContext(0, 1, torch.device("cpu"), "shared", timedelta(seconds=9)), job)
    assert min(noise for noise, _ in whole.rounding.values()) > 0
    assert all(map(torch.equal, kept, model.parameters()))


def test_what_has_no_gradient_but_rounding_is_named(pools, distilbert):
    """Keys have biases, on which no output depends: their gradients are 0 in exact numbers. In bfloat16 the gradients
    of this model, whose samples nearly cancel each other, are so badly known that few faults would show."""
    s = pp.build("ZB-H1", num_ranks=2, num_microbatches=4)
    exact, mixed = (
        pools(2).train(s, distilbert, steps=1, warmup=0, check_gradients=True, autocast=dtype).gradients
        for dtype in (None, torch.bfloat16)
    )
    assert exact.equal and len(exact.noise) == 8 and all(name.endswith("k_lin.bias") for name in exact.noise), exact
    last = "without a gradient worth comparing: 8, such as distilbert.transformer.layer.0.attention.k_lin.bias"
    assert last in str(exact)
    assert exact.noticed == len(exact.parameters) - 8 > mixed.noticed and mixed.equal, (exact, mixed)
    assert {*exact.noise} <= {*mixed.noise}


@pytest.mark.parametrize(("factor", "equal"), [(1, True), (-1, False), (0, False), (None, False), (99, False)])
def test_a_fault_in_a_branch_near_the_identity_is_noticed(pools, factor, equal):
    """Its gradients are a hundred thousandth of the largest. AdamW, which doesn't look at sizes, would go astray."""
    workload = modules.workload(nn.Linear(6, 6), modules.Branch(factor))
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    found = pools(2).train(s, workload, steps=1, warmup=0, check_gradients=True).gradients
    branch, *_ = sorted(found.parameters)[2:]
    assert found.parameters[branch].size < 2e-5 * found.parameters["0.weight"].size, found.parameters
    assert found.equal == equal and (equal or found.worst.startswith("1.linear")), found
    assert found.noticed == 4 or not equal


def test_sparse_gradients_are_compared(pools):
    words = pp.runtime.Batch((torch.arange(40).view(8, 5) % 20,), modules.batch().target)
    stages = [nn.EmbeddingBag(20, 6, sparse=True), nn.Linear(6, 6)]
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    run = pools(2).train(s, Modules(stages, words, nn.functional.mse_loss), steps=1, check_gradients=True)
    assert run.gradients.equal and run.gradients.noticed == 3, run


def test_a_loss_of_the_stages_alone_is_noticed(pools):
    workload = Modules([nn.Linear(6, 6), nn.Linear(6, 6)], modules.batch(), modules.more_on_rank_1)
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    run = pools(2).train(s, workload, steps=1, warmup=0, check_gradients=True)
    assert not run.gradients.equal and run.gradients.loss_difference == pytest.approx(5)
    assert all(each.equal for each in run.gradients.parameters.values())


def test_the_tolerance_is_what_two_orders_of_sums_take():
    """A gradient of so many tokens, added one after the other and in eight parts, as a run's microbatches are."""
    rng, took = np.random.default_rng(0), {}
    for terms in (2**12, 2**15, 2**19):
        numbers = rng.normal(1, size=(terms, 64)).astype(np.float32)
        parts = np.stack([in_order(part) for part in np.split(numbers, 8)])
        tolerance = max(1e-5, terms**0.5 * 2**-23)
        report = compared(whole_of(tolerance, a=in_order(numbers)), a=in_order(parts))
        took[terms] = report.relative
        assert report.equal and 0.05 < report.relative / (terms**0.5 * 2**-23) < 0.5
    assert took[2**19] > 1e-5  # which refused it when it didn't know the number of tokens
    assert not compared(whole_of(2**10 * 2**-23, a=np.ones(1)), a=[1.001]).equal


def in_order(numbers: np.ndarray) -> np.ndarray:
    return np.add.accumulate(numbers, axis=0, dtype=np.float32)[-1]


def test_the_tolerance_knows_how_many_tokens_a_batch_has(pools):
    few, many = (modules.workload(nn.Linear(6, 6), nn.Linear(6, 6), size=n) for n in (8, 2**14))
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    runs = [pools(2).train(s, each, steps=1, check_gradients=True) for each in (few, many)]
    assert [run.gradients.tolerance for run in runs] == [1e-5, 2**7 * 2**-23] and all(r.gradients.equal for r in runs)


def test_train_from_the_shell(tmp_path, capsys):
    from pplab.__main__ import main

    files = {name: tmp_path / f"out.{name}" for name in ("png", "perfetto", "json")}
    options = [x for name, path in files.items() for x in (f"--{name}", str(path))]
    command = "train --schedule GPipe --ranks 2 --microbatches 4 --steps 2 --check-gradients --source sample"
    assert main([*command.split(), "--device", "cpu", "--batch-size", "8", *options]) == 0
    assert "equal to one process (101 parameters" in capsys.readouterr().out
    data = json.loads(files["json"].read_text())
    assert data["gradients"]["equal"] and len(data["timelines"]) == 2
    assert lab.timeline_from_dict(data["timelines"][0]).makespan > 0
    assert files["png"].stat().st_size and json.loads(files["perfetto"].read_text())["traceEvents"]


def test_a_users_csv_runs(tmp_path, capsys):
    from pplab.__main__ import main

    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    assert main(["train", "--csv", str(path), "--steps", "1", "--source", "sample", "--device", "cpu"]) == 0
    assert "mine, measured: 2 ranks" in capsys.readouterr().out


def test_groups_have_the_patience_of_the_run(monkeypatch):
    asked, options = [], SimpleNamespace(config=SimpleNamespace())
    nccl = SimpleNamespace(Options=lambda: options)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, **options: asked.append((ranks, options)))
    patience = timedelta(seconds=7)
    context = RankContext(0, 2, torch.device("cuda"), "nccl", patience)
    context.channel(0, 1)
    ((ranks, how),) = asked
    assert ranks == [0, 1] and how["backend"] == "nccl" and how["timeout"] == 2 * patience  # the pool is the first
    assert 0 < how["pg_options"].config.max_ctas <= 4


def test_what_comes_from_a_gpu_is_unpacked_in_the_hosts_memory(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")  # so that it seems to be on one
        packed = pack({"loss": torch.arange(3.0)})
    found = unpack(packed)["loss"]
    assert found.device.type == "cpu" and found.tolist() == [0, 1, 2]


@pytest.mark.parametrize("pace, waits", [(None, []), (lab.Pace(pp.Costs(1e-6, 1e-6, 1e-6, unit="ms")), ["wait"] * 3)])
def test_a_paced_host_knows_when_its_gpu_got_there(monkeypatch, pace, waits):
    """After a message and around an action: a receive over NCCL makes the GPU wait, not the host."""
    said, gpu = [], torch.device("cuda")
    stream = SimpleNamespace(synchronize=lambda: said.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    comm = SimpleNamespace(device=gpu, receive=lambda action: ())
    stage = SimpleNamespace(forward=lambda *_: said.append("run") or ())
    context, job = SimpleNamespace(rank=1, device=gpu), SimpleNamespace(schedule=pp.Schedule([["0F0", "1F0"]]))
    rank = SimpleNamespace(context=context, job=job, comm=comm)
    around = Listeners([pace.listen(rank)]) if pace else lambda event, what: nullcontext()
    Executor(1, [pp.parse("1F0")], {1: stage}, 2, {}, comm, around).run([None])
    assert [each for each in said if each == "wait"] == waits and said.index("run") == len(waits) - bool(waits)


@pytest.mark.parametrize("error_ns, noted", [(90_000, False), (300_000, True)])
def test_a_clock_that_is_far_off_is_said(gpt, error_ns, noted):
    s = pp.build("GPipe", num_ranks=1, num_microbatches=1)
    actions = [(action, 10 * i, 10 * i + 10) for i, action in enumerate(s.rows[0])]
    trace = StepTrace(actions, [], 0, 20, error_ns=error_ns)
    report = RankReport([trace], [1.0], 1.0, {}, frozenset(), (), "gloo")
    run = make_run(make_job(s, gpt, 1), [report], None, ["cuda:0"], ())
    assert run.machine.clock_error_ms == lab.run_to_dict(run)["clock_error_ms"] == error_ns / 1e6
    assert any("0.3 ms off the clock of all ranks" in note for note in run.notes) == noted


@pytest.mark.parametrize(
    "done, losses, said",
    [
        (0, [2.5, 2.4], None),
        (0, [2.5, math.nan, math.nan, 2.0], "in 2 of 4 steps, first in step 2"),
        (6, [math.inf, 3.0], "in 1 of 2 steps, first in step 7"),
        (0, [-math.inf], "in 1 of 1 steps, first in step 1"),
    ],
)
def test_losses_that_are_no_numbers_are_said(gpt, done, losses, said):
    s = pp.build("GPipe", num_ranks=1, num_microbatches=1)
    trace = StepTrace([(action, 10 * i, 10 * i + 10) for i, action in enumerate(s.rows[0])], [], 0, 20)
    report = RankReport([trace] * len(losses), losses, 3.0, {}, frozenset(), (), "gloo")
    job = dataclasses.replace(make_job(s, gpt, 1), first_step=done)
    run = make_run(job, [report], None, ["cpu"], ())
    found = [note for note in run.notes if "NaN" in note]
    assert found == [
        f"the loss is NaN or infinite {said}: lower the learning rate, or look at data and weights"
    ] * bool(said)
    assert ("note: the loss is NaN or infinite in" in str(run)) == bool(said)
    assert run.first_loss == 3.0 and str(run.losses) == str(tuple(losses))


def test_a_run_that_learns_too_fast_says_so(gpt):
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    with Pool(2) as pool:
        run = pool.train(s, gpt, steps=4, optimizer=functools.partial(torch.optim.SGD, lr=1e30))
    first = [math.isfinite(loss) for loss in run.losses].index(False) + 1
    assert first > 1 and f"first in step {first}: lower the learning rate" in " ".join(str(run).split())


def test_a_paced_run_on_gpus_says_so():
    (said,) = lab.Pace(pp.Costs(unit="ms")).notes(["cuda:0", "cuda:1"], [])
    assert "the durations say nothing about the GPU" in said
