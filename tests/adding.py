"""Layers that add to the loss, and the same in plain torch: a rank can import this file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pplab import lab
from pplab.lab.models import Modules
from pplab.runtime import Batch, add_loss

M = 4  # microbatches


class Mixture(nn.Module):
    """Top 2 of 4 experts, with a balancing loss and a z-loss. `where` the balancing loss comes from: the router that
    x goes through, one that x is cut off from, its weights alone; or it is a mere attribute, or nowhere.
    """

    def __init__(self, where: str = "router"):
        super().__init__()
        self.where, self.router = where, nn.Linear(8, 4)
        self.gate = nn.Linear(8, 4) if where in ("beside", "alone") else self.router
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def extra(self, x: Tensor) -> Tensor:
        """(B, 8) to what belongs to the loss."""
        if self.where in ("weights", "alone"):
            return self.gate.weight.square().sum()
        logits = self.gate(x.detach() if self.where in ("detached", "beside") else x)
        return self.of_logits(logits)

    def of_logits(self, logits: Tensor) -> Tensor:
        """(B, 4) to the balancing loss and the z-loss."""
        p = logits.softmax(-1)
        share = functional.one_hot(p.topk(2).indices, 4).sum(1).float().mean(0)
        return 4 * (share * p.mean(0)).sum() + 0.1 * logits.logsumexp(-1).square().mean()

    def body(self, x: Tensor) -> Tensor:
        """(B, 8) to (B, 8)."""
        return self.mixed(x, self.router(x))

    def mixed(self, x: Tensor, logits: Tensor) -> Tensor:
        """(B, 8) and (B, 4) to (B, 8)."""
        weights, chosen = logits.softmax(-1).topk(2)
        made = torch.stack([expert(x) for expert in self.experts], 1)
        return x + (made.gather(1, chosen[..., None].expand(-1, -1, 8)) * weights[..., None]).sum(1).tanh()

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to (B, 8)."""
        if self.where == "attribute":
            self.balance = self.extra(x)
        elif self.where != "nowhere":
            add_loss(self.extra(x))
        return self.body(x)


class Shared(Mixture):
    """Its router is cut off from x, and its loss and its output take the same logits."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to (B, 8)."""
        logits = self.router(x.detach())
        add_loss(self.of_logits(logits))
        return self.mixed(x, logits)

    def body(self, x: Tensor) -> Tensor:
        """(B, 8) to (B, 8)."""
        return self.mixed(x, self.router(x.detach()))


class Configured(Mixture):
    """Has a config as transformers' layers have, which asks for routers' logits."""

    def __init__(self, where: str):
        super().__init__(where)
        self.config = SimpleNamespace(output_router_logits=True)


class Saying(Mixture):
    """Says its loss, where it has one, as a number."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to (B, 8)."""
        if self.where != "nowhere":
            lab.say("extra", self.extra(x))
        return self.body(x)


def said(net: nn.Sequential, step: int) -> list[float]:
    """What layers say in a step, layer by layer: means over microbatches."""
    found = []
    with torch.no_grad():
        for x in batch(step).inputs[0].chunk(M):
            found.append([])
            for layer in net:
                if layer.where != "nowhere":
                    found[-1].append(float(layer.extra(x)))
                x = layer.body(x)
    return [sum(of_layer) / M for of_layer in zip(*found, strict=True)]


PAGE = (Path(__file__).parents[1] / "book" / "api.md").read_text()
ON_THE_PAGE = {"torch": torch}
exec(re.search(r"```python\n(class AddLoss.*?)```", PAGE, re.DOTALL)[1], ON_THE_PAGE)


class ByItself(Mixture):
    """Gives its loss a gradient itself, by what the page prints for plain torch."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to (B, 8)."""
        return ON_THE_PAGE["AddLoss"].apply(self.body(x), self.extra(x))


class Again(Mixture):
    """Runs its forward again in the backward, by torch's checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to (B, 8)."""
        return checkpoint(super().forward, x, use_reentrant=self.where == "reentrant")


def in_two_threads(forward, backward) -> tuple:
    """Both halves of an overlap at once."""
    made: list = []
    beside = Thread(target=lambda: made.append(forward()))
    beside.start()
    result = backward()
    beside.join()
    return made[0], result


def batch(step: int = 0) -> Batch:
    numbers = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(step))
    return Batch((numbers[0],), numbers[1])


def layers(*where: str, kind: type = Mixture) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(each) for each in where))


def workload(*where: str, **options) -> Modules:
    return Modules(layers(*where), batch, functional.mse_loss, **options)


def one_process(net: nn.Sequential, reduction: str = "mean", with_extra: bool = True) -> tuple[float, dict]:
    """Loss and gradients in plain torch, microbatch by microbatch."""
    net.zero_grad()
    total, given = 0.0, batch()
    for x, target in zip(given.inputs[0].chunk(M), given.target.chunk(M), strict=True):
        loss = 0
        for layer in net:
            if with_extra and layer.where not in ("nowhere", "attribute"):
                loss = loss + layer.extra(x)
            x = layer.body(x)
        loss = (loss + functional.mse_loss(x, target, reduction=reduction)) / (M if reduction == "mean" else 1)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def first_without_labels(step: int) -> Batch:
    """Nothing of the first microbatch counts."""
    made = batch(step)
    target = made.target.clone()
    target[: len(target) // M] = torch.nan
    return replace(made, target=target)


def count(batch: Batch) -> float:
    """The samples that have a label."""
    return float((~batch.target.isnan().any(1)).sum())


def labelled(output: Tensor, target: Tensor) -> Tensor:
    """The mean over samples with a label: NaN where there is none."""
    keep = ~target.isnan().any(1)
    return functional.mse_loss(output[keep], target[keep])
