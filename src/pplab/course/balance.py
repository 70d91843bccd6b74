"""Checkers of chapter 11."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

from ..actions import F
from ..builders import build
from ..lab.partitioning import partition
from .verdict import (
    Verdict,
    Wrong,
    checker,
    number,
    numbers,
    one_or_several,
    readers_code,
    right,
    told,
    values_of,
    wrong,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

TIMES = (5, 1, 1, 5, 1, 1, 5, 1)  # of exercise 1's layers, for 3 stages
CAPPED_TIMES = (2, 2, 2, 2, 3, 3, 3, 3, 4, 4)  # of exercise 4's layers, for 4 stages
CAPPED_BYTES = (4, 4, 4, 4, 2, 2, 2, 2, 1, 1)
CAP = 28
HEAD = 4096 * 128256 / (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)  # in layers: 2.41
LIMIT = 10_000_000  # bytes, of exercise 6


def beat(answer: object) -> Verdict:
    """Layers of 5, 1, 1, 5, 1, 1, 5, 1 in three contiguous stages: the least time of the slowest?"""
    traps = {
        20 / 3: "that is the mean, which no cut of these layers reaches: look for one that comes near",
        6: "then three stages do at most 18 of the 20",
        8: "better: the cuts needn't leave equal numbers of layers",
        11: "better: the cuts needn't leave equal numbers of layers",
    }
    return number(answer, 7, "5+1 | 1+5+1 | 1+5+1: 6, 7 and 7", traps=traps)


@checker("a function of (times, num_stages)")
def cutter(answer: object) -> Verdict:
    """A function of (times, num_stages) that returns how many layers each stage gets."""
    rng = random.Random(10)
    cases = [([3], 1), ([1, 1, 1, 9], 2), ([10] * 4 + [20] * 4, 4)]
    cases += [([rng.randint(1, 30) for _ in range(rng.randint(4, 12))], rng.randint(2, 4)) for _ in range(60)]
    for times, num_stages in cases:
        where = f"for {times} in {num_stages} stages"
        with readers_code(f"{where} your function raised"):
            counts = answer(list(times), num_stages)
        with told(f"{where} "):
            _check_counts(counts, num_stages, len(times), least=1)
        slowest, best = max(_sums(times, counts)), max(_sums(times, partition(times, num_stages)))
        if slowest > best:
            return wrong(f"{where} your slowest stage takes {slowest}; {best} is possible")
    return right("no split has a faster slowest stage, on 63 stacks of layers")


def peak(answer: object) -> Verdict:
    """1F1B, 4 ranks, 8 microbatches; a stage keeps 50 MB per microbatch, 2 of them its input; all recompute: rank 0?"""
    traps = {
        200: "that is without recomputation",
        8: "that is between backwards; while one runs, its microbatch's other activations are there, too",
        58: "the running microbatch's input is counted twice: it is among the 50",
        50: "three more microbatches wait, with an input each",
        16: "1F1B holds 4 microbatches on rank 0, not 8; and one of them is being computed again",
        64: "1F1B holds 4 microbatches on rank 0, not 8",
    }
    return number(answer, 56, "4 inputs of 2 MB, and 48 more of the microbatch that runs", traps=traps)


@one_or_several
@checker()
def capped(answer: object) -> Verdict:
    """How many of the ten layers each of four 1F1B stages gets, within 28 MB."""
    answer = values_of(answer)
    _check_counts(answer, 4, len(CAPPED_TIMES), least=1)
    flying = build("1F1B", num_ranks=4, num_microbatches=8).peak_in_flight
    held = [k * size for k, size in zip(flying, _sums(CAPPED_BYTES, answer), strict=True)]
    if max(held) > CAP:
        rank = held.index(max(held))
        each = held[rank] // flying[rank]
        return wrong(f"rank {rank} would hold {held[rank]} MB: {flying[rank]} in flight of {each}")
    fit = partition(CAPPED_TIMES, 4, activations=CAPPED_BYTES, in_flight=flying, cap=CAP)
    best, slowest = max(_sums(CAPPED_TIMES, fit)), max(_sums(CAPPED_TIMES, answer))
    if slowest > best:
        return wrong(f"it fits, and its slowest stage takes {slowest}; {best} fits as well")
    uncapped = max(_sums(CAPPED_TIMES, (3, 3, 2, 2)))
    return right(f"the slowest stage takes {slowest}; without a cap it would be {uncapped}")


@one_or_several
@checker()
def head_in_a_v(answer: object) -> Verdict:
    """How many of 32 layers each of the eight stages of a V on four ranks gets; rank 0 has the embedding and the head,
    each as large as 2.41 layers; only the head takes time."""
    answer = values_of(answer)
    _check_counts(answer, 8, 32, least=0)
    if 0 in answer[1:7]:
        return wrong("a stage without a layer: only stages 0 and 7, with the embedding and the head, can have none")
    layers = [answer[r] + answer[7 - r] for r in range(4)]
    slowest = max(layers[0] + HEAD, *layers[1:])
    weights = max(layers[0] + 2 * HEAD, *layers[1:])
    if slowest > 9.001:
        return wrong(f"the ranks have {layers} layers, and the head: the slowest takes {slowest:.2f}; 9 is possible")
    if weights > 5 + 2 * HEAD + 0.001:
        return wrong(
            f"the slowest rank takes 9, as it should; but rank 0 holds {layers[0]} layers and {2 * HEAD:.2f} more, "
            f"{weights:.2f} in all: with a layer fewer it is as fast"
        )
    return right("27 layers on three ranks, 9 each; 5 on rank 0, which works for 7.41 and holds the weights of 9.82")


@checker("what `pool.train(...)` returned", lambda answer: hasattr(answer, "gradients"))
def fits(answer: object) -> Verdict:
    """A measured run of 1F1B on 2 ranks whose ranks hold at most 10 MB of activations, with no needless recomputation.

    The model is `models.gpt(batch_size=16)`, with 8 microbatches.
    """
    schedule = answer.schedule
    if (schedule.name, schedule.num_ranks, schedule.num_microbatches) != ("1F1B", 2, 8):
        return wrong(f"expected a run of 1F1B with 2 ranks and 8 microbatches, got {schedule!r}")
    workload = answer.job.workload.name
    if "8 layers of width 128" not in workload or "batch 16 x 128" not in workload:
        return wrong(f"expected models.gpt(batch_size=16), got {workload}")
    if answer.gradients is None:
        return wrong("run it with check_gradients=True: fewer bytes are worth nothing if the gradients change")
    if not answer.gradients.equal:
        return wrong(f"the gradients aren't those of one process: {answer.gradients}")
    try:
        held = answer.held
    except ValueError as error:
        return wrong(str(error))
    most, again_of = max(held.peak_bytes), held.recomputed_of or (0, 0)
    if most > LIMIT:
        rank = held.peak_bytes.index(most)
        return wrong(f"rank {rank} holds {most / 1e6:.1f} MB at its peak: let its stage recompute")
    whole = [(size + again) * (2 - s) for s, (size, again) in enumerate(zip(held.bytes_of, again_of, strict=True))]
    needless = [s for s, again in enumerate(again_of) if again and whole[s] <= LIMIT]
    if needless:
        return wrong(f"it fits; but stage {needless[0]} recomputes for nothing: it was below the limit without")
    return right("rank 0 recomputes, rank 1 has one microbatch in flight and needn't")


def _check_counts(counts: object, num_stages: int, num_layers: int, least: int) -> None:
    """Raise `Wrong` for what doesn't say how many layers each stage gets."""
    if not isinstance(counts, Sequence) or isinstance(counts, str):
        raise Wrong(f"expected {num_stages} numbers of layers, got {counts!r}")
    if len(counts) != num_stages:
        raise Wrong(f"expected {num_stages} numbers of layers, got {len(counts)}: {counts!r}")
    if any(isinstance(n, bool) or not isinstance(n, int) or n < least for n in counts):
        raise Wrong(f"expected whole numbers of at least {least}, got {counts!r}")
    if sum(counts) != num_layers:
        raise Wrong(f"the stages have {sum(counts)} layers, and there are {num_layers}")


def _sums(values: Sequence[float], counts: Sequence[int]) -> list[float]:
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    return [sum(values[end - count : end]) for end, count in zip(ends, counts, strict=True)]


@one_or_several
def textbook(answer: object) -> Verdict:
    """Layers of 10, 10, 10, 10, 20, 20, 20, 20 ms, four contiguous stages: the least beat; 1F1B's bubble fraction at
    M=8; how many times faster than the equal cut."""
    names = ("beat", "bubble fraction", "times faster")
    verdict = numbers(answer, (40, 0.4, 1), "the equal cut is one of the best: 40 ms, 240 of 400 ms are work", names)
    if len(answer := values_of(answer)) != 3:
        return verdict
    if number(answer[0], 30, ""):
        return wrong("beat: 30 needs layers that aren't neighbours, and then a microbatch passes every rank twice")
    if verdict.says.startswith("bubble fraction") and number(answer[1], 0.25, ""):
        return wrong("bubble fraction: 0.25 is the limit for many microbatches; at M = 8 the ramps come on top")
    return verdict


@checker("a function of a module")
def checkpointed(answer: object) -> Verdict:
    """Write `stage(module)`: returns forward(m, x) and backward(m, gradient), and keeps only inputs between them.

    `forward` returns the output, `backward` the input's gradient; the weights' gradients accumulate. The module drops
    activations out, and both forwards of a microbatch must drop the same ones.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8)]
        plain = torch.nn.Sequential(*layers)
        module = deepcopy(plain)
        inputs, gradients = torch.randn(2, 4, 5, 8)
        expected, _ = _in_1f1b_order(_keeping(plain), inputs, gradients)
        with readers_code("your stage raised"):
            given, saved = _in_1f1b_order(answer(module), inputs, gradients)
    for m, (ours, yours) in enumerate(zip(expected, given, strict=True)):
        for what, right_one, one in zip(("output", "input's gradient"), ours, yours, strict=True):
            if not isinstance(one, torch.Tensor) or one.shape != right_one.shape:
                return wrong(f"microbatch {m}: expected the {what}, got {type(one).__name__}")
            if not torch.allclose(one, right_one, atol=1e-6):
                return wrong(
                    f"microbatch {m}: the {what} isn't that without recomputation; the second forward must draw the "
                    "first one's random numbers, and leave them where they were"
                )
    if saved:
        return wrong(f"your forward leaves {saved} tensors with autograd: only the input may be kept")
    for p, one in zip(plain.parameters(), module.parameters(), strict=True):
        if one.grad is None or not torch.allclose(one.grad, p.grad, atol=1e-5):
            return wrong("the gradients of the weights aren't the sums over all microbatches")
    return right("the same outputs and gradients, and one input kept per microbatch in flight: M = 4, two in flight")


def _keeping(module: nn.Module) -> tuple[Callable, Callable]:
    """A stage that keeps its activations."""
    kept = {}

    def forward(m: int, x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        kept[m] = leaf, module(leaf)
        return kept[m][1].detach()

    def backward(m: int, gradient: Tensor) -> Tensor:
        leaf, output = kept.pop(m)
        output.backward(gradient)
        return leaf.grad

    return forward, backward


def _in_1f1b_order(
    stage: tuple[Callable, Callable], inputs: Tensor, gradients: Tensor
) -> tuple[list[list[Tensor]], int]:
    """Every microbatch's output and input gradient, in 1F1B's order with two in flight, and how many tensors it saved.

    `inputs` and `gradients` have a row for each microbatch: (M, ...).
    """
    import torch

    forward, backward = stage
    torch.manual_seed(1)
    made, saved, own = {}, 0, set()

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.data_ptr() not in own  # its input a stage may keep
        return tensor

    for action in build("1F1B", num_ranks=2, num_microbatches=len(inputs)).rows[0]:
        m = action.microbatch
        if action.kind is F:
            x = inputs[m].clone()
            own.add(x.data_ptr())
            with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                made[m] = [forward(m, x)]
        else:
            made[m].append(backward(m, gradients[m].clone()))
    return [made[m] for m in range(len(inputs))], saved
