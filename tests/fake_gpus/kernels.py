"""What kernels take on a GPU that tests/fake_gpus plays: time to launch them, and memory.

A kernel takes PRICE_NS, whatever it computes: the clocks of a rank leave out for how much longer a CPU computes. So
times show how many kernels there are, as those of small microbatches do on a GPU. The clocks catch up where a rank
waits for others, so none of them gets a message before it was sent.

Memory is counted as PyTorch's caching allocator hands it out (c10/cuda/CUDACachingAllocator.cpp), as if no room were
lost between pieces: what is refused here has no room on a GPU either.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import streams
import torch
from torch.utils._python_dispatch import TorchDispatchMode

MIB = 1 << 20
TOTAL = 16 << 30  # of each GPU
PRICE_NS = 10_000
WORKSPACE = 32 * MIB  # of cuBLAS on an H100, once for every thread that multiplies (CublasHandlePool.cpp)
_OF_AUTOGRAD = -1  # the thread in which a GPU's backwards run, in place of the one that asks for them

aten = torch.ops.aten
PRODUCTS = {each.default for each in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)}
UNLAUNCHED = {
    aten._unsafe_view.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


@dataclass(eq=False)
class Segment:
    """What the allocator asked CUDA for, and how much of it is handed out."""

    size: int
    small: bool  # for pieces of up to 1 MiB
    used: int = 0


class Memory:
    """A GPU's memory, as one process has it."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.fraction, self.allocated = 1.0, 0
        self.reset()

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self.segments)

    def reset(self) -> None:
        """Look for the worst moments from now on."""
        self.most_allocated, self.most_reserved = self.allocated, self.reserved

    def release(self) -> None:
        """Give back the segments of which nothing is handed out."""
        self.segments = [segment for segment in self.segments if segment.used]

    def take(self, nbytes: int) -> tuple[Segment, int]:
        """A piece for a tensor: its segment and its size there. torch.OutOfMemoryError where none is left."""
        piece = -(-nbytes // 512) * 512
        small = piece <= MIB
        rooms = [each for each in self.segments if each.small is small and each.size - each.used >= piece]
        segment = min(rooms, key=lambda each: each.size - each.used, default=None) or self._ask(piece, small)
        self._hand_out(segment, piece)
        return segment, piece

    def give_back(self, segment: Segment, piece: int) -> None:
        """A tensor is gone."""
        self._hand_out(segment, -piece)

    def _ask(self, piece: int, small: bool) -> Segment:
        size = 2 * MIB if small else 20 * MIB if piece < 10 * MIB else -(-piece // (2 * MIB)) * 2 * MIB
        if self.reserved + size > self.fraction * TOTAL:
            self.release()
        if self.reserved + size > self.fraction * TOTAL:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / MIB:.2f} MiB. {self.fraction * TOTAL / MIB:.2f} MiB "
                f"allowed; {self.allocated / MIB:.2f} MiB is allocated by PyTorch, {self.reserved / MIB:.2f} reserved"
            )
        self.segments.append(Segment(size, small))
        self.most_reserved = max(self.most_reserved, self.reserved)
        return self.segments[-1]

    def _hand_out(self, segment: Segment, piece: int) -> None:
        segment.used += piece
        self.allocated += piece
        self.most_allocated = max(self.most_allocated, self.allocated)


MEMORY: dict[int, Memory] = {}  # by device
THERE: dict[int, weakref.ref] = {}  # what lies on a GPU: storages, by where torch has them
WORKSPACES: set[tuple] = set()  # devices and threads that have one


def memory(device: object = None) -> Memory:
    """That of a device, or of the thread's."""
    return MEMORY.setdefault(streams.index(device), Memory())


def place(tensor: torch.Tensor) -> torch.Tensor:
    """Give it memory on the thread's GPU, for as long as its storage lives."""
    storage = streams.STORAGE(tensor)
    if streams.is_rank() and (key := storage._cdata) not in THERE:
        gpu = memory()
        taken = gpu.take(storage.nbytes())

        def gone(_: object) -> None:
            del THERE[key]
            gpu.give_back(*taken)

        THERE[key] = weakref.ref(storage, gone)
    return tensor


def upload(tensor: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """`tensor`, moved to the thread's GPU: a copy, if it lay on the host. Who took it may have waited for it."""
    old, new = (streams.STORAGE(each)._cdata for each in (tensor, moved))
    if new in THERE:
        return moved
    streams.catch_up()
    return place(moved.clone() if old == new else moved)


def download(tensor: torch.Tensor) -> torch.Tensor:
    """The same on the host: a copy, if it lay on a GPU."""
    if streams.STORAGE(tensor)._cdata not in THERE:
        return tensor
    return streams.COPY(torch.empty(tensor.shape, dtype=tensor.dtype), tensor)


def storages(given: Iterable) -> Iterator[tuple[int, torch.Tensor]]:
    """Those of an operation's arguments, or of what it returns, by where torch has them."""
    for each in given:
        if isinstance(each, torch.Tensor):
            if torch._C._has_storage(each):
                yield streams.STORAGE(each)._cdata, each
        elif isinstance(each, (list, tuple)):
            yield from storages(each)


class Kernels(TorchDispatchMode):
    """Sees every operation of a thread. What has an input on a GPU runs there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        began, kwargs = streams.CLOCK_NS(), kwargs or {}
        if not {torch.Tensor, torch.nn.Parameter}.issuperset(types):
            return NotImplemented  # it is called again, with what this kind of tensor holds
        given = () if func.is_view else dict(storages((*args, *kwargs.values())))
        if THERE.keys().isdisjoint(given):
            return func(*args, **kwargs)
        if func in PRODUCTS:
            multiplies()
        made = func(*args, **kwargs)
        if "device" not in kwargs:
            for key, each in storages((made,)):
                if key not in given:
                    place(each)
        if func not in UNLAUNCHED:
            streams.fall_behind(streams.CLOCK_NS() - began - PRICE_NS)
        return made


def multiplies() -> None:
    """This thread's first product on its GPU needs room to work in, which is never given back."""
    thread = _OF_AUTOGRAD if torch._C._current_graph_task_id() >= 0 else threading.get_ident()
    if (place := (streams.HERE.device, thread)) not in WORKSPACES:
        memory().take(WORKSPACE)
        WORKSPACES.add(place)


def count() -> None:
    """This thread's operations, from now on, where it is a rank's."""
    if streams.is_rank() and not streams.HERE.counts:
        streams.HERE.counts = True
        Kernels().__enter__()
