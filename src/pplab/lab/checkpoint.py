"""Checkpoints by the names of layers: what one number of ranks saved, another number can go on with.

A checkpoint is one safetensors file: every weight under the name that it has in the whole model, every tensor of the
optimizer under the name of its weight. It says nothing of stages and ranks. It doesn't hold the state of random
numbers, nor the optimizer's settings: those come from the function that makes it.

Every tensor has a checksum, of its type, shape and bytes, and these and all else that the file says of itself are under
one more, the seal. So a damaged file is refused, or loads exactly. Whoever means harm can seal a file of
their own; what is in it is of the right types then, and nothing of it is ever executed.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..runtime import Batch, Extra, Listener, Workload
from ..runtime.options import Job
from ..runtime.training import Rank
from ..runtime.workload import Places
from .clip import own_stages

_VERSION = 2
_MODEL, _OPTIMIZER = "model/", "optimizer/"

Parts = dict[str, Tensor]  # by key in the file


class CheckpointError(ValueError):
    """A file that isn't a checkpoint, is damaged, or is one of another model or optimizer."""


class NotSaved(OSError):
    """A checkpoint that couldn't be written after its run. The weights are still here: `save` writes them elsewhere."""

    def __init__(self, path: Path, why: OSError, arguments: tuple):
        self.path, self._arguments = path, arguments
        super().__init__(
            f"can't save to {path} ({why.strerror or why}). The weights aren't lost: catch this error as `error`, make "
            'room or choose another place, and call error.save("another/place.safetensors")'
        )

    def save(self, path: str | os.PathLike) -> str:
        """Write the checkpoint to another place, or to this one once there is room; returns its path."""
        return write(path, *self._arguments)


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint file holds; the tensors are read when they are asked for."""

    path: str
    step: int  # steps done: the next batch is that of this number
    model: str  # the workload in words
    optimizer: str | None  # the class of the optimizer whose state is here
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)  # of the weights, by name
    checksums: Mapping[str, str] = field(repr=False)  # by key in the file

    @classmethod
    def open(cls, path: str | os.PathLike) -> Checkpoint:
        """Read what a file holds, without its tensors.

        Raises FileNotFoundError when there is none and CheckpointError when it isn't a checkpoint, or not all of one.
        """
        from safetensors import SafetensorError, safe_open

        path = str(Path(path).resolve())
        if not os.path.isfile(path):
            raise FileNotFoundError(f"there is no checkpoint {path}: save one with lab.Save")
        try:
            with safe_open(path, "pt") as file:
                told = file.metadata() or {}
                shapes = {key: tuple(file.get_slice(key).get_shape()) for key in list(file.keys())}
            about = _unsealed(told["pplab"], told.get("seal"), shapes.keys())
        except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged, or no checkpoint of pplab ({type(error).__name__}: {error}): take an older one"
            ) from error
        shapes = {key.removeprefix(_MODEL): shape for key, shape in shapes.items() if key.startswith(_MODEL)}
        return cls(path, about["step"], about["model"], about["optimizer"], shapes, about["checksums"])

    def read(self, keys: Iterable[str]) -> Parts:
        """Tensors by their keys in the file. Raises CheckpointError when one isn't what was written."""
        from safetensors import SafetensorError, safe_open

        found = {}
        try:
            with safe_open(self.path, "pt") as file:
                for key in keys:
                    found[key] = file.get_tensor(key)
                    if _checksum(found[key]) != self.checksums[key]:
                        raise CheckpointError(
                            f"{self.path} is damaged: {key} isn't what was written: take an older checkpoint"
                        )
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path} can't be read any more ({error}): keep it until the run is up"
            ) from error
        return found

    def check_fits(self, workload: Workload) -> None:
        """Raise CheckpointError unless the weights have the names and shapes of the workload's model."""
        expected = {name: tuple(t.shape) for name, t in workload.build_whole().state_dict().items()}
        if expected == self.shapes:
            return
        both = expected.keys() & self.shapes.keys()
        wrong = {
            "missing": sorted(expected.keys() - both),
            "unknown": sorted(self.shapes.keys() - both),
            "of another shape": sorted(name for name in both if expected[name] != self.shapes[name]),
        }
        said = "; ".join(f"{what} {', '.join(names[:3])}" for what, names in wrong.items() if names)
        raise CheckpointError(
            f"{self.path} is a checkpoint of another model, {self.model}, and this is {workload.name} ({said}): "
            "resume with the model that it was saved with"
        )

    def load(self, module: nn.Module) -> nn.Module:
        """Give a module, or a stage, its weights; returns it."""
        parts = self.read(_MODEL + name for name in module.state_dict())
        module.load_state_dict({key.removeprefix(_MODEL): tensor for key, tensor in parts.items()})
        return module

    def load_optimizer(self, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
        """Give an optimizer the state of its parameters. `names` are those of the whole model.

        Raises CheckpointError when the state is of another kind of optimizer.
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
        loaded = {  # each its own: a tied weight can have two places on a rank, whose momenta are kept apart
            number: {what: parts[key].clone() for what, key in state[names[p]].items()}
            for number, p in enumerate(ordered)
            if names[p] in state
        }
        optimizer.load_state_dict({"state": loaded, "param_groups": optimizer.state_dict()["param_groups"]})


@dataclass(frozen=True)
class Resume(Extra):
    """Go on from a checkpoint: its weights, its optimizer's state, and the next batch, on any number of ranks."""

    path: str | os.PathLike
    name = "resumed"
    flag = {"name": "--resume", "metavar": "FILE", "help": "go on from a checkpoint, of any number of ranks"}

    def check(self, job: Job) -> Job:
        """Raises FileNotFoundError or CheckpointError where there is nothing to go on from, ValueError where the
        optimizer's state would be lost in what the run saves."""
        checkpoint = Checkpoint.open(self.path)
        checkpoint.check_fits(job.workload)
        saves = [extra.path for extra in job.extras if isinstance(extra, Save)]
        if saves and job.options.optimizer is None and checkpoint.optimizer is not None:
            raise ValueError(
                f"{checkpoint.path} holds the state of {checkpoint.optimizer}, which would be lost in {saves[0]}, "
                f"since this run has no optimizer: resume with {checkpoint.optimizer}, or don't save"
            )
        resumed = Resumed(job.workload, checkpoint)
        return replace(job, workload=resumed, first_step=checkpoint.step)

    def listen(self, rank: Rank) -> None:
        """Give this rank's optimizer its state. The stages have their weights already."""
        if rank.optimizer is not None:
            rank.job.workload.checkpoint.load_optimizer(rank.optimizer, rank.names)


@dataclass(frozen=True)
class Save(Extra):
    """Write weights and the optimizer's state after the last step. A file that is there is replaced as a whole, so it
    may be the one that the run goes on from. On several hosts all must see it."""

    path: str | os.PathLike
    name = "saved"
    flag = {"name": "--save", "metavar": "FILE", "help": "write a checkpoint after the last step"}

    def check(self, job: Job) -> Job:
        """ValueError for a place that can't be written to."""
        check_place(self.path)
        return job

    def listen(self, rank: Rank) -> Listener:
        """Collect at the end."""
        return _Saving(rank)

    def finish(self, job: Job, reports: Sequence[Saved]) -> str:
        """Write the file; returns its path. NotSaved where that fails."""
        arguments = list(reports), job.first_step + job.options.steps, job.workload.name
        try:
            return write(self.path, *arguments)
        except OSError as error:
            raise NotSaved(Path(self.path), error, arguments) from error


class _Saving(Listener):
    def __init__(self, rank: Rank):
        self.rank = rank

    def report(self) -> Saved:
        """What this rank saves of the stages that it answers for."""
        rank = self.rank
        own = own_stages(rank.context.rank, rank.job.schedule)
        return collect((rank.modules[stage] for stage in own), rank.optimizer, rank.names)


class Resumed(Workload):
    """A workload that goes on from a checkpoint: with its weights, and with the batch that comes next."""

    def __init__(self, workload: Workload, checkpoint: Checkpoint):
        self.workload, self.checkpoint = workload, checkpoint
        for name in ("name", "batch_size", "notes", "num_layers", "reduction", "overlap"):
            setattr(self, name, getattr(workload, name))

    def __getattr__(self, name: str) -> object:
        if name == "workload" or name.startswith("__"):  # not there yet: an instance is being unpickled
            raise AttributeError(name)
        return getattr(self.workload, name)

    def check(self, num_stages: int) -> None:
        """Raise ValueError when the model can't be cut into `num_stages` stages."""
        self.workload.check(num_stages)

    def tied(self, num_stages: int) -> Mapping[str, Places]:
        """The model's tied weights."""
        return self.workload.tied(num_stages)

    def weight(self, batch: Batch) -> float:
        """What the loss of a microbatch counts for."""
        return self.workload.weight(batch)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The model's loss."""
        return self.workload.loss(output, target)

    def build_stage(self, stage: int, num_stages: int) -> nn.Module:
        """One stage, with its weights from the checkpoint."""
        return self.checkpoint.load(self.workload.build_stage(stage, num_stages))

    def build_whole(self) -> nn.Module:
        """The whole model, with the weights of the checkpoint."""
        return self.checkpoint.load(self.workload.build_whole())

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from the checkpoint's."""
        return self.workload.batch(self.checkpoint.step + step)


@dataclass(frozen=True)
class Saved:
    """What a rank has to save."""

    parts: Parts
    optimizer: str | None  # its class


def collect(
    modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None, names: Mapping[nn.Parameter, str]
) -> Saved:
    """A rank's part of a checkpoint: its modules' weights and buffers, and its optimizer's state of them, on the host.

    Raises CheckpointError for a state that isn't made of tensors and numbers.
    """
    modules = list(modules)
    parts = {_MODEL + name: t for module in modules for name, t in module.state_dict().items()}
    for p in (p for module in modules for p in module.parameters() if optimizer is not None and p in optimizer.state):
        for what, value in optimizer.state[p].items():
            if value is None:
                continue
            if not isinstance(value, (Tensor, int, float)):
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} ({what}) for {names[p]}: a checkpoint "
                    "holds tensors and numbers"
                )
            parts[f"{_OPTIMIZER}{names[p]}/{what}"] = torch.as_tensor(value)
    copies = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in parts.items()}
    return Saved(copies, type(optimizer).__name__ if optimizer is not None else None)


def write(path: str | os.PathLike, saved: Iterable[Saved], step: int, model: str) -> str:
    """Write a checkpoint that is there as a whole or not at all; returns its path.

    It is written beside its place, made to reach the disk, and then renamed: who opens `path` finds the old file or the
    new one, whenever this process dies. What a process that died left is removed by the next one that saves here. A
    link stays, and the file that it leads to is replaced.
    """
    from safetensors.torch import save

    saved = list(saved)
    parts = {key: tensor for each in saved for key, tensor in each.parts.items()}
    about = {
        "version": _VERSION,
        "step": step,
        "model": model,
        "optimizer": next((each.optimizer for each in saved if each.optimizer), None),
        "checksums": {key: _checksum(tensor) for key, tensor in parts.items()},
    }
    text = json.dumps(about)
    path = Path(check_place(path))
    _sweep(path)
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(8)}.partial")
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
    """Remove what processes of this host that are gone left of this file."""
    ours = f".{path.name}.{socket.gethostname()}."  # another host's processes can't be seen from here
    for left in path.parent.glob(f"{glob.escape(ours)}*.partial"):
        number = left.name.removeprefix(ours).partition(".")[0]
        if number.isdigit() and not Path(f"/proc/{number}").exists() and Path("/proc/self").exists():
            left.unlink(missing_ok=True)


def check_place(path: str | os.PathLike) -> str:
    """The path to save to, in full; ValueError when nothing can be written there."""
    path = Path(path).resolve()
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or (path.exists() and not path.is_file()):
        raise ValueError(f"can't save to {path}: give a file's name in a folder that exists and can be written to")
    return str(path)


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _checksum(tensor: Tensor) -> str:
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _seal(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _unsealed(text: str, seal: str | None, keys: Collection[str]) -> dict:
    """What a file with tensors of these keys says of itself; ValueError where pplab wouldn't have written it so."""
    about = json.loads(text)
    if about["version"] != _VERSION:
        raise ValueError(f"version {about['version']}, and this is version {_VERSION}")
    if seal != _seal(text):
        raise ValueError("what it says of itself isn't what was written")
    step, checksums = about["step"], about["checksums"]
    right = type(step) is int and step >= 0 and isinstance(about["model"], str)
    right = right and isinstance(about["optimizer"], str | None) and isinstance(checksums, dict)
    if not right or checksums.keys() != keys:
        raise ValueError(f"step {step!r} of {about['model']!r} with {len(keys)} tensors")
    return about
