"""Every way to divide GPUs and a batch: what its step may take, and its plan, which runs as little
again as fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from ...builders import Builder, find
from ...errors import positive_int
from ...schedule import Schedule
from .expert_layers import ExpertLayers
from .fsdp import fsdp_plan
from .layers import Model
from .layout import Layout, Machine
from .planner import Plan, plan
from .recomputing import fitted
from .stage_costs import Asked, all_reduce
from .state import State
from .transformer import Transformer

Degrees = int | Iterable[int]  # one, or several to choose from
# an estimate in seconds, and what plans it, told whether it must fit
Way = tuple[float, Callable[[bool], Plan]]
_MOST_STAGES = 5  # of a rank
MOST_FORWARDS = 2**14  # of a pipeline
# whose ranks hold no more in later rounds of microbatches than in the first two, if all are whole:
# so what fits is found on two
_STEADY = ("1F1B", "Interleaved1F1B")


class TooLarge(ValueError):
    """What doesn't fit, though all layers compute again: its fullest rank `needs` so many bytes."""

    def __init__(self, layout: Layout, needs: float) -> None:
        super().__init__(f"{layout} doesn't fit, though all layers compute again")
        self.needs = needs


@dataclass(frozen=True)
class Task:
    """What is to be trained, on what: `batch` sequences a step on so many `gpus`."""

    model: Transformer | Model
    machine: Machine
    gpus: int
    batch: int
    state: State

    def ways(
        self, degrees: Iterable[Degrees], schedules: Iterable[str], experts: ExpertLayers | None
    ) -> Iterator[Way]:
        """Every way with these `degrees` of tensors, context, experts and data, and these sizes of
        microbatches.
        """
        model, machine, num_layers = self.model, self.machine, self.model.num_layers
        tps, cps, eps, dps, sizes = map(_several, degrees)
        if not experts and eps != (1,):
            raise ValueError(
                f"ep {', '.join(map(str, eps))}: this model has no experts to spread, so leave ep "
                "out"
            )
        passes = 2 + bool(self.state.gradients)  # of frozen weights two
        long = model.long(experts)
        work = sum(long.work(1, machine.slower)) + long.ends_work(1, machine.slower)
        work *= passes * self.batch
        kept = (
            self.batch
            * model.sequence
            * sum(kind.kept_bytes(model.bytes_each) for kind in long.layers)
        )
        routed = sum(kind.routed is not None for kind in long.layers)
        pipelined, alone = [*map(find, schedules)], [find("naive")]
        pairs = [builder for builder in pipelined if routed and builder(2, 4).columns.overlaps]
        touched = 2 * passes * kept / machine.hbm if machine.hbm else 0
        for tp, cp, ep, pp, b in product(
            tps, cps, eps, range(1, min(num_layers, self.gpus) + 1), sizes
        ):
            if pp == 1 and b != sizes[0]:
                continue  # there the plan finds its own size
            b = b if pp > 1 else 1
            dp, rest = divmod(self.gpus, tp * cp * pp)
            if rest or dp not in dps or tp * cp * dp % ep or (experts and experts.count % ep):
                continue
            M, rest = divmod(self.batch, dp * b)
            if rest or not M:
                continue
            layout = Layout(tp, pp, dp, cp=cp)
            spread = experts and replace(experts, gpus=ep, whole=tp > 1 and ep > 1)
            size, box = model.boundary_bytes(b) / cp, machine.ranks_per_node
            link = machine.ring_link(layout.groups("tp"))
            sums = 4 * M * num_layers / pp * all_reduce(tp, size, link)
            copies = 0.0
            if ep > 1:
                took = spread.copies_s(machine, size / tp, min(ep, box), -(-ep // box))
                copies = 4 * M * routed / pp * took
            # FSDP's microbatches may be larger
            launched = machine.launching(layout) * num_layers / pp * (M if pp > 1 else 1)
            for builder in pipelined if pp > 1 else alone:
                for V in _stages_per_rank(builder):
                    if pp * V > num_layers or pp * V * M > MOST_FORWARDS:
                        continue
                    ramps = (pp - 1) / M / (3 if builder.name == "ZBVZeroBubble" else V)
                    waits = sums + (0 if builder in pairs else copies)  # pairs hide copies
                    busy = work / machine.rate(layout) / pp / dp + waits + touched / self.gpus
                    how = layout, b, builder, V, spread
                    yield max(busy, launched) * (1 + ramps), partial(self.planned, *how)

    def planned(
        self,
        layout: Layout,
        b: int,
        builder: Builder,
        V: int,
        experts: ExpertLayers | None,
        must_fit: bool,
    ) -> Plan:
        """The plan with a cut that weighs the head; without a pipeline the fastest one. Raises
        TooLarge for what must fit and doesn't, before it is simulated.
        """
        given = self.model, self.machine, layout, self.batch
        if layout.pp == 1:
            return fsdp_plan(*given, modules=True, state=self.state, experts=experts)
        options = {"stages_per_rank": V} if "stages_per_rank" in builder.options else {}
        built = partial(builder, layout.pp, **options)
        M = self.batch // layout.dp // b
        steady = builder.name in _STEADY and M % layout.pp == 0
        rows = built(min(M, 2 * layout.pp) if steady else M)
        cut = _weighed(self.model, rows, self.machine.slower)
        asked = Asked(
            self.model,
            self.machine,
            layout,
            cut,
            (0,) * rows.num_stages,
            (),
            self.batch,
            b,
            experts,
            self.state,
            True,
            "",
        )
        paired = experts and rows.columns.overlaps  # runs whole layers again
        parameters = asked.state_bytes()
        least = fitted(asked, rows, parameters, not paired)
        if least is None and must_fit:
            again = replace(asked, recomputed=cut)
            raise TooLarge(layout, max(rows.peak_held(again.stage_memory(parameters))))
        return plan(
            *given,
            b,
            schedule=rows if rows.num_microbatches == M else built(M),
            cut=cut,
            recompute=not least or least.recompute,
            state=self.state,
            shard_optimizer=True,
            experts=experts,
        )


def order(found: Plan) -> tuple[bool, float]:
    """What fits comes first, then what is faster."""
    return not found.fits, found.step_s


def planned_again(found: Plan, **changes: Any) -> Plan:
    """The same plan with other arguments: on another machine, with another cut, with other
    sends.
    """
    whole = found.zero is not None
    names = "model machine layout batch microbatch state experts " + (
        "zero" if whole else "shard_optimizer"
    )
    how = {name: getattr(found, name) for name in names.split()}
    how["recompute"] = found.recompute
    if whole:
        return fsdp_plan(**how | changes)
    how |= {"schedule": found.timeline.schedule, "cut": found.layers}
    return plan(**how | changes)


def polished(found: Plan) -> Plan:
    """The plan with single layers moved from its busiest rank to its least busy one, as long as
    that helps.
    """
    rows, busy = found.timeline.schedule, found.timeline.busy
    sources, targets = (
        rows.stages_of(each(range(rows.num_ranks), key=busy.__getitem__)) for each in (max, min)
    )
    for source, target in product(sources, targets):
        cut, again = [*found.layers], [*found.recomputed]
        if source == target or cut[source] < 2:
            continue
        cut[source] -= 1
        cut[target] += 1
        again[source] = min(again[source], cut[source])
        moved = planned_again(found, cut=cut, recompute=found.modules or again)
        if moved.fits and moved.step_s < found.step_s * (1 - 1e-9):
            return polished(moved)
    return found


def _several(given: Degrees) -> tuple[int, ...]:
    return tuple(
        positive_int("a degree", each)
        for each in (given if isinstance(given, Iterable) else [given])
    )


def _stages_per_rank(builder: Builder) -> Iterable[int]:
    """How many its ranks can have."""
    if "stages_per_rank" in builder.options:
        return range(2, _MOST_STAGES + 1)
    return [2 if builder.placement == "V" else 1]


def _weighed(model: Transformer | Model, rows: Schedule, slower: float) -> tuple[int, ...]:
    """The layers of stages by which ranks have equal work, the head's in the last stage; later
    ranks get the rest. Where layers differ, stages have equal work.
    """
    if isinstance(model, Model):
        return model.cut(rows.num_stages, slower)
    head = slower * model.head_flops(1) / model.weighed(model.kind, slower)
    work = [1.0] * rows.num_stages
    work[-1] += head
    ranks = [rows.stages_of(rank) for rank in reversed(range(rows.num_ranks))]
    for _ in range(model.num_layers - rows.num_stages):
        least = min(ranks, key=lambda stages: sum(work[s] for s in stages))
        work[min(least, key=work.__getitem__)] += 1
    work[-1] -= head
    return tuple(map(round, work))
