"""What each layer takes and holds on this machine: one process runs the model cut into single layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ..actions import Action, B, F
from ..costs import Costs
from ..errors import positive_int
from ..footprint import Memory
from ..runtime import Pool
from ..schedule import Schedule
from .meter import Meter
from .models import LayeredModel
from .recompute import Recompute


@dataclass(frozen=True)
class MeasuredLayers:
    """A model's layers in order, embedding and head included, each with its values for one microbatch."""

    names: tuple[str, ...]
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    activations: tuple[int, ...]  # bytes that a forward keeps for its backward
    inputs: tuple[int, ...]  # bytes of them that a stage which starts here keeps when it recomputes
    parameters: tuple[int, ...]  # bytes of weights

    @property
    def times_ms(self) -> tuple[float, ...]:
        """Forward and backward of every layer."""
        return tuple(f + b for f, b in zip(self.forward_ms, self.backward_ms, strict=True))

    def layers(self, counts: Sequence[int]) -> tuple[int, ...]:
        """What a workload's `cut` is for these counts of layers, which include embedding and head."""
        self._stages(counts)
        only = [*counts]
        only[0] -= 1
        only[-1] -= 1
        return tuple(only)

    def costs(self, counts: Sequence[int], recompute: Collection[int] = ()) -> Costs:
        """Predicted costs of a run with so many layers per stage, where some stages recompute."""
        stages = self._stages(counts)
        forward, backward = ([sum(values[part]) for part in stages] for values in (self.forward_ms, self.backward_ms))
        again = [f if stage in recompute else 0 for stage, f in enumerate(forward)]
        return Costs(forward, backward, 0, recompute=again, unit="ms")

    def memory(self, counts: Sequence[int], recompute: Collection[int] = ()) -> Memory:
        """Predicted bytes per stage and microbatch, without parameters."""
        stages = self._stages(counts)
        whole = [sum(self.activations[part]) for part in stages]
        kept = [self.inputs[part.start] if s in recompute else whole[s] for s, part in enumerate(stages)]
        return Memory(kept, recomputed=[w - k for w, k in zip(whole, kept, strict=True)], unit="bytes")

    def _stages(self, counts: Sequence[int]) -> list[slice]:
        if sum(counts) != len(self.names) or min(counts) < 1:
            raise ValueError(
                f"expected at least one layer per stage and {len(self.names)} in all, embedding and head included, "
                f"got {tuple(counts)}"
            )
        ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
        return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]

    def __str__(self) -> str:
        lines = [f"{'layer':12}{'F (ms)':>9}{'B (ms)':>9}{'activations (kB)':>18}{'weights (kB)':>14}"]
        rows = zip(self.names, self.forward_ms, self.backward_ms, self.activations, self.parameters, strict=True)
        for name, forward, backward, activations, parameters in rows:
            lines.append(f"{name:12}{forward:9.2f}{backward:9.2f}{activations / 1e3:18.0f}{parameters / 1e3:14.0f}")
        return "\n".join(lines)

    __repr__ = __str__


def measure_layers(
    workload: LayeredModel,
    num_microbatches: int = 8,
    *,
    steps: int = 5,
    threads: int = 1,
    device: str = "auto",
) -> MeasuredLayers:
    """Run `workload` on one rank that has a stage for every layer; medians over `steps` steps of all microbatches.

    `threads` and `device` (as `Pool` takes it) must be those of the planned run. Starts a process, and ends it. What a
    stage makes once for all its layers, such as a mask or rotary embeddings, counts with every layer here.
    """
    if not isinstance(workload, LayeredModel):
        raise ValueError(
            "measure_layers knows the layers of models.gpt, distilbert and from_transformers, got "
            f"{type(workload).__name__}: give modules of your own one stage per layer, and read run.costs and "
            "run.held.memory"
        )
    num_layers = workload.num_layers
    names = ("embedding", *workload.layer_names, "head")
    last = len(names) - 1
    row = []
    for m in range(positive_int("num_microbatches", num_microbatches)):
        row += [Action(stage, F, m) for stage in range(last + 1)] + [Action(s, B, m) for s in range(last, -1, -1)]
    layerwise = replace(workload, cut=(0, *[1] * num_layers, 0))
    schedule = Schedule([row], name="layer by layer")
    with Pool(1, device=device, threads=threads) as pool:
        run = pool.train(schedule, layerwise, Meter(), steps=steps)
        inputs = pool.train(schedule, layerwise, Meter(), Recompute(), steps=1, warmup=0).held.bytes_of
    sizes = [
        sum(p.numel() * p.element_size() for p in layerwise.build_stage(stage, last + 1).parameters())
        for stage in range(last + 1)
    ]
    return MeasuredLayers(names, run.costs.forward, run.costs.backward_input, run.held.bytes_of, inputs, tuple(sizes))
