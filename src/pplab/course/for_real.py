"""Checkers of chapter 13; what its runs need comes from `faults`."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import faults
from .faults import FAULTS, STATES, Fault, adam, alive, cases, clips_alone, marked, small_gpt  # noqa: F401
from .verdict import (
    Verdict,
    Wrong,
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


@checker("a function of (gradients, all_reduce, limit)")
def clipper(answer: object) -> Verdict:
    """Write `clip(gradients, all_reduce, limit)`, called on every rank at once: scales the rank's gradients in place.

    `gradients` is the rank's list of tensors, `all_reduce(number)` returns the sum of all ranks' numbers. Returns the
    norm.
    """
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
        with told(f"{what}: "):
            found = _on_ranks(answer, ranks, limit)
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


def _on_ranks(clip: Callable, ranks: list[list[Tensor]], limit: float) -> list:
    """Call `clip` on all ranks at once, a thread each; what they returned. `Wrong` for what one raised, or waited for.

    A rank that returns leaves the others alone in their next `all_reduce`: they needn't wait for it.
    """
    changed = threading.Condition()
    sent: list[list[float]] = [[] for _ in ranks]  # what each rank has given to its calls of all_reduce
    ended, found, errors = set(), [None] * len(ranks), []

    def work(rank: int) -> None:
        def all_reduce(value: float) -> float:
            with changed:
                sent[rank].append(float(value))
                call = len(sent[rank])
                changed.notify_all()
                missing = {r for r, numbers in enumerate(sent) if len(numbers) < call}
                while missing and not missing & ended and changed.wait(5):
                    missing = {r for r in missing if len(sent[r]) < call}
                if missing:
                    raise threading.BrokenBarrierError
                return sum(numbers[call - 1] for numbers in sent)

        try:
            found[rank] = clip(ranks[rank], all_reduce, limit)
        except threading.BrokenBarrierError:
            errors.append((1, "some ranks called all_reduce and waited for a rank that didn't"))
        except Exception as error:  # the reader's code: whatever it raises is the answer to show
            errors.append((0, f"rank {rank} raised {type(error).__name__}: {error}"))
        with changed:
            ended.add(rank)
            changed.notify_all()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(12)
    if errors:
        raise Wrong(min(errors)[1])
    return found


@checker("a function of (name, stage, num_stages, num_layers)")
def whole_name(answer: object) -> Verdict:
    """Write `whole_name(name, stage, num_stages, num_layers)`: "blocks.0.up.weight" counted in a stage -> in the model.

    Layers are cut as `layer_ranges` does. Names without a layer stay.
    """
    from ..lab.models import layer_ranges

    for num_layers, num_stages in ((8, 2), (8, 4), (6, 4), (14, 4)):
        for stage, layers in enumerate(layer_ranges(num_layers, num_stages)):
            names = {f"blocks.{i}.up.weight": f"blocks.{layer}.up.weight" for i, layer in enumerate(layers)}
            names |= {"embedding.token.weight": "embedding.token.weight"} if stage == 0 else {}
            names |= {"head.scores.weight": "head.scores.weight"} if stage == num_stages - 1 else {}
            for local, expected in names.items():
                call = f"{local!r} on stage {stage} of {num_stages}, {num_layers} layers"
                with readers_code(f"{call}: your function raised"):
                    given = answer(local, stage, num_stages, num_layers)
                if given != expected:
                    return wrong(f"{call}: got {given!r}, expected {expected!r}")
    return right("every layer finds its name, also where the layers don't divide evenly")


WRITE, SYNC = "write to a new file", "sync the file"
RENAME, SYNC_FOLDER = "rename it over the old one", "sync the folder"
STEPS = (RENAME, SYNC_FOLDER, WRITE, SYNC)  # as the exercise shows them


@one_or_several
@checker()
def commit(answer: object) -> Verdict:
    """The order of the four steps by which a checkpoint survives a loss of power at any moment."""
    if not isinstance(answer, (list, tuple)) or sorted(map(str, answer)) != sorted(STEPS):
        return wrong(f"expected the four steps in an order, each once: {', '.join(STEPS)}")
    before, after = answer[: answer.index(RENAME)], f'power fails after "{RENAME}"'
    if WRITE not in before:
        return wrong(f"{after}: the name leads to nothing: there was no new file to rename")
    if SYNC not in before:
        return wrong(f"{after}: the name may lead to a file whose data never reached the disk")
    if answer.index(SYNC) < answer.index(WRITE):
        return wrong("a file is synced before it is written")
    if answer[-1] != SYNC_FOLDER:
        return wrong(
            "when you say that it is saved, the new name may not have reached the disk: power fails, and it's old"
        )
    return right("at every moment the name leads to a whole file, the old or the new; at the end to the new")


@checker_of_each("ABCD")
def stale(answer: object) -> Verdict:
    """For each of the four runs of `cases()`, what wasn't restored: {"A": "nothing", ...}."""
    clues = {
        STATES[0]: "its first loss after the break is higher than before it, on whatever batch",
        STATES[1]: "its first loss after the break is exactly right, so weights and batch are; what acts only later?",
        STATES[2]: "its first loss after the break is its loss on batch 0",
        STATES[3]: "its losses are those of the uninterrupted run to six digits: that is rounding",
    }
    if name := first_wrong(answer, faults.LOST, STATES):
        return wrong(f"{name}: not {answer[name]}; {clues[faults.LOST[name]]}")
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


@one_or_several
@checker()
def resized(answer: object) -> Verdict:
    """Two runs of `small_gpt()` with `adam`: the first saved, the second went on from it with other stages."""
    from ..runtime import Run

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
    with faults.one_thread():
        expected = [faults.train_step(workload, model, optimizer, step) for step in range(steps)]
    given = [*first.losses, *second.losses]
    for step, (a, b) in enumerate(zip(given, expected[first.job.first_step :], strict=True)):
        if not abs(a - b) <= 1e-4 * b:
            return wrong(f"the loss of step {step} is {a:.4f}, and of one uninterrupted process {b:.4f}")
    return right(f"{len(given)} losses, all those of one process that nothing interrupted")
