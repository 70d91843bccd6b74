"""A disk that is full, before a run and at its end: real ones, a tmpfs of two megabytes that only these programs see.

Where no tmpfs can be mounted, a limit on files' sizes (RLIMIT_FSIZE) shows what is refused before a run.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import modules
import pplab as pp
from pplab import lab
from pplab.lab import Checkpoint, Save, models
from pplab.lab.checkpoints.checkpoint import check_room, size_of
from pplab.runtime import make_job

ONE = pp.build("GPipe", num_ranks=1, num_microbatches=2)
ADAM = {"optimizer": torch.optim.AdamW}
TRAIN = "train --schedule GPipe --ranks 1 --microbatches 2 --steps 1 --warmup 0 --source sample --device cpu --layers 1"
FILLS = """
import sys
from multiprocessing import parent_process

from pplab.__main__ import main
from pplab.lab.models import _gpt


def fill(made, step, usual=_gpt.LanguageModel.batch):
    if parent_process():  # in a rank, so the run has begun
        with open("disk/filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    return usual(made, step)


_gpt.LanguageModel.batch = fill
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def with_a_disk(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run a command in a folder in which `disk` has two megabytes, which nobody else sees."""
    (folder / "disk").mkdir(exist_ok=True)
    mount = 'mount -t tmpfs -o size=2m tmpfs disk && exec "$@"'
    space = ["unshare", "--mount", *(["--user", "--map-root-user"] if os.geteuid() else []), "sh", "-c", mount, "sh"]
    if subprocess.run([*space, "true"], capture_output=True, cwd=folder).returncode:
        pytest.skip("no file system can be mounted here")
    return subprocess.run([*space, *command], capture_output=True, text=True, cwd=folder, env=os.environ | environment)


@pytest.mark.parametrize(
    "make",
    [None, torch.optim.AdamW, partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.Adagrad, lr=0.1)],
    ids=["none", "AdamW", "momentum", "Adagrad"],
)
def test_a_files_size_is_known_before_its_run(make, pools, tmp_path):
    path = tmp_path / "run.safetensors"
    workloads = models.gpt(batch_size=4, source="sample", num_layers=2), modules.workload(nn.Linear(6, 6))
    state = torch.random.get_rng_state()
    for workload in workloads:
        pools(1).train(ONE, workload, Save(path), steps=1, warmup=0, optimizer=make)
        is_small = path.stat().st_size < 100_000
        assert path.stat().st_size <= size_of(workload, make) <= path.stat().st_size * (4 if is_small else 1.01)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_model_or_an_optimizer_that_cant_be_without_bytes_is_no_reason_to_refuse(tmp_path):
    class Reads(nn.Linear):
        def __deepcopy__(self, memo: dict) -> nn.Module:
            return Reads(int(torch.tensor(3.0).item()), 3)  # which the meta device can't

    assert size_of(modules.workload(Reads(3, 3)), None) == 0
    linear = modules.workload(nn.Linear(6, 6))
    assert size_of(linear, partial(torch.optim.AdamW, fused=True)) == size_of(linear, None) > 42 * 4
    make_job(ONE, modules.workload(Reads(3, 3)), 1, [Save(tmp_path / "run")])
    assert not [*tmp_path.iterdir()]


def test_a_limit_on_files_is_met_before_the_run(tmp_path):
    """A real limit of this process, which the system keeps."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        check_room(tmp_path / "run", 99_000)
        says = r"can't save to .*run: checkpoints will take 101 kB, and there is no room for that \(File too large\)"
        with pytest.raises(ValueError, match=says):
            check_room(tmp_path / "run", 101_000)
        with pytest.raises(ValueError, match="no room for that"):
            make_job(ONE, models.gpt(batch_size=2, source="sample"), 1, [Save(tmp_path / "run")], **ADAM)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not [*tmp_path.iterdir()]


def test_a_folder_needs_room_for_all_that_it_will_hold(tmp_path, monkeypatch):
    from pplab.lab.checkpoints import saving

    asked, workload = [], modules.workload(nn.Linear(6, 6))
    monkeypatch.setattr(saving, "check_room", lambda path, size: asked.append(size // size_of(workload, None)))
    for save, steps in ((Save(tmp_path / "a", 1), 9), (Save(tmp_path / "a", 5), 9), (Save(tmp_path / "b"), 9)):
        make_job(ONE, workload, 1, [save], steps=steps)
    for number in (1, 2, 3, 4):
        (tmp_path / "a" / f"step-{number:08}.safetensors").touch()
    make_job(ONE, workload, 1, [Save(tmp_path / "a", 1)], steps=9)
    assert asked == [3, 2, 1, 1]
    monkeypatch.setenv("RANK", "1")  # torchrun's other ranks leave it to the first
    make_job(ONE, workload, 1, [Save(tmp_path / "b")])
    assert len(asked) == 4


@pytest.mark.slow
def test_the_shell_refuses_a_disk_that_is_too_small_before_it_starts(tmp_path):
    small = with_a_disk(
        [sys.executable, "-m", "pplab", *TRAIN.split(), "--width", "256", "--save", "disk/run.safetensors"], tmp_path
    )
    assert small.returncode == 1 and not small.stdout
    says = (
        r"pplab train: can't save to .*/disk/run.safetensors: checkpoints will take \d\d.* MB, and there is no room for"
    )
    assert (
        re.match(rf"{says} that \(No space left on device\): make room", small.stderr) and small.stderr.count("\n") == 1
    )


@pytest.mark.slow
def test_what_fails_at_the_end_goes_elsewhere_and_the_shell_says_where(tmp_path):
    """The place has room before the run, and a program fills it meanwhile: here, the workload in the rank."""
    script = tmp_path / "fills.py"
    script.write_text(FILLS)
    command = [sys.executable, str(script), *TRAIN.split(), "--width", "64", "--save", "disk/run.safetensors"]
    done = with_a_disk(command, tmp_path)
    saved = tmp_path / "run.safetensors"
    assert f"can't save to {tmp_path}/disk/run.safetensors (No space left on device)" in done.stderr
    assert f"The checkpoint after step 1 is in {saved} instead" in done.stderr
    assert done.returncode == 1 and "loss  " in done.stdout, "the run itself went well"
    found = Checkpoint.open(saved)
    found.check()
    assert found.step == 1
    saved.write_text("somebody's")
    home = tmp_path / "home"
    home.mkdir()
    assert f"is in {home}/run.safetensors instead" in with_a_disk(command, tmp_path, HOME=str(home)).stderr
    Checkpoint.open(home / "run.safetensors").check()
    assert saved.read_text() == "somebody's"


def test_a_place_that_has_gone_and_a_run_that_was_interrupted(tmp_path, monkeypatch, pools):
    """In Python: `Run.extras` says where the checkpoint is, and so does the warning."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    save = Save(tmp_path / "gone" / "run.safetensors")

    def leave(usual=Save.finish):
        def finish(self, job, reports):
            (tmp_path / "gone").rmdir()
            return usual(self, job, reports)

        return finish

    monkeypatch.setattr(Save, "finish", leave())
    with pytest.warns(UserWarning, match="can't save to .*gone.* is in .* instead"):
        run = pools(1).train(ONE, modules.workload(nn.Linear(6, 6)), save, steps=1)
    assert run.extras["saved"] == vars(save)["found_at"] == str(tmp_path / "run.safetensors")
    resumed = pools(1).train(ONE, modules.workload(nn.Linear(6, 6)), lab.Resume(run), steps=1)
    assert resumed.job.first_step == 1
