"""Mixtures of experts, spread or not, and the halves of overlaps beside each other: the numbers of one process, in less
time than one after the other, and as long as the pieces say."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import modules
import pairs
import pplab as pp
from pplab import lab
from pplab.actions import Action, B, F, I, W, parts
from pplab.lab import models
from pplab.lab.experts.beside import Pairs
from pplab.lab.experts.turns import Turns
from pplab.runtime import Executor, Listener, Listeners, Pool, RankContext, RankError, Stage

pytestmark = pytest.mark.slow

SIZES = {"width": 16, "num_heads": 2, "context": 8, "expert_width": 16, "source": "sample"}
PIECES = lab.Pieces(2, 2, 2, 2)
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def mixture(batch_size=8, num_layers=4, **options):
    return models.mixture(batch_size=batch_size, num_layers=num_layers, **SIZES, **options)


def in_ticks(halves):
    """How long they take, by a clock that ticks: pieces are 0 to 3 ticks long. Who has asked for the compute first has
    it first, and of two who ask at once the one that comes first in `halves`."""
    left, asked, computes, now = [[list(piece) for piece in half] for half in halves], [None] * len(halves), None, 0
    while True:
        moved = True
        while moved:  # all that happens at one moment
            moved = False
            for i, half in enumerate(left):
                while half and half[0][1] <= 0 and (not half[0][0] or computes == i):
                    computes = None if half.pop(0)[0] else computes
                    asked[i], moved = None, True
                if half and half[0][0] and computes != i and asked[i] is None:
                    asked[i], moved = now, True
            waiting = [(when, i) for i, when in enumerate(asked) if when is not None and computes != i]
            if computes is None and waiting:
                computes, moved = min(waiting)[1], True
        if not any(left):
            return now
        for i, half in enumerate(left):
            if half and (not half[0][0] or computes == i):
                half[0][1] -= 1
        now += 1


def test_how_long_pairs_take_is_what_a_ticking_clock_says(rng):
    p = lab.Pieces()
    assert [p.lasts((kind, 1)) for kind in (F, I, W, B)] == [4, 4, 2, 6]
    assert p.lasts((F, 3), (B, 3)) == 18 and p.lasts((F, 2), (I, 2)) == p.lasts((F, 2), (W, 2)) == 8
    assert p.lasts((I, 1), (W, 1)) == 4 and p.lasts((F, 2)) == 8
    for _ in range(300):
        p = lab.Pieces(*(rng.randint(1, 3) for _ in range(4)))
        halves = [(kind, rng.randint(1, 3)) for kind in rng.choice([(B, F), (I, F), (I, W), (F, W), (B, W), (F,)])]
        sequences = [[(computes, length) for _, computes, length in p.of(*half)] for half in halves]
        assert p.lasts(*halves) == in_ticks(sequences), (p, halves)


def schedules(P, M):
    return [
        pp.build("paired-1F1B", num_ranks=P, num_microbatches=M),
        pp.build("paired-1F1B", num_ranks=P, num_microbatches=M, stages_per_rank=2, split=True),
        pp.build("DualPipe", num_ranks=P, num_microbatches=M),
        pp.build("DualPipeV", num_ranks=P, num_microbatches=M),
        pp.build("ZBVZeroBubble", num_ranks=P, num_microbatches=M),
    ]


@pytest.mark.parametrize("s", schedules(2, 4), ids=lambda s: f"{s.name} {s.num_stages}")
def test_pairs_beside_each_other_equal_one_process(pools, s):
    run = pools(2).train(s, mixture(), lab.Beside(), lab.Meter(), steps=1, warmup=0, check_gradients=True)
    assert run.gradients.equal and run.gradients.loss_difference < 1e-5, run
    assert run.held.peak_bytes == run.predicted_peak_bytes  # counted in a pass in which halves take turns
    run = pools(2).train(s, mixture(), lab.Beside(), steps=1, warmup=0, check_gradients=True)
    assert run.gradients.equal and run.gradients.loss_difference < 1e-5, run
    halves = [[f"{half.stage}{half.kind}" for half in parts(item)] for row in s.rows for item in row]
    items = {tuple(sorted(half)) for half in halves if len(half) > 1}
    assert (run.costs.overlap == "sum") if not items else (run.costs.overlap.keys() == items)


@pytest.mark.parametrize("s", schedules(2, 4), ids=lambda s: f"{s.name} {s.num_stages}")
def test_experts_on_several_ranks_equal_one_process(pools, s):
    """With an optimizer: copies of other weights stay equal, and of those experts that two ranks of DualPipe have."""
    s, workload = lab.replicate(s, 2), mixture(batch_size=16)
    extras = [lab.Beside(), lab.Experts()]
    run = pools(4).train(s, workload, *extras, steps=2, warmup=0, check_gradients=True, optimizer=SGD)
    assert run.gradients.equal and run.gradients.loss_difference < 1e-5, run
    assert run.losses == pytest.approx(modules.losses_of_one_process(workload, 2, SGD), abs=1e-5)


def test_as_many_tokens_are_sent_as_the_router_sends_elsewhere(pools):
    s = lab.replicate(pp.build("1F1B", num_ranks=1, num_microbatches=2), 2)
    workload = mixture(batch_size=4)
    model, chosen = workload.build_whole(), []
    for block in model.blocks.values():
        block.router.register_forward_hook(lambda module, given, made: chosen.append(made.topk(2).indices))
    model(*workload.batch(0).inputs)
    own = torch.stack(chosen).view(4, 2, -1)  # layers, replicas, experts of their tokens
    elsewhere = [int((own[:, 0] >= 2).sum()), int((own[:, 1] < 2).sum())]
    with Pool(2, device="cpu") as pool:
        run = pool.train(s, workload, lab.Experts(), steps=1, warmup=0, check_gradients=True)
    assert run.gradients.equal and run.extras["experts"] == tuple(2 * each for each in elsewhere)  # in two passes
    assert elsewhere[0] != elsewhere[1]  # uneven


@pytest.mark.timed
def test_measured_under_prediction(pools):
    """A pair takes what its pieces say, which is less than its halves take, and the schedules come in the order of the
    simulation, as far apart as here."""
    P, M = 2, 4
    names = [
        pp.build("1F1B", num_ranks=P, num_microbatches=M),
        pp.build("paired-1F1B", num_ranks=P, num_microbatches=M),
        schedules(P, M)[3],
        pp.build("paired-1F1B", num_ranks=P, num_microbatches=M, split=True),
    ]
    workload = mixture(num_layers=4)
    found = lab.measure_under(pools(2), names, workload, lab.Pieces(4, 4, 4, 4), latency_ms=4, check_gradients=True)
    _, wide, v, split = found.rows
    assert found.order(measured=True)[-1] == found.order(measured=False)[-1] == "1F1B"
    assert all(row.ratio > 0.99 and min(row.steps_ms) < 1.25 * row.simulated.makespan for row in found.rows), found
    for row in (wide, v):
        both = [end - start for _, item, start, end in row.measured.spans if len(parts(item)) > 1]
        layers = 4 // row.schedule.num_stages
        assert sorted(both)[len(both) // 2] < 0.85 * 40 * layers, found  # F + B are 40 ms per layer
    assert split.simulated.makespan < wide.simulated.makespan
    assert "DualPipeV" in str(found) and len(found.timelines) == 8


@pytest.mark.timed
def test_torchs_runtime_runs_pairs_beside_each_other(pools):
    s = pp.build("DualPipeV", num_ranks=2, num_microbatches=4)
    run = pools(2).train(s, mixture(), lab.TorchEngine(), lab.Beside(PIECES), steps=1, check_gradients=True)
    assert run.gradients.equal and run.gradients.loss_difference < 1e-5, run
    assert min(run.costs.overlap.values()) < 17  # of halves that take 8 and 12, one after the other 20


def test_what_torch_keeps_per_thread_is_as_if_halves_ran_one_after_the_other(pools):
    """Random numbers, also where a backward runs its forward again with those that it drew the first time; and the
    precision to compute in."""
    s, found = pp.build("DualPipeV", num_ranks=2, num_microbatches=4), []
    made = modules.workload(*(pairs.Dropping() for _ in range(4)))
    for more, options in (([], {}), ([lab.Recompute()], {}), ([], {"autocast": torch.bfloat16})):
        losses = []
        for extras in ([lab.Beside(), lab.Meter()], [lab.Beside(PIECES)]):  # in a Meter's pass halves take turns
            pools(2).run(pairs.seed)
            run = pools(2).train(s, made, *extras, *more, steps=2, warmup=0, optimizer=SGD, **options)
            losses.append((run.first_loss, *run.losses))  # the last one has seen gradients
        assert losses[0] == losses[1] and len(set(losses[0])) == 3
        found.append(losses[0])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("failing", [pairs.Fails(), pairs.FailsBehind()])
def test_a_half_that_fails_is_named(failing):
    stages = [pairs.Dropping(), failing, pairs.Dropping(), pairs.Dropping()]
    half = {"Fails": "F", "FailsBehind": "B"}[type(failing).__name__]
    with Pool(2, device="cpu", timeout_s=30) as pool, pytest.raises(RankError) as caught:
        pool.train(pp.build("DualPipeV", num_ranks=2, num_microbatches=4), modules.workload(*stages), lab.Beside())
    error = caught.value
    assert isinstance(error.action, pp.Overlap) and "ArithmeticError: the" in error.cause, error
    assert f"in its 1{half}" in error.cause


def test_a_half_that_hangs_is_named():
    stages = [pairs.Dropping(), pairs.Fails(hangs=True), pairs.Dropping(), pairs.Dropping()]
    with Pool(2, device="cpu", timeout_s=3) as pool, pytest.raises(RankError, match=r"while .*1F\d computes") as caught:
        pool.train(pp.build("DualPipeV", num_ranks=2, num_microbatches=4), modules.workload(*stages), lab.Beside())
    assert isinstance(caught.value.action, pp.Overlap)


def turns(pieces=None):
    return Turns(torch.device("cpu"), pieces)


def test_halves_have_the_settings_of_the_thread_that_runs_them():
    def found(action):
        return torch.is_grad_enabled(), torch.get_num_threads(), threading.get_ident()

    run = Pairs(turns(), lambda *said: None)
    calls = [functools.partial(found, Action(0, kind, m)) for m, kind in enumerate((F, B))]
    before = torch.get_num_threads()
    for grad, threads in itertools.product((True, False), (1, 2)):
        torch.set_num_threads(threads)
        with torch.set_grad_enabled(grad):
            one, other = run(*calls)
        assert one[:2] == other[:2] == (grad, threads) and one[2] != other[2]
    torch.set_num_threads(before)
    run.close()


ROW = "0F0 1F0 0F1;1I0 0I0;1W0 1F1;0W0 0F2;1I1 0I1;1W1 1F2;0W1 0F3;1B2 1F3;0B2 1B3 0B3"


@pytest.mark.timed
def test_any_two_halves_run_beside_each_other():
    """A forward beside an input gradient, a weight gradient beside either, whose messages it hides."""

    class Timing(Listener):
        events = frozenset(("item",))
        took: dict = {}

        def begin(self, event, what):
            self.begun = time.perf_counter()

        def end(self, event, what):
            kinds, took = "".join(half.kind for half in parts(what)), time.perf_counter() - self.begun
            self.took[kinds] = min(took, self.took.get(kinds, took))

    def item(text):
        halves = [pp.parse(each) for each in text.split(";")]
        return pp.Overlap(*halves) if len(halves) > 1 else halves[0]

    workload, device = mixture(batch_size=4, num_layers=2), torch.device("cpu")
    stages = {s: Stage(workload.build_stage(s, 2), s, 2, workload.loss, [1 / 4] * 4, split=True) for s in range(2)}
    rank = SimpleNamespace(
        context=RankContext(0, 1, device, "shared", timedelta(seconds=9)),
        modules={s: stage.module for s, stage in stages.items()},
        stages=stages,
        job=SimpleNamespace(extras=()),
    )
    taking = lab.Beside(lab.Pieces(5, 5, 5, 5)).listen(rank)
    home = dict.fromkeys(itertools.product(range(2), range(4)), 0)
    row = [item(each) for each in ROW.split()]
    Executor(0, row, stages, 2, home, None, Listeners([Timing(), taking]), rank.overlap).run(
        workload.batch(0).microbatches(4)
    )
    taking.report()
    model, batch = workload.build_whole(), workload.batch(0)
    workload.loss(model(*batch.inputs), batch.target).backward()
    for name, p in model.named_parameters():
        (own,) = [q for stage in stages.values() for n, q in stage.module.named_parameters() if n == name]
        torch.testing.assert_close(own.grad, p.grad)
    took = Timing.took
    assert took["FI"] < 0.85 * (took["F"] + took["F"]) and took["FB"] < 0.85 * (took["F"] + took["B"]), took
    assert took["IW"] < took["F"] + 0.007 and took["FW"] < took["F"] + 0.007, took  # W alone takes 10 ms


@pytest.mark.parametrize(
    ("workload", "extras", "message"),
    [
        (modules.workload(nn.Linear(6, 6)), [lab.Experts()], "modules has no experts to spread"),
        (
            modules.Modules([nn.Linear(6, 6)], modules.batch(), nn.functional.mse_loss, overlap=modules.backward_first),
            [lab.Beside()],
            "runs its overlaps itself",
        ),
        (mixture(num_experts=3), [lab.Experts()], "3 experts don't divide into 2 replicas"),
        (mixture(), [lab.Experts(), lab.Clip(1.0)], "Clip, Save and Resume look for"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(workload, extras, message):
    s = lab.replicate(pp.build("1F1B", num_ranks=1, num_microbatches=2), 2)
    with Pool(2, device="cpu") as pool, pytest.raises(ValueError, match=message):
        pool.train(s, workload, *extras)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="experts_per_token is 5, and there are 4 experts"):
        mixture(experts_per_token=5)
    with pytest.raises(ValueError, match="6 layers don't divide into 4 equal stages"):
        lab.Pieces().costs(pp.build("1F1B", num_ranks=4, num_microbatches=4), 6)
