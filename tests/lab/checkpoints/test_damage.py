"""Damaged checkpoints: each is refused with the same error, or loads exactly."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import modules
import pplab as pp
from pplab.lab import Checkpoint, CheckpointError, NotSaved, Save
from pplab.lab.checkpoints.checkpoint import collect, write
from pplab.lab.models import Modules
from pplab.runtime import Pool, Workload

pytestmark = pytest.mark.slow

SEED = 1


def workload() -> Workload:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 6)]
    return Modules(layers, modules.batch(), nn.functional.mse_loss)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A whole checkpoint."""
    return saved(tmp_path_factory.mktemp("damage") / "run.safetensors")


def saved(path: Path) -> Path:
    """A checkpoint after three steps of AdamW, with whole numbers among its buffers."""
    model = workload().build_whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = workload().batch(0)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(*batch.inputs), batch.target).backward()
        optimizer.step()
    write(path, [collect([model], optimizer, {p: name for name, p in model.named_parameters()})], 3, "modules")
    return path


def loaded(path: Path) -> dict[str, Tensor]:
    """All that a resumed run would take from a file."""
    found = Checkpoint.open(path)
    found.check_fits(workload())
    model = found.load(workload().build_whole())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found.load_optimizer(optimizer, {p: name for name, p in model.named_parameters()})
    state = optimizer.state_dict()["state"]
    tensors = {f"{number} {what}": torch.as_tensor(t) for number, held in state.items() for what, t in held.items()}
    return {"step": torch.tensor(found.step), **model.state_dict(), **tensors}


def damages(data: bytes, count: int, seed: int) -> Iterator[tuple[str, str, bytes]]:
    """`count` damages of each kind, and every bit of the header if that is more: kind, place, and what is left."""
    draw = random.Random(seed)
    (header,) = struct.unpack("<Q", data[:8])
    places = [(at, bit) for at in range(8 + header) for bit in range(8)]
    for at, bit in places if count > 1000 else draw.sample(places, count):
        yield "a flipped bit of the header", f"{at}.{bit}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    for _ in range(count):
        at, bit, new = draw.randrange(len(data)), draw.randrange(8), draw.randrange(256)
        yield "a flipped bit", f"{at}.{bit}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        yield "another byte", f"{at} is {new}", data[:at] + bytes([new]) + data[at + 1 :]
        at, new = draw.randrange(8, 8 + header), draw.choice(b"FIUB0123456789")
        yield "another letter or digit in the header", f"{at} is {new}", data[:at] + bytes([new]) + data[at + 1 :]
        end = draw.randrange(len(data))
        yield "cut off", f"at {end}", data[:end]
        yield "bytes at the end", "", data + draw.randbytes(draw.randrange(1, 200))
        size, source = draw.randrange(1, 64), draw.randrange(len(data))
        moved = data[:at] + data[source : source + size] + data[at + size :]
        yield "bytes from elsewhere", f"{size} bytes of {source} at {at}", moved


def attack(tries: int, seed: int) -> list[dict]:
    """So many damages of each kind. Wrong is a file that loads different from what was saved, or another error."""
    rows: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as place:
        path = saved(Path(place) / "run.safetensors")
        exact, data = loaded(path), path.read_bytes()
        for what, where, damaged in damages(data, tries, seed):
            row = rows.setdefault(
                what, {"what": what, "tried": 0, "wrong": 0, "seen": "it loads exactly", "seconds": 0.0}
            )
            path.write_bytes(damaged)
            started = time.monotonic()
            wrong = not_as_saved(path, exact, row)
            row["seconds"] = round(max(row["seconds"], time.monotonic() - started), 2)
            row["tried"] += 1
            if wrong:
                row |= {"wrong": row["wrong"] + 1, "seen": f"{where}: {wrong}"}
    return list(rows.values())


def not_as_saved(path: Path, exact: dict[str, Tensor], row: dict) -> str:
    """What is wrong with how a file loads; nothing if it is refused, as it should be, or loads exactly."""
    try:
        found = loaded(path)
    except CheckpointError as error:
        row["seen"] = row["seen"] if row["wrong"] else f"CheckpointError: {error}".replace(str(path), path.name)
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if found.keys() != exact.keys():
        return "other weights"
    other = [key for key, t in exact.items() if found[key].dtype != t.dtype or not torch.equal(found[key], t)]
    return f"{other[0]} is another" if other else ""


def test_damaged_files_are_refused_or_load_exactly():
    for row in attack(tries=150, seed=SEED):
        assert row["tried"] >= 150 and row["wrong"] == 0, row


@pytest.mark.parametrize(
    "changes",
    [{"step": "3"}, {"step": -1}, {"step": None}, {"step": float("nan")}, {"step": True}, {"checksums": []}]
    + [{"model": 3}, {"optimizer": []}, {"version": 1}, {"checksums": {}}],
    ids=str,
)
def test_a_sealed_file_with_nonsense_is_refused(whole, tmp_path, monkeypatch, changes):
    """Whoever can make a file can seal it: what is in it must be of the right types all the same."""
    from pplab.lab.checkpoints import checkpoint

    path, data = tmp_path / "sealed.safetensors", whole.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + size])
    about = json.loads(head["__metadata__"]["pplab"]) | changes
    text = json.dumps(about)
    remade = copy.deepcopy(head)
    remade["__metadata__"] = {"pplab": text, "seal": checkpoint._seal(text)}
    packed = json.dumps(remade).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + data[8 + size :])
    with pytest.raises(CheckpointError, match="is damaged, or no checkpoint of pplab"):
        loaded(path)


def test_a_deeply_nested_text_is_refused(whole, tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "deep.safetensors"
    save_file({"weight": torch.ones(2)}, path, {"pplab": "[" * 100_000, "seal": ""})
    with pytest.raises(CheckpointError, match="is damaged, or no checkpoint of pplab"):
        Checkpoint.open(path)


def some() -> list:
    """What ranks have to save."""
    return [collect([nn.Linear(2, 2)], None, {})]


def test_a_link_planted_where_a_save_writes_is_not_followed(tmp_path, monkeypatch):
    from pplab.lab.checkpoints import checkpoint

    victim, path = tmp_path / "victim", tmp_path / "run.safetensors"
    victim.write_text("precious")
    monkeypatch.setattr(checkpoint.secrets, "token_hex", lambda size: "known")
    planted = tmp_path / f".run.safetensors.{socket.gethostname()}.{os.getpid()}.known.partial"
    planted.symlink_to(victim)
    with pytest.raises(FileExistsError):
        write(path, some(), 1, "a model")
    assert victim.read_text() == "precious" and not path.exists()


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    target, link = tmp_path / "disk" / "run.safetensors", tmp_path / "latest.safetensors"
    write(target, some(), 1, "a model")
    link.symlink_to(target)
    assert write(link, some(), 2, "a model") == str(target)
    assert link.is_symlink() and Checkpoint.open(target).step == 2
    assert [path.name for path in target.parent.iterdir()] == ["run.safetensors"]


def test_a_device_is_never_replaced():
    with pytest.raises(ValueError, match="can't save to /dev/null: give a file's name"):
        write("/dev/null", some(), 1, "a model")


def test_what_a_killed_process_left_goes_with_the_next_save(tmp_path):
    path = tmp_path / "run[1].safetensors"
    gone = subprocess.Popen(["true"])
    gone.wait()
    here = socket.gethostname()
    left = tmp_path / f".{path.name}.{here}.{gone.pid}.0123.partial"
    others = tmp_path / f".{path.name}.{here}.{os.getppid()}.0123.partial"  # of a process that lives
    elsewhere = tmp_path / f".{path.name}.another-{here}.{gone.pid}.0123.partial"  # on a disk that hosts share
    for each in (left, others, elsewhere):
        each.write_bytes(b"part of a checkpoint")
    write(path, some(), 1, "a model")
    assert {each.name for each in tmp_path.iterdir()} == {others.name, elsewhere.name, path.name}


def test_a_full_disk_leaves_the_weights_to_be_saved_elsewhere(tmp_path, monkeypatch):
    from pplab.lab.checkpoints import checkpoint

    def full(end: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "full").mkdir()
    save, schedule = Save(tmp_path / "full" / "run.safetensors"), pp.build("GPipe", num_ranks=1, num_microbatches=2)
    with Pool(1, device="cpu") as pool:
        with monkeypatch.context() as disk, pytest.raises(NotSaved, match=r"No space left.*error\.save\(") as caught:
            disk.setattr(checkpoint.os, "fsync", full)
            pool.train(schedule, Modules([nn.Linear(6, 6)], modules.batch(), nn.functional.mse_loss), save, steps=2)
    assert list((tmp_path / "full").iterdir()) == []
    place = caught.value.save(tmp_path / "elsewhere.safetensors")
    assert Checkpoint.open(place).step == 2
