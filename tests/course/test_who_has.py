"""Who has a schedule, and what becomes of compiled stages: as torch itself says it."""

import copy
import re
from pathlib import Path

import pytest

import pplab as pp
from pplab import lab
from pplab.lab.against_torch import CLASSES
from pplab_course.who_has import OWNERS, Owned, who_has

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
pipelining = pytest.importorskip("torch.distributed.pipelining")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return x + torch.tanh(self.down(torch.nn.functional.gelu(self.up(x))))


def stages(count, compiled):
    modules = [Block() for _ in range(count)]
    if compiled:
        modules = [torch.compile(module, backend="aot_eager") for module in modules]
    return [pipelining.PipelineStage(module, stage, count, torch.device("cpu")) for stage, module in enumerate(modules)]


@pytest.mark.parametrize("name", CLASSES)
def test_torch_refuses_compiled_stages_where_we_say_that_they_are_lost(name, alone):
    schedule = pp.build(name, num_ranks=4, num_microbatches=8)
    has, compiled = who_has(schedule)
    assert "torch" in has.split(", ")
    made = getattr(pipelining.schedules, CLASSES[name])
    each = schedule.num_stages // schedule.num_ranks

    def construct():
        given = stages(2, compiled=True)
        return made(given[0] if each == 1 else given, n_microbatches=4)

    if compiled == "kept":
        construct()
    else:
        with pytest.raises(RuntimeError, match="not supported with stage modules that have used torch.compile"):
            construct()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("row", ["0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", "0F0 1F0 0F1 1F1 1I0 0I0 1I1 0I1 1W0 0W0 1W1 0W1"])
def test_rows_in_a_file_keep_compiled_stages_unless_they_split(row, compiled, alone, tmp_path):
    """The interpreter doesn't check: whole backwards give one process's gradients, and the first I fails."""
    both, schedule, loss = stages(2, compiled), pp.Schedule([row.split()]), torch.nn.functional.mse_loss
    whole = torch.nn.Sequential(*(copy.deepcopy(getattr(s.submod, "_orig_mod", s.submod)) for s in both))
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    loss(whole(x), y).backward()
    engine = pipelining.schedules._PipelineScheduleRuntime(both, n_microbatches=2, loss_fn=loss)
    file = tmp_path / "rows.csv"
    file.write_text(lab.to_csv(schedule))
    engine._load_csv(str(file))
    if compiled and who_has(schedule) == ("rows in a file", "lost"):
        with pytest.raises(RuntimeError, match="Failed to run stage backward input"):
            engine.step(x, target=y)
        return
    engine.step(x, target=y)
    ours = [p.grad for stage in both for p in stage.submod.parameters()]
    for gradient, p in zip(ours, whole.parameters(), strict=True):
        assert torch.allclose(gradient, p.grad, atol=1e-6)


def test_what_torch_does_not_know_has_no_answer():
    for name in ("DualPipe", "Seq1F1B"):
        assert who_has(pp.build(name, num_ranks=2, num_microbatches=4))[1] == ""
    halves = pp.Schedule([["0F0", "0F1", "(0F2;0I0)OVERLAP_F_I", "0W0", "0B1", "0B2"]])
    assert who_has(halves) == ("nobody", "")


@pytest.mark.parametrize("P, M, tickets", [(4, 16, [7, 5, 3, 1]), (4, 16, [3, 2, 2, 1]), (2, 1, None), (4, 8, None)])
def test_no_class_has_tickets(P, M, tickets):
    """Every framework's 1F1B holds P - r forwards, or all microbatches if these are fewer."""
    schedule = pp.build("1F1B", num_ranks=P, num_microbatches=M, in_flight=tickets)
    own = schedule.peak_in_flight == tuple(min(P - rank, M) for rank in range(P))
    assert own == (tickets is None)
    assert who_has(schedule) == ("Megatron-LM, DeepSpeed, nanotron, torch" if own else "rows in a file", "kept")


@pytest.mark.parametrize(
    "page, names",
    [("notebooks/09_dualpipev.ipynb", ("DualPipe", "DualPipeV")), ("book/cheat_sheet.md", ("1F1B", "DualPipeV"))],
)
def test_pages_say_who_has_a_schedule_as_the_list_does(page, names):
    """In their tables: "| DualPipe: who |", or "| DualPipe | who |"."""
    text = (Path(__file__).parents[2] / page).read_text().replace('\\"', '"')
    cited = r" \[\[[^]]*\]\([^)]*\)\]"
    plain = re.sub(r"\[([^][]*)\]\([^)]*\)", r"\1", re.sub(cited, "", text))
    for name in names:
        assert re.search(rf"\| {name}(: | \| ){re.escape(OWNERS[name])} \|", plain), (name, OWNERS[name])


def test_a_ledger_with_owners_has_their_columns():
    case, loop = lab.Case(), {"stages_per_rank": 2}
    rows = [
        case.row("1F1B", 16),
        case.row("1F1B", 16, sends="both wait"),
        case.row("Interleaved1F1B", 16, **loop),
        case.row("Interleaved1F1B", 16, **loop, sends="forwards wait"),
        case.row("Interleaved1F1B", 16, **loop, recompute=[2, *[0] * 7], sends="forwards wait"),
        case.row("Interleaved1F1B", 16, **loop, recompute=[2] * 8, sends="forwards wait"),
        case.row("ZB-H1", 16, cut=[8, 9, 8, 7]),
        case.row("ZB-V", 16, cut=[4] * 8),
        case.row("ZB-V", 16, cut=[4, 4, 4, 4, 5, 5, 4, 2]),
        lab.fsdp_row(case, 16),
        case.row("a perfect pipeline", 16),
    ]
    table = Owned(case, rows).table
    assert table.columns[-2:] == ("who has it", "compiled stages")
    assert [row[-2:] for row in table] == [
        ("rows in a file", "kept"),
        ("Megatron-LM, torch", "kept"),
        ("torch", "kept"),
        ("Megatron-LM (VPP)", "kept"),
        ("nobody", "kept"),
        ("Megatron-LM (VPP)", "kept"),
        ("rows in a file", "lost"),
        ("torch, its authors", "lost"),
        ("torch", "lost"),
        ("torch, DeepSpeed", "kept"),
        ("", ""),
    ]
    assert [row[:-2] for row in table] == list(lab.Ledger(case, rows).table)
