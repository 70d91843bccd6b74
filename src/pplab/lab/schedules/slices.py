"""A sequence cut into slices: how long each slice takes where attention is causal, and what ranks
hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import sqrt

from ...actions import INPUT_GRADIENT, Action, I, Overlap, parts
from ...costs import DURATIONS, Costs, PerStage, check_length, of_stage, per_stage
from ...errors import ScheduleError, accept, expect, number, positive_int
from ...footprint import Memory
from ...schedule import Schedule
from ...simulator import simulate
from ...timeline import Timeline, total
from .sliced_schedules import check_slices

_BY_WORK = ("forward", "backward", "recompute")  # a later token takes longer
_BY_TOKENS = [name for name in (*DURATIONS, "message") if name not in (*_BY_WORK, "backward_input")]


@dataclass(frozen=True)
class Slices:
    """The lengths of a sequence's slices, in tokens or as shares, and how their work grows with
    their place.

    - `attention`: the share of attention in a stage's forward of a whole sequence, and in its
      backward. Give a number, or one per stage. A token attends to itself and all tokens before it,
      so attention's work up to a place grows as the square of the place. All other work, including
      weight gradients, takes the same time for every token.

    Costs and memory are those of a whole microbatch, as everywhere else, but every slice pays the
    costs' `overhead`.

    >>> from pplab import build
    >>> rows = build("Seq1F1B", num_ranks=4, num_microbatches=32, slices=4)
    >>> Slices.even(4).simulate(rows).makespan
    26.25
    >>> Slices.even(4, attention=0.5).shares
    (0.15625, 0.21875, 0.28125, 0.34375)
    """

    lengths: Sequence[float]
    attention: PerStage = 0

    def __post_init__(self) -> None:
        lengths = per_stage("lengths", self.lengths)
        if not isinstance(lengths, tuple) or not lengths or min(lengths) <= 0:
            raise ValueError(
                f"lengths must be those of the slices, each above 0, got {self.lengths!r}"
            )
        accept(self, lengths=lengths, attention=per_stage("attention", self.attention, 1))

    @classmethod
    def even(cls, slices: int, attention: PerStage = 0) -> Slices:
        """Slices of equal lengths, of which a later one takes longer because of attention."""
        return cls((1,) * positive_int("slices", slices), attention)

    @classmethod
    def balanced(
        cls, slices: int, attention: float, *, tokens: int | None = None, multiple: int = 1
    ) -> Slices:
        """Slices that take equal times, of which a later one is shorter. Of `tokens` tokens, the
        lengths are rounded to multiples of `multiple`, as fast kernels want them.

        >>> Slices.balanced(4, attention=0.5, tokens=8192, multiple=128).lengths
        (2944, 2176, 1664, 1408)
        """
        count, share = positive_int("slices", slices), number("attention", attention, 1)
        # Where w of the work is done, of (1 - a) x + a x^2:
        places = [
            2 * w / (sqrt((1 - share) ** 2 + 4 * share * w) + 1 - share)
            for w in (j / count for j in range(1, count))
        ]
        ends = [0, *places, 1]
        if tokens is not None:
            units, rest = divmod(positive_int("tokens", tokens), positive_int("multiple", multiple))
            if rest:
                raise ValueError(f"tokens = {tokens} isn't a multiple of {multiple}")
            ends = [multiple * round(units * end) for end in ends]
            if any(a == b for a, b in pairwise(ends)):
                raise ValueError(
                    f"{count} slices of {tokens} tokens leave one without {multiple} tokens: take "
                    "fewer"
                )
        return cls([b - a for a, b in pairwise(ends)], share)

    @property
    def count(self) -> int:
        """Number of slices of a sequence (k)."""
        return len(self.lengths)

    @cached_property
    def widths(self) -> tuple[float, ...]:
        """Every slice's share of the sequence, and so of what is held and sent, and of the work
        without attention.
        """
        return tuple(length / total(self.lengths) for length in self.lengths)

    @cached_property
    def triangles(self) -> tuple[float, ...]:
        """Every slice's share of the work of causal attention."""
        whole, ends = total(self.lengths), [*accumulate(self.lengths, initial=0)]
        return tuple((b * b - a * a) / whole**2 for a, b in pairwise(ends))

    @property
    def shares(self) -> tuple[float, ...] | tuple[tuple[float, ...], ...]:
        """Every slice's share of the time of a forward, and of a backward. They differ by stage if
        attention's share does.
        """
        if isinstance(self.attention, tuple):
            return tuple(self._mixed(share) for share in self.attention)
        return self._mixed(self.attention)

    def _mixed(self, share: float) -> tuple[float, ...]:
        return tuple(
            (1 - share) * w + share * t for w, t in zip(self.widths, self.triangles, strict=True)
        )

    def check(self, schedule: Schedule) -> None:
        """Raise ScheduleError unless the schedule can run with as many slices (see
        `check_slices`).
        """
        expect(Schedule, schedule=schedule)
        check_slices(schedule, self.count)
        check_length("attention", self.attention, schedule.num_stages)
        if schedule.columns.overlaps:
            raise ScheduleError(
                f"{schedule.name} runs two actions at once, and how long two slices take together "
                "isn't known",
                "take a schedule without overlaps",
            )

    def costs(self, schedule: Schedule, costs: Costs | None = None) -> Costs:
        """The costs of a schedule's slices, given those of whole microbatches, for `pplab.simulate`
        and `lab.Pace`.

        A slice's message has the size of the slice's share of the tokens. Its input gradient takes
        what the weight gradients leave of the slice's share of the whole backward, because all of
        attention's work is in the input gradient. Raises ValueError where attention would be more
        than the input gradient takes, and for costs that don't fit, and ScheduleError like `check`.
        """
        costs = Costs() if costs is None else costs
        expect(Costs, costs=costs)
        self.check(schedule)
        costs.check(schedule.num_stages, schedule.num_ranks)
        times, found = schedule.num_microbatches // self.count, defaultdict(list)
        for stage in range(schedule.num_stages):
            each_takes = {
                name: of_stage(getattr(costs, name), stage) for name in (*DURATIONS, "message")
            }
            inputs, weights = each_takes["backward_input"], each_takes["backward_weight"]
            whole, share = inputs + weights, of_stage(self.attention, stage)
            if I in schedule.columns.kinds and share * whole > inputs * (1 + 1e-9):
                raise ValueError(
                    f"attention's share of stage {stage}'s backward, {share:g} of {whole:g}, is "
                    "more than its input gradient takes, "
                    f"{inputs:g}: weights' gradients have no attention"
                )
            if costs.backward is None:
                each_takes["backward"] = whole
            parts = self._mixed(share)
            each = zip(parts, self.widths, strict=True)
            found["backward_input"].append(
                [max(0, whole * part - weights * width) for part, width in each] * times
            )
            for names, shares in ((_BY_WORK, parts), (_BY_TOKENS, self.widths)):
                for name in names:
                    found[name].append([each_takes[name] * one for one in shares] * times)
        return replace(costs, **found)

    def simulate(self, schedule: Schedule, costs: Costs | None = None) -> Timeline:
        """Predict the timeline of a schedule of slices, given the `costs` of whole microbatches.

        Raises ScheduleError for a schedule that can't run with as many slices, and ValueError for
        costs that don't fit.
        """
        return simulate(schedule, self.costs(schedule, costs))

    def memory(self, memory: Memory | None = None, carried: PerStage = 0) -> Memory:
        """The memory of slices, given that of whole microbatches, for `Schedule.peak_held`,
        `validate` and `memory_chart`.

        A slice holds its share of the tokens, including its keys and values. `carried` is the size
        of the gradients of a stage's keys and values, for a whole microbatch. The last slice's
        backward makes those of all slices before it, and each of their backwards uses up its own.

        >>> from pplab import build
        >>> rows = build("Seq1F1B", num_ranks=4, num_microbatches=32, slices=4)
        >>> rows.peak_held(Slices.even(4).memory())
        (1.75, 1.5, 1.25, 1.0)
        """
        memory = memory or Memory()
        expect(Memory, memory=memory)
        whole = {each.name: getattr(memory, each.name) for each in fields(Memory)}
        return _SlicedMemory(**whole, slices=self, carried=per_stage("carried", carried))


@dataclass(frozen=True)
class _SlicedMemory(Memory):
    """`Memory` of whole microbatches, where each action adds and frees the share of its slice."""

    slices: Slices = field(kw_only=True)
    carried: PerStage = field(kw_only=True)

    def check(self, num_stages: int) -> None:
        """As a Memory's."""
        super().check(num_stages)
        check_length("carried", self.carried, num_stages)

    def levels(self, row: Sequence[Action | Overlap]) -> Iterator[tuple[float, float]]:
        """As a Memory's."""
        stages = sorted({action.stage for item in row for action in parts(item)})
        changes, widths = {stage: self.changes(stage) for stage in stages}, self.slices.widths
        after = self.constant(stages)
        for item in row:
            ended = 0
            for stage, kind, n in parts(item):
                j, (at_start, at_end) = n % len(widths), changes[stage][kind]
                after += at_start * widths[j]
                ended += at_end * widths[j]
                if kind in INPUT_GRADIENT:
                    ended += of_stage(self.carried, stage) * ((j == len(widths) - 1) - widths[j])
            during, after = after, after + ended
            yield during, after
