"""Checkers of chapter 15, a table of `nvidia-smi topo -m`, and FSDP by PyTorch alone on a pool's ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from ..builders import build
from ..lab.case import Case
from ..lab.gpu_machine import hanging_waits
from .answers import actions_of, row_of, told_bill
from .verdict import (
    Verdict,
    Wrong,
    checker,
    checker_of_each,
    first_wrong,
    number,
    one_or_several,
    right,
    values_of,
    wrong,
)

if TYPE_CHECKING:
    from ..runtime import RankContext, Workload

# As `nvidia-smi topo -m` prints it, without the columns of network cards and cores. An example, not a recording.
TOPOLOGY = """
        GPU0    GPU1    GPU2    GPU3
GPU0     X      PIX     SYS     SYS
GPU1    PIX      X      SYS     SYS
GPU2    SYS     SYS      X      PIX
GPU3    SYS     SYS     PIX      X
"""
MIXED = """
        GPU0    GPU1    GPU2    GPU3
GPU0     X      SYS     PIX     SYS
GPU1    SYS      X      SYS     PIX
GPU2    PIX     SYS      X      SYS
GPU3    SYS     PIX     SYS      X
"""


def links(topology: str) -> dict[tuple[int, int], str]:
    """What joins every two GPUs in a table of `nvidia-smi topo -m`: "NV18", "PIX", "SYS", ..."""
    rows = [line.split() for line in topology.strip().splitlines()]
    gpus = [name for name in rows[0] if name.startswith("GPU")]
    table = {row[0]: row[1 : len(gpus) + 1] for row in rows[1:]}
    return {(a, b): table[gpus[a]][b] for a in range(len(gpus)) for b in range(len(gpus)) if a != b}


def fsdp(context: RankContext, workload: Workload, steps: int = 3) -> tuple[list[float], list[float]]:
    """Train by FSDP on a pool's ranks; returns each step's milliseconds and loss, of the whole batch."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    device, backend = context.wire, "nccl" if context.transport == "nccl" else "gloo"
    group = dist.new_group(backend=backend, timeout=context.timeout)  # a pipeline's may take little of a GPU
    ranks = DeviceMesh.from_group(group, device.type)
    model = workload.build_whole().to(device)
    for block in model.blocks.values():  # a block's weights are gathered before it computes, and given back behind it
        fully_shard(block, mesh=ranks)
    fully_shard(model, mesh=ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    times, losses = [], []
    for step in range(steps):
        own = workload.batch(step).microbatches(context.num_ranks)[context.rank]
        dist.barrier()
        start = time.perf_counter()
        loss = workload.loss(model(*(x.to(device) for x in own.inputs)), own.target.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().cpu()
        dist.all_reduce(total)  # waits for the device, too
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(total.item() / context.num_ranks)
    return times, losses


def places(answer: object) -> Verdict:
    """The fewest places for transfers with which interleaved 1F1B on 4 ranks, 8 microbatches, comes to its end."""
    traps = {
        2: "with two, every rank of the ring can be filled by transfers whose other ends find no place: try it",
        4: "four are enough for every schedule here, but are they the fewest?",
    }
    why = "three end and two don't; but only four can't refuse a transfer, whatever the times: a rank has four channels"
    return number(answer, 3, why, traps=traps)


@one_or_several
@checker("a list of actions, such as ['0F1', '1F1']", lambda answer: isinstance(answer, Sequence | set | frozenset))
def hangs(answer: Sequence[str]) -> Verdict:
    """GPipe on 3 ranks, 2 microbatches, careless receives: before which actions does a wait for the GPU never end?"""
    schedule = build("GPipe", num_ranks=3, num_microbatches=2)
    truth = {str(of) for _, (what, of) in hanging_waits(schedule, careless=True, hosts="one") if what == "compute"}
    known = {str(action) for row in schedule.rows for action in row}
    given = set(map(str, actions_of(answer)))
    if odd := sorted(given - known):
        transfer = ": transfers aren't asked for" if "_" in odd[0] else ""
        raise Wrong(f"{odd[0]} is no action of this schedule{transfer}")
    if missed := sorted(truth - given):
        early = "a receive of a gradient is already on the GPU, and its sender waits for what this rank hasn't done"
        raise Wrong(f"one is missing, on rank {missed[0][0]}: there {early}")
    if more := sorted(given - truth):
        raise Wrong(f"before {more[0]} every transfer on that GPU can end without its host: whom does it wait for?")
    return right("there a gradient's receive spins, and the gradient needs the forward that the host hasn't asked for")


@one_or_several
@checker("the numbers of four GPUs, rank 0's first", lambda answer: isinstance(answer, Sequence))
def order(answer: Sequence[int]) -> Verdict:
    """`MIXED`: which GPU for which rank, so that a pipeline of four crosses the sockets as rarely as it can?"""
    given = values_of(answer)
    if len(given) != 4 or set(given) != {0, 1, 2, 3}:
        raise Wrong(f"expected each of the GPUs 0 to 3 once, got {list(given)}")
    joined = links(MIXED)
    crossings = sum(joined[pair] == "SYS" for pair in pairwise(given))
    if crossings > 1:
        raise Wrong(f"{crossings} of the three boundaries go from one socket to the other")
    return right("one boundary crosses the sockets, and one must: each socket has two GPUs")


ANSWERS = ("FSDP", "pipeline", "one GPU", "measure")
_BOXES = {"A": "FSDP", "B": "pipeline", "C": "one GPU", "D": "measure"}
_CLUES = {
    "A": "links: how long does gathering the weights take, against a sequence's forward?",
    "B": "what would every GPU have to send and receive per step under FSDP, over which link?",
    "C": "how long would its gradients be under way, against 20 ms?",
    "D": "two figures are a few per cent apart, and came from data sheets",
}


@checker_of_each("ABCD")
def boxes(answer: Mapping[str, str]) -> Verdict:
    """Four boxes: what first?"""
    letter = first_wrong(answer, _BOXES, ANSWERS)
    return right("links first, then the schedule") if letter is None else wrong(f"{letter}: {_CLUES[letter]}")


SLOW = replace(Case(), gigabits=10)
NEAR = 2.0  # dollars
BEST_KNOWN = 87.903  # dollars: what lab.search finds on a V under the cut 4+4+4+4+4+5+4+3


@checker("a dict of what lab.Case.row takes, with a schedule", lambda answer: isinstance(answer, Mapping))
def slow_network(answer: Mapping[str, object]) -> Verdict:
    """The case on 10-gigabit Ethernet: what `Case.row` takes, with 16 sequences a step, for the smallest bill."""
    row = row_of(SLOW, answer, 16)
    if row.num_microbatches * row.microbatch != 16:
        raise Wrong(f"a step has 16 sequences, and yours has {row.num_microbatches * row.microbatch}")
    return told_bill(row, BEST_KNOWN, NEAR)
