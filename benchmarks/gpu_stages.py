"""What a stage's actions take in one process, for `make gpu`: the durations that every chapter assumes something of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from gpu_setting import Part, Setting, piece

from pplab.lab.gpu_batch import kept_by_layer
from pplab.lab.models import GPT, GPTConfig
from pplab.runtime import Batch, Pool, Stage
from pplab.runtime import gpu as door
from pplab.runtime.rank import RankContext

_LAYERS, _CONTEXT = 2, 512
_LEAST_S, _FEWEST = 0.5, 5  # of one size


@piece(120)
def stages(setting: Setting, part: Part) -> None:
    """One process: F, B, I and W of two layers by tokens and width, in bf16: rates, ratios, and how long hosts ask."""
    with setting.pool(1, "alone") as pool:
        for width in setting.size.widths:
            for tokens in setting.size.tokens:
                what = f"width {width}, {tokens} tokens"
                heads, length = max(1, width // 64), min(tokens, _CONTEXT)
                config = GPTConfig(num_layers=_LAYERS, width=width, num_heads=heads, context=length)
                if setting.device == "cuda":
                    needed = (_LAYERS + 1) * kept_by_layer(config) * tokens + 2e9
                    if needed > 0.8 * door.cuda.get_device_properties(0).total_memory:
                        part.leave_out(what, f"it may need {needed / 1e9:.0f} GB")
                        continue
                part.attempt(what, partial(_row, pool, config, tokens))


def _row(pool: Pool, config: GPTConfig, tokens: int) -> dict:
    width, length = config.width, config.context
    took, asked = pool.run(times, config, tokens // length)[0]
    flops = _LAYERS * tokens * (24 * width**2 + 2 * length * width)  # of a forward; a token sees half of the others
    f, b, i, w = (took[kind] for kind in "FBIW")
    row = {"width": width, "tokens": tokens, "num_layers": _LAYERS, "length": length, "dtype": "bf16", "ms": took}
    row |= {"forward_tflops": flops / f / 1e9, "backward_tflops": 2 * flops / b / 1e9, "hosts_ms": asked}
    row |= {"b_over_f": b / f, "halves_over_b": (i + w) / b, "w_over_f": w / f, "hosts_share": asked["F"] / f}
    print(
        f"width {width}, {tokens} tokens: F {f:.2f} ms, {row['forward_tflops']:.1f} TFLOP/s, B/F {b / f:.2f},",
        f"(I+W)/B {(i + w) / b:.2f}, W/F {w / f:.2f}, hosts' share {row['hosts_share']:.0%}",
        flush=True,
    )
    return row


def times(context: RankContext, config: GPTConfig, samples: int) -> tuple[dict[str, float], dict[str, float]]:
    """On a rank: the median milliseconds of F, B, I and W of a stage between two others, by the device's clock, and
    those in which the host asked for them."""
    module = GPT(config).part(range(config.num_layers), False, False).to(context.device)
    stage = Stage(module, 1, 3, lambda output, target: output, [1.0], split=True, autocast=torch.bfloat16)
    shape = samples, config.context, config.width
    x, gradient = (torch.randn(shape, device=context.device) for _ in range(2))
    batch = Batch((), torch.zeros(samples, device=context.device))
    marks: list[tuple[str, object, object, float]] = []

    def timed(kind: str, act: Callable, *given: object) -> None:
        began, start = time.perf_counter(), _mark(context)
        act(0, *given)
        marks.append((kind, start, _mark(context), time.perf_counter() - began))

    started = time.perf_counter()
    for turn in range(1000):
        module.zero_grad(set_to_none=True)
        timed("F", stage.forward, (x,), batch)
        timed("B", stage.backward, (gradient,))
        timed("F", stage.forward, (x,), batch)
        timed("I", stage.backward_input, (gradient,))
        timed("W", stage.backward_weight)
        if context.device.type == "cuda":
            door.cuda.synchronize()  # the host runs at most one turn ahead
        context.watch(f"measuring, turn {turn}")
        if turn + 1 >= _FEWEST and time.perf_counter() - started > _LEAST_S:
            break
    later = marks[5 * (len(marks) // 10) :]  # the first half warms up
    took, asked = {}, {}
    for kind in "FBIW":
        took[kind] = statistics.median(_between(start, end) for each, start, end, _ in later if each == kind)
        asked[kind] = statistics.median(host * 1e3 for each, *_, host in later if each == kind)
    return took, asked


def _mark(context: RankContext) -> object:
    if context.device.type != "cuda":
        return time.perf_counter()
    event = door.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: object, end: object) -> float:
    """Milliseconds."""
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)
