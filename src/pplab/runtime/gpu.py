"""The door to CUDA and NCCL, opened only where a rank computes on a GPU: tests play one behind
`cuda` and `dist`.
"""

import gc
import time
import weakref
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import cuda

from .context import RankContext
from .listener import Clock

# Set before CUDA starts, whatever was set: a kernel that is loaded at its first launch may wait for
# a receive that spins; with few hardware queues a stream may block another's; and rows don't keep
# one order over all their channels.
ENVIRONMENT = {
    "CUDA_MODULE_LOADING": "EAGER",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "0",
}
TIES = 5  # pairs of readings that tie one clock to another
_MOST_CTAS = 4  # of a transfer, which holds them while it waits; NCCL_MAX_CTAS overrides it


def take(device: torch.device) -> None:
    """Compute there, in full float32. A GPU that can't be used fails now, not in the first run."""
    cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.zeros(1, device=device)


def release() -> None:
    """Give back what is free: ranks may share a GPU, and none can use what another one caches."""
    gc.collect()
    cuda.empty_cache()


def pin(owner: object, memory: torch.Tensor) -> str:
    """Let the GPU read and write this memory itself while `owner` lives: the host would copy each
    message once more. Returns why that can't be, as under WSL2 or in a sandbox; "" where it can.
    """
    try:
        cuda.check_error(cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    except RuntimeError as error:
        # CUDA keeps the error, and raises it again where the next kernel is launched: here.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
        return str(error)
    weakref.finalize(owner, cuda.cudart().cudaHostUnregister, memory.data_ptr())
    return ""


def nccl(patience: timedelta) -> dict[str, object]:
    """How `dist.new_group` makes a group on NCCL. Its watchdog counts from when the host asked, so
    it gets twice the time: before it ends a rank, the pool has said who holds the others up.
    """
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _MOST_CTAS
    return {"backend": "nccl", "timeout": 2 * patience, "pg_options": options}


class CudaClock(Clock):
    """Marks are events on the compute stream: when the device got there, not when it was asked to.
    They are placed on the host's clock by the closest of some pairs of readings per step. The host
    stays at most two items ahead.
    """

    def __init__(self, context: RankContext):
        super().__init__()
        self._watch = context.watch

    def tie(self) -> None:
        """Tie the stream's time to the host's: the event happened between two readings, at best
        close ones.
        """
        cuda.synchronize()
        readings = []
        for _ in range(TIES):
            before, event = time.perf_counter_ns(), self.mark()
            event.synchronize()
            readings.append((event, before, time.perf_counter_ns()))
        self._zero, before, after = min(readings, key=lambda reading: reading[2] - reading[1])
        self._zero_ns, self.error_ns = (before + after) // 2, (after - before + 1) // 2

    def begin(self, event: str, what: object) -> None:
        """Mark the start: of an item once the GPU has done the one two before, so that a hang is
        seen where it is.
        """
        if event == "item":
            self._reach(self._found["item"][-2:-1])
            self._watch(f"at {what}")
        super().begin(event, what)

    def mark(self) -> cuda.Event:
        """The moment at which the stream gets here."""
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def catch_up(self) -> None:
        """Wait until the GPU has reached all marks."""
        self._reach(self._found["item"][-2:])
        cuda.synchronize()

    def read(self, mark: cuda.Event) -> int:
        """A mark in nanoseconds of the host's clock."""
        return self._zero_ns + round(self._zero.elapsed_time(mark) * 1e6)

    def _reach(self, items: list) -> None:
        """Wait until the GPU has done these, and say at which it is, and whether it waits for what
        that needs.
        """
        for what, start, end in items:
            if not end.query():
                self._watch(f"waits at {what}", True)
                start.synchronize()
                self._watch(f"at {what}")
                end.synchronize()
