"""A small GPT whose blocks have a mixture of experts instead of the MLP: every token goes to a few
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from ...errors import positive_int
from ._gpt import GPT, Attention, GPTConfig, LanguageModel, gpt

if TYPE_CHECKING:
    from ..experts import Wire


@dataclass(frozen=True)
class MixtureConfig(GPTConfig):
    """Sizes of the model, and of its experts."""

    num_experts: int = 4
    experts_per_token: int = 2
    expert_width: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_experts", "experts_per_token", "expert_width"):
            positive_int(name, getattr(self, name))
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}, and there are {self.num_experts} "
                "experts: take fewer, or more experts"
            )


class Expert(nn.Module):
    """An MLP for the tokens that are sent to it."""

    def __init__(self, config: MixtureConfig):
        super().__init__()
        self.up = nn.Linear(config.width, config.expert_width)
        self.down = nn.Linear(config.expert_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C) to (N, C)."""
        return self.down(functional.gelu(self.up(x)))


class MixtureBlock(Attention):
    """Attention to earlier tokens, then for every token the experts that its router chooses. Both
    add to the block's input.

    No token is dropped, because an expert takes as many as are sent to it. `wire` takes tokens to
    experts on other ranks. It is None where all experts are on this rank.
    """

    wire: Wire | None = None

    def __init__(self, config: MixtureConfig):
        super().__init__(config)
        self.per_token = config.experts_per_token
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        self.experts = nn.ModuleDict({str(e): Expert(config) for e in range(config.num_experts)})

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x = x + self.attend(x)
        tokens = self.norm2(x).flatten(0, 1)  # (N, C)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.per_token)  # (N, k) each
        weights = weights / weights.sum(-1, keepdim=True)
        by_expert = chosen.flatten().argsort(stable=True)  # of the N k that are sent
        counts = torch.bincount(chosen.flatten(), minlength=self.router.out_features)
        sent = tokens[by_expert // self.per_token]
        if self.wire is None:
            made = self.run_experts(sent, counts[None])
        else:
            came, plan = self.wire.dispatch(sent, counts)
            made = self.wire.combine(self.run_experts(came, plan.taken), plan)
        made = made[by_expert.argsort()].view(*chosen.shape, -1)  # (N, k, C)
        return x + (made * weights[..., None]).sum(1).view_as(x)

    def run_experts(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """(N, C) to (N, C): `counts[rank][expert]` tokens came from each rank for each expert on
        this rank.
        """
        pieces = tokens.split(counts.flatten().tolist())
        count = len(self.experts)
        made = [
            expert(torch.cat(pieces[e::count])).split(counts[:, e].tolist())
            for e, expert in enumerate(self.experts.values())
        ]
        return torch.cat([of_expert[rank] for rank in range(len(counts)) for of_expert in made])


class MixtureGPT(GPT):
    """A GPT of such blocks, or a part of one."""

    block = MixtureBlock


class Mixture(LanguageModel):
    """Next-byte prediction with a mixture of experts on rows of bytes."""

    config: MixtureConfig
    kind = MixtureGPT

    @property
    def name(self) -> str:
        """The model's sizes in words."""
        c = self.config
        return (
            f"{super().name}, {c.experts_per_token} of {c.num_experts} experts of width "
            f"{c.expert_width} per token"
        )


def mixture(
    *, batch_size: int = 32, source: str = "auto", cut: Sequence[int] | None = None, **sizes: int
) -> LanguageModel:
    """A mixture of experts that learns to continue reviews. `sizes` are GPTConfig's, `num_experts`,
    `experts_per_token` and `expert_width`. The rest is as for `gpt`.

    >>> sizes = dict(num_layers=4, width=32, context=16, num_experts=8)
    >>> model = mixture(batch_size=4, source="sample", **sizes)
    >>> print(model.name)
    GPT with 4 layers of width 32, batch 4 x 16 bytes, 2 of 8 experts of width 128 per token
    >>> model.build_stage(0, 2)(*model.batch(step=0).inputs).shape
    torch.Size([4, 16, 32])
    """
    config = MixtureConfig(**sizes)
    plain = gpt(batch_size=batch_size, source=source, cut=cut, context=config.context)
    return Mixture(config, plain.batch_size, plain.tokens, plain.notes, plain.cut)
