"""Simulate a head whose vocabulary is spread over all ranks: its passes wait for every rank, next
to those of 1F1B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, permutations, product
from math import ceil

from ...actions import B, F
from ...costs import Costs, of_stage
from ...errors import accept, expect, number, positive_int
from ...links import with_links
from ...schedule import Schedule
from ...simulator import durations_of
from ...timeline import Span, Timeline, total
from ..planning import Case, Entry, message_time
from .items import Items
from .offload import check_sends, peak_of

Pass = tuple[str, int]  # "F", "S", "T" or "B", and a rank
Item = tuple[str, int, int]  # a pass, and a microbatch
ROUNDING = 1e-9  # of an interval


@dataclass(frozen=True)
class VocabularyParallel:
    """1F1B over stages without a head. The head's matrix is cut along the vocabulary, and each rank
    has a part.

    - `softmax`: time of pass S of a microbatch on a rank, once the last stage's output is there. It
      computes the logits of the rank's part, with their largest and their sum. In the unit of the
      costs.
    - `gradient`: time of pass T, once S is done on all ranks and the whole softmax is known.
    - `message`: time to hand the output to all ranks, before S, and again to add up its gradient
      over them. The largest and the sum, two numbers per token, take no time.
    - `waits`: 2 if T makes the output's gradient, so that the last stage's backward waits for T of
      all ranks. With 1, S prepares it, which makes S longer and T shorter. That backward then waits
      for S, and T computes weight gradients only.

    Yeung et al. 2024, arXiv:2411.05288, algorithms 1 (two waits) and 2 (one). The order comes from
    a building block. An interval is as long as an F, B, S and T of the slowest rank. In it each
    rank runs one of each, in the same order on all ranks. Each pass of a microbatch takes the first
    turn of its kind after what it waits for, as if messages took no time.

    >>> [max(VocabularyParallel(0.5, 0.5, waits=n).simulate(4, 16).peak_in_flight) for n in (1, 2)]
    [5, 6]
    """

    softmax: float
    gradient: float
    message: float = 0
    waits: int = 1

    def __post_init__(self) -> None:
        for name in ("softmax", "gradient", "message"):
            accept(self, **{name: number(name, getattr(self, name))})
        if positive_int("waits", self.waits) > 2:
            raise ValueError(f"waits must be 1 or 2, got {self.waits}")

    def simulate(
        self, num_ranks: int, num_microbatches: int, costs: Costs | None = None
    ) -> Timeline:
        """Predict a step. Passes S and T are the timeline's `others`, under these names, in the
        order of microbatches.

        Of the six orders of an interval it takes the one in which ranks hold least, and of those
        the fastest. `costs` are those of stages without a head. Raises ValueError for fewer than
        two ranks, and for costs that don't fit.
        """
        costs = Costs() if costs is None else costs
        expect(Costs, costs=costs)
        P, M = (
            positive_int("num_ranks", num_ranks, 2),
            positive_int("num_microbatches", num_microbatches),
        )
        costs.check(P, P)
        passes = {"S": self.softmax, "T": self.gradient}
        lasts = {
            (p, rank): passes[p] + of_stage(costs.overhead, rank)
            for p, rank in product(passes, range(P))
        }
        lasts |= {(str(kind), rank): costs.of(kind, rank) for kind in (F, B) for rank in range(P)}
        found = []
        for order in permutations("STB"):
            starts, interval = self._block(P, lasts, order)
            at = {
                (*one, m): round(first / interval + m, 9)
                for one, first in starts.items()
                for m in range(M)
            }
            turns = sorted(at, key=lambda item: (at[item], "FSTB".index(item[0])))  # noqa: B023
            rows = [[item for item in turns if item[1] == rank] for rank in range(P)]
            found.append(self._run(rows, costs, lasts))
        return min(found, key=lambda each: (max(each.peak_in_flight), each.makespan))

    def _needs(self, kind: str, rank: int, num_ranks: int) -> list[Pass]:
        """The passes of its microbatch for which a pass waits, of one rank or of all."""
        last = num_ranks - 1
        if kind == "F":
            return [("F", rank - 1)] if rank else []
        if kind == "S":
            return [("F", last)]
        if kind == "B" and rank < last:
            return [("B", rank + 1)]
        return [
            ("T" if kind == "B" and self.waits == 2 else "S", each) for each in range(num_ranks)
        ]

    def _block(
        self, P: int, lasts: dict[Pass, float], order: Sequence[str]
    ) -> tuple[dict[Pass, float], float]:
        """When one microbatch's passes start, if the next one starts after every interval, and the
        interval.
        """
        interval = max(sum(lasts[kind, rank] for kind in "FSTB") for rank in range(P))
        starts: dict[Pass, float] = {}
        for kind, ranks in zip(
            "FSTB", (range(P), range(P), range(P), reversed(range(P))), strict=True
        ):
            for rank in ranks:
                needs = self._needs(kind, rank, P)
                ready = max((starts[each] + lasts[each] for each in needs), default=0)
                if kind == "F":
                    starts[kind, rank] = ready
                    continue
                before = order[: order.index(kind)]
                turn = starts["F", rank] + sum(lasts[each, rank] for each in ("F", *before))
                starts[kind, rank] = (
                    turn + max(0, ceil((ready - turn) / interval - ROUNDING)) * interval
                )
        return starts, interval

    def _run(
        self, rows: Sequence[Sequence[Item]], costs: Costs, lasts: dict[Pass, float]
    ) -> Timeline:
        """Every rank runs its row, each pass as soon as it can."""
        actions = [[item for item in row if item[0] in "FB"] for row in rows]
        schedule = Schedule(
            [[f"{rank}{kind}{m}" for kind, rank, m in row] for row in actions], "1F1B, head spread"
        )
        plain, *columns = with_links(schedule.graph, costs, durations_of(schedule, costs))
        items, ids = Items(*map(list, columns)), {item: i for i, item in enumerate(chain(*actions))}
        spread = [item for item in chain(*rows) if item not in ids]
        ids |= {item: items.new(lasts[item[:2]]) for item in spread}
        turns: list[list[int]] = [[] for _ in rows]
        for kind, rank, m in chain(*rows):
            # what all ranks are given, or have to give
            if kind in "ST" or (kind == "B" and rank == len(rows) - 1):
                late = 0 if kind == "T" else self.message
                turns[rank] += [
                    items.new(0, ids[*one, m], late) for one in self._needs(kind, rank, len(rows))
                ]
            turns[rank].append(ids[kind, rank, m])
        starts, ends = items.run([*turns, *plain[len(rows) :]])
        others, count = (
            tuple(Span(x[1], x[0], starts[ids[x]], ends[ids[x]]) for x in spread),
            schedule.columns.bounds[-1],
        )
        return Timeline(schedule, starts[:count], ends[:count], costs.unit, others=others)


def vocabulary_row(
    case: Case, num_microbatches: int, *, waits: int = 1, **options: object
) -> Entry:
    """A row of the case's ledger, like `Case.row`, for 1F1B with the head's matrix over all ranks.

    S takes one of the head's three products, or two with a single wait, and T takes the rest. From
    S to T every rank keeps its part of the softmax and the last stage's output. This output goes to
    all ranks around a ring, and its gradient is added up around it, each as fast as a message to
    the next rank. The load that this puts on the network isn't counted.

    >>> vocabulary_row(Case(num_ranks=16, gigabits=100), 64)
                              M   step    busy  fullest rank  fits in 80 GB  a billion tokens
    1F1B, head over 16 ranks  64  5.98 s  71 %  56.9 GB       yes            $101 in 3.2 h
    """
    check_sends(**options)
    row = case.row("1F1B", num_microbatches, **options)
    costs = case.plan("1F1B", num_microbatches, row.microbatch, **options).costs
    P, model, machine = case.num_ranks, case.model, case.machine
    head, last = model.head_flops(row.microbatch) / machine.flops, (0,) * (P - 1) + (1,)
    names = ("forward", "backward_input", "backward_weight")
    bare = {
        name: [t - head * at for t, at in zip(getattr(costs, name), last, strict=True)]
        for name in names
    }
    message = message_time(
        model.boundary_bytes(row.microbatch), machine.between.latency, machine.between.bandwidth
    )
    spread = VocabularyParallel((3 - waits) * head / P, waits * head / P, message, waits)
    timeline = spread.simulate(P, num_microbatches, replace(costs, **bare))
    state = case.state.bytes() * model.table_parameters / 1e9
    moved = [
        held + state * (1 / P - at) for held, at in zip(row.memory.parameters, last, strict=True)
    ]
    memory = replace(row.memory, parameters=moved)
    softmax = row.microbatch * model.sequence * model.bytes_each * model.vocabulary / P
    each = (softmax + model.boundary_bytes(row.microbatch)) / 1e9
    most = [_most_between(timeline, rank) * each for rank in range(P)]
    held = tuple(map(sum, zip(timeline.schedule.peak_held(memory), most, strict=True)))
    step = row.step_s - row.timeline.makespan + timeline.makespan
    busy = (total(timeline.busy) / P + 3 * head / P * num_microbatches) / step
    what = f"1F1B, head over {P} ranks"
    return replace(
        row, what=what, step_s=step, busy=busy, held_gb=held, timeline=timeline, memory=memory
    )


def _most_between(timeline: Timeline, rank: int) -> float:
    """How many microbatches a rank has at once between the start of S and the end of T."""
    own = [span for span in timeline.others if span.rank == rank]
    return peak_of([(span.start, 1) if span.action == "S" else (span.end, -1) for span in own])
