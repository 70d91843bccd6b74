"""A model of your own on two processes, and its gradients beside those of one: python your_model.py

Yours are the model, the parts that a stage loses, the batch and the loss.
"""

import torch
from torch import nn

import pplab as pp
from pplab import lab
from pplab.runtime import Batch, Pool, Workload

LAYERS, WIDTH, WORDS = 8, 64, 256


class Model(nn.Module):  # as it trains in one process, but for what `forward` does where a part is missing
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)]
        self.layers = nn.ModuleDict({str(n): layer for n, layer in enumerate(layers)})  # numbers stay when some go
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):  # tokens, or what the stage before has made of them
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


class Yours(Workload):
    name, batch_size, num_layers = "yours", 32, LAYERS

    def build_whole(self):
        torch.manual_seed(0)  # the same weights in every process
        return Model()

    def build_stage(self, stage, num_stages):  # the model without the parts of the other stages
        model = self.build_whole()
        for n in range(LAYERS):
            if n * num_stages // LAYERS != stage:
                del model.layers[str(n)]
        if stage > 0:
            model.embedding = None
        if stage < num_stages - 1:
            model.head = None
        return model

    def batch(self, step):  # every process makes the same one: for each token, the one that follows it in the alphabet
        tokens = torch.randint(WORDS, (32, 24), generator=torch.Generator().manual_seed(step))
        return Batch((tokens,), (tokens + 1) % WORDS)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


if __name__ == "__main__":
    one_f_one_b = pp.build("1F1B", num_ranks=2, num_microbatches=8)
    how = {"steps": 5, "optimizer": torch.optim.AdamW}
    # On your GPUs, if you leave `device` out: then PyTorch's classes need one for every rank.
    with Pool(2, device="cpu") as pool:  # lab.Causes() compares gradients, and says why where they differ
        run = pool.train(one_f_one_b, Yours(), lab.Causes(), **how)
        print("losses", *(f"{loss:.3f}" for loss in run.losses))
        print("gradients", run.gradients)
        torchs = pool.train(one_f_one_b, Yours(), lab.Causes(), lab.TorchEngine(), **how)
        print("PyTorch's Schedule1F1B:", torchs.gradients)
