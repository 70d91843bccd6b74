"""The runtime's CUDA branches on GPUs that tests/fake_gpus plays: what a GPU would refuse shows at every commit."""

from __future__ import annotations

import ast
import re
import weakref
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import mutate
import pytest
import torch
import torch.distributed as dist
from torch import nn

import modules
import pplab as pp
import rooms
from conftest import ROOT, on_fake_gpus
from pplab import lab
from pplab.runtime import Batch, Pool, RankContext, devices
from pplab.runtime.process_groups import GroupComm

FAKE = ROOT / "tests" / "fake_gpus"
FILES = [*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]


def names_asked(path: Path) -> set[str]:
    """What a file asks of `cuda`, the module."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if "cuda" in (getattr(node.value, "id", ""), getattr(node.value, "attr", ""))}


def test_what_is_asked_of_cuda_is_played():
    asked = set().union(*map(names_asked, FILES))
    assert {"synchronize", "Event", "device_count"} <= asked
    played = (FAKE / "sitecustomize.py").read_text()
    asked -= {"matmul", "cuda", "_sleep"}  # of torch.backends and torch.version; and without it nothing is assumed
    assert {name for name in asked if not re.search(rf'"{name}":|class {name}\b|cuda\.{name}\b', played)} == set()


def test_one_file_knows_cuda_and_nccl():
    door = ROOT / "src" / "pplab" / "runtime" / "gpu.py"
    assert "from torch import cuda" in door.read_text()
    known = re.compile(r"torch\.cuda\b|ProcessGroupNCCL|from torch import (.*, )?cuda\b|import torch\.cuda")
    text_alone = [
        "torch_program.py",
        "modules.py",
        "megatron.py",
    ]  # what stands in a program that is written, and a stand-in's name
    found = [path.name for path in FILES if path != door and known.search(path.read_text())]
    assert sorted(found) == sorted(text_alone)


@pytest.mark.slow
@pytest.mark.long
def test_the_tests_for_gpus_pass():
    """Some of those that `make gpu` runs, by NCCL. On one GPU, shared, test_gpu_box.py runs all of it, and
    tests/course/test_notebooks_on_gpus.py what chapters train on one, two and four."""
    some = "2-turns and (equals_one and (1F1B-b or DualPipe-f) or profile)"
    done = on_fake_gpus(["-m", "pytest", "-q", "tests/running/test_gpu.py", "-k", some], 2)
    assert done.returncode == 0 and re.search(r"\d+ passed", done.stdout), done.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.long
def test_extras_and_probes_run_on_gpus_of_their_own():
    """At every commit tests/lab/forms/test_results.py runs what `make gpu` measures on GPUs that are played."""
    done = on_fake_gpus([str(FAKE / "drill.py")], 4)
    assert done.returncode == 0 and "Link(" in done.stdout and "the drill is done" in done.stdout, done.stderr[-4000:]


ON_ONE_GPU = """
import pplab as pp
import modules
import torch
from pplab import lab
from pplab.lab import models
from pplab.runtime import Pool, RankError

def messages(pool, s):
    gpt = models.gpt(batch_size=8, num_layers=4, width=16, num_heads=2, context=8, source="sample")
    run = pool.train(s, gpt, lab.Meter(), check_gradients=True, autocast=torch.bfloat16)
    assert run.machine.transport == "shared" and run.gradients.equal, run
    assert run.held.peak_bytes == run.predicted_peak_bytes

if __name__ == "__main__":
    with Pool(2, timeout_s=60) as pool:
        one_f_one_b = pp.build("1F1B", num_ranks=2, num_microbatches=4)
        gpt = models.gpt(batch_size=4, num_layers=2, vocabulary=4096, context=64, source="sample")
        for limit in (32e6, 110e6):
            try:
                run = pool.train(one_f_one_b, gpt, lab.Budget(limit), steps=1)
                print("fits", *run.held.allocated_bytes)
            except RankError as error:
                print(str(error).splitlines()[0])
        for s in (one_f_one_b, pp.build("ZBVZeroBubble", num_ranks=2, num_microbatches=4)):
            messages(pool, s)
        for made, left, late in pool.run(modules.pinned):
            assert made >= 4 and left == late == 0, (made, left, late)
        print("messages are right")
    print("layers", *lab.measure_layers(gpt, 2, steps=3).times_ms)
"""


@pytest.fixture(scope="module")
def on_one_gpu(tmp_path_factory) -> list[str]:
    """What the program above prints on a GPU that two ranks share."""
    program = tmp_path_factory.mktemp("program") / "program.py"
    program.write_text(ON_ONE_GPU)
    done = on_fake_gpus([str(program)], 1)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_messages_between_ranks_of_one_gpu_are_in_pinned_memory_for_as_long_as_it_is_mapped(on_one_gpu):
    assert on_one_gpu[2] == "messages are right"


@pytest.mark.slow
def test_a_budget_below_the_workspace_of_a_product_is_refused(on_one_gpu):
    """As by an H100, where these 32 MB are too few for any product. Two threads multiply: autograd has its own."""
    refused, fits = on_one_gpu[:2]
    assert re.match(r"rank [01] failed at 0F0: OutOfMemoryError: rank [01] holds .* the budget is 32 MB", refused)
    assert all(2 * 33_554_432 < int(each) for each in fits.removeprefix("fits ").split())


@pytest.mark.slow
def test_a_layer_of_many_small_kernels_takes_longer_than_a_head_of_few_large_ones(on_one_gpu):
    """As on a GPU, where microbatches this small are bound by launches; on a CPU the head is the slowest."""
    _, *layers, head = map(float, on_one_gpu[3].removeprefix("layers ").split())
    assert head < max(layers), (layers, head)


def test_memory_is_handed_out_in_segments_of_the_caching_allocator(monkeypatch):
    """c10/core/AllocatorConfig.h: pieces of 512 bytes, in segments of 2 MiB up to 1 MiB, of 20 MiB below 10 MiB."""
    monkeypatch.syspath_prepend(FAKE)
    import kernels

    memory = kernels.Memory()
    one, other = memory.take(1), memory.take(kernels.MIB)
    assert (memory.allocated, memory.reserved) == (512 + kernels.MIB, 2 * kernels.MIB)
    large = memory.take(kernels.MIB + 1)
    assert memory.reserved == 22 * kernels.MIB
    memory.take(19 * kernels.MIB)
    assert memory.reserved == 42 * kernels.MIB  # of the 20 are fewer free
    for each in (one, other, large):
        memory.give_back(*each)
    assert (memory.allocated, memory.reserved) == (19 * kernels.MIB, 42 * kernels.MIB)
    memory.fraction = 52 * kernels.MIB / kernels.TOTAL
    memory.take(29 * kernels.MIB)  # for which the 2 and the first 20 are given back
    assert memory.reserved == memory.most_reserved == 50 * kernels.MIB
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"Tried to allocate 20\.00 MiB"):
        memory.take(2 * kernels.MIB)


def test_a_machine_that_pins_no_memory_is_played(monkeypatch):
    monkeypatch.syspath_prepend(FAKE)
    import pinned

    monkeypatch.setenv("CUDA_FAKE_PIN_ERROR", "801")
    with pytest.raises(RuntimeError, match="CUDA error 801"):
        pinned.check(pinned.cudaHostRegister(4096, 4096, 0))


UNPINNED = """
import pplab as pp
import modules
from pplab.lab import models
from pplab.runtime import Pool

if __name__ == "__main__":
    gpt = models.gpt(batch_size=8, num_layers=4, width=16, num_heads=2, context=8, source="sample")
    with Pool(2, timeout_s=60) as pool:
        pool.run(modules.refuse_pinning)
        run = pool.train(pp.build("1F1B", num_ranks=2, num_microbatches=4), gpt, check_gradients=True)
        assert run.gradients.equal and run.machine.transport == "shared", run
        (said,) = [note for note in run.notes if "doesn't pin" in note]
        assert "CUDA error 801" in said, said
"""


@pytest.mark.slow
def test_a_system_that_pins_nothing_costs_time_alone(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(UNPINNED)
    done = on_fake_gpus([str(program)], 1)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


RESERVED = """
import pplab as pp
import rooms
from pplab.lab import models
from pplab.runtime import Pool

if __name__ == "__main__":
    gpt = models.gpt(batch_size=8, num_layers=4, width=16, num_heads=2, context=8, source="sample")
    with Pool(2, timeout_s=60) as pool:
        run = pool.train(pp.build("GPipe", num_ranks=2, num_microbatches=4), gpt, rooms.Sent(), steps=2)
    assert run.machine.transport == "nccl" and run.extras["sent"] == [[4, 4, 0, 0]] * 2, run.extras
"""


@pytest.mark.slow
def test_the_passes_that_make_room_keep_what_they_send(tmp_path):
    """Both of them, until the flush; NCCL's own passes need nothing of it."""
    program = tmp_path / "program.py"
    program.write_text(RESERVED)
    done = on_fake_gpus([str(program)], 2)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.parametrize("reserves", [False, True])
def test_room_is_kept_where_the_message_was_made(monkeypatch, reserves):
    """And not for its copy in the host's memory, which goes once it has left."""
    context = RankContext(0, 2, torch.device("cpu"), "gloo", timedelta(seconds=9), dist.HashStore())
    comm = GroupComm(context, {(stage, m): stage for stage in range(2) for m in range(3)}, "run")
    comm.reserves = reserves
    comm.expect([Batch((torch.zeros(2, 6),), torch.zeros(2, 6))] * 3)
    copies, gone = [], SimpleNamespace(is_completed=lambda: True, wait=lambda: True)
    monkeypatch.setattr(dist, "isend", lambda tensor, *more, **options: copies.append(weakref.ref(tensor)) or gone)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self.clone())  # as from a GPU
    made = []
    for m in range(3):
        message = torch.ones(2, 6)
        comm.send(pp.parse(f"0SEND_F{m}"), (message,))
        made.append(weakref.ref(message))
        del message
    assert [each() is not None for each in made] == [reserves] * 3
    assert [each() is not None for each in copies] == [False, False, True]
    comm.flush()
    assert not any(each() is not None for each in made + copies)


@pytest.mark.slow
def test_ranks_have_the_settings_of_now(monkeypatch):
    """And not those with which the fork server was started."""
    with Pool(2, device="cpu") as pool:
        assert pool.run(modules.setting, "NCCL_DEBUG") == [None, None]
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    with Pool(2, device="cpu") as pool:
        assert pool.run(modules.setting, "NCCL_DEBUG") == ["INFO", "INFO"]


def test_a_gpu_that_torch_cannot_use_is_told_of(monkeypatch, tmp_path):
    (tmp_path / "version").write_text("535.104.05\n")
    monkeypatch.setattr(devices, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    why = f"torch {torch.__version__} can't use"
    assert any(why in note and "driver 535.104.05" in note and "README" in note for note in Pool(2).notes)
    with pytest.raises(ValueError, match=rf"{re.escape(why)} the GPU that is there with driver 535.104.05"):
        Pool(2, device="cuda")
    assert not any("driver" in note for note in Pool(2, device="cpu").notes)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # whoever hides GPUs knows
    assert not any("driver" in note for note in Pool(2).notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, most", [("1F1B", (1, 5, 4, 2)), ("GPipe", (2, 10, 10, 8)), ("Interleaved1F1B", (6, 11, 9, 7))]
)
def test_receives_take_no_more_room_than_the_rows_ask_for(name, most):
    """On the CPU, by gloo: over NCCL the same code makes the room, where a GPU's allocator gives it."""
    schedule = pp.build(name, num_ranks=4, num_microbatches=8)
    assert rooms.predicted(schedule) == most
    layers = [nn.Linear(6, 6) for _ in range(schedule.num_stages)]
    with Pool(4, device="cpu", transport="gloo") as pool:
        run = pool.train(schedule, modules.workload(*layers), rooms.Rooms(), lab.Meter(), steps=2)
    assert run.extras["rooms"] == most and run.held.peak_bytes == run.predicted_peak_bytes


@pytest.mark.parametrize("blocking, ends", [("1", False), ("0", True), ("", True)])
def test_nccl_is_refused_where_all_hosts_wait(monkeypatch, blocking, ends):
    monkeypatch.setattr(devices, "usable_gpus", lambda device: (4, ""))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    assert devices.choose_transport(4, "auto", "shared")[1] == "shared"
    if ends:
        assert devices.choose_transport(4, "auto", "auto")[1] == "nccl"
    else:
        with pytest.raises(ValueError, match='CUDA_LAUNCH_BLOCKING=1 makes every host wait.*transport="shared"'):
            devices.choose_transport(4, "auto", "auto")


def test_every_wait_and_choice_is_in_the_table_and_noticed():
    """A call that is new, or has changed: `python tools/mutate.py` tries all and writes the table."""
    found = [each.name for each in mutate.find()]
    lines = [line[2:-2].rpartition(" | ") for line in mutate.TABLE.read_text().splitlines()[4:]]
    assert len(found) == len(set(found)) > 50 and [name for name, _, _ in lines] == found
    assert not [name for name, _, said in lines if said == "MISSED" or not said]
    harmless = {name for name, _, said in lines if said.startswith("harmless: ")}
    assert harmless == set(mutate.HARMLESS)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("_Evaluating._evaluate | `torch.random.fork_rng", "random numbers would go on"),
        ('as text | `self.group("channel", (source', "no rank made progress"),
    ],
)
def test_a_wait_or_a_group_that_is_missing_is_noticed(where, said):
    """Two of the many that `make attack` tries: a GPU's random numbers, and messages of both directions in one
    communicator."""
    mutation = next(each for each in mutate.find() if where in each.name)
    assert said in mutate.tried(mutation)
