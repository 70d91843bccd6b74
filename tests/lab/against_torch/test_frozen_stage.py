"""What the page on torch says of frozen stages: where backwards are split, the stage behind one gets no gradients."""

import pytest

import pplab as pp
from pplab import lab

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pipelining = pytest.importorskip("torch.distributed.pipelining")
WHOLE, SPLIT = "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", "0F0 1F0 0F1 1F1 1I0 0I0 1I1 0I1 1W0 0W0 1W1 0W1"


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("row", [WHOLE, SPLIT])
def test_a_stage_behind_a_frozen_one(row, frozen, alone, tmp_path):
    layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)]
    layers[0].requires_grad_(not frozen)
    stages = [pipelining.PipelineStage(layer, n, 2, torch.device("cpu")) for n, layer in enumerate(layers)]
    loss, x, y = torch.nn.functional.mse_loss, torch.randn(4, 4), torch.randn(4, 4)
    engine = pipelining.schedules._PipelineScheduleRuntime(stages, n_microbatches=2, loss_fn=loss)
    file = tmp_path / "rows.csv"
    file.write_text(lab.to_csv(pp.Schedule([row.split()])))
    engine._load_csv(str(file))
    engine.step(x, target=y)
    expected = torch.autograd.grad(loss(layers[1](layers[0](x)), y), list(layers[1].parameters()))
    found = [p.grad for p in layers[1].parameters()]
    if row == SPLIT and frozen:
        assert found == [None, None]  # no error either
    else:
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))
