"""GPUs by name, as their makers' data sheets and drivers tell."""

from __future__ import annotations

from dataclasses import dataclass

from ...costs import Link
from ...errors import positive_int, unknown
from .layout import Machine

REACHED = 400 / 989  # of the peak: the course's 400 TFLOP/s of an H100, an assumption
LEFT = 80e9 / (81_559 * 2**20)  # of a memory, for what is counted: the rest is CUDA's, NCCL's, and the allocator's
RING = 367 / 450  # of a link inside, what a ring of eight H200 reached (book/published.md)


@dataclass(frozen=True)
class Gpu:
    """FLOP/s in bfloat16, without sparsity; bytes that its driver tells; bytes per second, one way, to its neighbours
    in the box, over NVLink or PCIe; which share of these a ring reaches, 1 where nobody measured it."""

    peak: float
    memory: float
    inside: float
    ring: float = 1


GPUS = {  # NVIDIA's data sheets, and nvidia-smi's MiB
    "a100": Gpu(312e12, 81_920 * 2**20, 300e9),
    "h100": Gpu(989e12, 81_559 * 2**20, 450e9, RING),
    "h200": Gpu(989e12, 143_771 * 2**20, 450e9, RING),
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
    ring: float | None = None,
    ports: int | None = None,
) -> Machine:
    """Nodes of `per_node` of these GPUs, with what isn't given as the name says: 0.4 of the peak, 94 % of the memory.

    `between` and `inside` are bytes per second of every GPU, one way, so a ring that fills nodes has as many `ports` as
    these have GPUs, unless it is told otherwise. Messages take 10 and 5 µs besides: an assumption. ValueError for an
    unknown name.

    >>> machine_of("h100", 8, between=50e9).ring / 1e9
    367.0
    """
    known = GPUS.get(gpu.lower())
    if known is None:
        raise unknown("GPU", gpu, GPUS)
    positive_int("per_node", per_node)
    inside = inside or known.inside
    return Machine(
        per_node,
        Link(5e-6, inside),
        Link(10e-6, between),
        flops or REACHED * known.peak,
        memory or LEFT * known.memory,
        ring or known.ring * inside,
        per_node if ports is None else ports,
    )
