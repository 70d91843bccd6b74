"""A batch for GPUs: large enough that launches don't set the pace, and small enough that all that runs has room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..actions import COMPUTE, SEND_B, SEND_F, parts
from ..errors import positive_int
from ..footprint import Memory
from ..lowering import lower
from ..runtime import Pool, RankError, Workload
from ..schedule import Schedule
from .models._cutting import layer_ranges

if TYPE_CHECKING:
    from .models import GPTConfig

MOST = 4096  # sequences
_STATE = 28  # bytes of a parameter: weight, gradient, AdamW's two moments, and what a step makes of it meanwhile: 12
_PROCESS = 2 * 10**9  # bytes of a rank: CUDA's context with all kernels loaded, workspaces, NCCL's buffers
_USABLE = 0.9  # of a card: the rest is what the allocator can't fill


def long_enough(
    pool: Pool,
    schedule: Schedule,
    make: Callable[..., Workload],
    *,
    batch_size: int,
    least_ms: float = 5.0,
    most: int = MOST,
) -> Workload:
    """`make(batch_size=n)` with the first n of batch_size, twice, four times it, ... for which every stage's forward of
    a microbatch takes `least_ms` milliseconds on the pool's GPUs, in bfloat16: each n is measured by two steps.

    Where the next n doesn't fit the memory, or would be over `most`, it is the last that did. On the CPU, which
    launches nothing, nothing is measured, and it is the first n.

    >>> import pplab as pp
    >>> from pplab.lab import models
    >>> from pplab.runtime import Pool
    >>> s = pp.build("1F1B", num_ranks=2, num_microbatches=8)
    >>> print(long_enough(Pool(2, device="cpu"), s, models.gpt, batch_size=8).batch_size)
    8
    """
    n, fits = positive_int("batch_size", batch_size), None
    while True:
        workload = make(batch_size=n)
        if pool.devices[0] == "cpu":
            return workload
        try:
            costs = pool.train(schedule, workload, steps=2, autocast=torch.bfloat16).costs
        except RankError as error:
            if fits is None or not out_of_memory(error):
                raise
            return fits
        fits, n = workload, 2 * n
        if n > most or all(costs.of("F", stage) >= least_ms for stage in range(schedule.num_stages)):
            return fits


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


def most_that_fits(
    schedules: Sequence[Schedule],
    config: GPTConfig,
    *,
    batch_size: int,
    card_bytes: float,
    num_gpus: int,
    host_bytes: float = float("inf"),
) -> tuple[int, dict[str, float]]:
    """The largest of batch_size times or by 2, 4, ... (at most 4,096) with which every schedule has room on cards of so
    many bytes, and what the one that needs most has there. It is never less than a sequence a microbatch."""

    def needed(n: int) -> tuple[bool, dict[str, float]]:
        found = [gpu_bytes(schedule, config, n, num_gpus) for schedule in schedules]
        fits = all(on_card(each) <= _USABLE * card_bytes and each["host"] <= host_bytes for each in found)
        return fits, max(found, key=on_card)

    n, least = positive_int("batch_size", batch_size), max(s.num_microbatches for s in schedules)
    while n // 2 >= least and not needed(n)[0]:
        n //= 2
    while 2 * n <= MOST and needed(2 * n)[0]:
        n *= 2
    return n, needed(n)[1]


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
