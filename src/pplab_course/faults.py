"""What the exercises on a model of one's own need: faults on purpose, an optimizer that clips
alone, and runs that lose something.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from pplab.lab.models import LanguageModel

FAULTS = ("raise", "kill", "stop")


class Fault:
    """A hook for a module. In one of its calls, counted from 0, it raises, kills its process or
    stops it.

    When it strikes it writes the file `mark`, which tells the time. With `once` it doesn't strike
    if the file is already there.
    """

    def __init__(self, kind: str, mark: str, call: int = 0, once: bool = False):
        if kind not in FAULTS:
            raise ValueError(f"unknown fault {kind!r}: expected one of {', '.join(FAULTS)}")
        self.kind, self.mark, self.call, self.once, self.calls = kind, mark, call, once, 0

    def __call__(self, *_: object) -> None:
        self.calls += 1
        if self.calls - 1 != self.call:
            return
        try:
            open(self.mark, "x" if self.once else "w").close()
        except FileExistsError:
            return
        if self.kind == "raise":
            raise ArithmeticError("a fault, on purpose")
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


def marked(path: str | os.PathLike) -> float:
    """When a fault struck: the time of its mark, in seconds of the system's clock."""
    return Path(path).stat().st_mtime


def adam(parameters: Sequence[nn.Parameter], fault: Fault | None = None) -> Optimizer:
    """AdamW; a fault strikes in one of its steps."""
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    if fault is not None:
        optimizer.register_step_pre_hook(fault)
    return optimizer


def clips_alone(named: Sequence[tuple[str, nn.Parameter]], limit: float) -> Optimizer:
    """SGD that first clips the gradients that it has. On a rank of a pipeline, it clips that rank's
    gradients by their own norm.
    """
    import torch

    own = [p for _, p in named]
    optimizer = torch.optim.SGD(own, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(own, limit) and None)
    return optimizer


def alive(context: object) -> int:
    """The process number of a rank, for `Pool.run`."""
    return os.getpid()


def small_gpt() -> LanguageModel:
    """The GPT of the exercises: 8 layers, and quick."""
    from pplab.lab.models import gpt

    return gpt(num_layers=8, width=32, num_heads=2, context=16, batch_size=8, source="sample")


@dataclass(frozen=True)
class Case:
    """A run of six steps that was interrupted after three and went on."""

    losses: tuple[float, ...]  # of the six steps
    uninterrupted: tuple[float, ...]  # of the same run when nothing interrupts it
    on_batch_0: float  # the loss on batch 0 of the model as it was when the run went on


STATES = ("a layer's weights", "the optimizer's state", "the number of the batch", "nothing")

LOST = dict(zip("ABCD", (STATES[1], STATES[3], STATES[0], STATES[2]), strict=True))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread. For tensors as small as `small_gpt`'s, this is up to ten times as fast
    as several threads.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def cases() -> dict[str, Case]:
    """Four resumed runs, A to D, trained in one process by this call. Each has lost something, or
    nothing.
    """
    with one_thread():
        return {name: _case(lost) for name, lost in LOST.items()}


def _case(lost: str) -> Case:
    """Train, interrupt, lose something, go on. If nothing is lost, sums are taken in a different
    order after the break.
    """
    import torch

    workload = small_gpt()
    model = workload.build_whole()
    optimizer = adam(model.parameters())
    before = [train_step(workload, model, optimizer, step) for step in range(3)]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = optimizer.state_dict()
    state = {
        **state,
        "state": {n: {k: v.clone() for k, v in s.items()} for n, s in state["state"].items()},
    }
    after = [train_step(workload, model, optimizer, step) for step in range(3, 6)]
    again = workload.build_whole()
    again.load_state_dict(
        {n: t for n, t in weights.items() if not (lost == STATES[0] and n.startswith("blocks.5."))},
        strict=False,
    )
    optimizer = adam(again.parameters())
    if lost != STATES[1]:
        optimizer.load_state_dict(state)
    first = 0 if lost == STATES[2] else 3
    with torch.no_grad():
        batch = workload.batch(0)
        on_batch_0 = workload.loss(again(*batch.inputs), batch.target).item()
    microbatches = 4 if lost == STATES[3] else 1
    resumed = [
        train_step(workload, again, optimizer, step, microbatches)
        for step in range(first, first + 3)
    ]
    return Case((*before, *resumed), (*before, *after), on_batch_0)


def train_step(
    workload: LanguageModel,
    model: nn.Module,
    optimizer: Optimizer,
    step: int,
    microbatches: int = 1,
) -> float:
    """Take a step of the optimizer on the batch of that number, cut into microbatches, and return
    its loss.
    """
    optimizer.zero_grad()
    losses = []
    for batch in workload.batch(step).microbatches(microbatches):
        loss = workload.loss(model(*batch.inputs), batch.target) / microbatches
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    return sum(losses)
