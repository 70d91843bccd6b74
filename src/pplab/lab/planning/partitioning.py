"""Where to cut a model: the contiguous split into stages whose slowest stage is fastest, by dynamic
programming.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from ...costs import PerStage, check_length, of_stage, per_stage
from ...errors import number, positive_int

# (stage, its layers) -> cost; infinite for what may not be
StageCost = Callable[[int, range], float]


def partition(
    costs: Sequence[float] | StageCost,
    num_stages: int,
    *,
    num_layers: int | None = None,
    activations: Sequence[float] | None = None,
    parameters: Sequence[float] | None = None,
    in_flight: PerStage = 1,
    cap: PerStage | None = None,
) -> tuple[int, ...]:
    """How many layers each stage gets, so that the largest cost of a stage is as small as it can
    be.

    Layers stay in order, and every stage gets at least one. `costs` has one number per layer, or is
    a function of (stage, range of its layers), with `num_layers`, that returns infinity for what
    may not be. Among equally good splits the most even one wins (least sum of squares), then the
    one with fewest layers on the first stages, which hold the most microbatches.

    With a `cap` (a number, or one per stage) a stage may hold no more than that: the `parameters`
    of its layers, and their `activations` for as many microbatches as it has `in_flight`, such as a
    schedule's `peak_in_flight`. All in one unit. Exact, in time num_stages * num_layers**2.
    ValueError when nothing fits.

    >>> partition([10, 10, 10, 10, 20, 20, 20, 20], 4)
    (3, 2, 1, 2)
    """
    num_stages = positive_int("num_stages", num_stages)
    if callable(costs):
        if num_layers is None:
            raise ValueError("costs is a function: say how many layers there are with num_layers")
        if activations is not None or parameters is not None or cap is not None:
            raise ValueError(
                "costs is a function: let it return infinity for what doesn't fit, and give no cap"
            )
        cost, num_layers = costs, positive_int("num_layers", num_layers)
    else:
        known = _per_layer("costs", costs, len(costs))
        if num_layers not in (None, len(known)):
            raise ValueError(
                f"num_layers is {num_layers}, and costs has {len(known)} values: leave num_layers "
                "out"
            )
        cost, num_layers = _sums(known), len(known)
    if num_stages > num_layers:
        raise ValueError(
            f"{num_layers} layers can't make {num_stages} stages: every stage needs a layer. Use "
            f"at most {num_layers} stages"
        )
    if cap is None:
        if activations is not None or parameters is not None:
            raise ValueError(
                "activations and parameters bound nothing without a cap: give one, or leave them "
                "out"
            )
        return _fair(cost, num_stages, num_layers, _NOTHING_FITS)
    held = _held(
        activations, parameters, _per_stage("in_flight", in_flight, num_stages), num_layers
    )
    caps = _per_stage("cap", cap, num_stages)
    full = lambda stage, layers: held(stage, layers) / caps[stage] if caps[stage] else inf  # noqa: E731
    fits = lambda stage, layers: cost(stage, layers) if held(stage, layers) <= caps[stage] else inf  # noqa: E731
    least = _smallest_maximum(full, num_stages, num_layers)
    needed = (
        f"{least:.4g} times the caps" if isinstance(cap, Sequence) else f"{least * caps[0]:.6g}"
    )
    return _fair(
        fits,
        num_stages,
        num_layers,
        f"no contiguous split into {num_stages} stages holds within cap={cap!r}; the least that "
        f"one needs is {needed}. Raise the cap, keep fewer microbatches in flight, recompute, or "
        "use more stages",
    )


_NOTHING_FITS = "every contiguous split costs infinity: what the function allows leaves no split"


def _smallest_maximum(cost: StageCost, num_stages: int, num_layers: int) -> float:
    """The least that the largest cost of a stage can be."""
    # of the layers from here on, in the stages from this one on; none: nothing left
    best = [inf] * num_layers + [0.0]
    for stage in reversed(range(num_stages)):
        ends = _ends(stage, num_stages, num_layers)
        best = [
            min((max(cost(stage, range(i, j)), best[j]) for j in ends if j > i), default=inf)
            for i in range(num_layers)
        ] + [inf]
    return best[0]


def _fair(cost: StageCost, num_stages: int, num_layers: int, fault: str) -> tuple[int, ...]:
    """Of the splits with the least largest cost, the one with the least sum of squares, then of
    fewest early layers.
    """
    most = _smallest_maximum(cost, num_stages, num_layers)
    if most == inf:
        raise ValueError(fault)
    Found = tuple[float, tuple[int, ...]]
    best: list[Found] = [(inf, ())] * num_layers + [(0.0, ())]
    for stage in reversed(range(num_stages)):
        ends = _ends(stage, num_stages, num_layers)

        def found(
            i: int, stage: int = stage, ends: range = ends, after: list[Found] = best
        ) -> Found:
            choices = ((c, j) for j in ends if j > i and (c := cost(stage, range(i, j))) <= most)
            return min(
                ((c * c + after[j][0], (j - i, *after[j][1])) for c, j in choices),
                default=(inf, ()),
            )

        best = [found(i) for i in range(num_layers)] + [(inf, ())]
    return best[0][1]


def _ends(stage: int, num_stages: int, num_layers: int) -> range:
    """Where a stage may end: later ones need a layer each, and the last one takes the rest."""
    last = num_layers - (num_stages - 1 - stage)
    return range(last if stage == num_stages - 1 else stage + 1, last + 1)


def _sums(values: Sequence[float]) -> StageCost:
    upto = [0, *accumulate(values)]
    return lambda stage, layers: upto[layers.stop] - upto[layers.start]


def _held(
    activations: Sequence[float] | None,
    parameters: Sequence[float] | None,
    in_flight: Sequence[float],
    num_layers: int,
) -> StageCost:
    """What a stage with these layers holds at its peak."""
    if activations is None and parameters is None:
        raise ValueError(
            "a cap needs to know what layers hold: give activations, parameters or both"
        )
    kept, constant = (
        _sums([0] * num_layers if given is None else _per_layer(name, given, num_layers))
        for name, given in (("activations", activations), ("parameters", parameters))
    )
    return lambda stage, layers: in_flight[stage] * kept(stage, layers) + constant(stage, layers)


def _per_layer(name: str, values: Sequence[float], num_layers: int) -> list[float]:
    values = [number(name, value) for value in values]
    if not values or len(values) != num_layers:
        raise ValueError(
            f"{name} must have one value for each of {num_layers or 'at least 1'} layers, got "
            f"{values!r}"
        )
    return values


def _per_stage(name: str, value: PerStage, num_stages: int) -> list[float]:
    found = per_stage(name, value)
    check_length(name, found, num_stages)
    return [of_stage(found, stage) for stage in range(num_stages)]
