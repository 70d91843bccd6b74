"""A small model whose layers have experts: in each, a router sends every token to one of four."""

import torch
from torch import nn
from torch.nn import functional

from pplab import lab
from pplab.runtime import Batch, add_loss

EXPERTS, WIDTH, TOKENS = 4, 32, 24
TEXT = torch.tensor([*"".join(lab.data.reviews(source="sample", limit=512).texts).encode()])


class Embedding(nn.Module):  # of a byte and of the one before it
    def __init__(self):
        super().__init__()
        self.this, self.before = nn.Embedding(256, WIDTH), nn.Embedding(256, WIDTH)

    def forward(self, tokens):  # (samples, tokens) to (samples, tokens, WIDTH)
        return self.this(tokens) + self.before(functional.pad(tokens[:, :-1], (1, 0)))


class Layer(nn.Module):
    def __init__(self, adds):
        super().__init__()
        self.adds, self.norm = adds, nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        nn.init.normal_(self.router.weight, std=0.02)  # at first every expert is about as likely
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x):  # (samples, tokens, WIDTH)
        tokens = self.norm(x).flatten(0, 1)
        likely = self.router(tokens).softmax(-1)
        weight, chosen = likely.max(-1)
        load = functional.one_hot(chosen, EXPERTS).float().mean(0)  # each expert's share of the tokens
        self.balance = EXPERTS * (load * likely.mean(0)).sum()
        if self.adds:
            add_loss(0.1 * self.balance)
        for number, share in enumerate(load):
            lab.say(f"expert {number}", share)
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            made[mine] = expert(tokens[mine])
        return x + (made * weight[:, None]).view_as(x)


def model(adds):
    torch.manual_seed(0)
    return nn.Sequential(Embedding(), *(Layer(adds) for _ in range(4)), nn.Linear(WIDTH, 256))


def batch(step):  # 32 pieces of reviews, and for each byte the next one
    starts = torch.randint(len(TEXT) - TOKENS, (32, 1), generator=torch.Generator().manual_seed(step))
    rows = TEXT[starts + torch.arange(TOKENS + 1)]
    return Batch((rows[:, :-1],), rows[:, 1:])


def loss(scores, target):
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten())
