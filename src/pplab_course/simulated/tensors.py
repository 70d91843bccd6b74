"""Tensors of the stand-in for torch: flat lists of floats with a shape, and autograd on them.

`remembered` keeps what a rank has computed, in order, so that a rank that runs again from its start
repeats no arithmetic. It needs nothing but Python, and is fast enough for small layers.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

Numbers = list[float]
dot = getattr(math, "sumprod", None) or (lambda a, b: sum(map(operator.mul, a, b)))


class Computing:
    """The rank that computes now: what it has computed so far, its random numbers, and whether it
    builds graphs.
    """

    def __init__(self) -> None:
        self.known: list = []  # results, in the order in which they were asked for
        self.begin()

    def begin(self) -> None:
        """Go back to the start, but remember what was computed."""
        self.asked = self.seed = self.draws = 0
        self.builds_graphs, self.clock = True, 0.0

    def check(self) -> None:
        """Called before each computation; may raise."""

    def note(self, words: str) -> None:
        """Note that something suspicious happened here."""

    def called(self, module: object, given: tuple, output: object, start: float) -> None:
        """A module that was called at this time has returned."""

    def walks_back(self, walk: Callable[[], None]) -> None:
        """Walk back through a graph."""
        walk()


now = Computing()


def computes(who: Computing) -> Computing:
    """Let `who` compute from here on, and return who did before."""
    global now
    now, before = who, now
    return before


def remembered(function: Callable, *given: object) -> list:
    """function(*given), or its earlier result if this rank asked for it before."""
    now.check()
    if now.asked == len(now.known):
        now.known.append(function(*given))
    now.asked += 1
    return now.known[now.asked - 1]


def rows(data: Numbers, width: int) -> list[Numbers]:
    """A matrix's rows."""
    return [data[i : i + width] for i in range(0, len(data), width)]


def columns(data: Numbers, width: int) -> list[Numbers]:
    """A matrix's columns."""
    return [data[i::width] for i in range(width)]


def lacks(what: str) -> AttributeError:
    """The error for a part of torch that the stand-in hasn't got."""
    return AttributeError(
        f"{what} isn't in the course's stand-in for torch: run this file with torch, in the "
        "notebook"
    )


class Node:
    """How a tensor was made: from which tensors, and what turns its gradient into theirs."""

    def __init__(self, parents: tuple[Tensor, ...], back: Callable):
        self.parents, self.back = parents, back
        self.freed = False
        self.hooks: list[Callable] = []


class Tensor:
    """Numbers with a shape. A tensor made from others knows how, if one of them needs a
    gradient.
    """

    __hash__ = object.__hash__
    dtype, device = "float", "cpu"

    def __init__(
        self, data: Numbers, shape: Iterable[int], parents: tuple = (), back: Callable | None = None
    ):
        self.numbers, self.shape = data, tuple(shape)
        self.grad: Tensor | None = None
        self.requires_grad, self.node, self.samples = False, None, None
        self.feeds: list[Node] = []  # nodes that have used it
        if parents:
            self._comes_of(parents, back)
        self.awaits = ""  # the message that is to fill it, while nobody has waited for it

    def _comes_of(self, parents: tuple[Tensor, ...], back: Callable) -> None:
        for parent in parents:
            if parent.samples:  # the samples of the batch that it comes from, such as (0, 3)
                self.samples = parent.samples
            if parent.requires_grad and now.builds_graphs:
                self.requires_grad = True
        if self.requires_grad:
            self.node = Node(parents, back)
            for parent in parents:
                parent.feeds.append(self.node)

    @property
    def data(self) -> Numbers:
        """Its numbers, to be read. Reading them before their message has come is noted."""
        if self.awaits:
            now.note(f"a tensor is used whose message ({self.awaits}) nobody has waited for")
            self.awaits = ""
        return self.numbers

    def __getattr__(self, name: str) -> object:
        raise lacks(f"Tensor.{name}")

    is_leaf = property(lambda self: self.node is None)

    def size(self, dim: int | None = None) -> tuple[int, ...] | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def data_ptr(self) -> int:
        return id(self.numbers)

    def requires_grad_(self, on: bool = True) -> Tensor:
        self.requires_grad = on
        return self

    def detach(self) -> Tensor:
        made = Tensor(self.numbers, self.shape)
        made.samples, made.awaits = self.samples, self.awaits
        return made

    def clone(self) -> Tensor:
        return Tensor(list(self.data), self.shape, (self,), lambda g: (g,))

    def to(self, *_: object, **__: object) -> Tensor:
        return self

    contiguous = cpu = float = double = to

    def item(self) -> float:
        if self.numel() != 1:
            raise RuntimeError(
                f"a Tensor with {self.numel()} elements cannot be converted to Scalar"
            )
        return self.data[0]

    __float__ = item

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if not self.shape else repr(self)

    def __repr__(self) -> str:
        return f"tensor({self.numbers if self.numel() < 20 else '...'}, shape={list(self.shape)})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: int | slice) -> Tensor:
        if not isinstance(key, int | slice) or isinstance(key, slice) and key.step not in (None, 1):
            raise lacks(f"the index {key!r} of a tensor")
        if not self.shape:
            raise IndexError(f"a 0-dim tensor has no [{key}]")
        count, each = len(self), math.prod(self.shape[1:])
        if isinstance(key, int) and not -count <= key < count:
            raise IndexError(f"index {key} is out of bounds for dimension 0 with size {count}")
        start, stop, _ = (
            key.indices(count) if isinstance(key, slice) else (key % count, key % count + 1, 1)
        )
        shape = self.shape[1:] if isinstance(key, int) else (max(0, stop - start), *self.shape[1:])
        before, after = [0.0] * start * each, [0.0] * (count - max(start, stop)) * each
        data = self.data[start * each : stop * each]
        made = Tensor(data, shape, (self,), lambda g: (before + g + after,))
        if isinstance(key, slice) and self.is_leaf and len(self.shape) == 2:
            first = self.samples[0] if self.samples else 0
            made.samples = first + start, first + stop
        return made

    def tensor_split(self, parts: int) -> tuple[Tensor, ...]:
        each, more = divmod(len(self), parts)
        cuts = [i * each + min(i, more) for i in range(parts + 1)]
        return tuple(self[a:b] for a, b in zip(cuts, cuts[1:], strict=False))

    # ---- arithmetic
    def __add__(self, other: object) -> Tensor:
        return _elementwise(operator.add, lambda g, a, b: (g, g), self, other)

    def __sub__(self, other: object) -> Tensor:
        return _elementwise(operator.sub, lambda g, a, b: (g, [-x for x in g]), self, other)

    def __mul__(self, other: object) -> Tensor:
        return _elementwise(
            operator.mul, lambda g, a, b: (_product(g, b), _product(g, a)), self, other
        )

    def __truediv__(self, other: object) -> Tensor:
        return self * _each(_as_tensor(other), _reciprocal, lambda x: -(_reciprocal(x) ** 2))

    def __pow__(self, power: float) -> Tensor:
        return _each(self, lambda x: x**power, lambda x: power * x ** (power - 1))

    def __rsub__(self, other: object) -> Tensor:
        return _as_tensor(other) - self

    __radd__, __rmul__ = __add__, __mul__

    def abs(self) -> Tensor:
        return _each(self, abs, lambda x: math.copysign(1, x))

    def gelu(self) -> Tensor:
        erf, exp, root, density = math.erf, math.exp, math.sqrt(2), 1 / math.sqrt(2 * math.pi)
        return _each(
            self,
            lambda x: x * (0.5 * (1 + erf(x / root))),
            lambda x: 0.5 * (1 + erf(x / root)) + x * density * exp(-x * x / 2),
        )

    def sum(self) -> Tensor:
        size = self.numel()
        return Tensor([sum(self.data)], (), (self,), lambda g: (g * size,))

    def mean(self) -> Tensor:
        return self.sum() / max(1, self.numel())

    def max(self) -> Tensor:
        data = self.data
        top = max(range(len(data)), key=lambda i: math.inf if data[i] != data[i] else data[i])
        return Tensor(
            [data[top]], (), (self,), lambda g: ([g[0] * (i == top) for i in range(len(data))],)
        )

    # ---- in place
    def becomes(self, other: Tensor) -> Tensor:
        """Take the numbers of `other`, into the same memory."""
        if self.requires_grad and now.builds_graphs:
            raise RuntimeError(
                "a leaf Variable that requires grad is being used in an in-place operation."
            )
        self.numbers[:], self.samples = _widened(other, self.numel()), other.samples
        return self

    copy_ = becomes

    def zero_(self) -> Tensor:
        return self.becomes(full(self.shape, 0.0))

    def __iadd__(self, other: object) -> Tensor:
        return self.becomes((self + other).detach()) if self.is_leaf else self + other

    def __isub__(self, other: object) -> Tensor:
        return self.becomes((self - other).detach()) if self.is_leaf else self - other

    def backward(self, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        """Add to the gradients of all leaves from which it was made."""
        start = _first_gradient(self, gradient)
        if gradient is not None:
            same_samples(self, gradient)

        def walk() -> None:
            for leaf, found in gradients_of(self, start, retain_graph):
                if leaf.grad is None:
                    leaf.grad = Tensor(found, leaf.shape)
                    leaf.grad.samples = leaf.samples
                else:
                    leaf.grad.numbers = remembered(_sum, leaf.grad.numbers, found)

        now.walks_back(walk)


def _comparison(name: str) -> Callable[[Tensor, object], Tensor]:
    return lambda self, other: _elementwise(getattr(operator, name), None, self, other)


for comparison in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Tensor, comparison, _comparison(comparison))


def same_samples(a: Tensor, b: Tensor) -> None:
    """Note where two tensors meet that come from different samples of the batch."""
    if a.samples and b.samples and a.samples != b.samples:
        one, other = (f"samples {first} to {end - 1}" for first, end in (a.samples, b.samples))
        now.note(f"here {one} meet {other}")


def gradients_of(
    output: Tensor, start: Numbers, retain_graph: bool = False
) -> list[tuple[Tensor, Numbers]]:
    """The leaves from which an output was made, each with its gradient, if the output's gradient is
    `start`.
    """
    order, seen, stack = [], set(), [(output, False)]
    while stack:
        tensor, is_done = stack.pop()
        if is_done:
            order.append(tensor)
        elif id(tensor) not in seen and tensor.requires_grad:
            seen.add(id(tensor))
            stack.append((tensor, True))
            if tensor.node and tensor.node.freed:
                raise RuntimeError("Trying to backward through the graph a second time")
            stack += [(parent, False) for parent in (tensor.node.parents if tensor.node else ())]
    gradients, leaves = {id(output): start}, []
    for tensor in reversed(order):
        gradient, node = gradients.pop(id(tensor), None), tensor.node
        if node is None and gradient is not None:
            leaves.append((tensor, gradient))
        if node is None or gradient is None:
            continue
        for hook in node.hooks:
            hook(gradient)
        for parent, more in zip(node.parents, remembered(node.back, gradient), strict=True):
            if parent.requires_grad and more is not None:
                so_far = gradients.get(id(parent))
                gradients[id(parent)] = more if so_far is None else remembered(_sum, so_far, more)
        node.freed = not retain_graph
    return leaves


def _first_gradient(output: Tensor, gradient: Tensor | None) -> Numbers:
    if not output.requires_grad:
        raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
    if gradient is None and output.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    if gradient is not None and gradient.shape != output.shape:
        shapes = (
            f"grad_output[0] has a shape of {list(gradient.shape)} and output[0] has a shape of "
            f"{list(output.shape)}"
        )
        raise RuntimeError(f"Mismatch in shape: {shapes}.")
    return [1.0] if gradient is None else gradient.data


def grad(
    outputs: Tensor, inputs: Iterable[Tensor], grad_outputs: Tensor | None = None, **options: bool
) -> tuple:
    """torch.autograd.grad: the gradients of these inputs, which keep none."""
    start = _first_gradient(outputs, grad_outputs)
    found = {
        id(leaf): g for leaf, g in gradients_of(outputs, start, options.get("retain_graph", False))
    }
    inputs = [inputs] if isinstance(inputs, Tensor) else inputs
    return tuple(
        Tensor(found[id(each)], each.shape) if id(each) in found else None for each in inputs
    )


def _elementwise(function: Callable, back: Callable | None, a: Tensor, given: object) -> Tensor:
    """An operation on two tensors of one shape, or where one is a number, or a row for all rows of
    the other.
    """
    b = _as_tensor(given)
    shape = max(a.shape, b.shape, key=len)
    for each in (a, b):
        if shape[len(shape) - len(each.shape) :] != each.shape:
            raise RuntimeError(
                f"The size of tensor a {list(a.shape)} must match the size of tensor b "
                f"{list(b.shape)}"
            )
    same_samples(a, b)
    size = math.prod(shape)
    left, right = _widened(a, size), _widened(b, size)
    data = remembered(lambda: list(map(function, left, right)))
    if back is None:
        return Tensor(data, shape)

    def backward(g: Numbers) -> list[Numbers]:
        both = zip((a, b), back(g, left, right), strict=True)
        return [
            _narrowed(gradient, each.numel()) if each.requires_grad else None
            for each, gradient in both
        ]

    return Tensor(data, shape, (a, b), backward)


def _each(tensor: Tensor, function: Callable, slope: Callable) -> Tensor:
    data = tensor.data
    made = remembered(lambda: list(map(function, data)))
    return Tensor(made, tensor.shape, (tensor,), lambda g: (_product(g, map(slope, data)),))


def _as_tensor(value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, int | float):
        raise TypeError(f"expected a tensor or a number, got {type(value).__name__}")
    return Tensor([value], ())


def _widened(tensor: Tensor, size: int) -> Numbers:
    data = tensor.data
    return data if len(data) == size else data * (size // max(1, len(data)))


def _narrowed(gradient: Numbers, size: int) -> Numbers:
    return gradient if len(gradient) == size else [sum(gradient[i::size]) for i in range(size)]


def _sum(a: Numbers, b: Numbers) -> Numbers:
    return list(map(operator.add, a, b))


def _product(a: Iterable[float], b: Iterable[float]) -> Numbers:
    return list(map(operator.mul, a, b))


def _reciprocal(x: float) -> float:
    return 1 / x if x else math.inf


# ---- how tensors are made
# ------------------------------------------------------------------------------------------
def shape_of(given: tuple) -> tuple[int, ...]:
    """A shape given as numbers, or as one sequence of them."""
    return tuple(given[0]) if len(given) == 1 and not isinstance(given[0], int) else given


def full(shape: Iterable[int], value: float, **_: object) -> Tensor:
    """A tensor of one value."""
    shape = tuple(shape)
    return Tensor([value] * math.prod(shape), shape)


def drawn(shape: tuple[int, ...], draw: Callable[[random.Random], float]) -> Tensor:
    """A tensor of random numbers: Python's, not torch's, and the same ones after the same seed."""
    now.draws += 1
    source = random.Random(f"{now.seed}/{now.draws}")
    return Tensor(list(remembered(lambda: [draw(source) for _ in range(math.prod(shape))])), shape)


def tensor(values: object, **_: object) -> Tensor:
    """A tensor of nested lists of numbers, or of one number."""
    shape, flat = [], [values]
    while flat and isinstance(flat[0], list | tuple):
        shape.append(len(flat[0]))
        flat = list(chain.from_iterable(flat))
    return Tensor(flat, shape)
