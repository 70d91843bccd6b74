"""The door to CUDA and NCCL, opened only if a rank computes on a GPU. Tests put a stand-in behind
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
    """Compute on this device, in full float32. A GPU that can't be used fails now, not in the first
    run.
    """
    cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.zeros(1, device=device)


def release() -> None:
    """Give back cached memory, because ranks may share a GPU and none can use what a different rank
    caches.
    """
    gc.collect()
    cuda.empty_cache()


def pin(owner: object, memory: torch.Tensor) -> str:
    """Let the GPU read and write this memory itself while `owner` lives, because otherwise the host
    copies each message once more. Returns "", or the reason why it can't be done, as under WSL2 or
    in a sandbox.
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
    """The options with which `dist.new_group` makes a group on NCCL. NCCL's watchdog counts from
    the moment when the host asked, so it gets twice the time. Before it ends a rank, the pool has
    named the rank that holds the others up.
    """
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _MOST_CTAS
    return {"backend": "nccl", "timeout": 2 * patience, "pg_options": options}


class CudaClock(Clock):
    """A clock whose marks are events on the compute stream, so they tell when the device got there,
    not when it was asked to. Each step, the closest of some pairs of readings places them on the
    host's clock. The host stays at most two items ahead.
    """

    def __init__(self, context: RankContext):
        super().__init__()
        self._watch = context.watch

    def tie(self) -> None:
        """Tie the stream's time to the host's. The event happened between two readings, and close
        ones are best.
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
        """Mark the start. An item only starts once the GPU has done the one two before it, so that
        a hang is seen where it is.
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
        """Wait until the GPU has reached these marks. Meanwhile, tell which one it is at, and
        whether it waits for a message there.
        """
        for what, start, end in items:
            if not end.query():
                self._watch(f"waits at {what}", True)
                start.synchronize()
                self._watch(f"at {what}")
                end.synchronize()
