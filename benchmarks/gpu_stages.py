"""Measure what the course assumes about a stage, in one process: how long F, B, I and W take, and what copies at the
same time cost. For `make gpu`, and on a core for `make bench`."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import torch
from gpu_setting import Part, Setting, piece
from torch import Tensor

from pplab import lab
from pplab.lab import models
from pplab.runtime import Batch, Pool, RankContext, Stage, autocast
from pplab.runtime import gpu as door

_LAYERS = 2  # of the stage, which is the second of three: it has neither embedding nor head
_ROUNDS = (3, 50)  # of every measurement: as many as take twice as long as warming up, but no fewer and no more
_DTYPES = {"bf16": torch.bfloat16, "fp32": None}
_BOUND = 0.7  # of a GPU's time: where its host asks for so long, the asking sets the pace
RATIOS = {
    **{"B/F": ("B", "F"), "(I+W)/B": ("IW", "B"), "I/F": ("I", "F"), "W/F": ("W", "F")},
    **{"B/autograd's B": ("B", "autograd's B"), "torch's (I+W)/autograd's B": ("torch's IW", "autograd's B")},
}


@piece(60)
def stages(setting: Setting, part: Part) -> None:
    """Measure how long F, B, I and W of a GPT's layers take, by tokens and width, and whether launches set the pace."""
    size, dtypes = setting.size, ("bf16", "fp32") if setting.device == "cuda" else ("fp32",)
    with _pool(setting) as pool:
        print(f"{'width':>6} {'tokens':>7}      ", *(f"{kind} ms".rjust(9) for kind in "FBIW"), "TFLOP/s", *RATIOS)
        for dtype in dtypes:
            for width in size.widths:
                for tokens in size.tokens:
                    what = f"width {width}, {tokens} tokens, {dtype}"
                    samples = max(1, tokens // size.gpt["context"])
                    asked = (width, size.gpt["context"], samples, dtype, size.warm_ms)
                    row = part.attempt(what, partial(_stage, pool, *asked))
                    if row and row["ms"]["F"] > size.longest_ms:
                        part.leave_out(f"more than {what}", f"a forward takes {row['ms']['F']:.0f} ms already")
                    if not row or row["ms"]["F"] > size.longest_ms:
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


def _heads(width: int) -> int:
    return max(1, width // 64)


@lru_cache(maxsize=1)  # the last ones: to build wide layers takes seconds, and runs of one dtype leave them changed
def _modules(width: int, context: int, dtype: str, device: torch.device) -> tuple[torch.nn.Module, ...]:
    gpt = models.gpt(
        source="sample", num_layers=3 * _LAYERS, width=width, num_heads=_heads(width), context=context, batch_size=1
    )
    module = gpt.build_stage(1, 3).to(device)
    return module, copy.deepcopy(module), copy.deepcopy(module)


class Subject:
    """A stage of a GPT with whole backwards, and the same with halves, as a rank has them in a run, and its module
    alone, for autograd's own backward and PyTorch's halves. In mixed precision a stage has its own kind of Linears."""

    def __init__(self, context: RankContext, width: int, length: int, samples: int, dtype: str):
        *modules, self.module = _modules(width, length, dtype, context.device)
        options = {"index": 1, "num_stages": 3, "loss": None, "shares": [1.0], "autocast": _DTYPES[dtype]}
        made = zip(modules, (False, True), strict=True)
        self.whole, self.halves = (Stage(module, split=split, **options) for module, split in made)
        self.x, self.gradient = torch.randn(2, samples, length, width, device=context.device)
        self.device, self.batch, self.dtype = context.device, Batch((self.x,), self.x), _DTYPES[dtype]

    def round(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """The measured things, in this order."""
        for stage, kinds in ((self.whole, "FB"), (self.halves, "FIW")):
            calls = {
                "F": partial(stage.forward, 0, (self.x,), self.batch),
                "B": partial(stage.backward, 0, (self.gradient,)),
                "I": partial(stage.backward_input, 0, (self.gradient,)),
                "W": partial(stage.backward_weight, 0),
            }
            yield from ((kind, calls[kind]) for kind in kinds)
        yield "autograd's F", self.forward
        yield "autograd's B", lambda: self.y.backward(self.gradient)
        yield "torch's F", self.forward
        yield "torch's I", self.torchs_input_gradient
        yield "torch's W", self.torchs_weight_gradient

    def forward(self) -> None:
        """Run the module's forward, without a stage around it."""
        self.leaf = self.x.detach().requires_grad_()
        with autocast(self.device, self.dtype):
            self.y = self.module(self.leaf)

    def torchs_input_gradient(self) -> None:
        """Run what `torch.distributed.pipelining` runs as I."""
        from torch.distributed.pipelining._backward import stage_backward_input

        weights = self.module.parameters()
        _, self.groups = stage_backward_input([self.y], [self.gradient], [self.leaf], weights)

    def torchs_weight_gradient(self) -> None:
        """Run what `torch.distributed.pipelining` runs as W."""
        from torch.distributed.pipelining._backward import stage_backward_weight

        stage_backward_weight(self.module.parameters(), self.groups)

    def step(self) -> None:
        """Run a forward and a backward."""
        self.whole.forward(0, (self.x,), self.batch)
        self.whole.backward(0, (self.gradient,))


def stage_times(context: RankContext, width: int, length: int, samples: int, dtype: str, warm_ms: float) -> dict:
    """On a rank, a row. Times are the GPU's, between events, or the core's. `hosts_share` is the host's share of them.
    A ratio is given by its quartiles over rounds, each of which measures everything once."""
    subject = Subject(context, width, length, samples, dtype)
    took = _warm_up(subject.device, lambda: [call() for _, call in subject.round()], warm_ms)
    rounds, asked_ms = [], 0.0
    for _ in range(_count(2 * warm_ms, took)):
        marks = []
        for kind, call in subject.round():
            start, began = _mark(subject.device), time.perf_counter()
            call()
            asked_ms += (time.perf_counter() - began) * 1e3 if kind in "FBIW" else 0
            marks.append((kind, start, _mark(subject.device)))
        _settle(subject.device)
        rounds.append([(kind, _ms(start, end)) for kind, start, end in marks])
    whole_ms = sum(ms for marks in rounds for kind, ms in marks if kind in "FBIW")
    by_round = [{**dict(marks), "F": marks[0][1]} for marks in rounds]  # F of whole backwards, as B is
    for each in by_round:
        each["IW"], each["torch's IW"] = each["I"] + each["W"], each["torch's I"] + each["torch's W"]
    ratios = {name: [each[a] / each[b] for each in by_round] for name, (a, b) in RATIOS.items()}
    ms = {kind: statistics.median(each[kind] for each in by_round) for kind in by_round[0]}
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
        "pace": "core" if share is None else "launches" if share > _BOUND else "GPU",
        "rounds": len(rounds),
    }


def counted_flops(width: int, length: int, samples: int) -> dict[str, int]:
    """The floating-point operations of the stage's F, B, I and W: a product per weight and token in F, I and W each,
    and attention's products, which have no weights, two in F and four in I."""
    model = lab.Transformer(num_layers=_LAYERS, width=width, sequence=length)
    forward = _LAYERS * model.layer_flops(samples)
    weights = 2 * _LAYERS * model.layer_parameters * samples * length
    inputs = weights + 2 * (forward - weights)
    return {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}


def _count(all_ms: float, one_ms: float) -> int:
    """How many rounds take so long, within limits."""
    return min(max(_ROUNDS[0], round(all_ms / one_ms)), _ROUNDS[1])


def _warm_up(device: torch.device, work: Callable[[], object], warm_ms: float) -> float:
    """Do it twice or more, on a GPU for so many milliseconds. Returns how many milliseconds the last one took."""
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
    """Measure how far copies to pinned memory and back slow compute down. `lab.Offload` assumes: not at all."""
    size = setting.size
    if setting.device == "cpu":
        part.leave_out("all of it", "needs a GPU, which copies while it computes")
        return
    samples = max(1, size.tokens[-1] // 4 // size.gpt["context"])
    with _pool(setting) as pool:
        for ways in (("out",), ("back",), ("out", "back")):
            asked = (size.widths[0], size.gpt["context"], samples, size.copy_bytes, ways, size.warm_ms)
            part.attempt(f"pinned, {' and '.join(ways)}", partial(_copies, pool, *asked))


def _copies(pool: Pool, *asked: object) -> dict:
    row = pool.run(copy_times, *asked)[0]
    print(
        f"{row['memory']} memory, {row['ways']}: compute takes {row['slower']:.2f} times as long beside copies, which "
        f"make {row['beside_gb_per_s']:.1f} GB/s, and alone {row['alone_gb_per_s']:.1f}",
        flush=True,
    )
    return row


def copy_times(
    context: RankContext, width: int, length: int, samples: int, num_bytes: int, ways: tuple[str, ...], warm_ms: float
) -> dict:
    """On a rank, a row. The copies of each direction are on a stream of their own, and enough are asked for ahead of
    time to last a little longer than the steps."""
    subject, device = Subject(context, width, length, samples, "bf16"), context.device
    lanes = [(door.cuda.Stream(device), *_ends(way, device, num_bytes)) for way in ways]
    step_ms, copy_ms = (_warm_up(device, work, warm_ms) for work in (subject.step, lambda: _copy(device, lanes, 1)))
    steps = _count(warm_ms, step_ms)
    count = max(1, round(1.2 * steps * step_ms / copy_ms))
    alone = _copy(device, lanes, count)
    _settle(device)
    before_ms = _steps(subject, steps)
    beside = _copy(device, lanes, count)
    beside_ms = _steps(subject, steps)
    compute_ms = (before_ms + _steps(subject, steps)) / 2
    each = {
        name: statistics.mean(count * num_bytes / _ms(*marks) / 1e6 for marks in found)
        for name, found in (("alone", alone), ("beside", beside))
    }
    return {
        "memory": "pinned",
        "ways": " and ".join(ways),
        "bytes": num_bytes,
        "alone_gb_per_s": each["alone"],
        "beside_gb_per_s": each["beside"],
        "compute_ms": compute_ms,
        "beside_ms": beside_ms,
        "slower": beside_ms / compute_ms,
    }


def _ends(way: str, device: torch.device, num_bytes: int) -> tuple[Tensor, Tensor]:
    """Where a copy starts and ends."""
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
    return (there, host) if way == "out" else (host, there)


def _copy(device: torch.device, lanes: list[tuple], count: int) -> list[tuple[object, object]]:
    """Ask for so many copies on every stream, once earlier work is done. Returns when they start and end, which the
    caller has to wait for."""
    _settle(device)
    found = []
    for stream, source, target in lanes:
        with door.cuda.stream(stream):
            start = _mark(device)
            for _ in range(count):
                target.copy_(source, non_blocking=True)
            found.append((start, _mark(device)))
    return found


def _steps(subject: Subject, count: int) -> float:
    """The median time of so many steps, in milliseconds, when all that was asked for is done."""
    marks = [_mark(subject.device)]
    for _ in range(count):
        subject.step()
        marks.append(_mark(subject.device))
    _settle(subject.device)
    return statistics.median(_ms(start, end) for start, end in zip(marks, marks[1:], strict=False))
