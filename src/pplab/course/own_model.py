"""Checkers of chapter 14, and the models that its exercises are about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING

from ..builders import build
from ..lab.case import Case
from ..lab.transformer import Transformer
from ..simulator import simulate
from .answers import drawn
from .verdict import (
    Verdict,
    checker,
    checker_of_each,
    first_wrong,
    number,
    one_or_several,
    readers_code,
    right,
    told,
    wrong,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..lab import MeasuredLayers
    from ..lab.models import TransformersModel
    from .own_parts import Patient, Skip

LLAMA_2_13B = Transformer(40, 5120, 4096, heads=40, mlp_width=13824, gated=True, vocabulary=32000)
ILL = {"A": "batch normalisation", "B": "a tied weight kept twice", "C": "labels counted as rows", "D": "dropout"}
CAUSES = ("dropout", "batch normalisation", "labels counted as rows", "a tied weight kept twice")


def counts_rows(workload: TransformersModel) -> TransformersModel:
    """The same model, by an author who forgot that rows have different numbers of labels."""
    from .own_parts import CountsRows

    return CountsRows.of(workload)


def skip_model() -> Skip:
    """A model with a way around its layers."""
    from .own_parts import Skip

    return Skip()


def mean_loss(scores: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy of every token's scores (B, T, V) for the next token, where target (B, T) isn't -100."""
    from .own_parts import mean_loss

    return mean_loss(scores, target)


def patients() -> dict[str, Patient]:
    """Four models, A to D, each examined here and now in one process: something about it no pipeline can do alike."""
    from .own_parts import all_examined

    return all_examined()


def tied_gb(answer: object) -> Verdict:
    """Llama 3.2 3B, whose head is its embedding: what four ranks hold in all, at 16 bytes per parameter."""
    model = Transformer(28, 3072, 8192, heads=24, kv_heads=8, mlp_width=8192, gated=True, vocabulary=128256)
    table, one = 16 * model.table_parameters / 1e9, 16 * model.parameters / 1e9
    traps = {
        one - table: "that is with one table: which ranks need it?",
        one / 4: "that is the weights in single precision; with gradients and Adam's state it is four times as much",
        (one - table) / 4: "that is the weights in single precision, and the table once",
        one + 2 * table: "two of the four ranks look up a table or multiply with it, not all four",
    }
    why = "3.21 billion parameters, and the 0.39 billion of the table once more: the first rank and the last have one"
    return number(answer, one, why, traps=traps, tolerance=2e-3)


@checker("a function of (net, num_stages)")
def skipping(answer: Callable) -> Verdict:
    """Write `cut(net, num_stages)` for `Skip`: a list of modules, each given what the one before returns."""
    from .own_parts import Skip, handshakes, nn

    x, y = drawn(1, (6, 5), (6, 5))
    for num_stages in (2, 4):
        said, net, whole = f"with {num_stages} stages: ", Skip(), Skip()
        with readers_code(f"{said}your function raised"):
            stages = list(answer(net, num_stages))
        if len(stages) != num_stages or not all(isinstance(stage, nn.Module) for stage in stages):
            return wrong(f"{said}expected {num_stages} modules, got {stages!r:.80}")
        own = [p for stage in stages for p in stage.parameters()]
        if len(own) != len(list(whole.parameters())):
            has = f"the stages have {len(own)} parameters together, and the model {len(list(whole.parameters()))}"
            return wrong(f"{said}{has}: each belongs to one stage")
        if not all(len(list(stage.parameters())) for stage in stages):
            return wrong(f"{said}a stage has no parameters: spread the four layers evenly")
        with told(said):
            output = handshakes(stages, x, y)
        expected = whole(x)
        nn.functional.mse_loss(expected, y).backward()
        if output.shape != expected.shape or not output.allclose(expected, atol=1e-5):
            return wrong(f"{said}the last stage's output isn't the model's")
        gradients = {name: p.grad for name, p in net.named_parameters()}
        for name, p in whole.named_parameters():
            found = gradients[name]
            if found is None or not found.allclose(p.grad, atol=1e-6):
                what = "has none" if found is None else "differs"
                return wrong(f"{said}the gradient of {name} {what}: does what goes around come back as a gradient?")
    return right("output and gradients are the whole model's: what goes around the cut travels with what goes through")


@checker("a function of target")
def weight(answer: Callable) -> Verdict:
    """Write `weight(target)`: what a microbatch's `mean_loss` counts for among those of its batch."""
    import torch

    for what, lengths in (
        ("rows of 6, 6, 2 and 3 labels", (6, 6, 2, 3)),
        ("rows of 5, 1, 1 and 1 labels", (5, 1, 1, 1)),
        ("rows of 4, 4, 0 and 0 labels", (4, 4, 0, 0)),
    ):
        target = torch.arange(24).view(4, 6) % 7
        for row, length in enumerate(lengths):
            target[row, length:] = -100
        (scores,) = drawn(2, (4, 6, 7))
        with readers_code(f"{what}: your function raised"):
            weights = [float(answer(part)) for part in target.split(2)]
        if min(weights) < 0 or not sum(weights) > 0:
            return wrong(f"{what}: the weights of two microbatches were {weights}; expected counts, not all of them 0")
        losses = [float(mean_loss(*both)) for both in zip(scores.split(2), target.split(2), strict=True)]
        found = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
        if abs(found - (expected := float(mean_loss(scores, target)))) > 1e-5:
            both = f"make {found:.4f}, and the batch's is {expected:.4f}"
            return wrong(f"{what}: with the weights {weights} the losses {both}{_counted_instead(weights, target)}")
    return right("the microbatches' losses make the batch's, also where a microbatch has no label at all")


def _counted_instead(weights: Sequence[float], target: Tensor) -> str:
    parts = target.split(2)
    if weights == [len(part) for part in parts]:
        return ": that counts rows"
    if weights == [max(1, int((part[:, 1:] != -100).sum())) for part in parts]:
        return ": what may a microbatch count for that has no label at all?"
    if weights == [part.numel() for part in parts]:
        return ": that counts padding, too"
    if weights == [int((part != -100).sum()) for part in parts]:
        return ": which labels does the loss look at? A row's first one is nobody's next"
    return ""


@checker("a function of step")
def batches(answer: Callable) -> Verdict:
    """Write `rows_of(step)`: four of the rows 0 to 11, by the number of the step alone."""
    import torch

    def taken(step: int, seed: int) -> tuple[int, ...]:
        torch.manual_seed(seed)  # ranks, and runs that go on, have drawn other random numbers before
        with readers_code(f"rows_of({step}): your function raised"):
            found = answer(step)
        with told(f"rows_of({step}): expected four row numbers; ", TypeError, ValueError):
            return tuple(int(row) for row in found)

    order = [taken(step, 0) for step in range(9)]
    for step in (7, 2, 2, 0):
        if taken(step, step + 1) != order[step]:
            return wrong(f"rows_of({step}) is another batch for another rank, or a run that goes on at this step")
    for epoch in range(3):
        rows = [row for batch in order[3 * epoch : 3 * epoch + 3] for row in batch]
        if sorted(rows) != list(range(12)):
            return wrong(f"steps {3 * epoch} to {3 * epoch + 2} take the rows {rows}: expected each of 0 to 11 once")
    epochs = [order[first : first + 3] for first in (0, 3, 6)]
    if epochs[0] == epochs[1] or epochs[1] == epochs[2]:
        return wrong("two epochs have one order: draw another one for each")
    if len({frozenset(map(frozenset, epoch)) for epoch in epochs}) == 1:
        return wrong("the same four rows stay together in every epoch: shuffle the rows, not the batches")
    return right("the step's number says it all: the same on every rank and after every break, and shuffled")


@checker_of_each("ABCD")
def causes(answer: Mapping[str, object]) -> Verdict:
    """For each of the four models of `patients()`, what makes its gradients differ: one of `CAUSES`."""
    clues = {
        CAUSES[0]: "it is another one the second time, with one microbatch as with four",
        CAUSES[1]: "one microbatch is right, four aren't, and whether labels are missing makes no difference",
        CAUSES[2]: "one microbatch is right, and four are, too, where no label is missing",
        CAUSES[3]: "one microbatch is wrong already, the same every time, and of few parameters",
    }
    if letter := first_wrong(answer, ILL, CAUSES):
        return wrong(f"{letter}: not {answer[letter]}; {clues[ILL[letter]]}")
    return right("four numbers tell four causes apart: M = 1, M = 4, the same again, and a batch without gaps")


CARDS = (56e6, 28e6)  # bytes
CHOICES = ("GPipe", "1F1B", "Interleaved1F1B")


def pictures() -> MeasuredLayers:
    """The profile of a model of pictures: what cuts them into patches keeps most of all for its backward."""
    from .own_parts import PICTURES

    return PICTURES


def judged(name: str, counts: Sequence[int]) -> tuple[float, tuple[float, ...]]:
    """A step in ms, and the bytes of both ranks, of `pictures()` on two ranks with 8 microbatches."""
    schedule = build(name, num_ranks=2, num_microbatches=8)
    held = list(schedule.peak_held(pictures().memory(counts)))
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    for rank, end, count in zip(schedule.placement, ends, counts, strict=True):
        held[rank] += 4 * sum(pictures().parameters[end - count : end])
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
    return next((rank for rank, (bytes_, card) in enumerate(zip(held, CARDS, strict=True)) if bytes_ > card), None)


@one_or_several
@checker("a pair of a schedule's name and its counts of layers", lambda answer: isinstance(answer, (tuple, list)))
def pictures_cut(answer: Sequence) -> Verdict:
    """`pictures()` on ranks with cards of 56 and 28 MB and 8 microbatches: the fastest schedule and counts that fit."""
    if len(answer) != 2 or answer[0] not in CHOICES:
        return wrong(f"expected one of {', '.join(CHOICES)} and counts, such as ('1F1B', (5, 5)), got {answer!r}")
    with told("", ValueError, TypeError, AttributeError):
        ms, held = judged(*answer)
    if (rank := _too_full(held)) is not None:
        of = f"{held[rank] / 1e6:.1f} of its {CARDS[rank] / 1e6:.0f} MB"
        return wrong(f"{ms:.0f} ms, but rank {rank} would hold {of}")
    if ms > _fastest() + 1e-6:
        return wrong(f"it fits and takes {ms:.0f} ms; there is a faster one")
    both = " and ".join(f"{each / 1e6:.1f}" for each in held)
    return right(f"{ms:.0f} ms, {both} MB: no cut under these schedules is faster and fits")


BEST_KNOWN = {"schedule": "ZB-V", "cut": (5, 6, 5, 1, 9, 5, 4, 5), "recompute": (1, 1, 0, 0, 0, 0, 0, 0)}
NEAR = 3.0  # dollars above the best known


@checker("a dict with schedule, cut and recompute", lambda answer: isinstance(answer, Mapping))
def thirteen(answer: Mapping[str, object]) -> Verdict:
    """The 13-billion shape on the case's machines, 16 sequences to a step: schedule, cut, layers to recompute."""
    if set(answer) != set(BEST_KNOWN):
        return wrong(f"expected the keys {', '.join(BEST_KNOWN)}, got {', '.join(map(str, answer)) or 'none'}")
    case = Case(model=LLAMA_2_13B)
    with told("", ValueError, TypeError):
        row, best = (case.row(a["schedule"], 16, cut=a["cut"], recompute=a["recompute"]) for a in (answer, BEST_KNOWN))
    if row.step_s is None or row.memory is None:
        return wrong(f"{answer['schedule']!r} is no schedule of four ranks")
    bill, above = f"{row.step_s:.2f} s, ${row.dollars:.2f}", row.dollars - best.dollars
    if not row.fits:
        full = max(range(4), key=row.held_gb.__getitem__)
        return wrong(f"{bill}, but it doesn't fit: rank {full} would hold {row.held_gb[full]:.1f} GB")
    if above > NEAR:
        return wrong(f"it fits: {bill}, which is ${above:.2f} more than the best that we know")
    return right(f"{bill}, ${abs(above):.2f} {'above' if above > 0 else 'below'} the best that we know")
