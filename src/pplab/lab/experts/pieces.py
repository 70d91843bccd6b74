"""The pieces of an action on layers with experts, and how long the action takes, alone or together
with a second one.

A layer's forward computes, is on the wire, computes, and is on the wire again:

    attention   dispatch   experts   combine

Its input gradient has the same pieces in the opposite order, and the gradient of its weights has
the two that compute. A rank computes one thing at a time. While one half of an overlap is on the
wire, the other computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any

from ...actions import B, F, I, Kind, W
from ...costs import Costs
from ...errors import number, positive_int
from ...schedule import Schedule

ATTENTION, DISPATCH, EXPERTS, COMBINE = "attention", "dispatch", "experts", "combine"
# who goes first where two could: it is on the wire before it computes much
ORDER = {I: 0, B: 0, F: 1, W: 2}
# and whether it computes
_LAYER = ((ATTENTION, True), (DISPATCH, False), (EXPERTS, True), (COMBINE, False))

Piece = tuple[str, bool, float]  # its name, whether it computes, how long it takes
Half = tuple[Any, ...]  # what `Pieces.of` takes, from its kind on


@dataclass(frozen=True)
class Pieces:
    """How long the pieces of a layer's forward take, in ms. A weight gradient takes as long as what
    it computes.
    """

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

    def of(self, kind: Kind, layers: int = 1, again: int = 0, head: float = 0) -> list[Piece]:
        """The pieces of an action of this kind on so many layers, in order.

        Before the backward of `again` of the layers, their forward runs a second time. A stage with
        a `head` runs it after its layers in a forward, and before them in the other kinds. Raises
        ValueError for more layers again than there are.
        """
        layers = positive_int("layers of a half", layers, 0)
        if not 0 <= again <= layers:
            raise ValueError(
                f"some of a half's layers run again, got {again} of {layers}: give 0 to all of them"
            )
        times = 2 if kind is B else 1
        forward = [(name, computes, getattr(self, name)) for name, computes in _LAYER]
        last = [("head", True, head * times)] * (head > 0)
        if kind is F:
            return forward * layers + last
        back = [(name, computes, each * times**computes) for name, computes, each in forward[::-1]]
        if kind is W:
            return last + [piece for piece in back if piece[1]] * layers
        return last + back * (layers - again) + (forward + back) * again

    def at_best(self, one: Half, other: Half) -> float:
        """How long a pair takes in the best order of its pieces, when one computes and one is on
        the network at a time.

        A half is what `of` takes.

        >>> Pieces(1, 3, 4, 3).at_best((F, 1), (B, 1))
        18.0
        """
        return _at_best(self, one, other)

    def lasts(self, *halves: Half) -> float:
        """How long halves take that start together, as `Beside` paces them. The one that has waited
        longest computes first, and a piece on the network holds nothing up.

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
            half = min(
                (half for half, pieces in enumerate(left) if pieces), key=lambda half: at[half]
            )
            at[half] = free = max(at[half], free) + left[half].pop(0)[2]

    def costs(self, schedule: Schedule, num_layers: int, latency: float = 0) -> Costs:
        """The costs of the schedule's stages, which have `num_layers` layers together, with a
        link's latency.

        Raises ValueError unless the layers divide evenly.
        """
        layers, rest = divmod(num_layers, schedule.num_stages)
        if rest or not layers:
            raise ValueError(
                f"{num_layers} layers don't divide into {schedule.num_stages} equal stages: take a "
                "multiple of that"
            )
        pairs = combinations((F, B, I, W), 2)
        overlap = {(a, b): self.lasts((a, layers), (b, layers)) for a, b in pairs}
        forward, inputs, weights = (self.lasts((kind, layers)) for kind in (F, I, W))
        return Costs(forward, inputs, weights, latency=latency, overlap=overlap, unit="ms")


@cache
def _at_best(pieces: Pieces, one: Half, other: Half) -> float:
    """Count from the end to the start what is left once both begin a piece (Akers 1956, of two jobs
    on machines).

    Both go on until their next pieces would use the same stream at once. Then one waits until the
    other's is done.
    """
    a, b = ([each[1:] for each in pieces.of(*half)] for half in (one, other))
    left: dict[tuple[int, int], float] = {}
    for start in product(range(len(a), -1, -1), range(len(b), -1, -1)):
        (i, j), x, y = start, 0.0, 0.0  # x and y: when their next pieces begin
        while i < len(a) and j < len(b):
            (stream, first), (needed, second) = a[i], b[j]
            if stream == needed and max(x, y) < min(x + first, y + second):
                left[start] = min(x + first + left[i + 1, j], y + second + left[i, j + 1])
                break
            if x + first <= y + second:
                i, x = i + 1, x + first
            else:
                j, y = j + 1, y + second
        else:
            left[start] = max(
                x + sum(each for _, each in a[i:]), y + sum(each for _, each in b[j:])
            )
    return left[0, 0]
