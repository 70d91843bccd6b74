"""Checkers of the chapter on the naive pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pplab.builders import build
from pplab.costs import Costs
from pplab.lab import Case
from pplab.simulator import simulate

from .answers import drawn
from .verdict import (
    UNASKED,
    Verdict,
    Wrong,
    checker,
    checker_of_each,
    joined,
    number,
    numbers,
    one_or_several,
    readers_code,
    right,
    wrong,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

CAUSES = (
    "the input was not asked for a gradient",
    "the ranks read different batches",
    "a rank waits for the gradient before it sends its output",
    "ones are sent up in place of the input's gradient",
    "the line with `zero_grad` was deleted",
    "rank 0's last layer is rank 1's first layer, too",
    "the gradient is received, and not used",
)
_SEEN = {
    "A": "it never ends, and both ranks stand in receive",
    "B": "it ends; rank 1's gradients are right, and rank 0's are wrong",
    "C": "it ends; both ranks' gradients are wrong, and three times the right ones",
    "D": "rank 1's gradients are right, and rank 0 has none to compare",
    "E": "rank 1 fails where it sends: what it wants to send is None",
}
_CAUSE_OF = {"A": 3, "B": 4, "C": 5, "D": 7, "E": 1}

MOVED = (9, 9, 8, 6)

# GB of room, TFLOP/s reached, dollars per hour
MACHINES = {"large": (80, 400, 2.0), "small": (48, 300, 1.0)}
# of all rows of up to six machines, whose layers were dealt out in the best way
CHEAPEST_DOLLARS = 200.3


def faster_network(answer: object) -> Verdict:
    """Compute, in dollars, what the job costs naively on 100-gigabit Ethernet at $2.20 per GPU and
    hour.
    """
    offer = Case(gigabits=100, dollars_per_hour=2.2).row("naive", 1).dollars
    traps = {
        Case(gigabits=100)
        .row("naive", 1)
        .dollars: "that is at $2 an hour: the offer costs a tenth more",
        Case(dollars_per_hour=2.2)
        .row("naive", 1)
        .dollars: "that is with the slower network's messages",
        offer / 4: "that is one GPU's share",
    }
    why = f"${offer:.0f} against $321: six shorter messages save less than the machines cost more"
    return number(answer, offer, why, traps=traps, tolerance=6e-3)


def moved_layers(*answer: object) -> Verdict:
    """Find by how many ms a step gets shorter, and by how many GB the fullest rank gets fuller, if
    the naive case is cut 9+9+8+6 instead of 8+8+8+8.
    """
    case = Case()
    even, moved = (case.row("naive", 1, cut=cut) for cut in ([8, 8, 8, 8], MOVED))
    slowest = max(case.stage_ms()) - max(case.stage_ms(MOVED))
    layer = case.state_gb()[1] / 8, case.sequence_gb()[1] / 8
    pace = (
        "the slowest rank becomes that much faster. Does it set the pace when one rank works at a "
        "time?"
    )
    shorter = {3 * slowest: pace, slowest: pace}
    fuller = {
        layer[0]: "that is only the layer's state. What does it keep of a sequence?",
        layer[1]: "that is only what the layer keeps of a sequence. It has state, too",
        max(moved.held_gb): "that is what the fullest rank holds. By how much does it grow?",
        2 * sum(layer): "rank 0 gets one layer more, not two",
    }
    why = "the chain is as long as before, and rank 0 holds a layer more"
    more = max(moved.held_gb) - max(even.held_gb)
    return numbers(joined(answer), (0, more), why, ("ms", "GB"), traps=(shorter, fuller), digits=2)


@checker("a function of (stage, arrived, down)")
def middle_rank(answer: Callable[[nn.Module, Tensor, Callable], Tensor] | object) -> Verdict:
    """Write `middle(stage, arrived, down)` for a model whose last stage also needs what the first
    one made.

    `down(output, skip)` sends both to the last rank and returns their gradients. Return what goes
    back to rank 0.
    """
    import torch

    stages, (x, y) = _three_stages(), drawn(2, (4, 8), (4, 2))
    first, middle, last = stages
    sent = first(x)
    _loss(last, middle(sent), sent, y).backward()
    expected = [[p.grad.clone() for p in stage.parameters()] for stage in stages]
    stages.zero_grad(set_to_none=True)
    calls, arrived_here = [], first(x).detach()

    def down(output: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        for name, given, shape in (("output", output, (4, 6)), ("skip", skip, (4, 8))):
            if not isinstance(given, torch.Tensor) or given.shape != shape:
                raise ValueError(
                    f"down takes as {name} a tensor of shape {shape}, got {_described(given)}"
                )
        calls.append(output)
        arrived = [tensor.detach().clone().requires_grad_() for tensor in (output, skip)]
        _loss(last, *arrived, y).backward()
        return arrived[0].grad, arrived[1].grad

    sent = first(x)
    try:
        with readers_code():
            returned = answer(middle, arrived_here, down)
    except Wrong as error:
        asked = arrived_here.requires_grad or "NoneType" not in str(error)
        raise Wrong(f"{error}{'' if asked else UNASKED}") from None
    if len(calls) != 1:
        return wrong(
            f"down was called {len(calls)} times: the last rank gets its input once in a step"
        )
    if not isinstance(returned, torch.Tensor) or returned.shape != sent.shape:
        return wrong(
            f"rank 0 expects a gradient of shape {tuple(sent.shape)}, got {_described(returned)}"
        )
    sent.backward(returned.detach())
    return _compared([[p.grad for p in stage.parameters()] for stage in stages], expected)


def _three_stages() -> nn.ModuleList:
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        return nn.ModuleList(
            [first, nn.Sequential(nn.Linear(8, 6), nn.Tanh()), nn.Linear(6 + 8, 2)]
        )


def _loss(last: nn.Module, output: Tensor, skip: Tensor, target: Tensor) -> Tensor:
    import torch

    return torch.nn.functional.mse_loss(last(torch.cat([output, skip], dim=1)), target)


def _described(given: object) -> str:
    """A short description: a tensor's shape, how many there are, or None."""
    if hasattr(given, "shape"):
        return f"one of shape {tuple(given.shape)}"
    if isinstance(given, (tuple, list)):
        return (
            f"{len(given)} things ({', '.join(type(each).__name__ for each in given)}): one is "
            "expected"
        )
    return "None" if given is None else f"a thing of type {type(given).__name__}"


def _compared(
    found: Sequence[Sequence[Tensor | None]], expected: Sequence[Sequence[Tensor]]
) -> Verdict:
    import torch

    for rank, mine in enumerate(found):
        if any(gradient is None for gradient in mine):
            return wrong(f"rank {rank}'s stage has no gradient")
    off = [
        str(rank)
        for rank, (mine, whole) in enumerate(zip(found, expected, strict=True))
        if not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mine, whole, strict=True))
    ]
    if not off:
        return right("every gradient of the three stages is that of one process")
    fine = [str(rank) for rank in range(len(found)) if str(rank) not in off]
    others = f", those of rank {' and '.join(fine)} are right" if fine else ""
    return wrong(f"the gradients of rank {' and '.join(off)} aren't those of one process{others}")


def symptoms() -> dict[str, str]:
    """What five broken pipelines, A to E, look like on two ranks. Each is run by this call."""
    return dict(_SEEN)


@checker_of_each("ABCDE")
def diagnose(answer: object) -> Verdict:
    """Match causes and symptoms: a dict from "A" to "E" to the cause's number, 1 to 7."""
    for letter, cause in answer.items():
        if isinstance(cause, bool) or not isinstance(cause, int) or not 1 <= cause <= len(CAUSES):
            return wrong(
                f"{letter}: expected the number of a cause, 1 to {len(CAUSES)}, got {cause!r}"
            )
    found = sum(answer[letter] == cause for letter, cause in _CAUSE_OF.items())
    if found < len(_CAUSE_OF):
        how = "To find out which, make each mistake yourself, and look at what happens"
        return wrong(f"{found} of {len(_CAUSE_OF)} are right. {how}")
    return right("each mistake shows in its own way")


@one_or_several
@checker(
    'a list of a pair per machine, such as [("large", 8), ("large", 8), ("large", 8), ("large", '
    "8)]",
    lambda answer: isinstance(answer, (list, tuple)) and len(answer) > 0,
)
def cheapest(answer: object) -> Verdict:
    """Choose machines of two kinds and their layers, rank by rank, to train the case naively for as
    little as possible.
    """
    names, cut = _rented(answer)
    held, dollars = naively(names, cut)
    room = [MACHINES[name][0] for name in names]
    if full := [rank for rank, (gb, most) in enumerate(zip(held, room, strict=True)) if gb > most]:
        found = (
            f"rank {rank} would hold {held[rank]:.1f} GB and has {room[rank]}" for rank in full
        )
        return wrong(f"it doesn't fit: {', '.join(found)}")
    if (more := dollars - CHEAPEST_DOLLARS) > 0.5:
        return wrong(
            f"it fits, and costs ${dollars:.0f}: ${more:.0f} more than the best that we know"
        )
    if more > 0.05:
        return right(
            f"it fits, and costs ${dollars:.1f}; the best that we know costs $"
            f"{CHEAPEST_DOLLARS:.1f}"
        )
    known = "less than the best that we knew" if more < -0.05 else "and we know nothing cheaper"
    return right(f"it fits, and costs ${dollars:.1f}, {known}")


def naively(names: Sequence[str], cut: Sequence[int]) -> tuple[list[float], float]:
    """The most that each rank holds, in GB, and what the job costs on these machines."""
    case = Case(num_ranks=len(names))
    speeds = [MACHINES[name][1] / case.teraflops for name in names]
    ms = [each / speed for each, speed in zip(case.stage_ms(cut), speeds, strict=True)]
    costs = Costs(ms, ms, ms, latency=case.message_ms, unit="ms")
    step_h = (
        simulate(build("naive", num_ranks=len(names), num_microbatches=1), costs).makespan / 3.6e6
    )
    held = [own + kept for own, kept in zip(case.state_gb(cut), case.sequence_gb(cut), strict=True)]
    return held, case.tokens / case.model.sequence * step_h * sum(
        MACHINES[name][2] for name in names
    )


def _rented(answer: Sequence) -> tuple[list[str], list[int]]:
    """Kinds and layers, in two lists."""
    for pair in answer:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or pair[0] not in tuple(MACHINES):
            raise Wrong(
                'expected a pair such as ("large", 8) or ("small", 8) for every machine, got '
                f"{pair!r}"
            )
        if isinstance(pair[1], bool) or not isinstance(pair[1], int) or pair[1] < 1:
            raise Wrong(f"every machine gets a whole number of layers, 1 or more, got {pair[1]!r}")
    names, cut = [name for name, _ in answer], [layers for _, layers in answer]
    if sum(cut) != (layers := Case().model.num_layers):
        raise Wrong(f"your machines have {sum(cut)} layers, and the model has {layers}")
    return names, cut
