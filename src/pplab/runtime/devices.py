"""Which device each rank has, how tensors cross, and what such a machine can and can't show."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..errors import unknown


def choose_transport(num_ranks: int, device: str, transport: str, one_host: bool = True) -> tuple[list[str], str]:
    """Every rank's device, and how tensors cross: memory that ranks of one host share, gloo, or NCCL."""
    if device not in ("auto", "cpu", "cuda"):
        raise unknown("device", device, ("auto", "cpu", "cuda"))
    if transport not in ("auto", "shared", "gloo", "nccl"):
        raise unknown("transport", transport, ("auto", "shared", "gloo", "nccl"))
    by_host = "shared" if one_host and sys.platform == "linux" else "gloo"
    if transport == "shared" and by_host != "shared":
        raise ValueError('transport="shared" needs Linux, and all ranks on one host: use "auto" or "gloo"')
    gpus = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and not gpus:
        raise ValueError('device="cuda" was asked for and this machine has no CUDA device: use "cpu" or "auto"')
    if transport == "nccl" and gpus < num_ranks:
        raise ValueError(
            f'transport="nccl" needs a GPU for each of {num_ranks} ranks and found {gpus}: '
            'use "auto", by which ranks share what there is'
        )
    if transport == "auto":
        transport = "nccl" if gpus >= num_ranks and dist.is_nccl_available() else by_host
    if not gpus:
        return ["cpu"] * num_ranks, transport
    return [f"cuda:{rank % gpus}" for rank in range(num_ranks)], transport


def load_eagerly(transport: str) -> None:
    """Before CUDA starts: with NCCL, load all kernels at once.

    A kernel that is loaded at its first launch may have to wait for the ones that run, and a receive that was posted
    early runs until its message comes.
    """
    if transport == "nccl":
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def notes(devices: Sequence[str], cores: int) -> list[str]:
    """What this machine can't show, in so many words."""
    num_ranks, places = len(devices), len(set(devices))
    if devices[0] == "cpu":
        if num_ranks <= cores:
            return []
        return [
            f"{num_ranks} ranks share {cores} cores, so they wait for a core as well as for each other: losses, "
            "gradients and memory are valid, the times and the bubble are not the schedule's"
        ]
    if places == num_ranks:
        return []
    shared = f"{num_ranks} ranks share {places} GPU{'s' if places > 1 else ''}"
    return [
        f"{shared}, where processes take turns: losses, gradients and memory are valid, the times and the bubble are "
        "not the schedule's"
    ]


def paced_notes(devices: Sequence[str], notes: Sequence[str]) -> Sequence[str]:
    """The notes on a paced run: what of it is valid where ranks share the machine or compute on GPUs."""
    on_cpu = devices[0] == "cpu"
    if on_cpu and not notes:
        return notes
    if on_cpu:
        return [
            f"paced, {len(devices)} ranks on fewer cores: the order and the waits are the schedule's where every "
            "action kept to its time; the durations say nothing about the machine"
        ]
    return [
        *notes,
        "paced: every action computes on the GPU and then lasts as long as it was told to, so the order and the waits "
        "are the schedule's where every action kept to its time; the durations say nothing about the GPU",
    ]
