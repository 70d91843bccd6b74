"""A model of one's own: the page's example, names that don't depend on the cut, a batch per step, clear words."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

import modules
import pplab as pp
from pplab import lab
from pplab.lab import Checkpoint, Meter, Resume, Save, measure_layers, partition
from pplab.lab.models import Modules, gpt
from pplab.runtime import Batch, Pool, RankError, make_job

pytestmark = pytest.mark.slow

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
TWO = pp.build("1F1B", num_ranks=2, num_microbatches=4)
FOUR = pp.build("Interleaved1F1B", num_ranks=2, num_microbatches=4)
NUMBERS = torch.randn(2, 32, 6, generator=torch.Generator().manual_seed(7))
PAIRS = TensorDataset(*NUMBERS)
NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
YOURS = (NOTEBOOKS / "your_model.py").read_text()
MISTAKES = {  # that chapter 13 tells its readers to make in this file, in its words
    "nothing": (YOURS, YOURS),
    "take out the seed": ("torch.manual_seed(0)", "pass"),
    "write `>` for `!=` in `build_stage`": ("LAYERS != stage", "LAYERS > stage"),
    "leave `dropout` at 0.1": ("dropout=0.0", "dropout=0.1"),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Ranks that can import the page's example, and the chapter's file with each of those mistakes."""
    folder = tmp_path_factory.mktemp("own")
    page = Path(__file__).parents[3] / "book" / "api.md"
    (code,) = re.findall(r"```python\n(.*?class \w+\(Workload\).*?)```", page.read_text(), re.DOTALL)
    (folder / "own_model.py").write_text(code)
    (extra,) = re.findall(r"```python\n((?:(?!```).)*class \w+\(Extra\).*?)```", page.read_text(), re.DOTALL)
    (folder / "own_extra.py").write_text(extra)
    for number, change in enumerate(MISTAKES.values()):
        assert YOURS.count(change[0]) == 1
        (folder / f"yours_{number}.py").write_text(YOURS.replace(*change))
    with pytest.MonkeyPatch.context() as patch, Pool(2, device="cpu", timeout_s=60) as pool:
        patch.syspath_prepend(folder)
        yield pool


def net(*between: nn.Module) -> nn.Sequential:
    """Four layers, of which the last has the second one's weight: with four stages on two ranks, both are on one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6) for _ in range(4)]
    layers[3].weight = layers[1].weight
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], *between, layers[2], nn.BatchNorm1d(6).eval(), layers[3])


def hooked() -> nn.Sequential:
    model = net()
    model.register_forward_hook(lambda module, given, output: 2 * output)
    return model


def test_a_hook_on_a_stage_stays():
    first = modules.workload(hooked(), nn.Linear(6, 6))
    x = torch.randn(3, 6)
    torch.testing.assert_close(first.build_stage(0, 2)(x), 2 * net()(x))


def test_the_pages_example_runs(pool):
    own = importlib.import_module("own_model")
    run = own.learn(pool)
    assert run.gradients.equal and run.losses[-1] < run.first_loss + 1
    assert set(run.gradients.parameters) == {name for name, _ in own.Copying().build_whole().named_parameters()}


def test_the_pages_extra_runs(pool):
    extra = importlib.import_module("own_extra")
    run = pool.train(TWO, modules.workload(nn.Linear(6, 6), nn.Linear(6, 6)), extra.Messages(), steps=2, warmup=0)
    assert run.extras["messages"] == [3 * 4, 3 * 4] and "messages         [12, 12]" in str(run)


@pytest.mark.parametrize(
    ("batches", "same"),
    [
        (modules.batch_of, modules.batch_of),
        (DataLoader(PAIRS, 8), lambda step: Batch((NUMBERS[0, 8 * step :][:8],), NUMBERS[1, 8 * step :][:8])),
        (DataLoader(PAIRS, 8, shuffle=True, generator=torch.Generator().manual_seed(0)), None),
    ],
    ids=["function", "loader", "shuffled loader"],
)
def test_two_stages_save_four_go_on_and_the_model_takes_the_weights(pool, tmp_path, batches, same):
    path, workload = tmp_path / "run.safetensors", Modules(net(), batches, mse_loss)
    same = same or Modules(net(), batches, mse_loss).batch
    first = pool.train(TWO, workload, Save(path), steps=2, optimizer=SGD, check_gradients=True)
    rest = pool.train(FOUR, workload, Resume(path), Save(path), steps=2, optimizer=SGD, check_gradients=True)
    assert first.gradients.equal and rest.gradients.equal, (first, rest)
    whole = net()
    optimizer, losses = SGD(whole.parameters()), []
    for step in range(4):
        batch = same(step)
        optimizer.zero_grad()
        loss = mse_loss(whole(*batch.inputs), batch.target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [*first.losses, *rest.losses] == pytest.approx(losses, rel=1e-5)
    loaded = Checkpoint.open(path).load(net())
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


def test_names_are_those_of_the_whole_however_it_is_cut():
    model, batch = net(), modules.batch()
    names = set(model.state_dict())
    pieces = [model[:3], model[3:5], model[5]]
    for workload, counts in [
        (Modules(model, batch, mse_loss), (1, 2, 5)),
        (Modules(model, batch, mse_loss, cut=(1, 4, 1)), (3,)),
        (Modules(pieces, batch, mse_loss), (3,)),
    ]:
        assert set(workload.build_whole().state_dict()) == names
        for count in counts:
            stages = [workload.build_stage(stage, count) for stage in range(count)]
            assert set().union(*(stage.state_dict() for stage in stages)) == names
            x = batch.inputs[0]
            for stage in stages:
                x = stage(x)
            torch.testing.assert_close(x, model(*batch.inputs))


def test_a_sequential_is_counted_measured_and_cut_by_the_clock(pool):
    workload = Modules(net(), modules.batch(), mse_loss, cut=(2, 4))
    found = measure_layers(workload, 4, steps=1, device="cpu")
    assert found.names == ("0", "1", "2", "3", "4", "5") and sum(found.forward_ms) > 0
    assert found.parameters[:3] == (4 * 42, 0, 4 * 42)
    assert workload.stage_bytes(2) == (4 * 42, 4 * (2 * 42 + 12 + 6))  # the last one's weight is there already
    counts = (3, 3)  # where both stages keep something, whatever the clock says
    assert sum(partition(found.times_ms, 2)) == sum(counts)
    run = pool.train(TWO, Modules(net(), modules.batch(), mse_loss, cut=found.layers(counts)), Meter(), steps=1)
    for held, predicted in zip(run.held.peak_bytes, TWO.peak_held(found.memory(counts)), strict=True):
        assert 0 < held <= predicted  # a tanh's output, which the next layer keeps as well, is counted twice


def test_a_module_that_stands_in_two_stages_is_one(pool):
    layer = nn.Linear(6, 6)
    workload = Modules(nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer), modules.batch(), mse_loss)
    run = pool.train(FOUR, workload, steps=2, optimizer=SGD, check_gradients=True)
    losses = modules.losses_of_one_process(workload, 2, SGD)
    assert run.gradients.equal and run.losses == pytest.approx(losses, rel=1e-5)


def test_a_frozen_module_in_two_stages_stays_as_it_is(pool, tmp_path):
    """Nobody adds up gradients that it doesn't have."""
    frozen = nn.Linear(6, 6).requires_grad_(False)
    layers = [frozen, nn.Linear(6, 6), nn.Linear(6, 6), frozen, nn.Linear(6, 6)]
    workload = Modules(nn.Sequential(*layers), modules.batch(), mse_loss)
    saved = Save(tmp_path / "end.safetensors")
    run = pool.train(FOUR, workload, saved, steps=2, optimizer=SGD, check_gradients=True)
    assert run.gradients.equal and len(run.gradients.parameters) == 6
    learned = Checkpoint.open(saved.path).load(workload.build_whole()).get_submodule("0").weight
    assert torch.equal(learned, frozen.weight)


def test_modules_get_what_they_take_of_the_context(pool):
    batch = modules.batch()
    batch = Batch(batch.inputs, batch.target, {"mask": torch.arange(8.0)[:, None]})
    workload = Modules(nn.Sequential(nn.Linear(6, 6), modules.Masked(), nn.Tanh()), batch, mse_loss)
    assert pool.train(TWO, workload, steps=1, check_gradients=True).gradients.equal
    with pytest.raises(ValueError, match="no module takes the batch's context maks: their forwards name mask"):
        Modules([modules.Masked()], Batch(batch.inputs, batch.target, {"maks": batch.target}), mse_loss)


@dataclass(frozen=True)
class Tying:
    """Not a workload, though it has a workload's methods."""

    batch_size: int = 8

    def batch(self, step: int) -> Batch:
        return modules.batch()


def with_field(**fields: object) -> Modules:
    workload = modules.workload(nn.Linear(6, 6), nn.Linear(6, 6))
    vars(workload).update(fields)
    return workload


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Tying(), "Tying is not a pplab.runtime.Workload, .* or inherit that class"),
        (nn.Linear(6, 6), "Linear is not a pplab.runtime.Workload, .*make one with pplab.lab.models.Modules"),
        (with_field(tied=True), "Modules.tied is True, where a run calls a method: rename it"),
        (with_field(name=3), "Modules needs a name in words"),
        (with_field(reduction="max"), 'a reduction that is "mean" or "sum"'),
        (TWO, "Schedule is not a pplab.runtime.Workload"),
    ],
)
def test_what_is_no_workload_is_refused_before_anything_starts(workload, message):
    with pytest.raises(ValueError, match=message):
        make_job(TWO, workload, 2)


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("1F1B", {}, "schedule must be a Schedule, got '1F1B': pplab.build"),
        (
            TWO,
            {"optimizer": SGD([nn.Parameter(torch.ones(1))])},
            "optimizer must be a function .* got a SGD: give func",
        ),
        (TWO, {"optimizer": lambda parameters: SGD(parameters)}, "can't be sent .*lambda.*functools.partial"),
    ],
)
def test_what_a_run_cannot_take_is_refused_before_anything_starts(schedule, options, message):
    with Pool(2, device="cpu") as down:
        with pytest.raises(ValueError, match=message):
            down.train(schedule, with_field(), **options)
        assert down.pids == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Modules(net(), iter([modules.batch()]), mse_loss), "an iterator, which gives every batch once"),
        (lambda: Modules(net(), DataLoader(PAIRS, 8, shuffle=True), mse_loss), "pass it generator=torch.Generator"),
        (lambda: Modules(net(), PAIRS, mse_loss), "a list of batches or a DataLoader, got"),
        (lambda: Modules(net(), [PAIRS[0]], mse_loss).batch(0).target[9], "index 9"),
        (lambda: Modules(net(), [3], mse_loss), "step 0 has a int instead of a batch"),
        (
            lambda: Modules(net(), DataLoader(PAIRS, 8), mse_loss).batch(4),
            "there are 4 batches, and none for step 4",
        ),
        (lambda: Modules(net(), DataLoader(PAIRS, 20), mse_loss).batch(1), "step 1 has 12 samples, .* step 0 has 20"),
        (lambda: Modules(net(), modules.batch(), mse_loss, cut=(3, 2)), "places 5 layers, and the model has 6"),
        (lambda: Modules(net(), modules.batch(), mse_loss).check(7), "6 layers can't make 7 stages"),
        (
            lambda: Modules(gpt(source="sample", num_layers=2).build_whole(), 1, 2),
            "'GPT', .*only its author can cut .* between the modules of blocks",
        ),
        (lambda: Modules(nn.ModuleDict({"layers": net()}), 1, 2), "perhaps between the modules of layers"),
        (
            lambda: Modules(hooked(), modules.batch(), mse_loss),
            "this Sequential .* has hooks, .* put hooks on its layers",
        ),
        (
            lambda: Modules(nn.Sequential(nn.Linear(6, 6), weight_norm(nn.Linear(6, 6))), modules.batch(), mse_loss),
            "module 1 has parametrizations .*: write a Workload, whose build_stage makes it there",
        ),
        (
            lambda: Modules(net(), Batch((torch.ones(8, 6),), torch.tensor(1.0)), mse_loss),
            r"first dimension of a batch's tensors must be its samples, got \[\(8, 6\), \(\)\]",
        ),
        (lambda: pp.gantt(TWO), "must be a Timeline, got <Schedule 1F1B.*pplab.simulate"),
        (lambda: pp.compare([TWO]), "must be a Timeline, got <Schedule 1F1B.*pplab.simulate"),
        (
            lambda: Batch(*NUMBERS),
            r"inputs must be a Sequence, got tensor\(.*: give a list or a tuple, such as \(x,\)",
        ),
        (lambda: Batch((NUMBERS[0],), NUMBERS[1], NUMBERS[0]), "context must be a Mapping, got tensor.*: give a dict"),
        (
            lambda: Modules(net(), Batch((torch.ones(4, 6),), torch.ones(8, 6)), mse_loss),
            r"must be its samples, got \[\(4, 6\), \(8, 6\)\]",
        ),
        (lambda: Modules(net(), modules.batch(), None), "loss must be a Callable, got None: give a function"),
        (lambda: make_job(TWO, with_field(), 2, [5]), "extra must be an Extra, got 5: .* such as steps=5"),
        (lambda: make_job(TWO, with_field(), 2, [Meter]), "extra must be an Extra, got .*Meter.*: give one such as"),
    ],
)
def test_what_cannot_be_done_is_said(make, message):
    with pytest.raises((ValueError, IndexError), match=message):
        make()


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (modules.workload(nn.Linear(6, 6), modules.Masked()), "1F0: .*'mask': a stage gets .*Batch.context by name"),
        (
            modules.Misplaced([nn.Linear(6, 6), nn.Linear(6, 6)], modules.batch(), mse_loss),
            r"tied\(2\) names 'head.weight' of stage 1, which has the parameters \['1.weight', '1.bias'\]",
        ),
    ],
)
def test_what_a_stage_lacks_is_named_with_the_stage(workload, message):
    with Pool(2, device="cpu") as pool, pytest.raises(RankError, match=message):
        pool.train(TWO, workload, steps=1)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_of_a_readers_first_mistakes_it_is_said_what_the_chapter_says(pool, mistake):
    cells = json.loads((NOTEBOOKS / "13_own_model.ipynb").read_text())["cells"]
    chapter = "\n".join("".join(cell["source"]) for cell in cells)
    losses, said = re.search(rf"^\| {re.escape(mistake)} \| (\w+) \| (.*) \|$", chapter, re.M).groups()
    model = importlib.import_module(f"yours_{[*MISTAKES].index(mistake)}").Yours()
    run = pool.train(TWO, model, lab.Causes(), steps=3, optimizer=torch.optim.AdamW)
    assert losses == "fall" and run.losses[-1] < run.losses[0]
    verdict, _, cause = said.partition(": ")
    assert str(run.gradients).startswith(verdict) and run.gradients.equal == (mistake == "nothing")
    assert cause.strip('"') in "".join(run.gradients.causes)
