"""A family that isn't in the table, as a workload: Gemma, whose embedding is scaled, and its head as well.

python gemma_by_hand.py trains a small one on two ranks and compares its gradients with those of one process."""

import torch
from torch import nn
from transformers import GemmaConfig, GemmaForCausalLM

import pplab as pp
from pplab.lab import models
from pplab.runtime import Batch, Pool, Workload


class Stage(nn.Module):
    """Some of the layers, under the names that they have in the whole model."""

    def __init__(self, whole, layers, is_first, is_last):
        super().__init__()
        self.model = nn.Module()
        if is_first:
            self.model.embed_tokens = whole.model.embed_tokens  # multiplies by the square root of the width, too
        self.model.layers = nn.ModuleDict({str(i): whole.model.layers[i] for i in layers})  # old numbers
        if is_last:
            self.model.norm, self.lm_head = whole.model.norm, whole.lm_head
        self.rotary = [whole.model.rotary_emb]  # every stage turns queries and keys; in a list it isn't saved

    def forward(self, x):  # tokens, or what the stage before hands on
        if hasattr(self.model, "embed_tokens"):
            x = self.model.embed_tokens(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotary = self.rotary[0].to(x.device)(x, position_ids=positions)
        for layer in self.model.layers.values():
            x = layer(x, position_embeddings=rotary, position_ids=positions)
        return self.lm_head(self.model.norm(x)) if hasattr(self, "lm_head") else x


class Gemma(Workload):
    name, batch_size = "Gemma", 16

    def __init__(self, config, cut=None):
        self.config, self.num_layers, self.cut = config, config.num_hidden_layers, cut

    def build_whole(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same weights on every rank
            return GemmaForCausalLM(self.config)

    def build_stage(self, stage, num_stages):
        layers = models.layer_ranges(self.num_layers, num_stages, self.cut)[stage]
        return Stage(self.build_whole(), layers, stage == 0, stage == num_stages - 1)

    def tied(self, num_stages):  # one matrix, in the first stage and the last
        ends = (0, "model.embed_tokens.weight"), (num_stages - 1, "lm_head.weight")
        return {"model.embed_tokens.weight": ends} if num_stages > 1 else {}

    def batch(self, step):
        numbers = torch.Generator().manual_seed(step)
        tokens = torch.randint(self.config.vocab_size, (16, 33), generator=numbers)
        return Batch((tokens[:, :-1],), tokens[:, 1:])

    def loss(self, output, target):
        scores = getattr(output, "logits", output)  # the whole model returns more
        return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
config = GemmaConfig(**sizes, num_key_value_heads=1, head_dim=16, vocab_size=512, pad_token_id=None)

if __name__ == "__main__":
    with Pool(2, device="cpu") as pool:
        one_f_one_b = pp.build("1F1B", num_ranks=2, num_microbatches=8)
        print(pool.train(one_f_one_b, Gemma(config), check_gradients=True).gradients)
        print(pool.train(one_f_one_b, Gemma(config, cut=(4, 2)), check_gradients=True).gradients)
