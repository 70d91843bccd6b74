"""Checkers of chapter 7."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..builders import build
from ..costs import Costs
from ..lab.case import Case
from ..lab.formulas import floor_makespan
from ..simulator import simulate
from ..timeline import Timeline
from .answers import builder, drawn, judge_bill, schedule_of
from .verdict import (
    Verdict,
    checker,
    checker_of_each,
    first_wrong,
    number,
    one_or_several,
    readers_code,
    right,
    wrong,
)

CAUSES = {"A": "overhead", "B": "long W", "C": "barrier", "D": "as hoped"}
WHY = {
    "A": "its I and W take 46 together, its B took 40: six more in every microbatch",
    "B": "its W is longer than its F and its I, and no gap is as long",
    "C": "between two actions no rank waits, and every step starts for all ranks at once",
    "D": "it got what it had hoped for",
}
CASE, EIGHT, NEAR = Case(), 87.154, 1.0  # dollars: the best bill we know with 8 sequences, and what counts as near
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


@checker_of_each("ABCD")
def teams(answer: dict) -> Verdict:
    """Why a split saved less than hoped."""
    letter = first_wrong(answer, CAUSES, sorted(CAUSES.values()))
    return (
        right("two of them could have known it from four numbers")
        if letter is None
        else wrong(f"{letter}: {WHY[letter]}")
    )


@one_or_several
@checker('a schedule and a cut, such as ("ZB-H1", [8, 9, 8, 7])', lambda answer: isinstance(answer, tuple))
def eight_sequences(answer: tuple[object, Sequence[int]]) -> Verdict:
    """The running case with eight sequences a step and one stage per rank: the smallest bill."""
    return judge_bill(CASE, answer, 8, EIGHT, NEAR, num_stages=4)
