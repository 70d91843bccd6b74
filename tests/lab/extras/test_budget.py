"""A rank with a budget runs what the counts say it can hold, ends where they say it can't, and tells so."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import pplab as pp
from pplab import lab
from pplab.lab import models
from pplab.lab.extras import budget
from pplab.runtime import Options, Pool, RankError, make_job

ADAM = partial(torch.optim.Adam, lr=1e-3)
MB = 10**6


def small_gpt(M: int) -> models.LanguageModel:
    return models.gpt(batch_size=M, num_layers=8, width=32, context=32, num_heads=2, source="sample")


def build(name: str, M: int, P: int = 2) -> pp.Schedule:
    return pp.build(name, num_ranks=P, num_microbatches=M)


def first_above(schedule: pp.Schedule, memory: pp.Memory, limit: float, rank: int) -> object:
    """The first item of a rank's row while which more is held than the limit, None if there is none."""
    row = schedule.rows[rank]
    return next((item for item, (during, _) in zip(row, memory.levels(row), strict=True) if during > limit), None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPipe", "ZBVZeroBubble", "DualPipeV"])
def test_a_run_ends_where_the_counts_say(pools, name):
    """Just as much as is held is enough. A byte less isn't, and rank and action are those at which it is exceeded."""
    schedule, roomy = build(name, 4), lab.Budget(1e9)
    run = pools(2).train(schedule, small_gpt(4), roomy, steps=1, warmup=0, optimizer=ADAM)
    peaks = schedule.peak_held(run.held.memory)
    states = [sum(run.held.state_of[s] for s in schedule.stages_of(rank)) for rank in range(2)]
    assert peaks == tuple(map(sum, zip(states, run.held.peak_bytes, strict=True)))
    worst = max(peaks)
    again = pools(2).train(schedule, small_gpt(4), lab.Budget(worst), steps=1, warmup=0, optimizer=ADAM)
    assert again.losses == run.losses and again.held == run.held
    with pytest.raises(RankError) as error:
        pools(2).train(schedule, small_gpt(4), lab.Budget(worst - 1), steps=1, warmup=0, optimizer=ADAM)
    rank = peaks.index(worst)
    expected = first_above(schedule, run.held.memory, worst - 1, error.value.rank)
    assert (error.value.rank, error.value.action) == (rank, expected)
    said = error.value.cause
    assert f"rank {rank} failed at {expected}: OutOfMemoryError: rank {rank} holds " in said
    assert f"and the budget is {lab.readable_bytes(worst - 1)}: have fewer microbatches in flight (1F1B)" in said


@pytest.mark.slow
def test_gpipe_ends_where_1f1b_trains_on(pools):
    """Room for four microbatches: GPipe is stopped before the fifth, whatever they are, and 1F1B never has as many."""
    four = pools(2).train(build("GPipe", 4), small_gpt(4), lab.Budget(1e9), steps=1, warmup=0, optimizer=ADAM)
    room = lab.Budget(max(build("GPipe", 4).peak_held(four.held.memory)))
    run = pools(2).train(build("1F1B", 16), small_gpt(16), room, lab.Meter(), steps=3, warmup=0, optimizer=ADAM)
    assert run.losses[2] < run.losses[1] < run.losses[0] and run.held.peak_in_flight == (2, 1)
    assert f"budget           {lab.readable_bytes(room.limit)}; state of each stage: " in str(run)
    with pytest.raises(RankError, match=r"holds .*B, \dF4 takes another .* kB, and the budget is") as error:
        pools(2).train(build("GPipe", 16), small_gpt(16), room, steps=1, warmup=0, optimizer=ADAM)
    assert (error.value.action.kind, error.value.action.microbatch) == (pp.Kind.F, 4)
    again = pools(2).train(build("1F1B", 16), small_gpt(16), steps=1, warmup=0, optimizer=ADAM)
    assert again.losses == run.losses[:1], "the pool goes on"


@pytest.mark.slow
def test_a_first_microbatch_is_known_once_it_has_run(pools):
    schedule = build("GPipe", 2)
    run = pools(2).train(schedule, small_gpt(2), lab.Budget(1e9), steps=1, warmup=0, optimizer=ADAM)
    tight = lab.Budget(max(run.held.state_of) + 1)
    with pytest.raises(RankError, match=r"0F0 took another .* kB") as error:
        pools(2).train(schedule, small_gpt(2), tight, steps=1, warmup=0, optimizer=ADAM)
    assert str(error.value.action) == "0F0"


@pytest.mark.slow
def test_recomputing_makes_room(pools):
    """Also in a backward, which has a stage's activations again."""
    schedule, asked = build("GPipe", 8), dict(steps=1, warmup=0, optimizer=ADAM)
    plain = pools(2).train(schedule, small_gpt(8), lab.Budget(1e9), **asked)
    again = pools(2).train(schedule, small_gpt(8), lab.Budget(1e9), lab.Recompute(), **asked)
    peaks = schedule.peak_held(again.held.memory)
    assert max(peaks) < 0.7 * max(schedule.peak_held(plain.held.memory)) and again.losses == plain.losses
    fits = lab.Budget(max(peaks))
    assert pools(2).train(schedule, small_gpt(8), lab.Recompute(), fits, **asked).losses == plain.losses
    with pytest.raises(RankError, match=r"\dB\d took another") as error:
        pools(2).train(schedule, small_gpt(8), lab.Recompute(), lab.Budget(max(peaks) - 1), **asked)
    assert error.value.action.kind is pp.Kind.B
    with pytest.raises(RankError, match=r"\dF\d takes another"):
        pools(2).train(schedule, small_gpt(8), fits, **asked)


@pytest.mark.slow
def test_what_is_too_large_from_the_start_is_told_at_once(pools):
    with pytest.raises(
        RankError, match=r"state of rank \d take .* kB, and the budget is 100 kB: give it less"
    ) as error:
        pools(2).train(build("1F1B", 2), small_gpt(2), lab.Budget(1e5), steps=1, optimizer=ADAM)
    assert error.value.action is None


@pytest.mark.slow
def test_the_small_case_has_the_proportions_of_the_case():
    """GPipe with four microbatches fits, barely; with eight it ends at a forward, as in the case; 1F1B trains."""
    small, case, P = lab.SmallCase(), lab.Case(state=lab.State(2, 2, 12)), 4  # as many bytes as float32 and Adam
    with Pool(P, device="cpu") as pool:
        train = partial(pool.train, warmup=0, optimizer=ADAM)
        with pytest.raises(RankError) as error:
            train(build("GPipe", 8, P), small.workload(8, source="sample"), small.budget, steps=1)
        run = train(build("1F1B", 8, P), small.workload(8, source="sample"), small.budget, steps=2)
    memory = run.held.memory
    expected = first_above(build("GPipe", 8, P), memory, 80 * MB, 0)
    assert (error.value.rank, error.value.action) == (0, expected) and str(expected) == "0F5"
    assert "rank 0 holds 79.3 MB, 0F5 takes another 8.68 MB, and the budget is 80 MB" in error.value.cause
    assert run.losses[1] < run.losses[0]
    for name, M, most in (("naive", 8, 46.6), ("GPipe", 4, 79.3), ("GPipe", 8, 123.0), ("1F1B", 16, 70.6)):
        peak = max(build(name, M, P).peak_held(memory)) / MB
        assert peak == pytest.approx(most, abs=0.1) and (peak < small.memory_mb) == case.row(name, M).fits
    assert [size / MB for size in memory.parameters] == pytest.approx(case.state_gb(), rel=0.04)


@pytest.mark.parametrize(
    ("make", "per_number"),
    [
        (None, 8),
        (ADAM, 16),
        (partial(torch.optim.SGD, lr=0.1), 8),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 12),
        (partial(torch.optim.Adam, amsgrad=True, fused=True), 20),
    ],
)
def test_what_an_optimizer_will_keep(make, per_number):
    """After its first step, which is counted on a copy: 4 bytes a number, for weight, gradient and each state."""
    module = torch.nn.Sequential(torch.nn.Linear(50, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 10))
    module[2].requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    learnt, frozen, buffers = 50 * 40 + 40 + 80, 40 * 10 + 10, 2 * 40 * 4 + 8
    found = budget.state_bytes(module, Options(optimizer=make))
    assert found == pytest.approx(per_number * learnt + 4 * frozen + buffers, abs=16)  # Adam counts steps: 4 bytes each
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("given", ["80 MB", 0, -5, float("nan"), float("inf"), True, None, [1]])
def test_what_is_no_budget(given):
    with pytest.raises(ValueError, match="bytes above 0, such as 80e6, got "):
        lab.Budget(given)


def test_a_budget_is_the_only_meter():
    schedule, workload = build("1F1B", 2), small_gpt(2)
    for extras in ([lab.Meter(), lab.Budget(80e6)], [lab.Budget(80e6), lab.Meter()]):
        job = make_job(schedule, workload, 2, extras)
        assert job.extras == (lab.Budget(80e6),)
    with pytest.raises(ValueError, match="a run has one Budget"):
        make_job(schedule, workload, 2, [lab.Budget(80e6), lab.Budget(90e6)])
    for extras in ([lab.TorchEngine(), lab.Budget(80e6)], [lab.Budget(80e6), lab.TorchEngine()]):
        with pytest.raises(ValueError, match="Budget needs pplab's engine"):
            Pool(2, device="cpu").train(schedule, workload, *extras)


class Card:
    """What of torch.cuda a budget uses, with a card of 1 GB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.fraction, self.seen = 0.9, []
        for name, function in {
            "get_per_process_memory_fraction": lambda device: self.fraction,
            "set_per_process_memory_fraction": self.set,
            "get_device_properties": lambda device: SimpleNamespace(total_memory=10**9),
            "memory_allocated": lambda device: 71_200_000,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def set(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction
        self.seen.append(fraction)


def test_on_a_gpu_the_allocator_has_the_limit(monkeypatch):
    card = Card(monkeypatch)
    context = SimpleNamespace(device=torch.device("cuda:0"), rank=3)
    assert budget.train_within(80e6, lambda *given: (card.fraction, given), context, "job") == (0.08, (context, "job"))
    assert card.fraction == 0.9
    budget.train_within(2e9, lambda *given: None, context, "job")
    assert card.seen == [0.08, 0.9, 0.9, 0.9], "never more than before"

    def fail(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of")

    words = r"rank 3 holds 71.2 MB, it asks for another piece, and the budget is 80 MB: have fewer"
    with pytest.raises(budget.OutOfMemoryError, match=words):
        budget.train_within(80e6, fail, context, "job")
    assert card.fraction == 0.9
    on_cpu = SimpleNamespace(device=torch.device("cpu"), rank=0)
    assert budget.train_within(80e6, lambda *given: given, on_cpu, "job") == (on_cpu, "job") and len(card.seen) == 6
