"""The running case: its ledger is the one that was worked out apart from the package, and all follows the case."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pplab as pp
from pplab import lab
from pplab.lab.planning.case import LLAMA_3_8B
from pplab.lab.planning.formulas import ring_all_reduce_time

CASE = lab.Case(state=lab.State(2, 2, 12))  # 16 bytes of a parameter, as the rows below were worked out
LOOP_CUT, V_CUT = (3, 4, 4, 4, 4, 5, 5, 3), (4, 4, 4, 4, 5, 5, 4, 2)

# Of four GPUs over 25-gigabit Ethernet, worked out with stages' times and sizes by hand, apart from `plan`:
# schedule, cut, GB of the worst rank, and per M: step in s, busy in %, dollars for a billion tokens at 2 an hour
LEDGER = [
    ("naive", None, 45.5, {4: (4.73, 22, 321), 8: (9.46, 22, 321), 16: (18.93, 22, 321), 32: (37.85, 22, 321)}),
    ("GPipe", None, 72.8, {4: (2.12, 50, 144)}),
    ("GPipe", None, 109, {8: (3.37, 63, 114)}),
    ("GPipe", None, 182, {16: (5.86, 72, 99)}),
    ("GPipe", None, 328, {32: (10.85, 78, 92)}),
    ("1F1B", None, 72.8, {4: (2.12, 50, 144), 8: (3.37, 63, 114), 16: (5.86, 72, 99), 32: (10.85, 78, 92)}),
    ("1F1B", (8, 9, 8, 7), 72.8, {4: (2.08, 51, 141), 8: (3.26, 65, 110), 16: (5.65, 75, 96), 32: (10.40, 81, 88)}),
    ("eager-1F1B", None, 72.8, {4: (2.12, 50, 144)}),
    ("eager-1F1B", None, 100.2, {8: (3.37, 63, 114), 16: (5.86, 72, 99), 32: (10.85, 78, 92)}),
    ("Interleaved1F1B", None, 72.8, {4: (1.92, 55, 130)}),
    ("Interleaved1F1B", None, 86.5, {8: (3.17, 67, 107), 16: (5.66, 74, 96), 32: (10.65, 79, 90)}),
    ("Interleaved1F1B", LOOP_CUT, 72.5, {4: (1.83, 58, 124)}),
    ("Interleaved1F1B", LOOP_CUT, 77.0, {8: (2.95, 71, 100), 16: (5.20, 81, 88), 32: (9.70, 87, 82)}),
    ("LoopedBFS", None, 72.8, {4: (1.92, 55, 130)}),
    ("LoopedBFS", None, 109, {8: (3.00, 70, 102)}),
    ("LoopedBFS", None, 182, {16: (5.49, 77, 93)}),
    ("LoopedBFS", None, 328, {32: (10.48, 80, 89)}),
    ("ZB-H1", None, 72.8, {4: (1.56, 68, 106), 8: (2.81, 75, 95), 16: (5.30, 80, 90), 32: (10.29, 82, 87)}),
    ("ZB-H2", None, 72.8, {4: (1.60, 66, 108)}),
    ("ZB-H2", None, 100.2, {8: (2.81, 75, 95), 16: (5.30, 80, 90), 32: (10.29, 82, 87)}),
    ("ZBVZeroBubble", None, 67.5, {4: (1.61, 66, 109)}),
    ("ZBVZeroBubble", None, 81.2, {8: (2.75, 77, 93), 16: (5.25, 80, 89), 32: (10.24, 82, 87)}),
    ("ZBVZeroBubble", V_CUT, 72.5, {4: (1.61, 65, 109)}),
    ("ZBVZeroBubble", V_CUT, 74.3, {8: (2.62, 80, 89), 16: (4.85, 87, 82), 32: (9.30, 91, 79)}),
    ("DualPipe", None, 118.3, {8: (2.51, 84, 85), 16: (4.88, 86, 83), 32: (9.61, 88, 81)}),
    ("DualPipeV", None, 85.8, {8: (2.94, 72, 100), 16: (5.60, 75, 95), 32: (10.85, 78, 92)}),
    ("DualPipeV", V_CUT, 77.0, {8: (2.97, 71, 101)}),
]


@pytest.mark.parametrize(("name", "cut", "memory", "rows"), LEDGER)
def test_the_ledger(name, cut, memory, rows):
    for M, (step, busy, dollars) in rows.items():
        row = CASE.row(name, num_microbatches=M, cut=cut)
        reduction = row.step_s / row.timeline.makespan  # of DualPipe's two copies, which was left out
        assert (reduction > 1) == (name == "DualPipe")
        assert max(row.held_gb) == pytest.approx(memory, rel=0.01) and row.fits == (memory < 80)
        assert row.step_s / reduction == pytest.approx(step, rel=0.01)
        assert 100 * row.busy * reduction == pytest.approx(busy, abs=0.6)
        assert row.dollars / reduction == pytest.approx(dollars, rel=0.01)
        assert row.hours == pytest.approx(row.dollars / 4 / 2)


@pytest.mark.parametrize(
    ("name", "memory", "most"),
    [
        ("V-Half", 72.1, {8: 3.10, 16: 5.60, 32: 10.59}),
        ("V-Min", 63.0, {4: 2.13, 8: 3.64, 16: 6.65, 32: 12.67}),
    ],
)
def test_the_ledger_under_controlled_memory(name, memory, most):
    """The steps are those of the repeated building block, worked out likewise: what squeezes it may only be faster."""
    for M, step in most.items():
        row = CASE.row(name, M)
        assert max(row.held_gb) == pytest.approx(memory, rel=0.01) and row.fits
        assert row.busy * row.step_s < row.step_s < 1.01 * step


# Seconds at 100 gigabits, for 8 and 16 microbatches
FAST = [
    ("naive", None, 8.69, 17.38),
    ("GPipe", None, 3.27, 5.77),
    ("1F1B", (8, 9, 8, 7), 3.05, 5.30),
    ("Interleaved1F1B", None, 2.94, 5.44),
    ("Interleaved1F1B", LOOP_CUT, 2.73, 4.97),
    ("LoopedBFS", None, 2.90, 5.39),
    ("ZB-H1", None, 2.76, 5.25),
    ("ZBVZeroBubble", None, 2.60, 5.10),
    ("ZBVZeroBubble", V_CUT, 2.41, 4.64),
    ("DualPipe", None, 2.32, 4.56),
    ("DualPipeV", None, 2.56, 5.06),
]


@pytest.mark.parametrize(("name", "cut", "eight", "sixteen"), FAST)
def test_the_ledger_follows_the_network(name, cut, eight, sixteen):
    fast = replace(CASE, gigabits=100)
    for M, step in ((8, eight), (16, sixteen)):
        assert fast.row(name, M, cut=cut).timeline.makespan == pytest.approx(step, rel=0.01)
    assert fast.message_ms == pytest.approx(CASE.message_ms / 4)


def test_the_case_by_hand():
    """Sizes from the matrices' shapes; GPipe's step with the last stage as its slowest."""
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    model, table = LLAMA_3_8B, 128256 * 4096
    assert model.parameters == 32 * layer + 2 * table and round(model.parameters / 1e9, 2) == 8.03
    assert model.layer_bytes(1) == 34 * 8192 * 4096 and lab.Transformer(1, 64, 10).layer_bytes(3) == 34 * 64 * 30
    layer_s = (2 * layer * 8192 + 2 * 8192**2 * 4096) / 400e12
    stage, head, message = 8 * layer_s, 2 * table * 8192 / 400e12, 8192 * 4096 * 2 / 3.125e9
    assert (round(stage * 1e3, 1), round(head * 1e3, 1), round(message * 1e3, 1)) == (82.5, 21.5, 21.5)
    assert CASE.stage_ms() == pytest.approx([stage * 1e3] * 3 + [(stage + head) * 1e3])
    assert CASE.stage_ms([8, 9, 8, 7])[1] == pytest.approx(9 * CASE.layer_ms) == pytest.approx(9e3 * layer_s)
    assert (CASE.head_ms, CASE.message_ms) == pytest.approx((head * 1e3, message * 1e3))
    assert CASE.message_mb == pytest.approx(67.108864)
    ends, middle, sequence = (8 * layer + table) * 16e-9, 8 * layer * 16e-9, 8 * 34 * 8192 * 4096 / 1e9
    assert CASE.state_gb() == pytest.approx([ends, middle, middle, ends]) and CASE.sequence_gb() == (sequence,) * 4
    assert CASE.sequence_gb([8, 9, 8, 7])[1] == pytest.approx(9 / 8 * sequence)
    row = CASE.row("GPipe", 8)
    assert row.step_s == pytest.approx(8 * 3 * (stage + head) + 3 * 3 * stage + 6 * message)
    assert row.held_gb == pytest.approx([state + 8 * sequence for state in CASE.state_gb()])
    late = replace(CASE, latency_ms=10)
    assert late.message_ms == CASE.message_ms + 10
    assert late.row("GPipe", 8).step_s == pytest.approx(row.step_s + 6 * 0.010)


def test_bytes_of_state():
    """By choice, and by hand: a rank's share of each byte, and what frozen weights leave out."""
    weights, cut = LLAMA_3_8B.parameters / 1e9, [8, 9, 8, 7]
    assert lab.Case().room_gb == 80 and round(81_559 * 2**20 / 1e9, 1) == lab.Case().memory_gb
    for given, each in (((), 18), ((2, 2, 12), 16), ((2, 2, 6), 10), ((2, 0, 0), 2)):
        case = lab.Case(state=lab.State(*given), gigabits=float("inf"))
        assert lab.State(*given).bytes() == each and sum(case.state_gb()) == pytest.approx(each * weights)
        old = replace(CASE, gigabits=float("inf"))
        rows = old.row("1F1B", 16, cut=cut), case.row("1F1B", 16, cut=cut)
        own = [16 * more for more in CASE.state_gb(cut)]
        held = [row.timeline.schedule.peak_held(row.memory) for row in rows]  # in passes
        for before, now, share in zip(*held, own, strict=True):
            assert now - before == pytest.approx(share / 16 * (each - 16) / 16)
        assert rows[1].step_s == pytest.approx(rows[0].step_s * (2 / 3 if each == 2 else 1))
    layout, machine = lab.Layout(dp=4), CASE.machine
    whole, sharded = (
        lab.plan(LLAMA_3_8B, machine, layout, 4, shard_optimizer=each).memory.parameters[0] for each in (False, True)
    )
    assert (whole, sharded) == pytest.approx((18 * weights * 1e9, 9 * weights * 1e9))
    with pytest.raises(ValueError, match="an optimizer needs its gradient: .* or freeze it with State"):
        lab.State(2, 0, 12)
    with pytest.raises(ValueError, match="gradients must be a number from 0"):
        lab.State(gradients=-4)
    with pytest.raises(ValueError, match="shards must be an integer of at least 1, got 0"):
        lab.State().bytes(0)
    with pytest.raises(ValueError, match=r"state is a case's, not a row's: give lab.Case\(state=State"):
        CASE.row("1F1B", 16, state=lab.State())


def test_the_bounds():
    one, perfect = CASE.row("one GPU", 16), CASE.row("a perfect pipeline", 16)
    assert one.held_gb == pytest.approx((128.5,), rel=1e-3) and not one.fits
    assert (one.step_s, one.dollars, one.timeline) == (None,) * 3
    assert one.held_gb[0] == pytest.approx(sum(CASE.state_gb()))
    assert (perfect.hours, perfect.dollars) == pytest.approx((8.94, 71.5), rel=1e-3) and perfect.busy == 1
    forwards = sum(CASE.stage_ms())
    assert perfect.step_s == pytest.approx(16 * 3 * forwards / 4 / 1e3)
    assert CASE.row("a perfect pipeline", 4).dollars == pytest.approx(perfect.dollars)
    with pytest.raises(ValueError, match="'one GPU' has no cut, no recomputation and no options"):
        CASE.row("one GPU", 16, recompute=True)


def test_one_gpu_may_do():
    """A model whose state fits is trained on it, unless what a sequence keeps doesn't."""
    small = replace(CASE, model=replace(LLAMA_3_8B, num_layers=8))
    row = small.row("one GPU", 16)
    assert row.fits and row.busy == 1 and row.dollars == pytest.approx(row.hours * 2)
    assert row.dollars == pytest.approx(small.row("a perfect pipeline", 16).dollars)
    copied = 4 * small.model.parameters / 1e9  # of gradients, in the step
    assert row.held_gb[0] == pytest.approx(sum(small.state_gb()) + max(copied, sum(small.sequence_gb())))
    tight = replace(small, memory_gb=50, reserve_gb=0).row("one GPU", 16)
    assert not tight.fits and tight.held_gb == row.held_gb and tight.step_s


def test_everything_follows_the_case():
    row = CASE.row("1F1B", 16)
    assert replace(CASE, dollars_per_hour=3).row("1F1B", 16).dollars == pytest.approx(1.5 * row.dollars)
    assert lab.Case(tokens=2e9).row("1F1B", 16).hours == pytest.approx(2 * row.hours)
    fast = replace(CASE, teraflops=800, gigabits=50).row("1F1B", 16)
    assert fast.step_s == pytest.approx(row.step_s / 2) and fast.held_gb == row.held_gb
    assert [replace(CASE, memory_gb=gb, reserve_gb=3).row("1F1B", 16).fits for gb in (75, 76)] == [False, True]
    assert CASE.row("1F1B", 16, cut=[9, 8, 8, 7]).fits is False
    eight = replace(CASE, num_ranks=8, gigabits=float("inf")).row("1F1B", 16)
    assert len(eight.held_gb) == 8 and max(eight.held_gb) == pytest.approx(
        8 / 2 * sum(CASE.sequence_gb()) / 4 + 22.4, abs=0.1
    )
    long = replace(CASE, model=replace(LLAMA_3_8B, sequence=16384))
    assert long.sequence_gb() == tuple(2 * gb for gb in CASE.sequence_gb()) and long.state_gb() == CASE.state_gb()


def test_a_fixed_batch_in_thinner_slices_keeps_as_much():
    """Unlike more slices of one size: eight sequences in 1, 2, 4 and 8 microbatches."""
    rows = [CASE.row("GPipe", M, microbatch=8 // M) for M in (1, 2, 4, 8)]
    assert all(row.held_gb == pytest.approx(rows[0].held_gb) for row in rows) and not rows[0].fits
    assert max(rows[0].held_gb) == pytest.approx(109.3, rel=1e-3)
    assert [row.step_s for row in rows] == sorted((row.step_s for row in rows), reverse=True)
    assert rows[3].dollars / rows[0].dollars == pytest.approx(rows[3].step_s / rows[0].step_s)


def test_layers_that_are_recomputed():
    """Three of rank 0's, which buys it seven sequences in flight."""
    row = CASE.row("eager-1F1B", 16, recompute=[3, 0, 0, 0])
    layer, given = 34 * 8192 * 4096 / 1e9, 2 * 8192 * 4096 / 1e9
    held = CASE.state_gb()[0] + 7 * (5 * layer + 3 * given) + layer - given
    assert row.held_gb[0] == pytest.approx(held) == pytest.approx(78.7, rel=1e-3) and row.fits
    plain = CASE.row("eager-1F1B", 16)
    assert row.timeline.busy[0] == pytest.approx(plain.timeline.busy[0] + 16 * 3 * CASE.layer_ms / 1e3)
    assert not plain.fits and row.cells[0] == "eager-1F1B, recomputing 3+0+0+0"
    assert CASE.row("GPipe", 8, recompute=True).cells[0] == "GPipe, recomputing all"
    assert CASE.row("1F1B", 8, in_flight=[5, 4, 3, 1]).cells[0] == "1F1B, 5+4+3+1 in flight"


def test_an_order_of_ones_own():
    named = CASE.row("1F1B", 16, cut=[8, 9, 8, 7])
    own = CASE.row(pp.Schedule(named.timeline.schedule.rows, "mine"), cut=[8, 9, 8, 7])
    assert own == replace(named, what="mine") and own.cells[0] == "mine, cut 8+9+8+7"
    assert CASE.row("Interleaved1F1B", 16, stages_per_rank=4).timeline.schedule.num_stages == 16


def test_two_copies_are_added_up():
    row = CASE.row("DualPipe", 8)
    gradients = (
        16 * LLAMA_3_8B.layer_parameters + 2 * LLAMA_3_8B.table_parameters
    )  # of rank 0: the first and last stage
    assert row.step_s - row.timeline.makespan == pytest.approx(ring_all_reduce_time(2, 2 * gradients, 0, 3.125e9))


def test_what_a_row_holds_can_be_drawn():
    row = CASE.row("ZB-H1", 8)
    curves = lab.held_over_time(row.timeline, row.memory)
    assert [max(amounts) for _, amounts in curves] == pytest.approx(row.held_gb) and row.memory.unit == "GB"
    assert row.timeline.unit == "s"


TEXT = """\
                    M   step      busy    fullest rank       fits in 80 GB  a billion tokens
one GPU                                   128.5 GB of state  no
GPipe               8   (3.37 s)  (63 %)  109.3 GB           no             ($114 in 14.3 h)
1F1B, cut 8+9+8+7   16  5.65 s    75 %    72.8 GB            yes            $95.7 in 12.0 h
a perfect pipeline  16  4.22 s    100 %                                     $71.5 in 8.9 h"""


def test_the_ledger_prints_and_draws_itself():
    ledger = lab.Ledger(CASE)
    ledger.add("one GPU", 16)
    ledger.add("GPipe", num_microbatches=8)
    row = ledger.add("1F1B", 16, cut=[8, 9, 8, 7])
    ledger.add("a perfect pipeline", 16)
    assert ledger.entries[2] is row and str(ledger) == TEXT
    page = ledger._repr_html_()
    assert page.count("<tr>") == 5 and page.count("<td><strong>no</strong></td>") == 2 and "<td>yes</td>" in page
    assert 'class="pplab-table"' in page and "<th>fits <br>in 80 GB</th>" in page
    alone = lab.Ledger(CASE, [row])
    assert (str(row), row._repr_html_()) == (str(alone), alone._repr_html_()) and "$95.7" in str(row)
    other = lab.Ledger(replace(CASE, memory_gb=141, reserve_gb=6, tokens=2.5e9))
    assert other.table.columns[-2:] == ("fits in 135 GB", "2.5 billion tokens")
    assert other.add("naive", 1).cells[-1].startswith("$802 in 100.3 h")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "llama-7b"}, "model must be a Transformer, got 'llama-7b'"),
        ({"dollars_per_hour": 0}, "dollars_per_hour must be above 0, got 0"),
        ({"tokens": float("inf")}, r"tokens must be a number from 0 to 1e\+100, got inf"),
        ({"tokens": "a billion"}, "tokens must be a number from 0 to .*, got 'a billion'"),
        ({"gigabits": 0}, "gigabits must be above 0"),
        ({"memory_gb": True}, "memory_gb must be a number from 0 to .*, got True"),
        ({"reserve_gb": 86}, "reserve_gb must be below memory_gb, 85.5, got 86"),
        ({"reserve_gb": -1}, "reserve_gb must be a number from 0 to"),
        ({"state": 18}, "state must be a State, got 18"),
        ({"teraflops": -1}, "teraflops must be a number from 0 to"),
        ({"latency_ms": -1}, "latency must be a number from 0"),
        ({"num_ranks": 0}, "num_ranks must be an integer of at least 1, got 0"),
    ],
)
def test_a_case_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        lab.Case(**given)


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("1F1B", {"num_microbatches": 16, "cut": [8, 8, 8, 7]}, "for each of 4 stages how many of 32 layers it has"),
        ("1F1B", {"num_microbatches": 16, "cut": [8.5, 7.5, 8, 8]}, "how many of 32 layers it has, got .8.5, 7.5"),
        ("1F1B", {"num_microbatches": 16, "cut": 7}, "how many of 32 layers it has, got 7"),
        ("1F1B", {"num_microbatches": 16, "recompute": 2}, "recompute must be True, or say how many .* got 2"),
        ("1F1B", {"num_microbatches": 4, "microbatch": 0}, "microbatch must be an integer of at least 1, got 0"),
        ("1F1B", {}, "num_microbatches must be an integer of at least 1, got None"),
        ("1F2B", {"num_microbatches": 16}, "unknown schedule '1F2B': did you mean 1F1B"),
        (pp.build("1F1B", num_ranks=2, num_microbatches=8), {}, "1F1B has 2 ranks and 8 .* this needs 4 ranks and 8"),
        (pp.build("1F1B", num_ranks=4, num_microbatches=8), {"num_microbatches": 4}, "this needs 4 ranks and 4 micro"),
        ("1F1B", {"num_microbatches": 4, "recompute": [9, 0, 0, 0]}, "how many of each stage's 8, 8, 8, 8 layers"),
    ],
)
def test_a_row_that_cannot_be_is_refused(name, asked, message):
    ledger = lab.Ledger(CASE)
    with pytest.raises(ValueError, match=message):
        ledger.add(name, **asked)
    assert ledger.entries == []
    with pytest.raises(ValueError, match="32 layers don't divide into 5 stages: give cut"):
        replace(CASE, num_ranks=5).row("1F1B", 16)
