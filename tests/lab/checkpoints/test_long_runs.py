"""Long runs: learning rates that change, held-out losses, checkpoints on the way, interrupts, a bar."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import modules
import pplab as pp
from pplab import lab
from pplab.lab import Checkpoint, CheckpointError, Evaluate, LearningRate, NotSaved, Resume, Save, models
from pplab.lab.checkpoints.saving import steps_in
from pplab.runtime import Pool, make_job

pytestmark = pytest.mark.slow

STEPS = 6
COSINE = LearningRate.cosine(warmup=2, total=STEPS)
ADAM = {"optimizer": modules.grouped_adamw}
SIZES = {"num_layers": 4, "width": 16, "num_heads": 2, "context": 8, "source": "sample", "batch_size": 4}


def built(name: str, ranks: int = 2) -> pp.Schedule:
    return pp.build(name, num_ranks=ranks, num_microbatches=4)


def gpt() -> models.LanguageModel:
    return models.gpt(**SIZES)


def small(*stages: nn.Module) -> models.Modules:
    torch.manual_seed(0)
    return modules.workload(*(stages or (nn.Linear(6, 6), nn.Linear(6, 6))))


@pytest.fixture(scope="module")
def two():
    with Pool(2, device="cpu", threads=1) as pool:
        yield pool


@pytest.fixture(scope="module")
def whole(two):
    return two.train(built("1F1B"), gpt(), COSINE, steps=STEPS, **ADAM)


@pytest.fixture(scope="module")
def saved(two, tmp_path_factory):
    """Checkpoints of steps 2 and 3, of a run of three steps."""
    folder = tmp_path_factory.mktemp("run") / "steps"
    return two.train(built("1F1B"), gpt(), COSINE, Save(folder, every=2), steps=3, **ADAM)


# Learning rates, and going on with them.


@pytest.mark.parametrize("ranks", [2, 1])
def test_a_run_that_stops_and_goes_on_is_the_same_to_the_last_bit(two, whole, saved, ranks):
    """Rates that change, groups of parameters, momentum: also on one rank, which has other groups."""
    assert saved.losses == whole.losses[:3] and saved.extras["learning_rates"] == whole.extras["learning_rates"][:3]
    with Pool(1, device="cpu", threads=1) as one:
        rest = (two if ranks == 2 else one).train(built("1F1B", ranks), gpt(), Resume(saved), COSINE, steps=3, **ADAM)
    assert rest.losses == whole.losses[3:] and rest.extras["learning_rates"] == whole.extras["learning_rates"][3:]
    assert rest.job.first_step == 3 and "resumed" not in rest.extras


def test_the_rates_are_those_of_torch_in_one_process(whole):
    workload = gpt()
    model = workload.build_whole()
    optimizer = modules.grouped_adamw(model.named_parameters())
    scheduler, losses, rates = COSINE.factory(optimizer), [], []
    for step in range(STEPS):
        batch = workload.batch(step)
        loss = workload.loss(model(*batch.inputs), batch.target)
        optimizer.zero_grad()
        loss.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert whole.losses == pytest.approx(losses, rel=1e-4)
    assert whole.extras["learning_rates"] == tuple(rates) and len(set(rates)) > 3
    assert "learning rate    0.0015 0.003 0.003 0.00256" in str(whole)


def test_other_rates_than_the_saved_ones_are_told(two, saved):
    other = partial(torch.optim.lr_scheduler.ConstantLR, factor=0.5)
    rest = two.train(built("1F1B"), gpt(), LearningRate(other), Resume(saved), steps=1, **ADAM)
    (said,) = rest.extras["resumed"]
    assert said == "learning rate after step 3: 0.0015 here, 0.00256066 in the run that was saved"
    assert f"resumed          {said}" in str(rest)


def test_schedules_that_cannot_be_followed_are_refused(two):
    with pytest.raises(ValueError, match="a learning rate needs an optimizer"):
        two.train(built("1F1B"), gpt(), COSINE)
    with pytest.raises(ValueError, match="takes a function of an optimizer that makes a scheduler, got 0.1"):
        two.train(built("1F1B"), gpt(), LearningRate(0.1), **ADAM)
    with pytest.raises(ValueError, match="cosine needs whole numbers of steps, warmup < total, got 5 and 5"):
        LearningRate.cosine(5, 5)
    with pytest.raises(ValueError, match="--cosine needs the steps of the rise and of all"):
        LearningRate.from_flag("5")
    assert LearningRate.from_flag("2:6").factory.keywords["lr_lambda"].keywords == {"warmup": 2, "total": 6}


# Held-out losses.


def dropping(norm: type[nn.Module]) -> models.Modules:
    return small(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), norm(6)), nn.Linear(6, 6))


def held_out() -> list:
    generator = torch.Generator().manual_seed(7)
    numbers = torch.randn(2, 2, 4, 6, generator=generator)
    return [pp.runtime.Batch((x,), y) for x, y in numbers]


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("1F1B", nn.BatchNorm1d),
        ("ZB-H1", nn.BatchNorm1d),
        ("DualPipe", nn.LayerNorm),
    ],  # copies have averages of their own
)
def test_evaluation_is_one_process_without_dropout_and_leaves_training_alone(two, tmp_path, name, norm):
    """Dropout draws random numbers and normalisation keeps averages: neither notices that something was evaluated."""
    schedule, path = built(name), tmp_path / "end.safetensors"
    sgd = {"steps": 3, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    batches, runs = [modules.batch(size=4), *held_out()], []
    pairs = [(batch.inputs, batch.target) for batch in batches]  # as a loader gives them
    for extras in ((), (), (Evaluate(2, pairs), Save(path))):  # what a rank imports in its first run may draw numbers
        two.run(modules.seed, 3)
        runs.append(two.train(schedule, dropping(norm), *extras, **sgd))
    assert runs[2].losses == runs[1].losses
    (at_2, _), (at_3, loss) = runs[2].extras["evaluations"]
    model = Checkpoint.open(path).load(dropping(norm).build_whole()).eval()
    expected = [nn.functional.mse_loss(model(*batch.inputs), batch.target).item() for batch in batches]
    assert (at_2, at_3) == (2, 3) and loss == pytest.approx(sum(expected) / 3, rel=1e-5)
    assert f"{loss:.4f} after step 3" in str(runs[2])


def test_batches_that_cannot_be_evaluated_are_refused(two):
    job = partial(make_job, built("1F1B"), small(), 2)
    with pytest.raises(ValueError, match="Evaluate needs held-out batches"):
        job([Evaluate(1, modules.batch())])
    singles = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 6)), 8)
    uneven = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*torch.zeros(2, 12, 6)), 8)
    for batches, said in ((singles, "step 0 has a list"), ([], "got set"), (uneven, "drop_last=True., got {8, 4}")):
        with pytest.raises(ValueError, match=said):
            job([Evaluate(1, batches)])
    with pytest.raises(ValueError, match="a batch of 6 doesn't divide into 4 equal microbatches"):
        job([Evaluate(1, [modules.batch(size=6)])])
    with pytest.raises(ValueError, match="Evaluate needs pplab's engine"):
        two.train(built("1F1B"), small(), Evaluate(1, held_out()), lab.TorchEngine())


# Checkpoints on the way.


def test_checkpoints_on_the_way_and_at_the_end(two, tmp_path):
    folder = tmp_path / "steps"
    run = two.train(built("1F1B"), small(), Save(folder, every=2, keep=3), steps=7, optimizer=torch.optim.Adam)
    assert sorted(steps_in(folder)) == [4, 6, 7] and run.extras["saved"] == str(steps_in(folder)[7])
    assert len(os.listdir(folder)) == 3 and Checkpoint.open(steps_in(folder)[4]).step == 4


def test_a_damaged_last_checkpoint_is_passed_over(two, whole, saved, tmp_path):
    folder = tmp_path / "steps"
    folder.mkdir()
    for path in Path(saved.extras["saved"]).parent.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    last = folder / "step-00000003.safetensors"
    data = bytearray(last.read_bytes())
    data[-5] ^= 4
    last.write_bytes(data)
    go_on = partial(two.train, built("1F1B"), gpt(), Resume(folder), COSINE, Save(folder, every=1), **ADAM)
    with pytest.warns(UserWarning, match="going on from .*step-00000002.*step-00000003.safetensors is damaged"):
        run = go_on(steps=1)  # and it is replaced
    assert run.losses == whole.losses[2:3] and run.extras["resumed"][0].startswith("passed over: ")
    assert go_on(steps=1).losses == whole.losses[3:4]
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole: .*step-00000004.*; .*step-00000003"):
        go_on(steps=1)


def test_gradients_are_compared_after_other_checkpoints_took_the_first_ones_place(two, tmp_path):
    folder = tmp_path / "steps"
    two.train(built("1F1B"), small(), Save(folder, every=1, keep=1), steps=1)
    again = Resume(folder), Save(folder, every=1, keep=1)
    assert two.train(built("1F1B"), small(), *again, steps=3, check_gradients=True).gradients.equal
    assert sorted(steps_in(folder)) == [1, 4]


def test_folders_of_another_run_and_of_none_are_refused(two, saved, tmp_path):
    folder = Path(saved.extras["saved"]).parent
    with pytest.raises(ValueError, match="has a checkpoint of step 3, and this run begins after step 0: go on from it"):
        two.train(built("1F1B"), gpt(), Save(folder, every=2), **ADAM)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in .*: save some with lab.Save"):
        make_job(built("1F1B"), gpt(), 2, [Resume(tmp_path)])
    with pytest.raises(ValueError, match="that run didn't save"):
        Resume(two.train(built("1F1B"), small(), steps=1))
    with pytest.raises(ValueError, match="a run saves to one place"):
        make_job(built("1F1B"), small(), 2, [Save(tmp_path / "a"), Save(tmp_path / "b")])
    with pytest.raises(ValueError, match="--save needs a file, or a folder and a number of steps, got a b"):
        Save.from_flag(["a", "b"])
    assert Save.from_flag([str(tmp_path), "5"]) == Save(tmp_path, every=5)


def test_a_checkpoint_that_fails_on_the_way_does_not_end_the_run(two, tmp_path):
    (tmp_path / "step-00000001.safetensors").mkdir()
    with pytest.warns(UserWarning, match="not saved on the way: step 1 .can't save to"):
        two.train(built("1F1B"), small(), Save(tmp_path, every=1), steps=3)
    assert sorted(steps_in(tmp_path)) == [2, 3]


# Interrupts.


def interrupt(pool: Pool, *signals: int) -> threading.Thread:
    """Once a step is done, send these, each once the ranks know of the one before."""

    def send() -> None:
        for number, known in zip(signals, ("steps", "stop"), strict=False):
            while not any(getattr(status, known) for status in pool.statuses()):
                time.sleep(0.001)
            os.kill(os.getpid(), number)

    for status in pool.statuses():
        status.steps = 0  # of the last run

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("every", [None, 10**6])
def test_the_first_interrupt_saves_the_step(two, tmp_path, number, every):
    before, up = signal.getsignal(number), two.run(modules.chatter)
    path, sgd = tmp_path / "run", {"optimizer": partial(torch.optim.SGD, lr=0.1)}
    train, pids = partial(two.train, built("1F1B"), **sgd), two.pids
    thread = interrupt(two, number)
    with pytest.raises(KeyboardInterrupt) as caught:
        train(small(), Save(path, every), steps=10**6)
    thread.join()
    found = Checkpoint.open(next(iter(steps_in(path).values()), None) if every else path)
    said = f"{number.name} after step {found.step}: saved in {found.path}; lab.Resume goes on from there"
    assert str(caught.value) == said and found.step >= 1
    assert up == [0, 1] and two.pids == pids and signal.getsignal(number) is before
    steps = found.step
    assert train(small(), Resume(path), steps=1).losses == train(small(), steps=steps + 1).losses[-1:]


def test_the_second_interrupt_ends_it_at_once(tmp_path):
    """A step that would take ten minutes."""
    with Pool(2, device="cpu", threads=1) as pool:
        thread = interrupt(pool, signal.SIGINT, signal.SIGINT)
        slow = small(nn.Linear(6, 6), modules.Sleeps(600, only_call=13))
        with pytest.raises(KeyboardInterrupt) as caught:
            pool.train(built("1F1B"), slow, Save(tmp_path / "run"), steps=3, warmup=1)
        assert str(caught.value) == "" and pool.pids == () and os.listdir(tmp_path) == []
        thread.join()


def test_without_a_checkpoint_an_interrupt_ends_the_run(two):
    thread = interrupt(two, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="^$"):
        two.train(built("1F1B"), small(), steps=10**6)
    assert two.pids == ()
    thread.join()


def test_a_night_that_goes_wrong_keeps_its_last_good_checkpoints(two, tmp_path):
    """Steps far too long: the second loss is no number, and neither are the weights after it."""
    extras = Save(tmp_path / "steps", every=1), lab.Log(tmp_path / "log")
    with pytest.raises(NotSaved, match=r"step-00000003.* \(after this step there are NaNs among weights") as caught:
        two.train(built("1F1B"), gpt(), *extras, steps=3, optimizer=partial(torch.optim.SGD, lr=1e30))
    assert [*steps_in(tmp_path / "steps")] == [1]
    losses = [
        json.loads(line, parse_constant=pytest.fail)["loss"] for line in (tmp_path / "log").read_text().splitlines()
    ]
    assert losses[0] > 0 and losses[1:] == [None, None]
    assert Checkpoint.open(caught.value.save(tmp_path / "wanted")).step == 3
