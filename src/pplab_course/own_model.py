"""Checkers of the chapter on a model of one's own. `own_parts` has the models of its exercises, and
`faults` has what its runs need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pplab.lab import Case

from . import faults
from .answers import drawn, row_of, told_bill
from .faults import FAULTS, STATES, Fault, adam, alive, cases, clips_alone, marked  # noqa: F401
from .verdict import (
    Verdict,
    Wrong,
    checker,
    checker_of_each,
    matched,
    readers_code,
    right,
    told,
    wrong,
)

if TYPE_CHECKING:
    from torch import Tensor

    from pplab.lab import Entry
    from pplab.lab.models import TransformersModel

    from .own_parts import Patient, Skip

ILL = {
    "A": "batch normalisation",
    "B": "a tied weight kept twice",
    "C": "labels counted as rows",
    "D": "dropout",
}
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
    """The mean cross entropy of every token's scores (B, T, V) for the next token, where target (B,
    T) isn't -100.
    """
    from .own_parts import mean_loss

    return mean_loss(scores, target)


def patients() -> dict[str, Patient]:
    """Four models, A to D, examined in one process by this call. Each has something that no
    pipeline can do alike.
    """
    from .own_parts import all_examined

    return all_examined()


@checker("a function of (net, num_stages)")
def skipping(answer: Callable) -> Verdict:
    """Write `cut(net, num_stages)` for `Skip`: a list of modules, each called with what the one
    before returns.
    """
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
            has = (
                f"the stages have {len(own)} parameters together, and the model "
                f"{len(list(whole.parameters()))}"
            )
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
                return wrong(
                    f"{said}the gradient of {name} {what}: does what goes around come back as a "
                    "gradient?"
                )
    return right(
        "output and gradients are the whole model's: what goes around the cut travels with what "
        "goes through"
    )


@checker("a function of target")
def weight(answer: Callable) -> Verdict:
    """Write `weight(target)`: how much a microbatch's `mean_loss` counts among those of its
    batch.
    """
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
            return wrong(
                f"{what}: the weights of two microbatches were {weights}; expected counts, not all "
                "of them 0"
            )
        losses = [
            float(mean_loss(*both)) for both in zip(scores.split(2), target.split(2), strict=True)
        ]
        found = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
        if abs(found - (expected := float(mean_loss(scores, target)))) > 1e-5:
            both = f"make {found:.4f}, and the batch's is {expected:.4f}"
            return wrong(
                f"{what}: with the weights {weights} the losses "
                f"{both}{_counted_instead(weights, target)}"
            )
    return right(
        "the microbatches' losses make the batch's, also where a microbatch has no label at all"
    )


def _counted_instead(weights: Sequence[float], target: Tensor) -> str:
    parts = target.split(2)
    if weights == [len(part) for part in parts]:
        return ": that counts rows"
    if weights == [max(1, int((part[:, 1:] != -100).sum())) for part in parts]:
        return ": what may a microbatch count for that has no label at all?"
    if weights == [part.numel() for part in parts]:
        return ": that counts padding, too"
    if weights == [int((part != -100).sum()) for part in parts]:
        return ": which labels does the loss look at? No position predicts a row's first one"
    return ""


@checker("a function of step")
def batches(answer: Callable) -> Verdict:
    """Write `rows_of(step)`: four of the rows 0 to 11, given only the number of the step."""
    import torch

    def taken(step: int, seed: int) -> tuple[int, ...]:
        # ranks, and runs that go on, have drawn other random numbers before
        torch.manual_seed(seed)
        with readers_code(f"rows_of({step}): your function raised"):
            found = answer(step)
        with told(f"rows_of({step}): expected four row numbers; ", TypeError, ValueError):
            return tuple(int(row) for row in found)

    order = [taken(step, 0) for step in range(9)]
    for step in (7, 2, 2, 0):
        if taken(step, step + 1) != order[step]:
            return wrong(
                f"rows_of({step}) is another batch for another rank, or a run that goes on at this "
                "step"
            )
    for epoch in range(3):
        rows = [row for batch in order[3 * epoch : 3 * epoch + 3] for row in batch]
        if sorted(rows) != list(range(12)):
            return wrong(
                f"steps {3 * epoch} to {3 * epoch + 2} take the rows {rows}: expected each of 0 to "
                "11 once"
            )
    epochs = [order[first : first + 3] for first in (0, 3, 6)]
    if epochs[0] == epochs[1] or epochs[1] == epochs[2]:
        return wrong("two epochs have the same order: draw a new one for each")
    if len({frozenset(map(frozenset, epoch)) for epoch in epochs}) == 1:
        return wrong(
            "the same four rows stay together in every epoch: shuffle the rows, not the batches"
        )
    return right(
        "the step's number says it all: the same on every rank and after every break, and shuffled"
    )


@checker_of_each("ABCD")
def causes(answer: Mapping[str, object]) -> Verdict:
    """Find what makes the gradients differ for each of the four models of `patients()`: one of
    `CAUSES`.
    """
    clues = {
        CAUSES[0]: "it is different the second time, with one microbatch as with four",
        CAUSES[1]: "one microbatch is right, four aren't, and whether labels are missing makes no "
        "difference",
        CAUSES[2]: "one microbatch is right, and four are, too, where no label is missing",
        CAUSES[3]: "one microbatch is wrong already, the same every time, and of few parameters",
    }
    says = (
        "four numbers tell four causes apart: M = 1, M = 4, the same again, and a batch without "
        "gaps"
    )
    return matched(answer, ILL, CAUSES, lambda letter: clues[ILL[letter]], says)


@checker("a function of (name, stage, num_stages, num_layers)")
def whole_name(answer: object) -> Verdict:
    """Write `whole_name(name, stage, num_stages, num_layers)`, which turns a name in a stage, such
    as "blocks.0.up.weight", into the name in the model.

    Layers are cut as by `layer_ranges`. Names without a layer stay.
    """
    from pplab.lab.models import layer_ranges

    for num_layers, num_stages in ((8, 2), (8, 4), (6, 4), (14, 4)):
        for stage, layers in enumerate(layer_ranges(num_layers, num_stages)):
            names = {
                f"blocks.{i}.up.weight": f"blocks.{layer}.up.weight"
                for i, layer in enumerate(layers)
            }
            names |= {"embedding.token.weight": "embedding.token.weight"} if stage == 0 else {}
            names |= {"head.scores.weight": "head.scores.weight"} if stage == num_stages - 1 else {}
            for local, expected in names.items():
                call = f"{local!r} on stage {stage} of {num_stages}, {num_layers} layers"
                with readers_code(f"{call}: your function raised"):
                    given = answer(local, stage, num_stages, num_layers)
                if given != expected:
                    return wrong(f"{call}: got {given!r}, expected {expected!r}")
    return right("every layer finds its name, also where the layers don't divide evenly")


@checker_of_each("ABCD")
def stale(answer: object) -> Verdict:
    """Find what wasn't restored in each of the four runs of `cases()`: {"A": "nothing", ...}."""
    clues = {
        STATES[0]: "its first loss after the break is higher than before it, on whatever batch",
        STATES[
            1
        ]: "its first loss after the break is exactly right, so weights and batch are; what acts "
        "only later?",
        STATES[2]: "its first loss after the break is its loss on batch 0",
        STATES[3]: "its losses are those of the uninterrupted run to six digits: that is rounding",
    }
    says = "each by the first number that differs"
    return matched(answer, faults.LOST, STATES, lambda letter: clues[faults.LOST[letter]], says)


OFFERS = {  # dollars per GPU and hour, Gb/s between machines, hours between two failures
    "reserved": (2.00, 25, math.inf),
    "spot": (0.90, 25, 4),
    "left over": (0.65, 10, 1),
}
SAVE, RESTART = 1 / 60, 6 / 60  # hours
BEST_NIGHT = {
    "offer": "left over",
    "minutes": 10,
    "schedule": "ZB-V",
    "cut": (4, 5, 5, 3, 5, 4, 4, 2),
}
NEAR = 0.5  # dollars above the best known


def stretched(hours: float, between_saves: float, mtbf: float) -> float:
    """How long so many hours of work take on average, with failures at random, saves and new
    starts.

    After a failure the work since the last save is done again. All times are in hours.
    """
    interval = between_saves + SAVE
    if mtbf == math.inf:
        return hours * interval / between_saves
    return hours / between_saves * (mtbf + RESTART) * math.expm1(interval / mtbf)


def night_row(answer: Mapping[str, object]) -> Entry:
    """The ledger's row for an offer, minutes of work between two saves, and arguments of
    `Case.row`, with failures included.
    """
    rest = {key: value for key, value in answer.items() if key not in ("offer", "minutes")}
    if answer.get("offer") not in OFFERS:
        raise Wrong(f"expected one of {', '.join(OFFERS)} for offer, got {answer.get('offer')!r}")
    minutes = answer.get("minutes")
    if (
        isinstance(minutes, bool)
        or not isinstance(minutes, (int, float))
        or not 1 <= minutes <= 600
    ):
        raise Wrong(
            f"minutes: expected how long a run works between two saves, 1 to 600, got {minutes!r}"
        )
    dollars, gigabits, mtbf = OFFERS[answer["offer"]]
    row = row_of(Case(dollars_per_hour=dollars, gigabits=gigabits), rest, 16)
    if row.num_microbatches * row.microbatch != 16:
        raise Wrong("a step has sixteen sequences")
    return replace(row, step_s=row.step_s * stretched(row.hours, minutes / 60, mtbf) / row.hours)


@checker(
    "a dict with offer, minutes, schedule and what `Case.row` takes",
    lambda answer: isinstance(answer, Mapping),
)
def night(answer: Mapping[str, object]) -> Verdict:
    """Give one of three offers and the arguments of `Case.row` with the smallest average bill for a
    billion tokens, with failures, saves and new starts.
    """
    return told_bill(night_row(answer), night_row(BEST_NIGHT).dollars, NEAR)
