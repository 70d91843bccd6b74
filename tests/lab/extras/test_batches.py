"""What a batch may be: microbatches that count for unequal parts, or have other lengths, and batches that all share."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import modules
import pplab as pp
from pplab import lab
from pplab.runtime import Batch, Extra, Listener, Pool, RankError, loss_shares
from pplab_course import spine

pytestmark = pytest.mark.slow

SGD = partial(torch.optim.SGD, lr=0.5)
# Of two steps' eight texts; the first step's fifth and sixth have no label, so a microbatch of theirs has no mean.
LENGTHS = [[9, 2, 1, 1, -7, -4, 3, 5], [2, 2, 3, 12, 6, 1, 1, 1], [30, 1, 1, 1, 2, 2, 2, 2]]


@dataclass(frozen=True)
class Slots(Extra):
    """How many bytes of shared memory every rank has made for what it sends, piece by piece."""

    name = "slots"

    def listen(self, rank: object) -> Listener:
        return _Counts(rank)

    def finish(self, job: object, reports: Sequence[list[int]]) -> Sequence[list[int]]:
        return reports


class _Counts(Listener):
    def __init__(self, rank: object):
        self.comm = rank.comm

    def report(self) -> list[int]:
        return [len(slot.memory) for slots in self.comm.outgoing.values() for slot in slots]


def schedules() -> list[pp.Schedule]:
    two = [pp.build(name, num_ranks=2, num_microbatches=4) for name in ("GPipe", "ZB-H1", "ZBVZeroBubble", "DualPipe")]
    return [*two, lab.replicate(pp.build("1F1B", num_ranks=2, num_microbatches=2), 2)]


@pytest.mark.parametrize("schedule", schedules(), ids=lambda schedule: schedule.name)
def test_texts_of_any_lengths_equal_one_process(pools, schedule):
    """Tokens with a label are what counts, in whatever microbatch, on whatever copy of the last stage."""
    workload = modules.Texts(schedule.num_stages, LENGTHS)
    run = pools(schedule.num_ranks).train(schedule, workload, steps=5, check_gradients=True, optimizer=SGD)
    assert run.gradients.equal and run.gradients.loss_difference < 1e-6, run
    losses = modules.losses_of_one_process(workload, 5, SGD)
    assert run.losses == pytest.approx(losses, abs=1e-5)
    shapes = {tuple(each.target.shape) for step in range(3) for each in workload.batch(step).microbatches(4)}
    assert len(shapes) > 5, "lengths differ between steps and between microbatches of a step"


def test_recomputed_stages_take_any_lengths(pools):
    workload = modules.Texts(2, LENGTHS)
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    assert pools(2).train(s, workload, lab.Recompute(), steps=1, check_gradients=True).gradients.equal


def test_lengths_that_grow_take_memory_in_doublings(pools):
    """For each of the four messages that can be under way at once, in all no more than twice twice the longest."""
    s = pp.build("GPipe", num_ranks=2, num_microbatches=4)
    grows = [[n] * 8 for n in range(1, 80)]
    used, at_once = (
        pools(2).train(s, modules.Texts(2, lengths), Slots(), steps=79).extras["slots"]
        for lengths in (grows, grows[-1:])
    )
    (longest,) = {nbytes for made in at_once for nbytes in made}
    assert all(longest <= sum(made) <= 4 * 2 * 2 * longest for made in used), (used, longest)


def test_gloo_carries_any_lengths():
    with Pool(2, device="cpu", transport="gloo", timeout_s=60) as pool:
        for name in ("1F1B", "LoopedBFS"):
            s = pp.build(name, num_ranks=2, num_microbatches=4)
            workload = modules.Texts(s.num_stages, LENGTHS)
            run = pool.train(s, workload, steps=4, check_gradients=True, optimizer=SGD)
            assert run.gradients.equal, run
            assert run.losses == pytest.approx(modules.losses_of_one_process(workload, 4, SGD), abs=1e-5)


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B"])
def test_torchs_runtime_counts_tokens_too_and_wants_one_length(pools, name):
    s = pp.build(name, num_ranks=2, num_microbatches=4)
    run = pools(2).train(s, modules.Texts(s.num_stages, LENGTHS, pad=30), lab.TorchEngine(), check_gradients=True)
    assert run.gradients.equal and run.gradients.loss_difference < 1e-6, run
    with pytest.raises(RankError, match="takes microbatches of one shape in all steps, and here are .*: pad them"):
        pools(2).train(s, modules.Texts(s.num_stages, LENGTHS), lab.TorchEngine())


def test_equal_weights_are_what_equal_microbatches_were():
    """Exactly: a share of 1/M, and so the same bits, whatever equal weights are."""
    for count in range(1, 60):
        pieces = Batch((torch.ones(3 * count, 2),), torch.ones(3 * count)).microbatches(count)
        assert loss_shares(modules.workload(nn.Linear(6, 6)), pieces) == [1 / count] * count


@pytest.mark.parametrize("weights", [(0, 0), (2, -1), (1, float("nan")), (1, float("inf"))])
def test_weights_that_cannot_be_shares_are_refused(weights):
    workload = modules.workload(nn.Linear(6, 6))
    workload.weight = lambda batch: weights[int(batch.target[0])]
    pieces = Batch((torch.ones(2, 2),), torch.arange(2)).microbatches(2)
    with pytest.raises(ValueError, match="weights of microbatches must be at least 0, and not all 0"):
        loss_shares(workload, pieces)


@pytest.mark.parametrize(
    ("shift", "says"),
    [
        (
            modules.of_rank_1,
            "ranks 0, 2, 3 and rank 1 have different batches for step 2: each rank shuffles or draws for itself; "
            r".* on all ranks alike\. \(",
        ),
        (
            modules.unseeded,
            "different batches for step 0: it is another one each time; `batch.* compute inputs once",
        ),
    ],
)
def test_ranks_that_have_different_batches_are_named(pools, shift, says):
    s = pp.build("1F1B", num_ranks=4, num_microbatches=4)
    with pytest.raises(RankError, match=says):
        pools(4).train(s, modules.Texts(4, LENGTHS, shift), steps=4)


def test_a_digest_sees_every_tensor_of_a_batch_and_some_of_a_large_one():
    ids = torch.arange(12).view(2, 6)
    batch = Batch((ids,), ids, {"mask": ids > 3})
    others = [
        Batch((ids + 1,), ids, {"mask": ids > 3}),
        Batch((ids,), ids + 1, {"mask": ids > 3}),
        Batch((ids,), ids, {"mask": ids > 4}),
        Batch((ids.view(3, 4),), ids, {"mask": ids > 3}),
        Batch((ids.int(),), ids, {"mask": ids > 3}),
    ]
    assert len({each.digest() for each in (batch, *others)}) == 6
    assert Batch((ids.clone(),), ids, {"mask": ids > 3}).digest() == batch.digest()
    large = torch.randn(300, 1000, dtype=torch.bfloat16)
    assert Batch((large,), ids).digest() != Batch((large.roll(1, 0),), ids).digest()


def test_torch_alone_trains_what_one_process_and_pplab_train(pools):
    """The script compares every rank's gradients with those of one process, in every step. Chapter 13 starts it with
    torchrun."""
    script = Path(__file__).parents[3] / "notebooks" / "torch_alone.py"
    assert not re.search(r"^\s*(import|from) pplab", script.read_text(), re.MULTILINE)
    chapter = json.loads(script.with_name("13_own_model.ipynb").read_text())
    told = "\n".join("".join(cell["source"]) for cell in chapter["cells"])
    (shown,) = re.findall(r"```python\n(rank, ranks = .*?)```", told, re.DOTALL)
    other = [line for line in shown.splitlines() if line.strip().removeprefix("stage = ") not in script.read_text()]
    assert other == ["optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.5)"]  # the script has a second model
    ran = spine.run(script, 2, limit_s=120)
    assert ran.failure is None, ran
    printed = "".join(report.printed for report in ran.reports)
    said = re.findall(r"^(by hand|traced), step \d: loss (\S+), in one process (\S+)$", printed, re.MULTILINE)
    assert [how for how, _, _ in said] == ["by hand"] * 3 + ["traced"] * 3
    schedule = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    run = pools(2).train(schedule, modules.TorchAlone(str(script)), steps=3, check_gradients=True, optimizer=SGD)
    assert run.gradients.equal, run
    for _, by_torch, alone in said:
        assert float(by_torch) == pytest.approx(float(alone), abs=1e-5)
    assert run.losses * 2 == pytest.approx([float(by_torch) for _, by_torch, _ in said], abs=1e-5)
