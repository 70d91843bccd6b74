"""Where ranks run: on which devices, how tensors cross between them, how a rank joins the others,
and what such a machine can't show.
"""

import fcntl
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import unknown
from ..optional import needs_linux
from ..schedule import plural
from .context import RankContext, Status

_PIPE_BYTES = 2**20
_DRIVER = Path("/sys/module/nvidia/version")


def choose_transport(num_ranks: int, device: str, transport: str) -> tuple[list[str], str]:
    """Every rank's device, and how tensors cross between the ranks of one host: through memory that
    they share, gloo, or NCCL.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise unknown("device", device, ("auto", "cpu", "cuda"))
    if transport not in ("auto", "shared", "gloo", "nccl"):
        raise unknown("transport", transport, ("auto", "shared", "gloo", "nccl"))
    if sys.platform != "linux":
        raise ValueError(needs_linux())
    gpus, trouble = usable_gpus(device)
    if device == "cuda" and not gpus:
        why = trouble or "this machine has no CUDA device"
        raise ValueError(f'device="cuda" was asked for and {why}; or use "cpu" or "auto"')
    if transport == "nccl" and gpus < num_ranks:
        raise ValueError(
            f'transport="nccl" needs a GPU for each of {num_ranks} ranks and found {gpus}: use '
            '"auto", by which ranks share what there is'
        )
    if transport == "auto":
        transport = "nccl" if gpus >= num_ranks and dist.is_nccl_available() else "shared"
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "")
    if transport == "nccl" and blocking not in ("", "0"):
        raise ValueError(
            f"CUDA_LAUNCH_BLOCKING={blocking} makes every host wait for its GPU at every call, and "
            'over NCCL hosts that wait hang most schedules: unset it, or use transport="shared"'
        )
    return [f"cuda:{rank % gpus}" if gpus else "cpu" for rank in range(num_ranks)], transport


def usable_gpus(device: str) -> tuple[int, str]:
    """How many GPUs the ranks can compute on, and why it is none although the machine has some.
    This may start CUDA.
    """
    if device != "cpu" and torch.accelerator.is_available():
        from .gpu import cuda

        return cuda.device_count(), ""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if device == "cpu" or hidden or not _DRIVER.exists():
        return 0, ""
    return 0, (
        f"torch {torch.__version__} can't use the GPU that is there with driver "
        f"{_DRIVER.read_text().strip()}: README.md says which driver and which wheel it needs"
    )


def notes(devices: Sequence[str], cores: int, device: str = "cpu") -> list[str]:
    """What a measurement on this machine can't show, in words, where `device` was asked for."""
    num_ranks, gpus = len(devices), len(set(devices))
    shared = f"{cores} cores, so they wait for a core as well as for each other"
    if devices[0] != "cpu":
        cores, shared = gpus, f"{plural(gpus, 'GPU')}, where processes take turns"
    found = []
    if num_ranks > cores:
        found.append(
            f"{num_ranks} ranks share {shared}: losses, gradients and memory are valid, the times "
            "and the bubble are not the schedule's"
        )
    if trouble := usable_gpus(device)[1]:
        found.append(f"ranks are on the CPU: {trouble}")
    return found


@dataclass
class Pipes:
    """A rank's ends of a pool's pipes, opened as runs need them. The names of a pipe vanish once
    both ends are open.
    """

    rank: int
    folder: Path
    ends: dict[tuple[int, int], int] = field(default_factory=dict)

    def open(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Open the pipes of these (source, target) pairs. All ranks must call this with the same
        pairs.
        """
        new = [pair for pair in pairs if pair not in self.ends]
        if not new:
            return
        self.ends |= dict.fromkeys(new, -1)  # those of others, too: every rank finds the same new
        paths = {pair: self.folder / f"{pair[0]}-{pair[1]}" for pair in new}
        to_me = [pair for pair in new if pair[1] == self.rank]
        for pair in to_me:
            os.mkfifo(paths[pair])
            # Without waiting, for there is no writer yet.
            self.ends[pair] = os.open(paths[pair], os.O_RDONLY | os.O_NONBLOCK)
            os.set_blocking(self.ends[pair], True)
        dist.barrier()
        for pair in new:
            if pair[0] == self.rank:
                self.ends[pair] = os.open(paths[pair], os.O_WRONLY)
                fcntl.fcntl(self.ends[pair], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        dist.barrier()
        for pair in to_me:
            os.unlink(paths[pair])


def join(
    context: RankContext,
    threads: int,
    port: int,
    folder: str,
    environment: Mapping[str, str],
    status: Status,
) -> RankContext:
    """In its own process, let a rank join the others of the pool, which hosts a store at `port` and
    lends a `folder` for what its ranks share and print. `environment` is set before CUDA starts.
    """
    sys.stdout = open(f"{folder}/printed{context.rank}", "w", buffering=1)  # the pool prints it
    os.environ.update(environment)
    torch.set_num_threads(threads)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a pool's ranks are all on this host
    if context.device.type == "cuda":
        from .gpu import ENVIRONMENT, take

        os.environ.update(ENVIRONMENT if context.transport == "nccl" else {})
        take(context.device)
    context.status = status
    context.store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=context.timeout)
    context.watch("joining the others", True)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("pplab", context.store),
        rank=context.rank,
        world_size=context.num_ranks,
        timeout=context.timeout,
    )
    if context.transport == "shared":
        context.pipes = Pipes(context.rank, Path(folder))
    return context
