"""What the notebooks do on a machine's GPUs is done there: those cells, executed on GPUs that are played."""

from __future__ import annotations

import ast

import pytest
from cells_on_gpus import SOURCE, named, of_notebook, on_devices, parsed, takers

from conftest import ROOT, on_fake_gpus
from pplab.lab.shell import cli, commands

NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("gpus, third", [(4, 0), (1, 1), (2, 2)])
def test_cells_run_on_gpus(gpus, third):
    """A third of the notebooks on each: on one GPU, ranks take turns; where each has its own, they send by NCCL."""
    training = [str(path) for path in NOTEBOOKS if of_notebook(path)]
    assert len(training) >= 2
    done = on_fake_gpus(["tests/course/cells_on_gpus.py", *training[third::3]], gpus)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


CELLS = """
from pplab import lab
from pplab.runtime import Pool
--
gpt, unused = 1, 2
--
found = lab.measure_layers(gpt, 8)
--
longest = max(found.times_ms)
print(longest)
--
names = found.names
assert longest == found.times_ms[-1]
--
found = lab.measure_layers(gpt, 8, device="cpu")
assert found.times_ms
--
pools = partial(Pool, 2)
with Pool(2, device="cpu") as pool:
    pool.train(gpt)
--
with pools() as pool:
    run = pool.train(gpt)
--
def trained():
    return pools().train(gpt)
--
assert trained()
--
spine.run("torch_alone.py")
started = "python torch_alone.py"
"""


@pytest.mark.parametrize("scripts, whole", [((), (2, 4, 6, 7, 8, 9)), (("torch_alone.py",), (2, 4, 6, 7, 8, 9, 10))])
def test_what_takes_gpus_is_found_by_what_it_calls(scripts, whole):
    """Whatever makes the pool, and with it what is asserted of what it found, and what they need."""
    cells = [ast.parse(cell) for cell in CELLS.split("--\n")]
    chosen = {number: [ast.unparse(each) for each in part] for number, part in on_devices(cells, scripts).items()}
    assert all(len(chosen[number]) == len(cells[number].body) for number in whole)
    needed = {number: part for number, part in chosen.items() if number not in whole}
    assert needed == {
        0: ["from pplab import lab", "from pplab.runtime import Pool"],
        1: ["gpt, unused = (1, 2)"],
        3: ["longest = max(found.times_ms)"],
    }


def test_nothing_takes_gpus_without_a_word():
    """In the package, who calls what takes GPUs says where, or takes a `device` itself; so a cell's calls tell."""
    assert {"Pool", "measure_layers"} <= takers()
    told = {"device", "given.device", "'cpu'", "'cuda'"}
    for path in SOURCE.rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            if named(call.func) in takers():
                where = [ast.unparse(each.value) for each in call.keywords if each.arg == "device"]
                assert where and where[0] in told, f"{path}, line {call.lineno}: {ast.unparse(call)}"
            elif named(call.func) in ("choose_transport", "usable_gpus"):
                assert path.name in ("pool.py", "torchrun.py", "devices.py"), path
    given = {each.name for each in (*cli.COMMANDS, *commands.COMMANDS) if "--device" in str([*each.flags()])}
    assert given == {"train"}
    starting = ("subprocess", "os.system")
    for path in NOTEBOOKS:
        for number, cell in enumerate(parsed(path)):  # which has no lines for a shell
            starts = any(word in ast.unparse(cell) for word in starting)
            assert not starts or number in of_notebook(path) or "--device cpu" in ast.unparse(cell), (path, number)
            renamed = [each.name for each in ast.walk(cell) if isinstance(each, ast.alias) and each.asname]
            assert takers().isdisjoint(renamed), (path, number)
