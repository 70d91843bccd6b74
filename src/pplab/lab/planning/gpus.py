"""GPUs by name, as their makers' data sheets and drivers tell."""

from __future__ import annotations

from dataclasses import dataclass

from ...costs import Link
from ...errors import positive_int, unknown
from .layout import Machine

REACHED = 400 / 989  # of the peak: the course's 400 TFLOP/s of an H100, an assumption
# where bytes and the host are counted apart: 131 runs of nanotron (book/published.md)
REACHED_APART = 440 / 989
# what layers' matrices reach where NVIDIA's row of the 70 billion, with core_attn again, is as
# predicted (chapter 12), beside attention's products and the head in bfloat16: Megatron-LM
# d98e8a64's head is none of Transformer Engine's layers (gpt_model.py:272), and its
# fp8_dot_product_attention is off
REACHED_IN_FP8 = 1096.6 / 1978
# of a memory, for what is predicted: of 750 layouts that were said to fit 211 ran out
# (book/published.md)
LEFT = 0.9
RESERVED = 1.9 * 2**30  # by allocator, workspaces and communicators: three published sources
RING = 367 / 450  # of a link inside, what a ring of eight H200 reached (book/published.md)


@dataclass(frozen=True)
class Gpu:
    """FLOP/s in bfloat16, without sparsity; bytes that its driver tells; bytes per second, one way,
    to its neighbours in the box, over NVLink or PCIe; bytes per second of its own memory; which
    share of `inside` a ring reaches, 1 where nobody measured it.
    """

    peak: float
    memory: float
    inside: float
    hbm: float
    ring: float = 1


GPUS = {  # NVIDIA's data sheets, and nvidia-smi's MiB
    "a100": Gpu(312e12, 81_920 * 2**20, 300e9, 2.04e12),
    "h100": Gpu(989e12, 81_559 * 2**20, 450e9, 3.35e12, RING),
    "h200": Gpu(989e12, 143_771 * 2**20, 450e9, 4.8e12, RING),
    "b200": Gpu(2250e12, 183_359 * 2**20, 900e9, 8e12),
    "l40s": Gpu(362e12, 46_068 * 2**20, 32e9, 0.864e12),
    "rtx4090": Gpu(165e12, 24_564 * 2**20, 32e9, 1.008e12),
}
RECIPES = {  # what isn't planned: who publishes layouts for it
    "GB200 GB300 B300 NVL72 FP4": "Megatron Bridge's docs/performance-summary.md",
    "H800": "DeepSeek-V3's report, arXiv 2412.19437",
    "MI300X": "AMD's github.com/AMD-AGI/Primus",
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
    host: float | None = None,
    precision: str = "bf16",
) -> Machine:
    """Nodes of `per_node` of these GPUs, with what isn't given as the name says: 0.4 of the peak in
    bfloat16, and in `precision` "fp8" 0.55 of twice that for the layers' matrices alone, unless
    `flops` says one speed for all. A tenth of the memory is left free, and 1.9 GiB are `reserved`.

    `between` and `inside` are bytes per second of every GPU, one way, so a ring that fills nodes
    has as many `ports` as these have GPUs, unless it is told otherwise. Messages take 10 and 5 µs
    besides: an assumption. With a `host`, 0 or longer, HBM is told apart as well: 0.9 of the data
    sheet's, beside 0.44 of the peak. In FP8 what a matrix reads is kept in a byte a number.
    ValueError for an unknown name or precision, and for what `RECIPES` has.

    >>> machine_of("h100", 8, between=50e9).ring / 1e9
    367.0
    """
    asked = f"{gpu} {precision} {'NVL72' * (positive_int('per_node', per_node) > 16)}".upper()
    for names, where in RECIPES.items():
        if found := [name for name in names.split() if name in asked]:
            raise ValueError(
                f"{found[0]} isn't planned here: layouts with their measured speed are in {where}"
            )
    known = GPUS.get(gpu.lower())
    if known is None:
        raise unknown("GPU", gpu, GPUS)
    if precision not in ("bf16", "fp8") or (precision == "fp8" and gpu.lower() == "a100"):
        raise ValueError(
            f"precision must be bf16, or fp8 on a GPU that has it, got {precision!r} on {gpu}"
        )
    inside = inside or known.inside
    reached = REACHED if host is None else REACHED_APART
    plain = None
    if precision == "fp8":
        plain = flops or reached * known.peak
        reached *= 2 * REACHED_IN_FP8 / REACHED
    return Machine(
        per_node,
        Link(5e-6, inside),
        Link(10e-6, between),
        flops or reached * known.peak,
        memory or LEFT * known.memory,
        ring or known.ring * inside,
        per_node if ports is None else ports,
        reserved=RESERVED,
        hbm=None if host is None else 0.9 * known.hbm,
        host=host or 0,
        flops_bf16=plain,
    )
