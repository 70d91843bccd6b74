"""What ranks of a machine's GPUs do to each other, for `make gpu`: how far they slow each other down, what messages
between them take, and whether NCCL can send between ranks of one GPU."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import suppress
from functools import partial
from itertools import combinations

from gpu_mps import Mps
from gpu_setting import Part, Setting, Size, piece
from one_gpu import SWITCH, OneGpuPool

import pplab as pp
from pplab import lab
from pplab.lab import message_times, models, multiply_times
from pplab.runtime import Pool, RankError

_MESSAGES = (64, 2**16, 2**20, 2**24)  # bytes
_PATIENCE_S = 20.0  # with kernels that may wait for each other for good


@piece(20)
def slow_down(setting: Setting, part: Part) -> None:
    """How far ranks that compute at once slow each other down: 1 where each has a device, or a part of one, to itself;
    the number of ranks where they take turns."""
    for num_ranks in setting.size.ranks:
        for sharing in setting.sharings(num_ranks, part):
            with setting.pool(num_ranks, sharing) as pool:
                measure = partial(_slow_down, pool, sharing, setting.size)
                if row := part.attempt(f"{num_ranks} ranks, {sharing}", measure):
                    print(
                        f"{num_ranks} ranks, {sharing}: all at once take {row['ratio']:.2f} times one alone", flush=True
                    )


def _slow_down(pool: Pool, sharing: str, size: Size) -> dict:
    ratios = []
    for _ in range(size.rounds):
        alone, together = (
            statistics.median(pool.run(multiply_times, ranks, size.product)[0])
            for ranks in ((0,), tuple(range(pool.num_ranks)))
        )
        ratios.append(together / alone)
    notes = list(pool.notes)
    return {
        "num_ranks": pool.num_ranks,
        "sharing": sharing,
        "product": size.product,
        "alone_ms": alone,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "notes": notes,
    }


@piece(20)
def links(setting: Setting, part: Part) -> None:
    """What messages take from rank to rank: by NCCL where every rank has a GPU, by gloo where they share one."""
    num_ranks = setting.num_devices if setting.device == "cuda" and setting.num_devices > 1 else 2
    with setting.pool(num_ranks, setting.plainly(num_ranks)) as pool:
        for pair in combinations(range(num_ranks), 2):
            part.attempt(f"ranks {pair[0]} and {pair[1]}", partial(_link, pool, pair))


def _link(pool: Pool, pair: tuple[int, int]) -> dict:
    times = {size: statistics.median(pool.run(message_times, size, 10, pair)[pair[0]][1:]) for size in _MESSAGES}
    link = lab.fit_link(times)
    print(f"ranks {pair}: {link.latency * 1e3:.1f} us, {link.bandwidth / 1e6:.2f} GB/s", flush=True)
    found = {"latency_ms": link.latency, "bytes_per_ms": min(link.bandwidth, 1e300), "ms_of_bytes": times}
    return {"pair": list(pair), "transport": "nccl" if pool.transport == "nccl" else "gloo", **found}


@piece(60)
def nccl(setting: Setting, part: Part) -> None:
    """Ranks on one GPU that send by NCCL, with MPS and without: do receives that spin beside each other end?"""
    if setting.device != "cuda":
        part.leave_out("all of it", "this is a trial of the command on the CPU")
        return
    if setting.num_devices > 2:
        part.leave_out("all of it", "every rank has a GPU; CUDA_VISIBLE_DEVICES=0 leaves one to all")
        return
    beside: list[Mps | None] = [None]
    with suppress(ValueError):
        (mps := Mps()).check(["cuda:0"] * 3)
        beside.insert(0, mps)
    before, os.environ[SWITCH] = os.environ.get(SWITCH), "1"
    try:
        for each in beside:
            for name in ("1F1B", "InterleavedZeroBubble"):
                part.attempt(f"{name}, {'mps' if each else 'turns'}", partial(_nccl, setting, name, each))
    finally:
        os.environ.pop(SWITCH)
        if before is not None:
            os.environ[SWITCH] = before


def _nccl(setting: Setting, name: str, beside: Mps | None) -> dict:
    """A run that ends, or the sentence of whoever ended it: which is a finding, no failure."""
    s = pp.build(name, num_ranks=3, num_microbatches=4)
    gpt = models.gpt(source="sample", num_layers=6, width=64, num_heads=2, context=32, batch_size=8)
    started, said, equal = time.monotonic(), "", None
    with OneGpuPool(3, device=setting.device, beside=beside, timeout_s=_PATIENCE_S) as pool:
        try:
            equal = pool.train(s, gpt, steps=3, check_gradients=True).gradients.equal
        except RankError as error:
            said = error.cause[:1000]
    row = {"schedule": name, "num_ranks": 3, "sharing": "mps" if beside else "turns", "ended": not said, "said": said}
    print(f"NCCL on one GPU, {name}, {row['sharing']}: {said.splitlines()[0] if said else 'ends'}", flush=True)
    wrong = ["gradients differ from one process"] if equal is False else []
    return {**row, "seconds": round(time.monotonic() - started, 1), "wrong": wrong}
