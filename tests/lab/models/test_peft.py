"""Adapters by peft in a model that is there already: what the page on families says, executed where peft is."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import modules
import pplab as pp
from pplab import lab
from pplab.lab import models
from pplab.runtime import Batch

peft = pytest.importorskip("peft", reason="no adapters: pip install peft")
pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "book" / "own_family.md"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
GPT2 = GPT2Config(n_embd=32, n_layer=4, n_head=2, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0)
SGD = partial(torch.optim.SGD, lr=1.0)


@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "Interleaved1F1B"])
@pytest.mark.parametrize(
    ("kind", "config", "targets"),
    [
        (GPT2LMHeadModel, GPT2, ["c_attn"]),
        (LlamaForCausalLM, LlamaConfig(vocab_size=256, **SIZES), ["q_proj", "v_proj"]),
    ],
)
def test_what_peft_makes_is_trained_as_peft_does_it_and_comes_home(
    pools, tmp_path, monkeypatch, kind, config, targets, name
):
    """GPT-2's embedding is tied, and frozen; adapters begin with random numbers, so that all have gradients."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    kind(config).eval().save_pretrained("folder")
    is_gpt2 = kind is GPT2LMHeadModel  # whose Linears are written the other way round
    lora = peft.LoraConfig(target_modules=targets, init_lora_weights=False, fan_in_fan_out=is_gpt2)
    model = peft.get_peft_model(kind.from_pretrained("folder"), lora)
    alone = copy.deepcopy(model)
    tokens = torch.randint(256, (4, 8, 17))
    batches = [Batch((each[:, :-1],), each[:, 1:]) for each in tokens]
    (text,) = re.findall(r"```python\n(stages = .*?)```", PAGE.read_text(), re.S)
    schedule = pp.build(name, num_ranks=2, num_microbatches=4)
    given = {"model": model, "schedule": schedule, "pool": pools(2), "batches": batches, "loss": modules._of_tokens}
    given |= {"sgd": SGD, "lab": lab, "models": models, "torch": torch}
    exec(text, given)

    optimizer, losses = SGD([p for p in alone.parameters() if p.requires_grad]), []
    for batch in batches:
        loss = modules._of_tokens(alone(*batch.inputs).logits, batch.target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert given["run"].losses == pytest.approx(losses, rel=1e-5)
    again = peft.PeftModel.from_pretrained(kind.from_pretrained("folder"), "adapters")
    for name, weight in peft.get_peft_model_state_dict(alone).items():
        torch.testing.assert_close(peft.get_peft_model_state_dict(again)[name], weight, rtol=1e-4, atol=1e-6)


def test_a_model_of_pefts_is_refused_with_what_to_do():
    model = peft.get_peft_model(GPT2LMHeadModel(GPT2), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    with pytest.raises(ValueError, match=r"got a PeftModel: .* with peft its get_base_model\(\)\): models.Modules"):
        models.from_transformers(model)
    with pytest.raises(ValueError, match=r"don't know how to cut a PeftModel.*with peft's the model of get_base_model"):
        models.cut(model, 2)
