"""CUDA's pinning of memory, as tests/fake_gpus plays it: under the names of torch.cuda.cudart(), with CUDA's errors.

CUDA_FAKE_PIN_ERROR="801": the machine pins nothing, and answers with this error.
"""

import ctypes
import os
from collections.abc import Callable

PINNED: dict[int, int] = {}  # address -> bytes
MADE: list[int] = []  # bytes of all that was ever pinned
LATE: list[int] = []  # what was given back after its memory had gone


def cudaHostRegister(ptr: int, size: int, flags: int) -> int:
    """Invalid value: no page starts there. Already registered: some of it is."""
    if error := int(os.environ.get("CUDA_FAKE_PIN_ERROR", 0)):
        return error
    if size <= 0 or ptr % 4096 or flags:
        return 1
    if any(start < ptr + size and ptr < start + count for start, count in PINNED.items()):
        return 712
    PINNED[ptr] = size
    MADE.append(size)
    return 0


def cudaHostUnregister(ptr: int) -> int:
    """Not registered: somebody else's."""
    with open("/proc/self/maps") as maps:
        if not any(line.startswith(f"{ptr:x}-") for line in maps):
            LATE.append(ptr)
    return 0 if PINNED.pop(ptr, 0) else 713


def block(ptr: int) -> tuple[int, int]:
    """The pinned memory there: its address and bytes, or zeros."""
    return next((each for each in PINNED.items() if each[0] <= ptr < sum(each)), (0, 0))


def check_slot(ptr: int) -> None:
    """A slot's first byte is 1 while its message may be read."""
    start, count = block(ptr)
    assert not count or ctypes.string_at(start, 1) == b"\1", "a slot that its sender may fill while it is read"


def unchanged(ptr: int) -> Callable[[], None]:
    """What a GPU does that reads pinned memory later: then this memory must be as it is now."""
    start, count = block(ptr)
    now = ctypes.string_at(start, count) if count else b""

    def read() -> None:
        there = PINNED.get(start) == count
        assert not there or ctypes.string_at(start, count) == now, "pinned memory, changed before the GPU had read it"

    return read


def check(res: int) -> None:
    """As torch's."""
    if res:
        raise RuntimeError(f"CUDA error {res}")
