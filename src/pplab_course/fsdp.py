"""Checkers of the chapter on FSDP, and FSDP by PyTorch alone on a pool's ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from pplab.lab import Case, fsdp_row
from pplab.lab.planning import free_tokens

from .verdict import (
    Verdict,
    Wrong,
    checker,
    checker_of_each,
    matched,
    number,
    readers_code,
    right,
    wrong,
)

if TYPE_CHECKING:
    from pplab.runtime import RankContext, Workload


def by_fsdp(
    context: RankContext, workload: Workload, steps: int = 3
) -> tuple[list[float], list[float]]:
    """Train by FSDP on a pool's ranks; returns each step's milliseconds and loss, of the whole
    batch.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    device, backend = context.wire, "nccl" if context.transport == "nccl" else "gloo"
    # a pipeline's may take little of a GPU
    group = dist.new_group(backend=backend, timeout=context.timeout)
    ranks = DeviceMesh.from_group(group, device.type)
    model = workload.build_whole().to(device)
    # a block's weights are gathered before it computes, and given back behind it
    for block in model.blocks.values():
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


# of a step; a GPU's, per second; bytes per second that it sends
TOKENS, FLOPS, BANDWIDTH = 2**22, 400e12, 50e9
GPUS = 1024  # in boxes of eight


def most_gpus(answer: object) -> Verdict:
    """Find how many GPUs may share a step of `TOKENS` under FSDP, with gradients in fp32, before
    its traffic shows.
    """
    per_gpu = {r: free_tokens(2, FLOPS, BANDWIDTH, r=r) * 2 for r in (2, 4)}  # without (n - 1) / n
    most = {r: int(1 + TOKENS / tokens) for r, tokens in per_gpu.items()}
    traps = {
        most[4]
        - 1: "a rank has one n-th of the weights already: what is needed is (n - 1) / n of it",
        most[4] + 1: "with one more the backward has too few tokens, if only just",
        most[
            2
        ]: "that is with gradients in bfloat16: in fp32 the backward has six bytes to hide, not "
        "four",
        most[2] - 1: "that is with gradients in bfloat16, and without (n - 1) / n",
        int(
            1 + TOKENS / per_gpu[4] * 3
        ): "that hides the forward's gather only: the backward has three times as much",
    }
    return number(
        answer, most[4], "about 12,000 tokens for each of them, whatever the model", traps=traps
    )


def tensor_ranks(answer: object) -> Verdict:
    """Find the fewest tensor ranks in each replica on `GPUS` with which FSDP's traffic hides, with
    gradients in fp32.
    """
    enough = {
        k: TOKENS * k / GPUS >= free_tokens(GPUS // k, FLOPS, BANDWIDTH, r=4) for k in (1, 2, 4, 8)
    }
    traps = {
        1: "4,096 tokens for each GPU: these are too few",
        2: "two share 8,192 tokens: enough with gradients in bfloat16, not in float32",
        3: "that would be enough, but three don't divide a box of eight",
        8: "eight are enough, but so are fewer, which wait less for their sums",
    }
    why = "four share 16,384 tokens, and about 12,000 are needed"
    return number(answer, min(k for k, hides in enough.items() if hides), why, traps=traps)


# A pass of one sequence, of two, and of one with gradients in bfloat16, in a healthy forward's
# time.
TEAMS = {"A": (3, 6, 3), "B": (20, 20, 15), "C": (3.4, 6, 3), "D": (4, 8, 4)}
CAUSES = ("nothing", "network", "gradients", "recomputing")
_CAUSE_OF = {"A": "nothing", "B": "network", "C": "gradients", "D": "recomputing"}
_WHY = {
    "A": "a forward takes 1 and a backward 2: what is left to hide?",
    "B": "why does a second sequence cost nothing?",
    "C": "what changes when gradients travel in half of the bytes?",
    "D": "it doubles with the sequences, so it is work; how much more than a forward and a "
    "backward?",
}


@checker_of_each("ABCD")
def slow_teams(answer: Mapping[str, str]) -> Verdict:
    """Find what makes each team's pass as long as it is."""
    return matched(answer, _CAUSE_OF, CAUSES, _WHY.get, "each phase is as long as its longer half")


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
    """Find what each of four teams should do first."""
    return matched(answer, _BOXES, ANSWERS, _CLUES.get, "links first, then the schedule")


SEQUENCES, PRICES = (4, 8, 16, 32, 64, 128), (2.0, 2.05, 2.1, 2.15, 2.2, 2.3, 2.4)
NEAR = 0.03  # of the best bill


@cache
def bill(gigabits: int, pipeline: bool, sequences: int) -> float:
    """Compute the bill for a billion tokens at two dollars, gradients in fp32, by 1F1B, cut as in
    the chapter, or without a pipeline.
    """
    case = Case(gigabits=gigabits)
    if pipeline:
        return case.row("1F1B", sequences, cut=[8, 9, 8, 7]).dollars
    return fsdp_row(case, sequences).dollars


@checker("a function of (sequences, price)")
def rent(rule: Callable[[int, float], tuple[int, bool]]) -> Verdict:
    """Write a rule for renting, judged by bills: 25 gigabits for 2 dollars or 100 for `price`, with
    or without a pipeline.
    """
    worst, dearest = 0.0, ""
    for sequences in SEQUENCES:
        for price in PRICES:
            with readers_code(f"at {sequences} sequences and ${price:.2f}: your function raised"):
                gigabits, pipeline = rule(sequences, price)
            if gigabits not in (25, 100) or not isinstance(pipeline, bool):
                raise Wrong(
                    "expected (25 or 100, True or False), such as (25, True), got "
                    f"{(gigabits, pipeline)!r}"
                )
            scale = {25: 1, 100: price / 2}
            costs = {
                (gb, cut): scale[gb] * bill(gb, cut, sequences)
                for gb in scale
                for cut in (True, False)
            }
            found, (least, best) = (
                costs[gigabits, pipeline],
                min((cost, choice) for choice, cost in costs.items()),
            )
            if found / least - 1 > worst:
                worst = found / least - 1
                words = f"{best[0]} gigabits {'with' if best[1] else 'without'} a pipeline"
                dearest = (
                    f"${found:.1f} with {sequences} sequences at ${price:.2f}, where {words} cost $"
                    f"{least:.1f}"
                )
    if worst > NEAR:
        return wrong(f"at its worst the rule is {worst:.1%} too dear: {dearest}")
    return right(f"never more than {worst:.1%} above the best")
