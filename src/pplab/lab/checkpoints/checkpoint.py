"""Checkpoints by the names of layers, so that a run can go on with a different number of ranks.

A checkpoint is one safetensors file. It has every weight under its name in the whole model, every
tensor of the optimizer under the name of its weight, and the learning rates of its next step. It
has nothing about stages and ranks. It doesn't hold the state of random numbers, nor the optimizer's
settings, which come from the function that makes the optimizer.

Every tensor has a checksum of its type, shape and bytes. These checksums and everything else in the
header are under one more, the seal. So a damaged file is refused, or loads exactly. An attacker can
seal a file of their own. Even then its contents are of the right types, and nothing in it is ever
executed.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...optional import bring
from ...runtime import Workload
from ..extras import readable_bytes
from ..forms import printable

_VERSION = 2
_MODEL, _OPTIMIZER = "model/", "optimizer/"

Parts = dict[str, Tensor]  # by key in the file


class CheckpointError(ValueError):
    """A file that isn't a checkpoint, is damaged, or belongs to a different model or optimizer."""

    def __init__(self, said: str):
        super().__init__(printable(said))  # it may have names and words of the file


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds. Its tensors are read when they are asked for."""

    path: str
    step: int  # steps done: the next batch is that of this number
    model: str  # the workload in words
    optimizer: str | None  # the class of the optimizer whose state is here
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)  # of the weights, by name
    checksums: Mapping[str, str] = field(repr=False)  # by key in the file
    # of learning, in the step that comes next; one for each group that differs
    rates: tuple[float, ...] = ()

    @classmethod
    def open(cls, path: str | os.PathLike) -> Checkpoint:
        """Read what a file holds, without its tensors.

        Raises FileNotFoundError when there is none, and CheckpointError when it isn't a checkpoint
        or is incomplete.
        """
        bring("safetensors")
        from safetensors import SafetensorError, safe_open

        path = str(Path(path).resolve())
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"there is no checkpoint {path}: save one with lab.Save, or pplab train --save FILE"
            )
        try:
            with safe_open(path, "pt") as file:
                told = file.metadata() or {}
                shapes = {key: tuple(file.get_slice(key).get_shape()) for key in list(file.keys())}
            about = _unsealed(told["pplab"], told.get("seal"), shapes.keys())
        except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged, or no checkpoint of pplab ({type(error).__name__}: {error}): "
                "take an older one"
            ) from error
        shapes = {
            key.removeprefix(_MODEL): shape
            for key, shape in shapes.items()
            if key.startswith(_MODEL)
        }
        step, model, optimizer = (
            about["step"],
            printable(about["model"]),
            printable(about["optimizer"] or "") or None,
        )
        return cls(
            path, step, model, optimizer, shapes, about["checksums"], tuple(about.get("rates", ()))
        )

    def read(self, keys: Iterable[str]) -> Parts:
        """Read tensors by their keys in the file. Raises CheckpointError when one isn't what was
        written.
        """
        return dict(self._read(keys))

    def check(self) -> None:
        """Read the whole file, a tensor at a time. Raises CheckpointError unless everything is what
        was written.
        """
        for _ in self._read(self.checksums):
            pass

    def _read(self, keys: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        bring("safetensors")
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, "pt") as file:
                for key in keys:
                    tensor = file.get_tensor(key)
                    if _checksum(tensor) != self.checksums[key]:
                        raise CheckpointError(
                            f"{self.path} is damaged: {key} isn't what was written: take an older "
                            "checkpoint"
                        )
                    yield key, tensor
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path} doesn't give it ({error}): keep the file until the run is up, and "
                "load it into a module whose weights have the names of the model that was trained, "
                "such as nn.Sequential(*stages)"
            ) from error

    def check_fits(self, workload: Workload) -> None:
        """Raise CheckpointError unless the weights have the names and shapes of the workload's
        model.
        """
        build = getattr(workload, "skeleton", workload.build_whole)  # names and shapes will do
        expected = {name: tuple(t.shape) for name, t in build().state_dict().items()}
        if expected == self.shapes:
            return
        both = expected.keys() & self.shapes.keys()
        wrong = {
            "missing": sorted(expected.keys() - both),
            "unknown": sorted(self.shapes.keys() - both),
            "of another shape": sorted(
                name for name in both if expected[name] != self.shapes[name]
            ),
        }
        said = "; ".join(f"{what} {', '.join(names[:3])}" for what, names in wrong.items() if names)
        raise CheckpointError(
            f"{self.path} is a checkpoint of another model, {self.model}, and this is "
            f"{workload.name} ({said}): resume with the model that it was saved with"
        )

    def load(self, module: nn.Module) -> nn.Module:
        """Give a module, or a stage, its weights, and return it."""
        parts = self.read(_MODEL + name for name in module.state_dict())
        module.load_state_dict({key.removeprefix(_MODEL): tensor for key, tensor in parts.items()})
        return module

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
    ) -> None:
        """Give an optimizer the state of its parameters, whose `names` are those in the whole
        model.

        Raises CheckpointError when the state belongs to a different kind of optimizer.
        """
        kind = type(optimizer).__name__
        if self.optimizer is not None and self.optimizer != kind:
            raise CheckpointError(
                f"{self.path} holds the state of {self.optimizer}, and this run makes {kind}: "
                "resume with the optimizer that it was saved with"
            )
        state: dict[str, dict[str, Tensor]] = {}
        for key in (key for key in self.checksums if key.startswith(_OPTIMIZER)):
            name, _, what = key.removeprefix(_OPTIMIZER).rpartition("/")
            state.setdefault(name, {})[what] = key
        ordered = _parameters(optimizer)
        keys = [key for p in ordered for key in state.get(names[p], {}).values()]
        parts = self.read(keys)
        # each its own: a tied weight can have two places on a rank, whose momenta are kept apart
        loaded = {
            number: {what: parts[key].clone() for what, key in state[names[p]].items()}
            for number, p in enumerate(ordered)
            if names[p] in state
        }
        optimizer.load_state_dict(
            {"state": loaded, "param_groups": optimizer.state_dict()["param_groups"]}
        )


@dataclass(frozen=True)
class Saved:
    """What a rank has to save."""

    parts: Parts
    optimizer: str | None  # its class
    rates: tuple[float, ...] = ()  # of learning


def collect(
    modules: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    names: Mapping[nn.Parameter, str],
) -> Saved:
    """A rank's part of a checkpoint: the weights and buffers of its modules, and its optimizer's
    state for them, on the host.

    Raises CheckpointError for a state that has something other than tensors and numbers.
    """
    modules = list(modules)
    parts = {_MODEL + name: t for module in modules for name, t in module.state_dict().items()}
    for p in (
        p
        for module in modules
        for p in module.parameters()
        if optimizer is not None and p in optimizer.state
    ):
        for what, value in optimizer.state[p].items():
            if value is None:
                continue
            if not isinstance(value, (Tensor, int, float)):
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} ({what}) for "
                    f"{names[p]}: a checkpoint holds tensors and numbers"
                )
            parts[f"{_OPTIMIZER}{names[p]}/{what}"] = torch.as_tensor(value)
    copies = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in parts.items()}
    return Saved(
        copies, type(optimizer).__name__ if optimizer is not None else None, rates(optimizer)
    )


def rates(optimizer: torch.optim.Optimizer | None) -> tuple[float, ...]:
    """The learning rates of an optimizer's groups, each once."""
    groups = optimizer.param_groups if optimizer is not None else ()
    return tuple(sorted({float(group["lr"]) for group in groups if "lr" in group}))


def write(path: str | os.PathLike, saved: Iterable[Saved], step: int, model: str) -> str:
    """Write a checkpoint completely or not at all, and return its path.

    It is written next to its place, forced to the disk, and then renamed. So `path` is always the
    old file or the new one, whenever this process dies. If a process died and left a part, the next
    one that saves here removes it. A link stays, and the file that it leads to is replaced.
    """
    save = bring("safetensors.torch").save
    saved = list(saved)
    parts = {key: tensor for each in saved for key, tensor in each.parts.items()}
    about = {
        "version": _VERSION,
        "step": step,
        "model": model,
        "optimizer": next((each.optimizer for each in saved if each.optimizer), None),
        "rates": sorted({rate for each in saved for rate in each.rates}),
        "checksums": {key: _checksum(tensor) for key, tensor in parts.items()},
    }
    text = json.dumps(about)
    path = Path(check_place(path))
    _sweep(path)
    partial = path.with_name(
        f".{path.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(8)}.partial"
    )
    try:
        # A name that nobody can foresee, which is there for nobody else, and no link.
        end = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with open(end, "wb") as file:
            file.write(save(parts, {"pplab": text, "seal": _seal(text)}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, must reach the disk
    finally:
        os.close(folder)
    return str(path)


def _sweep(path: Path) -> None:
    """Remove the parts of this file that processes of this host have left."""
    # another host's processes can't be seen from here
    ours = f".{path.name}.{socket.gethostname()}."
    for left in path.parent.glob(f"{glob.escape(ours)}*.partial"):
        number = left.name.removeprefix(ours).partition(".")[0]
        if (
            number.isdigit()
            and not Path(f"/proc/{number}").exists()
            and Path("/proc/self").exists()
        ):
            left.unlink(missing_ok=True)


def check_place(path: str | os.PathLike) -> str:
    """The full path to save to. Raises ValueError when nothing can be written there."""
    path = Path(path).resolve()
    if (
        not path.parent.is_dir()
        or not os.access(path.parent, os.W_OK)
        or (path.exists() and not path.is_file())
    ):
        raise ValueError(
            f"can't save to {path}: give a file's name in a folder that exists and can be written "
            "to"
        )
    return str(path)


def size_of(workload: Workload, make: Callable[[Any], torch.optim.Optimizer] | None) -> int:
    """About how many bytes a checkpoint will have, rather too many than too few. The model is built
    and the optimizer takes a step on the meta device, which takes no memory. The result is 0 for a
    model that can't be built there, and the weights alone for an optimizer that can't.
    """
    tensors: dict[str, Tensor] = {}
    with suppress(Exception):
        with torch.device("meta"), torch.random.fork_rng([]):
            model = getattr(workload, "skeleton", workload.build_whole)()
        tensors |= {_MODEL + name: tensor for name, tensor in model.state_dict().items()}
        named = [(name, _on_meta(p)) for name, p in model.named_parameters() if p.requires_grad]
        if make and named:
            optimizer = make(named)
            for _, p in named:
                p.grad = torch.empty_like(p)
            optimizer.step()
            for name, p in named:
                state = {
                    what: value for what, value in optimizer.state[p].items() if value is not None
                }
                tensors |= {
                    f"{_OPTIMIZER}{name}/{what}": torch.as_tensor(value)
                    for what, value in state.items()
                }
    # and a checksum and a shape
    return sum(tensor.nbytes + 4 * len(key) + 320 for key, tensor in tensors.items())


def _on_meta(p: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(p, device="meta"))


def check_room(path: str | os.PathLike, size: int) -> None:
    """Raise ValueError unless there is room for so many bytes at the path. A file of that size is
    made and removed to find out.
    """
    trial = Path(path).with_name(f".{secrets.token_hex(8)}.trial")
    try:
        with open(trial, "xb") as file:
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
    except OSError as error:
        raise ValueError(
            f"can't save to {path}: checkpoints will take {readable_bytes(size)}, and there is no "
            "room for that ("
            f"{error.strerror}): make room, or choose another place"
        ) from None
    finally:
        trial.unlink(missing_ok=True)


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _checksum(tensor: Tensor) -> str:
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _seal(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _unsealed(text: str, seal: str | None, keys: Collection[str]) -> dict:
    """The header of a file with tensors of these keys. Raises ValueError for what pplab wouldn't
    have written.
    """
    about = json.loads(text)
    if about["version"] != _VERSION:
        raise ValueError(f"version {about['version']}, and this is version {_VERSION}")
    if seal != _seal(text):
        raise ValueError("what it says of itself isn't what was written")
    step, checksums = about["step"], about["checksums"]
    right = type(step) is int and step >= 0 and isinstance(about["model"], str)
    right = right and isinstance(about["optimizer"], str | None) and isinstance(checksums, dict)
    right = right and all(type(rate) is float for rate in about.get("rates", ()))
    if not right or checksums.keys() != keys:
        raise ValueError(f"step {step!r} of {about['model']!r} with {len(keys)} tensors")
    return about
