"""Messages between a machine's ranks, for `make gpu`: how long they take and whether they arrive whole, and ranks of
one GPU that send by NCCL."""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
from gpu_mps import Mps
from gpu_runs import all_gradients
from gpu_setting import Part, Setting, piece
from one_gpu import OneGpuPool

from pplab import lab
from pplab.lab import message_times
from pplab.runtime import Pool, RankContext
from pplab.runtime import gpu as door

_MESSAGES = (64, 2**16, 2**20, 2**24)  # bytes
_PATIENCE_S = 20.0  # with kernels that may wait for each other for good


@piece(20)
def links(setting: Setting, part: Part) -> None:
    """Measure how long messages between neighbours take, and whether their bytes arrive whole.

    The last rank and the first are neighbours, too. It uses NCCL if every rank has a GPU, and gloo if they share one.
    """
    num_ranks = setting.num_devices if setting.device == "cuda" and setting.num_devices > 1 else 2
    neighbours = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks if num_ranks > 2 else 1)]
    with setting.pool(num_ranks, setting.plainly(num_ranks)) as pool:
        for pair in neighbours:
            part.attempt(f"ranks {pair[0]} and {pair[1]}", partial(_link, pool, pair))


def _link(pool: Pool, pair: tuple[int, int]) -> dict:
    times = {size: statistics.median(pool.run(message_times, size, 10, pair)[pair[0]][1:]) for size in _MESSAGES}
    link = lab.fit_link(times)
    lost = [size for size in _MESSAGES if not all(pool.run(arrives_whole, size, pair))]
    print(f"ranks {pair}: {link.latency * 1e3:.1f} us, {link.bandwidth / 1e6:.2f} GB/s", flush=True)
    found = {"latency_ms": link.latency, "bytes_per_ms": min(link.bandwidth, 1e300), "ms_of_bytes": times}
    found["wrong"] = [f"a message of {size} bytes arrives changed" for size in lost]
    return {"pair": list(pair), "transport": "nccl" if pool.transport == "nccl" else "gloo", **found}


def arrives_whole(context: RankContext, num_bytes: int, pair: tuple[int, int]) -> bool:
    """On a pair's two ranks, whether the bytes that the other one sends are the right ones."""
    one, other = pair
    down, up = context.channel(one, other), context.channel(other, one)
    random = torch.Generator().manual_seed(num_bytes)
    there, back = torch.randint(256, (2, num_bytes), dtype=torch.uint8, generator=random).to(context.wire)
    if context.rank not in pair:
        return True
    if context.rank == one:
        dist.send(there, other, group=down)
        dist.recv(there.zero_(), other, group=up)
        return torch.equal(there, back)
    found = torch.zeros_like(there)
    dist.recv(found, one, group=down)
    dist.send(back, one, group=up)
    return torch.equal(found, there)


@piece(150)
def nccl(setting: Setting, part: Part) -> None:
    """Try memory that is asked for while a receive by NCCL waits, and ranks of one GPU that send by NCCL.

    These do what ranks of several GPUs do, side by side by MPS, or without it in turns: every schedule's gradients.
    """
    if setting.device != "cuda":
        part.leave_out("all of it", "needs a GPU")
    elif setting.num_devices > 1:
        with setting.pool(2, "a GPU each") as pool:
            part.attempt("memory", partial(_memory_beside_a_receive, pool, "a GPU each"))
        part.leave_out("ranks of one GPU", "every rank has a GPU; CUDA_VISIBLE_DEVICES=0 leaves one to all")
    else:
        for num_ranks in setting.size.on_one_gpu:
            sharing = next(setting.sharings(num_ranks, part))
            beside = Mps() if sharing == "mps" else None
            with OneGpuPool(num_ranks, device="cuda", beside=beside, timeout_s=_PATIENCE_S) as pool:
                part.attempt(f"memory, {num_ranks} ranks, {sharing}", partial(_memory_beside_a_receive, pool, sharing))
                all_gradients(setting, part, pool, sharing)


def _memory_beside_a_receive(pool: Pool, sharing: str) -> dict:
    waited, ms = pool.run(allocate_beside_a_receive)[0]
    print(f"cudaMalloc beside a receive that waits took {ms:.2f} ms{', and waited for it' * waited}", flush=True)
    return {"num_ranks": pool.num_ranks, "sharing": sharing, "waited": waited, "host_ms": ms}


def allocate_beside_a_receive(context: RankContext, num_bytes: int = 2**26) -> tuple[bool, float]:
    """On rank 0, whether CUDA gave new memory only once a waiting receive had its message, and the host's milliseconds.
    Rank 1 sends half a second later."""
    channel, message = context.channel(1, 0), torch.ones(1024, device=context.device)
    if context.rank == 0:
        dist.recv(message, 1, group=channel)  # the first makes NCCL's communicator
        door.release()  # or the allocator would give what it has
    elif context.rank == 1:
        dist.send(message, 0, group=channel)
    dist.barrier()
    if context.rank == 1:
        time.sleep(0.5)
        dist.send(message, 0, group=channel)
    if context.rank:
        return False, 0.0
    receive = dist.irecv(message, 1, group=channel)
    time.sleep(0.1)  # until it waits on the GPU
    started = time.perf_counter()
    held = torch.empty(num_bytes, dtype=torch.uint8, device=context.device)
    ms, waited = (time.perf_counter() - started) * 1e3, receive.is_completed()
    receive.wait()
    door.cuda.synchronize()
    del held
    return waited, ms
