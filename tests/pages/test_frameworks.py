"""What the page on frameworks says of PyTorch's checkpoints of a pipeline, on two gloo processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import multiprocessing, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from pplab.lab.planning import RULES, TITAN_RULES, TORCH_RULES

PAGE = Path(__file__).parents[2] / "book/frameworks.md"
LAYERS = 8
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def stage_of(rank: int, ranks: int) -> tuple[nn.ModuleDict, torch.optim.Adam]:
    """A stage whose layers have the names that they have in the whole model, after a step of Adam.

    Layer i's gradient is i + 1, so its first moment is (i + 1) / 10.
    """
    mine = range(LAYERS * rank // ranks, LAYERS * (rank + 1) // ranks)
    stage = nn.ModuleDict({f"layer{i}": nn.Linear(4, 4, bias=False) for i in mine})
    adam = torch.optim.Adam(stage.parameters())
    for i in mine:
        stage[f"layer{i}"].weight.grad = torch.full((4, 4), i + 1.0)
    adam.step()
    return stage, adam


def state(stage: nn.Module, adam: torch.optim.Adam, named: bool) -> dict:
    return get_optimizer_state_dict(stage, adam, options=FLAT) if named else adam.state_dict()


def load(place: Path, rank: int, ranks: int, named: bool) -> dict[str, float]:
    """Each layer's first moment after loading."""
    stage, adam = stage_of(rank, ranks)
    for moments in adam.state.values():
        moments["exp_avg"].zero_()
    found = {"optimizer": state(stage, adam, named)}
    dcp.load(found, checkpoint_id=place, no_dist=ranks == 1)
    if named:
        set_optimizer_state_dict(stage, adam, found["optimizer"], options=FLAT)
    else:
        adam.load_state_dict(found["optimizer"])
    return {name: adam.state[layer.weight]["exp_avg"].mean().item() for name, layer in stage.items()}


def save_and_load(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for name in ("named", "numbered"):
        dcp.save({"optimizer": state(*stage_of(rank, 2), name == "named")}, checkpoint_id=f"{folder}/{name}")
        torch.save(load(Path(folder, name), rank, 2, name == "named"), f"{folder}/{name}{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("heading", "rules"), [("Megatron-LM says", RULES), ("PyTorch and torchtitan say", (*TITAN_RULES, *TORCH_RULES))]
)
def test_the_pages_errors_are_those_of_the_tables_by_which_lines_are_read(heading, rules):
    rows = [re.sub('[`"]', "", f"| {r.error} | {re.sub('{[^}]*}', '…', r.told)} | {r.source} |") for r in rules]
    section = re.split("\n##+ ", PAGE.read_text().partition(f"### What {heading}")[2])[0]
    said = [re.sub('[`"]', "", line) for line in section.splitlines() if line.startswith("| `")]
    assert said == rows and not re.search(" --[a-z]", re.sub("`[^`]*`", "", section))  # or it becomes a dash


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of its storage
def test_stages_overwrite_one_another_unless_their_state_is_named(tmp_path):
    multiprocessing.set_forkserver_preload(["pplab.preload"])
    multiprocessing.start_processes(save_and_load, (str(tmp_path),), nprocs=2, start_method="forkserver")
    right = {f"layer{i}": (i + 1) / 10 for i in range(LAYERS)}

    def two(name: str) -> dict[str, float]:
        return torch.load(tmp_path / f"{name}0.pt") | torch.load(tmp_path / f"{name}1.pt")

    assert two("named") == pytest.approx(right) and two("numbered").keys() == right.keys()
    assert two("numbered") != pytest.approx(right)
    assert load(tmp_path / "named", 0, 1, True) == pytest.approx(right)  # one stage in place of two
    with pytest.raises(dcp.CheckpointException, match="Missing key"):
        load(tmp_path / "numbered", 0, 1, False)


def test_the_page_shows_what_was_tried():
    said = " ".join(PAGE.read_text().split())
    assert "get_optimizer_state_dict(stage, adam, options=StateDictOptions(flatten_optimizer_state_dict=True))" in said
    assert re.search(r"loaded into two, Adam's moments were wrong, without an error", said)
