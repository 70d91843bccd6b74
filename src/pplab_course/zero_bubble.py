"""Checkers of the chapter on zero bubble."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

from pplab.builders import build
from pplab.costs import Costs
from pplab.lab import Entry, search
from pplab.lab.planning import floor_makespan
from pplab.schedule import Schedule
from pplab.simulator import simulate
from pplab.timeline import Timeline

from .answers import builder, drawn, schedule_of, told_bill
from .messages import OFFER
from .verdict import (
    Verdict,
    checker,
    checker_of_each,
    matched,
    number,
    numbers,
    one_or_several,
    readers_code,
    right,
    told,
    wrong,
)

LAST_ROW = " ".join(
    str(a) for a in build("ZB-H1", num_ranks=4, num_microbatches=8).rows[3] if a.kind.name != "W"
)

CLUSTERS = {"A": "barrier", "B": "network", "C": "splitting", "D": "short W"}
CAUSES = tuple(sorted(CLUSTERS.values()))
PUT_OFF = """\
def put_off(inputs, weight, gradients):
    now, later = [], []
    for x, g in zip(inputs, gradients):
        now.append(g @ weight)
        later.append(lambda: g.t() @ x)
    return now, sum(product() for product in later)"""
# Of six cuts, with up to five, three and one layers recomputed on ranks 0 to 2, each searched, the
# nearest once more
BEST_KNOWN = {"cut": (8, 8, 9, 7), "recompute": (3, 0, 0, 0)}
NEAR = 0.5  # dollars above it; the floor of every cut without recomputation is higher


@one_or_several
@checker()
def place_weights(answer: object) -> Verdict:
    """Put the eight W's of rank 3 of ZB-H1 (4 ranks, 8 microbatches) into `LAST_ROW`, for 28 with
    at most 3 held.
    """
    schedule = schedule_of([*build("ZB-H1", num_ranks=4, num_microbatches=8).rows[:3], answer])
    timeline = simulate(schedule)
    if timeline.makespan > 28:
        if timeline.spans_per_rank[3] > 24:
            return wrong(
                f"it takes {timeline.makespan:g}: rank 3 waits inside its row; put W's where it "
                "does"
            )
        return wrong(
            f"it takes {timeline.makespan:g}: some W's delay the input gradients that rank 2 waits "
            "for"
        )
    if timeline.peak_in_flight[3] > 3:
        return wrong(
            f"it is short enough, but rank 3 holds {timeline.peak_in_flight[3]}: run some W's "
            "earlier"
        )
    return right("28, and rank 3 holds 3")


def zb_h1_builder(answer: object) -> Verdict:
    """Write `rows(num_ranks, num_microbatches)` for ZB-H1, with its shorter bubble and at most P
    forwards held.
    """

    def judge(timeline: Timeline, P: int, M: int) -> str | None:
        theirs = simulate(build("ZB-H1", num_ranks=P, num_microbatches=M))
        if max(timeline.peak_in_flight) > P:
            return f"the peaks are {timeline.peak_in_flight}; no rank may hold more than {P}"
        if timeline.makespan > theirs.makespan:
            fused = floor_makespan(P, M, 1, 2)
            less = (
                "no less than 1F1B's"
                if timeline.makespan >= fused
                else f"better than 1F1B's {fused}"
            )
            return f"the makespan is {timeline.makespan}, {less}; ZB-H1 takes {theirs.makespan}"
        return None

    sizes = ((4, 8), (2, 4), (3, 5), (1, 3), (4, 2), (6, 12))
    return builder(answer, judge, "legal at six sizes, with ZB-H1's time and memory", sizes)


def small_weights(answer: object) -> Verdict:
    """Compute ZB-H1's bubble fraction for P=8, M=32, F=I=1, W=0.3."""
    costs = Costs(1, 1, 0.3)
    fused, split = (
        simulate(build(n, num_ranks=8, num_microbatches=32), costs) for n in ("1F1B", "ZB-H1")
    )
    traps = {
        0.035: "that takes every W to fill a gap; most of them run in the steady state, where "
        "there is none",
        fused.bubble_fraction: "that is 1F1B's",
        split.bubble_ratio: "that is the ratio, idle over ideal; the fraction is idle over total",
    }
    why = (
        "13.9 %: a rank idles 11.9, 1F1B's 16.1 less twice seven W's: seven no longer delay the "
        "tail, and seven fill it"
    )
    return number(answer, split.bubble_fraction, why, traps=traps, tolerance=5e-3)


@contextmanager
def _products() -> Iterator[list[int]]:
    """A list that gets a 1 for every matrix product inside the block."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    products = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.matmul}
    made: list[int] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self,
            function: Callable,
            types: object,
            arguments: Sequence = (),
            options: dict | None = None,
        ) -> object:
            made.append(int(function.overloadpacket in products))
            return function(*arguments, **(options or {}))

    with Count():
        yield made


@checker("a function of (inputs, weight, gradients)")
def repaired(answer: object) -> Verdict:
    """Repair `PUT_OFF`: the input gradients of three microbatches, and the sum of their weight
    gradients, made after them.
    """
    import torch

    weight, *both = drawn(3, (4, 3), *[(5, 3)] * 3, *[(5, 4)] * 3)
    xs, gs = both[:3], both[3:]
    with readers_code(), _products() as made:
        now, total = answer(xs, weight, gs)
        now = list(now)
    expected = [g @ weight for g in gs]
    if [getattr(each, "shape", None) for each in now] != [
        each.shape for each in expected
    ] or not all(torch.allclose(*pair, atol=1e-5) for pair in zip(now, expected, strict=True)):
        return wrong("the input gradients were right, and aren't any more")
    if not isinstance(total, torch.Tensor) or total.shape != weight.shape:
        return wrong(
            "the second thing returned must be the weight gradients' sum, as large as the weight"
        )
    if torch.allclose(total, 3 * gs[-1].t() @ xs[-1], atol=1e-5):
        return wrong(
            "the sum is three times the last microbatch's: what does each function look at, and "
            "when?"
        )
    if not torch.allclose(total, sum(g.t() @ x for x, g in zip(xs, gs, strict=True)), atol=1e-5):
        return wrong("the sum of the weight gradients isn't autograd's")
    if sum(made) != 6:
        return wrong(f"{sum(made)} matrix products, where three microbatches need six")
    return right(
        "each microbatch has its own gradient in the sum; with a single one nobody could have seen "
        "the fault"
    )


@one_or_several
def weights_last(answer: object) -> Verdict:
    """Find the makespan, and what each rank holds, for P=4, M=8, F=I=W=1 and 1F1B's rows with I
    instead of B and every W last.
    """
    traps = (
        {
            27: "that is ZB-H1's: its W's fill gaps inside the steady state, too",
            33: "that is 1F1B's, whose whole backwards climb",
            22: "that is when rank 0 has its last I: eight W's are left",
            24: "that is the work of a rank, which no order avoids; who waits, and when?",
        },
        {
            4: "that is ZB-H1's: here no W has run before the last I",
            1: "a forward is held until its W has run",
        },
    )
    why = (
        "1F1B with a backward of one unit takes 22, then rank 0 has eight W's; nothing is freed "
        "before its W"
    )
    return numbers(answer, (30, 8), why, ("makespan", "held"), traps=traps)


@cache
def per_step(cause: str) -> tuple[float, ...]:
    """The times of a step of 1F1B, ZB-H1 and ZB-H2 in a long training, P=6, M=12, with each
    cause.
    """
    whole = halves = Costs(latency=0.5 if cause == "network" else 0)
    if cause == "splitting":
        halves = Costs(1, 1.25, 1.25)
    elif cause == "short W":
        whole = halves = Costs(1, 1.5, 0.5)
    each = []
    for name in ("1F1B", "ZB-H1", "ZB-H2"):
        one = build(name, num_ranks=6, num_microbatches=12)
        costs = whole if name == "1F1B" else halves
        steps = [simulate(_repeated(one, n), costs).makespan for n in (1, 8, 9)]
        each.append(steps[0] if cause == "barrier" else steps[2] - steps[1])
    return tuple(each)


def _repeated(schedule: Schedule, steps: int) -> Schedule:
    M = schedule.num_microbatches
    rows = [
        [a._replace(microbatch=a.microbatch + M * k) for k in range(steps) for a in row]
        for row in schedule.rows
    ]
    return Schedule(rows)


@checker_of_each("ABCD")
def causes(answer: dict) -> Verdict:
    """Find what spoils zero bubble on each cluster: a barrier, the network, what splitting costs,
    or a short W.
    """

    def clue(letter: str) -> str:
        took, would = (
            "{:g}, {:g} and {:g}".format(*per_step(c)) for c in (CLUSTERS[letter], answer[letter])
        )
        return f"it takes {took}, and with that it would take {would}"

    says = (
        "a barrier costs ZB-H2 alone, the network 1F1B most, splitting every microbatch, a short W "
        "each bubble"
    )
    return matched(answer, CLUSTERS, CAUSES, clue, says)


@cache
def best_known() -> Entry:
    """The cheapest step that we found on the offered machines, with one stage per rank."""
    plan = OFFER.plan("ZB-H1", 16, **BEST_KNOWN)
    found = search(4, 16, costs=plan.costs, memory=plan.memory, limit=OFFER.room_gb * 1e9)
    return OFFER.row(found.schedule, 16, **BEST_KNOWN)


@checker(
    "a dict with cut, recompute and schedule",
    lambda answer: isinstance(answer, Mapping) and set(answer) == {"cut", "recompute", "schedule"},
)
def offer(answer: Mapping[str, object]) -> Verdict:
    """Give cut, recomputation, and an order of your own for the offered machines, with 16 sequences
    a step and one stage per rank.
    """
    schedule, options = answer["schedule"], {name: answer[name] for name in ("cut", "recompute")}
    if not isinstance(schedule, str):
        schedule = schedule_of(
            schedule, (4, 4, 16), "keep 4 ranks, one stage on each, and 16 microbatches"
        )
    with told("", ValueError, TypeError):
        row = OFFER.row(schedule, 16, **options)
    if row.timeline.schedule.num_stages != 4:
        return wrong(f"{row.timeline.schedule.name} has more than one stage per rank")
    return told_bill(row, best_known().dollars, NEAR)
