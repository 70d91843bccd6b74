"""A workload from modules that you bring."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ...errors import expect, shown
from ...runtime import Batch, Places, Workload, as_tuple
from ._by_step import Batches, as_batch
from ._cutting import check_layers, layer_ranges, weights_of


class Chain(nn.Module):
    """Modules called one after the other. Each gets what the one before returned, and the part of
    the context that it takes.

    A tuple is one argument, as in nn.Sequential. But the modules in `starts` (by default all) get
    its tensors as separate arguments, as stages do.
    """

    def __init__(self, modules: Mapping[str, nn.Module], starts: Collection[str] | None = None):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.starts = frozenset(modules if starts is None else starts)
        self.takes = {name: keywords(module) for name, module in modules.items()}

    def forward(self, *x: Tensor, **context: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the chain."""
        value = x[0] if len(x) == 1 else x
        # a module that stands here twice is called twice
        for name, module in self._modules.items():
            takes = self.takes[name]
            own = {key: tensor for key, tensor in context.items() if takes is None or key in takes}
            value = module(*as_tuple(value), **own) if name in self.starts else module(value, **own)
        return value[0] if isinstance(value, tuple) and len(value) == 1 else value


class Modules(Workload):
    """A workload from modules that you bring, with batches and a loss.

    `model` is an nn.Sequential or a list of modules, one per stage. A Sequential is cut by its
    children into as many stages as a schedule has, evenly or by `cut`, which gives the number of
    children of each stage. Parameters have the same names as in the Sequential, whatever the cut,
    so `Checkpoint.open(path).load(model)` gives it what a run has learned. In a list they are named
    by their position in all stages, where a Sequential counts for as many as it has children. A
    weight that several modules share stays one weight.

    `batches` is one of three things: a `Batch`, the same for every step; a function that makes the
    batch of a step from its number; or a list of batches or a DataLoader that gives the same ones
    every time. The end of a list or DataLoader ends the run, unless `models.epochs(loader)` starts
    it again. A batch may also be a pair (inputs, target). Every module gets the entries of the
    batch's `context` that its `forward` names.

    `reduction` tells whether the loss is the "mean" or the "sum" over the samples. If a mean isn't
    over the samples, `weight(batch)` returns how many of `batch.target` it is over. `overlap(first,
    second)` may run the two halves of an overlap at once. It gets two functions without arguments,
    and returns the results of both.

    The modules are sent to the ranks with their weights. Their classes, the loss and other
    functions must be importable there, so they can't be defined in a notebook.
    """

    def __init__(
        self,
        model: nn.Sequential | Sequence[nn.Module],
        batches: Batch | Callable[[int], Batch] | Iterable[Batch],
        loss: Callable[[Tensor, Tensor], Tensor],
        reduction: str = "mean",
        overlap: Callable | None = None,
        *,
        cut: Sequence[int] | None = None,
        weight: Callable[[Batch], float] | None = None,
        name: str = "modules",
    ):
        if reduction not in ("mean", "sum"):
            raise ValueError(
                f'reduction must be "mean" or "sum", as the loss does it, got {reduction!r}'
            )
        self.stages = None if _is_plain(model) else _listed(model)
        self.children, self.starts = (
            (dict(model._modules), frozenset()) if self.stages is None else _flat(self.stages)
        )
        for child, module in self.children.items():
            if any(map(is_parametrized, module.modules())):
                raise ValueError(
                    f"module {child} has parametrizations (torch.nn.utils.parametrizations), with "
                    "which torch doesn't send a module to another process: write a Workload, whose "
                    "build_stage makes it there"
                )
        self.num_layers = len(self.children) if self.stages is None else None
        self.cut = None if cut is None else tuple(cut)
        if cut is not None:
            self.check(len(self.cut))
        expect(Callable, loss=loss)
        self.batches, self._loss, self._weight = Batches(batches), loss, weight
        self.num_batches, self.notes = self.batches.count, self.batches.notes
        self.reduction, self.overlap, self.name = reduction, overlap, name
        batch = Modules.batch(self, 0)  # a subclass may not be ready to make its own
        shapes = [tuple(x.shape) for x in batch.tensors]
        if len({shape[:1] for shape in shapes}) > 1 or () in shapes:
            raise ValueError(
                f"the first dimension of a batch's tensors must be its samples, got {shapes}"
            )
        self.batch_size = len(batch.target)
        self.batches.restart()

    def check(self, num_stages: int) -> None:
        """Raise ValueError unless there is one module per stage, or the model can be cut into so
        many stages.
        """
        if self.stages is None:
            check_layers(self.num_layers, num_stages, self.cut)
        elif num_stages != len(self.stages):
            raise ValueError(
                f"the schedule has {num_stages} stages, and {len(self.stages)} modules were given: "
                "give one module per stage, or one nn.Sequential, which is cut into as many as a "
                "schedule has"
            )
        elif self.cut:
            raise ValueError(
                "cut says how to cut an nn.Sequential, and stages were given: leave it out"
            )

    def stage_bytes(self, num_stages: int) -> tuple[int, ...]:
        """Bytes of every stage's weights."""
        self.check(num_stages)
        return tuple(map(weights_of, self._stages(num_stages)))

    def build_stage(self, stage: int, num_stages: int) -> nn.Module:
        """The module of one stage, with the names of its parts in the whole model."""
        return copy.deepcopy(self._stages(num_stages)[stage])

    def build_whole(self) -> nn.Module:
        """All modules in a row."""
        return copy.deepcopy(Chain(self.children, self.starts))

    def tied(self, num_stages: int) -> dict[str, Places]:
        """The weights that modules in several stages share."""
        places: dict[nn.Parameter, list[tuple[int, str]]] = defaultdict(list)
        for stage, module in enumerate(self._stages(num_stages)):
            for name, parameter in module.named_parameters():
                places[parameter].append((stage, name))
        return {each[0][1]: tuple(each) for each in places.values() if len(each) > 1}

    def batch(self, step: int) -> Batch:
        """The batch of a step. Raises ValueError for a context that no module takes."""
        batch = self.batches(step)
        takes = [keywords(module) for module in self.children.values()] if batch.context else []
        known = {key for each in takes for key in each or ()}
        if None not in takes and (strange := batch.context.keys() - known):
            raise ValueError(
                f"no module takes the batch's context {', '.join(sorted(strange))}: their forwards "
                "name "
                f"{', '.join(sorted(known)) or 'nothing but what comes from the module before'}"
            )
        return batch

    as_batch = staticmethod(as_batch)  # `lab.Evaluate` takes what this takes

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss that was given."""
        return self._loss(output, target)

    def weight(self, batch: Batch) -> float:
        """How much a microbatch's loss counts for."""
        return super().weight(batch) if self._weight is None else self._weight(batch)

    def _stages(self, num_stages: int) -> list[Chain]:
        names = list(self.children)
        if self.stages is None:
            ranges = [(r.start, r.stop) for r in layer_ranges(len(names), num_stages, self.cut)]
        else:
            ends = list(accumulate(len(_names(module)) for module in self.stages))
            ranges = list(zip([0, *ends], ends, strict=False))
        parts = [names[start:end] for start, end in ranges]
        return [
            Chain({name: self.children[name] for name in part}, self.starts & {*part})
            for part in parts
        ]


def keywords(module: nn.Module) -> frozenset[str] | None:
    """The keywords that a module's forward takes in addition to its first argument, or None if it
    takes any.
    """
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except ValueError:  # of a compiled one
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(
        p.name for p in parameters[1:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    ) | {p.name for p in parameters[:1] if p.kind is p.KEYWORD_ONLY}


def _listed(model: object) -> list[nn.Module]:
    """The stages in a list. Raises ValueError, which shows where a model could be cut, for anything
    else.
    """
    if (
        isinstance(model, (list, tuple, nn.ModuleList))
        and model
        and all(isinstance(x, nn.Module) for x in model)
    ):
        return list(model)
    what = (
        "Modules takes an nn.Sequential or a list of one module per stage, got "
        f"{shown(type(model).__name__)}"
    )
    if not isinstance(model, nn.Module):
        raise ValueError(what)
    if isinstance(model, nn.Sequential):
        raise ValueError(
            f"this {type(model).__name__} is empty, has hooks, or a forward of its own, which a "
            "cut would lose: put hooks on its layers, or give its parts in a list, one per stage"
        )
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    rows = [name for name, each in model.named_modules() if name and isinstance(each, lists)]
    where = f" (perhaps between the modules of {', '.join(rows)})" if rows else ""
    raise ValueError(
        f"{what}, whose forward only its author can cut{where}: give a list with a stage of what "
        "comes before the cut and one of what comes after it, or write a pplab.runtime.Workload"
    )


def _names(module: nn.Module) -> list[str]:
    """The names of a stage's parts: a plain Sequential's children, or the module itself."""
    return list(module._modules) if _is_plain(module) else [""]


def _is_plain(module: object) -> bool:
    """Whether this is a Sequential that only calls its children, so that a cut loses no hook."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return len(module) > 0 and not any(hooks)


def _flat(stages: Sequence[nn.Module]) -> tuple[dict[str, nn.Module], frozenset[str]]:
    """All parts by their names in the whole model, and which of them begin a stage."""
    parts: dict[str, nn.Module] = {}
    starts = set()
    for stage in stages:
        starts.add(str(len(parts)))
        for name in _names(stage):
            parts[str(len(parts))] = stage._modules[name] if name else stage
    return parts, frozenset(starts)
