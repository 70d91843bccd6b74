"""CUDA and NCCL played by the CPU and gloo, for every Python process that finds this file: FAKE_GPUS says how many.

Tensors stay on the CPU. What the package asks of CUDA is here under torch's own signatures, and refuses what a GPU
would: so a call that isn't there, a wrong argument or device, a wrong order, a wait that is missing shows
(streams.py, groups.py), and what launches and an allocator make of small sizes (kernels.py).
It can't show how fast a GPU computes. tools/mutate.py takes the calls out of the source, one at a time, and sees which
are missed.

CUDA_FAKE_HANG="RANK EVENT": the GPU of that rank never gets as far as the event of that number.
"""

import functools
import inspect
import os
import sys
import weakref
from functools import partial
from types import SimpleNamespace

count = int(os.environ.get("FAKE_GPUS", 0))
if count and "resource_tracker" not in " ".join(sys.orig_argv):  # Python's own helper, which needs no torch
    import groups
    import kernels
    import pinned
    import streams
    import torch
    import torch.distributed as dist
    import torch.profiler
    from streams import index, started
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils._device import _device_constructors

    _device_constructors()  # `with torch.device(...)` knows functions by what they are now

    def is_gpu(value: object) -> bool:
        return isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda"

    def on_cpu(value: object) -> object:
        if is_gpu(value):
            here = f"cuda:{streams.HERE.device}"
            assert index(value) == streams.HERE.device, f"a tensor on {value}, made by a thread that is on {here}"
            return torch.device("cpu")
        return value

    def played(function):
        """What the function makes on a GPU is on the CPU, in memory that isn't pinned."""

        @functools.wraps(function)
        def call(*arguments, **options):
            options.pop("pin_memory", None)
            placed = {name: on_cpu(value) for name, value in options.items()}
            made = streams.made(function(*arguments, **placed), function.__name__ == "empty")
            return kernels.place(made) if is_gpu(options.get("device")) else made

        return call

    for name in ("arange", "empty", "empty_strided", "full", "ones", "rand", "randn", "tensor", "zeros"):
        setattr(torch, name, played(getattr(torch, name)))
    to, cpu = torch.Tensor.to, torch.Tensor.cpu

    def moved(self, *arguments, **options):
        """To a GPU. It reads pinned memory when its stream gets there, if the host doesn't wait."""
        placed = {name: on_cpu(value) for name, value in options.items()}
        made = streams.touch(to(self, *map(on_cpu, arguments), **placed))
        if not any(map(is_gpu, (*arguments, *options.values()))):
            return made
        pinned.check_slot(self.data_ptr())
        if options.get("non_blocking", len(arguments) > 2 and arguments[2]):
            streams.HERE.stream.put(pinned.unchanged(self.data_ptr()))
        return kernels.upload(self, made)

    torch.Tensor.to = moved
    torch.Tensor.cpu = lambda self, *options: kernels.download(cpu(self, *options))

    def hidden() -> bool:
        return os.environ.get("CUDA_VISIBLE_DEVICES") == ""

    def set_fraction(fraction_: float, device=None) -> None:
        assert 0 < fraction_ <= 1
        kernels.memory(device).fraction = fraction_
        streams.FRACTIONS.append(fraction_)

    def properties(device=None) -> SimpleNamespace:
        index(device)
        return SimpleNamespace(name="Fake GPU", total_memory=kernels.TOTAL, major=9, minor=0, multi_processor_count=4)

    FAKES = {
        "is_available": lambda: started() and not hidden(),
        "device_count": lambda: 0 if hidden() else started() and count,
        "synchronize": streams.synchronize,
        "set_device": lambda device: streams.set_device(device) or kernels.count(),
        "empty_cache": lambda: streams.synchronize() or kernels.memory().release(),
        "current_stream": lambda device=None: streams.HERE.stream if device is None else streams.on(device),
        "stream": streams.stream,
        "set_stream": streams.set_stream,
        "memory_allocated": lambda device=None: kernels.memory(device).allocated,
        "max_memory_allocated": lambda device=None: kernels.memory(device).most_allocated,
        "memory_reserved": lambda device=None: kernels.memory(device).reserved,
        "max_memory_reserved": lambda device=None: kernels.memory(device).most_reserved,
        "reset_peak_memory_stats": lambda device=None: kernels.memory(device).reset(),
        "get_device_name": lambda device=None: index(device) * 0 or "Fake GPU",
        "get_device_properties": properties,
        "get_device_capability": lambda device=None: (9 + 0 * index(device), 0),
        "get_arch_list": lambda: ["sm_80", "sm_90"],
        "get_per_process_memory_fraction": lambda device=None: kernels.memory(device).fraction,
        "set_per_process_memory_fraction": lambda fraction, device=None: set_fraction(fraction, device),
        "get_rng_state": lambda device="cuda": index(device) * 0 or torch.get_rng_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
        "can_device_access_peer": lambda device, peer_device: index(device) != index(peer_device),
        "is_bf16_supported": lambda including_emulation=True: True,
        "cudart": lambda: index(0) or pinned,
        "check_error": pinned.check,
    }
    for name, fake in FAKES.items():
        ours, theirs = ([*inspect.signature(f).parameters] for f in (fake, getattr(torch.cuda, name)))
        assert ours == theirs, f"torch.cuda.{name} takes {theirs}, and the fake one {ours}"
        setattr(torch.cuda, name, fake)
    torch.cuda.Event, torch.cuda.Stream = streams.Event, streams.Stream
    streams.install()
    torch.cuda.nccl.version = lambda: (2, 29, 7)
    torch.accelerator.is_available = started
    torch.accelerator.current_accelerator = lambda check_available=False: None  # in a torch built for CUDA, too
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as they may be
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
        first = {name: streams.FIRST.get(name) for name in streams.SETTINGS}
        assert first == streams.SETTINGS, f"CUDA started with {streams.FIRST}"
        patience = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
        assert timeout is None or timeout > patience, "NCCL's watchdog kills the process before the pool gives up"
        made = new_group(ranks, timeout, "gloo", **options)
        if made is not dist.GroupMember.NON_GROUP_MEMBER:
            own = options.get("group_desc") == "torch's own"  # of its pipelining, which asks for no fewer
            over_nccl[made] = own or (pg_options is not None and 0 < pg_options.config.max_ctas <= 4)
        return made

    dist.new_group = group
    begin = dist.init_process_group
    dist.init_process_group = lambda backend=None, *more, device_id=None, **options: begin(
        "gloo" if backend == "nccl" else backend, *more, **options
    )  # of programs that are PyTorch's alone

    at_once = {name: getattr(dist, name) for name in ("isend", "irecv", "send", "recv")}

    def on_nccl(name):
        """On NCCL a transfer has no tag, stands behind its group's others with that peer, and keeps no host waiting.
        torch's own engine puts several into one kernel, or looks at what came: its transfers start at once."""

        def call(*arguments, **options):
            given = inspect.signature(at_once[name]).bind(*arguments, **options).arguments
            if (group := given.get("group")) not in over_nccl:
                return at_once[name](**given)
            tensor, sends = given["tensor"], "send" in name
            assert over_nccl[group], "a transfer that may take a GPU's multiprocessors away"
            assert tensor.is_contiguous(), "NCCL sends contiguous tensors"
            assert streams.HERE.stream is streams.on(None), (
                "a transfer that waits for a stream in which nobody computes"
            )
            given.pop("tag", None)
            if sys._getframe(1).f_globals["__name__"] not in (
                "pplab.runtime.process_groups",
                "pplab.lab.measuring.probe",
            ):
                return at_once[name](**given)
            peer = given["dst" if sends else "src"]
            if sends:
                left = partial(at_once["isend"], tensor.detach(), peer, group)
                work = groups.in_turn(group, peer, left, lambda: None)
                if name == "isend":  # after `send` memory is given away in the stream's order
                    weakref.finalize(tensor, lambda: work.done.done() or groups.GONE.append(work)).atexit = False
            else:
                once = name == "irecv" and streams.ASKED[tensor.shape, tensor.dtype] < 2
                assert not once, "a message to new memory: who made it may wait for the GPU"
                came = torch.empty_like(tensor)
                streams.poison(tensor)
                work = groups.in_turn(
                    group, peer, partial(at_once["irecv"], came, peer, group), partial(streams.COPY, tensor, came)
                )
            if name.startswith("i"):
                return work
            streams.HERE.stream.put(work.wait)

        return call

    for name in at_once:
        setattr(dist, name, on_nccl(name))
        setattr(dist.distributed_c10d, name, getattr(dist, name))
    all_to_all = dist.all_to_all_single

    def one_way(*arguments, **options):
        """Tokens of forwards and of backwards, which two halves may send at once, have groups of their own."""
        found = sys._getframe(1).f_locals
        if (group := options.get("group")) in over_nccl and "backward" in found and found["half"] is None:
            assert ways.setdefault(group, found["backward"]) == found["backward"], "a group for both ways of tokens"
        return all_to_all(*arguments, **options)

    ways, dist.all_to_all_single = {}, one_way
    all_reduce = dist.all_reduce

    def behind(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        """A sum on NCCL is there when the stream gets to it."""
        if group in over_nccl and not async_op:
            streams.HERE.stream.put()
        work = all_reduce(tensor, op, group, async_op)
        streams.catch_up()
        return work

    dist.all_reduce = behind
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
