"""What the course assumes of a stage, in one process: how long F, B, I and W take, what copies beside them cost, and
whether what `lab.Offload` says of copies holds. For `make gpu`, and on a core for `make bench`."""

from __future__ import annotations

import copy
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache, partial

import torch
from gpu_batch import kept_by_layer, parameters
from gpu_launches import BOUND
from gpu_runs import warm_up_steps
from gpu_setting import Part, Setting, piece
from to_host import ToHost
from torch import Tensor

import pplab as pp
from pplab import lab
from pplab.lab import models
from pplab.runtime import Batch, Pool, RankContext, Stage
from pplab.runtime import gpu as door

_LAYERS = 2  # of the stage, which is the second of three: it has neither embedding nor head
_ROUNDS = (3, 50)  # of every measurement: as many as take twice as long as warming up, but no fewer and no more
_DTYPES = {"bf16": torch.bfloat16, "fp32": None}
RATIOS = {"B/F": ("B", "F"), "(I+W)/B": ("IW", "B"), "I/F": ("I", "F"), "W/F": ("W", "F")}


@piece(60)
def stages(setting: Setting, part: Part) -> None:
    """How long F, B, I and W of a GPT's layers take, by tokens and width; and whether launches set the pace."""
    size, dtypes = setting.size, ("bf16", "fp32") if setting.device == "cuda" else ("fp32",)
    with _pool(setting) as pool:
        print(f"{'width':>6} {'tokens':>7}      ", *(f"{kind} ms".rjust(9) for kind in "FBIW"), "TFLOP/s", *RATIOS)
        for dtype in dtypes:
            for width in size.widths:
                for tokens in size.tokens:
                    what = f"width {width}, {tokens} tokens, {dtype}"
                    if why := _no_room(setting, width, tokens):
                        part.leave_out(f"{what} and more", why)
                        break
                    samples = max(1, tokens // size.gpt["context"])
                    asked = (width, size.gpt["context"], samples, dtype, size.warm_ms)
                    row = part.attempt(what, partial(_stage, pool, *asked))
                    if row and row["ms"]["F"] > size.longest_ms:
                        part.leave_out(f"more than {what}", f"a forward takes {row['ms']['F']:.0f} ms already")
                        break


def _stage(pool: Pool, *asked: object) -> dict:
    row = pool.run(stage_times, *asked)[0]
    ms = " ".join(f"{row['ms'][kind]:9.3f}" for kind in "FBIW")
    ratios = " ".join(f"{middle:.2f}" for _, middle, _ in row["ratios"].values())
    said = f"{row['width']:6} {row['tokens']:7} {row['dtype']} {ms} {row['tflops']['F']:7.3f} {ratios}"
    print(said, "" if row["hosts_share"] is None else f"host {row['hosts_share']:.0%}", flush=True)
    return row


def _pool(setting: Setting) -> Pool:
    """One rank, which has the device, or one core, to itself."""
    return Pool(1, device=setting.device, threads=1, timeout_s=setting.size.timeout_s)


def _no_room(setting: Setting, width: int, tokens: int) -> str:
    """Why a stage can't be measured with so many tokens; nothing where it can be."""
    if setting.device == "cpu":
        return ""
    config = models.GPTConfig(width=width, num_heads=_heads(width))
    room = door.cuda.get_device_properties(0).total_memory
    # What it keeps, as much again for what is put off, and two copies of weights and gradients.
    needed = 2 * _LAYERS * kept_by_layer(config) * tokens + 16 * parameters(config, _LAYERS, False, False)
    return "" if needed < 0.8 * room else f"needs up to {needed / 1e9:.0f} GB, and the GPU has {room / 1e9:.0f}"


def _heads(width: int) -> int:
    return max(1, width // 64)


@lru_cache(maxsize=1)  # the last ones: to build wide layers takes seconds, and runs of one dtype leave them changed
def _modules(width: int, context: int, dtype: str, device: torch.device) -> tuple[torch.nn.Module, torch.nn.Module]:
    gpt = models.gpt(
        source="sample", num_layers=3 * _LAYERS, width=width, num_heads=_heads(width), context=context, batch_size=1
    )
    module = gpt.build_stage(1, 3).to(device)
    return module, copy.deepcopy(module)


class Subject:
    """A stage of a GPT whose backwards are whole, and the same with halves, as a rank has them in a run."""

    def __init__(self, context: RankContext, width: int, length: int, samples: int, dtype: str):
        made = zip(_modules(width, length, dtype, context.device), (False, True), strict=True)
        options = {"index": 1, "num_stages": 3, "loss": None, "shares": [1.0], "autocast": _DTYPES[dtype]}
        self.whole, self.halves = (Stage(module, split=split, **options) for module, split in made)
        self.x, self.gradient = torch.randn(2, samples, length, width, device=context.device)
        self.device, self.batch = context.device, Batch((self.x,), self.x)

    def round(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """What is measured, in this order."""
        for stage, kinds in ((self.whole, "FB"), (self.halves, "FIW")):
            calls = {
                "F": partial(stage.forward, 0, (self.x,), self.batch),
                "B": partial(stage.backward, 0, (self.gradient,)),
                "I": partial(stage.backward_input, 0, (self.gradient,)),
                "W": partial(stage.backward_weight, 0),
            }
            yield from ((kind, calls[kind]) for kind in kinds)

    def step(self) -> None:
        """A forward and a backward."""
        self.whole.forward(0, (self.x,), self.batch)
        self.whole.backward(0, (self.gradient,))


def stage_times(context: RankContext, width: int, length: int, samples: int, dtype: str, warm_ms: float) -> dict:
    """On a rank: a row. Times are the GPU's, between events, or the core's; `hosts_share` is what the host takes of
    them to ask, as in `Launches`. A ratio is its quartiles over rounds, each of which measures everything once."""
    subject = Subject(context, width, length, samples, dtype)
    took = _warm_up(subject.device, lambda: [call() for _, call in subject.round()], warm_ms)
    rounds, asked_ms = [], 0.0
    for _ in range(_count(2 * warm_ms, took)):
        marks = []
        for kind, call in subject.round():
            start, began = _mark(subject.device), time.perf_counter()
            call()
            asked_ms += (time.perf_counter() - began) * 1e3
            marks.append((kind, start, _mark(subject.device)))
        _settle(subject.device)
        rounds.append([(kind, _ms(start, end)) for kind, start, end in marks])
    whole_ms = sum(ms for marks in rounds for _, ms in marks)
    by_round = [{**dict(marks), "F": marks[0][1]} for marks in rounds]  # F of whole backwards, as B is
    for each in by_round:
        each["IW"] = each["I"] + each["W"]
    ratios = {name: [each[a] / each[b] for each in by_round] for name, (a, b) in RATIOS.items()}
    ms = {kind: statistics.median(each[kind] for each in by_round) for kind in "FBIW"}
    share = None if subject.device.type == "cpu" else asked_ms / whole_ms
    flops = counted_flops(width, length, samples)
    return {
        "width": width,
        "tokens": samples * length,
        "context": length,
        "layers": _LAYERS,
        "dtype": dtype,
        "ms": ms,
        "flops": flops,
        "tflops": {kind: flops[kind] / ms[kind] / 1e9 for kind in "FBIW"},
        "ratios": {name: statistics.quantiles(found, n=4) for name, found in ratios.items()},
        "hosts_share": share,
        "pace": "core" if share is None else "launches" if share > BOUND else "GPU",
        "rounds": len(rounds),
    }


def counted_flops(width: int, length: int, samples: int) -> dict[str, int]:
    """Of the stage's F, B, I and W: a product per weight and token in F, I and W each; attention's two products in F,
    which has no weights, and four in I."""
    model = lab.Transformer(num_layers=_LAYERS, width=width, sequence=length)
    forward = _LAYERS * model.layer_flops(samples)
    weights = 2 * _LAYERS * model.layer_parameters * samples * length
    inputs = weights + 2 * (forward - weights)
    return {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}


def _count(all_ms: float, one_ms: float) -> int:
    """How many rounds take so long, within limits."""
    return min(max(_ROUNDS[0], round(all_ms / one_ms)), _ROUNDS[1])


def _warm_up(device: torch.device, work: Callable[[], object], warm_ms: float) -> float:
    """Do it twice or more, on a GPU for so many milliseconds; returns how many the last one took."""
    begun, count, took = time.perf_counter(), 0, 0.0
    while count < 2 or (device.type == "cuda" and (time.perf_counter() - begun) * 1e3 < warm_ms):
        started, count = time.perf_counter(), count + 1
        work()
        _settle(device)
        took = (time.perf_counter() - started) * 1e3
    return took


def _mark(device: torch.device) -> object:
    """A moment of the current stream, or of the core."""
    if device.type == "cpu":
        return time.perf_counter()
    event = door.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms(start: object, end: object) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        door.cuda.synchronize()


@piece(40)
def copies(setting: Setting, part: Part) -> None:
    """Copies to the host and back beside compute: `lab.Offload` assumes that neither slows the other down."""
    size = setting.size
    samples = max(1, size.tokens[-1] // 4 // size.gpt["context"])
    with _pool(setting) as pool:
        for pinned in (True, False):
            if pinned and setting.device == "cpu":
                part.leave_out("pinned memory", "needs a GPU")
                continue
            for ways in (("out",), ("back",), ("out", "back")):
                asked = (size.widths[0], size.gpt["context"], samples, size.copy_bytes, pinned, ways, size.warm_ms)
                what = f"{'pinned' if pinned else 'pageable'}, {' and '.join(ways)}"
                part.attempt(what, partial(_copies, pool, *asked))


def _copies(pool: Pool, *asked: object) -> dict:
    row = pool.run(copy_times, *asked)[0]
    print(
        f"{row['memory']} memory, {row['ways']}: compute takes {row['slower']:.2f} times as long beside copies, which "
        f"make {row['beside_gb_per_s']:.1f} GB/s, and alone {row['alone_gb_per_s']:.1f}",
        flush=True,
    )
    return row


def copy_times(
    context: RankContext,
    width: int,
    length: int,
    samples: int,
    num_bytes: int,
    pinned: bool,
    ways: tuple[str, ...],
    warm_ms: float,
) -> dict:
    """On a rank: a row. A thread for each direction copies on a stream of its own, as `ToHost`'s engines do."""
    dtype = "fp32" if context.device.type == "cpu" else "bf16"
    subject = Subject(context, width, length, samples, dtype)
    took = _warm_up(subject.device, subject.step, warm_ms)
    count = _count(warm_ms, took)
    pairs = [_ends(way, context.device, num_bytes, pinned) for way in ways]
    _, copied_alone = _beside(context.device, pairs, lambda: time.sleep(took * count / 1e3))
    before_ms = _steps(subject, count)
    beside_ms, copied = _beside(context.device, pairs, lambda: _steps(subject, count))
    alone_ms = (before_ms + _steps(subject, count)) / 2
    return {
        "memory": "pinned" if pinned else "pageable",
        "ways": " and ".join(ways),
        "bytes": num_bytes,
        "alone_gb_per_s": _rate(num_bytes, copied_alone),
        "beside_gb_per_s": _rate(num_bytes, copied),
        "compute_ms": alone_ms,
        "beside_ms": beside_ms,
        "slower": beside_ms / alone_ms,
    }


def _ends(way: str, device: torch.device, num_bytes: int, pinned: bool) -> tuple[Tensor, Tensor]:
    """Where a copy starts and ends."""
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    return (there, host) if way == "out" else (host, there)


def _steps(subject: Subject, count: int) -> float:
    """The median of so many steps, in milliseconds."""
    marks = [_mark(subject.device)]
    for _ in range(count):
        subject.step()
        marks.append(_mark(subject.device))
        _settle(subject.device)
    return statistics.median(_ms(start, end) for start, end in zip(marks, marks[1:], strict=False))


def _beside(
    device: torch.device, pairs: list[tuple[Tensor, Tensor]], work: Callable[[], object]
) -> tuple[object, list[tuple[int, float]]]:
    """What the work returns, and how many copies each engine made beside it, in how many seconds."""
    begun, enough, made = threading.Barrier(len(pairs) + 1), threading.Event(), _mark(device)
    with ThreadPoolExecutor(len(pairs)) as engines:
        found = [engines.submit(_copy, device, *pair, made, begun, enough) for pair in pairs]
        try:
            begun.wait()
            done = work()
        except threading.BrokenBarrierError:
            done = None  # an engine failed: its result says why
        finally:
            enough.set()
        return done, [each.result() for each in found]


def _copy(
    device: torch.device,
    source: Tensor,
    target: Tensor,
    made: object,
    begun: threading.Barrier,
    enough: threading.Event,
) -> tuple[int, float]:
    """Copy what is there once the GPU has `made` it, again and again, until it is enough."""
    stream = door.cuda.Stream(device) if device.type == "cuda" else None
    with door.cuda.stream(stream) if stream else nullcontext():
        try:
            if stream:
                made.synchronize()
            target.copy_(source, non_blocking=True)
            if stream:
                stream.synchronize()
        except Exception:
            begun.abort()  # or the others would wait for this one
            raise
        begun.wait()
        started, count = time.perf_counter(), 0
        while not (count and enough.is_set()):
            target.copy_(source, non_blocking=True)
            if stream:
                stream.synchronize()
            count += 1
        return count, time.perf_counter() - started


def _rate(num_bytes: int, copied: list[tuple[int, float]]) -> float:
    """Gigabytes per second in each direction, on average."""
    return statistics.mean(count * num_bytes / seconds / 1e9 for count, seconds in copied)


@piece(20)
def offload(setting: Setting, part: Part) -> None:
    """A step whose activations wait on the host, measured, and as `lab.Offload` predicts it from a step without."""
    with _pool(setting) as pool:
        part.attempt("GPipe on one rank", partial(_offload, pool, setting))


def _offload(pool: Pool, setting: Setting) -> dict:
    size = setting.size
    s = pp.build("GPipe", num_ranks=1, num_microbatches=size.num_microbatches)
    gpt = models.gpt(source="sample", **size.gpt)
    options: dict = {"autocast": torch.bfloat16 if setting.device == "cuda" else None}
    warmup = warm_up_steps(partial(pool.train, s, gpt, **options), size, pool.devices[0])
    options |= {"steps": max(3, size.steps), "warmup": warmup}
    plain = pool.train(s, gpt, lab.Meter(), **options)
    run = pool.train(s, gpt, lab.Meter(), ToHost(), **options)
    copied = run.extras["to_host"]
    predicted = copied.offload(plain.held.bytes_of).simulate(s, lab.calibrate(plain.timeline)).timeline.makespan
    row = {
        "schedule": s.name,
        "num_microbatches": s.num_microbatches,
        "workload": gpt.name,
        "copied_bytes": copied.copied_bytes[0],
        "out_ms": copied.out_ms[0],
        "back_ms": copied.back_ms[0],
        "plain_ms": plain.timeline.makespan,
        "measured_ms": run.timeline.makespan,
        "predicted_ms": predicted,
        "error": predicted / run.timeline.makespan - 1,
    }
    print(
        f"{s.name} on one rank: {row['plain_ms']:.1f} ms a step; with copies {row['measured_ms']:.1f}, predicted "
        f"{predicted:.1f} ({row['error']:+.1%})",
        flush=True,
    )
    return row
