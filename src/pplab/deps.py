"""What an action waits for. The only module that knows: everything else asks here.

The rule, for stage s of S and microbatch m:

    F(s, m)        waits for F(s-1, m)                                            unless s is the first stage
    B or I (s, m)  waits for F(s, m), and for the B or I (s+1, m)                 unless s is the last stage
    W(s, m)        waits for I(s, m)

All actions of one stage on one microbatch run on one rank, so what crosses ranks is the output of a forward and the
input gradient of a backward: at most one message per action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from operator import gt, itemgetter
from typing import NamedTuple

from .actions import COMPUTE, INPUT_GRADIENT, RECV_B, RECV_F, SEND_B, SEND_F, Action, B, F, I, Kind, Overlap, W, parts

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


_OTHER_END = {SEND_F: (RECV_F, 1), RECV_F: (SEND_F, -1), SEND_B: (RECV_B, -1), RECV_B: (SEND_B, 1)}


def other_end(message: Action) -> Action:
    """The receive of a send, the send of a receive.

    >>> print(other_end(Action(2, SEND_B, 5)))
    1RECV_B5
    """
    kind, step = _OTHER_END[message.kind]
    return Action(message.stage + step, kind, message.microbatch)


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
    def of(cls, rows: Sequence[Row]) -> Columns:
        """Lay out `rows`. Raises ValueError for a stage or microbatch that isn't a whole number of at least 0."""
        gates: list[int] = []
        stages = [*map(itemgetter(0), chain.from_iterable(rows))]
        if Action in set(map(type, stages)):  # the first half of an overlap stands where a stage should
            rows, gates = _expanded(rows)
            stages = [*map(itemgetter(0), chain.from_iterable(rows))]
        kinds = [*map(itemgetter(1), chain.from_iterable(rows))]
        microbatches = [*map(itemgetter(2), chain.from_iterable(rows))]
        counts = (_count("stage", stages), _count("microbatch", microbatches))
        return cls((0, *accumulate(map(len, rows))), stages, kinds, microbatches, tuple(gates), *counts)

    def action(self, i: int) -> Action:
        """The action of an id."""
        return Action(self.stages[i], self.kinds[i], self.microbatches[i])

    def ranks(self) -> list[int]:
        """The rank of every id."""
        lengths = (hi - lo for lo, hi in pairwise(self.bounds))
        return list(chain.from_iterable([rank] * n for rank, n in enumerate(lengths)))


def _expanded(rows: Sequence[Row]) -> tuple[list[list[Action]], list[int]]:
    """The rows with both halves of every overlap, and the ids of their first halves."""
    expanded: list[list[Action]] = []
    gates: list[int] = []
    first = 0
    for row in rows:
        made: list[Action] = []
        for item in row:
            if type(item) is Overlap:
                gates.append(first + len(made))
            made += parts(item)
        expanded.append(made)
        first += len(made)
    return expanded, gates


def _count(name: str, column: list[int]) -> int:
    """One more than the largest of a column, all of whose values must be whole and at least 0."""
    values = set(column)
    if set(map(type, column)) - {int} or min(values, default=0) < 0:
        wrong = next(x for x in column if type(x) is not int or x < 0)
        raise ValueError(f"an action's {name} must be a whole number of at least 0, got {wrong!r}")
    return max(values, default=-1) + 1


@dataclass(frozen=True)
class Graph:
    """What every id waits for, in integers."""

    dep: list[int]  # the id that i waits for besides those before it in its row, or -1
    whole: bool  # each stage has each microbatch's F, and its B, or I and later W, once, all on one rank


def build_graph(columns: Columns) -> Graph:
    """Find what each id waits for. Linear; never raises: see `Graph.whole`.

    A microbatch m makes 2S hops: forward through S stages, and back. Hop h takes what is in slot h*M + m, and leaves
    what it makes in slot (h+1)*M + m: each F, B and I needs what lies M slots before its own. A W needs only that its
    I comes before it in the row; its slots lie behind the hops', with empty ones between.
    """
    S, M, kinds = columns.num_stages, columns.num_microbatches, columns.kinds
    num_hops, num_slots = (2 * S + 1) * M, (4 * S + 2) * M
    makes = dict.fromkeys(Kind, [num_slots - M] * S)  # of every stage, the first slot; communication has none
    makes[F] = [*range(M, (S + 1) * M, M)]
    makes[B] = makes[I] = [*range(2 * S * M, S * M, -M)]
    makes[W] = [*range(num_slots - 2 * M, num_hops, -2 * M)]
    slots = [makes[kind][s] + m for kind, s, m in zip(kinds, columns.stages, columns.microbatches, strict=True)]
    maker = [-1] * num_slots
    for i, slot in enumerate(slots):
        maker[slot] = i
    each_once = maker.count(-1) == num_slots - len(slots) and -1 not in maker[M:num_hops]
    whole = each_once and _is_paired(columns, maker, makes)
    for gate in columns.gates:
        maker[slots[gate]] = gate + 1
    return Graph([maker[slot - M] for slot in slots], whole)


def made_by(columns: Columns, graph: Graph) -> list[int]:
    """Of every id, the id that makes what it waits for: `graph.dep`, but the gate for an overlap's forward half."""
    pairs = {gate + 1 for gate in columns.gates}
    if not pairs:
        return graph.dep
    last = columns.num_stages - 1  # whose backward waits for its own forward
    return [
        d - 1 if d in pairs and (kind is F or stage == last) else d
        for d, kind, stage in zip(graph.dep, columns.kinds, columns.stages, strict=True)
    ]


def _is_paired(columns: Columns, maker: list[int], makes: Mapping[Kind, Sequence[int]]) -> bool:
    """Whether a stage's work on a microbatch is on one rank, with a W after every I and none after a B.

    For actions of which none is doubled, and no F or backward is missing.
    """
    M, kinds, ranks = columns.num_microbatches, columns.kinds, columns.ranks()
    found = set(kinds)
    rows = [columns.stages[first:end] for first, end in pairwise(columns.bounds)]
    one_rank_each = sum(len(set(row)) for row in rows) == columns.num_stages
    if one_rank_each and found == {F, B}:
        return True
    firsts = zip(makes[F], makes[B], makes[W], strict=True)
    of_stages = [[maker[first : first + M] for first in of_stage] for of_stage in firsts]
    if one_rank_each and found == {F, I, W}:
        return all(all(map(gt, weights, backwards)) for _, backwards, weights in of_stages)
    for ids in of_stages:
        for f, b, w in zip(*ids, strict=True):
            follows = w > b and ranks[w] == ranks[b]
            if ranks[f] != ranks[b] or (w >= 0 and not follows) or follows != (kinds[b] is I):
                return False
    return found <= COMPUTE
