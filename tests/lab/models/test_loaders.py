"""DataLoaders as people have them: workers, a ragged end, streams, dicts; epochs; a log of what a run learns."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import modules
import pplab as pp
from pplab import lab
from pplab.lab.models import Modules, epochs, from_transformers
from pplab.runtime import Batch, make_job
from pplab.runtime.context import pack, unpack

pytestmark = pytest.mark.slow

TWO = pp.build("1F1B", num_ranks=2, num_microbatches=2)
SGD = partial(torch.optim.SGD, lr=0.1)
PAIRS_OF_8 = [Batch((x,), y) for x, y in torch.randn(2, 2, 8, 6, generator=torch.Generator().manual_seed(4))]
PAIRS = TensorDataset(*torch.randn(2, 18, 6, generator=torch.Generator().manual_seed(3)))


class Stream(IterableDataset):
    """Pairs without a length."""

    def __iter__(self):
        return iter(PAIRS)


def trained(batches: object) -> Modules:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Modules(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), batches, mse_loss)


def test_a_stream_ends_its_run_and_nothing_is_lost(pools, tmp_path):
    """18 samples are four batches of four and a shorter one: the checkpoint has the fourth step's weights."""
    path, log = tmp_path / "end.safetensors", tmp_path / "run.jsonl"
    workload = trained(DataLoader(Stream(), 4))
    extras = lab.Save(path), lab.Log(log), lab.LearningRate(partial(torch.optim.lr_scheduler.StepLR, step_size=2))
    run = pools(2).train(TWO, workload, *extras, steps=9, optimizer=SGD)
    assert run.losses == pytest.approx(
        modules.losses_of_one_process(trained(DataLoader(Stream(), 4)), 2, SGD)[:2] + list(run.losses[2:])
    )
    assert len(run.losses) == lab.Checkpoint.open(path).step == 4
    assert "ended after 4 of 9 steps" in str(run)
    said = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in said] == [1, 2, 3, 4]
    assert [line["loss"] for line in said] == pytest.approx(run.losses)
    assert [line["learning_rate"] for line in said] == list(run.extras["learning_rates"])
    assert [*said[0]] == ["step", "loss", "learning_rate", "samples_per_second", "memory_bytes"]
    assert all(line["samples_per_second"] > 0 and min(line["memory_bytes"]) > 1e6 for line in said)


def test_a_stream_that_ends_on_one_rank_ends_the_run_on_all_at_once(pools, tmp_path):
    """Nobody waits for the rank that has no batch: four steps are done, saved and evaluated, and the run says who."""
    path, pool, held_out = tmp_path / "end.safetensors", pools(2), PAIRS_OF_8
    begun = time.monotonic()
    run = pool.train(
        TWO, trained(modules.ends_on_rank_1), lab.Save(path), lab.Evaluate(3, held_out), steps=9, optimizer=SGD
    )
    assert time.monotonic() - begun < 8  # a pool whose ranks all wait ends after ten
    assert run.losses == pytest.approx(modules.losses_of_one_process(trained(modules.batch()), 4, SGD))
    assert "ended after 4 of 9 steps: rank 1 had no batch for step 4, and the others had one" in run.notes[-1]
    (at_3, _), (at_4, loss) = run.extras["evaluations"]
    model = lab.Checkpoint.open(path).load(trained(modules.batch()).build_whole())
    expected = [mse_loss(model(*each.inputs), each.target).item() for each in held_out]
    assert (at_3, at_4) == (3, 4) and loss == pytest.approx(sum(expected) / 2)


def test_workers_stay_at_home(pools):
    """A pool's ranks can't have any, and the batches are those that workers would load."""
    loader = DataLoader(PAIRS, 4, num_workers=2, persistent_workers=True)
    assert len(next(iter(loader))[0]) == 4  # it has begun: an iterator with processes is in it
    run = pools(2).train(TWO, trained(loader), steps=3, optimizer=SGD)
    assert run.losses == pytest.approx(modules.losses_of_one_process(trained(DataLoader(PAIRS, 4)), 3, SGD))
    assert "2 workers aren't used" in str(run)


def test_more_steps_than_batches_are_refused_before_anything_starts(tmp_path):
    with pytest.raises(
        ValueError, match="there are 4 batches of one size, and the run would end with step 5: take ste"
    ):
        make_job(TWO, trained(DataLoader(PAIRS, 4)), 2, steps=5)
    with pytest.raises(ValueError, match=r"can't save to /no/where"):
        make_job(TWO, trained(DataLoader(PAIRS, 4)), 2, [lab.Log("/no/where")])
    with pytest.raises(ValueError, match="epochs takes a DataLoader of a data set that has a length"):
        epochs(DataLoader(Stream(), 4))


def test_epochs_take_every_sample_once_in_another_order(pools):
    numbers = TensorDataset(torch.arange(18.0), torch.arange(18.0))
    found = [epochs(DataLoader(numbers, 4, shuffle=True, num_workers=1))(step)[0].tolist() for step in range(12)]
    assert all(len({*sum(found[at : at + 4], [])}) == 16 for at in (0, 4, 8)), "each epoch by itself"
    assert len({tuple(sum(found[at : at + 4], [])) for at in (0, 4, 8)}) == 3
    torch.rand(5)  # what others draw makes no difference
    assert epochs(DataLoader(numbers, 4, shuffle=True))(9)[0].tolist() == found[9]
    workload = trained(epochs(DataLoader(PAIRS, 4, shuffle=True)))
    run = pools(2).train(TWO, workload, steps=6, optimizer=SGD)
    assert run.losses == pytest.approx(modules.losses_of_one_process(workload, 6, SGD))


def test_a_loader_of_dicts_feeds_a_model_of_transformers():
    from transformers import LlamaConfig

    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    ids = torch.arange(80).view(10, 8)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    made = from_transformers(LlamaConfig(vocab_size=256, **sizes), DataLoader(rows, 4))
    assert (made.batch_size, made.num_batches, made.length) == (4, 2, 8)
    assert torch.equal(made.batch(1).inputs[0], ids[4:8]) and "attention_mask" in made.batch(1).context
    held_out = lab.Evaluate(1, DataLoader(rows[:8], 4))
    (extra,) = make_job(TWO, made, 2, [held_out], steps=2).extras
    assert torch.equal(extra.batches[1].inputs[0], ids[4:8])
    with pytest.raises(ValueError, match="there are 2 batches of one size"):
        make_job(TWO, made, 2, steps=3)


def test_a_dataset_gives_the_columns_that_the_model_takes():
    """In turn, from its start again at its end, and also on a rank, to which it travels."""
    datasets = pytest.importorskip("datasets")
    from transformers import LlamaConfig

    llama = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    ids = torch.arange(80).view(10, 8)
    rows = {"text": ["a review"] * 10, "input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
    dataset = datasets.Dataset.from_dict(rows)
    made = unpack(pack(from_transformers(llama, dataset, batch_size=4)))
    assert torch.equal(made.batch(2).inputs[0], ids[[8, 9, 0, 1]]) and [*made.batch(0).context] == ["attention_mask"]
    ragged = datasets.Dataset.from_dict({"input_ids": [[1], [1, 2]]})
    for wrong, said in (
        (ragged, "of input_ids there are lists: let the tokenizer fill rows up to one length"),
        (dataset.to_iterable_dataset(), r"a streamed Dataset goes into a DataLoader, .with_format\("),
        (dataset.select([]), "as many rows of each, and some, got {'input_ids': 0, 'attention_mask': 0}"),
    ):
        with pytest.raises(ValueError, match=said):
            from_transformers(llama, wrong, batch_size=2)
    stream = dataset.remove_columns("text").to_iterable_dataset().with_format("torch")
    streamed = from_transformers(llama, DataLoader(stream, 4))
    assert torch.equal(streamed.batch(1).inputs[0], ids[4:8])
