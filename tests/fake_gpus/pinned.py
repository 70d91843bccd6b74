"""CUDA's pinning of memory, as tests/fake_gpus plays it: under the names of torch.cuda.cudart(), with CUDA's errors."""

PINNED: dict[int, int] = {}  # address -> bytes
MADE: list[int] = []  # bytes of all that was ever pinned
LATE: list[int] = []  # what was given back after its memory had gone


def cudaHostRegister(ptr: int, size: int, flags: int) -> int:
    """Invalid value: no page starts there. Already registered: some of it is."""
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


def check(res: int) -> None:
    """As torch's."""
    if res:
        raise RuntimeError(f"CUDA error {res}")
