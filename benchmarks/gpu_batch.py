"""A batch for GPUs: large enough that launches don't set the pace, and small enough that all that runs has room."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pplab.actions import COMPUTE, SEND_B, SEND_F, parts
from pplab.builders import build
from pplab.errors import positive_int
from pplab.footprint import Memory
from pplab.lab.models import GPTConfig, layer_ranges
from pplab.lowering import lower
from pplab.runtime import Pool, RankError, Workload
from pplab.schedule import Schedule

if TYPE_CHECKING:
    from pplab.runtime import RankContext

MOST = 4096  # sequences
WIDEST = 2048  # each stage builds the whole model: some seconds of a CPU then, four times as many at twice the width
_TOKENS = 4096  # of a microbatch: from then on, width is what grows first
_TOGETHER = {"batch_size": ("batch_size",), "width": ("width", "num_heads")}
_STATE = 28  # bytes of a parameter: weight, gradient, AdamW's two moments, and what a step makes of it meanwhile: 12
_PROCESS = 2 * 10**9  # bytes of a rank: CUDA's context with all kernels loaded, workspaces, NCCL's buffers
USABLE = 0.9  # of a card: the rest is what the allocator can't fill


@dataclass(frozen=True)
class Reached:
    """A workload for a machine's devices, and how long its shortest forward takes there; as text, one line."""

    workload: Workload
    num_microbatches: int
    least_ms: float
    forward_ms: float | None = None  # of a microbatch on a stage, in bfloat16; None on the CPU, where none is measured
    turns: int = 1  # ranks of a GPU, whose turns are in what was measured, and not in forward_ms

    @property
    def batch_size(self) -> int:
        """Of the workload."""
        return self.workload.batch_size

    @property
    def config(self) -> GPTConfig | None:
        """Its sizes, if it is a GPT."""
        found = getattr(self.workload, "config", None)
        return found if type(found) is GPTConfig else None

    @property
    def length(self) -> int:
        """Tokens of a microbatch, or samples if it is no GPT."""
        return self.batch_size // self.num_microbatches * (self.config.context if self.config else 1)

    def __str__(self) -> str:
        width = f"width {self.config.width}, " if self.config else ""
        sizes = f"{width}batch {self.batch_size}, {self.length:,} {'tokens' if self.config else 'samples'} a microbatch"
        if self.forward_ms is None:
            return f"{sizes}: nothing was measured, since a CPU launches nothing"
        missed = "" if self.forward_ms >= self.least_ms else f"{self.least_ms:g} ms weren't reached: "
        alone = ", if its rank had the GPU alone" if self.turns > 1 else ""
        return f"{missed}{sizes}, the shortest forward takes {self.forward_ms:.1f} ms{alone}"


def long_enough(
    pool: Pool,
    schedule: Schedule,
    make: Callable[..., Workload],
    *,
    batch_size: int,
    least_ms: float = 5.0,
    most: int | None = None,
    widest: int = WIDEST,
) -> Reached:
    """`make(batch_size=n)`, as large as it must be for every stage's forward of a microbatch to take `least_ms`
    milliseconds on the pool's GPUs, in bfloat16: each size is measured by two steps. Where ranks take turns on a GPU, a
    forward's span has the others' in it, and counts for its part.

    The batch is doubled up to 4,096 tokens a microbatch, then a GPT's width, and its heads, up to `widest`, then the
    batch again. No size is tried with which a GPT could need more memory than there is, in whatever order the ranks
    take the batch; or, for who has counted, no batch of more than `most`. Where a rank finds no memory all the same,
    the size before stays. On the CPU, which launches nothing, nothing is measured, and it is the first n.

    >>> import pplab as pp
    >>> from pplab.lab import models
    >>> from pplab.runtime import Pool
    >>> s = pp.build("1F1B", num_ranks=2, num_microbatches=8)
    >>> print(long_enough(Pool(2, device="cpu"), s, models.gpt, batch_size=8))
    width 128, batch 8, 128 tokens a microbatch: nothing was measured, since a CPU launches nothing
    """
    size = {"batch_size": positive_int("batch_size", batch_size)}
    turns = 1 if pool.beside else math.ceil(pool.num_ranks / len(set(pool.devices)))
    reached = Reached(make(**size), schedule.num_microbatches, least_ms, turns=turns)
    if pool.devices[0] == "cpu":
        return reached
    reached, limits, card = _measured(pool, schedule, reached), {"batch_size": most or MOST}, min(pool.run(card_bytes))
    if reached.config:
        size |= {name: getattr(reached.config, name) for name in ("width", "num_heads")}
        limits["width"] = widest
    while reached.forward_ms < least_ms and limits:
        order = ("batch_size", "width") if reached.length < _TOKENS else ("width", "batch_size")
        grows = next(name for name in order if name in limits)
        larger = size | {name: 2 * size[name] for name in _TOGETHER[grows]}
        found = replace(reached, workload=make(**larger))
        try:
            if larger[grows] > limits[grows] or not (most or _has_room(schedule, found, card, len(set(pool.devices)))):
                del limits[grows]
            else:
                reached, size = _measured(pool, schedule, found), larger
        except RankError as error:
            if not out_of_memory(error):
                raise
            del limits[grows]
    return reached


def _measured(pool: Pool, schedule: Schedule, size: Reached) -> Reached:
    costs = pool.train(schedule, size.workload, steps=2, autocast=torch.bfloat16).costs
    return replace(size, forward_ms=min(costs.of("F", stage) for stage in range(schedule.num_stages)) / size.turns)


def _has_room(schedule: Schedule, size: Reached, card_bytes: float, num_gpus: int) -> bool:
    """By the schedule, and by GPipe with the whole batch as one microbatch: no other keeps more, and one process that
    takes it whole, to compare gradients, keeps as much. Of what is no GPT, only ranks can say it."""
    if not size.config:
        return True
    whole = build("GPipe", num_ranks=schedule.num_ranks, num_microbatches=1)
    needs = [on_card(gpu_bytes(each, size.config, size.batch_size, num_gpus)) for each in (schedule, whole)]
    return max(needs) <= USABLE * card_bytes


def card_bytes(context: RankContext) -> int:
    """The memory of a rank's GPU."""
    from pplab.runtime import cuda

    return cuda.get_device_properties(context.device).total_memory


def out_of_memory(error: RankError) -> bool:
    """Whether a rank failed because a GPU, or the host's shared memory, had no room."""
    return any(words in error.cause for words in ("OutOfMemory", "out of memory", "ALLOC_FAILED", "No space left"))


def gpu_bytes(schedule: Schedule, config: GPTConfig, batch_size: int, num_gpus: int) -> dict[str, float]:
    """At most so many bytes are on the fullest of `num_gpus` GPUs while a GPT trains there, by what they are for:

    - kept: by forwards for their backwards, as the schedule's order has it, in float32, which keeps more than bfloat16;
    - state: weights, gradients, AdamW's moments;
    - messages: all that a rank sends and receives in a step over NCCL, as if none were gone before the last;
    - working: what a layer's backward makes, and what the scores need;
    - processes: contexts, workspaces, NCCL's buffers;
    - reference: one process that takes the microbatches in turn, after the run, when nothing else is there;
    - host: of the host's shared memory, where ranks share GPUs: what all of them send in a step.
    """
    tokens = batch_size // schedule.num_microbatches * config.context
    layer, scores, message = kept_by_layer(config) * tokens, kept_by_head(config) * tokens, 4 * config.width * tokens
    last, count = schedule.num_stages - 1, config.num_layers
    layers = [len(each) for each in layer_ranges(count, schedule.num_stages)]
    places = 8 * config.context  # of the tokens, which the embedding keeps
    kept = [layer * n + places * (s == 0) + (scores + 16) * (s == last) for s, n in enumerate(layers)]
    weights = [parameters(config, n, s == 0, s == last) for s, n in enumerate(layers)]
    peaks = schedule.peak_held(Memory(kept, while_input_gradient=message, unit="bytes"))
    state = [_STATE * sum(weights[s] for s in schedule.stages_of(r)) for r in range(schedule.num_ranks)]
    crossing = [[parts(item)[0].kind for item in row] for row in lower(schedule)]
    sent = [sum(kind in (SEND_F, SEND_B) for kind in row) * message for row in crossing]
    shared = num_gpus < schedule.num_ranks
    both = [0 if shared else sum(kind not in COMPUTE for kind in row) * message for row in crossing]

    def fullest(of: Sequence[float]) -> float:
        return max(sum(of[gpu :: min(num_gpus, len(of))]) for gpu in range(min(num_gpus, len(of))))

    whole = parameters(config, count, True, True)
    one = max(layer * count + scores, 0.6 * layer * count + scores + 2 * whole)  # bfloat16 keeps weights, cast
    working = [layer + 3 * scores] * schedule.num_ranks
    return {
        "kept": fullest(peaks),
        "state": fullest(state),
        "messages": fullest(both),
        "working": fullest(working),
        "processes": fullest([_PROCESS] * schedule.num_ranks),
        "reference": one + working[0] + 8 * whole,
        "host": sum(sent) if shared else 0,
    }


def on_card(needs: Mapping[str, float]) -> float:
    """The most that is there at once: the run's, or the reference's beside the idle processes."""
    run = sum(needs[part] for part in ("kept", "state", "messages", "working"))
    return max(run, needs["reference"]) + needs["processes"]


def kept_by_layer(config: GPTConfig) -> int:
    """Bytes that a layer keeps of a token in float32: 16 vectors, what attention sums to, two norms' figures."""
    return 64 * config.width + 4 * config.num_heads + 16


def kept_by_head(config: GPTConfig) -> int:
    """The same of the head and the loss: two vectors, a norm's figures, a label, the scores' logarithms."""
    return 8 * config.width + 8 + 8 + 4 * config.vocabulary


def parameters(config: GPTConfig, num_layers: int, is_first: bool, is_last: bool) -> int:
    """How many a part of a GPT has."""
    width, vocabulary = config.width, config.vocabulary
    ends = is_first * (vocabulary + config.context) * width + is_last * (vocabulary * width + 2 * width)
    return num_layers * (12 * width**2 + 13 * width) + ends
