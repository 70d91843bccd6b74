"""GPUs by name, as their makers' data sheets and drivers tell."""

from __future__ import annotations

from dataclasses import dataclass

from ...costs import Link
from ...errors import positive_int, unknown
from .layout import Machine

REACHED = 0.4  # of the peak, as in the course's case: an assumption
LEFT = 80 / 85.5  # of a memory, for what is counted: the rest is CUDA's, NCCL's, and what the allocator can't use


@dataclass(frozen=True)
class Gpu:
    """FLOP/s in bfloat16, without sparsity; bytes that its driver tells; bytes per second, one way, to its neighbours
    in the box, over NVLink or PCIe."""

    peak: float
    memory: float
    inside: float


GPUS = {  # NVIDIA's data sheets, and nvidia-smi's MiB
    "a100": Gpu(312e12, 81_920 * 2**20, 300e9),
    "h100": Gpu(989e12, 81_559 * 2**20, 450e9),
    "h200": Gpu(989e12, 143_771 * 2**20, 450e9),
    "b200": Gpu(2250e12, 183_359 * 2**20, 900e9),
    "l40s": Gpu(362e12, 46_068 * 2**20, 32e9),
    "rtx4090": Gpu(165e12, 24_564 * 2**20, 32e9),
}


def machine_of(
    gpu: str,
    per_node: int,
    between: float,
    inside: float | None = None,
    memory: float | None = None,
    flops: float | None = None,
) -> Machine:
    """Nodes of `per_node` of these GPUs, with what isn't given as the name says: 0.4 of the peak, 94 % of the memory.

    `between` and `inside` are bytes per second of every GPU, one way. Messages take 10 and 5 µs besides: an assumption.
    ValueError for an unknown name.
    """
    known = GPUS.get(gpu.lower())
    if known is None:
        raise unknown("GPU", gpu, GPUS)
    links = Link(5e-6, inside or known.inside), Link(10e-6, between)
    return Machine(
        positive_int("per_node", per_node), *links, flops or REACHED * known.peak, memory or LEFT * known.memory
    )
