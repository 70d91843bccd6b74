"""Streams that run behind their hosts, as tests/fake_gpus plays them.

What is computed is there at once: a CPU computes it, and a rank's clocks leave out for how long (kernels.py). A copy
beside compute isn't: it runs when a host waits for its stream, and until then there is poison. What would go wrong on a
GPU raises here.
"""

import os
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import current_process

import torch

COPY, STORAGE = torch.Tensor.copy_, torch.Tensor.untyped_storage
CLOCK_NS, SLEEP = time.perf_counter_ns, time.sleep


class Stream:
    """First in, first out. What is put here runs when a host waits for it."""

    known: list["Stream"] = []

    def __init__(self, device=None, priority=0):
        self.device, self.number, self.todo, self.lock = index(device), 0, deque(), threading.RLock()
        Stream.known.append(self)

    def put(self, run=lambda: None) -> int:
        """Behind what is here; returns its number."""
        with self.lock:
            self.number += 1
            self.todo.append((self.number, run))
            return self.number

    def synchronize(self, until: int | None = None) -> None:
        """Let the host wait for all of it, or for the first so many."""
        until = self.number if until is None else until
        with self.lock:
            while self.todo and self.todo[0][0] <= until:
                self.todo.popleft()[1]()
        HERE.seen[self] = max(HERE.seen.get(self, 0), until)


class Here(threading.local):
    """A thread: the device and the stream that it is on, and what it knows of streams. Every thread starts on GPU 0."""

    def __init__(self) -> None:
        self.device, self.streams, self.seen, self.counts = 0, {}, {}, False

    @property
    def stream(self) -> Stream:
        return self.streams.get(self.device) or default(self.device)


DEFAULT: dict[int, Stream] = {}
HERE = Here()
ASKED: Counter[tuple] = Counter()  # how often for an empty tensor like this
TOUCHED: dict[int, int] = {}  # memory, by its place -> how far the compute stream was when the rank last had it
FIRST: dict[str, object] = {}  # the settings that CUDA started with, and in which process
MEASURING = [
    "to_host",
    *(f"pplab.lab.{name}" for name in ("extras.pace", "measuring.probe", "against_torch.whole_model")),
]  # by the host's clock
SETTINGS = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}


def started() -> bool:
    """CUDA starts with the first call, and reads its settings then. A fork of that process can't use it."""
    if not FIRST:
        FIRST.update(process=os.getpid(), by=traceback.format_stack(limit=6)[:-2])
        FIRST.update({name: os.environ.get(name) for name in SETTINGS})
    if FIRST["process"] != os.getpid():
        raise RuntimeError(f"Cannot re-initialize CUDA in forked subprocess: it was started by {FIRST['by']}")
    return True


def index(device: object) -> int:
    """A device's number, if it has one and is there: the thread's, where it has none."""
    started()
    found = device
    if not isinstance(device, int):
        device = torch.device(device if device is not None else "cuda")
        found = (HERE.device if device.index is None else device.index) if device.type == "cuda" else -1
    if not 0 <= found < int(os.environ["FAKE_GPUS"]):
        raise RuntimeError(f"CUDA error: invalid device ordinal {device}")
    return found


def set_device(device) -> None:
    """The thread's, from now on."""
    HERE.device = index(device)


def default(device: int) -> Stream:
    """The stream in which a process computes on a device, all threads alike."""
    if device not in DEFAULT:
        DEFAULT[device] = Stream(device)
    return DEFAULT[device]


def on(device: object) -> Stream:
    """A device's stream that this thread is on, or where none is named, the one that its device computes in."""
    return default(HERE.device) if device is None else HERE.streams.get(index(device)) or default(index(device))


def set_stream(stream: Stream) -> None:
    """As torch's: it also goes to the stream's device."""
    assert isinstance(stream, Stream), f"a stream, not {stream!r}"
    HERE.device = stream.device
    HERE.streams[stream.device] = stream


@contextmanager
def stream(stream: Stream) -> Iterator[None]:
    """For a while."""
    before = HERE.stream
    set_stream(stream)
    yield
    set_stream(before)


def synchronize(device=None) -> None:
    """Wait for all streams of a device: of the thread's, where none is named."""
    which = HERE.device if device is None else index(device)
    for stream in [default(which), *Stream.known]:
        if stream.device == which:
            stream.synchronize()


class Event:
    """Something that the GPU gets to. When it is asked for the first time, it isn't there yet."""

    made = 0

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self.timing, self.at, self.asked, self.passed = enable_timing, None, False, False

    def record(self, stream=None) -> None:
        Event.made += 1
        self.at, self.stream, self.passed = time.perf_counter_ns(), stream or HERE.stream, False
        self.number = self.stream.put()
        self.hangs = os.environ.get("CUDA_FAKE_HANG") == f"{current_process().name.split()[-1]} {Event.made}"

    def query(self) -> bool:
        assert self.at, "an event that wasn't recorded"
        asked, self.asked = self.asked, True
        self.passed = asked and not self.hangs
        if self.passed:
            self.stream.synchronize(self.number)
        return self.passed

    def synchronize(self) -> None:
        assert self.at, "an event that wasn't recorded"
        self.asked = True
        while self.hangs:
            time.sleep(0.1)
        self.stream.synchronize(self.number)
        self.passed = True

    def elapsed_time(self, end_event) -> float:
        assert self.timing and end_event.timing and self.at and end_event.at, "an event without a time"
        waited = self.passed or HERE.seen.get(self.stream, 0) >= self.number
        assert waited, "times from an event that the host hasn't waited for"
        todo = end_event.stream.todo
        assert not todo or todo[0][0] > end_event.number, "the time of an event that the GPU may not have got to"
        return (end_event.at - self.at) / 1e6


def is_rank() -> bool:
    """Whether this process is a rank of a pool on GPUs."""
    return bool(FIRST) and current_process().name.startswith("pplab rank")


def poison(tensor: torch.Tensor) -> None:
    """What is read too early must show."""
    with torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 127)


def copy_(self, src, non_blocking=False):
    """A copy that the host doesn't wait for is one beside compute, of memory with which compute is done."""
    if not non_blocking:
        return COPY(self, src)
    stream, compute = HERE.stream, default(HERE.device)
    assert stream is not compute, "a copy that shall run beside compute is on the compute stream"
    for tensor in (self, src):
        last = TOUCHED.get(STORAGE(tensor).data_ptr(), -1)
        assert HERE.seen.get(compute, 0) > last, "a race: the compute stream may still use what is copied"
    poison(self)
    stream.put(lambda: COPY(self, src))
    return self


def touch(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own thread has this memory in its hands: what it computes with it has been asked for by now."""
    if is_rank() and threading.current_thread() is threading.main_thread() and tensor.numel():
        TOUCHED[STORAGE(tensor).data_ptr()] = default(HERE.device).number
    return tensor


def made(tensor: torch.Tensor, empty: bool) -> torch.Tensor:
    """On a GPU, where the allocator has what was asked for before."""
    if empty and type(tensor) is torch.Tensor:  # and not one whose model is traced
        ASKED[tensor.shape, tensor.dtype] += 1
    return touch(tensor)


BEHIND_NS = [0]  # how far a rank's clocks are behind the real one


def fall_behind(by_ns: int) -> None:
    """A rank's clocks leave this time out."""
    BEHIND_NS[0] += max(0, by_ns)


def catch_up() -> None:
    """The rank has waited for another one, whose clock may have left out less."""
    BEHIND_NS[0] = 0


def sleep(seconds: float) -> None:
    """The clocks catch up with what they have left out, before the rank sleeps for the rest."""
    caught_ns = min(BEHIND_NS[0], int(seconds * 1e9))
    BEHIND_NS[0] -= caught_ns
    SLEEP(max(0.0, seconds - caught_ns / 1e9))


def perf_counter_ns() -> int:
    """A rank's clock."""
    return CLOCK_NS() - BEHIND_NS[0]


def perf_counter() -> float:
    """Who takes the time of something waits for it first."""
    if is_rank() and sys._getframe(1).f_globals.get("__name__") in MEASURING:
        assert not HERE.stream.todo, "a host's time, taken while its GPU is at work: that of a launch"
    return perf_counter_ns() / 1e9


def computing(module: torch.nn.Module, arguments: tuple) -> None:
    """A module runs, on a GPU that a rank has taken: in full float32, on the stream that all computing is on."""
    if is_rank():
        assert HERE.stream is default(HERE.device), "a module runs on a stream beside the one that others wait for"
        full = not (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32)
        assert full, "a module runs in TF32"
        if not any(module.children()):
            HERE.stream.put()


FRACTIONS = [1.0]  # of its memory that a rank allowed itself, one after the other


def fractions(context: object) -> list[float]:
    """A rank's, for whoever asks."""
    return FRACTIONS


def install() -> None:
    """Take the place of torch's."""
    fork, leave = torch.random.fork_rng, torch.profiler.record_function.__exit__

    def fork_rng(devices=None, *more, **options):
        evaluates = sys._getframe(1).f_globals["__name__"] == "pplab.lab.extras.evaluation"
        assert devices or not (evaluates and is_rank()), "the GPU's random numbers would go on"
        return fork([], *more, **options)

    def end_span(self, *error):
        assert not self.name.startswith("ProfilerStep") or not HERE.stream.todo, (
            "a step's span ends before the GPU has done it"
        )
        return leave(self, *error)

    torch.random.fork_rng, torch.profiler.record_function.__exit__ = fork_rng, end_span
    torch.Tensor.copy_, time.sleep = copy_, sleep
    time.perf_counter, time.perf_counter_ns = perf_counter, perf_counter_ns
    torch.Tensor.untyped_storage = lambda self: STORAGE(touch(self))
    torch.nn.modules.module.register_module_forward_pre_hook(computing)
    product = torch.Tensor.__matmul__

    def multiply(self, other):
        if is_rank():
            HERE.stream.put()
        return product(self, other)

    torch.Tensor.__matmul__ = multiply
