"""What the runtime takes from NVIDIA's documents about a GPU, measured on the one that is there.

Each row says what the documents have one expect, what was found, and whether the two agree. That they don't is a
finding, no failure. Every measurement is a function that a rank runs, one rank for each number of hardware queues.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import torch
from gpu_setting import Part, Setting, piece

from pplab.runtime import Pool, RankContext
from pplab.runtime import gpu as door

_SPIN_MS = 100.0  # far longer than anything that is done beside it
_BYTES = 2**26
_NOTED_MS = 0.1  # a clock that is further off gets a note in the run
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@piece(60)
def assumptions(setting: Setting, part: Part) -> None:
    """What NVIDIA's documents say, and what this GPU does: allocations beside spinning kernels, queues, clocks."""
    lacks = "a GPU" if setting.device != "cuda" else "a kernel that spins, which this torch lacks"
    if setting.device != "cuda" or not hasattr(torch._C, "_cuda_sleep"):
        for what, *_ in ASSUMPTIONS:
            part.leave_out(what, f"needs {lacks}")
        return
    for connections in dict.fromkeys(asked for *_, asked in ASSUMPTIONS):
        # By NCCL, a pool would set the number of queues itself.
        pool = Pool(1, device="cuda", transport="shared", timeout_s=setting.size.timeout_s)
        with _environment(connections), pool:
            for what, measure, asked in ASSUMPTIONS:
                if asked != connections:
                    continue
                if row := part.attempt(what, partial(_on_a_rank, pool, what, measure, connections)):
                    said = "agrees" if row["agrees"] else "DOES NOT AGREE"
                    print(
                        f"{what}: expected {row['expected']}, found {row['found']}: {said} {row['measured']}",
                        flush=True,
                    )


def _on_a_rank(pool: Pool, what: str, measure: Callable, connections: int) -> dict:
    documents, expected, found, measured = pool.run(measure)[0]
    row = {"assumption": what, "documents": documents, "expected": expected, "found": found}
    return {**row, "agrees": expected == found, "measured": measured, "connections": connections}


@contextmanager
def _environment(connections: int) -> object:
    """Ranks that start meanwhile have so many hardware queues."""
    before = os.environ.get(_CONNECTIONS)
    os.environ[_CONNECTIONS] = str(connections)
    try:
        yield
    finally:
        os.environ.pop(_CONNECTIONS)
        if before is not None:
            os.environ[_CONNECTIONS] = before


def allocating(context: RankContext) -> tuple:
    """cudaMalloc beside a kernel that spins."""
    door.release()
    spinning = _spin(context.device)
    held, ms = _timed(lambda: torch.empty(_BYTES, dtype=torch.uint8, device=context.device))
    waited = spinning.query()
    door.cuda.synchronize()
    del held
    documents = "CUDA's guide: a device memory allocation between two streams' commands keeps them from running at once"
    return documents, True, waited, {"host_ms": ms, "spin_ms": _SPIN_MS}


def emptying(context: RankContext) -> tuple:
    """cudaFree, by `empty_cache`, beside a kernel that spins."""
    held = torch.empty(_BYTES, dtype=torch.uint8, device=context.device)
    spinning = _spin(context.device)
    del held
    _, ms = _timed(door.cuda.empty_cache)
    waited = spinning.query()
    door.cuda.synchronize()
    return "PyTorch and CUDA: freeing device memory waits for the device", True, waited, {"host_ms": ms}


def queueing(context: RankContext) -> tuple:
    """A kernel beside five streams that spin: does it get past them?"""
    x = torch.ones(1024, device=context.device)
    x.add_(1)  # loaded before anything spins
    streams = [door.cuda.Stream(context.device) for _ in range(6)]
    door.cuda.synchronize()
    spinning = [_spin(context.device, stream) for stream in streams[:5]]
    with door.cuda.stream(streams[5]):
        x.add_(1)
        done = door.cuda.Event()
        done.record()
    _, ms = _timed(done.synchronize)
    passed = not any(event.query() for event in spinning)
    door.cuda.synchronize()
    documents = "CUDA's guide: streams have queues of their own, as far as CUDA_DEVICE_MAX_CONNECTIONS goes"
    return documents, True, passed, {"host_ms": ms}


def tying(context: RankContext) -> tuple:
    """How close the device's clock is tied to the host's."""
    clock = door.CudaClock(SimpleNamespace(watch=lambda *_: None))
    errors = []
    for _ in range(20):
        clock.tie()
        errors.append(clock.error_ns / 1e6)
    found = sorted(errors)[len(errors) // 2] < _NOTED_MS
    return f"nothing; a run notes an error above {_NOTED_MS} ms", True, found, {"errors_ms": errors}


def copying(context: RankContext) -> tuple:
    """A copy to mapped host memory, such as ranks share: does it return after it has completed?"""
    x = torch.zeros(2**20, dtype=torch.uint8, device=context.device)
    there = torch.frombuffer(mmap.mmap(-1, x.numel()), dtype=torch.uint8)
    x.add_(1)
    door.cuda.synchronize()
    door.cuda._sleep(_cycles(context.device, _SPIN_MS))
    x.add_(1)
    _, ms = _timed(lambda: there.copy_(x))
    complete = bool((there == 2).all())
    documents = "CUDA's API: from device memory to pageable host memory, the call returns once the copy has completed"
    return documents, True, complete, {"host_ms": ms}


def timing(context: RankContext) -> tuple:
    """Does elapsed_time never fall along a stream?"""
    x = torch.ones(1024, device=context.device)
    events = []
    for _ in range(1000):
        x.add_(1)
        events.append(door.cuda.Event(enable_timing=True))
        events[-1].record()
    door.cuda.synchronize()
    at = [events[0].elapsed_time(event) for event in events]
    steps = [later - earlier for earlier, later in zip(at, at[1:], strict=False)]
    documents = "CUDA's API: elapsed times have a resolution of about 0.5 microseconds"
    return documents, True, min(steps) >= 0, {"shortest_ms": min(steps), "whole_ms": at[-1]}


def _spin(device: torch.device, stream: object = None) -> object:
    """Have a stream, one of its own unless given, spin; returns the event behind it."""
    cycles = _cycles(device, _SPIN_MS)
    with door.cuda.stream(stream or door.cuda.Stream(device)):
        door.cuda._sleep(cycles)
        event = door.cuda.Event()
        event.record()
    return event


_RATES: dict[str, float] = {}  # cycles in a millisecond, by device: measured once, before anything spins


def _cycles(device: torch.device, ms: float) -> int:
    """How many cycles take so long."""
    if str(device) not in _RATES:
        cycles, start, end = 10**7, *(door.cuda.Event(enable_timing=True) for _ in range(2))
        door.cuda._sleep(cycles)  # also loads the kernel, and wakes the device
        start.record()
        door.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        _RATES[str(device)] = cycles / start.elapsed_time(end)
    return round(_RATES[str(device)] * ms)


def _timed(call: Callable[[], object]) -> tuple[object, float]:
    """What a call returns, and the host's milliseconds."""
    started = time.perf_counter()
    found = call()
    return found, (time.perf_counter() - started) * 1e3


ASSUMPTIONS = (
    ("cudaMalloc waits for a kernel that spins on another stream", allocating, 32),
    ("empty_cache waits for a kernel that spins on another stream", emptying, 32),
    ("a kernel gets past five streams that spin, with 8 connections", queueing, 8),
    ("a kernel gets past five streams that spin, with 32 connections", queueing, 32),
    ("the device's clock is tied to the host's within 0.1 ms", tying, 32),
    ("a copy into mapped host memory returns once it is complete", copying, 32),
    ("elapsed_time never falls along a stream", timing, 32),
)
