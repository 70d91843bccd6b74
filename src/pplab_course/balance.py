"""Checkers of the chapter on balance, and the profile for one of its exercises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import combinations, islice
from typing import TYPE_CHECKING

from pplab.actions import F
from pplab.builders import build
from pplab.costs import DURATIONS
from pplab.lab import Case, Transformer, partition
from pplab.simulator import simulate

from .answers import row_of, told_bill
from .verdict import (
    Verdict,
    Wrong,
    checker,
    number,
    one_or_several,
    readers_code,
    right,
    told,
    values_of,
    wrong,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pplab.lab import MeasuredLayers

CAPPED_TIMES = (2, 2, 2, 2, 3, 3, 3, 3, 4, 4)  # of exercise 2's layers, for 4 stages
CAPPED_BYTES = (4, 4, 4, 4, 2, 2, 2, 2, 1, 1)
CAP = 28
SLOW = (0, (3, 10, 10, 9))  # the fastest that fits, of exercise 1
SLOW_GB = 40
LIMIT = 10_000_000  # bytes, of exercise 3
CARDS = (56e6, 28e6)  # bytes, of exercise 5
CHOICES = ("GPipe", "1F1B", "Interleaved1F1B")
LLAMA_2_13B = Transformer(40, 5120, 4096, heads=40, mlp_width=13824, gated=True, vocabulary=32000)


def with_slow_gpu(slow: int, counts: Sequence[int]) -> tuple[float, list[float]]:
    """The time of a step in seconds, and the GB of each rank, for the case under 1F1B with one of
    its GPUs half as fast.
    """
    rows = build("1F1B", num_ranks=4, num_microbatches=16)
    plan = Case().plan(rows, 16, cut=counts)
    times = {name: getattr(plan.costs, name) for name in DURATIONS}
    slower = {
        n: [t * (1 + (r == slow)) for r, t in enumerate(x)]
        for n, x in times.items()
        if isinstance(x, tuple)
    }
    return simulate(rows, replace(plan.costs, **slower)).makespan, [
        size / 1e9 for size in rows.peak_held(plan.memory)
    ]


@one_or_several
@checker(
    "the slow GPU's rank and four numbers of layers",
    lambda answer: isinstance(answer, (tuple, list)),
)
def slow_gpu(answer: Sequence) -> Verdict:
    """Say on which rank the slow one of the case's four GPUs is, and how many of 32 layers each
    stage gets, under 1F1B.
    """
    if len(answer) != 2 or answer[0] not in range(4):
        return wrong(
            f"expected a rank from 0 to 3 and counts, such as (3, (8, 8, 8, 8)), got {answer!r}"
        )
    _check_counts(answer[1], 4, 32)
    (step, held), (best, _) = with_slow_gpu(*answer), with_slow_gpu(*SLOW)
    for rank, gb in enumerate(held):
        if gb > (room := SLOW_GB if rank == answer[0] else 80):
            return wrong(f"{step:.2f} s, but rank {rank} would hold {gb:.1f} of its {room} GB")
    if step > 1.01 * best:
        return wrong(
            f"it fits and takes {step:.2f} s, which is {step / best - 1:.0%} more than the best "
            "that we know"
        )
    return right(
        f"{step:.2f} s, {held[answer[0]]:.1f} GB on the slow one: its memory tells what it can take"
    )


@one_or_several
@checker()
def capped(answer: object) -> Verdict:
    """Give each of four 1F1B stages some of the ten layers, within 28 MB."""
    answer = values_of(answer)
    _check_counts(answer, 4, len(CAPPED_TIMES))
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
    return right(f"the slowest stage takes {slowest}: no cut that fits has a shorter beat")


@checker("what `pool.train(...)` returned", lambda answer: hasattr(answer, "gradients"))
def fits(answer: object) -> Verdict:
    """Give a measured run of 1F1B on 3 ranks that hold at most 10 MB of activations, without
    needless recomputation.

    The model is `models.gpt(batch_size=16)`, with 8 microbatches.
    """
    schedule = answer.schedule
    if (schedule.name, schedule.num_ranks, schedule.num_microbatches) != ("1F1B", 3, 8):
        return wrong(f"expected a run of 1F1B with 3 ranks and 8 microbatches, got {schedule!r}")
    workload = answer.job.workload.name
    if "8 layers of width 128" not in workload or "batch 16 x 128" not in workload:
        return wrong(f"expected models.gpt(batch_size=16), got {workload}")
    if answer.gradients is None:
        return wrong(
            "run it with check_gradients=True: fewer bytes are worth nothing if the gradients "
            "change"
        )
    if not answer.gradients.equal:
        return wrong(f"the gradients aren't those of one process: {answer.gradients}")
    try:
        held = answer.held
    except ValueError as error:
        return wrong(str(error))
    most, again_of = max(held.peak_bytes), held.recomputed_of or (0, 0, 0)
    if most > LIMIT:
        rank = held.peak_bytes.index(most)
        return wrong(f"rank {rank} holds {most / 1e6:.1f} MB at its peak: let its stage recompute")
    whole = [
        (size + again) * (3 - s)
        for s, (size, again) in enumerate(zip(held.bytes_of, again_of, strict=True))
    ]
    needless = [s for s, again in enumerate(again_of) if again and whole[s] <= LIMIT]
    if needless:
        return wrong(
            f"it fits; but stage {needless[0]} recomputes for nothing: it was below the limit "
            "without"
        )
    return right("ranks 0 and 1 recompute. Rank 2 has one microbatch in flight and doesn't have to")


def _check_counts(counts: object, num_stages: int, num_layers: int) -> None:
    """Raise `Wrong` unless these are the numbers of layers of the stages."""
    if not isinstance(counts, Sequence) or isinstance(counts, str):
        raise Wrong(f"expected {num_stages} numbers of layers, got {counts!r}")
    if len(counts) != num_stages:
        raise Wrong(f"expected {num_stages} numbers of layers, got {len(counts)}: {counts!r}")
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts):
        raise Wrong(f"expected whole numbers of at least 1, got {counts!r}")
    if sum(counts) != num_layers:
        raise Wrong(f"the stages have {sum(counts)} layers, and there are {num_layers}")


def _sums(values: Sequence[float], counts: Sequence[int]) -> list[float]:
    left = iter(values)
    return [sum(islice(left, count)) for count in counts]


@checker("a function of a module")
def checkpointed(answer: object) -> Verdict:
    """Write `stage(module)`, which returns forward(m, x) and backward(m, gradient) and keeps only
    inputs between them.

    `forward` returns the output, and `backward` returns the input's gradient. The weights'
    gradients accumulate. The module has dropout, and both forwards of a microbatch must drop the
    same activations.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [
            torch.nn.Linear(8, 8),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 8),
        ]
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
                    f"microbatch {m}: the {what} isn't that without recomputation; the second "
                    "forward must draw the first one's random numbers, and leave them where they "
                    "were"
                )
    if saved:
        return wrong(
            f"your forward leaves {saved} tensors with autograd: only the input may be kept"
        )
    for p, one in zip(plain.parameters(), module.parameters(), strict=True):
        if one.grad is None or not torch.allclose(one.grad, p.grad, atol=1e-5):
            return wrong("the gradients of the weights aren't the sums over all microbatches")
    return right(
        "the same outputs and gradients, and one input kept per microbatch in flight: M = 4, two "
        "in flight"
    )


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
    """Every microbatch's output and input gradient, in 1F1B's order with two in flight, and how
    many tensors it saved.

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


def tied_gb(answer: object) -> Verdict:
    """Give what four ranks hold in all for Llama 3.2 3B, whose head is its embedding, at 18 bytes
    per parameter.
    """
    model = Transformer(
        28, 3072, 8192, heads=24, kv_heads=8, mlp_width=8192, gated=True, vocabulary=128256
    )
    table, one = 18 * model.table_parameters / 1e9, 18 * model.parameters / 1e9
    traps = {
        one - table: "that is with one table, or at 16 bytes: which ranks need it?",
        one
        / 4.5: "that is the weights in single precision; with gradients and Adam's state it is 4.5 "
        "times as much",
        (one - table) / 4.5: "that is the weights in single precision, and the table once",
        one + 2 * table: "two of the four ranks look up a table or multiply with it, not all four",
    }
    why = (
        "3.21 billion parameters, and the 0.39 billion of the table once more: the first rank and "
        "the last have one"
    )
    return number(answer, one, why, traps=traps, tolerance=2e-3)


def pictures() -> MeasuredLayers:
    """The profile of a model of pictures. The layer that cuts them into patches keeps most of all
    for its backward.
    """
    from pplab.lab import MeasuredLayers

    return MeasuredLayers(
        names=("patches", *(f"layer {n}" for n in range(8)), "head"),
        forward_ms=(6.0, *[4.0] * 8, 1.0),
        backward_ms=(9.0, *[8.0] * 8, 2.0),
        activations=(9_000_000, *[1_500_000] * 8, 200_000),
        inputs=(600_000, *[400_000] * 9),
        parameters=(400_000, *[800_000] * 8, 200_000),
    )


def judged(name: str, counts: Sequence[int]) -> tuple[float, tuple[float, ...]]:
    """The time of a step in ms, and the bytes of both ranks, of `pictures()` on two ranks with 8
    microbatches.
    """
    schedule = build(name, num_ranks=2, num_microbatches=8)
    held = list(schedule.peak_held(pictures().memory(counts)))
    for rank, weights in zip(schedule.placement, _sums(pictures().parameters, counts), strict=True):
        held[rank] += 4 * weights
    return simulate(schedule, pictures().costs(counts)).makespan, tuple(held)


def _cuts(num_stages: int) -> Iterator[tuple[int, ...]]:
    for ends in combinations(range(1, 10), num_stages - 1):
        yield tuple(b - a for a, b in zip((0, *ends), (*ends, 10), strict=True))


@cache
def _fastest() -> float:
    stages = {name: 4 if name == "Interleaved1F1B" else 2 for name in CHOICES}
    found = (judged(name, cut) for name in CHOICES for cut in _cuts(stages[name]))
    return min(ms for ms, held in found if _too_full(held) is None)


def _too_full(held: Sequence[float]) -> int | None:
    return next(
        (
            rank
            for rank, (bytes_, card) in enumerate(zip(held, CARDS, strict=True))
            if bytes_ > card
        ),
        None,
    )


@one_or_several
@checker(
    "a pair of a schedule's name and its counts of layers",
    lambda answer: isinstance(answer, (tuple, list)),
)
def pictures_cut(answer: Sequence) -> Verdict:
    """Find the fastest schedule and counts that fit for `pictures()`, with 8 microbatches, on ranks
    with cards of 56 and 28 MB.
    """
    if len(answer) != 2 or answer[0] not in CHOICES:
        return wrong(
            f"expected one of {', '.join(CHOICES)} and counts, such as ('1F1B', (5, 5)), got "
            f"{answer!r}"
        )
    with told("", ValueError, TypeError, AttributeError):
        ms, held = judged(*answer)
    if (rank := _too_full(held)) is not None:
        of = f"{held[rank] / 1e6:.1f} of its {CARDS[rank] / 1e6:.0f} MB"
        return wrong(f"{ms:.0f} ms, but rank {rank} would hold {of}")
    if ms > _fastest() + 1e-6:
        return wrong(f"it fits and takes {ms:.0f} ms; there is a faster one")
    both = " and ".join(f"{each / 1e6:.1f}" for each in held)
    return right(f"{ms:.0f} ms, {both} MB: no cut under these schedules is faster and fits")


BEST_KNOWN = {
    "schedule": "ZB-V",
    "cut": (5, 5, 4, 1, 9, 6, 5, 5),
    "recompute": (3, 2, 1, 1, 1, 0, 0, 0),
}
NEAR = 2.5  # dollars above the best known


@checker("a dict with schedule, cut and recompute", lambda answer: isinstance(answer, Mapping))
def thirteen(answer: Mapping[str, object]) -> Verdict:
    """Give schedule, cut and layers to recompute for the 13-billion shape on the case's machines,
    with 16 sequences to a step.
    """
    if set(answer) != set(BEST_KNOWN):
        return wrong(
            f"expected the keys {', '.join(BEST_KNOWN)}, got "
            f"{', '.join(map(str, answer)) or 'none'}"
        )
    row, best = (row_of(Case(model=LLAMA_2_13B), each, 16) for each in (answer, BEST_KNOWN))
    return told_bill(row, best.dollars, NEAR)
