"""A GPT in pipeline stages by PyTorch alone: nothing here is pplab's.

    torchrun --standalone --nproc-per-node 2 torch_alone.py

It trains twice. "by hand": every rank keeps the parts of the model that are its own. "traced": `pipeline` cuts the
model where it is told to. The texts have unequal numbers of labels. Every rank trains the whole model, too, and
compares gradients.
"""

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline
from torch.nn import functional

warnings.filterwarnings("ignore", category=FutureWarning)  # the tracer's own

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT = 64, 32, 4, 4, 24
BATCH, MICROBATCHES, STEPS = 8, 4, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):  # (B, T, C)
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(B, T, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, C / heads)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """The whole model. A stage is one that has lost the parts of the others: what is left keeps its names."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleDict({str(n): Block() for n in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):  # (B, T) tokens, or (B, T, C) from the stage before
        if self.tokens is not None:
            x = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None else x


def whole_model():
    """The same weights in every process. A large model is made on the meta device, cut, and only then given memory."""
    torch.manual_seed(0)
    return GPT()


def batch(step):
    """Tokens and labels, (B, T), the same on every rank; -100 where a text has ended."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator)
    ends = torch.randint(2, CONTEXT + 1, (BATCH, 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].masked_fill(torch.arange(CONTEXT) >= ends, -100)


def sum_of_losses(output, target):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def part(stage, stages):
    """The model of one stage."""
    model = whole_model()
    for n in range(LAYERS):
        if not stage * LAYERS // stages <= n < (stage + 1) * LAYERS // stages:
            del model.blocks[str(n)]
    if stage > 0:
        model.tokens = model.places = None
    if stage < stages - 1:
        model.norm = model.head = None
    return model


def stage_by_hand(rank, ranks, device):
    return PipelineStage(part(rank, ranks).to(device), rank, ranks, device)


def stage_by_tracing(rank, ranks, device):
    begins = {f"blocks.{n * LAYERS // ranks}": SplitPoint.BEGINNING for n in range(1, ranks)}
    microbatch = batch(0)[0][: BATCH // MICROBATCHES]  # an example of what the model is given
    pipe = pipeline(whole_model(), (microbatch,), split_spec=begins)
    pipe.get_stage_module(rank).to(device)
    return pipe.build_stage(rank, device)


def train(how, stage, rank, ranks, device):
    labels = None  # how many the step's batch has

    def loss_fn(output, target):  # the microbatch's part of the mean over the batch's labels
        return sum_of_losses(output, target) / labels

    # torch would divide gradients by the number of microbatches: right for means of equally many labels, wrong here.
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn, scale_grads=False)
    whole = whole_model().to(device)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (stage.submod, whole)]
    for step in range(STEPS):
        tokens, target = (x.to(device) for x in batch(step))
        labels = (target != -100).sum()
        losses = []
        inputs = (tokens,) if rank == 0 else ()  # inputs go to the first rank, targets to the last
        last = {"target": target, "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*inputs, **last)

        alone = sum_of_losses(whole(tokens), target) / labels  # one process with the whole batch
        alone.backward()
        expected = {name: p.grad for name, p in whole.named_parameters()}
        for name, p in stage.submod.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)
        if losses:
            print(f"{how}, step {step}: loss {sum(losses).item():.6f}, in one process {alone.item():.6f}", flush=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def main():
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.device_count() >= ranks:  # one for every rank: NCCL needs that
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    train("by hand", stage_by_hand(rank, ranks, device), rank, ranks, device)
    train("traced", stage_by_tracing(rank, ranks, device), rank, ranks, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
