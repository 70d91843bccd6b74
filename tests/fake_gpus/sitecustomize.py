"""CUDA and NCCL played by the CPU and gloo, for every Python process that finds this file: FAKE_GPUS says how many.

Tensors stay on the CPU. What the package asks of CUDA is here under torch's own signatures, and refuses what a GPU
would: so a call that isn't there, a wrong argument or device, a wrong order shows. It can't show time, or races.

FAKE_HANG="RANK EVENT": the GPU of that rank never gets as far as the event of that number.
"""

import functools
import inspect
import os
import sys
import time
import traceback
from contextlib import nullcontext
from multiprocessing import current_process
from types import SimpleNamespace

count = int(os.environ.get("FAKE_GPUS", 0))
if count and "resource_tracker" not in " ".join(sys.orig_argv):  # Python's own helper, which needs no torch
    import torch
    import torch.distributed as dist
    import torch.profiler
    from torch.distributed.device_mesh import DeviceMesh

    FIRST = {}  # the settings that CUDA started with
    NEEDED = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}

    def started() -> None:
        """CUDA starts with the first call, and reads its settings then."""
        FIRST.update(
            {}
            if FIRST
            else {"by": traceback.format_stack(limit=6)[:-2], **{name: os.environ.get(name) for name in NEEDED}}
        )

    def index(device: object) -> int:
        """A device's number, if it has one and is there."""
        started()
        found = device
        if not isinstance(device, int):
            device = torch.device(device if device is not None else "cuda")
            found = (device.index or 0) if device.type == "cuda" else -1
        if not 0 <= found < count:
            raise RuntimeError(f"CUDA error: invalid device ordinal {device}")
        return found

    def on_cpu(value: object) -> object:
        if isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda":
            index(value)
            return torch.device("cpu")
        return value

    def played(function):
        """What the function makes on a GPU is on the CPU, in memory that isn't pinned."""

        @functools.wraps(function)
        def call(*arguments, **options):
            options.pop("pin_memory", None)
            return function(*map(on_cpu, arguments), **{name: on_cpu(value) for name, value in options.items()})

        return call

    for name in ("arange", "empty", "empty_strided", "full", "ones", "rand", "randn", "tensor", "zeros"):
        setattr(torch, name, played(getattr(torch, name)))
    torch.Tensor.to = played(torch.Tensor.to)

    class Event:
        """Something that the GPU gets to. When it is asked for the first time, it isn't there yet."""

        made = 0

        def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
            started()
            self.timing, self.at, self.asked = enable_timing, None, False

        def record(self, stream=None) -> None:
            assert stream is None or isinstance(stream, Stream)
            Event.made += 1
            self.at = time.perf_counter_ns()
            self.hangs = os.environ.get("FAKE_HANG") == f"{current_process().name.split()[-1]} {Event.made}"

        def query(self) -> bool:
            assert self.at, "an event that wasn't recorded"
            asked, self.asked = self.asked, True
            return asked and not self.hangs

        def synchronize(self) -> None:
            assert self.at, "an event that wasn't recorded"
            self.asked = True
            while self.hangs:
                time.sleep(0.1)

        def elapsed_time(self, end_event) -> float:
            assert self.timing and end_event.timing and self.at and end_event.at
            return (end_event.at - self.at) / 1e6

    class Stream:
        def __init__(self, device=None, priority=0):
            index(device)

        def synchronize(self) -> None: ...

    current, fraction = object.__new__(Stream), [1.0]

    def a_stream(stream: object) -> None:
        assert isinstance(stream, Stream), f"a stream, not {stream!r}"

    def set_fraction(fraction_: float, device=None) -> None:
        assert 0 < fraction_ <= 1
        fraction[0] = fraction_

    def properties(device=None) -> SimpleNamespace:
        index(device)
        return SimpleNamespace(name="Fake GPU", total_memory=1 << 34, major=9, minor=0, multi_processor_count=4)

    FAKES = {
        "is_available": lambda: True,
        "device_count": lambda: started() or count,
        "synchronize": lambda device=None: index(device) * 0 or None,
        "set_device": lambda device: index(device) * 0 or None,
        "empty_cache": lambda: started(),
        "current_stream": lambda device=None: index(device) * 0 or current,
        "stream": lambda stream: nullcontext(a_stream(stream)),
        "set_stream": lambda stream: a_stream(stream),
        "memory_allocated": lambda device=None: index(device) * 0 + 4096,
        "max_memory_allocated": lambda device=None: index(device) * 0 + (1 << 40),
        "reset_peak_memory_stats": lambda device=None: index(device) * 0 or None,
        "get_device_name": lambda device=None: index(device) * 0 or "Fake GPU",
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: (9 + 0 * index(device), 0),
        "get_arch_list": lambda: ["sm_80", "sm_90"],
        "get_per_process_memory_fraction": lambda device=None: index(device) * 0 or fraction[0],
        "set_per_process_memory_fraction": lambda fraction, device=None: set_fraction(fraction, device),
        "get_rng_state": lambda device="cuda": index(device) * 0 or torch.get_rng_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
        "can_device_access_peer": lambda device, peer_device: index(device) != index(peer_device),
        "is_bf16_supported": lambda including_emulation=True: True,
        "cudart": lambda: index(0) or __import__("pinned"),
        "check_error": lambda res: __import__("pinned").check(res),
    }
    for name, fake in FAKES.items():
        ours, theirs = ([*inspect.signature(f).parameters] for f in (fake, getattr(torch.cuda, name)))
        assert ours == theirs, f"torch.cuda.{name} takes {theirs}, and the fake one {ours}"
        setattr(torch.cuda, name, fake)
    torch.cuda.Event, torch.cuda.Stream = Event, Stream
    torch.cuda.nccl.version = lambda: (2, 29, 7)
    torch.accelerator.is_available = lambda: True
    dist.is_nccl_available = dist.distributed_c10d.is_nccl_available = lambda: True

    class Config:
        """NCCL's, as torch has it: it takes no other names."""

        __slots__ = ("blocking", "cga_cluster_size", "max_ctas", "min_ctas", "net_name", "split_share")

    dist.ProcessGroupNCCL = SimpleNamespace(
        Options=lambda is_high_priority_stream=False: SimpleNamespace(config=Config())
    )
    over_nccl, new_group = {}, dist.new_group

    def group(ranks=None, timeout=None, backend=None, pg_options=None, **options):
        """A group on gloo. On NCCL it keeps order and knows no tags, and is for collectives if it may take all CTAs."""
        if backend != "nccl":
            return new_group(ranks, timeout, backend, pg_options, **options)
        assert {name: FIRST.get(name) for name in NEEDED} == NEEDED, f"CUDA started with {FIRST}"
        made = new_group(ranks, timeout, "gloo", **options)
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            own = options.get("group_desc") == "torch's own"  # of its pipelining, which asks for no fewer
            over_nccl[made] = own or (pg_options is not None and 0 < pg_options.config.max_ctas <= 4)
        return made

    dist.new_group = group

    def without_tags(transfer):
        def call(*arguments, **options):
            given = inspect.signature(transfer).bind(*arguments, **options).arguments
            if given.get("group") in over_nccl:
                assert over_nccl[given["group"]], "a transfer that may take a GPU's multiprocessors away"
                assert given["tensor"].is_contiguous(), "NCCL sends contiguous tensors"
                given.pop("tag", None)
            return transfer(**given)

        return call

    for name in ("isend", "irecv", "send", "recv"):
        transfer = without_tags(getattr(dist, name))
        setattr(dist, name, transfer)
        setattr(dist.distributed_c10d, name, transfer)
    from_group = DeviceMesh.from_group
    DeviceMesh.from_group = lambda group, device_type, *more, **options: from_group(
        group, "cpu" if device_type == "cuda" else device_type, *more, **options
    )
    autocast, profile = torch.autocast, torch.profiler.profile
    torch.autocast = lambda device_type, *more, **options: autocast(
        "cpu" if device_type == "cuda" else device_type, *more, **options
    )
    torch.profiler.profile = lambda *, activities=None, **options: profile(
        activities=[each for each in activities or () if each is not torch.profiler.ProfilerActivity.CUDA], **options
    )
