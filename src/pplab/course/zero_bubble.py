"""Checkers of chapter 7."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..builders import build
from ..costs import Costs
from ..lab.formulas import floor_makespan
from ..simulator import simulate
from ..timeline import Timeline
from .answers import builder, drawn, schedule_of
from .verdict import Verdict, checker, number, readers_code, right, wrong

LAST_ROW = " ".join(str(a) for a in build("ZB-H1", num_ranks=4, num_microbatches=8).rows[3] if a.kind.name != "W")


@checker("two numbers (of I, of W)", lambda answer: isinstance(answer, Iterable) and not isinstance(answer, str))
def products(answer: object) -> Verdict:
    """One block of the GPT: how many of its backward's matrix products belong to I, and how many to W?"""
    pair = tuple(answer)
    traps = {
        (6, 6): "q k' and its product with v have no weights: nothing of their backward can be put off",
        (4, 4): "those are the Linears'; attention multiplies too, twice in the forward",
        (4, 8): "the other way round: whoever waits for q's gradient is the qkv Linear, now",
        (5, 5): "q k' and the product with v are two products",
    }
    if pair == (8, 4):
        return right("every product of the forward has two in the backward, and only four of the six have a weight")
    if len(pair) != 2:
        return wrong(f"expected two numbers (of I, of W), got {len(pair)}")
    return wrong(traps.get(pair, "six products in the forward make twelve in the backward; which make a weight's?"))


@checker()
def place_weights(answer: object) -> Verdict:
    """Rank 3 of ZB-H1, 4 ranks and 8 microbatches: put the eight W's into `LAST_ROW`, for 27 with at most 4 held."""
    schedule = schedule_of([*build("ZB-H1", num_ranks=4, num_microbatches=8).rows[:3], answer])
    timeline = simulate(schedule)
    if timeline.makespan > 27:
        if timeline.spans_per_rank[3] > 24:
            return wrong(f"it takes {timeline.makespan:g}: rank 3 waits inside its row; put W's where it does")
        return wrong(f"it takes {timeline.makespan:g}: some W's delay the input gradients that rank 2 waits for")
    if timeline.peak_in_flight[3] > 4:
        return wrong(f"27, but rank 3 holds {timeline.peak_in_flight[3]}: run some W's earlier")
    return right("27, and rank 3 holds 4")


@checker("a function of (x, weight, gradient)")
def split_linear(answer: object) -> Verdict:
    """Write `split(x, weight, gradient)`: returns x's gradient, and a function that makes the weight's when called."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    products = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.matmul}

    class Count(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(
            self, function: Callable, types: object, arguments: Sequence = (), options: dict | None = None
        ) -> object:
            self.made += function.overloadpacket in products
            return function(*arguments, **(options or {}))

    x, weight, gradient = drawn(2, (5, 3), (4, 3), (5, 4))
    of_x, of_weight = gradient @ weight, gradient.t() @ x
    with readers_code():
        with Count() as now:
            made, later = answer(x, weight, gradient)
        if not callable(later):
            return wrong("the second thing you return must be a function that makes the weight's gradient when called")
        with Count() as then:
            deferred = later()
    for name, found, expected in (("x", made, of_x), ("the weight", deferred, of_weight)):
        if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
            got = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            return wrong(f"the gradient of {name} must have shape {tuple(expected.shape)}, got {got}")
        if not torch.allclose(found, expected, atol=1e-5):
            return wrong(f"the gradient of {name} isn't autograd's")
    if now.made > 1 or not then.made:
        return wrong("nothing is put off: both products are made before `later` is called")
    return right("one product now, one when called, and both are autograd's")


def zb_h1_builder(answer: object) -> Verdict:
    """Write `rows(num_ranks, num_microbatches)` for ZB-H1: 1F1B's bubble less, P forwards held at most."""

    def judge(timeline: Timeline, P: int, M: int) -> str | None:
        theirs = simulate(build("ZB-H1", num_ranks=P, num_microbatches=M))
        if max(timeline.peak_in_flight) > P:
            return f"the peaks are {timeline.peak_in_flight}; no rank may hold more than {P}"
        if timeline.makespan > theirs.makespan:
            fused = floor_makespan(P, M, 1, 2)
            less = "no less than 1F1B's" if timeline.makespan >= fused else f"better than 1F1B's {fused}"
            return f"the makespan is {timeline.makespan}, {less}; ZB-H1 takes {theirs.makespan}"
        return None

    sizes = ((4, 8), (2, 4), (3, 5), (1, 3), (4, 2), (6, 12))
    return builder(answer, judge, "legal at six sizes, with ZB-H1's time and memory", sizes)


@checker()
def least_memory(answer: object) -> Verdict:
    """P=4, M=8, F=I=W=1: a schedule with makespan 27 whose ranks hold 15 in all, one less than ZB-H1."""
    schedule = schedule_of(answer, (4, 4, 8), "keep 4 ranks, 4 stages and 8 microbatches")
    if (makespan := simulate(schedule).makespan) > 27:
        return wrong(f"it takes {makespan:g}, and holds {_added(schedule.peak_in_flight)}")
    if sum(schedule.peak_in_flight) > 15:
        return wrong(f"27, and it holds {_added(schedule.peak_in_flight)}; one rank can do with less")
    return right(f"27 with {_added(schedule.peak_in_flight)}, one less than ZB-H1")


@checker()
def balanced_placement(answer: object) -> Verdict:
    """16 stages on 4 ranks, four each: a list of stage numbers per rank, so that lifespans add up to the same."""
    try:
        ranks = [sorted(int(stage) for stage in stages) for stages in answer]
    except (TypeError, ValueError):
        return wrong(f"expected a list of four lists of stage numbers, got {answer!r}")
    if [len(stages) for stages in ranks] != [4] * 4:
        return wrong(f"expected four ranks with four stages each, got {[len(stages) for stages in ranks]}")
    if sorted(stage for stages in ranks for stage in stages) != list(range(16)):
        return wrong("every stage from 0 to 15 must be on exactly one rank")
    spans = [sum(2 * (16 - stage) for stage in stages) for stages in ranks]
    if len(set(spans)) > 1:
        return wrong(f"the ranks' lifespans add up to {spans}: rank {spans.index(max(spans))} would hold the most")
    return right(f"{spans[0]} on every rank; whether neighbours are close is another question")


def affordable_overhead(answer: object) -> Verdict:
    """P=4, M=64, F=3, B=6, I and W 4 and 2 and each longer by the same time: what I + W - B, as a share of B, makes
    ZB-H1 as slow as 1F1B?"""
    traps = {
        12 / 64: "that is in units of time; the question asks for a share of B = 6",
        12 / 128: "that is what each half may be longer, in units of time; the question asks for both, as a share of B",
        1 / 64: "that is one half's share; both halves are longer",
        12 / 8 / 6: "that is with 8 microbatches",
    }
    return number(answer, 12 / 64 / 6, "64 times the overhead eats what is saved once, 12 units", traps=traps)


def least_held_for_zero(answer: object) -> Verdict:
    """P=4, M=24, F, I, W = 3, 3, 2: how many activations must a rank hold for a span bubble of zero?"""
    traps = {
        7: "2P-1 is enough only when F + I <= 2W; here it leaves 6",
        9: "k activations put off k - 1 weight gradients: 16 of the 18 units",
        11: "one less is enough",
        13: "that is for W = 1.5",
    }
    return number(answer, 10, "(P-1)(F+I) = 18, and nine weight gradients of 2 are 18", traps=traps)


def _are_three(answer: object) -> bool:
    return isinstance(answer, Sequence) and not isinstance(answer, str) and len(answer) == 3


@checker("three numbers (1F1B, ZB-H1, ZB-H2)", _are_three)
def table_5(answer: object) -> Verdict:
    """The paper's table 5 at 64 microbatches: the span bubbles of 1F1B, ZB-H1 and ZB-H2 on 8 ranks."""
    costs = Costs(18.546, 18.097, 9.321, latency=0.762)
    for name, given in zip(("1F1B", "ZB-H1", "ZB-H2"), answer, strict=True):
        timeline = simulate(build(name, num_ranks=8, num_microbatches=64), costs)
        without = simulate(timeline.schedule, Costs(18.546, 18.097, 9.321))
        traps = {
            timeline.bubble_ratio: "that is the bubble ratio, idle over work",
            timeline.bubble_fraction: "that is the bubble fraction of the makespan; the paper's is the span's",
            without.span_bubble_fraction: "that is without the latency of 0.762 ms",
            timeline.makespan: "that is the makespan; the table gives span bubbles",
        }
        verdict = number(given, timeline.span_bubble_fraction, "", traps=traps, tolerance=2e-3)
        if not verdict:
            return wrong(f"{name}: {verdict.says}")
    return right("the paper's three figures, to four digits")


def _added(peaks: tuple[int, ...]) -> str:
    return f"{' + '.join(map(str, peaks))} = {sum(peaks)}"


def small_weights(answer: object) -> Verdict:
    """P=8, M=32, F=I=1, W=0.3: ZB-H1's bubble fraction."""
    costs = Costs(1, 1, 0.3)
    fused, split = (simulate(build(n, num_ranks=8, num_microbatches=32), costs) for n in ("1F1B", "ZB-H1"))
    traps = {
        0.035: "that takes every W to fill a gap; most of them run in the steady state, where there is none",
        fused.bubble_fraction: "that is 1F1B's",
        split.bubble_ratio: "that is the ratio, idle over ideal; the fraction is idle over total",
    }
    why = (
        "13.9 %: a rank idles 11.9, 1F1B's 16.1 less twice seven W's: seven no longer delay the tail, and seven fill it"
    )
    return number(answer, split.bubble_fraction, why, traps=traps, tolerance=5e-3)
