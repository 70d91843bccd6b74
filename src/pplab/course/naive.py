"""Checkers of chapter 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..builders import build
from ..lab.formulas import naive_makespan
from .answers import builder, drawn, is_module, trained
from .verdict import Verdict, checker, checker_of_each, first_wrong, number, readers_code, right, wrong

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..timeline import Timeline

BOUNDARY_KB = (512, 512, 64, 64, 256, 16)  # what crosses behind layer 0, 1, ... of seven
LAYER_MS = (4, 5, 9, 6, 4, 5, 3)

BUGS = {
    "no gradient sent": "the first half's parameters have no gradient at all",
    "no detach": "the gradients are right, but one graph spans both halves: nothing would cross to another process",
    "no requires_grad": "the second half trains, and there is no gradient to send back",
    "ones sent": "the first half has gradients, and they are wrong",
}


def idle_share(answer: object) -> Verdict:
    """What share of all rank-time does the naive pipeline on 6 ranks waste?"""
    traps = {6 / 7: "six of seven is what one text says; one of six ranks works", 1 / 6: "that is the share that works"}
    return number(answer, 5 / 6, "one rank of six works at a time", traps=traps)


def _are_modules(answer: object) -> bool:
    return isinstance(answer, (list, tuple)) and len(answer) > 0 and all(map(is_module, answer))


@checker("a list of three torch modules", _are_modules)
def three_stages(answer: object) -> Verdict:
    """Cut `whole()` (six layers) into a list of three modules; three processes run them as a naive pipeline."""
    import torch

    stages = list(answer)
    if len(stages) != 3:
        return wrong(f"expected three modules, got {len(stages)}")
    if any(not any(True for _ in stage.parameters()) for stage in stages):
        return wrong("one of your stages has nothing to train")
    x, y = drawn(0, (4, 8), (4, 2))
    model = whole()
    try:
        joined = stages[2](stages[1](stages[0](x)))
    except RuntimeError as error:
        return wrong(f"the stages don't fit together: {error}")
    if joined.shape != model(x).shape or not torch.allclose(joined, model(x), atol=1e-6):
        return wrong("the three modules in a row don't compute what the whole model does: is every layer in, in order?")
    found = trained(build("naive", num_ranks=3, num_microbatches=1), stages, x, y).gradients
    return right(f"three processes, and gradients {found}") if found.equal else wrong(f"gradients {found}")


def whole() -> nn.Sequential:
    """The model of the exercise `three_stages`; the same weights at every call."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4), nn.Linear(4, 2)
        )


def symptoms() -> dict[str, str]:
    """What four broken handshakes look like, A to D; each was run before you see it."""
    return {letter: BUGS[bug] for letter, bug in _ORDER.items()}


_CLUES = {
    "A": "What makes autograd keep a gradient for a tensor that no layer made?",
    "B": "Which gradient does the first half start its backward from?",
    "C": "What has to happen for the first half to have any gradient?",
    "D": "What keeps two graphs apart, while all the numbers are right?",
}
_ORDER = {"A": "no requires_grad", "B": "ones sent", "C": "no gradient sent", "D": "no detach"}


@checker_of_each("ABCD")
def diagnose(answer: object) -> Verdict:
    """Which bug causes which symptom? A dict from "A" to "D" to one of "no detach", "no requires_grad",
    "no gradient sent", "ones sent"."""
    if letter := first_wrong(answer, _ORDER, BUGS):
        return wrong(f"{letter}: not {answer[letter]!r}. {_CLUES[letter]}")
    return right("each line of the handshake has its own way to fail")


@checker(
    "the number of the layer behind which you cut, 0 to 5", lambda answer: isinstance(answer, int) and 0 <= answer < 6
)
def best_cut(answer: object) -> Verdict:
    """Seven layers on two ranks: behind which layer (0 to 5) do you cut, if neither rank may work more than 24 ms and
    as little as possible should cross?"""
    front, back = sum(LAYER_MS[: answer + 1]), sum(LAYER_MS[answer + 1 :])
    if max(front, back) > 24:
        return wrong(f"behind layer {answer} one rank works {max(front, back)} ms")
    if BOUNDARY_KB[answer] > 64:
        return wrong(f"behind layer {answer}, {BOUNDARY_KB[answer]} kB cross; there is a cut with less")
    return right(f"{front} and {back} ms, and {BOUNDARY_KB[answer]} kB cross")


@checker("a function of (loss, received, sent)")
def backward_by_hand(answer: Callable[[Tensor, Tensor, Tensor], None] | object) -> Verdict:
    """Write `backward(loss, received, sent)`: the loss of the second half, its input (a leaf that wants a gradient),
    and the first half's output, from which that input was detached. It must fill every parameter's gradient."""
    import torch
    from torch import nn

    from ..lab.models import cut

    model, (x, y) = whole(), drawn(1, (4, 8), (4, 2))
    nn.functional.mse_loss(model(x), y).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    front, back = cut(model, 2)
    sent = front(x)
    received = sent.detach().requires_grad_()
    with readers_code():
        answer(nn.functional.mse_loss(back(received), y), received, sent)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            return wrong(f"{name} has no gradient")
        if not torch.allclose(parameter.grad, expected[name], atol=1e-6):
            return wrong(f"the gradient of {name} isn't that of the whole model")
    return right("every parameter's gradient is that of the whole model")


def naive_builder(answer: object) -> Verdict:
    """Write `rows(num_ranks, num_microbatches)` for the naive pipeline: lists of texts such as "0F0"."""

    def judge(timeline: Timeline, P: int, M: int) -> str | None:
        if timeline.makespan != naive_makespan(P, M, 1, 2):
            return f"the makespan is {timeline.makespan}; one rank at a time takes {naive_makespan(P, M, 1, 2)}"
        return None

    return builder(answer, judge, "legal at five sizes, with one rank at work at a time")
