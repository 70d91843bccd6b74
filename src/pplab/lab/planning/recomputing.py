"""What backwards compute again, so that less is kept: whole layers, or modules of every layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import gt

from ...errors import unknown
from ...schedule import Schedule
from .layers import Model
from .megatron import MODULES
from .stage_costs import Asked, whole_numbers

# what to compute again: all layers, so many of each stage, or modules of every layer
Recompute = bool | Sequence[int] | Sequence[str]


def recomputed_of(
    model: Model, layers: Sequence[int], recompute: Recompute
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """How many layers of each stage run their forward again, and which modules of all that have
    them: the others do nothing, as in Megatron-LM.
    """
    if isinstance(recompute, bool):
        return tuple(n * recompute for n in layers), ()
    if isinstance(recompute, Sequence) and str in map(type, recompute):
        for name in {*recompute} - {*MODULES}:
            raise unknown("module to recompute", name, MODULES)
        known = {name for kind in model.kinds for part in kind.parts for name in part.again}
        return (0,) * len(layers), outermost([name for name in recompute if name in known])
    if not whole_numbers(recompute, len(layers)) or any(map(gt, recompute, layers)):
        raise ValueError(
            "recompute must be True, or say how many of each stage's "
            f"{', '.join(map(str, layers))} layers run their forward again, or name modules, got "
            f"{recompute!r}"
        )
    return tuple(recompute), ()


def outermost(names: Collection[str]) -> tuple[str, ...]:
    """Each once, and "moe" without what it has in it: the experts' function and shared experts."""
    inside = ("moe_act", "shared_experts") if "moe" in names else ()
    return tuple(name for name in dict.fromkeys(names) if name not in inside)


def leaner(asked: Asked) -> Iterator[Asked]:
    """The same with one module that runs again and frees something, with two, and so on, the cheap
    ones first.
    """
    names: list[str] = []
    for name in MODULES:
        if any(asked.kept_of(kind.again([name])) for kind in asked.long.kinds):
            names.append(name)
            yield replace(asked, modules=outermost(names))


def fitted(
    asked: Asked, rows: Schedule, parameters: Sequence[float], modules: bool = True
) -> Asked | None:
    """What computes least again of what fits on every rank: nothing, the first `leaner` with its
    `modules`, or the fewest whole layers. None where nothing fits. The stages' `parameters` take so
    many bytes.
    """
    room = asked.machine.memory - asked.machine.reserved

    def held(trial: Asked) -> tuple[float, ...]:
        return rows.peak_held(trial.stage_memory(parameters))

    if max(now := held(asked)) <= room:
        return asked
    least = held(replace(asked, recomputed=asked.layers))
    again = [0] * len(asked.layers)
    found = []
    if modules:
        found += islice((trial for trial in leaner(asked) if max(held(trial)) <= room), 1)
    while max(least) <= room < max(now):
        for rank, (most, fewest) in enumerate(zip(now, least, strict=True)):
            stages, over = rows.stages_of(rank), most - room
            if over > 0:
                some = sum(asked.layers[s] - again[s] for s in stages)
                for _ in range(min(some, max(1, int(some * over / max(most - fewest, 1))))):
                    again[max(stages, key=lambda s: asked.layers[s] - again[s])] += 1
        now = held(replace(asked, recomputed=tuple(again)))
    if any(again):
        found.append(replace(asked, recomputed=tuple(again)))
    return min(found, key=lambda trial: trial.again_s, default=None)
