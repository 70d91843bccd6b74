"""What backwards compute again, so that less is kept: whole layers, or modules of every layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ...errors import unknown
from .layers import Model
from .stage_costs import Asked, whole_numbers

# what to compute again: all layers, so many of each stage, or modules of every layer
Recompute = bool | Sequence[int] | Sequence[str]


def recomputed_of(
    model: Model, layers: Sequence[int], recompute: Recompute
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """How many layers of each stage run their forward again, and which modules of all."""
    if isinstance(recompute, bool):
        return tuple(n * recompute for n in layers), ()
    if isinstance(recompute, Sequence) and recompute and isinstance(recompute[0], str):
        # FlashAttention computes its scores again in any case
        known = {name for kind in model.kinds for part in kind.parts for name in part.again}
        for name in {*recompute} - known - {"core_attn"}:
            raise unknown("module to recompute in these layers", name, sorted(known))
        return (0,) * len(layers), tuple(recompute)
    if not whole_numbers(recompute, len(layers)) or any(
        r > n for r, n in zip(recompute, layers, strict=True)
    ):
        raise ValueError(
            "recompute must be True, or say how many of each stage's "
            f"{', '.join(map(str, layers))} layers run their forward again, or name modules, got "
            f"{recompute!r}"
        )
    return tuple(recompute), ()


def leaner(asked: Asked) -> Iterator[Asked]:
    """The same with one module that runs again, with two, and so on: those first that take least
    for the bytes that they save.
    """
    kinds, layers = asked.long.kinds, Counter(kind.name for kind in asked.long.every)
    names = sorted({name for each in kinds for part in each.parts for name in part.again})

    def price(name: str) -> float:
        runs = [(kind.again((name,)), layers[kind.name]) for kind in kinds]
        takes = sum(n * asked.times_of(kind).forward for kind, n in runs)
        return takes / sum(n * asked.kept_of(kind) for kind, n in runs)

    names.sort(key=price)
    for count in range(len(names)):
        yield replace(asked, modules=tuple(names[: count + 1]))


def fitted(
    asked: Asked,
    ranks: Sequence[Sequence[int]],
    held: Callable[[Asked], Sequence[float]],
    room: float,
    modules: bool = True,
) -> Asked | None:
    """What computes least again of what fits on every rank: nothing, `modules` of every layer, or
    the fewest whole layers. None where nothing fits. `ranks` have these stages, and hold so much.
    """
    now, least = held(asked), held(replace(asked, recomputed=asked.layers))
    if max(now) <= room:
        return asked
    found, again = [], [0] * len(asked.layers)
    lean = [*leaner(asked)] if modules else []
    if lean and max(held(lean[-1])) <= room:
        found.append(next(trial for trial in lean if max(held(trial)) <= room))
    while max(least) <= room < max(now):
        for stages, most, fewest in zip(ranks, now, least, strict=True):
            if (over := most - room) > 0:
                some = sum(asked.layers[s] - again[s] for s in stages)
                for _ in range(min(some, max(1, int(some * over / max(most - fewest, 1))))):
                    again[max(stages, key=lambda s: asked.layers[s] - again[s])] += 1
        now = held(replace(asked, recomputed=tuple(again)))
    if any(again):
        found.append(replace(asked, recomputed=tuple(again)))
    return min(found, key=lambda trial: trial.again_s, default=None)
