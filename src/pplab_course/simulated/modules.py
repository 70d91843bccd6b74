"""The stand-in's `torch`: modules, losses, optimizers, and the names under which a reader's file
asks for them.

`stand_in` makes the modules that the file imports. If one lacks something, the error names it.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Iterator

from . import tensors
from .tensors import Numbers, Tensor, columns, dot, full, lacks, remembered, rows, shape_of


class Parameter(Tensor):
    """A tensor that is trained."""

    def __init__(self, tensor: Tensor):
        super().__init__(tensor.numbers, tensor.shape)
        self.requires_grad = True


class Module:
    """A piece of a model, with its parameters and hooks."""

    def __getattr__(self, name: str) -> object:
        raise lacks(f"{type(self).__name__}.{name}")

    def children(self) -> Iterator[Module]:
        return (each for each in vars(self).values() if isinstance(each, Module))

    def parameters(self) -> Iterator[Parameter]:
        for each in vars(self).values():
            if isinstance(each, Parameter):
                yield each
        for child in self.children():
            yield from child.parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def to(self, *_: object, **__: object) -> Module:
        return self

    train = eval = cpu = float = double = to

    def register_forward_hook(self, hook: Callable) -> None:
        self._hooks("after").append(hook)

    def register_full_backward_pre_hook(self, hook: Callable) -> None:
        self._hooks("back").append(hook)

    def _hooks(self, when: str) -> list[Callable]:
        return vars(self).setdefault(f"{when}_hooks", [])

    def __call__(self, *given: object, **options: object) -> object:
        now, hooks = tensors.now, vars(self)
        start = now.clock
        output = self.forward(*given, **options)
        for hook in hooks.get("after_hooks", ()):
            hook(self, given, output)
        for hook in hooks.get("back_hooks", ()):
            if output.node:
                output.node.hooks.append(lambda gradient, hook=hook: hook(self, gradient))
        now.called(self, given, output, start)
        return output


class Linear(Module):
    """x @ weight.T + bias, with weight (outputs, inputs)."""

    def __init__(self, in_features: int, out_features: int):
        self.in_features, self.out_features = in_features, out_features
        bound = 1 / math.sqrt(in_features)
        self.weight, self.bias = (
            Parameter(tensors.drawn(shape, lambda source: source.uniform(-bound, bound)))
            for shape in ((out_features, in_features), (out_features,))
        )

    def forward(self, x: Tensor) -> Tensor:
        k, n = self.in_features, self.out_features
        if x.shape[-1] != k:
            raise RuntimeError(
                f"mat1 and mat2 shapes cannot be multiplied ({len(x)}x{x.shape[-1]} and {k}x{n})"
            )
        data, weight, bias = x.data, self.weight.data, self.bias.data

        def product() -> Numbers:
            each = list(zip(rows(weight, k), bias, strict=True))
            return [dot(row, w) + b for row in rows(data, k) for w, b in each]

        def back(g: Numbers) -> tuple[Numbers | None, Numbers, Numbers]:
            inputs, by_input, by_output = columns(data, k), columns(weight, k), columns(g, n)
            of_x = (
                [dot(row, w) for row in rows(g, n) for w in by_input] if x.requires_grad else None
            )
            return (
                of_x,
                [dot(each, column) for each in by_output for column in inputs],
                list(map(sum, by_output)),
            )

        return Tensor(remembered(product), (*x.shape[:-1], n), (x, self.weight, self.bias), back)


class LayerNorm(Module):
    """Each row with mean 0 and variance 1, then scaled and shifted."""

    def __init__(self, width: int, eps: float = 1e-5):
        self.width, self.eps = width, eps
        self.weight, self.bias = Parameter(full((width,), 1.0)), Parameter(full((width,), 0.0))

    def forward(self, x: Tensor) -> Tensor:
        k, data, weight, shift = self.width, x.data, self.weight.data, self.bias.data

        def moments() -> list[tuple[float, float]]:
            means = [sum(row) / k for row in rows(data, k)]
            squares = (
                dot(row, row) / k - mean * mean
                for row, mean in zip(rows(data, k), means, strict=True)
            )
            return [
                (mean, 1 / math.sqrt(square + self.eps))
                for mean, square in zip(means, squares, strict=True)
            ]

        kept = remembered(moments)

        def normal() -> list[Numbers]:  # of what lies there now, as torch does
            return [
                [(v - mean) * scale for v in row]
                for row, (mean, scale) in zip(rows(data, k), kept, strict=True)
            ]

        def back(g: Numbers) -> tuple[Numbers, Numbers, Numbers]:
            of_x, of_weight = [], [0.0] * k
            for row, hat, (_, scale) in zip(rows(g, k), normal(), kept, strict=True):
                weighted = list(map(operator.mul, row, weight))
                mean, along = sum(weighted) / k, dot(weighted, hat) / k
                of_x += [scale * (v - mean - h * along) for v, h in zip(weighted, hat, strict=True)]
                of_weight = [
                    so_far + v * h for so_far, v, h in zip(of_weight, row, hat, strict=True)
                ]
            return of_x, of_weight, list(map(sum, columns(g, k)))

        made = remembered(
            lambda: [
                h * w + b for hat in normal() for h, w, b in zip(hat, weight, shift, strict=True)
            ]
        )
        return Tensor(made, x.shape, (x, self.weight, self.bias), back)


class GELU(Module):
    """GELU of each number."""

    def forward(self, x: Tensor) -> Tensor:
        return x.gelu()


class Sequential(Module):
    """Modules one after the other; a slice of it shares them."""

    def __init__(self, *modules: Module):
        self.listed = list(modules)

    def children(self) -> Iterator[Module]:
        return iter(self.listed)

    __iter__ = children

    def append(self, module: Module) -> Sequential:
        self.listed.append(module)
        return self

    def __len__(self) -> int:
        return len(self.listed)

    def __getitem__(self, key: int | slice) -> Module:
        return Sequential(*self.listed[key]) if isinstance(key, slice) else self.listed[key]

    def forward(self, x: object) -> object:
        for module in self.listed:
            x = module(x)
        return x


def mse_loss(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """The squares of the differences, their mean or their sum."""
    if output.shape != target.shape:
        raise RuntimeError(
            f"mse_loss: the shapes {list(output.shape)} and {list(target.shape)} differ"
        )
    off = output - target
    return (off * off).mean() if reduction == "mean" else (off * off).sum()


class SGD:
    """Each parameter minus the rate times its gradient."""

    def __init__(self, parameters: object, lr: float = 1e-3):
        self.parameters, self.lr = list(parameters), lr

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.numbers = remembered(
                    self._changed, parameter.numbers, parameter.grad.numbers
                )

    def _changed(self, weights: Numbers, gradient: Numbers) -> Numbers:
        return [w - self.lr * g for w, g in zip(weights, gradient, strict=True)]


class no_grad:  # noqa: N801 (as torch calls it)
    """Builds no graphs, in a `with`."""

    def __enter__(self) -> None:
        self.before, tensors.now.builds_graphs = tensors.now.builds_graphs, False

    def __exit__(self, *_: object) -> None:
        tensors.now.builds_graphs = self.before


class StandIn(types.ModuleType):
    """A module whose errors name what it lacks."""

    def __init__(self, name: str, /, **things: object):
        super().__init__(name)
        vars(self).update(things)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise lacks(f"{self.__name__}.{name}")


def _of_shape(value: float) -> Callable[..., Tensor]:
    return lambda *shape, **_: full(shape_of(shape), value)


def _like(value: float) -> Callable[..., Tensor]:
    return lambda tensor, **_: full(tensor.shape, value)


def _seed(seed: int) -> None:
    tensors.now.seed, tensors.now.draws = seed, 0


functional = StandIn("torch.nn.functional", mse_loss=mse_loss, gelu=Tensor.gelu)
layers = {each.__name__: each for each in (Parameter, Module, Linear, LayerNorm, Sequential, GELU)}
nn = StandIn("torch.nn", functional=functional, **layers)


def stand_in(distributed: StandIn) -> StandIn:
    """`torch`, with this torch.distributed."""
    unfilled = math.nan  # whoever uses such a tensor before it is filled, sees it
    return StandIn(
        "torch",
        nn=nn,
        distributed=distributed,
        optim=StandIn("torch.optim", SGD=SGD),
        autograd=StandIn("torch.autograd", grad=tensors.grad),
        cuda=StandIn("torch.cuda", device_count=lambda: 0, is_available=lambda: False),
        Tensor=Tensor,
        device=str,
        manual_seed=_seed,
        randn=lambda *shape, **_: tensors.drawn(shape_of(shape), lambda source: source.gauss(0, 1)),
        full=full,
        zeros=_of_shape(0.0),
        ones=_of_shape(1.0),
        empty=_of_shape(unfilled),
        zeros_like=_like(0.0),
        ones_like=_like(1.0),
        empty_like=_like(unfilled),
        tensor=tensors.tensor,
        no_grad=no_grad,
    )
