"""What an action waits for. The only module that knows: everything else asks here.

The rule, for stage s of S and microbatch m:

    F(s, m)        waits for F(s-1, m)                                            unless s is the first stage
    B or I (s, m)  waits for F(s, m), and for the B or I (s+1, m)                 unless s is the last stage
    W(s, m)        waits for I(s, m)

All actions of one stage on one microbatch run on one rank, so what crosses ranks is the output of a forward and the
input gradient of a backward: at most one message per action.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

from .actions import INPUT_GRADIENT, RECV_B, RECV_F, SEND_B, SEND_F, Action, B, F, I, Kind, Overlap, W, parts

Row = Sequence[Action | Overlap]


class Need(NamedTuple):
    """One thing an action waits for: any of `kinds` of a stage on a microbatch."""

    stage: int
    kinds: tuple[Kind, ...]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{'/'.join(self.kinds)}{self.microbatch}"


def needs(action: Action, num_stages: int) -> tuple[Need, ...]:
    """What `action` waits for; first what another stage produces, then what its own stage does."""
    stage, kind, m = action
    if kind is F:
        return (Need(stage - 1, (F,), m),) if stage > 0 else ()
    if kind is W:
        return (Need(stage, (I,), m),)
    own = Need(stage, (F,), m)
    return (Need(stage + 1, INPUT_GRADIENT, m), own) if stage < num_stages - 1 else (own,)


class Message(NamedTuple):
    """What one stage gives another: `send` names it at the producer, `receive` at the consumer."""

    send: Action
    receive: Action


def outgoing(action: Action, num_stages: int) -> Message | None:
    """What `action` produces for another stage; None when nothing."""
    stage, kind, m = action
    if kind is F and stage < num_stages - 1:
        return Message(Action(stage, SEND_F, m), Action(stage + 1, RECV_F, m))
    if kind in INPUT_GRADIENT and stage > 0:
        return Message(Action(stage, SEND_B, m), Action(stage - 1, RECV_B, m))
    return None


def incoming(action: Action, num_stages: int) -> Action | None:
    """The receive that brings what `action` needs of another stage; None when it needs nothing of another."""
    stage, kind, m = action
    if kind is F and stage > 0:
        return Action(stage, RECV_F, m)
    if kind in INPUT_GRADIENT and stage < num_stages - 1:
        return Action(stage, RECV_B, m)
    return None


@dataclass(frozen=True)
class Columns:
    """The actions of all rows, one after the other, as flat lists: what a pass over millions of actions reads.

    Every action has one id, counted along rank 0's row, then rank 1's, and so on. The halves of an overlap have one
    each: first the forward's, a gate that waits for the forward's input and takes no time, then the backward's, which
    stands for the pair from then on.
    """

    bounds: tuple[int, ...]  # rank r's ids are range(bounds[r], bounds[r + 1])
    stages: list[int]  # of every id
    kinds: list[Kind]
    microbatches: list[int]
    gates: tuple[int, ...]  # ids of the forward halves of overlaps
    num_stages: int
    num_microbatches: int

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Columns:
        """Lay out `rows`. Raises ValueError for a stage or microbatch that isn't a whole number of at least 0."""
        stages: list[int] = []
        kinds: list[Kind] = []
        microbatches: list[int] = []
        gates: list[int] = []
        bounds = [0]
        for row in rows:
            if Overlap in set(map(type, row)):
                expanded: list[Action] = []
                for item in row:
                    if type(item) is Overlap:
                        gates.append(bounds[-1] + len(expanded))
                    expanded += parts(item)
                row = expanded
            if row:
                for column, values in zip((stages, kinds, microbatches), zip(*row, strict=True), strict=True):
                    column += values
            bounds.append(len(stages))
        for name, column in (("stage", stages), ("microbatch", microbatches)):
            if set(map(type, column)) - {int} or min(column, default=0) < 0:
                wrong = next(x for x in column if type(x) is not int or x < 0)
                raise ValueError(f"an action's {name} must be a whole number of at least 0, got {wrong!r}")
        counts = max(stages, default=-1) + 1, max(microbatches, default=-1) + 1
        return cls(tuple(bounds), stages, kinds, microbatches, tuple(gates), *counts)

    def ranks(self) -> list[int]:
        """The rank of every id."""
        lengths = (hi - lo for lo, hi in pairwise(self.bounds))
        return list(chain.from_iterable([rank] * n for rank, n in enumerate(lengths)))


@dataclass(frozen=True)
class Graph:
    """What every id waits for, in integers."""

    dep: list[int]  # the id that i waits for besides the one before it in the row, or -1
    complete: bool  # each stage has each microbatch's F, then its B, or I and W, once, in this order on one rank


def build_graph(columns: Columns) -> Graph:
    """Find what each id waits for. Linear; never raises: see `Graph.complete`."""
    bounds, kinds, num_microbatches = columns.bounds, columns.kinds, columns.num_microbatches
    keys = [stage * num_microbatches + m for stage, m in zip(columns.stages, columns.microbatches, strict=True)]

    # Where each key's F, its B or I, and its B or W stand. The paddings are what lies before stage 0 and after the
    # last stage, so that the rule below needs no case for them.
    nothing = [-1] * num_microbatches
    forward = nothing * columns.num_stages
    backward, weight = forward + nothing, forward[:]
    ordered = True
    for first, end in pairwise(bounds):
        i = first
        for kind, key in zip(kinds[first:end], keys[first:end], strict=True):
            if kind is F:
                forward[key] = i
            elif kind is B or kind is I:
                backward[key] = i
                if forward[key] < first:
                    ordered = False
                if kind is B:
                    weight[key] = i
            elif kind is W:
                weight[key] = i
                if backward[key] < first:
                    ordered = False
            i += 1
    for gate in columns.gates:
        forward[keys[gate]] = gate + 1
    n = len(forward)
    count = {kind: kinds.count(kind) for kind in (F, B, I, W)}
    once = (
        count[F] == count[B] + count[I] == n
        and count[I] == count[W] == len(kinds) - 2 * n
        and -1 not in forward
        and backward.count(-1) == num_microbatches
        and -1 not in weight
    )

    before = nothing + forward
    dep = [
        before[key] if kind is F else -1 if kind is W else backward[key + num_microbatches]
        for kind, key in zip(kinds, keys, strict=True)
    ]
    return Graph(dep, ordered and once)
