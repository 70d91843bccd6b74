"""What a profile of a run tells of a machine: the GPU's FLOP/s, its memory's speed, and what the
host needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...actions import B, F, W
from ...actions import Kind as ActionKind
from ...costs import Costs
from ...errors import expect, positive_int, shown
from ..forms import MICROSECONDS
from .choosing import Unsure
from .layers import Model
from .layout import Layout, Machine
from .planner import Plan, plan
from .transformer import Transformer


def profiled(
    model: Transformer | Model,
    machine: Machine,
    costs: Costs | Mapping[int, Costs],
    microbatch: int | None = None,
    *,
    cut: Sequence[int] | None = None,
    tp: int = 1,
    error: float = Unsure.model,
) -> tuple[Machine, Unsure]:
    """The machine with the speeds that this model's stages reached, and what is unsure then:
    `choose` takes both.

    `costs` were measured: those of `lab.calibrate(timeline)`, such as of a timeline in
    `lab.explain(traces).job`, or `MeasuredLayers.costs`. `cut` says how many layers each stage has;
    left out, all have the same. `microbatch` sequences and `tp` tensor ranks were used. Their sums
    are taken off at the speed of the machine's links, and where it has `hbm`, what their bytes take
    at that. All stages' FLOP over all their time is the rate; FLOP/s are unsure by how far stages
    are from it, on average. `error` is what is known of predictions, such as that of the replay,
    `lab.explain(traces).orders[0].error`.

    One size of microbatches can't tell a GPU from its host. Give the costs of two, such as `{1:
    costs, 8: costs}`, and no `microbatch`. The larger size tells the rate. If the smaller one takes
    over a quarter longer than it would at that rate, it waited for its host, and the time of its
    layers becomes the machine's `host`. If backwards run in halves, `hbm` is told, too, because W
    moves few bytes for its FLOPs. A plan's `bound` says what it waits for most.

    All that holds on the same GPU and for the same `tp`; each doubling of tensor ranks from there
    is unsure by `halves`. Layers that were measured alone (`MeasuredLayers`) don't tell how ranks
    disturb each other: on two busy CPU cores runs took 3 to 6 times as long as they said.
    ValueError for a cut of other layers, a `tp` that `plan` refuses, for one stage, which doesn't
    tell how they differ, where sums would take longer than what was measured, and where two sizes
    take as long.

    >>> from pplab import Link
    >>> from pplab.lab import plan
    >>> fast = Machine(8, Link(), Link(), flops=400e12, memory=80e9, host=8e-3)
    >>> model = Transformer(8, 2048, 4096, heads=16)
    >>> measured = {size: plan(model, fast, Layout(pp=2), 16, size).costs for size in (1, 8)}
    >>> machine, _ = profiled(model, replace(fast, flops=1e12, host=0), measured)
    >>> f"{machine.flops:.3g} {machine.host:.3g}", plan(model, machine, Layout(pp=2), 16, 1).bound
    ('4e+14 0.008', 'host')
    """
    runs = []
    for size, own in (costs if isinstance(costs, Mapping) else {microbatch: costs}).items():
        expect(Costs, costs=own)
        if not isinstance(own.forward, Sequence) or len(own.forward) < 2:
            raise ValueError(
                f"costs must be of several stages, to tell how these differ, got {shown(own)}"
            )
        layout, size = Layout(tp, len(own.forward)), positive_int("microbatch", size)
        runs.append(_Run(plan(model, machine, layout, size, size, cut=cut), own))
    small, large = (each(runs, key=lambda run: run.asked.microbatch) for each in (min, max))
    whole, longest = (sum(run.took(F, B)) for run in (small, large))
    hbm = machine.hbm
    if small is not large:
        if longest < 1.1 * whole:
            raise ValueError(
                f"stages took {whole:.3g} s with the smaller microbatches and {longest:.3g} s "
                "with the larger: they waited for the host both times, so nothing tells how fast "
                "the GPU is: give the costs of a larger size"
            )
        hbm = large.hbm or hbm
    took, work = large.computed(hbm), large.work
    pace = sum(took) / sum(work)
    off = sum(abs(own - pace * part) for own, part in zip(took, work, strict=True)) / sum(took)
    if min(took) <= 0 or off >= 0.99:
        raise ValueError(
            f"costs don't fit cut={large.asked.layers} and tp={tp}: without {sum(large.sums):.3g} "
            "s of sums stages took "
            f"{shown(took)} s, which tells no pace: give the cut, tp and machine that they ran with"
        )
    rate = 3 / tp / pace  # a backward is two forwards
    if whole > 1.25 * (whole - sum(small.computed(hbm)) + pace * sum(small.work)):
        host = (whole - pace * small.asked.head_flops) / len(small.asked.long.every)
        machine = replace(machine, host=host, host_at={})
    machine = replace(
        machine, flops=rate, flops_at={tp: rate}, hbm=hbm, flops_bf16=machine.flops_bf16 and rate
    )
    return machine, Unsure(flops=off, model=error)


class _Run(NamedTuple):
    """What a model's stages were measured to take, with one size of microbatches."""

    asked: Plan
    costs: Costs

    def took(self, *kinds: ActionKind) -> list[float]:
        """Every stage's actions of these kinds, in s."""
        second = 1e6 / MICROSECONDS.get(self.costs.unit, 1e3)
        return [
            sum(self.costs.of(kind, s) for kind in kinds) / second
            for s in range(len(self.asked.layers))
        ]

    @property
    def work(self) -> list[float]:
        """FLOPs of every stage's forward."""
        found = self.asked.per_stage(
            lambda kind: kind.flops(self.asked.model.sequence) * self.asked.microbatch
        )
        found[-1] += self.asked.head_flops
        return found

    @property
    def sums(self) -> list[float]:
        """Every stage's, of both directions, in s."""
        return self.asked.per_stage(lambda kind: 2 * self.asked.times[kind.name].sums)

    def computed(self, hbm: float | None) -> list[float]:
        """What every stage took without sums, and without what its bytes take at this speed, in
        s.
        """
        moved = self.asked.per_stage(
            lambda kind: 6 * self.asked.touched_of(kind) / hbm if hbm else 0
        )
        return [
            whole - own - n for whole, own, n in zip(self.took(F, B), self.sums, moved, strict=True)
        ]

    @property
    def hbm(self) -> float | None:
        """Bytes per second of what forwards move and W doesn't; None where backwards are whole, or
        nothing is left.
        """
        asked = self.asked
        pairs = sum(
            asked.per_stage(lambda kind: kind.pair_flops(asked.model.sequence) * asked.microbatch)
        )
        weights, work = sum(self.took(W)), sum(self.work)
        left = sum(self.took(F)) - sum(self.sums) / 2 - weights * work / (work - pairs)
        return 2 * sum(asked.per_stage(asked.touched_of)) / left if weights and left > 0 else None
