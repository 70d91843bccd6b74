"""Three ways to send, against programs written from the frameworks' source, and in runs."""

from __future__ import annotations

import random

import pytest

import pplab as pp
import waiting
from pplab import lab
from pplab.lab import formulas, models
from pplab.runtime import Pool
from pplab_course import spine


def unequal(rng: random.Random, num_stages: int) -> tuple[pp.Costs, object, float]:
    """Costs of stages that differ, the same as a function of kind and stage, and what a message takes."""
    forward, backward = ([rng.choice((0.5, 1, 2, 3)) for _ in range(num_stages)] for _ in "FB")
    takes, half = rng.choice((0.1, 0.2, 0.5, 1, 2)), [each / 2 for each in backward]
    costs = pp.Costs(forward, half, half, latency=takes)
    return costs, lambda kind, stage: (forward if kind == "F" else backward)[stage], takes


def programs(of, P: int, M: int, *more: object) -> list[waiting.Program]:
    return [of(P, M, rank, *more) for rank in range(P)]


@pytest.mark.parametrize(("name", "of"), [("1F1B", waiting.megatron), ("GPipe", waiting.torch_gpipe)])
def test_both_wait_as_in_the_frameworks(name, of):
    rng = random.Random(1)
    for _ in range(150):
        P, M = rng.randint(1, 5), rng.randint(1, 12)
        costs, time, takes = unequal(rng, P)
        found = lab.simulate_sends(pp.build(name, num_ranks=P, num_microbatches=M), costs, "both wait")
        assert found.makespan == pytest.approx(waiting.step(programs(of, P, M), time, takes)), (P, M, costs)


def test_forwards_wait_as_in_megatron_lm():
    rng, longer = random.Random(2), 0
    for _ in range(100):
        P, V = rng.randint(3, 5), rng.randint(2, 3)
        M = P * rng.randint(2, 4)
        costs, time, takes = unequal(rng, P * V)
        schedule = pp.build("Interleaved1F1B", num_ranks=P, num_microbatches=M, stages_per_rank=V)
        found = lab.simulate_sends(schedule, costs, "forwards wait").makespan
        assert found == pytest.approx(waiting.step(programs(waiting.interleaved, P, M, V), time, takes))
        longer += found > pp.simulate(schedule, costs).makespan + 1e-9
    assert longer > 50


def test_before_core_0_18_megatron_lms_interleaving_hid_the_cases_messages():
    """With its warm-up and cool-down waiting both ways, as they always did."""
    plan = lab.Case().plan("Interleaved1F1B", 16, stages_per_rank=2)
    costs, takes = plan.costs, lab.Case().message_ms / 1e3

    def time(kind, stage):
        return costs.forward[stage] * (1 if kind == "F" else 2)

    old, new = (waiting.step(programs(waiting.interleaved, 4, 16, 2, each), time, takes) for each in (True, False))
    assert old == pytest.approx(plan.step_s) and new > 1.04 * old


def test_torchs_class_is_never_slower_than_megatron_lm_and_as_fast_with_equal_stages():
    rng, differ = random.Random(3), 0
    for _ in range(150):
        P, M = rng.randint(2, 5), rng.randint(1, 12)
        _, time, takes = unequal(rng, P)
        theirs, torchs = (waiting.step(programs(of, P, M), time, takes) for of in (waiting.megatron, waiting.torch))
        assert torchs <= theirs + 1e-9
        differ += torchs < theirs - 1e-9
        equal = [
            waiting.step(programs(of, P, M), lambda kind, _: 1 + (kind == "B"), min(takes, 1))
            for of in (waiting.megatron, waiting.torch)
        ]
        assert equal[0] == pytest.approx(equal[1])
    assert differ


@pytest.mark.parametrize("P", [1, 2, 3, 4, 6])
def test_the_closed_form(P):
    for M in (P, P + 1, 2 * P, 3 * P + 2):
        for F, B in ((1, 2), (1, 1), (2, 1), (3, 2)):
            for c in (0, 0.2, 0.7, 1):
                costs = pp.Costs(F, B / 2, B / 2, latency=c)
                found = lab.simulate_sends(pp.build("1F1B", num_ranks=P, num_microbatches=M), costs, "both wait")
                form = formulas.waiting_one_f_one_b_makespan(P, M, F, B, c)
                times = {"F": F, "B": B}
                by_hand = waiting.step(programs(waiting.megatron, P, M), lambda kind, _, of=times: of[kind], c)
                assert found.makespan == pytest.approx(form) == pytest.approx(by_hand)
    with pytest.raises(ValueError, match=r"holds for M >= P and c <= min\(F, B\), got P=4, M=3"):
        formulas.waiting_one_f_one_b_makespan(4, 3, 1, 2, 1)


def test_the_ledger_says_how_a_row_is_sent():
    """Figures that two other models agree on: at 25 Gb/s 6.18 s for 5.86, with a layer moved 5.95 for 5.65."""
    case = lab.Case()
    assert [f"{case.row('1F1B', 16, cut=cut).step_s:.2f}" for cut in (None, [8, 9, 8, 7])] == ["5.86", "5.65"]
    rows = [case.row("1F1B", 16, cut=cut, sends="both wait") for cut in (None, [8, 9, 8, 7])]
    assert [f"{row.step_s:.2f}" for row in rows] == ["6.18", "5.95"]
    assert rows[1].cells[0] == "1F1B, both wait, cut 8+9+8+7"
    assert rows[0].busy < case.row("1F1B", 16).busy and rows[0].held_gb == case.row("1F1B", 16).held_gb
    with_experts = lab.Case(experts=lab.ExpertLayers())
    assert with_experts.row("1F1B", 16, sends="both wait").step_s > with_experts.row("1F1B", 16).step_s


def test_others_dont_wait():
    def ask(name, sends, **options):
        lab.simulate_sends(pp.build(name, num_ranks=4, num_microbatches=8, **options), sends=sends)

    with pytest.raises(ValueError, match="'both wait' is for 1F1B's.* and GPipe's.* ZB-H1 has others: give sends='nob"):
        ask("ZB-H1", "both wait")
    with pytest.raises(ValueError, match="and 1F1B has others"):
        ask("1F1B", "both wait", in_flight=[5, 4, 3, 1])
    with pytest.raises(ValueError, match="'forwards wait' is for Interleaved1F1B's"):
        ask("1F1B", "forwards wait")
    with pytest.raises(ValueError, match="unknown sends 'both': did you mean both wait"):
        ask("1F1B", "both")
    with pytest.raises(ValueError, match="unknown sends"):
        lab.Case().row("1F1B", 8, sends="always")
    for M in (4, 6, 10):  # Megatron-LM refuses the last two
        with pytest.raises(ValueError, match=rf"at least two whole rounds of 4, one for each rank, got {M}"):
            lab.Case().row("Interleaved1F1B", M, stages_per_rank=2, sends="forwards wait")


@pytest.mark.timed
def test_a_paced_run_waits_as_the_simulation_does():
    costs = pp.Costs(20, 20, 20, latency=20, unit="ms")
    tiny = models.gpt(batch_size=8, num_layers=8, width=16, num_heads=2, context=8)
    cases = [("1F1B", {}, "nobody waits", 49), ("1F1B", {}, "both wait", 52), ("GPipe", {}, "both wait", 53)]
    with Pool(4, device="cpu") as pool:
        for name, options, sends, units in cases:
            schedule = pp.build(name, num_ranks=4, num_microbatches=8, **options)
            run = pool.train(schedule, tiny, lab.Pace(costs, sends), steps=3, warmup=0, check_gradients=True)
            assert lab.simulate_sends(schedule, costs, sends).makespan == 20 * units
            assert run.gradients.equal
            assert units - 0.5 < min(each.makespan for each in run.timelines) / 20 < 1.15 * units
        schedule = pp.build("Interleaved1F1B", num_ranks=4, num_microbatches=8, stages_per_rank=2)
        run = pool.train(schedule, tiny, lab.Pace(costs, "forwards wait"), steps=2, warmup=0, check_gradients=True)
        assert run.gradients.equal and min(each.makespan for each in run.timelines) / 20 > 80.5
        with pytest.raises(ValueError, match="'both wait' is for 1F1B's"):
            pool.train(schedule, tiny, lab.Pace(costs, "both wait"))
        with pytest.raises(ValueError, match="needs costs without bandwidth"):
            narrow = pp.Costs(20, 20, 20, bandwidth=1, unit="ms")
            pool.train(pp.build("1F1B", num_ranks=4, num_microbatches=8), tiny, lab.Pace(narrow, "both wait"))


@pytest.mark.timed
@pytest.mark.long
def test_torchs_class_waits_and_its_interpreter_doesnt(monkeypatch, tmp_path):
    """A message of one unit adds 19 units to Schedule1F1B, and 16 to the interpreter on the same rows. Chapter 5 runs
    the same four at every commit, and asserts that they train right and that the class waits."""
    monkeypatch.chdir(tmp_path)
    took = {}
    for csv in (0, 1):
        for lag in (0, 0.03):
            run = spine.run("pipe_torch.py", ranks=4, M=8, PACE=0.96, LAG=lag, CSV=csv)
            assert run.failure is None and all(each.gradients.error < 1e-4 for each in run.reports)
            assert run.timeline().peak_in_flight == (4, 3, 2, 1)
            took[csv, lag] = min(run.timeline(step).makespan for step in range(run.num_steps)) / 30
    added = {csv: took[csv, 0.03] - took[csv, 0] for csv in (0, 1)}
    assert 1.08 < added[0] / added[1] < 1.35, took  # 19 / 16 is 1.19
    assert 0.95 < took[0, 0] / took[1, 0] < 1.05, took
