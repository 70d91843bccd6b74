"""The running case with its sequences in slices: rows of its ledger, and a search for the best of
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ...builders import build
from ...errors import expect, number, positive_int
from ...footprint import Memory
from ...timeline import total
from ..planning import Case, Entry, Ledger, Transformer, in_gb
from .slices import Slices


def sliced_row(
    case: Case,
    slices: int | Slices,
    num_microbatches: int,
    *,
    schedule: str = "Seq1F1B",
    microbatch: int = 1,
    cut: Sequence[int] | None = None,
    recompute: bool | Sequence[int] = False,
    overhead_ms: float = 0,
    **options: object,
) -> Entry:
    """A row of the case's ledger, like `Case.row`, whose microbatches go through the pipeline in
    slices.

    `slices` is a number of equal ones, or `Slices` with their lengths. Attention's share comes from
    the model, and every action takes `overhead_ms` in addition to its work. A rank holds its
    slices' activations, and the gradients of keys and values that wait for their slices. If layers
    are recomputed, it also keeps their keys and values, because later slices read them. `options`
    are the schedule's.

    >>> sliced_row(Case(), 4, 16, cut=[9, 9, 8, 6])
                                    M   step    busy  fullest rank  fits in 80 GB  a billion tokens
    Seq1F1B, 4 slices, cut 9+9+8+6  16  5.33 s  79 %  63.0 GB       yes            $90.4 in 11.3 h
    """
    model, cutting = case.model, slices if isinstance(slices, Slices) else Slices.even(slices)
    expect(Transformer, model=model)  # attention's share is of layers that are alike
    positive_int("num_microbatches", num_microbatches)
    sizes = {"num_ranks": case.num_ranks, "num_microbatches": num_microbatches * cutting.count}
    rows = build(schedule, **sizes, slices=cutting.count, **options)
    V = rows.num_stages // case.num_ranks
    name, looped = ("Interleaved1F1B", {"stages_per_rank": V}) if V > 1 else ("1F1B", {})
    whole = case.plan(name, num_microbatches, microbatch, cut=cut, recompute=recompute, **looped)
    flops = [n * model.layer_flops(microbatch) for n in whole.layers]
    flops[-1] += model.head_flops(microbatch)
    of_attention = model.attention_flops(microbatch)
    cutting = replace(
        cutting,
        attention=[n * of_attention / each for n, each in zip(whole.layers, flops, strict=True)],
    )
    timeline = cutting.simulate(
        rows, replace(whole.costs, overhead=number("overhead_ms", overhead_ms) / 1e3)
    )
    # keys and values of a layer
    kept = 2 * model.kv_width * model.sequence * microbatch * model.bytes_each / 1e9
    memory = _keeping(whole.memory, whole.recomputed, kept)
    memory = cutting.memory(memory, [n * kept for n in whole.layers])
    eager = ", eager" if options.get("warmup_per_rank", 1) > 1 else ""
    return Entry(
        case,
        f"{rows.name}, {cutting.count} slice{'s' * (cutting.count > 1)}{eager}",
        num_microbatches,
        microbatch,
        cut=None if cut is None else tuple(cut),
        recompute=recompute if isinstance(recompute, bool) else tuple(recompute),
        step_s=timeline.makespan,
        busy=total(timeline.busy) / (case.num_ranks * timeline.makespan),
        held_gb=rows.peak_held(memory),
        timeline=timeline,
        memory=memory,
    )


def _keeping(memory: Memory, again: Sequence[int], kept: float) -> Memory:
    """The memory in GB if every layer that is recomputed still keeps so much, its keys and
    values.
    """
    found = in_gb(memory)
    return replace(
        found,
        activation=[size + n * kept for size, n in zip(found.activation, again, strict=True)],
        recomputed=[
            size - min(n, 1) * kept for size, n in zip(found.recomputed, again, strict=True)
        ],
        while_input_gradient=[
            size - max(n - 1, 0) * kept
            for size, n in zip(found.while_input_gradient, again, strict=True)
        ],
    )


def best_slices(
    case: Case, num_microbatches: int, slices: Iterable[int] = (1, 2, 4, 8, 16), **asked: object
) -> Ledger:
    """The case's ledger with a row for every number of equal slices, each with the best cut of the
    layers found for it. The best cut is the fastest that fits, or if none fits, the one that needs
    the least memory. `asked` is what `sliced_row` takes.

    The search starts from an even cut. It moves the layer that helps most from one stage to
    another, until no move helps.
    """
    ledger = Ledger(case)
    for count in slices:
        ledger.entries.append(_best_cut(case, count, num_microbatches, asked))
    return ledger


def _best_cut(case: Case, count: int, num_microbatches: int, asked: dict) -> Entry:
    num_stages = case.num_ranks * asked.get("stages_per_rank", 1)
    each, rest = divmod(case.model.num_layers, num_stages)

    def row(cut: Sequence[int]) -> Entry:
        return sliced_row(case, count, num_microbatches, cut=cut, **asked)

    def worth(entry: Entry) -> tuple[float, float]:
        return max(0, max(entry.held_gb) - case.room_gb), entry.step_s

    best = row([each + (stage < rest) for stage in range(num_stages)])
    while True:
        nearest = min(map(row, _moved(best.cut)), key=worth, default=best)
        if worth(nearest) >= worth(best):
            return best
        best = nearest


def _moved(cut: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The cuts with one layer moved; every stage keeps one."""
    stages = range(len(cut))
    for a in stages:
        for b in stages:
            if a != b and cut[a] > 1:
                yield tuple(n - (s == a) + (s == b) for s, n in enumerate(cut))
