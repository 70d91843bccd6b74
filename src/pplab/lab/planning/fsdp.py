"""A step without a pipeline: a whole model on every rank, of which the others store a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial

from ...actions import B, F
from ...errors import expect, positive_int
from .case import Case, Entry
from .expert_layers import ExpertLayers
from .formulas import ring_gather_time, sharded_step
from .layers import Model
from .layout import Layout, Machine
from .planner import Plan, plan
from .recomputing import Recompute, fitted
from .stage_costs import Alike
from .state import State
from .transformer import Transformer

NAMES = {1: "ZeRO-1", 2: "ZeRO-2", 3: "FSDP"}


def fsdp_plan(
    model: Transformer | Model,
    machine: Machine,
    layout: Layout,
    batch: int,
    microbatch: int | None = None,
    *,
    zero: int | None = None,
    recompute: Recompute = False,
    modules: bool = False,
    state: State | None = None,
    experts: ExpertLayers | None = None,
) -> Plan:
    """Predict a step of `batch` sequences without a pipeline, in the fastest way that fits in the
    machine's memory.

    A rank stores one of cp * dp parts of the optimizer's state (ZeRO-1), of the gradients as well
    (ZeRO-2), or of the weights, too (ZeRO-3, which is FSDP); with `experts`, of those one for each
    rank that has the same. `zero` names one of them, and 0 whole replicas. A rank takes
    `microbatch` of its sequences at a time, or as many as is fastest, and computes as many layers
    again as `recompute` says, or, if that says none, as it must to fit. With `modules` it computes
    modules of all layers again where that takes less. What these ranks send each other goes on
    beside their work, as far as there is work and the machine `overlaps` them:
    `pplab.lab.formulas.sharded_step`; all else is as in `plan`. Weights are gathered, and gradients
    sent, in the bytes that `state` keeps of them. Under FSDP two layers or matrices are gathered at
    a time: the one in use, and the next.

    The Plan says its `zero`, and what it `recomputed`. Where no way fits, it is the one that holds
    least. Raises ValueError for a Layout with a pipeline, for sequences that can't be shared out
    evenly, and as `plan` does.

    >>> found = fsdp_plan(Case().model, Case(gigabits=100).machine, Layout(dp=4), batch=16)
    >>> NAMES[found.zero], found.microbatch, found.recomputed, round(found.step_s, 2)
    ('FSDP', 4, (26,), 5.29)
    """
    if zero not in (None, 0, *NAMES):
        raise ValueError(f"zero must be 1, 2 or 3, or 0 for replicas, got {zero!r}")
    if layout.pp > 1:
        raise ValueError(
            f"without a pipeline there is no pp, got {layout}: give pp=1, or take plan"
        )
    each, rest = divmod(positive_int("batch", batch), layout.dp)
    if rest:
        raise ValueError(f"{batch} sequences don't divide among {layout.dp} ranks")
    sizes = [n for n in range(1, each + 1) if each % n == 0] if microbatch is None else [microbatch]
    given = partial(plan, model, machine, layout, batch, state=state, experts=experts)
    ways = [
        cache(partial(given, at_a_time, schedule="naive", recompute=recompute))
        for at_a_time in sizes
    ]
    whole = [planned() for planned in ways]
    weights = whole[0].weights(gathers=zero != 0)
    found = [
        _sharded(planned, bare, weights, modules, which)
        for which in (NAMES if zero is None else (zero,))
        for planned, bare in zip(ways, whole, strict=True)
    ]
    return min(
        found,
        key=lambda each: (not each.fits, round(each.step_s, 9) if each.fits else each.memory_bytes),
    )


def _sharded(
    planned: Callable[..., Plan], found: Plan, weights: Iterable[Alike], modules: bool, zero: int
) -> Plan:
    """What was `found` in one way; without recomputation, `planned` again with the modules or as
    many layers as it takes.
    """
    model, state, kept, gather, reduce = found.model, found.state, 0.0, 0.0, 0.0
    # and from which ZeRO on divided
    shares = ((state.optimizer, 1), (state.gradients, 2), (state.weights, 3))
    for ranks, link, (count,) in weights:
        kept += sum(size / (ranks if zero >= level else 1) for size, level in shares) * count
        gather += ring_gather_time(ranks, state.weights * count, link.latency, link.bandwidth)
        reduce += ring_gather_time(ranks, state.gradients * count, link.latency, link.bandwidth)
    if zero == 3:
        table = model.table_parameters / found.layout.tp
        kept += (
            2
            * state.weights
            * max(table, *(sum(found.weights_of(kind)) for kind in found.long.kinds))
        )
    if not any(found.recomputed) and not found.modules:
        least = fitted(found, found.timeline.schedule, [kept], modules)
        if least is not found:
            found = planned(recompute=not least or least.recompute)
    if zero == 0:
        gather, reduce = 0.0, 2 * reduce
    elif zero < 3 and not state.optimizer:
        gather = 0.0  # frozen weights, held whole, are never new
    rows, beside = found.timeline.schedule, found.machine.overlaps
    forward, backward = (beside * found.costs.of(kind, 0) for kind in (F, B))
    step = sharded_step(rows.num_microbatches, forward, backward, gather, reduce, zero=zero)
    return replace(
        found,
        zero=zero,
        memory=replace(found.memory, parameters=[kept]),
        dp_s=step - beside * found.timeline.makespan,
    )


def fsdp_row(case: Case, sequences: int, *, zero: int | None = None) -> Entry:
    """A row of the ledger with no pipeline: `sequences` a step, shared out to the ranks:
    `fsdp_plan` says how.

    Raises ValueError for sequences that can't be shared out evenly, and where no way fits.

    >>> fsdp_row(Case(gigabits=100), 16)
                                              M   step    busy   fullest rank  fits in 80 GB  a billion tokens
    FSDP, 4 at a time, recomputing 26 layers  16  5.29 s  100 %  76.9 GB       yes            $89.7 in 11.2 h
    """  # noqa: E501
    expect(Case, case=case)
    if case.experts:
        raise ValueError("a row without a pipeline has no spread experts: give them to fsdp_plan")
    given = case.model, case.machine, Layout(dp=case.num_ranks), sequences
    found = fsdp_plan(*given, zero=zero, state=case.state)
    if not found.fits:
        raise ValueError(
            f"it doesn't fit in {case.room_gb:g} GB, however little is kept: take more ranks"
        )
    (again,), name = found.recomputed, NAMES.get(found.zero, "replicas")
    return Entry(
        case,
        f"{name}, {found.microbatch} at a time"
        + (f", recomputing {again} layers" if again else ""),
        sequences,
        step_s=found.step_s,
        busy=found.compute_s / found.step_s,
        held_gb=(found.memory_bytes / 1e9,) * case.num_ranks,
    )
