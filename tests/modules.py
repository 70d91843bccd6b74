"""Modules and functions that tests send to ranks: a rank can import this file."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pplab import lab
from pplab.lab.models import Modules
from pplab.runtime import Batch, EndOfBatches, Extra, Job, Listener, Rank, RankContext, Workload
from pplab.runtime import context as rank_context


def batch(size: int = 8, width: int = 6) -> Batch:
    """A batch of random numbers, the same every time."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(2, size, width, generator=generator)
    return Batch((numbers[0],), numbers[1])


def workload(*stages: nn.Module, **options) -> Modules:
    """Stages trained to a random target."""
    return Modules(stages, batch(**options), nn.functional.mse_loss)


def losses_of_one_process(workload: Workload, steps: int, make_optimizer: Callable) -> list[float]:
    """The losses of so many steps of the whole model, in this process."""
    model = workload.build_whole()
    optimizer, losses = make_optimizer(model.parameters()), []
    for step in range(steps):
        batch = workload.batch(step)
        loss = workload.loss(model(*batch.inputs, **batch.context), batch.target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def open_slowly(context: RankContext, seconds: float) -> None:
    """From now on each channel of this rank takes so long to open."""
    channel, opened = RankContext.channel, set()

    def slow(self: RankContext, source: int, target: int) -> object:
        if self.rank in (source, target) and (source, target) not in opened:
            opened.add((source, target))
            time.sleep(seconds)
        return channel(self, source, target)

    RankContext.channel = slow


def has_group(context: RankContext, key: tuple) -> bool:
    """Whether this rank has made that process group."""
    return key in context.groups


class Two(nn.Module):
    """Returns two tensors, one of whole numbers: (B, C) and (B,)."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C) to (B, C), (B,)."""
        return self.linear(x).tanh(), (x.sum(1) > 0).long()


class Three(nn.Module):
    """Takes what `Two` returns and returns three tensors, one of which no gradient flows into."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(2, width), nn.Linear(width, width)

    def forward(self, x: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, C), (B,) to (B, C), (B, C), (B, C)."""
        return self.linear(x), self.embedding(which), torch.ones_like(x)


class Sum(nn.Module):
    """Adds what `Three` returns; has no parameters."""

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """Three times (B, C) to (B, C)."""
        return x + y * z


class View(nn.Module):
    """Returns a view of what it computed, and one that isn't contiguous."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        return self.linear(x).view(len(x), -1, 2).transpose(1, 2)[:, 0]


class Growing(nn.Module):
    """Returns one column more at its second call than before."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6) to (B, 7) or (B, 8)."""
        self.calls += 1
        return self.linear(x)[:, : 6 + self.calls]


class Reads(nn.Module):
    """A layer of a language model in which a token sees those before it that are no padding."""

    def __init__(self, tokens: int = 0, labels: int = 6):
        super().__init__()
        self.start = nn.Embedding(tokens, 6) if tokens else nn.Identity()
        self.linear = nn.Linear(6, labels)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, T) or (B, T, 6), with a mask (B, T), to (B, T, labels)."""
        seen = attention_mask[..., None].float()
        return self.linear((self.start(x) * seen).cumsum(1) / seen.cumsum(1).clamp(min=1)).tanh()


class Padded(Batch):
    """A padded batch, each of whose microbatches ends where its own longest row does."""

    def microbatches(self, num_microbatches: int) -> list[Batch]:
        """Equal numbers of rows, each cut to its longest."""
        return [self._cut(rows) for rows in super().microbatches(num_microbatches)]

    def _cut(self, rows: Batch) -> Batch:
        mask = rows.context["attention_mask"]
        length = int(mask.any(0).nonzero().max()) + 1
        return rows.each(lambda x: x[:, :length] if x.dim() > 1 and x.shape[1] == mask.shape[1] else x)


class Texts(Modules):
    """Padded batches of other lengths at every step; a microbatch counts for its tokens with a label.

    `shift(step)` is added to every token of a step's batch.
    """

    def __init__(self, stages: int, lengths: list[list[int]], shift: Callable[[int], int] | None = None, pad: int = 0):
        ends = [Reads(20), *(Reads() for _ in range(stages - 2)), Reads(labels=20)]
        self.lengths, self.shift, self.pad = lengths, shift, pad
        super().__init__(ends, self.batch(0), _of_tokens)

    def batch(self, step: int) -> Batch:
        """The texts of a step. One whose length is negative has no label."""
        lengths = torch.tensor(self.lengths[step % len(self.lengths)])[:, None]
        mask = torch.arange(max(self.pad, int(lengths.abs().max()))) < lengths.abs()
        more = self.shift(step) if self.shift else 0
        ids = (torch.arange(mask.numel()).view_as(mask) * 7 + step + more) % 20 * mask
        labels = ids.roll(-1, 1).masked_fill(~mask | (lengths < 0), -100)
        return (Batch if self.pad else Padded)((ids,), labels, {"attention_mask": mask})

    def weight(self, batch: Batch) -> int:
        """Its labels."""
        return int((batch.target != -100).sum())


def _of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class TorchAlone(Workload):
    """What notebooks/torch_alone.py trains."""

    name, notes, batch_size = "torch_alone.py", (), 8

    def __init__(self, script: str):
        self.script = script

    @cached_property
    def theirs(self) -> ModuleType:
        """The script, as a module."""
        spec = importlib.util.spec_from_file_location("torch_alone", self.script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def check(self, num_stages: int) -> None:
        """It can be cut anywhere."""

    def build_stage(self, stage: int, num_stages: int) -> nn.Module:
        """The script's."""
        return self.theirs.part(stage, num_stages)

    def build_whole(self) -> nn.Module:
        """The script's."""
        return self.theirs.whole_model()

    def batch(self, step: int) -> Batch:
        """The script's."""
        tokens, target = self.theirs.batch(step)
        return Batch((tokens,), target)

    def weight(self, batch: Batch) -> int:
        """The labels."""
        return int((batch.target != -100).sum())

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Their mean."""
        return _of_tokens(output, target)


def of_rank_1(step: int) -> int:
    """1 on rank 1 from step 2 on."""
    return int(step > 1 and torch.distributed.get_rank() == 1)


def ends_on_rank_1(step: int) -> Batch:
    """The same batch for every step, and on rank 1 for four steps."""
    if step > 3 and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        raise EndOfBatches("there are 4 batches")
    return batch()


_DRAWN = itertools.count(os.getpid())


def unseeded(step: int) -> int:
    """Another number whenever it is asked for, and in every process."""
    return next(_DRAWN)


class Slow(nn.Module):
    """Sleeps before it computes, and says where its process can be found."""

    def __init__(self, folder: str, seconds: float = 0.2):
        super().__init__()
        self.linear, self.folder, self.seconds = nn.Linear(6, 6), folder, seconds

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        with open(os.path.join(self.folder, str(os.getpid())), "w"):
            pass
        time.sleep(self.seconds)
        return self.linear(x)


class RaisesInForward(nn.Module):
    """Fails at its third call."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to nothing."""
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError("the third forward fails")
        return self.linear(x)


class _FailingGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise ArithmeticError("the backward fails")


class RaisesInBackward(nn.Module):
    """Computes, and fails when it is asked for gradients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        return _FailingGradient.apply(self.linear(x))


class RaisingOptimizer(torch.optim.SGD):
    """Fails at its step."""

    def step(self, closure=None):
        """Fail."""
        raise ArithmeticError("the optimizer fails")


def raising_optimizer(parameters) -> torch.optim.Optimizer:
    """An optimizer whose step fails."""
    return RaisingOptimizer(parameters, lr=0.1)


def chatter(context) -> int:
    """Print to both streams; return the rank."""
    print("a rank prints this")
    os.write(2, b"and this\n")
    return context.rank


def setting(context, name: str) -> str | None:
    """What a rank's environment says."""
    return os.environ.get(name)


def named_in_a_trace(context, name: str) -> dict[str, float]:
    """The spans, in ms, that torch's class of this name writes into the profiler's trace of a step with 4 microbatches.

    Nothing of pplab takes part. Rank 0 sleeps for 30 ms in every forward.
    """
    from torch.distributed import pipelining
    from torch.profiler import ProfilerActivity, profile

    rank, per_rank = context.rank, 2 if name.startswith("Interleaved") else 1
    layers = [nn.Linear(6, 6) for _ in range(per_rank)]
    if rank == 0:
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: time.sleep(0.03))
    total, device = 2 * per_rank, context.device
    stages = [pipelining.PipelineStage(layer, rank + 2 * n, total, device) for n, layer in enumerate(layers)]
    of_class = getattr(pipelining, f"Schedule{name}")
    schedule = of_class(stages if per_rank == 2 else stages[0], 4, loss_fn=nn.functional.mse_loss)
    x = torch.ones(4, 6)

    def step() -> None:
        schedule.step(*([x] if rank == 0 else []), **({"target": x, "losses": []} if rank == 1 else {}))

    step()  # torch looks at shapes
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        torch.distributed.barrier()
        step()
    own = [event for event in trace.events() if event.name.startswith(("PP:", "Forward", "Backward"))]
    others = [event for event in trace.events() if event.is_user_annotation and event not in own]
    assert all(event.name.startswith("gloo:") for event in others), {event.name for event in others}
    return {event.name: event.time_range.elapsed_us() / 1e3 for event in own}


def crash(context) -> None:
    """Rank 1 says something and dies as a crash in a library would."""
    if context.rank == 1:
        os.write(2, b"last words of rank 1\n")
        os.abort()
    time.sleep(30)


def leave(context) -> None:
    """Rank 0 exits."""
    if context.rank == 0:
        os._exit(7)
    time.sleep(30)


def read_slowly(context, seconds: float) -> None:
    """From now on the rank sleeps before every piece of a message that it reads."""

    class Slow:
        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def read(self, *arguments) -> bytes:
            time.sleep(seconds)
            return os.read(*arguments)

    rank_context.os = Slow()


def echo(context, tensor: Tensor) -> Tensor:
    """What was sent."""
    return tensor


class Broken(Modules):
    """Rank 1 can't load a batch, or build its stage."""

    def __init__(self, what: str):
        super().__init__([nn.Linear(6, 6), nn.Linear(6, 6)], batch(), nn.functional.mse_loss)
        self.what = what

    def batch(self, step: int) -> Batch:
        """Not that of step 2."""
        if self.what == "batch" and step == 2 and torch.distributed.get_rank() == 1:
            raise OSError("the file is gone")
        return super().batch(step)

    def build_stage(self, stage: int, num_stages: int) -> nn.Module:
        """Not the last one."""
        if self.what == "stage" and stage == 1:
            raise OSError("the file is gone")
        return super().build_stage(stage, num_stages)


def backward_first(forward, backward) -> tuple:
    """Both halves of an overlap, the backward before the forward."""
    made = backward()
    return forward(), made


def forward_only(forward, backward) -> tuple:
    """Half of an overlap."""
    raise RuntimeError("no backward")


class Sleeps(nn.Module):
    """A Linear that takes its time, in the forward: every call, or one of them."""

    def __init__(self, seconds: float, only_call: int | None = None):
        super().__init__()
        self.linear, self.seconds, self.only_call, self.calls = nn.Linear(6, 6), seconds, only_call, 0

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6) to (B, 6)."""
        self.calls += 1
        if self.only_call in (None, self.calls):
            time.sleep(self.seconds)
        return self.linear(x)


def environment(context, *names: str) -> list[str]:
    """The rank's environment variables of these names."""
    return [os.environ.get(name, "") for name in names]


class Hungry(nn.Module):
    """Asks for more memory than any device has."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6) to nothing."""
        return self.linear(x) + torch.empty(2**48, device=x.device).sum()


def open_files(context) -> int:
    """The rank's open files and sockets."""
    return len(os.listdir("/proc/self/fd"))


@dataclass(frozen=True)
class Diary(Extra):
    """Writes down what a rank's listener is told of, and which of pplab's modules the rank has at the end."""

    events: frozenset[str]
    name = "diary"

    def check(self, job: Job) -> Job:
        """ValueError for a diary of nothing."""
        if not self.events:
            raise ValueError("a diary needs events to write down")
        return job

    def listen(self, rank: Rank) -> Listener:
        """Write."""
        return _Writing(self.events)

    def finish(self, job: Job, reports: list[tuple[list[str], set[str]]]) -> list[tuple[list[str], set[str]]]:
        """What every rank wrote."""
        return reports


@dataclass(frozen=True)
class SummedByOne(Extra):
    """Sums a number over all ranks behind each row, where rank 0 returns early: it has nothing to add."""

    name = "summed"

    def listen(self, rank: Rank) -> Listener:
        """Sum."""
        return _Summing(rank.context.rank)


class _Summing(Listener):
    events = frozenset(("row",))

    def __init__(self, rank: int):
        self.rank = rank

    def end(self, event: str, what: object) -> None:
        """Wait for the others."""
        if self.rank:
            dist.all_reduce(torch.ones(1))


class _Writing(Listener):
    def __init__(self, events: frozenset[str]):
        self.events, self.written = events, []

    def begin(self, event: str, what: object) -> None:
        """Open a bracket."""
        self.written.append(event if what is None or event == "row" else f"{event} {what}")
        self.written.append("(")

    def end(self, event: str, what: object) -> None:
        """Close it."""
        self.written.append(")")

    def report(self) -> tuple[list[str], set[str]]:
        """All of it, and the modules."""
        return self.written, {name for name in sys.modules if name.split(".")[0] == "pplab"}


def seed(context, number: int) -> None:
    """Give every rank's random numbers the same start."""
    torch.manual_seed(number)


def grouped_adamw(named) -> torch.optim.Optimizer:
    """AdamW that lets norms and biases be as large as they like."""
    groups: dict[bool, list] = {True: [], False: []}
    for name, p in named:
        groups["norm" not in name and not name.endswith("bias")].append(p)
    decays = [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "weight_decay": 0.0}]
    return torch.optim.AdamW(decays, lr=3e-3)


class Unseeded(Modules):
    """Makes its stages' weights anew wherever they are built."""

    def build_stage(self, stage: int, num_stages: int) -> nn.Module:
        """The stage with other weights than the whole model's."""
        module = super().build_stage(stage, num_stages)
        for p in module.parameters():
            nn.init.normal_(p)
        return module


class Loose(Modules):
    """Says of no weight that several stages share it."""

    def tied(self, num_stages: int) -> dict:
        """Nothing."""
        return {}


class Renamed(Modules):
    """Its first stage has other names than the whole model."""

    def build_stage(self, stage: int, num_stages: int) -> nn.Module:
        """The stage, or one that names its layer itself."""
        module = super().build_stage(stage, num_stages)
        return nn.Sequential(OrderedDict(first=module.get_submodule("0"))) if stage == 0 else module


class Drops(nn.Module):
    """Drops in its own forward, in a module that it calls twice, and in attention; and says what it drops."""

    def __init__(self):
        super().__init__()
        self.linear, self.twice = nn.Linear(8, 8), nn.Dropout(0.3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to (B, 8)."""
        ones = torch.arange(x.numel(), dtype=x.dtype).sqrt().view_as(x)
        for drop in (partial(nn.functional.dropout, p=0.3), self.twice, self.twice):
            kept = drop(ones)
            lab.say("kept", kept.sum())
            lab.say("its square", kept.sum() ** 2)
            x = x + self.linear(x * kept / ones.max()).tanh()
        return x + self.attention(*[x[None]] * 3, need_weights=False)[0][0]


class Low(nn.Module):
    """A Linear of few digits between others that have more."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6) to (B, 6)."""
        return self.linear(x.bfloat16()).float()


class Otherwise(Modules):
    """Its second stage computes something else than the whole model does there."""

    def build_stage(self, stage: int, num_stages: int) -> nn.Module:
        """The stage, or one that doubles."""
        module = super().build_stage(stage, num_stages)
        if stage == 1:
            module.register_forward_hook(lambda module, given, output: 2 * output)
        return module


class Root(nn.Module):
    """A square root, whose gradient isn't finite at 0."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        return (x * (x > 0)).sqrt()


class Reciprocal(nn.Module):
    """1 / 0 for what is negative."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        return 1 / x.relu()


class Counting(nn.Module):
    """Multiplies by how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        self.calls += 1
        return x * self.calls


class Evaluated(nn.Module):
    """Random, and of no use but in training."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        if not self.training:
            raise ArithmeticError("only in training")
        return x * torch.rand_like(x)


class OnRank1(nn.Module):
    """Multiplies, but in rank 1 only."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        return x * (self.factor if torch.distributed.get_rank() == 1 else 1)


class Branch(nn.Module):
    """Adds next to nothing to what it is given, by a Linear. Rank 1 multiplies the gradients of that, or has none."""

    def __init__(self, factor: float | None):
        super().__init__()
        self.linear, self.factor = nn.Linear(6, 6), factor

    def forward(self, x: Tensor) -> Tensor:
        """(B, 6) to (B, 6)."""
        branch, factor = self.linear(x), self.factor
        if torch.distributed.get_rank() == 1:
            if factor is None:
                branch = branch.detach()
            elif branch.requires_grad:
                branch.register_hook(lambda gradient: gradient * factor)
        return x + 1e-5 * branch.tanh()


def more_on_rank_1(output: Tensor, target: Tensor) -> Tensor:
    """A loss, and in rank 1 so much more, with the same gradients."""
    return nn.functional.mse_loss(output, target) + 5 * (torch.distributed.get_rank() == 1)


class GradientOnRank1(nn.Module):
    """Gives its input on, and multiplies the gradient, but in rank 1 only."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) to (B, C)."""
        if torch.distributed.get_rank() == 1:
            x.register_hook(lambda gradient: gradient * self.factor)
        return x * 1


MADE = []  # batches, in this process


def another_batch(step: int) -> Batch:
    """Another batch at every call; the same in processes that make as many."""
    MADE.append(step)
    return batch_of(1000 + len(MADE))


def ragged(step: int) -> Batch:
    """Labels of which the first microbatches ignore more than the last ones."""
    labels = torch.arange(8) % 6
    labels[:3] = -100
    return Batch(batch().inputs, labels)


def counted(batch: Batch) -> int:
    """How many labels count."""
    return int((batch.target >= 0).sum())


class Masked(nn.Module):
    """Multiplies with what every stage is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B, C), (B, 1) to (B, C)."""
        return self.linear(x) * mask


class Misplaced(Modules):
    """Says that a weight is kept where there is none."""

    def tied(self, num_stages: int) -> dict:
        """A place of the second stage that it doesn't have."""
        return {"0.weight": [(0, "0.weight"), (1, "head.weight")]}


def batch_of(step: int) -> Batch:
    """Another batch for every step."""
    numbers = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(step))
    return Batch((numbers[0],), numbers[1])


def pinned(context: object) -> tuple[int, int, int]:
    """Of a rank on a GPU that is played: how often memory was pinned, how much still is, how much was unmapped so."""
    import pinned as fake

    return len(fake.MADE), len(fake.PINNED), len(fake.LATE)


def refuse_pinning(context: object) -> None:
    """A rank's GPU, which is played, pins nothing from now on. As CUDA does, it raises the error once more where the
    next kernel is launched."""
    import pinned as fake
    from torch.utils._python_dispatch import TorchDispatchMode

    class Launches(TorchDispatchMode):
        fails = False

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            if self.fails:
                self.fails = False
                raise RuntimeError("CUDA error 801, of an earlier call")
            return function(*arguments, **(options or {}))

        def refused(self, ptr: int, size: int, flags: int) -> int:
            self.fails = True
            return 801

    launches = Launches()
    launches.__enter__()
    fake.cudaHostRegister = launches.refused


@cache
def small_tokenizer() -> object:
    """A WordPiece tokenizer trained on the sample, in this process: the same every time."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(lab.data.reviews(source="sample", limit=10**6).texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, special.index(name)) for name in ("[CLS]", "[SEP]")]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
