"""What an action on layers with experts consists of, and how long it takes, alone or beside another.

A layer's forward computes, is on the wire, computes, and is on the wire again:

    attention   dispatch   experts   combine

Its input gradient has the same pieces in the opposite order, the gradient of its weights those two that compute. One
rank computes one thing at a time. While one half of an overlap is on the wire, the other computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from ...actions import B, F, I, Kind, W
from ...costs import Costs
from ...errors import number
from ...schedule import Schedule

ATTENTION, DISPATCH, EXPERTS, COMBINE = "attention", "dispatch", "experts", "combine"
ORDER = {I: 0, B: 0, F: 1, W: 2}  # who goes first where two could: it is on the wire before it computes much
_LAYER = ((ATTENTION, True), (DISPATCH, False), (EXPERTS, True), (COMBINE, False))  # and whether it computes

Piece = tuple[str, bool, float]  # its name, whether it computes, how long it takes


@dataclass(frozen=True)
class Pieces:
    """How long the pieces of a layer's forward take, in ms. A weight gradient: what its compute takes."""

    attention: float = 1.0
    dispatch: float = 1.0
    experts: float = 1.0
    combine: float = 1.0

    def __post_init__(self) -> None:
        for name, _ in _LAYER:
            number(name, getattr(self, name))

    @property
    def seconds(self) -> dict[str, float]:
        """By the pieces' names."""
        return {name: getattr(self, name) / 1e3 for name, _ in _LAYER}

    def of(self, kind: Kind, layers: int = 1) -> list[Piece]:
        """The pieces of an action of this kind on so many layers, in order."""
        times = 2 if kind is B else 1
        forward = [(name, computes, getattr(self, name) * (times if computes else 1)) for name, computes in _LAYER]
        one = forward if kind is F else [piece for piece in forward[::-1] if kind is not W or piece[1]]
        return one * layers

    def lasts(self, *halves: tuple[Kind, int]) -> float:
        """How long actions take, each a kind and a number of layers, that run beside each other from one moment on.

        >>> Pieces().lasts((F, 1)), Pieces().lasts((B, 1)), Pieces().lasts((F, 1), (B, 1))
        (4.0, 6.0, 6.0)
        """
        halves = sorted(halves, key=lambda half: ORDER[half[0]])
        left, at, free = [self.of(*half) for half in halves], [0.0] * len(halves), 0.0
        while True:
            for half, pieces in enumerate(left):
                while pieces and not pieces[0][1]:
                    at[half] += pieces.pop(0)[2]
            if not any(left):
                return max(at)
            half = min((half for half, pieces in enumerate(left) if pieces), key=lambda half: at[half])
            at[half] = free = max(at[half], free) + left[half].pop(0)[2]

    def costs(self, schedule: Schedule, num_layers: int, latency: float = 0) -> Costs:
        """What the schedule's stages cost that have `num_layers` layers together, with a link's latency.

        ValueError unless they divide evenly.
        """
        layers, rest = divmod(num_layers, schedule.num_stages)
        if rest or not layers:
            raise ValueError(
                f"{num_layers} layers don't divide into {schedule.num_stages} equal stages: take a multiple of that"
            )
        pairs = combinations((F, B, I, W), 2)
        overlap = {(a, b): self.lasts((a, layers), (b, layers)) for a, b in pairs}
        forward, inputs, weights = (self.lasts((kind, layers)) for kind in (F, I, W))
        return Costs(forward, inputs, weights, latency=latency, overlap=overlap, unit="ms")
