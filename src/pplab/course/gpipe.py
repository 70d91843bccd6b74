"""Checkers of chapter 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..builders import build
from ..lab.formulas import gpipe_makespan
from ..timeline import Timeline
from .answers import builder, drawn, is_module, trained
from .verdict import Verdict, checker, number, numbers, readers_code, right, wrong


def peak_of_rank_2(answer: object) -> Verdict:
    """GPipe with 4 ranks and 12 microbatches: how many forwards' activations does rank 2 hold at the worst moment?"""
    traps = {8: "that was with 8 microbatches", 10: "rank 2 is no exception: no backward comes before the last forward"}
    return number(answer, 12, "all of them: the first backward comes after the last forward", traps=traps)


def largest_microbatches(answer: object) -> Verdict:
    """A rank has 20 GB left for activations; a microbatch of one sample keeps 0.75 GB on it. The largest M that GPipe
    can run with microbatches of one sample?"""
    traps = {20 / 0.75: "a microbatch can't be cut further", 27: "27 times 0.75 GB is 20.25 GB"}
    return number(answer, 26, "26 x 0.75 GB = 19.5 GB", traps=traps, tolerance=1e-9)


@checker("a function of a list of token counts")
def weights_of_means(answer: Callable[[Sequence[int]], Sequence[float]] | object) -> Verdict:
    """Write `weights(tokens)`: given the tokens in each microbatch, the factors by which the microbatches' mean losses
    must be multiplied so that their sum is the mean over all tokens."""
    for tokens in ([4, 4], [7, 1], [3, 5, 2], [10]):
        with readers_code(f"weights({tokens}) raised"):
            given = [float(factor) for factor in answer(list(tokens))]
        if len(given) != len(tokens):
            return wrong(f"weights({tokens}) gives {len(given)} factors for {len(tokens)} microbatches")
        expected = [n / sum(tokens) for n in tokens]
        if not all(abs(a - b) <= 1e-9 for a, b in zip(given, expected, strict=True)):
            hint = ""
            if len(set(given)) == 1 and len(set(tokens)) > 1:
                hint = ": equal factors are right only for equal microbatches"
            elif not abs(sum(given) - 1) <= 1e-9:
                hint = ": if every token had the same loss, the mean would have to be that loss"
            return wrong(f"weights({tokens}) gives {[round(g, 4) for g in given]}, which doesn't give the mean{hint}")
    return right("each microbatch counts by its share of the tokens")


@checker("a torch module", is_module)
def a_norm_that_survives(answer: object) -> Verdict:
    """Give a normalisation for 8 features under which two processes with four microbatches have the gradients of one
    process with the whole batch: a torch module."""
    import torch
    from torch import nn

    from ..runtime import RankError

    x, y = drawn(0, (8, 8), (8, 8))
    with readers_code("it fails on 8 samples of 8 features:"):
        of_x, of_more, of_other = answer(x), answer(10 * x), answer(10 * x + 3)
    if not isinstance(of_x, torch.Tensor) or of_x.shape != x.shape:
        return wrong("it should return a tensor of the shape that it takes, (8, 8)")
    if torch.allclose(of_other, of_x * 10 + 3, atol=1e-2):
        return wrong("this module doesn't normalise anything")
    if not torch.allclose(of_more, of_x, atol=1e-2):
        return wrong("this module doesn't normalise: ten times the input gives another output")
    stages = [nn.Sequential(nn.Linear(8, 8), answer), nn.Linear(8, 8)]
    try:
        found = trained(build("GPipe", num_ranks=2, num_microbatches=4), stages, x, y).gradients
    except RankError as error:
        return wrong(error.cause)
    if not found.equal:
        return wrong(f"gradients {found}: which samples does it look at, in one process and in a microbatch?")
    return right(f"it looks at one sample at a time; gradients {found}")


def overhead_from_a_sweep(answer: object) -> Verdict:
    """GPipe on 4 ranks, one batch in 2, 4, 8 and 16 microbatches: `sweep()` gives the times in ms. Which work per rank
    (all forwards and backwards of a batch, without overhead) and which overhead per microbatch, in ms, explain them?
    A pair of numbers."""
    return numbers(answer, SWEEP, "(M + 3)(work / M + overhead) gives all four times", ("work", "overhead"))


SWEEP = (40.0, 1.0)


def sweep() -> dict[int, float]:
    """The times of the exercise `overhead_from_a_sweep`, in ms, by number of microbatches."""
    work, overhead = SWEEP
    return {m: (m + 3) * (work / m + overhead) for m in (2, 4, 8, 16)}


def gpipe_builder(answer: object) -> Verdict:
    """Write `rows(num_ranks, num_microbatches)` for GPipe; the backwards may come in either order."""

    def judge(timeline: Timeline, P: int, M: int) -> str | None:
        if timeline.makespan != gpipe_makespan(P, M, 1, 2):
            return f"the makespan is {timeline.makespan}; GPipe takes {gpipe_makespan(P, M, 1, 2)}"
        if timeline.peak_in_flight != (M,) * P:
            return f"the peaks are {timeline.peak_in_flight}: some backward comes before the last forward"
        return None

    return builder(answer, judge, "legal at five sizes, with GPipe's time and memory")
