"""Greedy decoding by a model whose stages are on the ranks: what a pipeline does for requests instead of batches."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import positive_int
from ...runtime import RankContext, naming
from ..extras import paced

if TYPE_CHECKING:
    from . import LanguageModel


@dataclass(frozen=True)
class Decoded:
    """What the last rank made, and how long this rank took."""

    tokens: Tensor | None  # (requests, new tokens); None on the other ranks
    seconds: float
    busy_s: float  # in the stage


@torch.no_grad()
def decode(
    context: RankContext,
    workload: LanguageModel,
    prompts: Tensor,
    groups: int,
    new_tokens: int,
    pace_s: float = 0.0,
) -> Decoded:
    """Continue `prompts` (requests, T) by `new_tokens` tokens each; give it to `Pool.run`.

    The requests are cut into `groups`, which take turns: while one group is on rank 1, the next can be on rank 0. A
    group's next token can start once its last one is known, so the last rank sends every token to the first. The
    window of T tokens moves along. `pace_s` is what a stage takes at least for a group. Raises ValueError when the
    requests don't divide.
    """
    if len(prompts) % positive_int("groups", groups):
        raise ValueError(f"{len(prompts)} requests don't divide into {groups} equal groups")
    rank, num_ranks = context.rank, context.num_ranks
    stage = workload.build_stage(rank, num_ranks).to(context.device).eval()
    windows = list(prompts.split(len(prompts) // groups))  # (B, T) each; only the first rank's move
    size, length = windows[0].shape
    made: list[Tensor] = []
    sends: list[dist.Work] = []
    busy = 0.0
    with naming("starting together"):
        dist.barrier()
    started = time.perf_counter()
    for turn in range(new_tokens * groups):
        group = turn % groups
        context.watch("decoding")
        if rank > 0:
            x = _receive((size, length, workload.config.width), torch.float32, rank - 1)
        else:
            if turn >= groups and num_ranks > 1:
                made.append(_receive((size,), torch.int64, num_ranks - 1))
            if turn >= groups:
                windows[group] = torch.cat([windows[group][:, 1:], made[turn - groups][:, None]], 1)
            x = windows[group]
        begun = time.perf_counter()
        with paced(context.device, pace_s):
            y = stage(x.to(context.device)).cpu()
        busy += time.perf_counter() - begun
        if rank < num_ranks - 1:
            sends.append(dist.isend(y, rank + 1))
            continue
        token = y[:, -1].argmax(-1)
        made.append(token)
        if num_ranks > 1 and turn < (new_tokens - 1) * groups:
            sends.append(dist.isend(token, 0))
    with naming("sending"):
        for work in sends:
            work.wait()
    seconds = time.perf_counter() - started
    if rank < num_ranks - 1:
        return Decoded(None, seconds, busy)
    return Decoded(torch.cat([torch.stack(made[group::groups], 1) for group in range(groups)]), seconds, busy)


def _receive(shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
    buffer = torch.empty(shape, dtype=dtype)
    with naming(f"a message from rank {source}"):
        dist.recv(buffer, source)
    return buffer
