"""DistilBERT with padding, cut by torch's tracer and trained on as many ranks as there are.

    torchrun --standalone --nproc-per-node 3 traced_distilbert.py

Losses and gradients are those of the whole model. With three ranks the mask goes past a stage.
"""

import copy

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from transformers import DistilBertConfig, DistilBertForSequenceClassification


def loss_fn(output, target):
    logits = output if torch.is_tensor(output) else output["logits"]
    return torch.nn.functional.cross_entropy(logits, target)


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
off = {"dropout": 0, "attention_dropout": 0, "seq_classif_dropout": 0}
whole = DistilBertForSequenceClassification(
    DistilBertConfig(vocab_size=100, dim=32, hidden_dim=64, n_heads=2, n_layers=3, num_labels=5, **off)
)
ids, labels = torch.randint(100, (8, 16)), torch.randint(5, (8,))
mask = (torch.arange(16) < torch.randint(6, 17, (8, 1))).long()

cut = {f"distilbert.transformer.layer.{n}": SplitPoint.BEGINNING for n in range(1, ranks)}
pipe = pipeline(copy.deepcopy(whole), (ids[:2],), {"attention_mask": mask[:2]}, split_spec=cut)

stage = pipe.build_stage(rank, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)
optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (stage.submod, whole)]
for _ in range(3):
    losses = []
    if rank == 0:
        schedule.step(ids, attention_mask=mask)
    else:
        last = {"target": labels, "losses": losses} if rank == ranks - 1 else {}
        schedule.step(**last)
    loss = loss_fn(whole(ids, attention_mask=mask), labels)  # and in one process
    loss.backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for name, p in stage.submod.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-5)
    if losses:
        by_torch = sum(one.item() for one in losses) / 4
        torch.testing.assert_close(by_torch, loss.item(), rtol=1e-4, atol=1e-5)
        print(f"loss {by_torch:.4f}")
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
