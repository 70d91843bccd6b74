"""Checkers of chapter 12, and what its runs need: faults on purpose, an optimizer that clips alone, a lossy resume."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .verdict import Verdict, number, right, unanswered, wrong

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ..models import LanguageModel

FAULTS = ("raise", "kill", "stop")


class Fault:
    """A hook for a module: in one of its calls, counted from 0, it raises, kills its process or stops it.

    It leaves the file `mark` when it strikes, so that its time is known. With `once` it doesn't strike where the file
    is already there.
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


def adam(parameters: Sequence[nn.Parameter], fault: Fault | None = None) -> Optimizer:
    """AdamW; a fault strikes in one of its steps."""
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    if fault is not None:
        optimizer.register_step_pre_hook(fault)
    return optimizer


def clips_alone(parameters: Sequence[nn.Parameter], limit: float) -> Optimizer:
    """SGD that first clips what it has: on a rank of a pipeline, that rank's gradients by their own norm."""
    import torch

    own = list(parameters)
    optimizer = torch.optim.SGD(own, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(own, limit) and None)
    return optimizer


def alive(context: object) -> int:
    """The process number of a rank; give it to `Pool.run`."""
    return os.getpid()


def small_gpt() -> LanguageModel:
    """The GPT of the exercises: 8 layers, and quick."""
    from ..models import gpt

    return gpt(num_layers=8, width=32, num_heads=2, context=16, batch_size=8, source="sample")


@dataclass(frozen=True)
class Case:
    """A run of six steps that was interrupted after three and went on."""

    losses: tuple[float, ...]  # of the six steps
    uninterrupted: tuple[float, ...]  # of the same run when nothing interrupts it
    on_batch_0: float  # the loss on batch 0 of the model as it was when the run went on


STATES = ("a layer's weights", "the optimizer's state", "the number of the batch", "nothing")

_STALE = dict(zip("ABCD", (STATES[1], STATES[3], STATES[0], STATES[2]), strict=True))


def cases() -> dict[str, Case]:
    """Four resumed runs, A to D, trained here and now in one process; each lost something, or nothing."""
    return {name: _case(lost) for name, lost in _STALE.items()}


def _case(lost: str) -> Case:
    """Train, interrupt, lose something, go on. Without a loss, the sums are taken in another order after the break."""
    import torch

    workload = small_gpt()
    model = workload.build_whole()
    optimizer = adam(model.parameters())
    before = [_step(workload, model, optimizer, step) for step in range(3)]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = optimizer.state_dict()
    state = {**state, "state": {n: {k: v.clone() for k, v in s.items()} for n, s in state["state"].items()}}
    after = [_step(workload, model, optimizer, step) for step in range(3, 6)]
    again = workload.build_whole()
    again.load_state_dict(
        {n: t for n, t in weights.items() if not (lost == STATES[0] and n.startswith("blocks.5."))}, strict=False
    )
    optimizer = adam(again.parameters())
    if lost != STATES[1]:
        optimizer.load_state_dict(state)
    first = 0 if lost == STATES[2] else 3
    with torch.no_grad():
        batch = workload.batch(0)
        on_batch_0 = workload.loss(again(*batch.inputs), batch.target).item()
    microbatches = 4 if lost == STATES[3] else 1
    resumed = [_step(workload, again, optimizer, step, microbatches) for step in range(first, first + 3)]
    return Case((*before, *resumed), (*before, *after), on_batch_0)


def _step(workload: LanguageModel, model: nn.Module, optimizer: Optimizer, step: int, microbatches: int = 1) -> float:
    optimizer.zero_grad()
    losses = []
    for batch in workload.batch(step).split(microbatches):
        loss = workload.loss(model(*batch.inputs), batch.target) / microbatches
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    return sum(losses)


def scale(answer: object) -> Verdict:
    """Three ranks' norms are 3, 4 and 12, the limit is 2.6: what is each of the last rank's gradients multiplied by?"""
    traps = {
        2.6 / 12: "that is by the rank's own norm: the direction of the whole gradient would change",
        2.6 / 19: "norms don't add up, their squares do",
        2.6 / 169: "that is by the square of the norm",
        13: "that is the norm; the factor is the limit over it",
        1: "the norm is more than the limit",
    }
    return number(answer, 0.2, "the norm is sqrt(9 + 16 + 144) = 13, and 2.6 / 13 = 0.2 on every rank", traps=traps)


def clipper(answer: object) -> Verdict:
    """Write `clip(gradients, all_reduce, limit)`, called on every rank at once: scales the rank's gradients in place.

    `gradients` is the rank's list of tensors, `all_reduce(number)` returns the sum of all ranks' numbers. Returns the
    norm.
    """
    if (verdict := unanswered(answer)) is not None:
        return verdict
    if not callable(answer):
        return wrong(f"expected a function of (gradients, all_reduce, limit), got {answer!r}")
    import torch

    generator = torch.Generator().manual_seed(0)
    for what, sizes, limit in (
        ("three ranks over the limit", [[3, 4], [5], [2, 2]], 1.0),
        ("two ranks under the limit", [[3], [4]], 100.0),
        ("a rank without gradients", [[3, 4], []], 0.5),
    ):
        ranks = [[torch.randn(size, generator=generator) for size in row] for row in sizes]
        before = [[g.clone() for g in row] for row in ranks]
        norm = math.sqrt(sum(float(g.square().sum()) for row in ranks for g in row))
        found = _on_ranks(answer, ranks, limit)
        if isinstance(found, str):
            return wrong(f"{what}: {found}")
        factor = min(1.0, limit / norm)
        for rank, (row, old, given) in enumerate(zip(ranks, before, found, strict=True)):
            if not isinstance(given, (int, float)) and not hasattr(given, "item"):
                return wrong(f"{what}: rank {rank} returned {given!r}; expected the norm, {norm:.4f}")
            if not abs(float(given) - norm) <= 1e-3 * norm:
                own = math.sqrt(sum(float(g.square().sum()) for g in old))
                near = abs(float(given) - own) < 1e-3 * norm
                said = ", its own: add up the squares of all ranks first" if near else f"; expected {norm:.4f}"
                return wrong(f"{what}: rank {rank} returned a norm of {float(given):.4f}{said}")
            if not all((g - factor * o).abs().max() <= 1e-4 for g, o in zip(row, old, strict=True)):
                return wrong(f"{what}: rank {rank}'s gradients aren't {factor:.3f} times what they were")
    return right("the norm and the gradients of one process, on every rank")


def _on_ranks(clip: Callable, ranks: list[list[Tensor]], limit: float) -> list | str:
    """Call `clip` on all ranks at once, a thread each; what they returned, or what went wrong."""
    numbers, found, errors = [0.0] * len(ranks), [None] * len(ranks), []
    barrier = threading.Barrier(len(ranks))

    def work(rank: int) -> None:
        def all_reduce(value: float) -> float:
            numbers[rank] = float(value)
            barrier.wait(5)
            total = sum(numbers)
            barrier.wait(5)
            return total

        try:
            found[rank] = clip(ranks[rank], all_reduce, limit)
        except threading.BrokenBarrierError:
            errors.append((1, "some ranks called all_reduce and waited for a rank that didn't"))
        except Exception as error:  # the reader's code: whatever it raises is the answer to show
            errors.append((0, f"rank {rank} raised {type(error).__name__}: {error}"))
        barrier.abort() if errors else None

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(12)
    return min(errors)[1] if errors else found


def whole_name(answer: object) -> Verdict:
    """Write `whole_name(name, stage, num_stages, num_layers)`: "blocks.0.up.weight" counted in a stage -> in the model.

    Layers are cut as `layer_ranges` does. Names without a layer stay.
    """
    if (verdict := unanswered(answer)) is not None:
        return verdict
    if not callable(answer):
        return wrong(f"expected a function of (name, stage, num_stages, num_layers), got {answer!r}")
    from ..models import layer_ranges

    for num_layers, num_stages in ((8, 2), (8, 4), (6, 4), (14, 4)):
        for stage, layers in enumerate(layer_ranges(num_layers, num_stages)):
            names = {f"blocks.{i}.up.weight": f"blocks.{layer}.up.weight" for i, layer in enumerate(layers)}
            names |= {"embedding.token.weight": "embedding.token.weight"} if stage == 0 else {}
            names |= {"head.scores.weight": "head.scores.weight"} if stage == num_stages - 1 else {}
            for local, expected in names.items():
                call = f"{local!r} on stage {stage} of {num_stages}, {num_layers} layers"
                try:
                    given = answer(local, stage, num_stages, num_layers)
                except Exception as error:  # the reader's code: whatever it raises is the answer to show
                    return wrong(f"{call}: your function raised {type(error).__name__}: {error}")
                if given != expected:
                    return wrong(f"{call}: got {given!r}, expected {expected!r}")
    return right("every layer finds its name, also where the layers don't divide evenly")


_STEPS = ("write to a new file", "sync the file", "rename it over the old one", "sync the folder")
STEPS = (_STEPS[2], _STEPS[3], _STEPS[0], _STEPS[1])  # as the exercise shows them


def commit(answer: object) -> Verdict:
    """The order of the four steps by which a checkpoint survives a loss of power at any moment."""
    if (verdict := unanswered(answer)) is not None:
        return verdict
    if not isinstance(answer, (list, tuple)) or sorted(map(str, answer)) != sorted(STEPS):
        return wrong(f"expected the four steps in an order, each once: {', '.join(STEPS)}")
    for done in range(len(answer) + 1):
        state = set(answer[:done])
        renamed, synced = _STEPS[2] in state, _STEPS[1] in answer[: answer.index(_STEPS[2])]
        written = _STEPS[0] in answer[: answer.index(_STEPS[2])]
        after = f'power fails after "{answer[done - 1]}"' if done else ""
        if renamed and not written:
            return wrong(f"{after}: the name leads to nothing: there was no new file to rename")
        if renamed and not synced:
            return wrong(f"{after}: the name may lead to a file whose data never reached the disk")
    if answer.index(_STEPS[1]) < answer.index(_STEPS[0]):
        return wrong("a file is synced before it is written")
    if answer[-1] != _STEPS[3]:
        return wrong(
            "when you say that it is saved, the new name may not have reached the disk: power fails, and it's old"
        )
    return right("at every moment the name leads to a whole file, the old or the new; at the end to the new")


def stale(answer: object) -> Verdict:
    """For each of the four runs of `cases()`, what wasn't restored: {"A": "nothing", ...}."""
    if (verdict := unanswered(answer)) is not None:
        return verdict
    if not isinstance(answer, dict) or set(answer) != set(_STALE):
        return wrong(f"expected a dict with the keys A, B, C and D, got {answer!r}")
    clues = {
        STATES[0]: "its first loss after the break is higher than before it, on whatever batch",
        STATES[1]: "its first loss after the break is exactly right, so weights and batch are; what acts only later?",
        STATES[2]: "its first loss after the break is its loss on batch 0",
        STATES[3]: "its losses are those of the uninterrupted run to six digits: that is rounding",
    }
    for name, lost in _STALE.items():
        if answer[name] not in STATES:
            return wrong(f"{name}: expected one of {', '.join(STATES)}; got {answer[name]!r}")
        if answer[name] != lost:
            return wrong(f"{name}: not {answer[name]}; {clues[lost]}")
    return right("each by the first number that differs")


def groups(answer: object) -> Verdict:
    """4 ranks, 5 ms a stage and group, 1 ms a message: the fewest groups of requests that keep every rank busy?"""
    traps = {
        4: "that fills the ranks when messages take no time: a group is away from rank 0 for 4 x (5 + 1) ms",
        6: "five are enough: 5 x 5 ms on rank 0 is already more than the 24 ms that a group is away and back",
        24: "that is the round trip in ms; how many turns of 5 ms fit in?",
        4.8: "a whole number of groups",
    }
    return number(answer, 5, "a round trip takes 4 x (5 + 1) = 24 ms; 5 groups keep a rank busy for 25", traps=traps)


def across_hosts(answer: object) -> Verdict:
    """12 stages on 3 hosts of 4 processes, 8 microbatches, a stage per rank: messages between hosts in a step?"""
    traps = {
        16: "that is the activations; their gradients come back",
        176: "that is all messages; most stay inside a host",
        48: "three hosts in a row have two borders",
        24: "8 microbatches cross each of 2 borders, twice",
        2: "that is the borders",
    }
    return number(answer, 32, "2 borders, 8 microbatches, an activation and a gradient each", traps=traps)


def resized(answer: object) -> Verdict:
    """Two runs of `small_gpt()` with `adam`: the first saved, the second went on from it with other stages."""
    from ..runtime import Run

    if (verdict := unanswered(answer)) is not None:
        return verdict
    if not isinstance(answer, (tuple, list)) or len(answer) != 2 or not all(isinstance(run, Run) for run in answer):
        return wrong("expected a pair of runs, (first, second), as Pool.train returns them")
    first, second = answer
    if first.schedule.num_stages == second.schedule.num_stages:
        return wrong(f"both have {first.schedule.num_stages} stages: go on with another number")
    if second.job.first_step != first.job.first_step + len(first.losses):
        return wrong(f"the second run starts at step {second.job.first_step}: resume what the first one saved")
    steps = second.job.first_step + len(second.losses)
    workload = small_gpt()
    if first.job.workload.name != workload.name or second.job.workload.name != workload.name:
        return wrong(f"the runs must train exercise.small_gpt(), {workload.name}")
    model = workload.build_whole()
    optimizer = adam(model.parameters())
    expected = [_step(workload, model, optimizer, step) for step in range(steps)]
    given = [*first.losses, *second.losses]
    for step, (a, b) in enumerate(zip(given, expected[first.job.first_step :], strict=True)):
        if not abs(a - b) <= 1e-4 * b:
            return wrong(f"the loss of step {step} is {a:.4f}, and of one uninterrupted process {b:.4f}")
    return right(f"{len(given)} losses, all those of one process that nothing interrupted")


def marked(path: str | os.PathLike) -> float:
    """When a fault struck: the time of its mark, in seconds of the system's clock."""
    return Path(path).stat().st_mtime
