"""Losses that layers add, on any stage: gradients and loss are those of plain torch in one process."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch.nn import functional

import adding
import modules
import pplab as pp
from adding import ByItself, M, Mixture, Shared, layers, one_process, workload
from conftest import built, names_of_schedules
from pplab import builders, lab
from pplab.lab.forms import CLASSES
from pplab.lab.models import Modules
from pplab.runtime import Pool, RankError, add_loss, listening, reference

pytestmark = pytest.mark.slow
EIGHT = ("router",) * 8


@pytest.fixture
def gathered(monkeypatch):
    """The gradients that the ranks of the last run reported, by name."""
    found, report = {}, reference.report_gradients

    def keep(reports, whole):
        found.clear()
        for each in reports:
            found.update(each.gradients)
        return report(reports, whole)

    monkeypatch.setattr(reference, "report_gradients", keep)
    return found


def check(run, gathered, net, **options):
    loss, truth = one_process(net, **options)
    assert run.gradients.equal, run
    assert run.first_loss == pytest.approx(loss, rel=1e-5) and set(gathered) == set(truth)
    for name, expected in truth.items():
        apart = (torch.from_numpy(gathered[name]) - expected).norm()
        assert apart <= 1e-5 * expected.norm() + 1e-7, name


@pytest.mark.parametrize("name", names_of_schedules())
def test_every_schedule_has_the_added_losses_gradients(pools, gathered, name):
    """On one stage and on all; recomputed; and by torch's engine, where it takes the schedule."""
    s = built(builders.find(name), 2, M)
    some = ("router",) + ("nowhere",) * 7
    runs = [(EIGHT, ()), (some, ()), (EIGHT, (lab.Recompute(),))]
    runs += [(EIGHT, (lab.TorchEngine(),))] if s.copies == 1 else []
    for where, extras in runs:
        run = pools(2).train(s, workload(*where), *extras, steps=1, warmup=0, check_gradients=True)
        check(run, gathered, layers(*where))


def test_without_them_the_gradients_are_others(pools, gathered):
    """The tests here would see a loss that is lost."""
    _, without = one_process(layers(*EIGHT), with_extra=False)
    _, truth = one_process(layers(*EIGHT))
    apart = [(without[name] - truth[name]).norm() / truth[name].norm() for name in truth if "router" in name]
    assert min(apart) > 0.05


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_replicas(pools, gathered, name):
    s = lab.replicate(pp.build(name, num_ranks=2, num_microbatches=M // 2), 2)
    run = pools(4).train(s, workload(*EIGHT), steps=1, check_gradients=True)
    check(run, gathered, layers(*EIGHT))


@pytest.mark.parametrize("name", ["paired-1F1B", "DualPipeV", "DualPipe"])
def test_pairs_that_run_at_once(pools, gathered, name):
    s = pp.build(name, num_ranks=2, num_microbatches=M)
    for overlap in (modules.backward_first, adding.in_two_threads):
        run = pools(2).train(s, workload(*EIGHT, overlap=overlap), steps=1, check_gradients=True)
        check(run, gathered, layers(*EIGHT))


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_a_sum_has_the_sum_of_them(pools, gathered, name):
    net, loss = layers(*EIGHT), functools.partial(functional.mse_loss, reduction="sum")
    for extras in ((), (lab.TorchEngine(),)):
        made = Modules(layers(*EIGHT), adding.batch, loss, "sum")
        s = pp.build(name, num_ranks=2, num_microbatches=M)
        run = pools(2).train(s, made, *extras, steps=1, check_gradients=True)
        check(run, gathered, net, reduction="sum")


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize(
    ("where", "kind", "by_torch"),
    [
        ("beside", Mixture, True),
        ("alone", Mixture, True),
        ("weights", Mixture, False),
        ("detached", Shared, False),
    ],
)
def test_a_loss_beside_the_stages_input(pools, gathered, name, where, kind, by_torch):
    """Where its backward meets what goes on to the input, torch's split backward can't do it."""
    s = pp.build(name, num_ranks=2, num_microbatches=M)
    made = Modules(layers(*[where] * 8, kind=kind), adding.batch, functional.mse_loss)
    run = pools(2).train(s, made, steps=1, check_gradients=True)
    check(run, gathered, layers(*[where] * 8, kind=kind))
    if by_torch or name == "1F1B":
        run = pools(2).train(s, made, lab.TorchEngine(), steps=1, check_gradients=True)
        check(run, gathered, layers(*[where] * 8, kind=kind))
        return
    with Pool(2, device="cpu") as pool, pytest.raises(RankError, match="torch's split backward can't differentiate"):
        pool.train(s, made, lab.TorchEngine(), steps=1)


def test_a_microbatch_that_counts_for_nothing_adds_nothing(pools):
    """Its losses may be no numbers."""
    s = pp.build("1F1B", num_ranks=2, num_microbatches=M)
    made = Modules(layers(*EIGHT), adding.first_without_labels, adding.labelled, weight=adding.count)
    for extras in ((), (lab.TorchEngine(),)):
        run = pools(2).train(s, made, *extras, steps=1, check_gradients=True)
        assert run.gradients.equal and run.gradients.by_microbatch is not None, run


def test_the_report_says_how_far_a_mean_over_microbatches_is_from_the_batchs(pools):
    run = pools(2).train(
        pp.build("1F1B", num_ranks=2, num_microbatches=M), workload(*EIGHT), steps=1, check_gradients=True
    )
    net, given, gradients = layers(*EIGHT), adding.batch().inputs[0], []
    for parts in (1, M):
        net.zero_grad()
        for x in given.chunk(parts):
            total = 0
            for layer in net:
                total, x = total + layer.extra(x) / parts, layer.body(x)
            total.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    whole, mean = gradients
    far = float((whole - mean).norm() / whole.norm())
    assert run.gradients.by_microbatch == pytest.approx(far, rel=1e-4) and far > 0.05
    assert f"their gradient is {far:.0%} off the batch's" in str(run)
    plain = pools(2).train(run.schedule, workload(*["nowhere"] * 8), steps=1, check_gradients=True).gradients
    assert plain.equal and plain.by_microbatch is None and "layers add" not in str(plain)


def test_a_loss_that_nobody_adds_is_not_equal(pools, capfd):
    run = pools(2).train(
        pp.build("1F1B", num_ranks=2, num_microbatches=M),
        workload(*["attribute"] * 2),
        lab.Causes(),
        steps=1,
    )
    printed = capfd.readouterr().out
    assert run.gradients.unclaimed == ("0.balance", "1.balance") and not run.gradients.equal
    assert "cause: nobody adds what layers announce as a loss, in 0.balance, 1.balance: let their forw" in str(run)
    for rank, note in enumerate(run.notes[-2:]):  # without the comparison, too
        said = f"nobody adds what layers announce as a loss, in {rank}.balance: let their forward call"
        assert note.startswith(said) and f"rank {rank}: note: {said}" in printed
    assert all(each.equal for each in run.gradients.parameters.values())
    theirs = pools(2).train(run.schedule, workload(*["attribute"] * 2), lab.TorchEngine(), steps=1)
    assert any("nobody adds" in note and "0.balance: let" in note for note in theirs.notes)


def test_a_config_that_asks_for_routers_logits_is_not_equal(pools):
    s = pp.build("1F1B", num_ranks=2, num_microbatches=M)
    for where, equal in (("nowhere", False), ("router", True)):
        made = Modules(layers(where, where, kind=adding.Configured), adding.batch, functional.mse_loss)
        report = pools(2).train(s, made, steps=1, check_gradients=True).gradients
        assert report.equal is equal and report.unclaimed == (() if equal else ("0.config", "1.config"))


def test_numbers_of_any_stage_arrive(pools, tmp_path):
    """Of all layers, of one stage alone, and of none; with either engine, recomputed, and from pairs in two threads."""
    kinds = {"all": EIGHT, "one": ("router",) + ("nowhere",) * 7, "none": ("nowhere",) * 8}
    runs = [("1F1B", ()), ("DualPipeV", ()), ("1F1B", (lab.Recompute(),)), ("ZBVZeroBubble", (lab.TorchEngine(),))]
    for name, extras in runs:
        s = pp.build(name, num_ranks=2, num_microbatches=M)
        for kind, where in kinds.items():
            path = tmp_path / f"{name} {len(extras)} {kind}"
            net = layers(*where, kind=adding.Saying)
            made = Modules(net, adding.batch, functional.mse_loss, overlap=adding.in_two_threads)
            run = pools(2).train(s, made, *extras, lab.Numbers(), lab.Log(path), steps=2)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for step, (found, line) in enumerate(zip(run.extras["numbers"], lines, strict=True)):
                expected = adding.said(net, step)
                assert (found.get("extra", ()), line.get("extra", [])) == (
                    pytest.approx(tuple(expected), rel=1e-5),
                    pytest.approx(expected, rel=1e-5),
                )
            assert ("extra  " in str(run)) is (kind != "none")
    run = pools(2).train(s, made, steps=1)
    assert "numbers" not in run.extras


def test_a_layer_that_gives_its_loss_a_gradient_itself_is_named(pools):
    made = Modules(layers("router", "router", kind=ByItself), adding.batch, functional.mse_loss)
    s = pp.build("1F1B", num_ranks=2, num_microbatches=M)
    report = pools(2).train(s, made, lab.Causes(), steps=1).gradients
    (cause,) = report.causes
    assert not report.equal and "a backward that starts from 0 reaches 0.router.weight, 0.router.bias" in cause
    assert f"comes {M} times too large" in cause and "pplab.runtime.add_loss(x)" in cause


@pytest.mark.parametrize("name", CLASSES)
def test_what_the_page_prints_for_plain_torch_runs_under_its_classes(pools, gathered, name):
    made = Modules(layers(*EIGHT, kind=ByItself), adding.batch, functional.mse_loss)
    s = pp.build(name, num_ranks=2, num_microbatches=M)
    pools(2).train(s, made, lab.TorchEngine(), steps=1, warmup=0, check_gradients=True)
    _, truth = one_process(layers(*EIGHT))
    for name, expected in truth.items():
        assert (torch.from_numpy(gathered[name]) - expected).norm() <= 1e-5 * expected.norm() + 1e-7, name


def test_torchs_checkpoint(pools, gathered):
    """It runs a layer again, which adds nothing more; the reentrant kind would lose the loss, and is refused."""
    s = pp.build("ZB-H1", num_ranks=2, num_microbatches=M)
    for extras in ((), (lab.TorchEngine(),)):
        made = Modules(layers("router", "router", kind=adding.Again), adding.batch, functional.mse_loss)
        run = pools(2).train(s, made, *extras, steps=1, check_gradients=True)
        check(run, gathered, layers("router", "router"))
    made = Modules(layers("reentrant", "router", kind=adding.Again), adding.batch, functional.mse_loss)
    with Pool(2, device="cpu") as pool, pytest.raises(RankError, match="would be lost: give torch's checkpoint"):
        pool.train(s, made, steps=1)


def test_a_plain_loop_listens():
    net, x = layers("router", "router"), adding.batch().inputs[0]
    with pytest.raises(RuntimeError, match="run the forward inside `with pplab.runtime.listening"):
        net(x)
    with listening() as added:
        net(x)
    expected = [net[0].extra(x), net[1].extra(net[0].body(x))]
    assert torch.allclose(torch.stack(added), torch.stack(expected))
    with torch.no_grad():
        assert net(x).shape == (16, 8)
    with pytest.raises(ValueError, match=r"add_loss takes one number, got shape \(2,\)"):
        add_loss(torch.ones(2))


def test_a_held_out_loss_has_them_too(pools):
    s = pp.build("Interleaved1F1B", num_ranks=2, num_microbatches=M)
    run = pools(2).train(s, workload(*EIGHT), lab.Evaluate(1, [adding.batch(0)]), steps=1)
    assert run.extras["evaluations"][-1][1] == pytest.approx(one_process(layers(*EIGHT))[0], rel=1e-5)
