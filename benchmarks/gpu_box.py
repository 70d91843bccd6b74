"""Describe this machine for `make gpu`: devices, driver, CUDA, NCCL, versions, MPS. It changes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_mps import CONTROL
from gpu_setting import shared_memory

from pplab.runtime import gpu as door
from pplab.runtime.pool import versions

_LITTLE = 2**32  # bytes: what ranks of one GPU share is some GB of messages
SUPPORTED = {
    "python": ((3, 11), (3, 14)),
    "torch": ((2, 10), (2, 15)),
    "transformers": ((5, 17), None),
}  # from, and to where there is an end


def facts(device: str) -> dict:
    """The machine's facts as plain JSON values; None where one can't be had."""
    cuda = device == "cuda"
    count = door.cuda.device_count() if cuda else 0
    queried = _query("driver_version,compute_mode,mig.mode.current") if cuda else []
    return {
        "devices": [_gpu(i) for i in range(count)] if cuda else [{"name": f"{processor()}, {cores()} cores"}],
        "versions": {
            **versions(),
            "transformers": _version("transformers"),
            "cuda": torch.version.cuda,
            "nccl": nccl_version() if cuda else None,
        },
        "kernels_for": list(door.cuda.get_arch_list()) if cuda else [],  # sm_90, ...: what this torch was built for
        "driver": queried[0][0] if queried else None,
        "compute_mode": [row[1] for row in queried],
        "mig": [row[2] for row in queried],
        "peer_access": [[i == j or door.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)],
        "nccl_ranks": count if cuda and dist.is_nccl_available() else 0,  # NCCL takes one rank per GPU
        "shared_memory": dict(zip(("folder", "free_bytes"), shared_memory(), strict=True)),
        "mps": {"control": shutil.which(CONTROL) is not None, "running": cuda and _mps_answers()},
    }


def problems(found: dict) -> list[str]:
    """What a reader of the results should know about these facts."""
    said = []
    for name, (least, most) in SUPPORTED.items():
        version = found["versions"].get(name)
        if version is None:
            said.append(f"{name} is not installed")
        elif _numbers(version) < least or (most and _numbers(version) > most):
            upto = f" to {'.'.join(map(str, most))}" if most else " on"
            said.append(f"{name} is {version}, and pplab is tested with {'.'.join(map(str, least))}{upto}")
    for device in found["devices"]:
        if (capability := device.get("compute_capability")) and not _runs_on(found.get("kernels_for"), capability):
            built = ", ".join(found["kernels_for"])
            said.append(
                f"{device['name']} has compute capability {capability}, and this torch was built for {built}: its "
                "first kernel will fail. The wheel for CUDA 12.6 serves older cards"
            )
    if any(mode == "Exclusive_Process" for mode in found["compute_mode"]):
        said.append("the compute mode is Exclusive_Process: ranks can share a GPU by MPS only")
    if any(mode == "Prohibited" for mode in found["compute_mode"]):
        said.append("the compute mode of a GPU is Prohibited: nothing can run on it")
    if found["mps"]["running"]:
        said.append("an MPS daemon runs on this machine already: ranks that share a GPU don't take turns, but use it")
    if (room := found.get("shared_memory", {})) and room["free_bytes"] < _LITTLE:
        free = f"{room['free_bytes'] / 2**20:.0f} MiB"
        said.append(f"ranks of one GPU share memory in {room['folder']}, which has {free}: docker run --shm-size=16g")
    elif room and not room["folder"].startswith("/dev/shm"):
        said.append(f"/dev/shm is too small: ranks of one GPU share memory in {room['folder']}, which may be slower")
    if found["devices"] and "memory_bytes" in found["devices"][0] and not found["nccl_ranks"]:
        said.append("this torch has no NCCL: tensors cross through the host's memory")
    pairs = [(i, j) for i, row in enumerate(found["peer_access"]) for j, there in enumerate(row) if not there]
    if pairs:
        said.append(f"without peer access: {', '.join(f'{i} to {j}' for i, j in pairs)}")
    return said


def show(found: dict) -> str:
    """The facts as lines."""
    lines = []
    for number, device in enumerate(found["devices"]):
        memory = f", {device['memory_bytes'] / 2**30:.1f} GiB" if "memory_bytes" in device else ""
        more = f", compute capability {device['compute_capability']}" if memory else ""
        lines.append(f"device {number}: {device['name']}{memory}{more}")
    lines.append("versions: " + ", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    lines.append(f"driver {found['driver']}; compute mode {', '.join(found['compute_mode']) or None}")
    lines.append(f"NCCL can serve {found['nccl_ranks']} ranks; MPS control program: {found['mps']['control']}")
    return "\n".join(lines)


def _runs_on(kernels_for: list[str] | None, capability: str) -> bool:
    """Whether a card runs what torch was built for, which is machine code of the same major number that isn't newer, or
    PTX that isn't. Where torch doesn't tell what it was built for, the answer is yes."""
    major, minor = map(int, capability.split("."))
    found = [re.match(r"(sm|compute)_(\d+)(\d)", each) for each in kernels_for or ()]
    there = [(kind, int(high), int(low)) for kind, high, low in (each.groups() for each in found if each)]
    return not there or any(
        (high, low) <= (major, minor) and (kind == "compute" or high == major) for kind, high, low in there
    )


def processor() -> str:
    """The processor's name, or where Linux doesn't say one, its kind."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.*\S)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1]
    return f"CPU ({platform.machine()})"


def cores() -> int:
    """How many of its cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def clocks() -> dict:
    """The GPUs' clocks of the multiprocessors, power and temperature now, or nothing without nvidia-smi."""
    found = _query("clocks.sm,power.draw,temperature.gpu")
    return {"clocks": [dict(zip(("sm", "power", "celsius"), row, strict=True)) for row in found]} if found else {}


def nccl_version() -> str | None:
    """NCCL's version; None when there is none."""
    try:
        return ".".join(map(str, door.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return None


def _gpu(index: int) -> dict:
    found = door.cuda.get_device_properties(index)
    return {
        "name": found.name,
        "memory_bytes": found.total_memory,
        "compute_capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
    }


def _query(fields: str) -> list[list[str]]:
    """The output of nvidia-smi, a row per GPU, or nothing without it."""
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def _mps_answers() -> bool:
    """Whether an MPS daemon answers in this environment."""
    try:
        done = subprocess.run([CONTROL], input="get_server_list\n", text=True, capture_output=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, int]:
    """Major and minor number."""
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()
    return int(major), int(minor)
