"""Checkers of chapter 8, and what its cells send to ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..actions import Action, B, F, Overlap
from ..builders import build
from ..costs import Costs
from ..lab.balance_sheet import num_messages
from ..lab.formulas import dualpipe_idle
from ..schedule import Schedule
from ..simulator import simulate
from ..timeline import Timeline
from .answers import builder, drawn, schedule_from, shape_of, sizes_of
from .verdict import Verdict, Wrong, checker, number, numbers, readers_code, right, told, wrong

MIXTURE = Costs(4, 4, 2, overlap=6)  # a stage with experts: half of F and a third of B is all-to-all


def paired(rows: Iterable[Sequence[Action]]) -> list[list[Action | Overlap]]:
    """The rows with every F that a B of another microbatch follows at once made one overlap with it."""
    made = []
    for row in rows:
        row, new = list(row), []
        while row:
            first = row.pop(0)
            pairs = row and (first.kind, row[0].kind) == (F, B)
            if pairs and first.microbatch != row[0].microbatch:
                first = Overlap(first, row.pop(0))
            new.append(first)
        made.append(new)
    return made


def backward_first(forward: Callable, backward: Callable) -> tuple:
    """An overlap's two halves: each runs when it is called, and returns what the other ranks need of it."""
    gradient = backward()
    return forward(), gradient


def pairs(answer: object) -> Verdict:
    """DualPipe, P=4, M=20: how many pairs does a rank run?"""
    traps = {
        3: "that is with 8 microbatches",
        20: "the first forwards and the last backwards have no partner",
        10: "each direction's forwards pair with the other's backwards: both directions count",
    }
    return number(answer, 15, "all but five forwards of a rank have a partner", traps=traps)


def parameters_and_peaks(answer: object) -> Verdict:
    """8 ranks each: the share of the model per rank under DualPipe and DualPipeV, and their peaks in full stages."""
    names = ("DualPipe's parameters", "DualPipeV's parameters", "DualPipe's peak", "DualPipeV's peak")
    why = "two eighths against two sixteenths; 8 + 1 full stages against 16 + 1 halves"
    return numbers(answer, (2 / 8, 1 / 8, 9, 8.5), why, names)


@checker("a function of a schedule")
def unfold(answer: object) -> Verdict:
    """Write a function from a DualPipeV schedule (P ranks, M microbatches) to rows of DualPipe (2P ranks, 2M)."""
    for P, M in ((1, 2), (2, 4), (3, 7), (4, 8)):
        with told(f"from {P} ranks and {M} microbatches: "):
            schedule = schedule_from(answer, build("DualPipeV", num_ranks=P, num_microbatches=M))
            if fault := _unfolded(schedule, P, M):
                raise Wrong(fault)
    return right("four sizes unfold into DualPipe's placement, time and memory")


def _unfolded(schedule: Schedule, P: int, M: int) -> str | None:
    """What keeps a schedule from being the DualPipe that a DualPipeV of that size was cut from."""
    expected = build("DualPipe", num_ranks=2 * P, num_microbatches=2 * M)
    if shape_of(schedule) != (2 * P, 2 * P, 2 * M):
        wanted = f"{2 * P} ranks, {2 * P} stages and {2 * M} microbatches"
        return f"expected {wanted}; your schedule has {sizes_of(schedule)}"
    if schedule.placement != expected.placement:
        return f"the stages are on ranks {schedule.placement}; DualPipe has them on {expected.placement}"
    if (sent := num_messages(schedule)) != (least := num_messages(expected)):
        return f"a microbatch goes through all {2 * P} ranks and back: yours sends {sent} messages, DualPipe {least}"
    made, right_one = simulate(schedule, MIXTURE), simulate(expected, MIXTURE)
    if made.makespan != right_one.makespan:
        return f"it takes {made.makespan}; DualPipe takes {right_one.makespan}"
    if made.peak_in_flight != right_one.peak_in_flight:
        return f"the peaks are {made.peak_in_flight}; DualPipe holds {right_one.peak_in_flight}"
    return None


@checker()
def fit(answer: object) -> Verdict:
    """F = I and nothing overlapped: idle = (PP/2-1)(x F + y W). What are x and y?"""
    try:
        x, y = answer
    except (TypeError, ValueError):
        return wrong(f"expected two numbers (x, y), got {answer!r}")
    for P, F_, W_ in ((4, 1, 1), (4, 3, 1), (6, 2, 2), (8, 5, 2)):
        made = max(simulate(build("DualPipe", num_ranks=P, num_microbatches=2 * P), Costs(F_, F_, W_)).idle)
        try:
            said = (P / 2 - 1) * (x * F_ + y * W_)
            equal = abs(said - made) <= 1e-6
        except TypeError:
            return wrong(f"expected two numbers (x, y), got {answer!r}")
        if not equal:
            return wrong(f"P={P}, F=I={F_}, W={W_}: yours says {said:g}, and the simulation {made:g}")
    return right("F&B + B - 3W with F&B = F + B and I = F; one of the three W's is in F&B, one in B")


def break_even(answer: object) -> Verdict:
    """P=4, M=8, F=I=W=1/2 per half stage: how long may DualPipeV's F&B be to take ZB-V's 25.5?"""
    traps = {
        2.7: "that is of a full stage: a pair of half stages takes 1.5 when nothing is hidden",
        2.875: "that is DualPipe's, and of a full stage",
        1.4375: "that is DualPipe's; DualPipeV has more pairs on a rank, and starts from 27",
    }
    return number(answer, 1.35, "a tenth of a pair hidden is enough", traps=traps)


@checker()
def promises_too_much(answer: object) -> Verdict:
    """Give (F, I, W) with nothing overlapped for which the paper's formula promises less idle time than there is."""
    try:
        F_, I_, W_ = tuple(answer)
    except (TypeError, ValueError):
        return wrong(f"expected three durations (F, I, W), got {answer!r}")
    with told("", TypeError, ValueError):
        made = max(simulate(build("DualPipe", num_ranks=4, num_microbatches=8), Costs(F_, I_, W_)).idle)
    said = dualpipe_idle(4, I_ + W_, W_, F_ + I_ + W_)
    if made <= said + 1e-9 * max(1, made):
        how = "which is what there is" if abs(made - said) < 1e-9 * max(1, made) else f"and there is {made:g}, less"
        return wrong(f"it promises {said:g}, {how}")
    return right(f"it promises {said:g}, and there is {made:g}")


def paired_builder(answer: object) -> Verdict:
    """Write `rows(num_ranks, num_microbatches)` for paired 1F1B with at most 2(P-s) in flight, for M >= 2P."""

    def judge(timeline: Timeline, P: int, M: int) -> str | None:
        overlap, both = MIXTURE.overlap, MIXTURE.of(F, 0) + MIXTURE.of(B, 0)
        floor = P * both + (M - 1) * overlap
        caps = tuple(min(2 * (P - s), M) for s in range(P))
        if timeline.makespan > floor:
            return f"it takes {timeline.makespan:g}; P(F+B) + (M-1)F&B = {floor:g} is possible"
        if any(held > cap for held, cap in zip(timeline.peak_in_flight, caps, strict=True)):
            return f"the peaks are {timeline.peak_in_flight}; {caps} are enough"
        return None

    sizes = ((2, 4), (4, 8), (3, 7), (1, 3), (6, 20))
    return builder(answer, judge, "legal at five sizes, with the formula's time", sizes, MIXTURE)


@checker("a function of two lists of gradients")
def both_copies(answer: object) -> Verdict:
    """Write a function of two lists of gradients, here's and there's, to the gradients that both copies need."""
    import torch
    from torch import nn

    x, y = drawn(0, (8, 6), (8, 3))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def gradients(microbatches: Iterable[int]) -> list[torch.Tensor]:
        model.zero_grad()
        for m in microbatches:  # four of two samples each; the loss counts for its share of the batch
            (nn.functional.mse_loss(model(x[2 * m : 2 * m + 2]), y[2 * m : 2 * m + 2]) / 4).backward()
        return [p.grad.clone() for p in model.parameters()]

    whole, here, there = gradients(range(4)), gradients((0, 1)), gradients((2, 3))
    with readers_code():
        made = list(answer([g.clone() for g in here], [g.clone() for g in there]))
        if len(made) != len(whole):
            return wrong(f"expected {len(whole)} gradients, one per parameter, got {len(made)}")
        scale = max(g.abs().max() for g in whole)
        same = [bool((a - b).abs().max() < 1e-5 * scale) for a, b in zip(made, whole, strict=True)]
        half = [bool((2 * a - b).abs().max() < 1e-5 * scale) for a, b in zip(made, whole, strict=True)]
    if all(half):
        return wrong("half of what one process has: each microbatch's loss already counts for 1/M of the batch")
    if not all(same):
        return wrong("not the gradients of one process")
    return right("the gradients of one process: each copy has seen half of the microbatches")
