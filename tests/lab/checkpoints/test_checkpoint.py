"""A run that stops and goes on, under whatever ranks and schedule, learns what an uninterrupted one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import modules
import pplab as pp
from pplab import lab
from pplab.lab import Checkpoint, CheckpointError, Resume, Save, models
from pplab.lab.checkpoints import checkpoint
from pplab.runtime import Pool, RankError, make_job

pytestmark = pytest.mark.slow

ADAM = partial(torch.optim.AdamW, lr=3e-3)
CLIP = lab.Clip(1.0)
SIZES = {"num_layers": 8, "width": 32, "num_heads": 2, "context": 16, "source": "sample", "batch_size": 8}
TOLERANCE = 1e-5  # of losses, relative: another order of sums, after some steps of Adam


def built(name: str, ranks: int) -> pp.Schedule:
    return pp.build(name, num_ranks=ranks, num_microbatches=8)


def gpt(**sizes: int) -> models.LanguageModel:
    return models.gpt(**{**SIZES, **sizes})


@pytest.fixture(scope="module")
def two(pools):
    return pools(2)


@pytest.fixture(scope="module")
def saved(two, tmp_path_factory):
    """A checkpoint after three of six steps, and the losses and norms of all six."""
    path = tmp_path_factory.mktemp("saved") / "run.safetensors"
    whole = two.train(built("1F1B", 2), gpt(), CLIP, steps=6, optimizer=ADAM)
    first = two.train(built("1F1B", 2), gpt(), CLIP, Save(path), steps=3, optimizer=ADAM)
    assert first.losses == whole.losses[:3] and first.job.first_step == 0
    return path, whole


def test_the_same_ranks_and_schedule_go_on_to_the_last_bit(two, saved):
    path, whole = saved
    rest = two.train(built("1F1B", 2), gpt(), CLIP, Resume(path), steps=3, optimizer=ADAM)
    assert rest.losses == whole.losses[3:]
    assert rest.extras["gradient_norms"] == whole.extras["gradient_norms"][3:]
    assert rest.job.first_step == 3 and lab.run_to_dict(rest)["first_step"] == 3


@pytest.mark.parametrize(
    ("name", "ranks"), [("ZBVZeroBubble", 4), ("DualPipe", 2), ("Interleaved1F1B", 2), ("GPipe", 1)]
)
def test_other_ranks_and_schedules_go_on(pools, saved, name, ranks):
    path, whole = saved
    resumed = {"steps": 3, "optimizer": ADAM, "check_gradients": True}
    rest = pools(ranks).train(built(name, ranks), gpt(), CLIP, Resume(path), **resumed)
    assert rest.losses == pytest.approx(whole.losses[3:], rel=TOLERANCE)
    assert rest.gradients.equal and rest.first_loss == pytest.approx(whole.losses[3], rel=TOLERANCE)


def test_what_four_ranks_saved_two_go_on_with(pools, saved, tmp_path):
    path, whole = saved
    again = tmp_path / "again.safetensors"
    options = {"steps": 1, "optimizer": ADAM}
    pools(4).train(built("DualPipe", 4), gpt(), CLIP, Resume(path), Save(again), **options)
    both = Resume(again), Save(again)
    run = pools(4).train(built("ZBVZeroBubble", 4), gpt(), CLIP, *both, check_gradients=True, **options)
    assert run.gradients.equal  # to one process from the file as it was, not as it is now
    rest = pools(2).train(built("1F1B", 2), gpt(), CLIP, Resume(again), steps=1, optimizer=ADAM)
    assert rest.job.first_step == 5 and rest.losses == pytest.approx(whole.losses[5:], rel=TOLERANCE)


def test_torchs_runtime_saves_and_goes_on(two, saved, tmp_path):
    path, whole = saved
    again = tmp_path / "again.safetensors"
    options = {"steps": 1, "optimizer": ADAM}
    run = two.train(built("1F1B", 2), gpt(), CLIP, Resume(path), Save(again), lab.TorchEngine(), **options)
    rest = two.train(built("1F1B", 2), gpt(), CLIP, Resume(again), **options)
    assert [*run.losses, *rest.losses] == pytest.approx(whole.losses[3:5], rel=TOLERANCE)


def test_without_the_optimizers_state_it_would_differ(two, saved, tmp_path):
    """That the losses go on is worth something: it takes the moments, and the batch."""
    path, whole = saved
    bare, early = tmp_path / "bare.safetensors", tmp_path / "early.safetensors"
    found = Checkpoint.open(path)
    parts = found.read(key for key in found.checksums if key.startswith("model/"))
    checkpoint.write(bare, [checkpoint.Saved(parts, None)], 3, found.model)
    everything = checkpoint.Saved(found.read(found.checksums), "AdamW")
    checkpoint.write(early, [everything], 0, found.model)
    go_on = partial(two.train, built("1F1B", 2), gpt(), CLIP, steps=3, optimizer=ADAM)
    no_moments, same_batches = go_on(Resume(bare)), go_on(Resume(early))
    assert no_moments.losses[0] == whole.losses[3]
    assert no_moments.losses[1] != pytest.approx(whole.losses[4], rel=10 * TOLERANCE)
    assert same_batches.losses[0] != pytest.approx(whole.losses[3], rel=10 * TOLERANCE)


def test_its_weights_are_those_of_one_process(saved):
    path, _ = saved
    workload = gpt()
    model = workload.build_whole()
    optimizer = ADAM(model.parameters())
    for step in range(3):
        batch = workload.batch(step)
        optimizer.zero_grad()
        workload.loss(model(*batch.inputs), batch.target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found = Checkpoint.open(path).load(workload.build_whole()).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.allclose(found[name], tensor, atol=2e-4), name
    assert Checkpoint.open(path).step == 3


def test_running_averages_are_saved_and_untouched_by_passes_that_are_no_steps(two, tmp_path):
    path = tmp_path / "run.safetensors"
    workload = modules.workload(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 6))
    two.train(built("GPipe", 2), _batches_of_8(workload), Save(path), steps=2, warmup=3)
    counted = Checkpoint.open(path).read(["model/1.num_batches_tracked"])
    assert counted["model/1.num_batches_tracked"].item() == 2 * 8  # microbatches


def _batches_of_8(workload):
    return modules.Modules(workload.stages, modules.batch(size=16), nn.functional.mse_loss)


def built_m4(name: str) -> pp.Schedule:
    return pp.build(name, num_ranks=2, num_microbatches=4)


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adagrad, ADAM])
def test_optimizers_go_on(two, tmp_path, optimizer):
    path = tmp_path / "run.safetensors"
    torch.manual_seed(0)
    workload = modules.workload(nn.Linear(6, 6), nn.Linear(6, 6))
    train = partial(two.train, built_m4("1F1B"), workload, optimizer=optimizer)
    whole = train(steps=4)
    train(Save(path), steps=2)
    assert train(Resume(path), steps=2).losses == whole.losses[2:]


# What can't be resumed is refused, before anything starts where that can be known.


def refused(path: Path, workload=None) -> str:
    with pytest.raises(CheckpointError) as caught:
        make_job(built("1F1B", 2), workload or gpt(), 2, [Resume(path)])
    return str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no checkpoint .*none.safetensors"):
        make_job(built("1F1B", 2), gpt(), 2, [Resume(tmp_path / "none.safetensors")])


def test_another_model(saved):
    path, _ = saved
    deeper = refused(path, gpt(num_layers=12))
    assert "of another model, GPT with 8 layers" in deeper and "this is GPT with 12 layers" in deeper
    assert "missing blocks.10.down.bias" in deeper and "unknown" not in deeper
    assert "unknown blocks.6.down.bias" in refused(path, gpt(num_layers=6))
    assert "of another shape blocks.0" in refused(path, gpt(width=64))


@pytest.mark.parametrize("keep", [0, 4, 1000, 100_000, -1])
def test_a_file_that_was_cut_short(saved, tmp_path, keep):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(saved[0].read_bytes()[:keep])
    assert "is damaged, or no checkpoint of pplab" in refused(path)


def test_files_that_are_something_else(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "other.safetensors"
    path.write_bytes(b"not a checkpoint at all" * 100)
    assert "is damaged, or no checkpoint of pplab" in refused(path)
    save_file({"weight": torch.ones(2)}, path)
    assert "is damaged, or no checkpoint of pplab (KeyError: 'pplab')" in refused(path)
    save_file({"weight": torch.ones(2)}, path, {"pplab": json.dumps({"version": 9})})
    assert "is damaged, or no checkpoint of pplab" in refused(path)


def test_a_bit_that_flipped(saved, tmp_path):
    path = tmp_path / "flipped.safetensors"
    data = bytearray(saved[0].read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    with Pool(2, device="cpu") as pool, pytest.raises(RankError, match="while setting up: CheckpointError: .*damaged"):
        pool.train(built("1F1B", 2), gpt(), Resume(path), optimizer=ADAM)


def test_another_optimizer(saved):
    message = "holds the state of AdamW, and this run makes SGD"
    with Pool(2, device="cpu") as pool, pytest.raises(RankError, match=message):
        pool.train(built("1F1B", 2), gpt(), Resume(saved[0]), optimizer=partial(torch.optim.SGD, lr=0.1))


def test_a_state_that_nobody_would_go_on_with(saved, tmp_path):
    both = Resume(saved[0]), Save(tmp_path / "next.safetensors")
    with pytest.raises(ValueError, match="holds the state of AdamW, which would be lost in .*next.safetensors"):
        make_job(built("1F1B", 2), gpt(), 2, both)
    make_job(built("1F1B", 2), gpt(), 2, both, optimizer=ADAM)


@pytest.mark.parametrize("place", ["nowhere/run.safetensors", "."])
def test_places_where_nothing_can_be_saved(tmp_path, place):
    with pytest.raises(ValueError, match="can't save to .*: give a file's name in a folder"):
        make_job(built("1F1B", 2), gpt(), 2, [Save(tmp_path / place)])


# Whenever the writer dies, the old checkpoint is there, or the new one.


def one_weight(value: float) -> list[checkpoint.Saved]:
    return [checkpoint.Saved({"model/weight": torch.full((1000,), value)}, None)]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, fails):
    path = tmp_path / "run.safetensors"
    checkpoint.write(path, one_weight(1.0), 1, "one")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, fails, full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write(path, one_weight(2.0), 2, "one")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["run.safetensors"] and Checkpoint.open(path).step == 1


WRITER = """
import sys, torch
from pplab.lab.checkpoints import checkpoint
for step in range(1, 10**6):
    value = torch.full((200_000,), float(step))
    checkpoint.write(sys.argv[1], [checkpoint.Saved({"model/weight": value}, None)], step, "one")
    print(step, flush=True)
"""


@pytest.mark.parametrize("delay_ms", [0, 3, 7])
def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path, delay_ms):
    path = tmp_path / "run.safetensors"
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(path)], stdout=subprocess.PIPE, text=True
    )
    done = int(writer.stdout.readline())
    time.sleep(delay_ms / 1000)
    writer.send_signal(signal.SIGKILL)
    out, _ = writer.communicate()
    done = int((out.split() or [done])[-1])
    found = Checkpoint.open(path)
    assert found.step in (done, done + 1)
    assert (found.read(["model/weight"])["model/weight"] == found.step).all()


def test_a_run_that_fails_leaves_the_last_checkpoint(saved, tmp_path):
    path = tmp_path / "run.safetensors"
    torch.manual_seed(0)
    with Pool(2, device="cpu") as pool:
        pool.train(built_m4("1F1B"), modules.workload(nn.Linear(6, 6), nn.Linear(6, 6)), Save(path), steps=2)
        before = path.read_bytes()
        failing = modules.workload(nn.Linear(6, 6), nn.Linear(6, 6))
        with pytest.raises(RankError, match="the optimizer fails"):
            pool.train(built_m4("1F1B"), failing, Resume(path), Save(path), optimizer=modules.raising_optimizer)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["run.safetensors"]
