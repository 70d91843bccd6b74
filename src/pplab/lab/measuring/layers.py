"""Measure what each layer takes and holds on this machine: one process runs the model cut into
single layers.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from ...actions import Action, B, F
from ...costs import Costs
from ...errors import positive_int
from ...footprint import Memory
from ...schedule import Schedule

if TYPE_CHECKING:
    from ...runtime import Workload


@dataclass(frozen=True)
class MeasuredLayers:
    """A model's layers in order, with embedding and head, and their values for one microbatch."""

    names: tuple[str, ...]
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    activations: tuple[int, ...]  # bytes that a forward keeps for its backward
    inputs: tuple[int, ...]  # bytes of them that a stage which starts here keeps when it recomputes
    parameters: tuple[int, ...]  # bytes of weights
    # the first and the last are an embedding and a head, which a workload's cut doesn't count
    ends: bool = True

    @property
    def times_ms(self) -> tuple[float, ...]:
        """Forward and backward of every layer."""
        return tuple(f + b for f, b in zip(self.forward_ms, self.backward_ms, strict=True))

    def layers(self, counts: Sequence[int]) -> tuple[int, ...]:
        """The workload's `cut` for these counts of layers, which include embedding and head."""
        self._stages(counts)
        only = [*counts]
        only[0] -= self.ends
        only[-1] -= self.ends
        return tuple(only)

    def costs(self, counts: Sequence[int], recompute: Collection[int] = ()) -> Costs:
        """Predicted costs of a run with so many layers per stage, of which some stages
        recompute.
        """
        stages = self._stages(counts)
        forward, backward = (
            [sum(values[part]) for part in stages] for values in (self.forward_ms, self.backward_ms)
        )
        again = [f if stage in recompute else 0 for stage, f in enumerate(forward)]
        return Costs(forward, backward, 0, recompute=again, unit="ms")

    def memory(self, counts: Sequence[int], recompute: Collection[int] = ()) -> Memory:
        """Predicted bytes per stage and microbatch, without parameters."""
        stages = self._stages(counts)
        whole = [sum(self.activations[part]) for part in stages]
        kept = [
            self.inputs[part.start] if s in recompute else whole[s] for s, part in enumerate(stages)
        ]
        return Memory(
            kept, recomputed=[w - k for w, k in zip(whole, kept, strict=True)], unit="bytes"
        )

    def _stages(self, counts: Sequence[int]) -> list[slice]:
        if sum(counts) != len(self.names) or min(counts) < 1:
            raise ValueError(
                f"expected at least one layer per stage and {len(self.names)} in all"
                f"{', embedding and head included' * self.ends}, got {tuple(counts)}"
            )
        return [
            slice(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)
        ]

    def __str__(self) -> str:
        lines = [
            f"{'layer':12}{'F (ms)':>9}{'B (ms)':>9}{'activations (kB)':>18}{'weights (kB)':>14}"
        ]
        rows = zip(
            self.names,
            self.forward_ms,
            self.backward_ms,
            self.activations,
            self.parameters,
            strict=True,
        )
        for name, forward, backward, activations, parameters in rows:
            lines.append(
                f"{name:12}{forward:9.2f}{backward:9.2f}"
                f"{activations / 1e3:18.0f}{parameters / 1e3:14.0f}"
            )
        return "\n".join(lines)

    __repr__ = __str__


def measure_layers(
    workload: Workload,
    num_microbatches: int = 8,
    *,
    steps: int = 5,
    threads: int = 1,
    device: str = "auto",
) -> MeasuredLayers:
    """Run `workload` on one rank that has a stage for every layer. Returns medians over all
    microbatches of `steps` steps.

    The workload is one of `lab.models` (`Modules` needs an nn.Sequential, whose children are the
    layers), or any with `num_layers` that can be cut into as many stages. `threads` and `device`
    (as for `Pool`) must be those of the planned run. It starts a process, and ends it. Some things
    are kept once for several layers of a stage, such as a mask, or an output that is the next
    layer's input. They count with each layer here, so a stage holds at most the sum.
    """
    from ...runtime import Pool  # what was measured can be read without torch
    from ..extras import Meter, Recompute
    from ..models import LayeredModel, weights_of

    layerwise, names = _layer_by_layer(workload)
    stages, row = range(len(names)), []
    for m in range(positive_int("num_microbatches", num_microbatches)):
        row += [Action(stage, F, m) for stage in stages] + [
            Action(stage, B, m) for stage in reversed(stages)
        ]
    schedule = Schedule([row], name="layer by layer")
    with Pool(1, device=device, threads=threads) as pool:
        run = pool.train(schedule, layerwise, Meter(), steps=steps)
        inputs = pool.train(
            schedule, layerwise, Meter(), Recompute(), steps=1, warmup=0
        ).held.bytes_of
    if isinstance(layerwise, LayeredModel):
        sizes = layerwise.stage_bytes(len(stages))  # which builds the model once
    else:
        sizes = tuple(weights_of(layerwise.build_stage(stage, len(stages))) for stage in stages)
    times = run.costs.forward, run.costs.backward_input
    return MeasuredLayers(
        names, *times, run.held.bytes_of, inputs, sizes, isinstance(workload, LayeredModel)
    )


def _layer_by_layer(workload: Workload) -> tuple[Workload, tuple[str, ...]]:
    """The workload with a stage for every layer, and the layers' names. Raises ValueError where it
    counts no layers.
    """
    from ..models import LayeredModel, Modules

    if isinstance(workload, LayeredModel):
        layerwise = replace(workload, cut=(0, *[1] * workload.num_layers, 0))
        return layerwise, ("embedding", *workload.layer_names, "head")
    if not getattr(workload, "num_layers", None):
        raise ValueError(
            "measure_layers needs a workload with num_layers, which can be cut into as many "
            "stages, and this "
            f"{type(workload).__name__} has none: give Modules one nn.Sequential, or a Workload of "
            "your own num_layers"
        )
    if not isinstance(workload, Modules):
        return workload, tuple(f"layer {layer}" for layer in range(workload.num_layers))
    layerwise = copy.copy(workload)
    layerwise.cut = None
    return layerwise, tuple(workload.children)
