"""The running case without a pipeline: a whole model on every rank, of which the others store a part."""

from __future__ import annotations

from math import ceil

from ...errors import expect, positive_int
from .case import Case, Entry
from .formulas import ring_gather_time, sharded_step

NAMES = {1: "ZeRO-1", 2: "ZeRO-2", 3: "FSDP"}


def fsdp_row(case: Case, sequences: int, *, zero: int | None = None) -> Entry:
    """A row of the ledger with no pipeline: `sequences` a step, shared out to the ranks, in the fastest way that fits.

    A rank stores one of `num_ranks` parts of the optimizer's state (ZeRO-1), of the gradients as well (ZeRO-2), or of
    the weights, too (ZeRO-3, which is FSDP); `zero` names one of them. It takes one or more of its sequences at a time,
    and computes as many layers again as it must to fit. All that it sends goes on beside its work, as far as there is
    work: `pplab.lab.formulas.sharded_step`. Weights are gathered, and gradients sent, in the bytes that the case's
    `state` keeps of them. Under FSDP two layers or matrices are gathered at a time: the one in use, and the next.

    Raises ValueError for sequences that can't be shared out evenly, and where no way fits.

    >>> fsdp_row(Case(gigabits=100), 16)
                                              M   step    busy   fullest rank  fits in 80 GB  a billion tokens
    FSDP, 4 at a time, recomputing 26 layers  16  5.29 s  100 %  76.9 GB       yes            $89.7 in 11.2 h
    """
    expect(Case, case=case)
    if zero not in (None, *NAMES):
        raise ValueError(f"zero must be 1, 2 or 3, got {zero!r}")
    ranks, model = case.num_ranks, case.model
    if positive_int("sequences", sequences) % ranks:
        raise ValueError(f"{sequences} sequences don't divide among {ranks} ranks")
    each, link, state = sequences // ranks, case.machine.between, case.state
    whole, kept = model.layer_bytes(1) / 1e9, model.boundary_bytes(1) / 1e9
    gather, reduce = (
        ring_gather_time(ranks, size * model.parameters, link.latency, link.bandwidth)
        for size in (state.weights, state.gradients)
    )
    work = (model.num_layers * case.layer_ms + case.head_ms) / 1e3
    found = []
    for stage in NAMES if zero is None else (zero,):
        shares = ((state.optimizer, 1), (state.gradients, 2), (state.weights, 3))  # and from which ZeRO on divided
        always = sum(size / (ranks if stage >= level else 1) for size, level in shares) * model.parameters / 1e9
        if stage == 3:
            always += 2 * state.weights * max(model.layer_parameters, model.table_parameters) / 1e9
        for at_a_time in (n for n in range(1, each + 1) if each % n == 0):
            held = always + model.num_layers * at_a_time * whole
            freed = at_a_time * (whole - kept)  # of a layer; the one that computes again is whole
            again = ceil((held - case.room_gb) / freed) + 1 if held > case.room_gb else 0
            if again <= model.num_layers:
                forward = at_a_time * work
                backward = (1 + bool(state.gradients)) * forward + at_a_time * again * case.layer_ms / 1e3
                new = gather * (stage == 3 or bool(state.optimizer))  # frozen weights, held whole, are never new
                step = sharded_step(each // at_a_time, forward, backward, new, reduce, zero=stage)
                found.append((step, stage, at_a_time, again, held - max(again - 1, 0) * freed))
    if not found:
        raise ValueError(f"it doesn't fit in {case.room_gb:g} GB, however little is kept: take more ranks")
    step, stage, at_a_time, again, held = min(found)
    return Entry(
        case,
        f"{NAMES[stage]}, {at_a_time} at a time" + (f", recomputing {again} layers" if again else ""),
        sequences,
        step_s=step,
        busy=each * ((2 + bool(state.gradients)) * work + again * case.layer_ms / 1e3) / step,
        held_gb=(held,) * ranks,
    )
