"""Models of transformers, stage by stage: transformers' own numbers, and no more weights than a stage has."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

import modules
from pplab.lab import data, models
from pplab.lab.checkpoints.checkpoint import collect, write
from pplab.lab.models._weights import Weights
from pplab.runtime import Stage, names_in_whole

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64}
SMALL = {"vocab_size": 256, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "decoder_start_token_id": 0}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=5),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "qwen3": Qwen3Config(
        **SIZES, num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=2
    ),
    "gpt2": GPT2Config(vocab_size=256, n_embd=32, n_layer=5, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0),
    "bert": BertConfig(**SIZES),
    "distilbert": DistilBertConfig(
        vocab_size=256, dim=32, hidden_dim=48, n_layers=5, n_heads=4, max_position_embeddings=64
    ),
    "t5": T5Config(**SMALL, num_layers=3, num_decoder_layers=2),
}


def workload(kind, **options):
    return models.from_transformers(CONFIGS[kind], **{"batch_size": 4, "length": 24, "source": "sample", **options})


def ragged(made):
    """The same workload, every sample as long as it likes, if that is told by a mask."""
    rows = {name: t.clone() for name, t in made.data.items()}
    mask = torch.ones_like(rows["input_ids"])
    for row, length in enumerate((24, 20, 13, 1)):
        mask[row, length:] = 0
    return replace(made, data={**rows, "attention_mask": mask})


def chained(made, num_stages, microbatch=None):
    """Loss, gradients by name, and modules, of stages that hand each other what ranks would."""
    modules = {stage: made.build_stage(stage, num_stages) for stage in range(num_stages)}
    stages = [Stage(module, stage, num_stages, made.loss, [1.0]) for stage, module in modules.items()]
    batch, passed = microbatch or made.batch(0), ()
    for stage in stages:
        passed = stage.forward(0, passed, batch)
    for stage in reversed(stages):
        passed = stage.backward(0, passed)
    found = {}
    for p, name in names_in_whole(made, modules, num_stages).items():
        found[name] = found.get(name, 0) + p.grad
    return stages[-1].losses[0], found, list(modules.values())


@pytest.mark.parametrize(
    ("kind", "attention"),
    [*((kind, "sdpa") for kind in CONFIGS), ("qwen3", "eager"), ("bert", "eager"), ("t5", "eager")],
)
def test_stages_compute_what_transformers_computes(kind, attention):
    """Loss and gradients, with the loss that transformers has; dropout falls on the same elements."""
    made = ragged(workload(kind, attention=attention, dropout=0.2))
    model, batch = made.build_whole(), made.batch(0)
    torch.manual_seed(1)
    loss = model(*batch.inputs, **batch.context, labels=batch.target).loss
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for num_stages in (2, 4) if kind in ("llama", "t5") else (3,):
        torch.manual_seed(1)
        found, gradients, modules = chained(made, num_stages)
        torch.testing.assert_close(found, loss.detach(), rtol=0, atol=1e-6)
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
        weights = {name: t for module in modules for name, t in module.state_dict().items()}
        assert weights.keys() == model.state_dict().keys()
        assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items()), "other weights"
    unmasked = {name: t for name, t in batch.context.items() if name != "attention_mask"}
    assert (model(*batch.inputs, **unmasked, labels=batch.target).loss - loss).abs() > 1e-5, "the mask is ignored"


@pytest.mark.parametrize(
    ("kind", "cut"), [("t5", (0, 1, 1, 1, 1, 1, 0)), ("t5", (3, 2)), ("t5", (4, 1)), ("gpt2", (0, 5, 0))]
)
def test_a_model_is_cut_anywhere(kind, cut):
    """Ends alone, where an encoder ends, and with the encoder's end and the decoder's beginning in one stage."""
    made = workload(kind, cut=cut)
    whole, batch = made.build_whole(), made.batch(0)
    made.loss(whole(*batch.inputs, **batch.context), batch.target).backward()
    _, gradients, modules = chained(made, len(made.cut))
    expected = {name: p.grad for name, p in whole.named_parameters()}
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
    assert sum(made.stage_bytes(len(cut))) == sum(p.nbytes for module in modules for p in module.parameters())


class Counted(TorchDispatchMode):
    """Counts the bytes of all that is made on the host."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for t in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(t, torch.Tensor) and not t.is_meta and t.untyped_storage().data_ptr() not in given:
                self.bytes += t.nbytes
        return made


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_stage_is_all_that_its_rank_holds(checkpoint, monkeypatch, tmp_path):
    made = workload("qwen2")
    if checkpoint:
        made.build_whole().save_pretrained(tmp_path, max_shard_size="40KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 3
        made = models.from_transformers(tmp_path, batch_size=4, length=24, source="sample", tokenizer="bytes")
    read = []
    real = models._weights.Weights.read
    monkeypatch.setattr(models._weights.Weights, "read", lambda *given: read.append(real(*given)) or read[-1])
    monkeypatch.setattr(models.TransformersModel, "build_whole", None)
    for stage, expected in enumerate(made.stage_bytes(5)):
        read.clear()
        with Counted() as counted:
            module = made.build_stage(stage, 5)
        assert sum(p.nbytes for p in module.parameters()) == expected
        assert (counted.bytes if not checkpoint else sum(t.nbytes for t in read if t is not None)) < 1.1 * expected
        assert counted.bytes < 1.1 * expected


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "distilbert", "t5"])
def test_a_checkpoint_is_read_as_transformers_reads_it(kind, tmp_path):
    """In pieces; without its head; with old names; with a head of its own where the config ties it."""
    model = workload(kind, seed=3).build_whole()
    if kind == "t5":
        model.lm_head.weight = torch.nn.Parameter(model.shared.weight.detach() + 1)
    (model.base_model if kind in ("gpt2", "bert") else model).save_pretrained(tmp_path, max_shard_size="40KB")
    if kind == "bert":  # as bert-base-uncased has them
        from safetensors.torch import load_file, save_file

        for path in tmp_path.glob("*.safetensors"):
            old = {n.replace("LayerNorm.weight", "LayerNorm.gamma"): t for n, t in load_file(path).items()}
            save_file({n.replace("LayerNorm.bias", "LayerNorm.beta"): t for n, t in old.items()}, path)
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(
            index.read_text().replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        )
    made = models.workload(str(tmp_path), batch_size=4, length=24, source="sample", tokenizer="bytes")
    new = "drawn at random: classifier.weight, classifier.bias"
    assert made.notes[2:] == ((new,) if kind == "bert" else ())
    expected = {n: t.clone() for n, t in type(model).from_pretrained(tmp_path).state_dict().items() if n not in new}
    found = {name: t for stage in range(3) for name, t in made.build_stage(stage, 3).state_dict().items()}
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"\0" * path.stat().st_size)  # as the next checkpoint may be written over it
    assert all(torch.equal(t, found[name]) for name, t in expected.items())
    assert found.keys() == model.state_dict().keys()


def test_layers_of_a_live_model_are_cut_too():
    model, batch = workload("t5").build_whole(), workload("t5").batch(0)
    x = batch.inputs
    for part in models.cut(model, 3, (1, 3, 1)):
        x = part(*x, **batch.context)
        x = x if isinstance(x, tuple) else (x,)
    assert torch.equal(x[0], model(*batch.inputs, **batch.context).logits)


def test_what_counts_is_weighed():
    made = workload("llama")
    labels = made.batch(0).target.clone()
    labels[0, 5:] = labels[1] = -100
    some = replace(made, data={"input_ids": made.data["input_ids"][:4], "labels": labels})
    parts = some.batch(0).microbatches(2)
    weights = [some.weight(part) for part in parts]
    assert weights == [4, 2 * 23], "the first token is nobody's next"
    model = made.build_whole()
    losses = [some.loss(model(*part.inputs), part.target) for part in parts]
    total = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    expected = model(some.batch(0).inputs[0], labels=labels).loss
    torch.testing.assert_close(total, expected)
    assert made.loss(model(labels.abs()), torch.full_like(labels, -100)) == 0, "not NaN, where nothing counts"


@pytest.mark.parametrize("kind", ["llama", "bert", "t5"])
def test_reviews_are_read_by_a_tokenizer(kind, tmp_path):
    tokenizer, reviews = modules.small_tokenizer(), data.reviews(source="sample")
    tokenizer.save_pretrained(tmp_path)
    config = type(CONFIGS[kind]).from_dict({**CONFIGS[kind].to_dict(), "vocab_size": len(tokenizer)})
    made = models.from_transformers(config, batch_size=4, length=24, source="sample", tokenizer=str(tmp_path))
    batch, text = made.batch(0), tokenizer(reviews.texts[0], add_special_tokens=kind != "llama")["input_ids"]
    (ids,) = batch.inputs
    if kind == "t5":
        half = min(len(text), 48) // 2
        counted = batch.target[0][batch.target[0] != -100].tolist()
        assert ids[0, :half].tolist() + counted[:-1] == text[: half + len(counted) - 1]
        assert batch.context["decoder_input_ids"][0, 1:half].tolist() == counted[: half - 1]
    else:
        assert ids[0, :20].tolist() == text[:20]
    if kind == "bert":
        assert batch.target.tolist() == list(reviews.labels[:4])
        assert (ids[:, 0] == tokenizer.cls_token_id).all()


def batches(step):
    """What a loader of transformers returns."""
    ids = torch.arange(12).view(3, 4) + step
    return {"input_ids": ids, "attention_mask": (ids != 3).long()}


def test_batches_come_from_a_function():
    made = workload("llama", data=batches)
    assert (made.batch_size, made.length, made.name) == (3, 4, "LlamaForCausalLM with 5 layers, batch 3 x 4 tokens")
    assert made.batch(2).inputs[0][0].tolist() == [2, 3, 4, 5]
    assert made.batch(0).target[0].tolist() == [0, 1, 2, -100], "padding isn't learned"


def test_packed_sequences_do_not_see_each_other():
    """Position ids that start again are a new text, wherever the model is cut."""
    made = workload("llama", dropout=0.0)
    positions = torch.arange(12).repeat(2).expand(4, -1)
    made = replace(made, data={"input_ids": made.data["input_ids"][:4], "position_ids": positions})
    first = made.batch(0)
    ids = first.inputs[0].clone()
    ids[:, :12] += 1
    ids %= 256
    outputs = []
    for tokens in (first.inputs[0], ids):
        x = tokens
        for stage in range(3):
            x = made.build_stage(stage, 3)(x, position_ids=positions)
        outputs.append(x)
    torch.testing.assert_close(outputs[0][:, 12:], outputs[1][:, 12:])


CHANGES = {  # of a folder's config
    "mamba": {"model_type": "mamba"},
    "deeper": {"num_hidden_layers": 6},
    "wider": {"vocab_size": 300},
    "deepest": {"num_hidden_layers": 2_000_000},
    "negative": {"num_hidden_layers": -3},
    "flat": {"num_hidden_layers": 0},
    "worded": {"num_hidden_layers": "12"},
    "wordy": {"hidden_size": "wide"},
    "thin": {"hidden_size": -32},
    "wordless": {"vocab_size": -1},
    "narrow": {"intermediate_size": 0},
}
INDICES = {  # what becomes of a folder's index
    "half": lambda text: text[:1],
    "mapless": lambda text: "{}",
    "nameless": lambda text: json.dumps({"weight_map": {"model.norm.weight": 3}}),
    "lying": lambda text: re.sub(r'("model.norm.weight": "model-0000)\d', r"\g<1>1", text),
}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("MambaConfig", ValueError, "type 'mamba' can be cut: known types: llama, .*, t5. .*models.Modules.*Workload"),
        ("a model", ValueError, r"expected a config of transformers, a folder .* give its \.config"),
        ("/nowhere/at all", FileNotFoundError, "there is no folder /nowhere/at all"),
        ("nobody/nothing", OSError, "the hub's nobody/nothing can't be reached and isn't in its cache"),
        ("not a name!", OSError, "check the network and the name"),
        ("empty", FileNotFoundError, "has no config.json"),
        ("broken", ValueError, "config.json isn't a config of transformers"),
        ("mamba", ValueError, "don't know where a model of type 'mamba'"),
        ("bare", FileNotFoundError, "has no weights: .* found config.json. Save the model there"),
        ("deeper", ValueError, "of another model than a LlamaForCausalLM .* without model.layers.5.self_attn.q_proj"),
        (
            "wider",
            ValueError,
            r"another model .* model.embed_tokens.weight \(256, 32\) where the config makes \(300, 3",
        ),
        ("torn", FileNotFoundError, "lacks model-00002-of-.*safetensors, which has .*fetch or copy"),
        ("mute", OSError, 'has no tokenizer that works here .*tokenizer="bytes"'),
        (
            "half",
            ValueError,
            "index.json is damaged, or no index of weights .JSONDecodeError.*fetch or copy the folder",
        ),
        ("mapless", ValueError, "index.json is damaged, or no index of weights .KeyError: 'weight_map'"),
        ("nameless", ValueError, "index.json is damaged, or no index of weights .the name of a file is no text"),
        ("lying", ValueError, "model-.*safetensors has no model.norm.weight, which the folder's index says is there"),
        ("short", ValueError, "model-00002-of-.*safetensors is damaged, or no file of safetensors .*fetch or copy it"),
        ("deepest", ValueError, "config.json: num_hidden_layers must be an integer from 1 to 1,024, got 2000000"),
        ("negative", ValueError, "config.json: num_hidden_layers must be an integer from 1 to 1,024, got -3"),
        ("flat", ValueError, "config.json: num_hidden_layers must be an integer from 1 to 1,024, got 0"),
        ("worded", ValueError, "config.json: num_hidden_layers must be an integer from 1 to 1,024, got '12'"),
        ("wordy", ValueError, "config.json: hidden_size must be an integer of at least 1, got 'wide'"),
        ("thin", ValueError, "config.json: hidden_size must be an integer of at least 1, got -32"),
        ("wordless", ValueError, "config.json: vocab_size must be an integer of at least 1, got -1"),
        ("narrow", ValueError, "config.json: intermediate_size must be an integer of at least 1, got 0"),
    ],
)
def test_what_is_not_there_is_said(given, error, message, tmp_path, monkeypatch):
    from transformers import MambaConfig

    monkeypatch.setattr(data, "hub_is_reachable", lambda: False)
    options = {"batch_size": 4, "length": 24, "source": "sample", "tokenizer": "bytes"}
    what = {"MambaConfig": MambaConfig(), "a model": torch.nn.Linear(2, 2)}.get(given, given)
    if given not in ("MambaConfig", "a model", "/nowhere/at all", "nobody/nothing", "not a name!"):
        what = tmp_path
    if what is tmp_path and given not in ("empty", "broken", "mamba", "bare"):
        workload("llama").build_whole().save_pretrained(tmp_path, max_shard_size="40KB")
    config = CONFIGS["llama"].to_dict()
    if given == "broken":
        (tmp_path / "config.json").write_text("[1, 2")
    elif given == "torn":
        next(tmp_path.glob("*-00002-of-*")).unlink()
    elif given == "mute":
        options["tokenizer"] = "auto"
    elif given in INDICES:
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(INDICES[given](index.read_text()))
    elif given == "short":
        shard = next(tmp_path.glob("*-00002-of-*"))
        shard.write_bytes(shard.read_bytes()[:-100])
    elif given not in ("empty", "torn"):
        config |= CHANGES.get(given, {})
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        models.from_transformers(what, **options)


@pytest.mark.parametrize("field", ["n_layer", "n_layers", "num_layers", "num_decoder_layers"])
@pytest.mark.parametrize("number", [-3, 0, 10**12])
def test_no_model_has_so_many_layers(field, number):
    kinds = {"n_layer": "gpt2", "n_layers": "distilbert"}
    config = copy.deepcopy(CONFIGS[kinds.get(field, "t5")])
    setattr(config, field, number)
    with pytest.raises(ValueError, match=f"Config: {field} must be an integer from 1 to 1,024, got {number}"):
        models.from_transformers(config, batch_size=4, length=24, source="sample")


@pytest.mark.parametrize("number", [-3, 0, 2_000_000, True, 2.0])
@pytest.mark.parametrize("kind", ["gpt", "mixture"])
def test_no_model_of_ours_has_either(kind, number):
    with pytest.raises(ValueError, match="num_layers must be an integer from 1 to 1,024, got"):
        models.workload(kind, batch_size=4, source="sample", num_layers=number)


@pytest.mark.parametrize(("wrong", "count"), [(float("nan"), 1), (float("inf"), 2), (-float("inf"), 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_weights_that_are_no_numbers_are_named(wrong, count, dtype, tmp_path):
    if dtype is torch.float8_e4m3fn and wrong != wrong:
        assert torch.tensor(wrong).to(dtype).float().isnan()
    elif dtype is torch.float8_e4m3fn:
        pytest.skip("this type has no infinity")
    made = workload("llama").build_whole().to(torch.bfloat16)
    made.save_pretrained(tmp_path, max_shard_size="40KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.3.mlp.up_proj.weight"
    shard = tmp_path / index[name]
    tensors = load_file(shard)
    values = tensors[name].float()
    values.view(-1)[5 : 5 + count] = wrong
    tensors[name] = values.to(dtype)
    save_file(tensors, shard, {"format": "pt"})
    found = models.from_transformers(tmp_path, batch_size=4, length=24, source="sample", tokenizer="bytes")
    said = rf"{shard}: {count} of the 1,536 values of {name} are NaN or infinite, and no run can learn with them: fetch"
    found.build_stage(0, 2)  # layers 0 to 2
    for build in (lambda: found.build_stage(1, 2), found.build_whole):
        with pytest.raises(ValueError, match=said):
            build()


def test_a_mask_may_be_infinite(tmp_path):
    found = workload("bert")
    made = found.build_whole()
    made.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mask": torch.full((2, 2), -float("inf"))}, file, {"format": "pt"})
    weights = Weights(str(tmp_path), made)
    with weights.open():
        assert weights.read(["mask"], is_weight=False).isinf().all()
        with pytest.raises(ValueError, match="model.safetensors: 4 of the 4 values of mask are NaN or infinite"):
            weights.read(["mask"], is_weight=True)


IDS = torch.zeros(4, 24, dtype=torch.long)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "llama",
            {"data": {"ids": IDS}},
            "a batch for LlamaForCausalLM has input_ids, and may have labels, .*: got ids",
        ),
        ("llama", {"data": {"input_ids": IDS, "token_type_ids": IDS}}, "got input_ids, token_type_ids"),
        ("bert", {"data": {"input_ids": IDS}}, "BertForSequenceClassification has input_ids, labels"),
        (
            "bert",
            {"data": {"input_ids": IDS, "labels": torch.tensor([0, 1, 2, 0])}},
            "below the config's num_labels, 2",
        ),
        (
            "llama",
            {"data": {"input_ids": IDS + 256}},
            "input_ids must be .* vocab_size, 256, .* from 256 to 256: take the tok",
        ),
        ("llama", {"data": {"input_ids": IDS - 1, "labels": IDS}}, "input_ids must be .* from -1 to -1"),
        ("llama", {"data": {"input_ids": IDS[0]}}, r"input_ids has the shape \(4,\); input_ids \(B, T\)"),
        (
            "llama",
            {"data": {"input_ids": IDS, "labels": IDS[:3]}},
            "as many rows of each, and some, got .*.input_ids.: 4, .labels.: 3",
        ),
        ("llama", {"data": [IDS]}, "is a dict of tensors by name, got a Tensor"),
        (
            "llama",
            {"data": {"input_ids": IDS, "labels": IDS[:, 1:]}},
            r"labels has the shape \(4, 23\); input_ids .* 24",
        ),
        ("gpt2", {"length": 65}, "sequences of 65 tokens are longer than the config's 64 positions"),
        ("llama", {"batch_size": 0}, "batch_size must be an integer of at least 1"),
    ],
)
def test_data_that_do_not_fit_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        workload(kind, **options)


def test_a_model_says_where_it_can_be_cut():
    with pytest.raises(ValueError, match="5 layers can't make 6 stages: .* Use at most 5 stages"):
        workload("t5").check(6)
    with pytest.raises(ValueError, match="places 4 layers, and the model has 5"):
        workload("bert", cut=(2, 2)).build_stage(0, 2)
    with pytest.raises(
        ValueError, match="cuts GPT, nn.Sequential and transformers' LlamaForCausalLM, .* models.Modules"
    ):
        models.cut(torch.nn.Linear(2, 2), 2)


def test_what_is_exported_is_trained_again(tmp_path):
    """A folder in bfloat16 with a tokenizer comes back as such, from a checkpoint of the same weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, came, went = modules.small_tokenizer(), tmp_path / "came", tmp_path / "went"
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(came)
    tokenizer.save_pretrained(came)
    made = models.from_transformers(came, batch_size=2, length=16, source="sample")
    write(tmp_path / "end", [collect([made.build_whole()], None, {})], 1, made.name)
    made.export(tmp_path / "end", went)
    text = "good food, and a long wait"
    assert AutoTokenizer.from_pretrained(went)(text) == tokenizer(text)
    again = AutoModelForCausalLM.from_pretrained(went)
    assert again.dtype == torch.bfloat16
    first = AutoModelForCausalLM.from_pretrained(came).state_dict()
    assert all(torch.equal(tensor, first[name]) for name, tensor in again.state_dict().items())
    reads = models.from_transformers(went, batch_size=2, length=16, source="sample")
    assert torch.equal(reads.batch(3).inputs[0], made.batch(3).inputs[0])


def test_reviews_come_from_a_folder(tmp_path):
    sample = data.reviews(source="sample", limit=9)
    rows = (json.dumps({"label": label, "text": text}) for label, text in zip(sample.labels, sample.texts, strict=True))
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    assert data.reviews(source=str(tmp_path), limit=7).texts == sample.texts[:7]
