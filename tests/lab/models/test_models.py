"""The models, their splits and their data: the same numbers however they are cut, clear words when they can't be."""

import json
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
import torch
from torch import nn

from pplab.lab import data, models

pytestmark = pytest.mark.slow


def chain(stages, x, **context):
    for stage in stages:
        x = stage(x, **context)
    return x


@pytest.fixture(scope="module")
def reviews():
    return models.distilbert(batch_size=6, length=24, checkpoint="small", source="sample")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
def test_distilbert_in_stages_equals_the_whole_with_ragged_padding(reviews, attention, num_stages):
    from dataclasses import replace

    workload = replace(reviews, attention=attention)
    batch = workload.batch(0)
    mask = batch.context["attention_mask"].clone()
    for row, length in enumerate((24, 20, 13, 7, 3, 1)):
        mask[row, length:] = 0
    model = workload.build_whole()
    whole = model(*batch.inputs, attention_mask=mask).logits
    parts = chain(models.cut(model, num_stages), *batch.inputs, attention_mask=mask)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
    unmasked = chain(models.cut(model, num_stages), *batch.inputs, attention_mask=torch.ones_like(mask))
    assert (unmasked - whole).abs().max() > 1e-3, "the mask makes no difference: it is being ignored"

    names = {name for part in models.cut(model, num_stages) for name, _ in part.named_parameters()}
    assert names == {name for name, _ in model.named_parameters()}
    (expected,) = torch.autograd.grad(whole.square().sum(), [model.distilbert.embeddings.word_embeddings.weight])
    (found,) = torch.autograd.grad(parts.square().sum(), [model.distilbert.embeddings.word_embeddings.weight])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_gpt_in_stages_equals_the_whole(num_stages):
    workload = models.gpt(batch_size=2, num_layers=5, width=16, num_heads=2, context=12, source="sample")
    model, batch = workload.build_whole(), workload.batch(3)
    stages = [workload.build_stage(stage, num_stages) for stage in range(num_stages)]
    torch.testing.assert_close(chain(stages, *batch.inputs), model(*batch.inputs), rtol=0, atol=0)
    assert [n for s in stages for n, _ in s.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert torch.equal(batch.inputs[0][:, 1:], batch.target[:, :-1])


def test_a_gpt_does_not_see_the_future():
    workload = models.gpt(batch_size=1, num_layers=2, width=16, num_heads=2, context=12, source="sample")
    model, (tokens,) = workload.build_whole(), workload.batch(0).inputs
    changed = tokens.clone()
    changed[0, 8:] = 7
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_a_sequential_keeps_its_names():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    front, back = models.cut(model, 2)
    assert [n for n, _ in back.named_parameters()] == ["2.weight", "2.bias"]
    x = torch.randn(4, 2)
    assert torch.equal(back(front(x)), model(x))


def test_layers_are_cut_evenly():
    for layers in range(1, 20):
        for stages in range(1, layers + 1):
            ranges = models.layer_ranges(layers, stages)
            assert [i for r in ranges for i in r] == list(range(layers))
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_more_stages_than_layers_are_refused(reviews):
    with pytest.raises(ValueError, match="8 layers can't make 9 stages: .* Use at most 8 stages"):
        models.cut(reviews.build_whole(), 9)
    with pytest.raises(ValueError, match="num_stages must be an integer of at least 1"):
        models.layer_ranges(4, 0)


def test_a_model_that_cannot_be_split_is_named():
    with pytest.raises(ValueError, match="don't know how to cut a Linear: .*models.Modules"):
        models.cut(nn.Linear(2, 2), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "num_layers must be an integer from 1 to 1,024"),
        ({"width": 10, "num_heads": 3}, "width 10 doesn't divide into 3 heads"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
        ({"source": "yelp"}, "unknown source 'yelp'"),
    ],
)
def test_bad_options_of_a_model_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        models.gpt(**{"source": "sample", **options})


def test_an_unknown_model_gets_the_nearest_name():
    with pytest.raises(ValueError, match="unknown model 'destilbert': did you mean distilbert"):
        models.workload("destilbert")


def test_the_sample_is_what_its_script_makes():
    """The committed files hold exactly the rows that the seeded script writes."""
    import importlib.util
    import random
    from pathlib import Path

    path = Path(__file__).parents[3] / "tools" / "make_sample.py"
    spec = importlib.util.spec_from_file_location("make_sample", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rng = random.Random(script.SEED)
    for split, size in script.SIZES.items():
        labels, texts = script.rows(size, rng)
        found = data.reviews(split, source="sample", limit=10**6)
        assert (list(found.labels), list(found.texts)) == (labels, texts)


def test_the_sample_needs_nothing_but_python(monkeypatch):
    for name in ("datasets", "pyarrow", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, name, None)
    data.reviews.cache_clear()
    assert len(data.reviews("test", source="sample", limit=5).texts) == 5


def test_where_reviews_came_from_is_said(monkeypatch):
    assert data.reviews(source="sample", limit=3).source == "pplab's sample"
    monkeypatch.setattr(data, "hub_is_reachable", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    data.reviews.cache_clear()
    found = data.reviews(limit=3)
    assert "pplab's sample (the hub's Yelp/yelp_review_full can't be reached)" in repr(found)
    with pytest.raises(
        ConnectionError, match='Yelp/yelp_review_full can.t be reached .* use source="sample" or "auto"'
    ):
        data.reviews(source="hub", limit=3)


def test_the_hubs_reviews_are_streamed_when_it_answers(monkeypatch, tmp_path):
    """The hub's own call, with a folder of the same layout in its place."""
    import datasets

    asked = []
    real = datasets.load_dataset
    label = datasets.ClassLabel(names=["1 star", "2 star", "3 stars", "4 stars", "5 stars"])
    features = datasets.Features({"label": label, "text": datasets.Value("string")})
    sample = data.reviews("test", source="sample", limit=10)
    rows = datasets.Dataset.from_dict({"label": sample.labels, "text": sample.texts}, features=features)
    rows.to_parquet(tmp_path / "test-00000-of-00001.parquet")

    def load(name, **options):
        asked.append((name, options))
        return real(str(tmp_path) if name == data.DATASET else name, **options)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(data, "hub_is_reachable", lambda: True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    data.reviews.cache_clear()
    found = data.reviews("test", limit=7)
    data.reviews.cache_clear()
    assert asked == [(data.DATASET, {"revision": data.REVISION, "split": "test", "streaming": True})]
    assert found.source == "the hub's Yelp/yelp_review_full" and found.texts == sample.texts[:7]
    assert found.labels == sample.labels[:7]


def test_a_checkpoint_that_was_asked_for_must_be_there(monkeypatch):
    monkeypatch.setattr(data, "hub_is_reachable", lambda: False)
    with pytest.raises(OSError, match="the hub's nobody/nothing can't be reached and isn't in its cache"):
        models.distilbert(checkpoint="nobody/nothing", source="sample")
    assert any("can't be reached" in note for note in models.distilbert(source="sample").notes)


def test_a_checkpoint_from_a_folder_is_split_like_any_other(tmp_path, reviews):
    """`from_pretrained`, with a folder in the hub's place."""
    reviews.build_whole().save_pretrained(tmp_path)
    workload = models.from_transformers(tmp_path, batch_size=2, length=16, tokenizer="bytes", source="sample")
    assert workload.num_layers == 8 and f"checkpoint in {tmp_path}" in " ".join(workload.notes)
    batch = workload.batch(0)
    stages = [workload.build_stage(stage, 3) for stage in range(3)]
    whole = workload.build_whole()(*batch.inputs, **batch.context).logits
    torch.testing.assert_close(chain(stages, *batch.inputs, **batch.context), whole, rtol=0, atol=1e-6)


def test_weights_of_a_folder_that_are_no_numbers_are_named(tmp_path, reviews):
    whole = reviews.build_whole()
    with torch.no_grad():
        whole.distilbert.transformer.layer[1].ffn.lin1.weight[3, :2] = torch.nan
    whole.save_pretrained(tmp_path)
    workload = models.from_transformers(tmp_path, batch_size=2, length=16, tokenizer="bytes", source="sample")
    said = "model.safetensors: 2 of the 65,536 values of distilbert.transformer.layer.1.ffn.lin1.weight are NaN or infi"
    with pytest.raises(ValueError, match=said):
        workload.build_stage(0, 2)


def test_a_folder_with_too_many_layers_is_refused_at_once(tmp_path, reviews):
    config = reviews.build_whole().config.to_dict() | {"n_layers": 2_000_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="config.json: n_layers must be an integer from 1 to 1,024, got 2000000"):
        models.distilbert(checkpoint=str(tmp_path), source="sample")


@pytest.mark.parametrize("proxy", [False, True])
def test_a_network_that_swallows_everything_is_given_up_after_a_second(monkeypatch, proxy):
    """A server that takes connections and never answers, as the hub or as the proxy on the way to it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://hub.invalid" if proxy else address)
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
            if proxy:
                monkeypatch.setenv(name, address)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        begun = time.monotonic()
        assert not data.hub_is_reachable()
        assert time.monotonic() - begun < 10  # a second, with room for a busy machine


def test_a_hub_that_answers_is_found(monkeypatch):
    class Yes(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *said: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Yes) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert data.hub_is_reachable()
        server.shutdown()
