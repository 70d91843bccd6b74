"""Layers whose tokens cross a wire: sent to ranks by tests."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from pplab.lab.experts.wire import Wire
from pplab.runtime import RankContext


class Dropping(nn.Module):
    """Drops half of what crosses, before and behind the wire."""

    wire: Wire | None = None

    def __init__(self, width: int = 6):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C) to (N, C)."""
        x = nn.functional.dropout(self.linear(x), 0.5)
        came, plan = self.wire.dispatch(x, torch.tensor([len(x)]))
        return self.wire.combine(nn.functional.dropout(came.tanh(), 0.5), plan) + x


class Fails(Dropping):
    """Raises, or never returns, in the first forward that begins beside a backward."""

    def __init__(self, hangs: bool = False):
        super().__init__()
        self.hangs = hangs

    def forward(self, x: Tensor) -> Tensor:
        """(N, C) to (N, C)."""
        if self.wire.turns is not None and len(self.wire.turns.halves) > 1:
            if self.hangs:
                time.sleep(3600)
            raise ArithmeticError("the forward of a pair fails")
        return super().forward(x)


class FailsBehind(Dropping):
    """Raises in the backward of the first pair."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C) to (N, C)."""
        y = super().forward(x)
        y.register_hook(self.fail)
        return y

    def fail(self, gradient: Tensor) -> None:
        """Raise in a pair."""
        if self.wire.turns is not None and len(self.wire.turns.halves) > 1:
            raise ArithmeticError("the backward of a pair fails")


def seed(context: RankContext) -> None:
    """Let this rank's random numbers start anew."""
    torch.manual_seed(7)
