"""What goes wrong in ranks: layers, batches, optimizers and functions that fail on purpose. Ranks import this file."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from functools import partial

import torch
from torch import Tensor, nn

import pplab as pp
from pplab.lab.models import Modules
from pplab.runtime import Batch


def hurt(how: str) -> None:
    """Do to this process what the name says."""
    if how == "raise":
        raise ArithmeticError("injected")
    if how == "raise without words":
        raise NoWords
    if how == "raise SystemExit":
        sys.exit(3)
    if how == "exit":
        os._exit(3)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "abort":
        os.abort()
    if how == "sleep":
        time.sleep(3600)
    if how == "hold the GIL":
        ctypes.PyDLL(None).sleep(3600)  # a C function that doesn't let go of the interpreter
    while how == "spin":
        pass
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))


class NoWords(Exception):
    """An exception that can't even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Hurts(nn.Module):
    """A layer that takes `seconds` per call, and hurts its process in one forward or backward."""

    def __init__(self, how: str = "", where: str = "forward", at: int = 1, width: int = 16, seconds: float = 0.0):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.how, self.where, self.at, self.seconds, self.calls = how, where, at, seconds, 0

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) to (B, width)."""
        self.calls += 1
        time.sleep(self.seconds)
        if self.calls == self.at and self.where == "forward":
            hurt(self.how)
        y = self.linear(x)
        return _Backward.apply(y, self.how) if self.calls == self.at and self.where == "backward" else y


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, how: str) -> Tensor:
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        hurt(ctx.how)
        return gradient, None


class Optimizer(torch.optim.SGD):
    """Hurts the rank whose stage is marked, at its first step."""

    def __init__(self, parameters, how: str):
        parameters = list(parameters)
        self.how = how if any(hasattr(p, "marked") for _, p in parameters) else ""
        super().__init__(parameters, lr=0.01)

    def step(self, closure=None):
        """A step, or what hurts."""
        hurt(self.how)
        return super().step(closure)


class Marked(Hurts):
    """The layer of the rank whose optimizer hurts."""

    def __init__(self):
        super().__init__()
        self.linear.weight.marked = True

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.linear.weight.marked = True  # sending it to a rank forgets that


class Data(Modules):
    """A workload whose batch of step 1 hurts one rank."""

    def __init__(self, stages: list[nn.Module], how: str, rank: int):
        super().__init__(stages, batch(), nn.functional.mse_loss)
        self.how, self.rank = how, rank

    def batch(self, step: int) -> Batch:
        """The batch of a step."""
        import torch.distributed as dist

        if step == 1 and dist.is_initialized() and dist.get_rank() == self.rank:
            hurt(self.how)
        return super().batch(step)


def batch(size: int = 8, width: int = 16) -> Batch:
    """Random numbers, the same every time."""
    numbers = torch.randn(2, size, width, generator=torch.Generator().manual_seed(1))
    return Batch((numbers[0],), numbers[1])


def schedule(num_ranks: int = 2) -> pp.Schedule:
    """The schedule of all runs here."""
    return pp.build("1F1B", num_ranks=num_ranks, num_microbatches=4)


def healthy(num_ranks: int = 2, width: int = 16, seconds: float = 0.0) -> Modules:
    """A workload that nothing is wrong with."""
    stages = [Hurts(width=width, seconds=seconds) for _ in range(num_ranks)]
    return Modules(stages, batch(width=width), nn.functional.mse_loss)


def ailing(num_ranks: int, rank: int, how: str, where: str) -> tuple[Modules, dict]:
    """A workload that hurts one rank in a forward, a backward, its optimizer or while it loads data; and options."""
    stages: list[nn.Module] = [Hurts() for _ in range(num_ranks)]
    if where == "loading":
        return Data(stages, how, rank), {}
    if where == "optimizer":
        stages[rank] = Marked()
        return Modules(stages, batch(), nn.functional.mse_loss), {"optimizer": partial(Optimizer, how=how)}
    stages[rank] = Hurts(how, where, at=7)  # in the second pass of four microbatches
    return Modules(stages, batch(), nn.functional.mse_loss), {}


def quick(context) -> int:
    """The rank."""
    return context.rank


def soon(context, rank: int, how: str, seconds: float) -> None:
    """A rank will be hurt when it has been idle for so long."""
    if context.rank == rank:
        threading.Timer(seconds, hurt, (how,)).start()


def halting(context, rank: int, how: str) -> None:
    """One rank is hurt, and the others wait for it."""
    context.watch("at the barrier", context.rank != rank)
    if context.rank == rank:
        hurt(how)
    torch.distributed.barrier()


def nap(context, seconds: float) -> int:
    """Sleep; the rank."""
    time.sleep(seconds)
    return context.rank


def answer_in_part(context, rank: int, how: str) -> Tensor:
    """4 MB, from a rank that is hurt when a part of it is on its way."""
    write = os.write

    def part(descriptor: int, data) -> int:
        if len(data) < 100_000:
            return write(descriptor, data)
        written = write(descriptor, data[:50_000])
        hurt(how)
        return written

    if context.rank == rank:
        os.write = part  # which ranks answer with
    return torch.zeros(1_000_000)


def open_things(context) -> list[int]:
    """Descriptors, threads, and pages of memory of a rank."""
    with open("/proc/self/statm") as file:
        return [len(os.listdir("/proc/self/fd")), threading.active_count(), int(file.read().split()[1])]
